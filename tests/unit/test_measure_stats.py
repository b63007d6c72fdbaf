from __future__ import annotations

import pytest

from wirespeed.errors import PeerFailure
from wirespeed.measure.clock import Deadline
from wirespeed.measure.stats import is_stable, median, percentile, spread


def test_median_and_percentile_interpolate_between_ranks() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert percentile([7.0], 0.9) == 7.0


def test_one_late_run_does_not_widen_the_spread() -> None:
    assert spread([1.0, 1.0, 1.0, 1.0, 9.0]) == 0.0
    # Deviations from 1.0: 0.1, 0.1, 0, 0.2, 0.2, whose median is 0.1.
    assert spread([0.9, 1.1, 1.0, 1.2, 0.8]) == pytest.approx(0.1)


def test_stable_needs_three_runs_close_together() -> None:
    assert is_stable([1.0, 1.01, 1.02])
    assert not is_stable([1.0, 1.0])
    assert not is_stable([1.0, 1.2, 1.4])
    assert is_stable([1.0, 1.2, 1.4], limit=0.2)


def test_a_deadline_that_has_passed_names_what_it_waited_for() -> None:
    with pytest.raises(PeerFailure, match=r"joining did not end within 0 s"):
        Deadline(0.0, "joining").check()
    assert 0 < Deadline(60.0, "joining").check() <= 60
