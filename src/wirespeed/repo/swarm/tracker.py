"""Who is there and who has what: a small server that peers tell about themselves once a second.

All of its state is what it was told in the last seconds: it may die and come back, or be two, and nothing is lost but
the order among peers that join a version while it is away. Chains that run do not need it.
"""

from __future__ import annotations

import asyncio

import msgspec

from wirespeed import wire
from wirespeed.repo.swarm.messages import Announce, Join, Member, Members, check_digest, pack, unpack

FORGET_S = 5.0
"""A peer that has said nothing for so long is taken for gone."""
MAX_PEERS = 100_000
_LIMITS = wire.Limits(max_message_bytes=wire.Limits().chunk_bytes, credit_bytes=8 * wire.Limits().chunk_bytes)


class _Peer(msgspec.Struct):
    rack: str
    heard_s: float
    held: dict[bytes, tuple[int, int, int]]


class Tracker:
    """One tracker. ``await start(address)`` on a running event loop."""

    def __init__(self, *, security: wire.Security | None = None) -> None:
        self.security = wire.Security() if security is None else security
        self.address = ""
        self._peers: dict[str, _Peer] = {}
        self._loop = asyncio.get_running_loop()
        self._server: wire.Server | None = None

    async def start(self, address: str) -> None:
        """Listen."""
        handlers: dict[str, wire.Handler] = {
            "announce": self._announce,
            "join": self._join,
            "who": self._who,
            "peers": self._list,
        }
        self._server = await wire.listen(address, handlers, security=self.security, limits=_LIMITS)
        self.address = self._server.address

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            await self._server.close()

    def _announce(self, request: wire.Request) -> bytes:
        said = unpack(request.payload, Announce)
        known = self._peers.get(said.address)
        if known is None and len(self._peers) >= MAX_PEERS:
            raise wire.CallFailed(f"{MAX_PEERS} peers are known", status=wire.Status.EXHAUSTED)
        held = {check_digest(digest): (held, total, position) for digest, held, total, position in said.versions}
        if known is not None:
            # What it was given a place for, a moment ago, and has not begun yet.
            for digest, place in known.held.items():
                if place[1] < 0 and self._loop.time() - known.heard_s < FORGET_S:
                    held.setdefault(digest, place)
        self._peers[said.address] = _Peer(said.rack, self._loop.time(), held)
        return msgspec.msgpack.encode(True)

    def members(self, digest: bytes) -> list[Member]:
        """Peers that have, or fetch, a version; in chain order."""
        now_s = self._loop.time()
        for address in [at for at, peer in self._peers.items() if peer.heard_s < now_s - FORGET_S]:
            del self._peers[address]
        found = []
        for address, peer in self._peers.items():
            if digest in peer.held:
                held, total, position = peer.held[digest]
                whole = held == total
                found.append(
                    Member(address=address, rack=peer.rack, held_bytes=held, is_whole=whole, position=position)
                )
        return sorted(found, key=lambda member: member.position)

    def _who(self, request: wire.Request) -> bytes:
        return pack(Members(members=tuple(self.members(check_digest(bytes(request.payload))))))

    def _list(self, request: wire.Request) -> bytes:
        self.members(b"")
        peers = (Member(address=address, rack=peer.rack) for address, peer in self._peers.items())
        return pack(Members(members=tuple(peers)))

    def _join(self, request: wire.Request) -> bytes:
        said = unpack(request.payload, Join)
        members = [member for member in self.members(check_digest(said.digest)) if member.address != said.address]
        position = 1 + max((member.position for member in members), default=-1)
        peer = self._peers.setdefault(said.address, _Peer(said.rack, self._loop.time(), {}))
        peer.heard_s = self._loop.time()
        # -1 of -1 bytes would be whole: a total below zero marks a place without a download as yet.
        peer.held[said.digest] = (0, -1, position)
        return pack(Members(members=tuple(members)))
