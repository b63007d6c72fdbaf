"""Files that are being put together from chunks: resumable, idempotent, published by a rename.

A part has the final size from the start, its room is taken while the first bytes come in, and it has a name made of the
content's identity. Nothing is believed about what an earlier run left in it: regions that hold data are hashed, and a
chunk counts as there only where it is right. Two processes that fill the same part write the same verified bytes to the
same places; no lock is needed for that to be right, and the first rename wins.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from wirespeed.errors import MissingCapability
from wirespeed.repo.manifest import Chunk

PART_PREFIX = ".wirespeed-part."


class DiskFull(MissingCapability):
    """There is no room, or none within the user's quota."""


class Part:
    """One file under way. ``write`` is thread-safe."""

    def __init__(self, path: Path, chunks: Sequence[Chunk], *, size_bytes: int) -> None:
        self.path = path
        self._chunks = chunks
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._handle = -1
        self.is_published = False
        self._reserving = threading.Lock()

    def missing(self, *, like: Path | None = None) -> list[int]:
        """Positions in ``chunks`` that are not there yet. ``like``: an older file that may hold some at their places.

        An empty part is made where there is none.
        """
        handle = self._open()
        has_part = os.fstat(handle).st_size == self._size_bytes
        try:
            if not has_part:
                os.ftruncate(handle, self._size_bytes)
            missing = self._wrong(handle, range(len(self._chunks))) if has_part else list(range(len(self._chunks)))
            if like is not None and missing:
                missing = self._copy_from(like, missing)
        except OSError as fault:
            self.discard()
            raise disk_fault(fault, self.path) from fault
        return missing

    def _open(self) -> int:
        with self._lock:
            if self._handle < 0:
                try:
                    self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                except OSError as fault:
                    raise disk_fault(fault, self.path) from fault
            return self._handle

    def reserve(self) -> None:
        """Take the room on the disk now, unless the disk is memory, where every page would be cleared for it.

        May run beside ``write``. Raises MissingCapability where the disk is full.
        """
        with self._reserving:
            handle = self._handle
            if self._size_bytes == 0 or self.is_published or handle < 0 or is_in_memory(os.fstat(handle).st_dev):
                return
            try:
                os.posix_fallocate(handle, 0, self._size_bytes)
            except OSError as fault:
                if fault.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise disk_fault(fault, self.path) from fault

    def _wrong(self, handle: int, positions: Sequence[int]) -> list[int]:
        from blake3 import blake3

        wrong = []
        offsets = self.offsets()
        for at in positions:
            chunk = self._chunks[at]
            if not _has_data(handle, offsets[at], chunk.length):
                wrong.append(at)
                continue
            content = os.pread(handle, chunk.length, offsets[at])
            if len(content) != chunk.length or blake3(content).digest() != chunk.digest:
                wrong.append(at)
        return wrong

    def wrong_in(self, path: Path) -> list[int]:
        """Positions in ``chunks`` that a finished file does not hold. Raises OSError."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._wrong(handle, range(len(self._chunks)))
        finally:
            os.close(handle)

    def _copy_from(self, like: Path, missing: Sequence[int]) -> list[int]:
        try:
            handle = os.open(like, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return list(missing)
        try:
            wrong = set(self._wrong(handle, missing))
            offsets = self.offsets()
            for at in missing:
                if at not in wrong:
                    self.write(offsets[at], memoryview(os.pread(handle, self._chunks[at].length, offsets[at])))
            # What was copied was read a second time: it is looked at where it now lies.
            return sorted(wrong | set(self._wrong(self._open(), [at for at in missing if at not in wrong])))
        finally:
            os.close(handle)

    def offsets(self) -> list[int]:
        """Where each chunk begins."""
        offsets, at = [], 0
        for chunk in self._chunks:
            offsets.append(at)
            at += chunk.length
        return offsets

    def write(self, offset: int, content: memoryview) -> None:
        """Put verified bytes in their place. Raises MissingCapability where the disk is full."""
        handle = self._open()
        try:
            done = 0
            while done < len(content):
                done += os.pwrite(handle, content[done:], offset + done)
        except OSError as fault:
            raise disk_fault(fault, self.path) from fault

    def publish(self, target: Path, *, mode: int) -> None:
        """Make the part the file: readers see the old one or the new one."""
        handle = self._open()
        with self._reserving:  # it would change the file's times after they were noted
            self.is_published = True
        try:
            os.fchmod(handle, mode)
            os.replace(self.path, target)
        except FileNotFoundError:
            # Another process that filled the same part was first; what it published has the same bytes.
            if not target.exists() or target.stat().st_size != self._size_bytes:
                raise
        except OSError as fault:
            raise disk_fault(fault, target) from fault
        finally:
            self.close()

    def close(self) -> None:
        """Leave the part for a later run."""
        with self._reserving, self._lock:
            if self._handle >= 0:
                os.close(self._handle)
                self._handle = -1

    def discard(self) -> None:
        """Give its room back."""
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


@functools.cache
def is_in_memory(device: int) -> bool:
    """Whether a device number is that of a tmpfs or ramfs."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split(" ")[2] == wanted:
                return rest.split(" ")[0] in ("tmpfs", "ramfs")
    return False


def _has_data(handle: int, offset: int, length: int) -> bool:
    """False only where the whole region is a hole: a quick look that spares hashing zeros of what never came."""
    try:
        return os.lseek(handle, offset, os.SEEK_DATA) < offset + length
    except OSError as fault:
        return fault.errno != errno.ENXIO


def disk_fault(fault: OSError, path: Path) -> MissingCapability:
    """What went wrong with a disk, in words."""
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"the disk that holds {path.parent} is full",
            hint="free some space, or choose another place: --to DIR, or WIRESPEED_CACHE for the cache",
        )
    if fault.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return MissingCapability(
            f"cannot write {path}: {os.strerror(fault.errno or 0)}",
            hint="choose a folder that you may write: --to DIR, or WIRESPEED_CACHE for the cache",
        )
    return MissingCapability(f"cannot write {path}: {os.strerror(fault.errno) if fault.errno else fault}")


def free_bytes(folder: Path) -> int:
    """What the disk that holds this (perhaps not yet existing) folder has left for us."""
    at = folder
    while not at.exists():
        at = at.parent
    found = os.statvfs(at)
    return found.f_bavail * found.f_frsize


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raises MissingCapability before anything is written where it could not fit."""
    free = free_bytes(folder)
    if needed_bytes > free:
        raise DiskFull(
            f"{folder} has {free} bytes left and {needed_bytes} are needed",
            hint="free some space, or choose another place: --to DIR, or WIRESPEED_CACHE for the cache",
        )
