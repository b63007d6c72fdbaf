"""Pipeline schedules as recurrences: 1F1B and interleaved 1F1B, stages of any speed, transfers between them.

Every stage works through its operations in the schedule's order; one starts when the stage is free and its input has
arrived. That is exact for these schedules. Many micro-batches are not simulated one by one: once every stage is busy
the schedule is periodic, so a longer run adds whole periods. Transfers run beside compute and take no bandwidth from
each other; give their time under load.
"""

from __future__ import annotations

import functools

import msgspec

from wirespeed.errors import UsageError

SIMULATED_ROUNDS = 3
"""Rounds of as many micro-batches as there are stages; the last ones give the period.

Exact for plain 1F1B; chunks of unequal stages and long transfers may have a longer period, which costs up to 3 %."""


class PipelineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """``total_s`` from the first forward to the last backward. ``ideal_s``: the slowest stage without any wait."""

    total_s: float
    ideal_s: float

    @property
    def bubble_s(self) -> float:
        """What the schedule and the transfers add to the slowest stage's work."""
        return self.total_s - self.ideal_s


def run_pipeline(
    forward_s: tuple[float, ...],
    backward_s: tuple[float, ...],
    *,
    num_microbatches: int,
    transfer_s: float = 0.0,
    interleave: int = 1,
) -> PipelineTimes:
    """Time of one step. ``forward_s`` and ``backward_s`` are per stage for one micro-batch, all its chunks together.

    ``transfer_s`` is one activation (or its gradient) to the next stage. Interleaved stages hold ``interleave`` equal
    chunks; micro-batches must then be a multiple of the stages.
    """
    stages = len(forward_s)
    if stages < 1 or len(backward_s) != stages or num_microbatches < 1 or interleave < 1:
        raise UsageError(
            f"got {stages} forward and {len(backward_s)} backward times, {num_microbatches} micro-batches, "
            f"{interleave} chunks",
            expected="as many of both, and 1 or more of each",
        )
    if interleave > 1 and num_microbatches % stages:
        raise UsageError(
            f"got {num_microbatches} micro-batches over {stages} interleaved stages",
            expected="a multiple of the stages",
        )
    ideal_s = num_microbatches * max(f + b for f, b in zip(forward_s, backward_s, strict=True))
    if stages == 1:
        return PipelineTimes(total_s=ideal_s, ideal_s=ideal_s)
    rounds, rest = divmod(num_microbatches, stages)
    if rounds <= SIMULATED_ROUNDS:
        return PipelineTimes(
            total_s=_simulate(forward_s, backward_s, num_microbatches, transfer_s, interleave), ideal_s=ideal_s
        )
    few = SIMULATED_ROUNDS * stages + rest
    total_s = _simulate(forward_s, backward_s, few, transfer_s, interleave)
    period_s = total_s - _simulate(forward_s, backward_s, few - stages, transfer_s, interleave)
    total_s += (rounds - SIMULATED_ROUNDS) * period_s
    return PipelineTimes(total_s=max(total_s, ideal_s), ideal_s=ideal_s)


def uniform_pipeline_s(
    stage_s: float, *, stages: int, num_microbatches: int, transfer_s: float = 0.0, interleave: int = 1
) -> float:
    """Closed form for equal stages: ``(m + (p - 1) / v) (f + b)``, and the transfers on the way in and out.

    Narayanan et al. 2021, section 2.2. Exact without transfers; with them a little optimistic in the steady state of
    the plain schedule, where every round trip over the stages waits for two transfers per stage.
    """
    fill_s = (stages - 1) / interleave * stage_s + 2 * (stages - 1) * transfer_s
    steady_s = 0.0
    if stages > 1 and interleave == 1:
        steady_s = 2 * transfer_s * (stages - 1) / stages * max(0, num_microbatches - stages)
    return num_microbatches * stage_s + fill_s + steady_s


@functools.lru_cache(maxsize=1024)
def _order(stages: int, stage: int, num_microbatches: int, interleave: int) -> tuple[tuple[bool, int, int], ...]:
    """A stage's operations as ``(is_forward, chunk, micro-batch)``, as Megatron-LM orders them."""
    if interleave == 1:
        num_warm = min(stages - stage - 1, num_microbatches)
        passes = [(0, micro) for micro in range(num_microbatches)]
        forwards = backwards = passes
    else:
        forwards = []
        for first in range(0, num_microbatches, stages):
            micros = range(first, first + stages)
            forwards += [(chunk, micro) for chunk in range(interleave) for micro in micros]
        backwards = [(interleave - 1 - chunk, micro) for chunk, micro in forwards]
        num_warm = min(2 * (stages - stage - 1) + (interleave - 1) * stages, len(forwards))
        if num_microbatches == stages:
            num_warm = len(forwards)
    order = [(True, *one) for one in forwards[:num_warm]]
    for index in range(len(forwards) - num_warm):
        order += [(True, *forwards[num_warm + index]), (False, *backwards[index])]
    order += [(False, *one) for one in backwards[len(forwards) - num_warm :]]
    return tuple(order)


def _simulate(
    forward_s: tuple[float, ...],
    backward_s: tuple[float, ...],
    num_microbatches: int,
    transfer_s: float,
    interleave: int,
) -> float:
    stages = len(forward_s)
    last = stages * interleave - 1
    # When the output of a virtual stage is there, by (virtual stage, micro-batch), forward and backward.
    ends: tuple[list[list[float]], list[list[float]]] = (
        [[-1.0] * num_microbatches for _ in range(last + 1)],
        [[-1.0] * num_microbatches for _ in range(last + 1)],
    )
    orders = [_order(stages, stage, num_microbatches, interleave) for stage in range(stages)]
    places = [0] * stages
    free_s = [0.0] * stages
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            order = orders[stage]
            place = places[stage]
            now = free_s[stage]
            forward_chunk_s, backward_chunk_s = forward_s[stage] / interleave, backward_s[stage] / interleave
            while place < len(order):
                is_forward, chunk, micro = order[place]
                virtual = chunk * stages + stage
                if is_forward:
                    arrived = 0.0 if virtual == 0 else ends[0][virtual - 1][micro]
                    if arrived < 0:
                        break
                    now = max(now, arrived + (transfer_s if virtual else 0.0)) + forward_chunk_s
                    ends[0][virtual][micro] = now
                else:
                    arrived = ends[0][virtual][micro] if virtual == last else ends[1][virtual + 1][micro]
                    if arrived < 0:
                        break
                    now = max(now, arrived + (transfer_s if virtual < last else 0.0)) + backward_chunk_s
                    ends[1][virtual][micro] = now
                place += 1
            if place > places[stage]:
                places[stage], free_s[stage] = place, now
                moved = True
    assert all(place == len(order) for place, order in zip(places, orders, strict=True)), "the schedule deadlocks"
    return max(free_s)
