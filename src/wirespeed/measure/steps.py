"""Split a training step into data wait, forward, backward, exposed communication, optimizer and other.

A ``StepClock`` hears of events (forward begins and ends, the last bucket of a backward is ready, backward has ended,
the optimizer begins and ends) and turns the marks of one step into a ``StepParts`` when the optimizer has stepped.
On CUDA a mark is an event on the current stream, read back only when it has passed, so nothing waits for the device.

What it assumes: one optimizer step ends one training step; several forward and backward passes may lie in between
(accumulation). Exposed communication is what lies between the last gradient bucket becoming ready and the end of
backward: it includes waiting for slower ranks. So is an exchange of parameters after the optimizer. Evaluation
(forward passes without gradients, or an ``evaluation()`` block) is taken out of the step. Work between backward and the
optimizer (clipping, logging) is ``other``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch

Event = Literal[
    "step_begin",
    "forward_begin",
    "forward_end",
    "bucket_ready",
    "last_bucket_ready",
    "backward_end",
    "optimizer_begin",
    "exchange_begin",
    "optimizer_end",
    "evaluation_begin",
    "evaluation_end",
]


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """One step of one rank, in seconds. The parts sum to ``step_s``; evaluation is in none of them."""

    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    exposed_s: float
    optimizer_s: float
    other_s: float
    bucket_ready_s: tuple[float, ...]
    """When each bucket of the last backward was ready, from the start of that backward."""


@dataclass(frozen=True, slots=True)
class _Mark:
    event: Event
    wall_s: float
    cuda: Any = None


class StepClock:
    """Collects marks of one rank and keeps the parts of every finished step, the newest ``keep`` of them."""

    def __init__(self, device: torch.device, *, keep: int = 100_000) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[_Mark] = []
        self._unread: deque[list[_Mark]] = deque()
        self._steps: deque[StepParts] = deque(maxlen=keep)
        self._num_finished = 0
        self._last: list[_Mark] = []
        """The marks of the newest step, for ``extend_step``."""
        self._evaluating = 0
        self._has_begun = False
        self.on_event: Callable[[Event], None] | None = None
        """Hears of every event as it happens (on the host, not on the device)."""

    def mark(self, event: Event) -> None:
        """Note that ``event`` happens now (on the current stream, on CUDA)."""
        cuda = None
        if self._on_cuda:
            cuda = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            cuda.record()
        self._marks.append(_Mark(event, time.perf_counter(), cuda))
        if self.on_event is not None:
            self.on_event(event)

    @property
    def is_evaluating(self) -> bool:
        """Whether an ``evaluation()`` block is open."""
        return self._evaluating > 0

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """What runs inside is not training time."""
        self._evaluating += 1
        if self._evaluating == 1:
            self.begin_evaluation()
        try:
            yield
        finally:
            self._evaluating -= 1
            if self._evaluating == 0:
                self.end_evaluation()

    def begin_evaluation(self) -> None:
        """Evaluation begins. Right after another evaluation, that one goes on: what lies between belongs to it."""
        if self._marks and self._marks[-1].event == "evaluation_end":
            self._marks.pop()
        else:
            self.mark("evaluation_begin")

    def end_evaluation(self) -> None:
        """Evaluation has ended."""
        self.mark("evaluation_end")

    def extend_evaluation(self) -> None:
        """Count the time since an evaluation that has just ended as part of it."""
        if self._marks and self._marks[-1].event == "evaluation_end":
            self._marks.pop()
            self.mark("evaluation_end")

    def end_step(self) -> None:
        """Close the step with the mark just made; the next one begins there."""
        if not self._marks:
            return
        marks, last = self._marks, self._marks[-1]
        self._marks = [_Mark("step_begin", last.wall_s, last.cuda)]
        if marks[0].event != "step_begin":
            return  # the first step has no beginning that we saw: set-up before it is not training time
        self._num_finished += 1
        self._last = marks
        if self._on_cuda:
            self._unread.append(marks)
            self._read_passed()
        else:
            self._steps.append(parse_step([(m.event, m.wall_s) for m in marks]))

    def extend_step(self) -> None:
        """Add what was marked since the last ``end_step`` to that step: another optimizer's part of it."""
        added, self._marks = self._marks[1:], [_Mark("step_begin", self._marks[-1].wall_s, self._marks[-1].cuda)]
        if not self._last:
            return  # the first step, whose beginning nobody saw
        self._last += added
        if not self._on_cuda:
            self._steps[-1] = parse_step([(m.event, m.wall_s) for m in self._last])
        elif not self._unread:  # read already: read it again, whole
            self._steps.pop()
            self._unread.append(self._last)

    def begin(self) -> None:
        """Start counting here, so that the next step is the first one kept."""
        self._marks = []
        self._has_begun = True
        self.mark("step_begin")

    @property
    def has_begun(self) -> bool:
        """Whether ``begin`` was called."""
        return self._has_begun

    @property
    def num_steps(self) -> int:
        """Steps finished since the first ``begin``."""
        return self._num_finished

    def steps(self) -> list[StepParts]:
        """Parts of the finished steps, oldest first. On CUDA this waits for the newest step's events."""
        if self._on_cuda and self._unread:
            self._unread[-1][-1].cuda.synchronize()
            self._read_passed()
        return list(self._steps)

    def parsed_since(self, count: int) -> tuple[int, list[StepParts]]:
        """How many steps have their final parts by now, and the parts of those after the first ``count``.

        Waits for nothing. The newest step is left for the next call: another optimizer may still add to it.
        """
        parsed = max(0, self._num_finished - len(self._unread) - 1)
        num_new = min(parsed - count, len(self._steps) - 1)
        if num_new <= 0:
            return max(parsed, count), []
        return parsed, list(islice(self._steps, len(self._steps) - 1 - num_new, len(self._steps) - 1))

    def _read_passed(self) -> None:
        while self._unread and self._unread[0][-1].cuda.query():
            marks = self._unread.popleft()
            origin = marks[0].cuda
            self._steps.append(parse_step([(m.event, origin.elapsed_time(m.cuda) / 1e3) for m in marks]))


