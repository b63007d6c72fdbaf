"""Laws of frames: whole messages come out as they went in, however the bytes are cut; anything else is one clear error."""

from __future__ import annotations

import asyncio
import struct
import zlib
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wirespeed.errors import DataError
from wirespeed.wire import Limits, connect, listen, run
from wirespeed.wire.buffers import BufferPool
from wirespeed.wire.frames import HEADER_BYTES, Header, Kind, pack_header, pack_start, pack_whole, unpack_header
from wirespeed.wire.reader import FrameReader, Payload, Placement

MAX = 300_000


class Owner:
    """Collects what a reader delivers."""

    def __init__(self, *, drops: frozenset[int] = frozenset()) -> None:
        self.got: list[tuple[int, bytes, bytes | None]] = []
        self.kept: list[Payload | None] = []
        self.placed_bytes = 0
        self.drops = drops

    def place(self, header: Header) -> memoryview | Literal[Placement.DROP, Placement.WAIT]:
        if header.stream in self.drops:
            return Placement.DROP
        self.placed_bytes += header.total
        return memoryview(bytearray(header.total))

    def deliver(self, header: Header, meta: bytes, payload: Payload | None) -> None:
        self.got.append((header.stream, meta, None if payload is None else bytes(payload)))
        self.kept.append(payload)


def reader_of(owner: Owner, pool: BufferPool | None = None) -> FrameReader:
    return FrameReader(owner, allowed=frozenset(Kind), max_message_bytes=MAX, pool=pool)


def feed(reader: FrameReader, data: bytes, cuts: list[int]) -> None:
    place, turn = 0, 0
    while place < len(data):
        buffer = reader.get_buffer(-1)
        assert len(buffer) > 0
        count = min(len(buffer), len(data) - place, cuts[turn % len(cuts)] if cuts else len(data))
        buffer[:count] = data[place : place + count]
        place += count
        turn += 1
        reader.buffer_updated(count)


def frames_of(stream: int, meta: bytes, payload: bytes, chunk: int) -> list[bytes]:
    found = []
    for offset in range(0, len(payload), chunk) or [0]:
        part = payload[offset : offset + chunk]
        held = meta if offset == 0 else b""
        found.append(
            pack_header(Kind.REQUEST, 1, len(held), stream, len(payload), offset, len(part), 1000) + held + part
        )
    return found


messages = st.tuples(
    st.binary(max_size=40),
    st.one_of(st.integers(0, 300), st.integers(32_000, 34_000), st.integers(60_000, 150_000)),
    st.one_of(st.integers(5_000, 80_000), st.just(2**20)),
)


@settings(max_examples=60)
@given(
    st.lists(messages, min_size=1, max_size=8),
    st.lists(st.integers(1, 200_000), min_size=1, max_size=8),
    st.randoms(),
    st.booleans(),
)
def test_messages_survive_any_cutting_and_any_interleaving(
    held: list[tuple[bytes, int, int]], cuts: list[int], rng: object, is_pooled: bool
) -> None:
    expected = {n: (meta, bytes([n % 256]) * size) for n, (meta, size, _) in enumerate(held, 1)}
    queues = [frames_of(n, *expected[n], chunk) for n, (_, _, chunk) in enumerate(held, 1)]
    data = b""
    while any(queues):
        queue = rng.choice([queue for queue in queues if queue])  # type: ignore[attr-defined]
        data += queue.pop(0)
    owner = Owner()
    reader = reader_of(owner, BufferPool() if is_pooled else None)
    feed(reader, data, cuts if sum(cuts) * 500 > len(data) else [4096])
    assert {stream: (meta, payload) for stream, meta, payload in owner.got} == expected
    assert len(owner.got) == len(expected)
    assert reader.num_assemblies == 0
    # A view that is kept is not written into again.
    assert [bytes(view or b"") for view in owner.kept] == [payload for _, _, payload in owner.got]


@given(st.integers(1, 11), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_header_reads_back(kind: int, code: int, stream: int, extra: int) -> None:
    raw = pack_header(kind, code, 7, stream, 100, 0, 60, extra)
    assert len(raw) == HEADER_BYTES
    assert unpack_header(memoryview(raw), 0) == Header(kind, code, 7, stream, 100, 0, 60, extra)


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_a_header_is_noticed(bit: int) -> None:
    raw = bytearray(pack_header(Kind.REQUEST, 1, 3, 5, 100, 0, 60, 9))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DataError):
        unpack_header(memoryview(raw), 0)


@settings(max_examples=300)
@given(st.binary(min_size=1, max_size=400), st.lists(st.integers(1, 100), min_size=1, max_size=4))
def test_garbage_is_an_error_or_an_unfinished_header(data: bytes, cuts: list[int]) -> None:
    owner = Owner()
    text = ""
    try:
        feed(reader_of(owner), data, cuts)
    except DataError as fault:
        text = str(fault)
    assert "WS" in text or "checksum" in text or len(data) < HEADER_BYTES
    assert owner.got == []


fields = st.tuples(
    st.integers(0, 14), st.integers(0, 65535), st.integers(0, 65535), st.integers(0, 3), st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1),
)  # fmt: skip


