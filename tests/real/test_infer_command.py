"""`wirespeed infer` as users start it: here and over nodes that die, stop, are slow or return; killed and run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from infer_models import Node, check_results, hurry, make_images, make_model, wait_for

TOKEN = "a-token-of-enough-length"


@contextmanager
def nodes_of(*folders: Path, env: dict[str, str] | None = None) -> Iterator[list[Node]]:
    nodes = [Node(folder, env=env) for folder in folders]
    try:
        yield [node.wait_open() for node in nodes]
    finally:
        for node in nodes:
            node.close()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "wirespeed", "infer", *map(str, arguments)]


def infer(
    *arguments: object, env: dict[str, str] | None = None, timeout: float = 90
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
        check=False,
    )


def over(nodes: list[Node]) -> tuple[str, str]:
    return "--nodes", ",".join(node.address for node in nodes)


def test_a_folder_through_a_model_on_this_host(tmp_path: Path) -> None:
    model = make_model(tmp_path / "models")
    paths = make_images(tmp_path / "images", 60, special={7: b"bad", 11: b"kills the worker"})
    (tmp_path / "images" / "00020.jpg").write_bytes(b"")
    out = tmp_path / "r.parquet"
    done = infer(tmp_path / "images", "--model", model, "--out", out, "--json")
    assert done.returncode == 1, done.stderr
    check_results(out, paths, errors={7: "ValueError: no image", 11: "died", 20: "it is empty"})
    told = json.loads(done.stdout)
    assert (told["num_inputs"], told["num_ok"], told["num_errors"]) == (60, 57, 3)
    assert told["per_node"] == {"this host": 57}
    assert not list(tmp_path.glob("*.partial"))
    again = infer(tmp_path / "images", "--model", model, "--out", out)
    assert again.returncode == 2
    assert "r.parquet exists; expected a new file; hint: say --overwrite" in again.stderr


@pytest.mark.slow
def test_nodes_share_the_inputs_and_each_comes_back_once(tmp_path: Path) -> None:
    # The job's 2 s of model are long beside the moments for which a busy machine lets one node wait.
    make_model(tmp_path / "models", row_s=0.02)
    paths = make_images(tmp_path / "images", 300, special={5: b"bad"})
    env = {"WIRESPEED_TOKEN": TOKEN}
    with nodes_of(*[tmp_path / "models"] * 3, env=env) as nodes:
        out = tmp_path / "r.parquet"
        refused = infer(tmp_path / "images", *over(nodes), "--out", out, env={"WIRESPEED_TOKEN": "x" * 20})
        assert refused.returncode == 4
        assert "the token is not this server's" in refused.stderr
        done = infer(tmp_path / "images", *over(nodes), "--out", out, "--features", "fp32", "--json", env=env)
        assert done.returncode == 1, done.stderr
        check_results(out, paths, errors={5: "ValueError: no image"})
        told = json.loads(done.stdout)
        assert sum(told["per_node"].values()) == 299
        assert all(count > 50 for count in told["per_node"].values())
        assert told["management_bytes"] < 1024 * 3 * (told["seconds"] + 2)
        hurry(tmp_path / "models")
        for encoding, kind in (("fp16", "halffloat"), ("int8", "int8")):
            done = infer(
                tmp_path / "images", *over(nodes), "--out", out, "--features", encoding, "--overwrite", env=env
            )
            assert done.returncode == 1, done.stderr
            table = pq.read_table(out)
            assert str(table.schema.field("features").type.value_type) == kind
            assert table.num_rows == 300
        named = infer(tmp_path / "images", *over(nodes), "--model", "nothing", "--out", tmp_path / "n.parquet", env=env)
        assert named.returncode == 2
        assert "no node has a model 'nothing'; expected digest" in named.stderr


@pytest.mark.slow
def test_nodes_killed_and_stopped_lose_nothing_and_one_that_returns_works_again(tmp_path: Path) -> None:
    make_model(tmp_path / "models", row_s=0.03)  # one node alone would take 45 s
    paths = make_images(tmp_path / "images", 1500)
    said = tmp_path / "said"
    with nodes_of(*[tmp_path / "models"] * 3) as nodes, said.open("wb") as stderr:
        out = tmp_path / "r.parquet"
        job = subprocess.Popen(
            command(tmp_path / "images", *over(nodes), "--out", out, "--json"), stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
        partial = tmp_path / "r.parquet.partial"
        wait_for(lambda: partial.exists() and partial.stat().st_size > 20_000, "some results are written")
        nodes[0].process.kill()
        nodes[1].process.send_signal(signal.SIGSTOP)
        reborn = Node(tmp_path / "models", address=nodes[0].address).wait_open()
        try:
            wait_for(lambda: "is back" in said.read_text() or job.poll() is not None, "the node that returned is used")
            wait_for(
                lambda: f"node {nodes[1].address} is out" in said.read_text() or job.poll() is not None,
                "the node that was stopped is given up",
            )
            hurry(tmp_path / "models")
            stdout, _ = job.communicate(timeout=90)
        finally:
            nodes[1].process.send_signal(signal.SIGCONT)
            reborn.close()
        assert job.returncode == 0, said.read_text()
        check_results(out, paths)
        told = json.loads(stdout)
        assert told["num_again"] > 0
        assert f"node {nodes[0].address} is out" in said.read_text()
        assert f"node {nodes[0].address} is back" in said.read_text()
        assert f"node {nodes[1].address} is out" in said.read_text()


@pytest.mark.slow
def test_a_node_ten_times_slower_does_not_hold_up_the_end(tmp_path: Path) -> None:
    make_model(tmp_path / "fast", row_s=0.01)
    make_model(tmp_path / "slow", row_s=0.1)
    paths = make_images(tmp_path / "images", 600)
    with nodes_of(tmp_path / "fast", tmp_path / "fast", tmp_path / "fast", tmp_path / "slow") as nodes:
        out = tmp_path / "r.parquet"
        done = infer(tmp_path / "images", *over(nodes), "--out", out, "--json")
        assert done.returncode == 0, done.stderr
        check_results(out, paths)
        told = json.loads(done.stdout)
        # In proportion to speed the slow one gets 600 / 31 = 19; a quarter would be 150.
        assert told["per_node"].get(nodes[3].address, 0) < 60


def test_a_dispatcher_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    make_model(tmp_path / "models", row_s=0.02)
    paths = make_images(tmp_path / "images", 1200, special={3: b"bad"})
    with nodes_of(*[tmp_path / "models"] * 2) as nodes:
        out = tmp_path / "r.parquet"
        arguments = command(tmp_path / "images", *over(nodes), "--out", out, "--json")
        partial = tmp_path / "r.parquet.partial"
        for number in (signal.SIGKILL, signal.SIGTERM):
            least = 20_000 + (partial.stat().st_size if partial.exists() else 0)
            job = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            wait_for(
                lambda least=least: partial.exists() and partial.stat().st_size > least, "some results are written"
            )
            job.send_signal(number)
            _, stderr = job.communicate(timeout=60)
            assert not out.exists()
            assert job.returncode == (-9 if number == signal.SIGKILL else 130), stderr
        assert "the same command goes on from here" in stderr
        hurry(tmp_path / "models")
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 1, done.stderr
        check_results(out, paths, errors={3: "ValueError: no image"})
        told = json.loads(done.stdout)
        assert 150 < told["num_resumed"] < 1200
        assert sum(told["per_node"].values()) < 1200 - 150


@pytest.mark.slow
def test_an_input_that_kills_nodes_is_an_error_and_the_others_are_not(tmp_path: Path) -> None:
    make_model(tmp_path / "models", row_s=0.001)
    paths = make_images(tmp_path / "images", 80, special={40: b"kills the node"})
    with nodes_of(*[tmp_path / "models"] * 6) as nodes:
        out = tmp_path / "r.parquet"
        done = infer(tmp_path / "images", *over(nodes), "--out", out)
        assert done.returncode == 1, done.stderr
        check_results(out, paths, errors={40: "3 nodes were lost while they ran it alone"})


def test_without_any_node_left_the_job_ends_and_says_how_to_go_on(tmp_path: Path) -> None:
    make_model(tmp_path / "models", row_s=0.01)
    make_images(tmp_path / "images", 400)
    with nodes_of(tmp_path / "models") as nodes:
        out = tmp_path / "r.parquet"
        job = subprocess.Popen(
            command(tmp_path / "images", *over(nodes), "--out", out, "--patience", "500 ms"),
            stderr=subprocess.PIPE,
            text=True,
        )
        partial = tmp_path / "r.parquet.partial"
        wait_for(lambda: partial.exists() and partial.stat().st_size > 5_000, "some results are written")
        nodes[0].process.kill()
        _, stderr = job.communicate(timeout=60)
        assert job.returncode == 4
        assert "nobody has run inputs for 0.5 s" in stderr
        assert "results are safe: mend the nodes and run the same command again" in stderr


def test_a_drained_node_finishes_what_it_has_and_one_that_is_not_there_is_not_waited_for(tmp_path: Path) -> None:
    make_model(tmp_path / "models", row_s=0.02)
    paths = make_images(tmp_path / "images", 600)
    with nodes_of(*[tmp_path / "models"] * 2) as nodes:
        out = tmp_path / "r.parquet"
        job = subprocess.Popen(
            command(tmp_path / "images", "--nodes", f"{over(nodes)[1]},127.0.0.1:1", "--out", out),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        partial = tmp_path / "r.parquet.partial"
        wait_for(lambda: partial.exists() and partial.stat().st_size > 10_000, "some results are written")
        nodes[0].process.terminate()
        assert nodes[0].process.wait(60) == 0
        assert job.poll() is None, "the other node goes on"
        hurry(tmp_path / "models")
        _, stderr = job.communicate(timeout=60)
        assert job.returncode == 0, stderr
        check_results(out, paths)
        assert "going on without node 127.0.0.1:1 for now" in stderr


# A small disk that fills, and then has room: the same command twice, and what came of it beside the disk.
FULL = """
mount -t tmpfs -o size=200k tmpfs "$1" || exit 99
space=$1
shift
"$@"
echo "first: $?" >&2
mount -o remount,size=20m "$space" || exit 99
"$@"
echo "second: $?" >&2
cp "$space"/* "$space/.."
"""


def test_a_full_disk_ends_the_job_and_with_more_room_it_goes_on_where_it_was(tmp_path: Path) -> None:
    space = tmp_path / "space"
    space.mkdir()
    probe = subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            FULL,
            "sh",
            str(space),
            "touch",
            str(space / "x"),
        ],
        capture_output=True,
        check=False,
    )
    if probe.returncode != 0:
        pytest.skip("no right to mount a small disk")
    model = make_model(tmp_path / "models")
    paths = make_images(tmp_path / "images", 3000)
    done = subprocess.run(
        [
            "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FULL, "sh", str(space),
            *command(tmp_path / "images", "--model", model, "--out", space / "r.parquet", "--json"),
        ],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "first: 3\n" in done.stderr
    assert "second: 0\n" in done.stderr
    assert "No space left on device" in done.stderr
    assert "results are safe: free some space and run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["num_resumed"] > 100
    check_results(tmp_path / "r.parquet", paths)
    assert not list(space.iterdir())  # it was the small disk's
