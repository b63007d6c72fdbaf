"""A whole inquiry, from the first pass to the verdict, over a fabric whose truth is known and whose machine is busy."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from wirespeed.doctor.inquiry import Inquiry
from wirespeed.doctor.retest import schedule_of
from wirespeed.measure.links import Schedule
from wirespeed.records import Environment, LinkSample, LinksRecord

RATE = 200e6
HOSTS = tuple(f"h{n}" for n in range(8))
RACKS = {host: f"r{n // 2}" for n, host in enumerate(HOSTS)}
ENVIRONMENT = Environment(host="h0", kernel="6", cpu=None, num_cpus=2, versions={}, command="test")

FLAPS = 0.65
"""Of the transfers of a link that comes and goes: a down of 150 ms in each 0.7 s, and TCP's wait behind it."""

Phase = list[tuple[int, int]]
Rate = Callable[[int, int, Phase], float]


def broken(kind: str, source: random.Random) -> tuple[tuple[str, str] | None, Rate]:
    """The finding that is right, and the rates of the fabric."""
    if kind == "host":
        host = source.randrange(8)
        return ("link.slow-host", f"h{host}"), lambda a, b, phase: 0.6 * RATE if host in (a, b) else RATE
    if kind == "direction":
        host = source.randrange(8)
        return ("link.slow-tx", f"h{host}"), lambda a, b, phase: 0.6 * RATE if a == host else RATE
    if kind == "path":
        pair = tuple(source.sample(range(8), 2))
        return (
            "link.slow-path",
            f"h{pair[0]} -> h{pair[1]}",
        ), lambda a, b, phase: 0.6 * RATE if (a, b) == pair else RATE
    if kind == "uplink":
        rack = source.randrange(4)

        def rate(a: int, b: int, phase: Phase) -> float:
            shares = [
                sum(cell[end] // 2 == rack and cell[0] // 2 != cell[1] // 2 for cell in phase)
                for end in (0, 1)
                if (a, b)[end] // 2 == rack and a // 2 != b // 2
            ]
            return RATE / max([1, *shares])

        return ("link.slow-uplink", f"r{rack}"), rate
    return None, lambda a, b, phase: RATE


def measured(
    rate: Rate, table: Schedule, source: random.Random, busy: float, flapping: int | None = None
) -> LinksRecord:
    """A measurement beside neighbours that slow down a share of all phases, and half as many of single transfers."""
    samples = []
    for pairs in table:
        for phase in ([(a, b) for a, b in pairs], [(b, a) for a, b in pairs]):
            burst = source.uniform(0.5, 1) if source.random() < busy else 1.0
            for a, b in phase:
                left = burst * (source.uniform(0.8, 1) if burst < 1 else 1.0)
                if source.random() < busy / 2:
                    left *= source.uniform(0.5, 1)
                # Neighbours take from what is free, or from what is there.
                level = min(rate(a, b, phase), RATE * left) if source.random() < 0.5 else rate(a, b, phase) * left
                windows = [
                    level * source.uniform(0.99, 1.01) * (source.uniform(0.1, 1) if source.random() < busy / 3 else 1)
                    for _ in range(5)
                ]
                if flapping in (a, b) and source.random() < FLAPS:
                    down = source.randrange(5)
                    windows[down:] = [0.0] * len(windows[down:])
                samples.append(
                    LinkSample(source=HOSTS[a], target=HOSTS[b], streams=1, num_bytes=1, bit_per_s=tuple(windows))
                )
    return LinksRecord(environment=ENVIRONMENT, hosts=HOSTS, samples=tuple(samples), socket_options={})


def inquire(kind: str, seed: int, busy: float) -> tuple[tuple[str, str] | None, list[tuple[str, str]], int]:
    """What is right, what was found, and how many rounds it took."""
    source = random.Random(f"{kind} {seed} {busy}")
    expected, rate = broken(kind, source)
    flapping = source.randrange(8) if kind == "flapping" else None
    if flapping is not None:
        expected = ("link.flapping", f"h{flapping}")
    inquiry = Inquiry(racks=RACKS)
    table: Schedule = schedule_of(len(HOSTS))
    num_rounds = 0
    while table:
        num_rounds += len(table)
        table = inquiry.follow_up(measured(rate, table, source, busy, flapping))
    return expected, [(finding.id, finding.subject) for finding in inquiry.report().findings], num_rounds


@pytest.mark.parametrize("busy", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("kind", ["healthy", "host", "direction", "path", "uplink", "flapping"])
def test_what_is_wrong_is_named_and_nothing_else_however_busy_the_machine(kind: str, busy: float) -> None:
    for seed in range(60):
        expected, found, _ = inquire(kind, seed, busy)
        assert found == ([] if expected is None else [expected]), f"seed {seed}"


def test_a_quiet_fabric_is_measured_once_and_its_suspects_five_times() -> None:
    assert inquire("healthy", 0, 0.0)[2] == 7
    assert inquire("path", 0, 0.0)[2] == 7 + 5
    assert inquire("host", 0, 0.0)[2] == 7 + 5 * 2  # two partners


@pytest.mark.parametrize("limit", [0, 8, 30])
def test_what_was_never_measured_again_is_no_finding_however_few_rounds_there_are(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirespeed.doctor.inquiry.MAX_ROUNDS", limit)
    for seed in range(20):
        source = random.Random(f"limited {seed}")
        inquiry = Inquiry(racks=RACKS)
        table: Schedule = schedule_of(len(HOSTS))
        while table:
            table = inquiry.follow_up(measured(lambda a, b, phase: RATE, table, source, 0.5))
        for finding in inquiry.report().findings:
            assert any("alone" in seen.where or "together" in seen.where for seen in finding.evidence)
