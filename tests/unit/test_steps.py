"""The parts of a step, from marks."""

import pytest
import torch

from wirespeed.measure.steps import StepClock, StepParts, parse_step

PLAIN = [
    ("step_begin", 0.0),
    ("forward_begin", 1.0),
    ("forward_end", 3.0),
    ("bucket_ready", 5.0),
    ("last_bucket_ready", 7.0),
    ("backward_end", 12.0),
    ("optimizer_begin", 12.5),
    ("optimizer_end", 13.5),
]


def test_every_part_of_a_plain_step_has_its_time():
    assert parse_step(PLAIN) == StepParts(
        step_s=13.5,
        data_s=1.0,
        forward_s=2.0,
        backward_s=4.0,
        exposed_s=5.0,
        optimizer_s=1.0,
        other_s=0.5,
        bucket_ready_s=(2.0, 4.0),
    )


def test_evaluation_is_in_no_part():
    evaluated = [PLAIN[0], ("evaluation_begin", 0.25), ("evaluation_end", 100.25)]
    evaluated += [(event, at + 100) for event, at in PLAIN[1:]]
    assert parse_step(evaluated) == parse_step(PLAIN)


def test_accumulation_adds_forward_and_backward_and_keeps_the_last_buckets():
    marks = [
        ("step_begin", 0.0),
        ("forward_begin", 0.0),
        ("forward_end", 1.0),  # backward without synchronisation: no bucket
        ("forward_begin", 3.0),
        ("forward_end", 4.0),
        ("last_bucket_ready", 6.0),
        ("backward_end", 7.0),
        ("optimizer_begin", 7.0),
        ("optimizer_end", 8.0),
    ]
    parts = parse_step(marks)
    assert (parts.forward_s, parts.backward_s, parts.exposed_s) == (2.0, 4.0, 1.0)
    assert parts.bucket_ready_s == (2.0,)


def test_the_parts_sum_to_the_step():
    parts = parse_step(PLAIN)
    total = parts.data_s + parts.forward_s + parts.backward_s + parts.exposed_s + parts.optimizer_s + parts.other_s
    assert total == pytest.approx(parts.step_s)


def test_a_step_that_was_never_begun_is_not_counted():
    clock = StepClock(torch.device("cpu"))
    clock.mark("optimizer_end")
    clock.end_step()
    assert (clock.num_steps, clock.steps()) == (0, [])


def test_steps_follow_each_other_without_a_gap():
    clock = StepClock(torch.device("cpu"))
    clock.begin()
    for _ in range(3):
        clock.mark("forward_begin")
        clock.mark("forward_end")
        clock.mark("optimizer_begin")
        clock.mark("optimizer_end")
        clock.end_step()
    assert clock.num_steps == 3
    assert all(step.step_s > 0 for step in clock.steps())


def test_two_evaluations_without_training_in_between_are_one():
    clock = StepClock(torch.device("cpu"))
    clock.begin()
    clock.begin_evaluation()
    clock.end_evaluation()
    clock.begin_evaluation()
    clock.end_evaluation()
    assert [mark.event for mark in clock._marks] == ["step_begin", "evaluation_begin", "evaluation_end"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_device_time_is_counted():
    clock = StepClock(torch.device("cuda"))
    clock.begin()
    clock.mark("forward_begin")
    torch.cuda._sleep(10_000_000)
    clock.mark("forward_end")
    clock.mark("optimizer_begin")
    clock.mark("optimizer_end")
    clock.end_step()
    (step,) = clock.steps()
    assert step.forward_s > 0.001
