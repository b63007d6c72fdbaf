"""Stage splits of a pipeline by exact dynamic programming: which consecutive layers run on which stage.

Minimises the slowest stage, its outgoing transfer included, over all splits into consecutive non-empty stages, subject
to each stage's memory. O(L^2 S) by prefix sums. Exact for a pipeline in its steady state; the fill of a short schedule
(few micro-batches) may favour another split by a little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from wirespeed.errors import UsageError


class StageSplit(msgspec.Struct, frozen=True, kw_only=True):
    """``bounds[i]`` is the first layer of stage i; stage i ends where the next begins. Times are per micro-batch."""

    bounds: tuple[int, ...]
    num_layers: int
    stage_s: tuple[float, ...]
    slowest_s: float
    even_slowest_s: float
    """The slowest stage of the split with equal numbers of layers, for comparison."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers per stage."""
        ends = (*self.bounds[1:], self.num_layers)
        return tuple(end - start for start, end in zip(self.bounds, ends, strict=True))


def split_stages(
    layer_s: Sequence[float],
    num_stages: int,
    *,
    transfer_s: Sequence[float] | None = None,
    layer_bytes: Sequence[float] | None = None,
    stage_bytes: float | Sequence[float] = math.inf,
    stage_speed: Sequence[float] | None = None,
) -> StageSplit:
    """The best split of ``layer_s`` (forward and backward of one micro-batch per layer, at speed 1).

    ``transfer_s[i]``: sending layer i's output to the next stage, counted where a stage ends after layer i.
    ``layer_bytes`` with ``stage_bytes`` (one number or one per stage) refuses stages that do not fit. ``stage_speed``:
    relative speeds of the devices, stage by stage. Raises UsageError where no split is possible.
    """
    num_layers = len(layer_s)
    speed = [1.0] * num_stages if stage_speed is None else list(stage_speed)
    limits = [float(stage_bytes)] * num_stages if isinstance(stage_bytes, int | float) else list(stage_bytes)
    moves = [0.0] * num_layers if transfer_s is None else list(transfer_s)
    sizes = [0.0] * num_layers if layer_bytes is None else list(layer_bytes)
    if not 1 <= num_stages <= num_layers:
        raise UsageError(f"got {num_stages} stages for {num_layers} layers", expected="1 stage to one per layer")
    if len(speed) != num_stages or len(limits) != num_stages or len(moves) != num_layers or len(sizes) != num_layers:
        raise UsageError("got lists of unequal length", expected="one entry per layer, and one per stage")
    if not all(0 <= one < math.inf for one in (*layer_s, *moves, *sizes)) or not all(
        0 < one < math.inf for one in speed
    ):
        raise UsageError(
            "got a layer time or a speed that is negative or not finite", expected="0 or more; speeds above 0"
        )
    work = _prefix(layer_s)
    held = _prefix(sizes)

    def cost_s(stage: int, start: int, end: int) -> float:
        if held[end] - held[start] > limits[stage]:
            return math.inf
        out_s = moves[end - 1] if stage < num_stages - 1 else 0.0
        return (work[end] - work[start]) / speed[stage] + out_s

    best = [[math.inf] * (num_layers + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(num_stages):
        for end in range(stage + 1, num_layers - (num_stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                own_s = cost_s(stage, start, end)
                # Going back only adds layers: once this stage alone is worse than the best so far, so is the rest.
                if own_s - (moves[end - 1] if stage < num_stages - 1 else 0.0) >= best[stage + 1][end]:
                    break
                total_s = max(best[stage][start], own_s)
                if total_s < best[stage + 1][end]:
                    best[stage + 1][end], cut[stage + 1][end] = total_s, start
    if math.isinf(best[num_stages][num_layers]):
        raise UsageError(
            f"no split of {num_layers} layers into {num_stages} stages fits the memory of the stages",
            expected="stages whose layers fit",
            hint="more stages, or tensor parallel",
        )
    bounds = [0] * num_stages
    end = num_layers
    for stage in range(num_stages, 0, -1):
        end = bounds[stage - 1] = cut[stage][end]
    ends = [*bounds[1:], num_layers]
    even = [round(num_layers * stage / num_stages) for stage in range(num_stages + 1)]
    return StageSplit(
        bounds=tuple(bounds),
        num_layers=num_layers,
        stage_s=tuple(cost_s(stage, bounds[stage], ends[stage]) for stage in range(num_stages)),
        slowest_s=best[num_stages][num_layers],
        even_slowest_s=max(
            (work[even[stage + 1]] - work[even[stage]]) / speed[stage]
            + (moves[even[stage + 1] - 1] if stage < num_stages - 1 else 0.0)
            for stage in range(num_stages)
        ),
    )


def _prefix(values: Sequence[float]) -> list[float]:
    total = 0.0
    found = [0.0]
    for value in values:
        total += value
        found.append(total)
    return found
