"""Small questions to other peers, over one connection each that is kept: how far they are, from whom they take."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from wirespeed import wire
from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.repo.swarm.messages import Progress, pack, unpack

GRACE_S = 1.0
_T = TypeVar("_T")


class Neighbours:
    """Connections for control, by address. Those that fail are opened again when they are next needed."""

    def __init__(self, security: wire.Security) -> None:
        self.security = security
        self._open: dict[str, wire.Connection] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def call(
        self, address: str, method: str, message: msgspec.Struct | bytes, kind: type[_T], *, timeout_s: float
    ) -> _T:
        """Ask, and read the answer. Raises PeerFailure about ``timeout_s`` later at the latest, DataError."""
        payload = message if isinstance(message, bytes) else pack(message)
        try:
            # A call ends by its own deadline, and says so in its status; connecting before it takes what it takes.
            async with asyncio.timeout(timeout_s + GRACE_S):
                connection = await self._connection(address, timeout_s)
                reply = await connection.call(method, payload, timeout_s=timeout_s)
        except TimeoutError:
            raise PeerFailure(f"{address} did not answer within {timeout_s:g} s") from None
        except UsageError as fault:  # a name that cannot be found, an address that is none
            raise PeerFailure(f"cannot reach {address}: {fault}") from fault
        return unpack(reply.payload, kind)

    async def progress(self, address: str, digest: bytes, *, timeout_s: float) -> Progress | None:
        """How far a peer is with a version, or None where it does not answer in time."""
        try:
            return await self.call(address, "progress", digest, Progress, timeout_s=timeout_s)
        except (PeerFailure, DataError):
            return None

    async def _connection(self, address: str, timeout_s: float) -> wire.Connection:
        async with self._opening.setdefault(address, asyncio.Lock()):
            found = self._open.get(address)
            if found is None or not found.is_usable:
                if found is not None:
                    found.abort()
                found = self._open[address] = await wire.connect(address, timeout_s=timeout_s, security=self.security)
            return found

    async def close(self) -> None:
        """Close them all."""
        for connection in self._open.values():
            await connection.close()
        self._open.clear()
