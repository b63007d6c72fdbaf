"""Messages between processes of one host, through memory that both map: the socket carries only where they lie.

Each side makes one segment (a sealed memfd), which it alone allocates in, and which the other side maps. A payload is
copied into a free block; its frame names the block; the receiver's payload is a view of the block itself. When the last
view is gone the receiver writes a zero into the block's byte of the table at the segment's start, which the sender
looks at when it wants a block: no message says so. Where no block is free, a message takes the socket, as it does
between hosts.

A peer is told of a segment by process and descriptor, after both sides have proved who they are. It maps it only where
that is a memfd of this project's name, of the same user, that cannot shrink under it, in the same process namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import struct
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from wirespeed.errors import DataError, MissingCapability
from wirespeed.wire.reader import Payload
from wirespeed.wire.sender import Buffer

NUM_BLOCKS = 4096
"""One byte each, in the first page."""
TABLE_BYTES = NUM_BLOCKS
LEAST_BLOCK_BYTES = 64 * 1024
MAX_SEGMENT_BYTES = 2**34
_PLACE = struct.Struct("<IQI")
PLACE_BYTES = _PLACE.size
"""Block, offset in the segment, and length: the payload of a frame whose message lies in memory."""
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
_PREFIX = "wirespeed-"


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a segment can be found by another process of the same user."""

    process: int
    descriptor: int
    num_bytes: int
    name: str


class Said(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The payload of a MEMORY frame: this side's segment, and why the peer's is not used, if it was told of one."""

    segment: Segment | None = None
    refused: str = ""


def encode_said(said: Said) -> bytes:
    """The bytes of it."""
    return msgspec.msgpack.encode(said)


def decode_said(payload: Payload) -> Said:
    """Raises DataError for anything else."""
    try:
        return msgspec.msgpack.decode(payload, type=Said)
    except msgspec.MsgspecError as fault:
        raise DataError(f"got an offer of memory that is not understood: {fault}") from fault


class OwnSegment:
    """The one that this side writes. Raises MissingCapability where there can be none. Not for several threads."""

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise MissingCapability("this system has no memfd_create", expected="Linux")
        self._num_bytes = TABLE_BYTES + num_bytes
        name = _PREFIX + secrets.token_hex(8)
        self._descriptor = -1
        try:
            self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, self._num_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _seals())
            self._map = mmap.mmap(self._descriptor, self._num_bytes)
        except OSError as fault:
            self.close()
            raise MissingCapability(f"no memory can be shared: {fault.strerror}") from fault
        self.offer = Segment(os.getpid(), self._descriptor, self._num_bytes, name)
        self._view = memoryview(self._map)
        self._used: list[tuple[int, int, int]] = []
        """Number, offset and size of the blocks that the peer holds, or held when last looked at."""
        self._free: dict[int, list[tuple[int, int, int]]] = {}
        self._next_number, self._next_offset = 0, TABLE_BYTES

    @property
    def num_held(self) -> int:
        """Blocks that the peer still looks at."""
        return sum(self._view[number] for number, _, _ in self._used)

    def close(self) -> None:
        """Close the descriptor: nobody can map the segment any more; who has goes on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def put(self, parts: Sequence[Buffer], total: int) -> bytes | None:
        """Copy a payload into a block, and say where it lies; None where there is no room."""
        size = 1 << max(total - 1, LEAST_BLOCK_BYTES - 1).bit_length()
        free = self._free.get(size)
        block = free.pop() if free else self._find(size)
        if block is None:
            return None
        number, offset, _ = block
        view, end = self._view, offset
        for part in parts:
            begin, end = end, end + len(part)
            view[begin:end] = part
        view[number] = 1
        self._used.append(block)
        return _PLACE.pack(number, offset, total)

    def take_back(self, place: bytes) -> None:
        """The peer was not told of it after all."""
        self._view[_PLACE.unpack(place)[0]] = 0

    def _find(self, size: int) -> tuple[int, int, int] | None:
        """A block that the peer has let go of, or a new one."""
        view, used = self._view, self._used
        self._used = []
        for block in used:
            if view[block[0]]:
                self._used.append(block)
            else:
                self._free.setdefault(block[2], []).append(block)
        free = self._free.get(size)
        if free:
            return free.pop()
        if not self._used and self._next_offset + size > self._num_bytes:
            # All is free, cut into blocks of other sizes: cut it anew.
            self._free.clear()
            self._next_number, self._next_offset = 0, TABLE_BYTES
        if self._next_offset + size > self._num_bytes or self._next_number == NUM_BLOCKS:
            return None
        block = (self._next_number, self._next_offset, size)
        self._next_number += 1
        self._next_offset += size
        return block


class PeerSegment:
    """The one that the peer writes. Raises MissingCapability where it cannot be mapped, with the reason.

    ``max_message_bytes``: no message in it may be larger, as on the socket.
    """

    def __init__(self, offer: Segment, *, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        if not TABLE_BYTES < offer.num_bytes <= MAX_SEGMENT_BYTES or not offer.name.startswith(_PREFIX):
            raise MissingCapability(f"got a segment of {offer.num_bytes} bytes named {offer.name!r}")
        path = Path(f"/proc/{offer.process}/fd/{offer.descriptor}")
        # Asked before it is opened: opening a device or a pipe may do something, or wait.
        with _reasons():
            if os.readlink(path) != f"/memfd:{offer.name} (deleted)":
                raise MissingCapability(f"{path} is another file: the peer has other process numbers")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with _reasons():
                held = os.fstat(descriptor)
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
                is_ours = stat.S_ISREG(held.st_mode) and held.st_uid == os.geteuid()
                if not is_ours or held.st_size != offer.num_bytes or seals & _seals() != _seals():
                    raise MissingCapability(f"{path} is not a sealed segment of this user")
                self._map = mmap.mmap(descriptor, offer.num_bytes)
        finally:
            os.close(descriptor)
        self._table = memoryview(self._map)[:TABLE_BYTES]
        self._num_bytes = offer.num_bytes
        self._live: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}

    def view(self, place: Payload) -> memoryview:
        """The payload that lies there. When its last view is gone, the peer may use the block again.

        Raises DataError where no block can lie there, or a message may not be so large.
        """
        if len(place) != PLACE_BYTES:
            raise DataError(f"got a place in memory of {len(place)} bytes", expected=str(PLACE_BYTES))
        number, offset, length = _PLACE.unpack(place)
        if (
            number >= NUM_BLOCKS
            or offset < TABLE_BYTES
            or offset + length > self._num_bytes
            or not length
            or number in self._live
        ):
            raise DataError(f"got block {number} at {offset} of {length} bytes of a segment of {self._num_bytes} bytes")
        if length > self._max_message_bytes:
            raise DataError(f"got a message of {length} bytes", expected=f"at most {self._max_message_bytes}")
        array = np.frombuffer(self._map, np.uint8, length, offset)
        # Views of a view keep the array, and the array the mapping: the block is free when the array goes.
        self._live[number] = weakref.ref(array, partial(_free, self._live, self._table, number))
        return array.data


def _free(live: dict[int, weakref.ref[npt.NDArray[np.uint8]]], table: memoryview, number: int, _: object) -> None:
    live.pop(number, None)
    table[number] = 0


def _seals() -> int:
    seals = 0
    for name in _SEALS:
        seals |= getattr(fcntl, name)
    return seals


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise MissingCapability(f"the peer's memory cannot be mapped: {fault.strerror}") from fault
