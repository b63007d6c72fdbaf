"""Collective algorithms as phases: which algorithm each operation and backend has, and its phases for given groups.

A phase's flows run at the same time; phases follow each other. Their weights are shares of the collective's size, so
bytes can be counted and laid on links.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from wirespeed.errors import UsageError
from wirespeed.fabric import patterns
from wirespeed.fabric.patterns import Layout, Operation, Phase
from wirespeed.records import Collective

Algorithm = Literal[
    "ring", "tree", "halving_doubling", "hierarchical", "pairwise", "bruck", "chain", "binomial", "flat",
    "scatter_allgather", "direct", "relay", "halved_ring", "whole_ring",
]  # fmt: skip

OPERATIONS: tuple[str, ...] = (*get_args(Collective), "reduce", "gather", "send")


def algorithms(operation: Operation, backend: str) -> tuple[Algorithm, ...]:
    """What a backend may choose from; backend "any" is everything that is known here."""
    gloo: dict[str, tuple[Algorithm, ...]] = {
        "all_reduce": ("ring",), "all_gather": ("halved_ring",), "reduce_scatter": ("whole_ring",),
        "all_to_all": ("pairwise",), "broadcast": ("relay",), "reduce": ("binomial",), "scatter": ("flat",),
        "gather": ("flat",), "send": ("direct",),
    }  # fmt: skip
    nccl: dict[str, tuple[Algorithm, ...]] = {
        **gloo, "all_reduce": ("ring", "tree"), "all_gather": ("ring",), "reduce_scatter": ("ring",),
        "broadcast": ("chain",), "reduce": ("chain",),
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
    if algorithm not in {*algorithms(operation, "any"), *algorithms(operation, "gloo")}:
        raise UsageError(
            f"got algorithm {algorithm!r} for {operation}", expected=", ".join(algorithms(operation, "any"))
        )
    if layout.size < 2:
        return []
    return _MAKERS[algorithm](layout, operation)


def _direct(layout: Layout, operation: Operation) -> list[Phase]:
    if layout.size != 2:
        raise UsageError(f"got a group of {layout.size} ranks to {operation}", expected="two: sender and receiver")
    return [patterns.flat(layout, 1.0)]


def _chain(layout: Layout, operation: Operation) -> list[Phase]:
    found = [patterns.chain(layout)]
    return patterns.mirror(found) if operation == "reduce" else found


def _binomial(layout: Layout, operation: Operation) -> list[Phase]:
    found = patterns.binomial(layout, halves=operation in ("scatter", "gather"))
    return patterns.mirror(found) if operation in ("reduce", "gather") else found


def _flat(layout: Layout, operation: Operation) -> list[Phase]:
    found = [patterns.flat(layout, 1 / layout.size)]
    return found if operation == "scatter" else patterns.mirror(found)


_MAKERS: dict[str, Callable[[Layout, Operation], list[Phase] | None]] = {
    "ring": lambda layout, operation: [patterns.ring(layout, 2 if operation == "all_reduce" else 1)],
    "halved_ring": lambda layout, _: [patterns.halved_ring(layout)],
    # gloo's reduce_scatter is a whole all_reduce, of which each rank keeps its part.
    "whole_ring": lambda layout, _: [patterns.ring(layout, 2)],
    "tree": lambda layout, operation: [patterns.tree(layout, operation)],
    "halving_doubling": patterns.halving_doubling,
    "hierarchical": patterns.hierarchical,
    "pairwise": lambda layout, _: [patterns.pairwise(layout)],
    "bruck": lambda layout, _: patterns.bruck(layout),
    "chain": _chain,
    "binomial": _binomial,
    "flat": _flat,
    "scatter_allgather": lambda layout, _: [*patterns.binomial(layout, halves=True), patterns.ring(layout, 1)],
    "direct": _direct,
}


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
                stall=max(phase.stall for phase in at),
                num_messages=sum(phase.messages for phase in at),
            )
        )
    return merged
