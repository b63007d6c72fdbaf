"""Losing frames out of a large TCP segment: what is left is what the wire would have delivered."""

from __future__ import annotations

import math
import struct

import pytest

from wirespeed.lab.delay import Losses
from wirespeed.lab.segments import VNET_BYTES, count, without

MSS = 1448
HEADER_BYTES = 14 + 20 + 32
FIN_PSH_ACK, ACK = 0x19, 0x10


def ones_sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def segment(payload: bytes, *, kind: int = 1, sequence: int = 0xFFFFFF00, flags: int = FIN_PSH_ACK) -> bytes:
    """A frame as a packet socket gives it: virtio header, Ethernet, IPv4, TCP with 12 bytes of options."""
    vnet = struct.pack("=BBHHHH", 1, kind, HEADER_BYTES, MSS if kind else 0, 34, 16)
    ethernet = bytes(12) + b"\x08\x00"
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 52 + len(payload), 7, 0, 64, 6, 0, b"\x0a\x4d\0\1", b"\x0a\x4d\0\2")
    tcp = struct.pack("!HHIIBBHHH", 1, 2, sequence, 9, 8 << 4, flags, 100, 0, 0) + bytes(12)
    return vnet + ethernet + ip + tcp + payload


def parts(frame: bytes) -> tuple[int, int, bytes, int]:
    """Sequence number, flags, payload and IP identification; checks lengths and checksums on the way."""
    vnet, data = frame[:VNET_BYTES], frame[VNET_BYTES:]
    flags, kind, header_bytes, size, start, offset = struct.unpack("=BBHHHH", vnet)
    assert (flags, header_bytes, start, offset) == (1, HEADER_BYTES, 34, 16)
    payload = data[HEADER_BYTES:]
    assert (kind, size) == ((1, MSS) if len(payload) > MSS else (0, 0))
    assert struct.unpack_from("!H", data, 16)[0] == len(data) - 14
    assert ones_sum(data[14:34]) == 0xFFFF, "the IP header's checksum"
    pseudo = data[26:34] + struct.pack("!HH", 6, len(data) - 34)
    assert struct.unpack_from("!H", data, 50)[0] == ones_sum(pseudo), "the seed of the TCP checksum"
    return struct.unpack_from("!I", data, 38)[0], data[47], payload, struct.unpack_from("!H", data, 18)[0]


PAYLOAD = bytes(range(256)) * 20  # 5120 bytes: three full frames and one of 776


def test_a_segment_counts_as_its_frames() -> None:
    assert count(segment(PAYLOAD)) == 4
    assert count(segment(PAYLOAD[: 2 * MSS])) == 2
    assert count(segment(PAYLOAD[:100], kind=0)) == 1
    assert count(segment(PAYLOAD, kind=4)) == 1, "TCP over IPv6 is lost or kept whole"


def test_what_is_left_is_the_rest_in_order_with_right_headers() -> None:
    first, second = (parts(frame) for frame in without(segment(PAYLOAD), [1]))
    assert first == (0xFFFFFF00, ACK, PAYLOAD[:MSS], 7)
    assert second == ((0xFFFFFF00 + 2 * MSS) % 2**32, FIN_PSH_ACK, PAYLOAD[2 * MSS :], 9)


@pytest.mark.parametrize(
    ("lost", "kept"),
    [
        ([], [(0, 5120)]),
        ([0], [(MSS, 5120)]),
        ([3], [(0, 3 * MSS)]),
        ([0, 3], [(MSS, 3 * MSS)]),
        ([0, 2], [(MSS, 2 * MSS), (3 * MSS, 5120)]),
        ([0, 1, 2, 3], []),
    ],
)
def test_any_losses_leave_exactly_the_other_bytes(lost: list[int], kept: list[tuple[int, int]]) -> None:
    assert [parts(frame)[2] for frame in without(segment(PAYLOAD), lost)] == [PAYLOAD[a:b] for a, b in kept]


def test_a_frame_that_is_no_large_segment_is_lost_or_kept_untouched() -> None:
    frame = segment(PAYLOAD[:99], kind=0)
    assert without(frame, []) == [frame]
    assert without(frame, [0]) == []


def test_losses_are_the_same_for_a_seed_however_frames_are_grouped() -> None:
    one, many = Losses(0.1, seed=1), Losses(0.1, seed=1)
    singles = [number for number in range(1100) if one.of(1)]
    grouped = [start + number for start in range(0, 1100, 11) for number in many.of(11)]
    assert singles == grouped


def test_losses_have_their_chance() -> None:
    # 100 000 draws at 1 %: mean 1000, five standard deviations (31.5) either side.
    losses = Losses(0.01, seed=3)
    assert abs(sum(len(losses.of(10)) for _ in range(10_000)) - 1000) < 5 * math.sqrt(100_000 * 0.01 * 0.99)


def test_no_loss_loses_nothing() -> None:
    assert Losses(0.0, seed=1).of(1_000_000) == []
