"""Arms of a training benchmark: one script, one lab, many ways to exchange gradients, run one after another.

An arm is a strategy of wirespeed's (``int8/4MiB``), a hook of PyTorch's own (``torch-fp16``, ``torch-powersgd@2``) or
another's averaging (``hivemind@8``).
Every arm runs in the same lab, from the same seed, timed by the same clock.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from _peers import is_peer
from wirespeed.lab import Lab, LabSpec
from wirespeed.spec.comparison import StrategyOutcome
from wirespeed.spec.strategy import Strategy
from wirespeed.train.trace import RunDirective, decode_trace, write_directive
from wirespeed.tune import compare
from wirespeed.tune.places import LabPlace, LoopbackPlace, worker_command
from wirespeed.tune.verdict import raise_unless_fine
from wirespeed.tune.watch import Watch

PEER_WORKER = str(Path(__file__).with_name("_peer_worker.py"))


@dataclass(frozen=True)
class Arm:
    """One way to exchange gradients."""

    name: str

    @property
    def is_peer(self) -> bool:
        """Whether it is none of wirespeed's."""
        return is_peer(self.name)

    @property
    def strategy(self) -> Strategy:
        """The strategy that its session is given; a peer's session only keeps time."""
        return Strategy() if self.is_peer else Strategy.parse(self.name)


class Arena:
    """Where arms run: a lab of this description, or ranks of this machine on loopback. Use as a context manager."""

    def __init__(self, spec: str | int, script: str, arguments: tuple[str, ...] = ()) -> None:
        self._lab = Lab(LabSpec.parse(spec)) if isinstance(spec, str) else None
        self._place: LabPlace | LoopbackPlace
        if isinstance(spec, int):
            self._place = LoopbackPlace(spec, why="only what is learned counts")
        self._script = script
        self._arguments = arguments
        self._folder = tempfile.TemporaryDirectory(prefix="wirespeed-bench-")
        self._num_runs = 0

    def __enter__(self) -> Arena:
        if self._lab is not None:
            self._lab.up()
            self._place = LabPlace(self._lab)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lab is not None:
            self._lab.down()
        self._folder.cleanup()

    def run(
        self,
        arm: Arm,
        *,
        num_steps: int,
        seed: int,
        target_loss: float | None = None,
        max_steps: int | None = None,
    ) -> StrategyOutcome:
        """Run one arm for ``num_steps``, or further, up to ``max_steps``, until its held-out loss is at the target."""
        folder = Path(self._folder.name) / f"run-{self._num_runs}"
        self._num_runs += 1
        directive = RunDirective(
            label=arm.name,
            strategy=arm.strategy,
            num_steps=num_steps,
            folder=str(folder),
            seed=seed,
            keeps_buckets=arm.is_peer,
            target_loss=target_loss,
            max_steps=max_steps,
        )
        path = write_directive(directive)
        arguments = (self._script, *self._arguments, "--seed", str(seed))
        command = (
            [sys.executable, PEER_WORKER, arm.name, *arguments]
            if arm.is_peer
            else worker_command("wirespeed.tune.worker", *arguments)
        )
        end = self._place.run(
            command,
            env={"WIRESPEED_RUN": str(path)},
            folder=folder,
            watch=Watch(directive.heartbeat_path, self._place.num_ranks, start_timeout_s=120.0, stall_timeout_s=120.0),
            timeout_s=3600.0,
        )
        traces = [
            decode_trace(held.read_bytes(), source=str(held))
            for held in map(directive.trace_path, range(self._place.num_ranks))
            if held.is_file()
        ]
        raise_unless_fine(end, traces, self._place.num_ranks, arm.name, folder / "log.txt")
        return compare.outcome_of(traces[0].strategy, traces, None, num_steps=num_steps, name=arm.name)


def seconds_to(outcome: StrategyOutcome, target: float) -> float | None:
    """Training time at which the held-out loss first is at the target; None when it never is."""
    return compare.time_to_loss(outcome.losses, target)
