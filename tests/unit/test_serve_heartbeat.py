"""The heartbeat's frame and what is put into it."""

from __future__ import annotations

import asyncio
import struct
import zlib

import pytest

from wirespeed.errors import DataError
from wirespeed.serve.heartbeat import (
    BEAT_BYTES,
    Beat,
    Load,
    Pulse,
    decode_beat,
    encode_beat,
    is_news,
    make_beat,
)

BEAT = Beat(
    number=7,
    boot=0x0123456789ABCDEF,
    is_ready=True,
    is_draining=False,
    queued=12,
    in_flight=3,
    latency_s=0.025,
    compute_s_per_row=0.002,
    rows=480,
    memory_used_bytes=5 * 2**30,
    memory_bytes=16 * 2**30,
    instances=2,
    device_use=0.75,
)


def test_a_beat_is_the_documented_bytes() -> None:
    head = struct.pack(
        "<2sBBIQIIIIIIIHHI",
        b"HB", 1, 1, 7, 0x0123456789ABCDEF, 12, 3, 25_000, 2_000, 480, 5 * 2**20, 16 * 2**20, 2, 750, 0,
    )  # fmt: skip
    assert encode_beat(BEAT) == head + struct.pack("<I", zlib.crc32(head))
    assert BEAT_BYTES == 56
    assert decode_beat(encode_beat(BEAT)) == BEAT


def test_what_does_not_fit_its_field_is_told_as_the_most_that_does() -> None:
    beat = Beat(
        number=1, boot=1, is_ready=False, is_draining=True, queued=2**40, in_flight=0, latency_s=1e9,
        compute_s_per_row=0.0, rows=0, memory_used_bytes=0, memory_bytes=0, instances=10**6, device_use=None,
    )  # fmt: skip
    held = decode_beat(encode_beat(beat))
    assert (held.queued, held.latency_s, held.instances) == (2**32 - 1, (2**32 - 1) / 1e6, 65535)
    assert (held.device_use, held.is_draining, held.is_ready) == (None, True, False)


@pytest.mark.parametrize("place", range(BEAT_BYTES))
def test_a_beat_with_any_byte_damaged_is_refused(place: int) -> None:
    frame = bytearray(encode_beat(BEAT))
    frame[place] ^= 0x10
    with pytest.raises(DataError):
        decode_beat(bytes(frame))


@pytest.mark.parametrize("size", [0, 4, BEAT_BYTES - 1, BEAT_BYTES + 1])
def test_a_beat_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(DataError, match=f"{size} bytes"):
        decode_beat(bytes(size))


def test_a_beat_tells_means_since_the_one_before() -> None:
    before = Load(num_success=100, success_ns=10**9, compute_ns=10**9, rows=200, instances=2)
    now = Load(
        queued=4, in_flight=2, num_success=110, success_ns=10**9 + 500_000_000, compute_ns=10**9 + 600_000_000, rows=260,
        instances=2,
    )  # fmt: skip
    beat = make_beat(3, 9, before, now, 1.0, (1, 2), ready=True, drain=False)
    assert beat.latency_s == pytest.approx(0.5 / 10)
    assert beat.compute_s_per_row == pytest.approx(0.6 / 60)
    assert beat.device_use == pytest.approx(0.6 / (1.0 * 2))
    assert (beat.rows, beat.queued, beat.in_flight) == (60, 4, 2)


def test_a_model_that_was_unloaded_gives_no_negative_means() -> None:
    beat = make_beat(1, 1, Load(num_success=5, rows=9, compute_ns=7), Load(), 1.0, (0, 0), ready=False, drain=False)
    assert (beat.rows, beat.latency_s, beat.compute_s_per_row, beat.device_use) == (0, 0.0, 0.0, None)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(0, 7, False), (0, 8, True), (10, 17, False), (10, 21, True), (40, 19, True), (40, 30, False)],
)
def test_only_a_load_that_doubled_or_halved_is_news(before: int, after: int, expected: bool) -> None:
    assert is_news(Load(queued=before), Load(queued=after)) is expected


def test_a_change_of_state_is_told_long_before_the_second_is_over() -> None:
    async def main() -> tuple[Beat, Beat, float]:
        state = [(True, False)]
        pulse = Pulse(lambda: (), lambda: state[0])
        first = decode_beat(await pulse.after(0))
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        waiting = asyncio.ensure_future(pulse.after(first.number))
        await asyncio.sleep(0)
        state[0] = (True, True)
        second = decode_beat(await asyncio.wait_for(waiting, 60))
        return first, second, loop.time() - begin_s

    fastest_s = 60.0
    for _ in range(5):
        first, second, took_s = asyncio.run(main())
        assert (first.is_draining, second.is_draining) == (False, True)
        assert (second.number, second.boot) == (first.number + 1, first.boot)
        fastest_s = min(fastest_s, took_s)
        if fastest_s < 0.9:
            break
    assert fastest_s < 0.9


def test_without_news_the_next_beat_comes_after_a_second() -> None:
    async def main() -> float:
        pulse = Pulse(lambda: (), lambda: (True, False))
        first = decode_beat(await pulse.after(0))
        begin_s = asyncio.get_running_loop().time()
        await asyncio.wait_for(pulse.after(first.number), 60)
        return asyncio.get_running_loop().time() - begin_s

    assert asyncio.run(main()) >= 0.9
