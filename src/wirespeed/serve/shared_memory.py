"""System shared memory of clients: regions that they made under /dev/shm, registered by name.

A region is read and written with pread and pwrite, not mapped: a client that truncates its region would otherwise kill
the server with a bus error. Off unless the server was told to allow it.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import msgspec

from wirespeed.serve.status import Reason, RequestFailed

FOLDER = Path("/dev/shm")  # noqa: S108 - the kernel's place for POSIX shared memory
_KEY = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}")
MAX_REGIONS = 1024


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """A registered region."""

    name: str
    key: str
    offset: int
    byte_size: int
    descriptor: int


class SharedMemory:
    """The regions of one server."""

    def __init__(self, *, is_allowed: bool) -> None:
        self.is_allowed = is_allowed
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, *, offset: int, byte_size: int) -> None:
        """Open a region. Raises RequestFailed: not allowed, of that name already, no such key, or larger than it is."""
        self._check_allowed()
        if name in self._regions:
            raise RequestFailed(f"shared memory region {name!r} already in manager", reason=Reason.ALREADY_EXISTS)
        if not name or _KEY.fullmatch(key) is None or len(self._regions) >= MAX_REGIONS:
            raise RequestFailed(
                f"cannot register shared memory region {name!r} with key {key!r}",
                reason=Reason.INVALID,
                expected="a name, and a key such as /input_simple",
            )
        try:
            descriptor = os.open(FOLDER / key.lstrip("/"), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as fault:
            raise RequestFailed(
                f"Unable to open shared memory region: {key!r}: {fault.strerror}", reason=Reason.INVALID
            ) from fault
        held = os.fstat(descriptor)
        if not stat.S_ISREG(held.st_mode) or offset < 0 or byte_size < 1 or offset + byte_size > held.st_size:
            os.close(descriptor)
            raise RequestFailed(
                f"shared memory region {name!r} of {byte_size} bytes at {offset}",
                reason=Reason.INVALID,
                expected=f"within the {held.st_size} bytes of {key}",
            )
        self._regions[name] = Region(name=name, key=key, offset=offset, byte_size=byte_size, descriptor=descriptor)

    def unregister(self, name: str) -> None:
        """Forget a region, or all of them for an empty name. One that is not there is fine."""
        self._check_allowed()
        for held in list(self._regions) if not name else [name]:
            region = self._regions.pop(held, None)
            if region is not None:
                os.close(region.descriptor)

    def status(self, name: str) -> list[Region]:
        """One region, or all of them for an empty name."""
        self._check_allowed()
        return list(self._regions.values()) if not name else [self._region(name)]

    def read(self, name: str, *, offset: int, byte_size: int) -> bytes:
        """Bytes of a region."""
        region = self._within(name, offset, byte_size)
        data = os.pread(region.descriptor, byte_size, region.offset + offset)
        if len(data) != byte_size:
            raise RequestFailed(f"shared memory region {name!r} was made smaller", reason=Reason.INVALID)
        return data

    def write(self, name: str, data: bytes | memoryview, *, offset: int, byte_size: int) -> None:
        """Put an output into a region."""
        if len(data) > byte_size:
            raise RequestFailed(
                f"shared memory size specified with the request for output should be at least {len(data)} bytes",
                reason=Reason.FAILED,
            )
        region = self._within(name, offset, byte_size)
        os.pwrite(region.descriptor, data, region.offset + offset)

    def close(self) -> None:
        """Forget every region."""
        if self.is_allowed:
            self.unregister("")

    def _within(self, name: str, offset: int, byte_size: int) -> Region:
        self._check_allowed()
        region = self._region(name)
        if offset < 0 or byte_size < 0 or offset + byte_size > region.byte_size:
            raise RequestFailed(
                f"got {byte_size} bytes at {offset} of shared memory region {name!r}",
                reason=Reason.INVALID,
                expected=f"within its {region.byte_size} bytes",
            )
        return region

    def _region(self, name: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise RequestFailed(f"Unable to find shared memory region: {name!r}", reason=Reason.NOT_FOUND)
        return region

    def _check_allowed(self) -> None:
        if not self.is_allowed:
            raise RequestFailed(
                "this server does not use clients' shared memory",
                reason=Reason.UNIMPLEMENTED,
                hint="start it with --allow-client-shm; its clients then read and write each other's regions",
            )
