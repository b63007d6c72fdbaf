"""A peer and its trackers: it says where it is and what it has, and asks who is ahead of it. Trackers may be dead."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from wirespeed.errors import DataError, PeerFailure
from wirespeed.repo.swarm.messages import Announce, Join, Members

if TYPE_CHECKING:
    from wirespeed.repo.swarm.peer import Peer

ANNOUNCE_S = 1.0
ANSWER_S = 1.0


class Announcer:
    """The tracker side of one peer."""

    def __init__(self, peer: Peer, trackers: tuple[str, ...]) -> None:
        self.trackers = trackers
        self._peer = peer
        self._task: asyncio.Task[None] | None = None
        self._is_told: set[str] = set()

    def start(self) -> None:
        """Begin to announce, where there is a tracker."""
        if self.trackers:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            for tracker in self.trackers:
                await self._announce(tracker)
            await asyncio.sleep(ANNOUNCE_S)

    async def _announce(self, tracker: str) -> None:
        peer = self._peer
        versions = []
        for digest, job in peer.jobs.items():
            progress = job.progress()
            if progress.state in ("running", "whole"):
                versions.append((digest, progress.held_bytes, progress.total_bytes, job.plan.position))
        said = Announce(address=peer.address, rack=peer.rack, versions=tuple(versions))
        try:
            await peer.neighbours.call(tracker, "announce", said, bool, timeout_s=ANSWER_S)
            self._is_told.discard(tracker)
        except (PeerFailure, DataError) as fault:
            if tracker not in self._is_told:  # once, not every second
                self._is_told.add(tracker)
                peer.on_news(f"tracker {tracker} does not answer, going on without it: {fault}")

    async def join(self, digest: bytes) -> Members | None:
        """Who is ahead of this peer for a version, from the first tracker that answers, or None."""
        peer = self._peer
        said = Join(address=peer.address, digest=digest, rack=peer.rack)
        for tracker in self.trackers:
            with contextlib.suppress(PeerFailure, DataError):
                return await peer.neighbours.call(tracker, "join", said, Members, timeout_s=ANSWER_S)
        return None
