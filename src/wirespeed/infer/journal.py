"""What a job has finished so far, in order, in one file beside the output, so that it can go on after a kill.

Blocks of consecutive results are appended, each with its place, its length and a checksum. The last block of a job that
was killed, or whose disk was full, may be torn: it is cut off, and its inputs are run again. A lock keeps a second
dispatcher off the same output. What was appended survives the death of the process, not that of the machine: there is
no fsync per block.

    header   "WSRJ", u32 version 1, u32 length, u32 CRC-32, JSON: what the job is
    block    "BLK1", u64 place of its first result, u32 results, u32 errors among them, u64 length, u32 CRC-32, an Arrow
             record batch
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from wirespeed.errors import DataError, MissingCapability, UsageError

Buffer = bytes | memoryview
_HEADER = struct.Struct("<4sIII")
_BLOCK = struct.Struct("<4sQIIQI")
_MAGIC, _BLOCK_MAGIC = b"WSRJ", b"BLK1"
_VERSION = 1
_MAX_HEADER_BYTES = 16 * 1024**2
_MAX_BLOCK_BYTES = 4 * 1024**3


class JobIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two runs the same job. ``inputs``: a digest of all keys in order; ``columns``: the output's schema."""

    model: str
    version: str
    encoding: str
    num_inputs: int
    inputs: str
    columns: str


class _Block(NamedTuple):
    place: int
    num_rows: int
    num_errors: int
    start: int
    size: int
    crc: int


class Journal:
    """See the module. ``open`` makes or continues one; ``close`` lets go of it, ``remove`` deletes it too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.next_place = 0
        """How many results it holds."""
        self.num_errors = 0
        self._handle = -1
        self._end = 0
        self._blocks: list[_Block] = []

    def open(self, identity: JobIdentity, *, restart: bool = False) -> None:
        """Take the lock, then continue the job that the file holds, or begin a new one.

        Raises UsageError where another process writes it, or it is another job's; MissingCapability where the file
        cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as fault:
            raise MissingCapability(
                f"cannot write {self.path}: {fault.strerror}", hint="name another place with --out"
            ) from fault
        try:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"another run is writing {self.path}", expected="one at a time", hint="name another --out"
                ) from None
            if restart or os.fstat(self._handle).st_size == 0 or not self._read(identity):
                self._begin(identity)
        except BaseException:
            self.close()
            raise

    def append(self, batch: Buffer, *, num_rows: int, num_errors: int) -> None:
        """Add the next results. Raises MissingCapability where the disk is full; the file is then as it was before."""
        content = memoryview(batch)
        crc = zlib.crc32(content)
        head = _BLOCK.pack(_BLOCK_MAGIC, self.next_place, num_rows, num_errors, len(content), crc)
        start = self._end
        try:
            _write_all(self._handle, head, start)
            _write_all(self._handle, content, start + len(head))
        except OSError as fault:
            with contextlib.suppress(OSError):  # a torn block is found, and cut off, by its checksum
                os.ftruncate(self._handle, start)
            raise MissingCapability(
                f"cannot write {self.path}: {fault.strerror}",
                hint=f"{self.next_place} results are safe: free some space and run the same command again to go on",
            ) from fault
        self._blocks.append(_Block(self.next_place, num_rows, num_errors, start + len(head), len(content), crc))
        self._end = start + len(head) + len(content)
        self.next_place += num_rows
        self.num_errors += num_errors

    def batches(self) -> Iterator[bytes]:
        """Every block's record batch, in order. Raises DataError where one is damaged."""
        for block in self._blocks:
            yield self._content(block)

    def close(self) -> None:
        """Let go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def remove(self) -> None:
        """Delete the file: its results are elsewhere."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _begin(self, identity: JobIdentity) -> None:
        text = msgspec.json.encode(identity)
        try:
            os.ftruncate(self._handle, 0)
            head = _HEADER.pack(_MAGIC, _VERSION, len(text), zlib.crc32(text)) + text
            _write_all(self._handle, head, 0)
        except OSError as fault:
            raise MissingCapability(
                f"cannot write {self.path}: {fault.strerror}", hint="free some space, or name another place with --out"
            ) from fault
        self._end = len(head)
        self._blocks = []
        self.next_place = self.num_errors = 0

    def _read(self, identity: JobIdentity) -> bool:
        """Continue what is there. False: the file was torn before it said what it is."""
        head = os.pread(self._handle, _HEADER.size, 0)
        if len(head) < _HEADER.size:
            return False
        magic, version, length, crc = _HEADER.unpack(head)
        if magic != _MAGIC or version != _VERSION or length > _MAX_HEADER_BYTES:
            raise UsageError(
                f"{self.path} is not a journal of this version", hint="move it away, or name another --out"
            )
        text = os.pread(self._handle, length, _HEADER.size)
        if len(text) < length or zlib.crc32(text) != crc:
            return False
        try:
            held = msgspec.json.decode(text, type=JobIdentity)
        except msgspec.MsgspecError as fault:
            raise DataError(f"{self.path} is damaged: {fault}", hint="--restart begins anew") from fault
        if held != identity:
            raise UsageError(
                f"{self.path} holds an unfinished job of {_difference(held, identity)}",
                hint="finish that one with its own command, name another --out, or begin anew with --restart",
            )
        self._end = _HEADER.size + length
        self._read_blocks()
        return True

    def _read_blocks(self) -> None:
        size = os.fstat(self._handle).st_size
        while True:
            head = os.pread(self._handle, _BLOCK.size, self._end)
            if len(head) < _BLOCK.size:
                break
            magic, place, num_rows, num_errors, length, crc = _BLOCK.unpack(head)
            start = self._end + _BLOCK.size
            if magic != _BLOCK_MAGIC or place != self.next_place or length > _MAX_BLOCK_BYTES or start + length > size:
                break
            block = _Block(place, num_rows, num_errors, start, length, crc)
            if start + length == size and zlib.crc32(os.pread(self._handle, length, start)) != crc:
                break  # only the last one can be torn; the others are checked when the output is made of them
            self._blocks.append(block)
            self._end = start + length
            self.next_place += num_rows
            self.num_errors += num_errors
        os.ftruncate(self._handle, self._end)

    def _content(self, block: _Block) -> bytes:
        parts, at = [], block.start
        while at < block.start + block.size and (part := os.pread(self._handle, block.start + block.size - at, at)):
            parts.append(part)
            at += len(part)
        content = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(content) != block.size or zlib.crc32(content) != block.crc:
            raise DataError(
                f"{self.path} is damaged: results {block.place} to {block.place + block.num_rows - 1} do not fit their "
                "checksum",
                hint="the disk lost them: run the same command with --restart",
            )
        return content


def _difference(held: JobIdentity, wanted: JobIdentity) -> str:
    told = {"model": "model", "version": "model version", "encoding": "features as", "num_inputs": "inputs:"}
    for name, words in told.items():
        before, now = getattr(held, name), getattr(wanted, name)
        if before != now:
            return f"{words} {before} (now {now})"
    return "other inputs" if held.inputs != wanted.inputs else "other outputs"


def _write_all(handle: int, content: Buffer, place: int) -> None:
    view = memoryview(content)
    while view:
        done = os.pwrite(handle, view, place)
        view = view[done:]
        place += done
