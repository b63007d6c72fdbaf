"""Collective algorithms as phases: who sends which share of the bytes to whom, in how many steps.

A phase's flows run at the same time; phases follow each other. ``weight`` is the share of the collective's size that a
flow carries over the whole phase, so bytes can be counted and laid on links. Formulae: Thakur, Rabenseifner, Gropp
(2005), Optimization of Collective Communication Operations in MPICH; Sanders, Speck, Traff (2009), Two-tree algorithms
for full bandwidth broadcast, reduction and scan; Bruck et al. (1997). Arithmetic on the elements is not charged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from wirespeed.errors import UsageError
from wirespeed.fabric.network import Floats, Ints
from wirespeed.records import Collective

Operation = Collective | Literal["reduce", "scatter", "gather", "send"]
Algorithm = Literal[
    "ring", "tree", "halving_doubling", "hierarchical", "pairwise", "bruck", "chain", "binomial", "flat",
    "scatter_allgather", "direct",
]  # fmt: skip

OPERATIONS: tuple[str, ...] = (*get_args(Collective), "reduce", "scatter", "gather", "send")

MAX_PAIRS = 512
"""Ranks up to which every pair of an all_to_all is a flow of its own; above, that many shifts stand for all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """Flows at the same time. ``source``, ``target`` (F,) are ranks, ``group`` (F,) says whose, ``weight`` (F,) shares.

    ``net_steps`` and ``local_steps``: messages one after another between hosts and inside them; ``depth``: of those, the
    hops that a stream cut into chunks passes before it runs full (0: the phase is not a stream).
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


@dataclass(frozen=True, eq=False)
class Layout:
    """Groups of one size: ``ranks`` (G, p), the host of each (G, p), and the NICs that each host can use at once."""

    ranks: Ints
    host: Ints
    num_nics: int

    @property
    def size(self) -> int:
        """Ranks per group."""
        return int(self.ranks.shape[1])

    @property
    def block(self) -> int:
        """Ranks per host where every host holds the same number, one after another in the group's order; else 1."""
        if self.size < 2:
            return 1
        changes = self.host[:, 1:] != self.host[:, :-1]
        edges = np.flatnonzero(changes[0])
        block = int(edges[0]) + 1 if edges.size else self.size
        if self.size % block:
            return 1
        expected = np.zeros(self.size - 1, dtype=bool)
        expected[block - 1 :: block] = True
        if not (changes == expected).all():
            return 1
        heads = np.sort(self.host[:, ::block], axis=1)
        return block if heads.shape[1] < 2 or (heads[:, 1:] != heads[:, :-1]).all() else 1


def algorithms(operation: Operation, backend: str) -> tuple[Algorithm, ...]:
    """What a backend may choose from; backend "any" is everything that is known here."""
    gloo: dict[str, tuple[Algorithm, ...]] = {
        "all_reduce": ("ring",), "all_gather": ("ring",), "reduce_scatter": ("ring",), "all_to_all": ("pairwise",),
        "broadcast": ("binomial",), "reduce": ("binomial",), "scatter": ("flat",), "gather": ("flat",),
        "send": ("direct",),
    }  # fmt: skip
    nccl: dict[str, tuple[Algorithm, ...]] = {
        **gloo, "all_reduce": ("ring", "tree"), "broadcast": ("chain",), "reduce": ("chain",),
    }  # fmt: skip
    every: dict[str, tuple[Algorithm, ...]] = {
        "all_reduce": ("ring", "tree", "halving_doubling", "hierarchical"),
        "all_gather": ("ring", "halving_doubling", "hierarchical"),
        "reduce_scatter": ("ring", "halving_doubling", "hierarchical"),
        "all_to_all": ("pairwise", "bruck"),
        "broadcast": ("chain", "tree", "binomial", "scatter_allgather"),
        "reduce": ("chain", "tree", "binomial"),
        "scatter": ("flat", "binomial"),
        "gather": ("flat", "binomial"),
        "send": ("direct",),
    }
    tables = {"gloo": gloo, "nccl": nccl, "any": every}
    if operation not in every:
        raise UsageError(f"got operation {operation!r}", expected=", ".join(OPERATIONS))
    if backend not in tables:
        raise UsageError(f"got backend {backend!r}", expected="gloo, nccl or any")
    return tables[backend][operation]


