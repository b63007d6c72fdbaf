"""Nodes and the process that spreads requests over them: calls, heartbeats, loss, retries, malformed frames."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from infer_models import Node, expected_features, make_model
from wirespeed import wire
from wirespeed.errors import PeerFailure
from wirespeed.serve.client import InferenceClient
from wirespeed.serve.heartbeat import Beat, decode_beat
from wirespeed.serve.node_link import LinkTimes, NodeLink, NodeState
from wirespeed.serve.node_messages import InferHead, ScatterHead, encode_meta
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.router import Router, expected_wait_s
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import from_array, to_array


@contextmanager
def nodes_of(folder: Path, count: int) -> Iterator[list[Node]]:
    nodes = [Node(folder) for _ in range(count)]
    try:
        yield [node.wait_open() for node in nodes]
    finally:
        for node in nodes:
            node.close()


def request_of(content: bytes) -> InferRequest:
    return InferRequest([from_array("image", np.array([content], object))])


async def wait_state(link: NodeLink, state: NodeState, timeout_s: float) -> float:
    """How long it took, in the time for which this process was awake: a core that it did not get is not the link's."""
    loop = asyncio.get_running_loop()
    took_s = 0.0
    while link.state is not state:
        assert took_s < timeout_s, f"{link.state} after {timeout_s} s: {link.reason}"
        begin_s = loop.time()
        await asyncio.sleep(0.01)
        took_s += min(loop.time() - begin_s, 0.05)
    return took_s


async def wait_under_way(*links: NodeLink) -> None:
    async with asyncio.timeout(60):
        while not any(link.num_under_way for link in links):
            await asyncio.sleep(0.01)


def test_requests_are_answered_by_all_nodes_and_wrong_ones_keep_their_reason(tmp_path: Path) -> None:
    make_model(tmp_path / "models", row_s=0.002)

    async def main(nodes: list[Node]) -> None:
        router = Router([node.address for node in nodes], security=wire.Security())
        await router.open()
        try:
            contents = [os.urandom(500 + i) for i in range(60)]
            answers = await asyncio.gather(*(router.infer("digest", "", request_of(c), timeout_s=20) for c in contents))
            for content, answer in zip(contents, answers, strict=True):
                assert {t.name: to_array(t).tolist() for t in answer} == {
                    "features": [expected_features(content)], "size": [len(content)],
                }  # fmt: skip
            assert all(link.models["digest"].config.output[0].name == "features" for link in router.links)
            for model, content, reason in (("nothing", b"x", Reason.NOT_FOUND), ("digest", b"bad", Reason.FAILED)):
                with pytest.raises(RequestFailed) as caught:
                    await router.infer(model, "", request_of(content), timeout_s=20)
                assert caught.value.reason is reason
        finally:
            await router.close()

    with nodes_of(tmp_path / "models", 2) as nodes:
        wire.run(main(nodes))


def test_a_killed_node_is_out_at_once_and_a_stopped_one_within_three_seconds(tmp_path: Path) -> None:
    make_model(tmp_path / "models", row_s=0.5)

    async def main(nodes: list[Node]) -> None:
        router = Router([node.address for node in nodes], security=wire.Security())
        await router.open()
        first, second, third = router.links
        try:
            for hurt, number, link, most_s in (
                (nodes[0], signal.SIGKILL, first, 1.0),
                (nodes[1], signal.SIGSTOP, second, 3.0),
            ):
                contents, before = [bytes([number, i]) for i in range(9)], router.num_retried
                calls = [
                    asyncio.ensure_future(router.infer("digest", "", request_of(content), timeout_s=30))
                    for content in contents
                ]
                await wait_under_way(link)
                hurt.process.send_signal(number)
                assert await wait_state(link, NodeState.LOST, most_s) < most_s
                answers = await asyncio.gather(*calls)  # each ran, or ran once more elsewhere
                assert [to_array(answer[0]).tolist() for answer in answers] == [
                    [expected_features(c)] for c in contents
                ]
                assert router.num_retried > before
            assert second.was_silent
            assert not first.was_silent
            nodes[1].process.send_signal(signal.SIGCONT)
            await wait_state(second, NodeState.UP, 60.0)
            assert third.state is NodeState.UP
        finally:
            nodes[1].process.send_signal(signal.SIGCONT)
            await router.close()

    with nodes_of(tmp_path / "models", 3) as nodes:
        wire.run(main(nodes))


