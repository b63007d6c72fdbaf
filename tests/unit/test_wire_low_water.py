"""Large payloads are waited for in large parts, and nothing is waited for longer than it is on its way."""

from __future__ import annotations

import asyncio
import socket
from typing import Literal

from wirespeed import wire
from wirespeed.wire.buffers import BufferPool
from wirespeed.wire.frames import Header, Kind, pack_header
from wirespeed.wire.reader import LEAST_WAIT_BYTES, WORTH_WAITING_BYTES, FrameReader, Payload, Placement


class Owner:
    def __init__(self) -> None:
        self.got: list[bytes] = []

    def place(self, header: Header) -> memoryview | Literal[Placement.DROP, Placement.WAIT]:
        return memoryview(bytearray(header.total))

    def deliver(self, header: Header, meta: bytes, payload: Payload | None) -> None:
        self.got.append(bytes(payload or b""))


def feed(reader: FrameReader, content: bytes, step: int) -> None:
    at = 0
    while at < len(content):
        view = reader.get_buffer(0)
        num = min(len(view), step, len(content) - at)
        view[:num] = content[at : at + num]
        at += num
        reader.buffer_updated(num)


def frame(payload: bytes, stream: int) -> bytes:
    size = len(payload)
    return pack_header(Kind.REPLY, 0, 0, stream, size, 0, size, 0) + payload


def test_what_is_waited_for_is_always_still_to_come_and_ends_with_the_frame() -> None:
    told: list[int] = []
    owner = Owner()
    reader = FrameReader(owner, allowed=frozenset(Kind), max_message_bytes=1 << 24, expect=told.append)
    large = bytes(range(256)) * 4096  # 1 MiB
    feed(reader, frame(large, 1) + frame(b"small", 2) + frame(large, 3), step=100_000)
    assert owner.got == [large, b"small", large]
    assert told[0] == WORTH_WAITING_BYTES
    assert told[-1] == 0
    assert max(told) == WORTH_WAITING_BYTES
    # Once per frame it is taken back: what follows may be small.
    assert told.count(0) == 2


def test_the_rest_of_a_medium_payload_is_waited_for_and_nothing_behind_it() -> None:
    told: list[int] = []
    owner = Owner()
    reader = FrameReader(
        owner, allowed=frozenset(Kind), max_message_bytes=1 << 24, pool=BufferPool(), expect=told.append
    )
    medium = bytes(range(250)) * 800  # 200,000 bytes
    feed(reader, frame(medium, 1) + frame(medium, 2) + frame(b"small", 3) + frame(medium, 4), step=16_000)
    assert owner.got == [medium, medium, b"small", medium]
    # Never more than what is missing of the frame, and at last, when less than 32 KiB is, nothing.
    assert max(told) <= 200_032
    assert all(count == 0 or count >= LEAST_WAIT_BYTES for count in told)
    assert told.count(0) == 3
    assert told[-1] == 0


def test_a_payload_that_stops_half_way_does_not_hide_what_has_come() -> None:
    async def main() -> None:
        def half(request: wire.Request) -> bytes:
            return bytes(3_000_000)

        limits = wire.Limits(keepalive_s=0.2)
        async with await wire.listen("127.0.0.1:0", {"half": half}, limits=limits) as server:
            connection = await wire.connect(server.address, limits=limits)
            reply = await connection.call("half")
            assert len(reply.payload) == 3_000_000
            held = connection._socket
            assert held is not None
            assert held.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
            # As in the middle of a payload whose sender has stopped: the next look, within a keepalive, takes it back.
            connection._set_low_water(100_000)
            assert held.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 100_000
            async with asyncio.timeout(60):
                while held.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) != 1:
                    await asyncio.sleep(0.01)
            assert len((await connection.call("half")).payload) == 3_000_000
            await connection.close()
            async with asyncio.timeout(60):
                await connection.closed
                while connection._socket is not None:
                    await asyncio.sleep(0.01)

    wire.run(main())
