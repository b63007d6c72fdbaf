"""Stage splits: exact, against all splits of small models."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wirespeed.errors import UsageError
from wirespeed.fabric.words import parse_words
from wirespeed.plan.stage_plan import split_model
from wirespeed.plan.stages import split_stages


def slowest_s(layers, transfers, speed, bounds):
    ends = [*bounds[1:], len(layers)]
    return max(
        sum(layers[start:end]) / speed[stage] + (transfers[end - 1] if stage < len(bounds) - 1 else 0)
        for stage, (start, end) in enumerate(zip(bounds, ends, strict=True))
    )


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_no_split_is_better(data):
    layers = data.draw(st.lists(st.floats(0, 5), min_size=2, max_size=8))
    stages = data.draw(st.integers(1, len(layers)))
    transfers = data.draw(st.lists(st.floats(0, 2), min_size=len(layers), max_size=len(layers)))
    speed = data.draw(st.lists(st.floats(0.5, 2), min_size=stages, max_size=stages))
    found = split_stages(layers, stages, transfer_s=transfers, stage_speed=speed)
    best = min(
        slowest_s(layers, transfers, speed, (0, *cuts)) for cuts in combinations(range(1, len(layers)), stages - 1)
    )
    assert found.slowest_s == pytest.approx(best, abs=1e-12)
    assert slowest_s(layers, transfers, speed, found.bounds) == pytest.approx(best, abs=1e-12)
    assert sum(found.sizes) == len(layers)
    assert found.slowest_s <= found.even_slowest_s + 1e-12


def test_memory_moves_a_boundary():
    free = split_stages([1, 1, 1, 9], 2, layer_bytes=[1, 1, 1, 1])
    tight = split_stages([1, 1, 1, 9], 2, layer_bytes=[1, 1, 1, 1], stage_bytes=2)
    assert (free.bounds, tight.bounds) == ((0, 3), (0, 2))


def test_no_split_that_fits_is_an_error():
    with pytest.raises(UsageError, match="fits the memory"):
        split_stages([1, 1, 1], 2, layer_bytes=[5, 5, 5], stage_bytes=6)


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_layers_or_none_are_refused(stages):
    with pytest.raises(UsageError, match="stages for 3 layers"):
        split_stages([1, 1, 1], stages)


def test_hundreds_of_layers_are_split_at_once():
    found = split_stages([1.0] * 400, 16)
    assert found.sizes == (25,) * 16


def test_a_model_is_split_evenly_on_a_free_network_and_where_little_is_sent_on_a_slow_one():
    free = split_model("resnet50", "v100", 4, 32)
    assert free.slowest_s < 1.1 * sum(free.stage_s) / 4
    slow = split_model("resnet50", "v100", 4, 32, parse_words("star hosts=4 nic=1g"))
    assert slow.slowest_s > free.slowest_s
    assert slow.slowest_s <= slow.even_slowest_s
