"""What a session leaves in a checkpoint, and what it may be loaded onto.

Tensors, numbers and text only: no process group and nothing that needs pickle. A state belongs to one rank of a group
of one size, because residuals do. They are saved as without a loss scaler.
"""

from __future__ import annotations

from typing import Any

from wirespeed.errors import DataError
from wirespeed.spec.strategy import Strategy
from wirespeed.train.exchanger import Exchanger
from wirespeed.train.schedules import Schedule

STATE_SCHEMA = 1


def state_of(exchanger: Exchanger, schedule: Schedule, *, scale: float, num_steps: int) -> dict[str, Any]:
    """The state of one rank. ``scale``: by what its residuals are multiplied at present."""
    return {
        "schema": STATE_SCHEMA,
        "strategy": exchanger.strategy.name,
        "num_ranks": exchanger.num_ranks,
        "rank": exchanger.rank,
        "num_steps": num_steps,
        "schedule": schedule.state_dict(),
        "residuals": exchanger.residuals.state_dict(divided_by=scale),
        "learned": exchanger.learned.state_dict(),
    }


def load_state(state: dict[str, Any], exchanger: Exchanger, schedule: Schedule) -> None:
    """Take up a state. Raises DataError where it is of another rank, group size, schedule or version."""
    if state.get("schema") != STATE_SCHEMA:
        raise DataError(f"got a session state of schema {state.get('schema')!r}", expected=f"schema {STATE_SCHEMA}")
    if (state["num_ranks"], state["rank"]) != (exchanger.num_ranks, exchanger.rank):
        raise DataError(
            f"got the state of rank {state['rank']} of {state['num_ranks']}",
            expected=f"the state of rank {exchanger.rank} of {exchanger.num_ranks}",
            hint="residuals belong to a rank: load each rank's own state, with the same number of ranks",
        )
    saved, present = Strategy.parse(state["strategy"]), exchanger.strategy
    if (saved.schedule, saved.period, saved.warmup_steps) != (present.schedule, present.period, present.warmup_steps):
        raise DataError(
            f"got the state of strategy {saved.name!r}",
            expected=f"one with the schedule of {present.name!r}",
            hint="resume with the strategy that was saved, then switch",
        )
    exchanger.drop_buffers()
    exchanger.residuals.load_state_dict(state["residuals"])
    # What one codec has learned (low-rank's factors, half's scales) means nothing to another.
    is_same_codec = saved.codec_name == present.codec_name
    exchanger.learned.load_state_dict(state.get("learned", {}) if is_same_codec else {})
    schedule.load_state_dict(state.get("schedule", {}))
