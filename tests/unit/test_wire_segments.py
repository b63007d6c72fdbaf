"""Memory that processes of one host share: what lies where, for how long, and what is not believed of a peer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wirespeed import wire
from wirespeed.errors import DataError, MissingCapability
from wirespeed.units import MIB
from wirespeed.wire.segments import (
    TABLE_BYTES,
    OwnSegment,
    PeerSegment,
    Said,
    Segment,
    decode_said,
    encode_said,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create (Linux)")


def pair(num_bytes: int = 4 * MIB) -> tuple[OwnSegment, PeerSegment]:
    own = OwnSegment(num_bytes)
    return own, PeerSegment(own.offer, max_message_bytes=2 * MIB)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_looked_at_is_never_written_over_and_all_of_it_comes_back(data: st.DataObject) -> None:
    own, peer = pair(2 * MIB)
    held: list[tuple[memoryview, bytes]] = []
    source = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 60))):
        if held and source.random() < 0.5:
            held.pop(source.randrange(len(held)))
        payload = source.randbytes(source.choice([1, 100, 65_536, 65_537, 300_000, 1_000_000]))
        cut = source.randrange(len(payload) + 1)
        place = own.put([payload[:cut], memoryview(payload)[cut:]], len(payload))
        if place is not None:
            held.append((peer.view(place), payload))
        assert all(view == expected for view, expected in held)
        assert own.num_held == len(held)
    held.clear()
    # All of it again, in one piece: nothing is lost to blocks of other sizes.
    assert own.put([bytes(2 * MIB)], 2 * MIB) is not None


def test_a_block_is_held_by_any_view_of_it() -> None:
    own, peer = pair()
    place = own.put([b"abc" * 50_000], 150_000)
    assert place is not None
    part = peer.view(place)[10:20]
    gc.collect()
    assert own.num_held == 1
    assert part == b"bcabcabcab"
    del part
    assert own.num_held == 0


def test_a_full_segment_gives_nothing_and_what_was_not_told_of_is_free_again() -> None:
    own, peer = pair(MIB)
    places = [own.put([bytes(MIB // 4)], MIB // 4) for _ in range(4)]
    assert None not in places
    assert own.put([b"x"], 1) is None
    assert places[0] is not None
    own.take_back(places[0])
    again = own.put([b"y" * (MIB // 4)], MIB // 4)
    assert again is not None
    assert peer.view(again) == b"y" * (MIB // 4)


@pytest.mark.parametrize(
    ("number", "offset", "length"),
    [(0, 0, 10), (0, TABLE_BYTES, 0), (5000, TABLE_BYTES, 10), (0, TABLE_BYTES + 4 * MIB, 1), (0, 2**63, 5)],
)
def test_a_place_that_cannot_be_is_an_error(number: int, offset: int, length: int) -> None:
    _, peer = pair()
    with pytest.raises(DataError, match="block"):
        peer.view(number.to_bytes(4, "little") + offset.to_bytes(8, "little") + length.to_bytes(4, "little"))
    with pytest.raises(DataError, match="place"):
        peer.view(b"123")


def test_a_message_in_memory_may_be_no_larger_than_one_on_the_socket() -> None:
    own, peer = pair(8 * MIB)
    fits, too_large = own.put([bytes(2 * MIB)], 2 * MIB), own.put([bytes(2 * MIB + 1)], 2 * MIB + 1)
    assert fits is not None
    assert too_large is not None
    assert len(peer.view(fits)) == 2 * MIB
    with pytest.raises(DataError, match="expected at most 2097152"):
        peer.view(too_large)


def test_a_block_that_is_still_looked_at_is_not_taken_twice() -> None:
    own, peer = pair()
    place = own.put([b"abc"], 3)
    assert place is not None
    view = peer.view(place)
    with pytest.raises(DataError, match="block 0"):
        peer.view(place)
    assert view == b"abc"


def test_only_a_sealed_segment_of_this_user_is_mapped(tmp_path: Path) -> None:
    own = OwnSegment(MIB)
    offer = own.offer
    (tmp_path / "file").write_bytes(bytes(offer.num_bytes))
    reader, writer = os.pipe()
    unsealed = os.memfd_create("wirespeed-x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, offer.num_bytes)
    try:
        with (tmp_path / "file").open("r+b") as file:
            wrong = [
                msgspec.structs.replace(offer, process=2**22 + 1),
                msgspec.structs.replace(offer, descriptor=file.fileno()),
                msgspec.structs.replace(offer, descriptor=reader),
                msgspec.structs.replace(offer, descriptor=unsealed, name="wirespeed-x"),
                msgspec.structs.replace(offer, num_bytes=offer.num_bytes + 4096),
                msgspec.structs.replace(offer, num_bytes=2**40),
                msgspec.structs.replace(offer, name="other"),
                msgspec.structs.replace(offer, name="wirespeed-0123"),
            ]
            for one in wrong:
                with pytest.raises(MissingCapability):
                    PeerSegment(one, max_message_bytes=MIB)
    finally:
        for descriptor in (reader, writer, unsealed):
            os.close(descriptor)
    PeerSegment(offer, max_message_bytes=MIB)
    own.close()
    with pytest.raises(MissingCapability):
        PeerSegment(offer, max_message_bytes=MIB)  # closed once the peer has it: nobody else can map it


@given(st.binary(max_size=60))
def test_damaged_offers_are_errors(payload: bytes) -> None:
    with contextlib.suppress(DataError):
        decode_said(payload)
    said = Said(segment=Segment(1, 2, 3, "n"), refused="")
    assert decode_said(encode_said(said)) == said


# --- connections


def run_with(
    use: object, *, server_limits: wire.Limits | None = None, limits: wire.Limits | None = None, host: str = "127.0.0.1"
) -> None:
    async def body() -> None:
        handlers = {"echo": lambda request: request.payload, "sum": lambda request: str(sum(request.payload)).encode()}
        async with (
            await wire.listen("127.0.0.1:0" if host == "127.0.0.1" else "0.0.0.0:0", handlers,
                              limits=server_limits, security=wire.Security(is_insecure=True)) as server,
            await wire.connect(f"{host}:{server.address.rpartition(':')[2]}", limits=limits) as connection,
        ):  # fmt: skip
            await use(connection, server)  # type: ignore[operator]

    wire.run(body())


def test_large_messages_of_one_host_leave_the_socket() -> None:
    async def use(connection: wire.Connection, _: wire.Server) -> None:
        payload = os.urandom(MIB)
        for _ in range(20):
            assert (await connection.call("echo", payload)).payload == payload
        assert connection.describe()["shared memory"] == "on, 64 MiB"
        before = connection.sent_bytes, connection.received_bytes
        for size in (40_000, MIB, 3 * MIB + 1):
            meta = b"m" * 100
            reply = await connection.call("echo", [payload[:5], payload[5:size], bytes(max(0, size - MIB))], meta=meta)
            assert bytes(reply.payload) == payload[:size] + bytes(max(0, size - MIB))
        assert connection.sent_bytes - before[0] < 2000
        assert connection.received_bytes - before[1] < 2000

    run_with(use)


def test_replies_that_are_kept_stay_as_they_are_and_the_rest_takes_the_socket() -> None:
    async def use(connection: wire.Connection, _: wire.Server) -> None:
        kept: list[tuple[object, bytes]] = []
        for turn in range(120):  # a segment of 4 MiB holds four of these
            payload = turn.to_bytes(4, "little") * 200_000
            reply = await connection.call("echo", payload)
            kept.append((reply.payload, payload))
        assert all(bytes(view) == payload for view, payload in kept)  # type: ignore[call-overload]
        into = memoryview(bytearray(800_000))
        kept.clear()
        reply = await connection.call("echo", b"z" * 800_000, into=into)
        assert reply.payload == into == b"z" * 800_000

    small = wire.Limits(segment_bytes=4 * MIB)
    run_with(use, server_limits=small, limits=small)


@pytest.mark.parametrize("side", ["client", "server", "address"])
def test_where_memory_is_not_shared_messages_take_the_socket(side: str) -> None:
    off = wire.Limits(segment_bytes=0)

    async def use(connection: wire.Connection, _: wire.Server) -> None:
        payload = os.urandom(MIB)
        for _ in range(5):
            assert (await connection.call("echo", payload)).payload == payload
        assert connection.describe()["shared memory"].startswith("off")
        assert connection.received_bytes > 5 * MIB

    run_with(
        use,
        server_limits=off if side == "server" else None,
        limits=off if side == "client" else None,
        host="127.0.0.2" if side == "address" else "127.0.0.1",
    )


def test_a_server_shares_no_more_memory_than_it_may_hold() -> None:
    limits = wire.Limits(memory_bytes=96 * MIB)  # one segment of 64 MiB

    async def use(connection: wire.Connection, server: wire.Server) -> None:
        payload = bytes(MIB)
        async with await wire.connect(server.address) as second:
            for one in (connection, second, connection, second):
                for _ in range(3):
                    assert (await one.call("echo", payload)).payload == payload
            assert [connection.received_bytes > 8 * MIB, second.received_bytes > 5 * MIB] == [False, True]
            assert second.sent_bytes > 5 * MIB
            assert "as much memory as it may" in second.describe()["shared memory"]

    run_with(use, server_limits=limits)


def test_a_lie_about_memory_ends_the_connection() -> None:
    async def use(connection: wire.Connection, _: wire.Server) -> None:
        sender = connection._sender
        assert sender is not None
        assert sender.send_now(13, 0, 9, b"", (bytes(16),), 16, 1000)
        with pytest.raises(wire.CallFailed, match="memory that is not shared"):
            await connection.call("echo", b"x")

    run_with(use)


_SERVER = """
import asyncio, sys
from wirespeed import wire
async def main():
    async with await wire.listen("127.0.0.1:0", {"echo": lambda request: request.payload}) as server:
        print(server.address, flush=True)
        await asyncio.Event().wait()
wire.run(main())
"""


def test_a_view_outlives_the_process_that_wrote_it() -> None:
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()

        async def body() -> None:
            connection = await wire.connect(address)
            payload = os.urandom(MIB)
            replies = [await connection.call("echo", payload) for _ in range(6)]
            assert connection.describe()["shared memory"].startswith("on")
            process.send_signal(signal.SIGKILL)
            with pytest.raises(wire.CallFailed):
                await asyncio.gather(*(connection.call("echo", payload) for _ in range(20)))
            await connection.close()
            assert all(reply.payload == payload for reply in replies)

        wire.run(body())
        process.wait(10)


def test_no_descriptor_is_left_open() -> None:
    async def use(connection: wire.Connection, server: wire.Server) -> None:
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            async with await wire.connect(server.address) as other:
                for _ in range(4):
                    await other.call("echo", bytes(MIB))
        await asyncio.sleep(0.05)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before

    run_with(use)
