from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from wirespeed.errors import MissingCapability  # noqa: E402
from wirespeed.measure.steps import StepClock  # noqa: E402
from wirespeed.train import ranges  # noqa: E402

pytestmark = pytest.mark.torch


class Recorded:
    """A backend of one thread that keeps what was pushed, with its depth, and refuses to pop nothing."""

    def __init__(self):
        self.seen: list[tuple[int, str]] = []
        self.depth = 0

    def push(self, name):
        self.seen.append((self.depth, name))
        self.depth += 1

    def pop(self):
        assert self.depth > 0, "a range was popped that nobody pushed"
        self.depth -= 1


def test_the_parts_of_a_step_lie_within_the_step():
    backend = Recorded()
    clock = StepClock(torch.device("cpu"))
    steps = ranges.StepRanges(backend)
    clock.on_event = steps.on_event
    clock.begin()
    for _ in range(2):
        for event in (
            "forward_begin",
            "forward_end",
            "bucket_ready",
            "last_bucket_ready",
            "backward_end",
            "optimizer_begin",
            "optimizer_end",
        ):
            clock.mark(event)
        clock.end_step()
    steps.close()
    parts = ["data", "forward", "backward", "exposed", "other", "optimizer"]
    assert backend.seen == [
        (0, "step 0"), *((1, part) for part in parts),
        (0, "step 1"), *((1, part) for part in parts),
        (0, "step 2"), (1, "data"),
    ]  # fmt: skip
    assert backend.depth == 0


def test_a_span_ends_when_what_is_inside_fails():
    backend = Recorded()
    with pytest.raises(ValueError, match="inside"), ranges.span(backend, "all_reduce of bucket 3"):
        raise ValueError("inside")
    assert (backend.seen, backend.depth) == ([(0, "all_reduce of bucket 3")], 0)
    with ranges.span(None, "nothing"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA")
def test_without_a_place_for_ranges_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nvtx", None)
    with pytest.raises(MissingCapability, match="pip install nvtx"):
        ranges.open_backend()


def test_ranges_are_only_opened_when_asked_for(monkeypatch):
    monkeypatch.delenv(ranges.VARIABLE, raising=False)
    assert not ranges.are_wanted()
    monkeypatch.setenv(ranges.VARIABLE, "1")
    assert ranges.are_wanted()


def test_parsed_steps_are_told_once_and_the_newest_is_left():
    clock = StepClock(torch.device("cpu"), keep=3)
    clock.begin()

    def step():
        for event in ("forward_begin", "forward_end", "optimizer_begin", "optimizer_end"):
            clock.mark(event)
        clock.end_step()

    assert clock.parsed_since(0) == (0, [])
    step()
    assert clock.parsed_since(0) == (0, [])
    step()
    count, parts = clock.parsed_since(0)
    assert (count, parts) == (1, clock.steps()[:1])
    assert clock.parsed_since(count) == (1, [])
    for _ in range(5):  # more than are kept: what is gone is not told, and nothing is told twice
        step()
    count, parts = clock.parsed_since(count)
    assert (count, parts) == (6, clock.steps()[:2])
