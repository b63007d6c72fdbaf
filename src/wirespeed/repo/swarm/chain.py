"""The order in which hosts pass a version on, and when an upstream is too slow to stay: arithmetic, no network.

A pipelined chain takes (pieces + hosts - 1) pieces' time, so one copy's time however many hosts there are, where a tree
of degree k takes k copies' time at its inner nodes. Racks follow one another in the chain, each as a block: what leaves
a rack for the next is one copy, and so is what enters it. Hosts that have the version stand first; where several racks
have one that does, each begins a chain of its own, and nothing crosses between those.
"""

from __future__ import annotations

from collections.abc import Sequence

from wirespeed.repo.swarm.messages import Member
from wirespeed.units import MIB

LAG_BYTES = 24 * MIB
"""Less than this behind its own upstream no peer is called slow: two or three chunks are on their way anyway."""
SLOW_SHARE = 0.5
"""An upstream that gains at less than this share of the rate at which its own upstream gains is slow."""
TRIAL_GAIN = 2.0
"""A trial has to be so many times faster than what comes now. A healthy chain's trial shares its link: half at best."""


def arrange(members: Sequence[Member]) -> list[list[Member]]:
    """Chains over these hosts: every host once, racks as blocks, whoever is whole at the beginning.

    Members keep their order within a rack, and racks that of their first member. Without anyone whole there is one
    chain, whose first host reads from the store. Ranges of racks without a whole host are shared out over the chains.
    """
    racks: dict[str, list[Member]] = {}
    for member in members:
        racks.setdefault(member.rack, []).append(member)
    for rack in racks.values():
        rack.sort(key=lambda member: not member.is_whole)  # stable
    seeded = [rack for rack in racks.values() if rack[0].is_whole]
    others = [rack for rack in racks.values() if not rack[0].is_whole]
    if not seeded:
        return [[member for rack in others for member in rack]] if others else []
    chains = [list(rack) for rack in seeded]
    # The shortest chain takes the next rack: the longest is what is waited for.
    for rack in sorted(others, key=len, reverse=True):
        min(chains, key=len).extend(rack)
    return chains


def upstreams(chain: Sequence[Member], at: int) -> tuple[str, ...]:
    """Whom the host at this place takes from: the one before it, and those to turn to where that one fails.

    Then those before that, nearest first: they are ahead, and no circle can form. Between whole hosts of one rack, who
    need nothing, the chain's first taker of each is spread by nothing but order.
    """
    return tuple(member.address for member in reversed(chain[:at]))


def joiner_upstreams(members: Sequence[Member], rack: str) -> tuple[str, ...]:
    """Whom a late joiner takes from: the last of its own rack (whole ones first), then the last of all others."""
    ranked = sorted(members, key=lambda m: (m.rack != rack, not m.is_whole, -m.position))
    return tuple(member.address for member in ranked)


def is_slow(*, gained_bytes: float, upstream_gained_bytes: float, lag_bytes: float) -> bool:
    """Whether a peer that gained so much in some time, while its own upstream gained so much, holds others up.

    A peer that is behind because it has just changed its upstream gains as fast as that one does, and is not slow.
    """
    return lag_bytes > LAG_BYTES and gained_bytes < SLOW_SHARE * upstream_gained_bytes