def phases(operation: Operation, algorithm: Algorithm, layout: Layout) -> list[Phase] | None:
    """The phases of an algorithm for groups of one size; None where it cannot be used with this layout.

    Raises UsageError where the algorithm is none of the operation's at all.
    """
    if algorithm not in algorithms(operation, "any"):
        raise UsageError(
            f"got algorithm {algorithm!r} for {operation}", expected=", ".join(algorithms(operation, "any"))
        )
    if layout.size < 2:
        return []
    match algorithm:
        case "ring":
            passes = 2 if operation == "all_reduce" else 1
            return [_ring(layout, passes)]
        case "tree":
            return [_tree(layout, operation)]
        case "halving_doubling":
            return _halving_doubling(layout, operation)
        case "hierarchical":
            return _hierarchical(layout, operation)
        case "pairwise":
            return [_pairwise(layout)]
        case "bruck":
            return _bruck(layout)
        case "chain":
            return [_chain(layout, is_reversed=operation == "reduce")]
        case "binomial":
            found = _binomial(layout, halves=operation in ("scatter", "gather"))
            return _mirror(found) if operation in ("reduce", "gather") else found
        case "flat":
            return [_flat(layout)] if operation == "scatter" else _mirror([_flat(layout)])
        case "scatter_allgather":
            return [*_binomial(layout, halves=True), _ring(layout, 1)]
        case "direct":
            if layout.size != 2:
                raise UsageError(f"got a group of {layout.size} ranks to send", expected="two: sender and receiver")
            return [_phase(layout, np.array([0]), np.array([1]), np.ones(1), steps=1)]


def merge(lists: list[list[Phase]]) -> list[Phase]:
    """Lists of phases that run beside each other, as one: the first ones together, then the second ones, ..."""
    if len(lists) < 2:
        return lists[0] if lists else []
    merged, offset = [], 0
    for step in range(max(map(len, lists))):
        at = [held[step] for held in lists if step < len(held)]
        groups = []
        for phase in at:
            groups.append(phase.group + offset)
            offset += int(phase.group.max()) + 1
        merged.append(
            Phase(
                source=np.concatenate([phase.source for phase in at]),
                target=np.concatenate([phase.target for phase in at]),
                group=np.concatenate(groups),
                weight=np.concatenate([phase.weight for phase in at]),
                net_steps=max(phase.net_steps for phase in at),
                local_steps=max(phase.local_steps for phase in at),
                depth=max(phase.depth for phase in at),
                is_round=all(phase.is_round for phase in at),
                stands_for=min(phase.stands_for for phase in at),
            )
        )
    return merged


def _phase(
    layout: Layout, source: Ints, target: Ints, weight: Floats, *, steps: float, depth: float = 0.0,
    is_round: bool = False, stands_for: float = 1.0,
) -> Phase:  # fmt: skip
    """A phase with the same flows (places in the group, (F,)) in every group."""
    num_groups = layout.ranks.shape[0]
    from_, to = layout.ranks[:, source], layout.ranks[:, target]
    crosses = layout.host[:, source] != layout.host[:, target]
    # Steps that stay inside a host cost less; where some flows cross, in a ring by their share, else all.
    share = float(crosses.mean()) if is_round else float(crosses.any())
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


def _ring(layout: Layout, passes: int) -> Phase:
    """Each rank sends to the next, ``passes * (p - 1)`` times 1 / p of the bytes.

    With several NICs per host, one ring per NIC, each entering and leaving the hosts at another device, carries an equal
    part, as NCCL's channels do.
    """
    p, block = layout.size, layout.block
    rounds = passes * (p - 1)
    places = np.arange(p, dtype=np.int64)
    channels = min(layout.num_nics, block) if block < p else 1
    if channels == 1:
        return _phase(layout, places, np.roll(places, -1), np.full(p, rounds / p), steps=rounds, is_round=True)
    entries = np.arange(channels, dtype=np.int64) * block // channels
    starts = np.arange(0, p, block, dtype=np.int64)
    # Inside a host every device sends to the next one, but on the channel that leaves there.
    place = places % block
    leaving = np.bincount((entries - 1) % block, minlength=block)
    local_weight = rounds / p * (channels - leaving[place]) / channels
    across = (starts[:, None] + (entries - 1) % block).ravel()
    entering = (np.roll(starts, -1)[:, None] + entries).ravel()
    found = _phase(
        layout,
        np.concatenate([places, across]),
        np.concatenate([places - place + (place + 1) % block, entering]),
        np.concatenate([local_weight, np.full(across.size, rounds / p / channels)]),
        steps=rounds,
        is_round=True,
    )
    net = rounds / block
    return Phase(
        source=found.source, target=found.target, group=found.group, weight=found.weight,
        net_steps=net, local_steps=rounds - net, is_round=True,
    )  # fmt: skip


