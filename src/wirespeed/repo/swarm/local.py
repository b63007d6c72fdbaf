"""A program and the peer of its host: they share a cache, and the peer brings what the program is about to read."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from wirespeed import wire
from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.repo.swarm.messages import Plan, Progress, pack, unpack
from wirespeed.repo.versions import Version

CONNECT_S = 2.0
DEADLINE_S = 3600.0


def bring(address: str, version: Version, *, deadline_s: float = DEADLINE_S) -> str:
    """Have the peer at ``address`` fetch the version, and wait for it. Gives why it failed, or "" where it is here."""

    async def ask() -> Progress:
        security = wire.Security(token=os.environ.get("WIRESPEED_TOKEN") or None)
        async with await wire.connect(address, timeout_s=CONNECT_S, security=security) as connection:
            plan = Plan(version=version, deadline_s=deadline_s)
            await connection.call("join", pack(plan), timeout_s=10.0)
            reply = await connection.call("wait", plan.digest, timeout_s=deadline_s)
            return unpack(reply.payload, Progress)

    try:
        # A thread of its own: the caller may be inside an event loop.
        with ThreadPoolExecutor(1) as thread:
            progress = thread.submit(lambda: wire.run(ask())).result()
    except (PeerFailure, DataError, UsageError) as fault:
        return str(fault)
    return "" if progress.state == "whole" else progress.problem