def parse_step(marks: list[tuple[Event, float]]) -> StepParts:
    """The parts of one step from its marks, in order of time; the first is ``step_begin``, the last ``optimizer_end``.

    Between two marks the time belongs to what the earlier one began, see ``_OWNER``.
    """
    parts = {"data": 0.0, "forward": 0.0, "backward": 0.0, "exposed": 0.0, "optimizer": 0.0, "other": 0.0, "eval": 0.0}
    owner, before_evaluation = "data", "data"
    backward_began = marks[0][1]
    ready: list[float] = []
    for (event, at), (_, until) in zip(marks, [*marks[1:], marks[-1]], strict=True):
        if event == "evaluation_begin":
            before_evaluation, owner = owner, "eval"
        elif event == "evaluation_end":
            owner = before_evaluation
        elif event == "bucket_ready":
            ready.append(at - backward_began)
        else:
            owner = _OWNER[event]
            if event == "forward_end":
                backward_began = at
                ready = []
            elif event == "last_bucket_ready":
                ready.append(at - backward_began)
        parts[owner] += until - at
    return StepParts(
        step_s=marks[-1][1] - marks[0][1] - parts["eval"],
        data_s=parts["data"],
        forward_s=parts["forward"],
        backward_s=parts["backward"],
        exposed_s=parts["exposed"],
        optimizer_s=parts["optimizer"],
        other_s=parts["other"],
        bucket_ready_s=tuple(ready),
    )


_OWNER: dict[Event, str] = {
    "step_begin": "data",
    "forward_begin": "forward",
    # The loss is computed between forward and backward; it is small and belongs to neither, so backward takes it.
    "forward_end": "backward",
    "last_bucket_ready": "exposed",
    "backward_end": "other",
    "optimizer_begin": "optimizer",
    "exchange_begin": "exposed",
    "optimizer_end": "data",
}