def binary_trees(num: int) -> tuple[Ints, Ints]:
    """Parents in two binary trees over ``num`` places (-1 at the roots): the inner nodes of one are leaves of the other.

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


def _tree(layout: Layout, operation: Operation) -> Phase:
    """Two binary trees over the hosts, each with half of the bytes, streamed; inside hosts a chain to the tree's device.

    all_reduce goes up and down at the same time. With several NICs per host each carries an equal part.
    """
    p, block = layout.size, layout.block
    num_hosts = p // block
    channels = max(1, min(layout.num_nics, block))
    entries = np.arange(channels, dtype=np.int64) * block // channels
    sources: list[Ints] = []
    targets: list[Ints] = []
    weights: list[Floats] = []
    for parent in binary_trees(num_hosts):
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
    net = ways * math.ceil(math.log2(num_hosts)) if num_hosts > 1 else 0
    local = ways * (block - 1)
    found = _phase(
        layout, np.concatenate(sources), np.concatenate(targets), np.concatenate(weights), steps=net + local,
        depth=max(0, net + local - 1),
    )  # fmt: skip
    has_net = bool((layout.host[:, :1] != layout.host).any())
    return Phase(
        source=found.source, target=found.target, group=found.group, weight=found.weight,
        net_steps=net if has_net else 0, local_steps=local if has_net else net + local, depth=found.depth,
    )  # fmt: skip


def _halving_doubling(layout: Layout, operation: Operation) -> list[Phase] | None:
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
    return [fold, *halving, *doubling, *_mirror([fold])]


def _hierarchical(layout: Layout, operation: Operation) -> list[Phase] | None:
    """Inside the hosts first, then between them by one ring per device (each 1 / g of the bytes), then inside again."""
    p, block = layout.size, layout.block
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


def _pairwise(layout: Layout) -> Phase:
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


def _bruck(layout: Layout) -> list[Phase]:
    p = layout.size
    places = np.arange(p, dtype=np.int64)
    found = []
    for j in range((p - 1).bit_length()):
        distance = 1 << j
        moved = int(((places >> j) & 1).sum())
        found.append(_phase(layout, places, (places + distance) % p, np.full(p, moved / p), steps=1))
    return found


def _chain(layout: Layout, *, is_reversed: bool) -> Phase:
    places = np.arange(layout.size - 1, dtype=np.int64)
    ends = (places + 1, places) if is_reversed else (places, places + 1)
    hops = layout.size - 1
    crosses = float((layout.host[:, 1:] != layout.host[:, :-1]).mean())
    found = _phase(layout, *ends, np.ones(hops), steps=hops, depth=hops - 1, is_round=True)
    return Phase(
        source=found.source, target=found.target, group=found.group, weight=found.weight,
        net_steps=hops * crosses, local_steps=hops * (1 - crosses), depth=hops - 1, is_round=True,
    )  # fmt: skip


def _binomial(layout: Layout, *, halves: bool) -> list[Phase]:
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


def _flat(layout: Layout) -> Phase:
    others = np.arange(1, layout.size, dtype=np.int64)
    return _phase(layout, np.zeros_like(others), others, np.full(others.size, 1 / layout.size), steps=others.size)


def _mirror(found: list[Phase]) -> list[Phase]:
    return [
        Phase(
            source=phase.target, target=phase.source, group=phase.group, weight=phase.weight,
            net_steps=phase.net_steps, local_steps=phase.local_steps, depth=phase.depth, is_round=phase.is_round,
        )
        for phase in reversed(found)
    ]  # fmt: skip
