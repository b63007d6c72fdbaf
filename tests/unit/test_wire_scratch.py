"""The read buffer that connections share: whoever has part of a frame keeps it, and nobody writes over that."""

from __future__ import annotations

from typing import Literal

from wirespeed.wire.buffers import BufferPool
from wirespeed.wire.frames import Header, Kind, pack_header
from wirespeed.wire.reader import FrameReader, Payload, Placement


class Owner:
    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self.got: list[bytes] = []

    def place(self, header: Header) -> memoryview | Literal[Placement.DROP, Placement.WAIT]:
        return self.pool.take(header.total)

    def deliver(self, header: Header, meta: bytes, payload: Payload | None) -> None:
        self.got.append(meta + bytes(payload or b""))


def reader_of(pool: BufferPool) -> tuple[FrameReader, Owner]:
    owner = Owner(pool)
    kinds = frozenset((int(Kind.REQUEST),))
    return FrameReader(owner, allowed=kinds, max_message_bytes=1 << 20, pool=pool), owner


def frame(stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return pack_header(int(Kind.REQUEST), 0, 0, stream, size, 0, size, 1000) + payload


def feed(reader: FrameReader, content: bytes) -> None:
    while content:
        room = reader.get_buffer(-1)
        taken = min(len(room), len(content))
        room[:taken] = content[:taken]
        content = content[taken:]
        reader.buffer_updated(taken)


def test_readers_between_frames_share_one_buffer() -> None:
    pool = BufferPool()
    readers = [reader_of(pool) for _ in range(100)]
    for place, (reader, owner) in enumerate(readers):
        feed(reader, frame(1, b"%d" % place))
        assert owner.got == [b"%d" % place]
    assert len({id(reader.get_buffer(-1).obj) for reader, _ in readers}) == 1


def test_a_part_of_a_frame_is_not_written_over_by_other_readers() -> None:
    pool = BufferPool()
    (one, first), (two, second), (three, third) = (reader_of(pool) for _ in range(3))
    whole = frame(1, b"a" * 500)
    feed(one, whole[:200])
    feed(two, whole[:20])  # not even a header
    feed(three, frame(1, b"c" * 900) + frame(2, b"d"))
    feed(two, whole[20:])
    feed(one, whole[200:])
    assert (first.got, second.got, third.got) == ([b"a" * 500], [b"a" * 500], [b"c" * 900, b"d"])


def test_a_buffer_that_was_asked_for_and_not_written_is_nobodys() -> None:
    pool = BufferPool()
    (one, first), (two, second) = (reader_of(pool) for _ in range(2))
    one.get_buffer(-1)  # the transport found that there was nothing to read
    feed(two, frame(1, b"x" * 100)[:60])
    feed(one, frame(1, b"y" * 100))
    feed(two, frame(1, b"x" * 100)[60:])
    assert (first.got, second.got) == ([b"y" * 100], [b"x" * 100])


def test_medium_and_large_frames_between_small_ones_arrive_whole_on_interleaved_readers() -> None:
    pool = BufferPool()
    readers = [reader_of(pool) for _ in range(3)]
    payloads = [b"s" * 10, b"m" * 100_000, b"t" * 30_000, b"l" * 700_000, b"m" * 100_000, b"u"]
    streams = [b"".join(frame(n + 1, payload) for n, payload in enumerate(payloads)) for _ in readers]
    for start in range(0, len(streams[0]), 7_001):
        for (reader, _), content in zip(readers, streams, strict=True):
            feed(reader, content[start : start + 7_001])
    for _, owner in readers:
        assert owner.got == payloads
