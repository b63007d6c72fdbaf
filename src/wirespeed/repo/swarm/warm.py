"""Warm: have a version on many hosts before anybody asks for it, and watch it get there.

The hosts' peers are asked what they have, put into chains, told their upstreams in chain order, and then followed until
each has the version or the deadline is over. Hosts that fail or cannot be reached do not stop the others; the result
names them. Whoever runs this may die: the peers go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from wirespeed import wire
from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.repo.swarm.chain import arrange, upstreams
from wirespeed.repo.swarm.messages import (
    PLAN_MANIFEST_BYTES,
    Member,
    Members,
    Plan,
    Progress,
    Status,
    pack,
    unpack,
)
from wirespeed.repo.swarm.neighbours import Neighbours
from wirespeed.repo.versions import Version

CONNECT_S = 5.0
ORDER_S = 2.0
POLL_S = 0.5
LOST_AFTER_S = 8.0
WAIT_S = 30.0
"""A host that answers nothing for so long has failed."""


class HostResult(msgspec.Struct, frozen=True, kw_only=True):
    """How it went on one host."""

    host: str
    rack: str
    progress: Progress


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """How it went. ``hosts`` in the order they were asked for; ``chains`` in theirs."""

    version: str
    num_bytes: int
    seconds: float
    hosts: tuple[HostResult, ...]
    chains: tuple[tuple[str, ...], ...]

    @property
    def failed(self) -> tuple[HostResult, ...]:
        """Those that do not have it."""
        return tuple(host for host in self.hosts if host.progress.state != "whole")


Report = Callable[[Mapping[str, Progress]], None]


async def warm(
    version: Version,
    hosts: Sequence[str],
    *,
    alias: str | None = None,
    manifest: bytes = b"",
    seeds: Sequence[str] = (),
    racks: Mapping[str, str] | None = None,
    security: wire.Security | None = None,
    deadline_s: float = 3600.0,
    report: Report = lambda found: None,
) -> Warmed:
    """Have ``version`` on the peers at these addresses.

    ``manifest``: as it is stored, where it is at hand; hosts that are given it start at once, instead of each when the
    one before it has it. ``seeds``: more peers that have it, or fetch it already, and are not counted. ``racks``
    (address -> rack) goes before what peers say of themselves. Raises PeerFailure where not one peer answers; other
    failures are in the result.
    """
    if not hosts:
        raise UsageError("got no hosts", expected="at least one")
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    digest = bytes.fromhex(version.manifest_digest)
    neighbours = Neighbours(wire.Security() if security is None else security)
    wanted = list(dict.fromkeys(hosts))
    everyone = list(dict.fromkeys([*seeds, *wanted]))
    found: dict[str, Progress] = {
        address: Progress(state="unknown", problem="it was never reached") for address in wanted
    }
    rack_of: dict[str, str] = {}
    try:
        looks = await asyncio.gather(*(_look(neighbours, address, digest) for address in everyone))
        members = []
        for address, look in zip(everyone, looks, strict=True):
            if isinstance(look, str):
                if address in found:
                    found[address] = Progress(state="failed", problem=look)
                continue
            rack_of[address] = (racks or {}).get(address, look[0])
            if address not in found and look[1].state not in ("whole", "running"):
                continue
            members.append(Member(address=address, rack=rack_of[address], is_whole=look[1].state == "whole"))
        if not members:
            raise PeerFailure(
                f"none of {len(everyone)} peers answers: {next(iter(found.values())).problem}",
                hint="is `wirespeed repo peer` running there, with this WIRESPEED_TOKEN, on this port?",
            )
        chains = arrange(members)
        inline = manifest if len(manifest) <= PLAN_MANIFEST_BYTES else b""
        left_s = max(1.0, deadline_s - (loop.time() - begin_s))
        follow = asyncio.create_task(_follow(neighbours, digest, found, report))
        try:
            await asyncio.gather(
                *(
                    _order(
                        neighbours,
                        version,
                        chain,
                        found,
                        alias=alias,
                        manifest=inline,
                        deadline_s=left_s,
                        heads=[chain[0].address for chain in chains],
                    )
                    for chain in chains
                )
            )
            waits = [
                _wait(neighbours, address, digest, found, end_s=begin_s + deadline_s)
                for address in wanted
                if address in rack_of
            ]
            await asyncio.gather(*waits)
        finally:
            follow.cancel()
    finally:
        await neighbours.close()
    report(found)
    return Warmed(
        version=version.label,
        num_bytes=version.num_bytes,
        seconds=loop.time() - begin_s,
        hosts=tuple(HostResult(host=at, rack=rack_of.get(at, ""), progress=found[at]) for at in wanted),
        chains=tuple(tuple(member.address for member in chain) for chain in chains),
    )


async def _look(neighbours: Neighbours, address: str, digest: bytes) -> tuple[str, Progress] | str:
    try:
        status = await neighbours.call(address, "status", b"", Status, timeout_s=CONNECT_S)
        progress = await neighbours.call(address, "progress", digest, Progress, timeout_s=CONNECT_S)
    except (PeerFailure, DataError) as fault:
        return str(fault)
    return status.rack, progress


async def _order(
    neighbours: Neighbours,
    version: Version,
    chain: Sequence[Member],
    found: dict[str, Progress],
    *,
    alias: str | None,
    manifest: bytes,
    heads: Sequence[str],
    deadline_s: float,
) -> None:
    """One after the other: whoever is told to take from a host finds it fetching already."""
    digest = bytes.fromhex(version.manifest_digest)
    for at, member in enumerate(chain):
        # Whoever said to be whole may have lost files since, and stands first: other chains' first hosts are the last
        # resort of all.
        sources = (*upstreams(chain, at), *(head for head in heads if head != chain[0].address))
        if member.address not in found:
            continue  # a seed
        plan = Plan(
            version=version, upstreams=sources, position=at, deadline_s=deadline_s, alias=alias, manifest=manifest,
        )  # fmt: skip
        try:
            found[member.address] = await neighbours.call(member.address, "warm", plan, Progress, timeout_s=ORDER_S)
        except (PeerFailure, DataError) as fault:
            # A busy host may have taken the order and be late with its answer.
            look = await neighbours.progress(member.address, digest, timeout_s=ORDER_S)
            is_taken = look is not None and look.state in ("running", "whole")
            found[member.address] = look if look and is_taken else Progress(state="failed", problem=str(fault))


async def _wait(
    neighbours: Neighbours, address: str, digest: bytes, found: dict[str, Progress], *, end_s: float
) -> None:
    """Until the host is done, is lost, or the time is over."""
    loop = asyncio.get_running_loop()
    lost_s: float | None = None
    while found[address].state == "running" or lost_s is not None:
        left_s = end_s - loop.time()
        if left_s <= 0:
            found[address] = msgspec.structs.replace(
                found[address], state="failed", problem="it was not done within the deadline; it goes on"
            )
            return
        try:
            wait_s = min(left_s, WAIT_S if lost_s is None else ORDER_S)
            found[address] = await neighbours.call(address, "wait", digest, Progress, timeout_s=wait_s)
            lost_s = None
        except (PeerFailure, DataError) as fault:
            look = await neighbours.progress(address, digest, timeout_s=ORDER_S)
            if look is not None:
                found[address], lost_s = look, None  # it is still at it
                continue
            lost_s = loop.time() if lost_s is None else lost_s
            if loop.time() - lost_s > LOST_AFTER_S:
                found[address] = msgspec.structs.replace(found[address], state="failed", problem=str(fault))
                return
            await asyncio.sleep(0.5)


async def _follow(neighbours: Neighbours, digest: bytes, found: dict[str, Progress], report: Report) -> None:
    """Keep what is shown fresh."""
    while True:
        await asyncio.sleep(POLL_S)
        running = [address for address, progress in found.items() if progress.state == "running"]
        looks = await asyncio.gather(*(neighbours.progress(at, digest, timeout_s=POLL_S) for at in running))
        for address, look in zip(running, looks, strict=True):
            # How it ended is told by whoever waits for it.
            if look is not None and look.state == "running" and found[address].state == "running":
                found[address] = look
        report(found)


async def known_peers(tracker: str, *, security: wire.Security | None = None, digest: bytes | None = None) -> Members:
    """The peers that a tracker knows: all, or those of one version. Raises PeerFailure."""
    async with await wire.connect(tracker, timeout_s=CONNECT_S, security=security) as connection:
        if digest is None:
            reply = await connection.call("peers", timeout_s=CONNECT_S)
        else:
            reply = await connection.call("who", digest, timeout_s=CONNECT_S)
        return unpack(reply.payload, Members)


async def ask_status(address: str, *, security: wire.Security | None = None) -> Status:
    """What a peer says of itself. Raises PeerFailure."""
    async with await wire.connect(address, timeout_s=CONNECT_S, security=security) as connection:
        return unpack((await connection.call("status", pack(Members()), timeout_s=CONNECT_S)).payload, Status)
