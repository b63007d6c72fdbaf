"""Slow hosts, paths and uplinks in matrices whose truth is known, and what cannot be told apart."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from wirespeed.cli.main import main
from wirespeed.doctor.history import earlier, find_changes, keep
from wirespeed.doctor.matrix import MatrixReport, find_outliers, judge, matrix_of
from wirespeed.doctor.retest import confirm, schedule_of, suspects
from wirespeed.measure.links import rounds
from wirespeed.records import Environment, LinkSample, LinksRecord, write

GBIT = 1e9
ENVIRONMENT = Environment(host="h0", kernel="6", cpu=None, num_cpus=2, versions={}, command="test")
Rate = Callable[[int, int, list[tuple[int, int]]], float]


def record_of(count: int, rate: Rate, *, noise: float = 0.01, seed: int = 0, table: object = None) -> LinksRecord:
    """What a fabric gives whose pairs reach ``rate(source, target, cells of the same phase)``, five windows each."""
    source = random.Random(seed)
    samples = []
    for pairs in rounds(count) if table is None else table:  # type: ignore[attr-defined]
        for way in ([tuple(p) for p in pairs], [(b, a) for a, b in pairs]):
            for a, b in way:
                level = rate(a, b, way)
                windows = tuple(level * (1 + source.uniform(-noise, noise)) for _ in range(5))
                samples.append(LinkSample(source=f"h{a}", target=f"h{b}", streams=1, num_bytes=1, bit_per_s=windows))
    hosts = tuple(f"h{n}" for n in range(count))
    return LinksRecord(environment=ENVIRONMENT, hosts=hosts, samples=tuple(samples), socket_options={})


def named(report: MatrixReport) -> list[tuple[str, str]]:
    return [(finding.id, finding.subject) for finding in report.findings]


RACKS = {f"h{n}": f"r{n // 2}" for n in range(8)}


def uplink_at(capacity: float, slow_rack: int) -> Rate:
    """Hosts of 1 Gbit/s in racks of two, uplinks of 2 Gbit/s, one of them at ``capacity``, shared max-min."""

    def rate(a: int, b: int, way: list[tuple[int, int]]) -> float:
        level = GBIT
        for end in (0, 1):
            rack = (a, b)[end] // 2
            if rack == slow_rack and a // 2 != b // 2:
                sharing = sum(c[end] // 2 == rack and c[0] // 2 != c[1] // 2 for c in way)
                level = min(level, capacity / sharing)
        return level

    return rate


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 16])
def test_a_healthy_fabric_has_no_finding(count: int, seed: int) -> None:
    record = record_of(count, lambda a, b, way: GBIT, noise=0.04, seed=seed)
    assert named(find_outliers(record)) == []


@pytest.mark.parametrize("host", range(8))
@pytest.mark.parametrize("has_racks", [False, True])
def test_a_slow_host_is_named_alone(host: int, has_racks: bool) -> None:
    record = record_of(8, lambda a, b, way: 0.6 * GBIT if host in (a, b) else GBIT, seed=host)
    report = find_outliers(record, RACKS if has_racks else None)
    assert named(report) == [("link.slow-host", f"h{host}")]
    assert report.findings[0].limit_bit_per_s == pytest.approx(0.6 * GBIT, rel=0.03)


def test_the_slow_direction_of_a_host_is_named() -> None:
    assert named(find_outliers(record_of(6, lambda a, b, way: 0.6 * GBIT if a == 2 else GBIT))) == [
        ("link.slow-tx", "h2")
    ]
    assert named(find_outliers(record_of(6, lambda a, b, way: 0.6 * GBIT if b == 4 else GBIT))) == [
        ("link.slow-rx", "h4")
    ]


def test_two_slow_hosts_are_both_named() -> None:
    record = record_of(8, lambda a, b, way: 0.5 * GBIT if {a, b} & {1, 6} else GBIT)
    assert named(find_outliers(record)) == [("link.slow-host", "h1"), ("link.slow-host", "h6")]


def test_a_slow_path_is_named_with_its_direction() -> None:
    one_way = record_of(8, lambda a, b, way: 0.5 * GBIT if (a, b) == (3, 5) else GBIT)
    both = record_of(8, lambda a, b, way: 0.5 * GBIT if {a, b} == {3, 5} else GBIT)
    assert named(find_outliers(one_way)) == [("link.slow-path", "h3 -> h5")]
    assert named(find_outliers(both)) == [("link.slow-path", "h3 <-> h5")]


@pytest.mark.parametrize("rack", range(4))
def test_a_halved_uplink_is_named_and_no_host(rack: int) -> None:
    report = find_outliers(record_of(8, uplink_at(GBIT, rack), seed=rack), RACKS)
    assert named(report) == [("link.slow-uplink", f"r{rack}")]
    assert report.findings[0].limit_bit_per_s == pytest.approx(GBIT, rel=0.03)
    assert report.findings[0].full_bit_per_s == pytest.approx(2 * GBIT, rel=0.05)


def test_with_two_racks_it_is_said_that_the_uplinks_cannot_be_told_apart() -> None:
    racks = {f"h{n}": f"r{n // 4}" for n in range(8)}

    def rate(a: int, b: int, way: list[tuple[int, int]]) -> float:
        crossing = [c for c in way if c[0] // 4 != c[1] // 4 and c[0] // 4 == a // 4]
        return min(GBIT, 1.4 * GBIT / len(crossing)) if a // 4 != b // 4 else GBIT

    report = find_outliers(record_of(8, rate), racks)
    assert named(report) == [("link.slow-uplink", "r0 or r1")]
    assert any("which of racks" in line for line in report.cannot_tell)


def test_without_racks_hosts_that_are_fast_among_themselves_are_one_finding() -> None:
    report = find_outliers(record_of(8, lambda a, b, way: 0.4 * GBIT if (a < 3) != (b < 3) else GBIT))
    assert named(report) == [("link.slow-uplink", "h0, h1, h2")]


def test_a_link_that_comes_and_goes_is_named() -> None:
    record = record_of(8, lambda a, b, way: GBIT)
    samples = tuple(
        msgspec.structs.replace(s, bit_per_s=(*s.bit_per_s[:3], 0.02 * GBIT, s.bit_per_s[4]))
        if "h5" in (s.source, s.target) and i % 3
        else s
        for i, s in enumerate(record.samples)
    )
    assert named(find_outliers(msgspec.structs.replace(record, samples=samples))) == [("link.flapping", "h5")]


def test_with_two_or_three_hosts_it_is_said_what_cannot_be_told_apart() -> None:
    two = find_outliers(record_of(2, lambda a, b, way: 0.5 * GBIT))
    assert two.cannot_tell == ("with two hosts a slow pair may be either host or the path: measure with a third",)
    three = find_outliers(record_of(3, lambda a, b, way: 0.5 * GBIT if 2 in (a, b) else GBIT))
    assert any("three hosts" in line for line in three.cannot_tell)


def test_large_fabrics_are_measured_in_seeded_matchings_that_still_name_a_slow_host() -> None:
    table = schedule_of(64, seed=3)
    assert table == schedule_of(64, seed=3)
    assert all(len({host for pair in pairs for host in pair}) == 64 for pairs in table)
    record = record_of(64, lambda a, b, way: 0.6 * GBIT if 17 in (a, b) else GBIT, table=table)
    report = find_outliers(record, schedule=table)
    assert named(report) == [("link.slow-host", "h17")]
    assert any("were not measured" in line for line in report.cannot_tell)


def test_a_retest_keeps_what_is_slow_again_and_drops_what_is_not() -> None:
    def slow(a: int, b: int, way: list[tuple[int, int]]) -> float:
        return 0.6 * GBIT if 2 in (a, b) else 0.5 * GBIT if (a, b) == (5, 6) else GBIT

    record = record_of(8, slow)
    matrix = matrix_of(record)
    report = find_outliers(record)
    table = suspects(report, matrix)
    assert len(table) == 3  # two partners of h2, one path
    assert all(len(pairs) == 1 for pairs in table)
    again = record_of(8, lambda a, b, way: 0.6 * GBIT if 2 in (a, b) else GBIT, table=table)
    kept, dropped = confirm(report, again)
    assert [finding.subject for finding in kept] == ["h2"]
    assert "alone" in kept[0].evidence[-1].where
    assert len(dropped) == 1


def test_what_noise_hides_is_suspect_in_a_first_pass_only() -> None:
    # Sides that vary by a quarter either way: half of usual is within 3.5 robust deviations.
    sends = [1.0, 0.75, 1.25, 0.62, 1.2, 0.8, 1.25, 0.75]
    receives = [0.8, 1.2, 0.8, 0.62, 1.25, 1.2, 0.78, 1.2]
    matrix = matrix_of(record_of(8, lambda a, b, way: GBIT * sends[a] * receives[b]))
    assert named(judge(matrix)) == []
    assert ("link.slow-rx", "h3") in named(judge(matrix, is_first_pass=True))


@pytest.mark.parametrize("rack", range(4))
def test_a_rack_is_measured_again_with_its_hosts_together(rack: int) -> None:
    slow = uplink_at(GBIT, rack)
    record = record_of(8, slow)
    matrix = matrix_of(record, RACKS)
    report = find_outliers(record, RACKS)
    table = suspects(report, matrix)
    assert len(table) == 1
    assert len(table[0]) == 2
    assert suspects(report, matrix, repeats=3) == table * 3
    inside = {2 * rack, 2 * rack + 1}
    outside = [a if b in inside else b for a, b in table[0]]
    assert len({n // 2 for n in outside}) == 2  # two other racks: neither of their uplinks is shared
    kept, _ = confirm(report, record_of(8, slow, table=table), matrix)
    assert [finding.subject for finding in kept] == [f"r{rack}"]
    assert "together" in kept[0].evidence[-1].where
    kept, dropped = confirm(report, record_of(8, lambda a, b, way: GBIT, table=table), matrix)
    assert (kept, len(dropped)) == ((), 1)


@pytest.mark.parametrize("side", ["slow-host", "slow-tx", "slow-rx"])
@pytest.mark.parametrize("first", ["slow-host", "slow-tx", "slow-rx"])
def test_which_side_of_a_host_is_slow_is_told_by_the_retest(side: str, first: str) -> None:
    ends = {"slow-host": (0, 1), "slow-tx": (0,), "slow-rx": (1,)}

    def rate(kind: str) -> Rate:
        return lambda a, b, way: 0.6 * GBIT if any((a, b)[end] == 3 for end in ends[kind]) else GBIT

    # What neighbours took in the first pass made the other side look slow, or hid one that was.
    record = record_of(8, rate(first))
    matrix, report = matrix_of(record, RACKS), find_outliers(record, RACKS)
    assert named(report) == [(f"link.{first}", "h3")]
    kept, _ = confirm(report, record_of(8, rate(side), table=suspects(report, matrix)), matrix)
    assert [(finding.id, finding.subject) for finding in kept] == [(f"link.{side}", "h3")]
    words = {"slow-host": "both ways", "slow-tx": "sending", "slow-rx": "receiving"}
    assert f"is slow {words[side]}: " in kept[0].title


def test_measured_twice_a_cell_counts_by_its_best_and_stalls_add_up() -> None:
    def once(seed: int) -> LinksRecord:
        """Neighbours took half of a third of all transfers; h5 stalls in two of three."""
        source = random.Random(seed)
        record = record_of(8, lambda a, b, way: GBIT * (0.5 if source.random() < 0.3 else 1.0), seed=seed)
        samples = [
            msgspec.structs.replace(s, bit_per_s=(*s.bit_per_s[:3], 0.1 * s.bit_per_s[3], s.bit_per_s[4]))
            if "h5" in (s.source, s.target) and source.random() < 0.67
            else s
            for s in record.samples
        ]
        return msgspec.structs.replace(record, samples=tuple(samples))

    num_alone = num_both = 0
    for seed in range(1, 13, 2):
        first, second = once(seed), once(seed + 1)
        num_alone += len(judge(matrix_of(first), is_first_pass=True).findings)
        both = named(judge(matrix_of(first, again=(second,)), is_first_pass=True))
        assert ("link.flapping", "h5") in both
        num_both += len(both)
    assert num_both < 0.6 * num_alone


def _after_two_passes(record: LinksRecord, truth: Rate, racks: dict[str, str]) -> tuple[MatrixReport, MatrixReport]:
    """What a first pass suspects, and what is left of it when measured again as ``check_fabric`` does."""
    matrix = matrix_of(record, racks)
    report = judge(matrix, is_first_pass=True)
    again = record_of(len(matrix.hosts), truth, table=suspects(report, matrix))
    left = msgspec.structs.replace(report, findings=confirm(report, again, matrix)[0])
    # What still stands is measured with the same partners as before: the two add up.
    assert {tuple(p) for p in suspects(report, matrix, still=left.findings)} <= {
        tuple(p) for p in suspects(report, matrix)
    }
    return report, left


@pytest.mark.parametrize(("slow_rack", "noisy_rack"), [(a, b) for a in range(4) for b in range(4) if a != b])
def test_of_two_suspect_racks_both_are_measured_again_and_the_slow_one_is_named(
    slow_rack: int, noisy_rack: int
) -> None:
    truth, noise = uplink_at(GBIT, slow_rack), uplink_at(0.95 * GBIT, noisy_rack)
    record = record_of(8, lambda a, b, way: min(truth(a, b, way), noise(a, b, way)))
    first, left = _after_two_passes(record, truth, RACKS)
    assert {f"r{slow_rack}", f"r{noisy_rack}"} <= {subject for _, subject in named(first)}
    assert named(left) == [("link.slow-uplink", f"r{slow_rack}")]


def test_two_slow_uplinks_are_both_named() -> None:
    one, two = uplink_at(GBIT, 0), uplink_at(GBIT, 2)
    record = record_of(8, lambda a, b, way: min(one(a, b, way), two(a, b, way)))
    _, left = _after_two_passes(record, lambda a, b, way: min(one(a, b, way), two(a, b, way)), RACKS)
    assert named(left) == [("link.slow-uplink", "r0"), ("link.slow-uplink", "r2")]


@pytest.mark.parametrize("path", [(a, b) for a in range(8) for b in range(8) if a // 2 != b // 2])
def test_a_slow_path_that_makes_its_racks_suspect_is_named_and_not_their_uplinks(path: tuple[int, int]) -> None:
    def truth(a: int, b: int, way: list[tuple[int, int]]) -> float:
        return 0.6 * GBIT if (a, b) == path else GBIT

    racks = [uplink_at(1.7 * GBIT, host // 2) for host in path]  # neighbours took a part of what crossed there
    record = record_of(8, lambda a, b, way: min(truth(a, b, way), *(rack(a, b, way) for rack in racks)))
    first, left = _after_two_passes(record, truth, RACKS)
    assert {finding.id for finding in first.findings} == {"link.slow-uplink", "link.slow-path"}
    assert named(left) == [("link.slow-path", f"h{path[0]} -> h{path[1]}")]


def test_paths_over_a_slow_uplink_are_not_named_beside_it() -> None:
    truth = uplink_at(0.4 * GBIT, 1)  # slower than one host: every path over it is slow alone
    first, left = _after_two_passes(record_of(8, truth), truth, RACKS)
    assert any(finding.id == "link.slow-path" for finding in first.findings)
    assert named(left) == [("link.slow-uplink", "r1")]


def test_a_rack_is_kept_though_its_hosts_seemed_slow_too_and_are_fine_alone() -> None:
    slow = uplink_at(GBIT, 2)

    def noisy(a: int, b: int, way: list[tuple[int, int]]) -> float:
        return 0.65 * GBIT if {a, b} == {4, 5} else slow(a, b, way)  # their one cell inside the rack was disturbed

    record = record_of(8, noisy)
    matrix = matrix_of(record, RACKS)
    report = judge(matrix, is_first_pass=True)
    assert {finding.subject for finding in report.findings} >= {"h4", "h5", "r2"}
    table = suspects(report, matrix)
    kept, _ = confirm(report, record_of(8, slow, table=table), matrix)
    assert [finding.subject for finding in kept] == ["r2"]


def test_hosts_without_racks_that_are_slow_to_the_others_are_measured_again_together() -> None:
    def slow(a: int, b: int, way: list[tuple[int, int]]) -> float:
        return 0.4 * GBIT if (a < 3) != (b < 3) else GBIT

    record = record_of(8, slow)
    matrix, report = matrix_of(record), find_outliers(record)
    table = suspects(report, matrix)
    assert {n for pairs in table for pair in pairs for n in pair if n < 3} == {0, 1, 2}
    kept, _ = confirm(report, record_of(8, slow, table=table), matrix)
    assert [finding.subject for finding in kept] == ["h0, h1, h2"]


def test_more_stalls_confirm_a_link_that_comes_and_goes_and_one_of_four_does_not() -> None:
    def stalling(record: LinksRecord, stalls: set[int]) -> LinksRecord:
        samples = [
            msgspec.structs.replace(sample, bit_per_s=(GBIT, GBIT, 0.1 * GBIT, GBIT, GBIT)) if n in stalls else sample
            for n, sample in enumerate(record.samples)
        ]
        return msgspec.structs.replace(record, samples=tuple(samples))

    record = record_of(8, lambda a, b, way: GBIT)
    own = {n for n, sample in enumerate(record.samples) if "h5" in (sample.source, sample.target)}
    record = stalling(record, own)
    matrix, report = matrix_of(record), find_outliers(record)
    assert named(report) == [("link.flapping", "h5")]
    again = record_of(8, lambda a, b, way: GBIT, table=suspects(report, matrix))
    assert confirm(report, again, matrix)[0] == ()
    assert confirm(report, stalling(again, {3}), matrix)[0] == ()
    assert [finding.id for finding in confirm(report, stalling(again, {0, 3}), matrix)[0]] == ["link.flapping"]


def test_a_path_to_a_slow_host_is_not_kept_for_being_as_slow_as_the_host() -> None:
    def slow(a: int, b: int, way: list[tuple[int, int]]) -> float:
        return 0.6 * GBIT if 5 in (a, b) else GBIT

    # In the first pass a disturbance makes one of the slow host's cells slower still.
    record = record_of(8, lambda a, b, way: 0.3 * GBIT if (a, b) == (3, 5) else slow(a, b, way))
    matrix, report = matrix_of(record), find_outliers(record)
    assert named(report) == [("link.slow-host", "h5"), ("link.slow-path", "h3 -> h5")]
    kept, dropped = confirm(report, record_of(8, slow, table=suspects(report, matrix)), matrix)
    assert [(finding.id, finding.subject) for finding in kept] == [("link.slow-host", "h5")]
    assert len(dropped) == 1


def test_history_names_what_became_slower(tmp_path: Path) -> None:
    for day in range(4):
        old = record_of(6, lambda a, b, way: GBIT, seed=day)
        keep(tmp_path, msgspec.structs.replace(old, created=f"2026-03-0{day + 1}T10:00:00+00:00"))
    (tmp_path / "links-broken.json").write_text("{")
    before, notes = earlier(tmp_path)
    assert (len(before), len(notes)) == (4, 1)
    now = record_of(6, lambda a, b, way: 0.8 * GBIT if 3 in (a, b) else GBIT, seed=9)
    assert [(f.id, f.subject) for f in find_changes(now, before)] == [("link.slower-than-before", "h3")]
    all_slow = record_of(6, lambda a, b, way: 0.7 * GBIT)
    assert [f.subject for f in find_changes(all_slow, before)] == ["fabric"]
    assert find_changes(record_of(6, lambda a, b, way: GBIT), before) == ()
    assert find_changes(now, before[:2]) == ()


def test_the_command_judges_a_record_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "links.json", record_of(8, uplink_at(GBIT, 2)))
    code = main(["doctor", "fabric", str(path), "--racks", "h[0-1];h[2-3];far=h[4-5];h[6-7]", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    assert [(f["id"], f["subject"]) for f in report["findings"]] == [("link.slow-uplink", "far")]
    assert main(["doctor", "fabric", str(write(tmp_path / "a.json", record_of(4, lambda a, b, way: GBIT)))]) == 0
    assert "no host, link or uplink stands out" in capsys.readouterr().out


def test_a_host_in_two_racks_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "links.json", record_of(4, lambda a, b, way: GBIT))
    assert main(["doctor", "fabric", str(path), "--racks", "h0,h1;h1,h2"]) == 2
    assert "two racks" in capsys.readouterr().err