def test_a_request_that_must_not_run_twice_is_not_sent_again(tmp_path: Path) -> None:
    model = make_model(tmp_path / "models", row_s=60)  # it ends with its node
    (model / "model.toml").write_text("idempotent = false\n" + (model / "model.toml").read_text())

    async def main(nodes: list[Node]) -> None:
        router = Router([node.address for node in nodes], security=wire.Security())
        await router.open()
        try:
            call = asyncio.ensure_future(router.infer("digest", "", request_of(b"x"), timeout_s=30))
            await wait_under_way(*router.links)
            await asyncio.sleep(0.1)
            busy = next(place for place, link in enumerate(router.links) if link.num_under_way)
            nodes[busy].process.kill()
            with pytest.raises(RequestFailed) as caught:
                await call
            assert caught.value.reason is Reason.UNAVAILABLE
            assert router.num_retried == 0
        finally:
            await router.close()

    with nodes_of(tmp_path / "models", 2) as nodes:
        wire.run(main(nodes))


def test_beats_are_few_small_and_counted(tmp_path: Path) -> None:
    make_model(tmp_path / "models")

    async def main(node: Node) -> None:
        link = NodeLink(node.address, security=wire.Security())
        link.start()
        try:
            await wait_state(link, NodeState.UP, 60.0)
            before, beats = link.management_bytes, link.num_beats
            loop = asyncio.get_running_loop()
            begin_s = loop.time()
            # Under load, so that changes are told too. A busy machine may be late with the second beat.
            while loop.time() - begin_s < 2.5 or (link.num_beats - beats < 2 and loop.time() - begin_s < 30):
                await asyncio.gather(*(link.infer("digest", "", request_of(b"x"), timeout_s=60) for _ in range(40)))
            took_s = loop.time() - begin_s
            assert 2 <= link.num_beats - beats <= 2 * took_s + 2
            assert (link.management_bytes - before) / took_s < 300
            assert link.beat is not None
            assert link.beat.instances == 1
            assert link.beat.rows > 0
            assert link.beat.memory_bytes > 2**28
        finally:
            await link.close()

    with nodes_of(tmp_path / "models", 1) as nodes:
        wire.run(main(nodes[0]))


def test_malformed_calls_are_refused_and_the_node_goes_on(tmp_path: Path) -> None:
    make_model(tmp_path / "models")

    async def main(node: Node) -> None:
        async with await wire.connect(node.address) as connection:
            rng = np.random.default_rng(7)
            statuses = set()
            for method in ("infer", "scatter", "beat"):
                for _ in range(60):
                    meta, payload = rng.bytes(int(rng.integers(0, 60))), rng.bytes(int(rng.integers(0, 200)))
                    try:
                        reply = await connection.call(method, payload, meta=meta, timeout_s=60)
                    except wire.CallFailed as fault:
                        statuses.add(fault.status)
                    else:
                        assert method == "beat", (meta, reply.payload)
            assert statuses == {wire.Status.INVALID}
            content = b"some image"
            whole = {
                "scatter": ScatterHead("digest", "", "fp32", [len(content)] * 2),
                "infer": InferHead("digest", "", [("image", "BYTES", (1,), 4 + len(content))]),
            }
            for method, head in whole.items():
                element = len(content).to_bytes(4, "little") + content
                payload = element * len(head.sizes if isinstance(head, ScatterHead) else head.tensors)
                assert (await connection.call(method, payload, meta=encode_meta(head), timeout_s=60)).payload
                for _ in range(150):
                    meta, changed = bytearray(encode_meta(head)), bytearray(payload)
                    for damaged in (meta, changed):
                        damaged[int(rng.integers(0, len(damaged)))] = int(rng.integers(0, 256))
                    # It may still be a call: of another model, say, which is an answer that says so.
                    call = connection.call_soon(method, bytes(changed), meta=bytes(meta), timeout_s=60)
                    await asyncio.wait([call])
                    fault_or_none = call.exception()
                    if fault_or_none is not None:
                        assert isinstance(fault_or_none, wire.CallFailed)
                        assert fault_or_none.status is wire.Status.INVALID, (method, bytes(meta), fault_or_none)
            decode_beat((await connection.call("beat", bytes(4), timeout_s=60)).payload)
        link = NodeLink(node.address, security=wire.Security())
        link.start()
        await wait_state(link, NodeState.UP, 60.0)
        result = await link.scatter("digest", "", "fp32", [b"abc", b"bad", b""], timeout_s=60)
        assert [places for places, _ in result.groups] == [[0, 2]]
        assert [(place, reason) for place, reason, _ in result.failures] == [(1, Reason.FAILED)]
        await link.close()

    with nodes_of(tmp_path / "models", 1) as nodes:
        wire.run(main(nodes[0]))


