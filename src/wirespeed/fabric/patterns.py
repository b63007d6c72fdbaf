"""The flows of each collective algorithm: rings, trees, exchanges at doubling distance, chains.

All functions take a layout (groups of one size) and give phases. Formulae: Thakur, Rabenseifner, Gropp (2005),
Optimization of Collective Communication Operations in MPICH; Sanders, Speck, Traff (2009), Two-tree algorithms for full
bandwidth broadcast, reduction and scan; Bruck et al. (1997). Arithmetic on the elements is not charged.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wirespeed.fabric.network import Floats, Ints
from wirespeed.records import Collective

Operation = Collective | Literal["reduce", "gather", "send"]

MAX_PAIRS = 512
"""Ranks up to which every pair of an all_to_all is a flow of its own; above, that many shifts stand for all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """Flows at the same time. ``source``, ``target`` (F,) are ranks, ``group`` (F,) says whose, ``weight`` (F,) shares.

    ``net_steps`` and ``local_steps``: messages one after another between hosts and inside them; ``depth``: of those,
    the hops that a stream cut into chunks passes before it runs full (0: the phase is not a stream).
    """

    source: Ints
    target: Ints
    group: Ints
    weight: Floats
    net_steps: float
    local_steps: float
    depth: float = 0.0
    is_round: bool = False
    """Each message passes every edge in turn (a ring): the mean hop counts, not the slowest."""
    stands_for: float = 1.0
    """Flows of the algorithm that one flow here stands for; matters to what one connection may reach."""
    stall: float = 1.0
    """Times as long as its bytes take at the tightest link: links idle where steps wait for each other."""
    num_messages: float | None = None
    """That cross between hosts; None: one per step of each rank that sends."""

    @property
    def messages(self) -> float:
        """How many cross between hosts."""
        if self.num_messages is not None:
            return self.num_messages
        return float(np.count_nonzero(np.bincount(self.source)) * self.net_steps) if self.source.size else 0.0


@dataclass(frozen=True, eq=False)
class Layout:
    """Groups of one size: ``ranks``, ``host`` and ``rack`` of each (G, p), and the NICs that each host has."""

    ranks: Ints
    host: Ints
    num_nics: int
    rack: Ints

    @property
    def size(self) -> int:
        """Ranks per group."""
        return int(self.ranks.shape[1])

    @property
    def block(self) -> int:
        """Ranks per host where every host holds the same number, one after another in the group's order; else 1."""
        return self._block(self.host)

    @property
    def rack_block(self) -> int:
        """The same for racks."""
        return self._block(self.rack)

    def _block(self, place: Ints) -> int:
        if self.size < 2:
            return 1
        changes = place[:, 1:] != place[:, :-1]
        edges = np.flatnonzero(changes[0])
        block = int(edges[0]) + 1 if edges.size else self.size
        if self.size % block:
            return 1
        expected = np.zeros(self.size - 1, dtype=bool)
        expected[block - 1 :: block] = True
        if not (changes == expected).all():
            return 1
        heads = np.sort(place[:, ::block], axis=1)
        return block if heads.shape[1] < 2 or (heads[:, 1:] != heads[:, :-1]).all() else 1


def _phase(
    layout: Layout, source: Ints, target: Ints, weight: Floats, *, steps: float, depth: float = 0.0,
    is_round: bool = False, stands_for: float = 1.0,
) -> Phase:  # fmt: skip
    """A phase with the same flows (places in the group, (F,)) in every group."""
    num_groups = layout.ranks.shape[0]
    from_, to = layout.ranks[:, source], layout.ranks[:, target]
    crosses = layout.host[:, source] != layout.host[:, target]
    # Steps that stay inside a host cost less; where some flows cross, in a ring by their share, else all.
    share = float(crosses.mean(axis=1).max()) if is_round else float(crosses.any())
    return Phase(
        source=from_.ravel(),
        target=to.ravel(),
        group=np.repeat(np.arange(num_groups, dtype=np.int64), source.size),
        weight=np.tile(weight, num_groups),
        net_steps=steps * share,
        local_steps=steps * (1 - share),
        depth=depth,
        is_round=is_round,
        stands_for=stands_for,
    )


def ring(layout: Layout, passes: int) -> Phase:
    """Each rank sends to the next, ``passes * (p - 1)`` times 1 / p of the bytes.

    With several NICs per host, one ring per NIC, each entering and leaving the hosts at another device, carries an
    equal part, as NCCL's channels do.
    """
    rounds = passes * (layout.size - 1)
    source, target, weight = _around(layout, rounds / layout.size)
    return _paced(layout, source, target, weight, hops=rounds, depth=0)


def halved_ring(layout: Layout) -> Phase:
    """gloo's all_gather: blocks go round in two halves, and before the first of them the links idle for half a block.

    Measured between 2 and 4 hosts at 250 Mbit/s, messages of 0.5 to 6 MiB: 1.54 and 1.16 times the bytes over the rate,
    where half a block more is 1.5 and 1.17.
    """
    rounds = layout.size - 1
    return dataclasses.replace(ring(layout, 1), stall=(rounds + 0.5) / rounds)


