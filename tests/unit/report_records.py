"""Builds comparisons as `wirespeed tune` makes them: a character GPT on four hosts at 1 Gbit/s."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

from wirespeed.records import Environment
from wirespeed.spec.comparison import LossPoint, MeasuredFabric, StepBreakdown, StrategyOutcome, TuneRecord
from wirespeed.spec.prediction import Prediction
from wirespeed.spec.strategy import Strategy

NUM_ELEMENTS = 7_200_000

ENVIRONMENT = Environment(
    host="node01",
    kernel="6.1.0-18-amd64",
    cpu="AMD EPYC 7543 32-Core Processor",
    num_cpus=2,
    versions={"python": "3.11.2", "torch": "2.13.0+cpu", "wirespeed": "0.1.0"},
    command="wirespeed tune examples/char_gpt.py --lab 4x1gbit --fidelity compressed --out out/demo",
    git_commit="6bd50fa",
    nics={"eth0": "veth, 1 Gbit/s"},
)


def make_fabric(num_hosts: int = 4, rate_bit_per_s: float = 0.956e9) -> MeasuredFabric:
    hosts = tuple(f"host{index:02d}" for index in range(num_hosts))
    jitter = random.Random(7)
    links = {
        source: {target: rate_bit_per_s * (1 - 0.01 * jitter.random()) for target in hosts if target != source}
        for source in hosts
    }
    return MeasuredFabric(
        description=f"{num_hosts} network namespaces, 1 Gbit/s each",
        hosts=hosts,
        num_ranks=num_hosts,
        link_bit_per_s=rate_bit_per_s,
        declared_bit_per_s=1e9,
        rtt_s=42e-6,
        links=links if num_hosts > 1 else {},
    )


def make_losses(
    step_s: float, *, late: float = 0.0, num_steps: int = 120, every: int = 10, seed: int = 1
) -> tuple[LossPoint, ...]:
    """A training curve: ``late`` steps behind the best one."""
    noise = random.Random(seed)
    return tuple(
        LossPoint(
            step=step,
            train_s=step * step_s,
            loss=2.2 + 1.9 * math.exp(-max(0.0, step - late) / 32) + noise.uniform(-0.004, 0.004),
        )
        for step in range(0, num_steps + 1, every)
    )


def make_outcome(
    name: str,
    *,
    predicted_s: float,
    measured_s: float | None,
    exposed_s: float,
    late: float = 0.0,
    **changes: Any,
) -> StrategyOutcome:
    strategy = Strategy.parse(name)
    wire_bytes = strategy.wire_bytes(NUM_ELEMENTS, 4)
    outcome = StrategyOutcome(
        name=name,
        strategy=strategy,
        prediction=Prediction(
            strategy=strategy,
            step_s=predicted_s,
            compute_s=0.13,
            codec_s=0.01,
            wire_s=exposed_s,
            exposed_s=max(0.0, predicted_s - 0.13),
            wire_bytes=wire_bytes,
            lower_bound_s=0.13,
            binding="bandwidth",
            is_in_range=True,
        ),
        predicted_step_s=predicted_s,
    )
    if measured_s is not None:
        rest_s = measured_s - exposed_s
        outcome = msgspec.structs.replace(
            outcome,
            measured_step_s=measured_s,
            measured_spread=0.03,
            prediction_error=predicted_s / measured_s - 1,
            breakdown=StepBreakdown(
                step_s=measured_s,
                data_s=0.02 * rest_s,
                forward_s=0.3 * rest_s,
                backward_s=0.58 * rest_s,
                exposed_s=exposed_s,
                optimizer_s=0.08 * rest_s,
                other_s=0.02 * rest_s,
            ),
            exposed_s=exposed_s,
            stated_bytes_per_step=wire_bytes,
            wire_bytes_per_step=wire_bytes * 1.047,
            num_steps=120,
            step_times_s=tuple(measured_s * (1 + 0.01 * math.sin(step)) for step in range(120)),
            losses=make_losses(measured_s, late=late, seed=len(name)),
            verdict="measured",
        )
        outcome = msgspec.structs.replace(outcome, final_loss=outcome.losses[-1].loss)
    return msgspec.structs.replace(outcome, **changes)


def make_record(change: Callable[[TuneRecord], TuneRecord] = lambda record: record, **changes: Any) -> TuneRecord:
    """Five strategies measured, one only predicted; int8 chosen."""
    strategies = (
        make_outcome(
            "dense", predicted_s=0.451, measured_s=0.468, exposed_s=0.337, time_to_loss_s=56.2, verdict="baseline"
        ),
        make_outcome(
            "half",
            predicted_s=0.271,
            measured_s=0.288,
            exposed_s=0.155,
            time_to_loss_s=34.6,
            verdict="1.62x sooner than dense at dense's loss",
        ),
        make_outcome(
            "int8",
            predicted_s=0.201,
            measured_s=0.192,
            exposed_s=0.055,
            time_to_loss_s=23.0,
            chosen=True,
            verdict="fastest to dense's loss of those allowed",
        ),
        make_outcome(
            "topk@5%",
            predicted_s=0.19,
            measured_s=0.229,
            exposed_s=0.09,
            late=6,
            time_to_loss_s=29.3,
            verdict="below fidelity compressed",
        ),
        make_outcome(
            "topk@1%",
            predicted_s=0.158,
            measured_s=0.162,
            exposed_s=0.028,
            late=40,
            verdict="does not reach dense's loss in 120 steps",
        ),
        make_outcome(
            "dense/4MiB", predicted_s=0.46, measured_s=None, exposed_s=0.32, verdict="predicted slower: not run"
        ),
    )
    record = TuneRecord(
        environment=ENVIRONMENT,
        created="2026-01-12T09:30:00+00:00",
        script="examples/char_gpt.py",
        arguments=("--steps", "120"),
        fabric=make_fabric(),
        workload=None,
        fidelity="compressed",
        loss_kind="held_out",
        loss_target=strategies[0].final_loss,
        strategies=strategies,
        chosen="int8",
        reason=(
            "int8 reaches dense's held-out loss soonest of the strategies that fidelity 'compressed' allows: the link "
            "binds dense, and a quarter of its bytes hides behind backward."
        ),
        warnings=("Hosts share 2 cores: compute and codecs are slower here than on hosts of their own.",),
    )
    return change(msgspec.structs.replace(record, **changes))
