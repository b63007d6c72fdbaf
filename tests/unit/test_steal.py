"""The share of CPU time that a hypervisor gave to others, by the kernel's counters."""

from __future__ import annotations

from collections import namedtuple

import psutil
import pytest

from wirespeed.measure.steal import StealMeter

Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")


def share_between(monkeypatch: pytest.MonkeyPatch, before: object, after: object) -> float:
    given = iter([before, after])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(given))
    return StealMeter().share()


def test_the_share_is_stolen_time_over_all_time_without_counting_guests_twice(monkeypatch):
    before = Times(100, 10, 50, 800, 5, 1, 4, 30, 20, 2)
    # 40 of user (10 of them a guest's), 20 system, 130 idle and 10 stolen: 200 in all.
    after = Times(140, 10, 70, 930, 5, 1, 4, 40, 30, 2)
    assert share_between(monkeypatch, before, after) == pytest.approx(10 / 200)


def test_a_system_that_does_not_count_steal_gives_none(monkeypatch):
    Plain = namedtuple("Plain", "user nice system idle")
    assert share_between(monkeypatch, Plain(1, 0, 1, 1), Plain(2, 0, 1, 9)) == 0.0


def test_no_time_between_two_readings_is_no_share(monkeypatch):
    now = Times(*range(10))
    assert share_between(monkeypatch, now, now) == 0.0