def chain(layout: Layout) -> Phase:
    """From place 0 to the last, streamed: a ring without its last edge, each carrying all of the bytes."""
    source, target, weight = _around(layout, 1.0)
    # Nothing flows back to the host (or, where hosts do not hold equal blocks, the rank) that holds the data.
    block = layout.block
    back = (target // block == 0) & (source // block != 0) if block < layout.size else target == 0
    return _paced(layout, source[~back], target[~back], weight[~back], hops=layout.size - 1, depth=layout.size - 2)


def _around(layout: Layout, share: float) -> tuple[Ints, Ints, Floats]:
    """Edges of a ring with ``share`` of the bytes on each, over all channels."""
    p, block = layout.size, layout.block
    places = np.arange(p, dtype=np.int64)
    channels = min(layout.num_nics, block) if block < p else 1
    if channels == 1:
        return places, np.roll(places, -1), np.full(p, share)
    entries = np.arange(channels, dtype=np.int64) * block // channels
    starts = np.arange(0, p, block, dtype=np.int64)
    # Inside a host every device sends to the next one, but on the channel that leaves there.
    place = places % block
    leaving = np.bincount((entries - 1) % block, minlength=block)
    inside = share * (channels - leaving[place]) / channels
    across = (starts[:, None] + (entries - 1) % block).ravel()
    entering = (np.roll(starts, -1)[:, None] + entries).ravel()
    return (
        np.concatenate([places, across]),
        np.concatenate([places - place + (place + 1) % block, entering]),
        np.concatenate([inside, np.full(across.size, share / channels)]),
    )


def _paced(layout: Layout, source: Ints, target: Ints, weight: Floats, *, hops: int, depth: int) -> Phase:
    """A phase whose messages pass every edge in turn: of its hops, those between hosts are one per block."""
    found = _phase(layout, source, target, weight, steps=hops, depth=depth, is_round=True)
    changes = layout.host[:, 1:] != layout.host[:, :-1]
    closing = layout.host[:, -1:] != layout.host[:, :1]
    share = float(np.concatenate([changes, closing], axis=1).mean(axis=1).max())
    return dataclasses.replace(found, net_steps=hops * share, local_steps=hops * (1 - share))


def binary_trees(num: int) -> tuple[Ints, Ints]:
    """Parents in two binary trees over ``num`` places (-1 at the roots): inner nodes of one are leaves of the other.

    Sanders, Speck, Traff 2009: the second tree is the first one mirrored (even ``num``) or shifted by one (odd).
    """
    places = np.arange(num, dtype=np.int64)
    low = places & -places
    above = (places ^ low) | (low << 1)
    first = np.where(above < num, above, places ^ low)
    first[0] = -1
    if num % 2:
        second = np.empty_like(first)
        second[(places + 1) % num] = np.where(first >= 0, (first + 1) % num, -1)
    else:
        second = np.where(first >= 0, num - 1 - first, -1)[::-1].copy()
    return first, second


def tree(layout: Layout, operation: Operation) -> Phase:
    """Two binary trees over the hosts, each with half of the bytes, streamed; inside hosts a chain to its device.

    all_reduce goes up and down at the same time. With several NICs per host each carries an equal part.
    """
    p, block = layout.size, layout.block
    num_hosts = p // block
    channels = max(1, min(layout.num_nics, block))
    entries = np.arange(channels, dtype=np.int64) * block // channels
    sources: list[Ints] = []
    targets: list[Ints] = []
    weights: list[Floats] = []
    # all_reduce has no root of its own; the data of broadcast and reduce are at place 0, above the roots of both trees.
    is_rooted = operation != "all_reduce"
    for tree_of_hosts in binary_trees(num_hosts - 1) if is_rooted and num_hosts > 1 else binary_trees(num_hosts):
        parent = np.concatenate([[-1], tree_of_hosts + 1]) if is_rooted and num_hosts > 1 else tree_of_hosts
        child = np.flatnonzero(parent >= 0)
        below = (child[:, None] * block + entries).ravel()
        above = (parent[child][:, None] * block + entries).ravel()
        share = np.full(below.size, 0.5 / channels)
        if operation in ("all_reduce", "reduce"):
            sources, targets, weights = [*sources, below], [*targets, above], [*weights, share]
        if operation in ("all_reduce", "broadcast"):
            sources, targets, weights = [*sources, above], [*targets, below], [*weights, share]
    if block > 1:
        places = np.arange(p, dtype=np.int64)
        inner = places[places % block != block - 1]
        share = np.ones(inner.size)
        if operation in ("all_reduce", "reduce"):
            sources, targets, weights = [*sources, inner + 1], [*targets, inner], [*weights, share]
        if operation in ("all_reduce", "broadcast"):
            sources, targets, weights = [*sources, inner], [*targets, inner + 1], [*weights, share]
    ways = 2 if operation == "all_reduce" else 1
    levels = math.ceil(math.log2(num_hosts)) if not is_rooted else 1 + math.ceil(math.log2(max(1, num_hosts - 1)))
    net = ways * levels if num_hosts > 1 else 0
    local = ways * (block - 1)
    found = _phase(
        layout, np.concatenate(sources), np.concatenate(targets), np.concatenate(weights), steps=net + local,
        depth=max(0, net + local - 1),
    )  # fmt: skip
    has_net = bool((layout.host[:, :1] != layout.host).any())
    return dataclasses.replace(found, net_steps=net if has_net else 0, local_steps=local if has_net else net + local)


def halving_doubling(layout: Layout, operation: Operation) -> list[Phase] | None:
    """Exchange with ranks at distance 1, 2, 4, ... of 1/2, 1/4, ... of the bytes: near ones carry the most.

    Of a number that is no power of two, the ranks above it first give their part to one below, and get the result.
    """
    p = layout.size
    power = 1 << (p.bit_length() - 1)
    if power != p and operation != "all_reduce":
        return None
    core = np.arange(power, dtype=np.int64)
    halving = [
        _phase(layout, core, core ^ distance, np.full(power, 0.5 / distance), steps=1)
        for distance in (1 << j for j in range(power.bit_length() - 1))
    ]
    if operation == "reduce_scatter":
        return halving
    doubling = halving[::-1]
    if operation == "all_gather":
        return doubling
    rest = np.arange(power, p, dtype=np.int64)
    if not rest.size:
        return [*halving, *doubling]
    fold = _phase(layout, rest, rest - power, np.ones(rest.size), steps=1)
    return [fold, *halving, *doubling, *mirror([fold])]


def hierarchical(layout: Layout, operation: Operation) -> list[Phase] | None:
    """Inside the hosts first, then between them by one ring per device (each 1 / g of the bytes), then inside again.

    With one rank per host, racks take the place of hosts.
    """
    p, block = layout.size, layout.block
    if block == 1:
        block = layout.rack_block
    if block in (1, p):
        return None
    places = np.arange(p, dtype=np.int64)
    hosts = p // block
    place = places % block
    inner = _phase(
        layout, places, places - place + (place + 1) % block, np.full(p, (block - 1) / block), steps=block - 1
    )
    passes = 2 if operation == "all_reduce" else 1
    outer = _phase(
        layout, places, (places + block) % p, np.full(p, passes * (hosts - 1) / p), steps=passes * (hosts - 1),
        is_round=True,
    )  # fmt: skip
    match operation:
        case "all_reduce":
            return [inner, outer, inner]
        case "all_gather":
            return [outer, inner]
        case _:
            return [inner, outer]


def pairwise(layout: Layout) -> Phase:
    """Every rank sends 1 / p to each other one. Of very many, evenly spaced shifts stand for all."""
    p = layout.size
    places = np.arange(p, dtype=np.int64)
    shifts = np.arange(1, p, dtype=np.int64)
    if p > MAX_PAIRS:
        num = max(8, MAX_PAIRS * MAX_PAIRS // p)
        shifts = np.unique(1 + (np.arange(num) * 2 + 1) * (p - 1) // (2 * num)).astype(np.int64)
    source = np.tile(places, shifts.size)
    target = (source + np.repeat(shifts, p)) % p
    each = (p - 1) / shifts.size
    return _phase(layout, source, target, np.full(source.size, each / p), steps=p - 1, is_round=True, stands_for=each)


def bruck(layout: Layout) -> list[Phase]:
    """In step j each rank passes on, 2^j places further, all blocks whose distance has that bit."""
    p = layout.size
    places = np.arange(p, dtype=np.int64)
    found = []
    for j in range((p - 1).bit_length()):
        distance = 1 << j
        moved = int(((places >> j) & 1).sum())
        found.append(_phase(layout, places, (places + distance) % p, np.full(p, moved / p), steps=1))
    return found


def binomial(layout: Layout, *, halves: bool) -> list[Phase]:
    """From place 0: in each step those who hold the data send to one who does not, the far ones first.

    ``halves``: only the part that the receiver's half of the tree needs (scatter); else all of it (broadcast).
    """
    p = layout.size
    found = []
    distance = 1 << ((p - 1).bit_length() - 1)
    while distance:
        source = np.arange(0, p - distance, 2 * distance, dtype=np.int64)
        needed = np.minimum(distance, p - source - distance) / p if halves else np.ones(source.size)
        found.append(_phase(layout, source, source + distance, needed, steps=1))
        distance //= 2
    return found


def flat(layout: Layout, share: float) -> Phase:
    """Place 0 sends each other place its share, one message after another."""
    others = np.arange(1, layout.size, dtype=np.int64)
    return _phase(layout, np.zeros_like(others), others, np.full(others.size, share), steps=others.size)


def mirror(found: list[Phase]) -> list[Phase]:
    """The same backwards in time and direction: broadcast becomes reduce, scatter becomes gather."""
    return [dataclasses.replace(phase, source=phase.target, target=phase.source) for phase in reversed(found)]