@settings(max_examples=500)
@given(st.lists(fields, min_size=1, max_size=5), st.binary(max_size=300))
def test_well_formed_headers_with_any_numbers_never_take_more_than_the_limit(
    held: list[tuple[int, ...]], tail: bytes
) -> None:
    owner = Owner()
    reader = reader_of(owner)
    try:
        for kind, code, meta, stream, total, offset, length, extra in held:
            feed(reader, pack_header(kind, code, meta, stream, total, offset, length, extra) + tail, [])
    except DataError:
        pass
    # One assembly per stream, four streams, each bounded.
    assert owner.placed_bytes <= 5 * MAX
    assert all(payload is None or len(payload) <= MAX for _, _, payload in owner.got)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([(Kind.REQUEST, 0, 0, 1, MAX + 1, 0, 10, 0)], f"at most {MAX}"),
        ([(Kind.PING, 0, 0, 1, 9000, 0, 9000, 0)], "at most 8192"),
        ([(Kind.REQUEST, 0, 20_000, 1, 10, 0, 10, 0)], "20000 bytes of meta"),
        ([(Kind.REQUEST, 0, 0, 1, 100_000, 50_000, 50_000, 0)], "out of order"),
        ([(Kind.REQUEST, 0, 0, 1, 10, 5, 6, 0)], "6 bytes at 5 of a message of 10"),
        ([(99, 0, 0, 1, 0, 0, 0, 0)], "kind 99"),
        ([(Kind.REQUEST, 0, 0, 1, 50_000, 0, 0, 0)], "an empty frame"),
    ],
)
def test_a_frame_that_breaks_a_rule_says_which(frames: list[tuple[int, ...]], text: str) -> None:
    data = b"".join(pack_header(*frame) + bytes(64) for frame in frames)
    with pytest.raises(DataError, match=text):
        feed(reader_of(Owner()), data, [])


def test_a_stream_is_not_begun_twice() -> None:
    reader = reader_of(Owner())
    feed(reader, pack_header(Kind.REQUEST, 0, 0, 1, 100_000, 0, 50_000, 0) + bytes(50_000), [])
    with pytest.raises(DataError, match="two messages of stream 1"):
        feed(reader, pack_header(Kind.REQUEST, 0, 0, 1, 100_000, 0, 50_000, 0), [])


def test_dropped_messages_take_no_memory_and_leave_the_next_one_whole() -> None:
    owner = Owner(drops=frozenset({1}))
    feed(
        reader_of(owner), b"".join(frames_of(1, b"", bytes(200_000), 70_000) + frames_of(2, b"m", b"next", 10)), [5000]
    )
    assert owner.got == [(1, b"", None), (2, b"m", b"next")]
    assert owner.placed_bytes == 0


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=3000), st.booleans())
def test_a_server_outlives_whatever_is_sent_to_it(data: bytes, has_header: bool) -> None:
    """Garbage, or a right header before garbage, on a real socket; another client is served after it."""
    if has_header:
        head = struct.pack("<2sBBHHIIIII", b"WS", 1, data[0] % 12, 0, 0, 1, len(data), 0, len(data), 0)
        data = head + struct.pack("<I", zlib.crc32(head)) + data

    async def test() -> None:
        limits = Limits(handshake_s=1.0)
        async with await listen("127.0.0.1:0", {"echo": lambda request: request.payload}, limits=limits) as server:
            reader, writer = await asyncio.open_connection(*server.address.split(":"))
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(5):
                while await reader.read(65536):
                    pass
            writer.close()
            async with await connect(server.address) as connection:
                assert bytes((await connection.call("echo", b"alive")).payload) == b"alive"
            assert server.budget.used_bytes == 0

    run(test())


@given(st.integers(1, 11), st.integers(0, 65535), *[st.integers(0, 2**32 - 1)] * 3)
def test_a_small_messages_header_is_packed_as_any_other(
    kind: int, code: int, stream: int, total: int, extra: int
) -> None:
    head = pack_whole(pack_start(kind, code), stream, total, 0, total, extra)
    packed = head + zlib.crc32(head).to_bytes(4, "little")
    assert packed == pack_header(kind, code, 0, stream, total, 0, total, extra)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.binary(max_size=30), st.integers(0, 9000)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=2),
    st.lists(st.integers(1, 30_000), min_size=1, max_size=4),
)
def test_small_frames_cut_at_once_and_one_by_one_are_the_same_and_so_is_what_is_wrong_with_them(
    held: list[tuple[bytes, int]], changes: list[tuple[int, int]], cuts: list[int]
) -> None:
    data = bytearray().join(
        frame
        for stream, (meta, size) in enumerate(held, 1)
        for frame in frames_of(stream, meta, bytes([stream]) * size, 2**20)
    )
    for place, value in changes:
        data[place % len(data)] = value
    told = []
    for is_one_by_one in (False, True):
        owner = Owner()
        reader = reader_of(owner, BufferPool())
        if is_one_by_one:
            reader._small_bytes = -1
        text = ""
        try:
            feed(reader, bytes(data), cuts if sum(cuts) * 500 > len(data) else [4096])
        except DataError as fault:
            text = str(fault)
        told.append((owner.got, text, reader.num_assemblies))
    assert told[0] == told[1]