def test_a_peer_that_is_no_node_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with await wire.listen("127.0.0.1:0", {"other": lambda request: b""}) as server:
            router = Router([server.address], security=wire.Security(), times=LinkTimes(connect_s=1.0))
            with pytest.raises(PeerFailure, match=r"none of 1 nodes answers.*has no method"):
                await router.open(timeout_s=2.0)

    wire.run(main())


def test_the_expected_wait_counts_others_by_the_beat_and_ours_by_ourselves() -> None:
    beat = decode_beat_of(queued=10, in_flight=2, instances=2, row_s=0.01)
    # 12 on the node, 5 of them ours; 7 of ours now: (12 - 5 + 7) rows over 2 instances.
    assert expected_wait_s(7, 5, beat) == pytest.approx(14 * 0.01 / 2)
    assert expected_wait_s(3, 0, None) == pytest.approx(0.003)


def decode_beat_of(*, queued: int, in_flight: int, instances: int, row_s: float) -> Beat:
    return Beat(
        number=1, boot=1, is_ready=True, is_draining=False, queued=queued, in_flight=in_flight, latency_s=0.0,
        compute_s_per_row=row_s, rows=1, memory_used_bytes=0, memory_bytes=0, instances=instances, device_use=None,
    )  # fmt: skip


def test_the_doors_of_a_dispatcher_answer_while_nodes_die(tmp_path: Path) -> None:
    make_model(tmp_path / "models", row_s=0.005)
    with nodes_of(tmp_path / "models", 2) as nodes:
        front = subprocess.Popen(
            [
                sys.executable, "-m", "wirespeed", "serve", "--nodes", ",".join(node.address for node in nodes),
                "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--json",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            assert front.stdout is not None
            text = ""
            while not text.endswith("}\n"):
                line = front.stdout.readline()
                assert line, "the dispatcher ended"
                text += line
            doors = json.loads(text)
            assert doors["models"] == ["digest"]

            async def main() -> None:
                async with InferenceClient(doors["grpc"]) as client:
                    assert (await client.metadata("digest")).inputs[0].name == "image"

                    async def ask(place: int) -> None:
                        content = place.to_bytes(4, "little") * 50
                        got = await client.infer("digest", {"image": np.array([content], object)}, timeout_s=30)
                        assert got["features"].tolist() == [expected_features(content)]

                    calls = [asyncio.ensure_future(ask(place)) for place in range(200)]
                    await asyncio.sleep(0.3)
                    nodes[0].process.kill()
                    await asyncio.gather(*calls)

            wire.run(main())
            front.send_signal(signal.SIGTERM)
            assert front.wait(60) == 0
        finally:
            front.kill()
            front.communicate(timeout=60)
