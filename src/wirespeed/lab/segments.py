"""Large segments on a raw socket: how many frames one stands for, and what is left of it when some are lost.

A frame read with PACKET_VNET_HDR starts with ``struct virtio_net_hdr`` (10 bytes: flags, type, header length,
segment size, checksum start and offset). For TCP over IPv4 the rest is rewritten as the kernel's own
segmentation does (lengths, IP identification, sequence numbers, flags, checksum seeds). Any other kind is
lost or kept as a whole.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_VNET = struct.Struct("=BBHHHH")
VNET_BYTES = _VNET.size
_NEEDS_CHECKSUM = 1
_GSO_NONE, _GSO_TCPV4, _GSO_ECN = 0, 1, 0x80
_ETHERNET_BYTES = 14
_FIN_PSH = 0x09
_CWR = 0x80


def count(frame: bytes) -> int:
    """How many frames on the wire this one stands for."""
    kind: int
    header_bytes: int
    size: int
    _, kind, header_bytes, size, _, _ = _VNET.unpack_from(frame)
    if kind & ~_GSO_ECN != _GSO_TCPV4 or size == 0:
        return 1
    return max(1, -(-(len(frame) - VNET_BYTES - header_bytes) // size))


def without(frame: bytes, lost: Sequence[int]) -> list[bytes]:
    """The frame without those of its segments whose numbers are in ``lost`` (rising): no, one or more pieces."""
    total = count(frame)
    if total == 1:
        return [] if lost else [frame]
    pieces = []
    first = 0
    for number in [*lost, total]:
        if number > first:
            pieces.append(_cut(frame, first, number, total))
        first = number + 1
    return pieces


def _cut(frame: bytes, first: int, last: int, total: int) -> bytes:
    """Segments ``first`` to ``last`` (exclusive) of a TCP/IPv4 segment, as one of its own."""
    flags, kind, header_bytes, size, checksum_start, checksum_offset = _VNET.unpack_from(frame)
    data = memoryview(frame)[VNET_BYTES:]
    header = bytearray(data[:header_bytes])
    payload = data[header_bytes + first * size : header_bytes + last * size]
    ip, tcp = _ETHERNET_BYTES, checksum_start
    num_ip_bytes = len(header) - ip + len(payload)
    (identification,) = struct.unpack_from("!H", header, ip + 4)
    (sequence,) = struct.unpack_from("!I", header, tcp + 4)
    struct.pack_into("!HH", header, ip + 2, num_ip_bytes, (identification + first) & 0xFFFF)
    struct.pack_into("!H", header, ip + 10, 0)
    struct.pack_into("!H", header, ip + 10, ~_sum(header[ip:tcp]) & 0xFFFF)
    struct.pack_into("!I", header, tcp + 4, (sequence + first * size) & 0xFFFFFFFF)
    if last < total:
        header[tcp + 13] &= ~_FIN_PSH
    if first > 0:
        header[tcp + 13] &= ~_CWR & 0xFF
    # The checksum field holds the sum of the pseudo-header; who sends the frame at last adds the rest.
    pseudo = header[ip + 12 : ip + 20] + struct.pack("!HH", 6, num_ip_bytes - (tcp - ip))
    struct.pack_into("!H", header, tcp + checksum_offset, _sum(pseudo))
    if last - first == 1:
        kind, size = _GSO_NONE, 0
    start = _VNET.pack(flags | _NEEDS_CHECKSUM, kind, header_bytes, size, checksum_start, checksum_offset)
    return start + bytes(header) + bytes(payload)


def _sum(data: bytes | bytearray) -> int:
    """The ones' complement sum of 16-bit words (RFC 1071); the length is even."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
