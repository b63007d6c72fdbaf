"""A peer that follows an alias: when it moves, the version it now points at is fetched, before anyone asks for it."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from wirespeed.errors import WirespeedError
from wirespeed.repo.names import Wanted
from wirespeed.repo.swarm.chain import joiner_upstreams
from wirespeed.repo.swarm.messages import Plan
from wirespeed.repo.versions import Version

if TYPE_CHECKING:
    from wirespeed.repo.swarm.job import Job
    from wirespeed.repo.swarm.peer import Peer

POLL_S = 10.0
RETRY_S = 30.0
"""After a version that could not be fetched."""


async def join(peer: Peer, version: Version, *, alias: str | None = None, deadline_s: float = 3600.0) -> Job:
    """Fetch a version behind those who have it or fetch it already, as a tracker knows them; else from the store."""
    members = await peer.announcer.join(bytes.fromhex(version.manifest_digest))
    known = () if members is None else members.members
    plan = Plan(
        version=version,
        upstreams=joiner_upstreams(known, peer.rack),
        position=1 + max((member.position for member in known), default=-1),
        deadline_s=deadline_s,
        alias=alias,
    )
    return peer.order(plan)


async def follow(peer: Peer, wanted: Wanted, *, poll_s: float = POLL_S) -> None:
    """Look where ``wanted`` points every ``poll_s`` (give or take a tenth, so that peers spread), and fetch it.

    Runs until it is cancelled. A store that does not answer is asked again; what is said about it is said once.
    """
    assert peer.repository is not None
    repository = peer.repository
    loop = asyncio.get_running_loop()
    told = ""
    whole = ""
    while True:
        pause_s = poll_s
        try:
            version = await loop.run_in_executor(peer.threads, repository.version, wanted)
            if version.manifest_digest != whole:
                job = await join(peer, version, alias=wanted.alias)
                await asyncio.shield(job.done)
                if job.state == "whole":
                    whole = version.manifest_digest
                    peer.on_news(f"{wanted} is {version.label}, and it is here")
                else:
                    pause_s = max(poll_s, RETRY_S)
            told = ""
        except WirespeedError as fault:
            if str(fault) != told:
                told = str(fault)
                peer.on_news(f"cannot follow {wanted} for the moment: {fault}")
        await asyncio.sleep(pause_s * random.uniform(0.9, 1.1))  # noqa: S311 - spreads peers, guards nothing
