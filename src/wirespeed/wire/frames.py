"""The frame: a 32-byte little-endian header with a checksum, then meta bytes, then payload.

    offset  size  field
    0       2     magic "WS"
    2       1     version, 1
    3       1     kind
    4       2     code: the method of a REQUEST (HERE), the status of a REPLY (HERE) or ERROR, else 0
    6       2     meta length in bytes; only in the first frame of a message
    8       4     stream: chosen by the calling side, one per call, never used twice on a connection
    12      4     total: payload bytes of the whole message
    16      4     offset: where this frame's payload lies in it
    20      4     length: payload bytes in this frame
    24      4     extra: milliseconds left (REQUEST), bytes of credit (CREDIT), a number to send back (PING), else 0
    28      4     CRC-32 of bytes 0 to 27

A message above the chunk size travels as several frames of the same stream, in order, so that other messages pass in
between. Everything is bounded before memory is taken: meta by MAX_META_BYTES, payload by the receiver's limit. The
checksum covers the header only: a header that is wrong would make garbage of everything after it, while payloads are
covered by TCP's own checksum, and by TLS or the application's hash where that is not enough.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum

import msgspec

from wirespeed.errors import DataError

MAGIC = b"WS"
VERSION = 1
HEADER_BYTES = 32
MAX_META_BYTES = 16 * 1024
MAX_TOTAL_BYTES = 2**32 - 1

_FIELDS = struct.Struct("<2sBBHHIIIII")
_HEADER = struct.Struct("<2sBBHHIIIIII")
_CRC = struct.Struct("<I")
_CHECKED_BYTES = HEADER_BYTES - _CRC.size
_START = struct.Struct("<2sBBHH")

# For the loops that run once per small frame, in reader.py and sender.py; everything else calls the functions below.
unpack_fields = _HEADER.unpack_from
"""Magic, version, the fields of Header, and the checksum, of the 32 bytes at an offset. Nothing of it is checked."""
pack_whole = struct.Struct("<8sIIIII").pack
"""A header without its checksum: what ``pack_start`` gave, stream, total, 0, total, extra."""


class Kind(IntEnum):
    """What a frame is."""

    CHALLENGE = 1
    """The listening side greets: limits, methods and a nonce."""
    HELLO = 2
    """The connecting side answers: its limits and its proof of the token."""
    WELCOME = 3
    """The listening side accepts, with its own proof."""
    REQUEST = 4
    REPLY = 5
    ERROR = 6
    """The answer to a request that failed; the payload is a message for people."""
    CREDIT = 7
    CANCEL = 8
    """The caller no longer wants the stream's answer."""
    PING = 9
    PONG = 10
    GOODBYE = 11
    """The sender takes no new requests; the payload says why. Requests under way are still answered."""
    MEMORY = 12
    """Memory that processes of one host share: where this side's is, or why the peer's is not used."""
    REQUEST_HERE = 13
    """A REQUEST whose payload lies in shared memory; this one's says where."""
    REPLY_HERE = 14


CARRIES_MESSAGE = frozenset((Kind.REQUEST, Kind.REPLY, Kind.ERROR))
"""Kinds that may be split and that cost credit."""
_KINDS = frozenset(int(kind) for kind in Kind)


class Header(msgspec.Struct, frozen=True, gc=False):
    """A frame's header. See the table above."""

    kind: int
    code: int
    meta_bytes: int
    stream: int
    total: int
    offset: int
    length: int
    extra: int


def pack_header(  # noqa: PLR0917 - runs once per frame: keywords cost more than the packing
    kind: int, code: int, meta_bytes: int, stream: int, total: int, offset: int, length: int, extra: int
) -> bytes:
    """The 32 bytes of a header. Positional: this runs once per frame."""
    head = _FIELDS.pack(MAGIC, VERSION, kind, code, meta_bytes, stream, total, offset, length, extra)
    return head + _CRC.pack(zlib.crc32(head))


def pack_start(kind: int, code: int) -> bytes:
    """The first eight bytes of the header of a message without meta."""
    return _START.pack(MAGIC, VERSION, kind, code, 0)


def unpack_header(buffer: memoryview, start: int) -> Header:
    """The header at ``start`` of ``buffer``, which holds at least 32 bytes from there.

    Raises DataError where it is not one: wrong magic, version, checksum, kind, or lengths that contradict each other.
    """
    fields = _HEADER.unpack_from(buffer, start)
    magic, version, kind, _, meta_bytes, _, total, offset, length, _, crc = fields
    if crc != zlib.crc32(buffer[start : start + _CHECKED_BYTES]) or magic != MAGIC:
        if magic != MAGIC:
            raise DataError(
                f"got bytes {bytes(buffer[start : start + 8]).hex(' ')} where a frame starts",
                expected='a frame that starts with "WS"',
                hint="is the peer a wirespeed of this version, and does it use TLS exactly when this side does?",
            )
        raise DataError("got a frame header with a wrong checksum", hint="the bytes were damaged or the peer is broken")
    if version != VERSION:
        raise DataError(f"got a frame of version {version}", expected=f"version {VERSION}")
    if kind not in _KINDS:
        raise DataError(f"got a frame of kind {kind}", expected=f"1 to {max(_KINDS)}")
    if offset + length > total:
        raise DataError(f"got a frame of {length} bytes at {offset} of a message of {total} bytes")
    if meta_bytes and (offset or meta_bytes > MAX_META_BYTES):
        raise DataError(
            f"got {meta_bytes} bytes of meta", expected=f"at most {MAX_META_BYTES}, in the first frame only"
        )
    return Header(*fields[2:10])
