"""How a log is scanned: by forms of lines, in blocks, with tables that open and close; the same facts either way."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from log_damage import DAMAGES
from nccl_job_logs import LAUNCHERS, VERSIONS, JobLog, text_of
from wirespeed.doctor import log_lines, log_scan
from wirespeed.doctor.job_failures import RULES, TRIGGERS
from wirespeed.doctor.kernel_log import TRIGGERS as KERNEL_TRIGGERS
from wirespeed.doctor.log_lines import Block
from wirespeed.doctor.log_scan import VARYING, scan
from wirespeed.doctor.nccl_facts import NcclFacts
from wirespeed.doctor.nccl_log import NcclReader
from wirespeed.doctor.nccl_setup import Place
from wirespeed.doctor.torch_log import TRIGGERS as TORCH_TRIGGERS


@given(st.binary(max_size=40), st.sampled_from((*TORCH_TRIGGERS, *KERNEL_TRIGGERS)), st.binary(max_size=40))
def test_a_form_keeps_every_trigger_of_its_line(before: bytes, trigger: bytes, after: bytes) -> None:
    form = (before + trigger + after).translate(None, VARYING)
    assert trigger.translate(None, VARYING) in form
    assert any(word in form for word in log_scan._WORDS)


def test_no_trigger_is_so_short_that_every_line_holds_it() -> None:
    ordinary = (
        b"2026-03-07 10:00:00,120 [INFO] train.py:88 step 12 loss 6.2 lr 3.0e-04 grad_norm 0.71 tokens/s mem 61GB"
    )
    assert [word for word in log_scan._WORDS if len(word) < 3] == []
    assert [word for word in log_scan._WORDS if word in ordinary.translate(None, VARYING)] == []


def test_each_rule_has_a_trigger_that_is_searched_for() -> None:
    assert {rule.trigger for rule in RULES} == set(TRIGGERS)
    assert set(TRIGGERS) <= set(TORCH_TRIGGERS)


def by_line(text: bytes) -> NcclReader:
    """Every line through the reader of one line, which is the plain way."""
    reader = NcclReader()
    for number, line in enumerate(text.split(b"\n"), start=1):
        if b"NCCL " in line:
            reader.take(Place("job.log", number, line[: 16 * 1024]))
    return reader


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("version", ["2.4.8", "2.6.4", "2.17.1", "2.30.1"])
def test_blocks_give_what_single_lines_give(version: str, launcher: str) -> None:
    job = JobLog(version=version, launcher=launcher, hosts=4)
    text = text_of(job.lines(), job.steps(20), job.lines(), job.warn(1, "Net : Connection closed by remote peer x<1>"))
    plain, facts = by_line(text.encode()).facts(), by_block(text.encode()).facts()
    assert (facts.vias, facts.num_channels) == (plain.vias, plain.num_channels)
    assert (facts.hosts, facts.num_processes) == (plain.hosts, plain.num_processes)
    _compare(plain, facts)


@pytest.mark.parametrize("seed", range(40))
def test_blocks_of_damaged_logs_give_what_single_lines_give(seed: int) -> None:
    source = random.Random(seed)
    job = JobLog(version=source.choice(VERSIONS), launcher=source.choice(LAUNCHERS))
    text = text_of(job.lines(), job.steps(10)).encode()
    for damage in source.sample(DAMAGES, 2):
        text = damage(text, source)
    plain, facts = by_line(text).facts(), by_block(text).facts()
    _compare(plain, facts)
    # A channel line that is broken before a path that is known counts in a block; alone it is no channel line.
    counts = {(held.host, held.via): held.count for held in plain.vias}
    assert counts.keys() == {(held.host, held.via) for held in facts.vias}
    assert all(0 <= held.count - counts[held.host, held.via] <= 3 for held in facts.vias)


def by_block(text: bytes) -> NcclReader:
    """All lines at once."""
    reader = NcclReader()
    reader.take_block(Block("job.log", 1, text, False))
    reader.take_block(Block("job.log", 1, b"", True))
    return reader


def _compare(plain: NcclFacts, facts: NcclFacts) -> None:
    assert (facts.versions, facts.hcas, facts.sockets, facts.settings) == (
        plain.versions, plain.hcas, plain.sockets, plain.settings,
    )  # fmt: skip
    assert {comm.name: (comm.started, comm.completed) for comm in facts.comms} == {
        comm.name: (comm.started, comm.completed) for comm in plain.comms
    }


def test_a_trigger_after_a_million_dull_lines_is_still_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_scan, "MAX_DULL", 50)
    monkeypatch.setattr(log_lines, "BLOCK_BYTES", 4096)
    words = ["alpha", "bravo", "charlie", "delta", "echo", "golf", "hotel", "india", "juliet", "kilo"]
    dull = [
        f"{a} {b} {c} step {i}" for i, (a, b, c) in enumerate((x, y, z) for x in words for y in words for z in words)
    ]
    path = tmp_path / "job.log"
    path.write_text("\n".join([*dull, "srun: error: node-b: task 3: Out Of Memory", *dull]) + "\n")
    (failure,) = scan([path]).failures
    assert (failure.kind, failure.host, failure.rank, failure.where) == ("host_memory", "node-b", 3, f"{path}:1001")


def test_a_traceback_ends_with_the_line_that_names_the_error(tmp_path: Path) -> None:
    steps = JobLog().steps(5)
    lines = [
        "RuntimeError: an old line of the same form, seen before",
        *steps,
        "Traceback (most recent call last):",
        '  File "/opt/job/train.py", line 3, in <module>',
        "RuntimeError: an old line of the same form, seen before",
        *steps,
    ]
    path = tmp_path / "job.log"
    path.write_text(text_of(lines))
    (failure,) = scan([path]).failures
    assert (failure.kind, failure.where) == ("program", f"{path}:9")


def test_a_table_that_ended_is_opened_again_by_the_next_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "BLOCK_BYTES", 2048)
    monkeypatch.setattr(log_scan, "MAX_IDLE_BLOCKS", 2)
    table = [
        "#bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]",
        " 65536      5000             392.4             391.9               0.747",
    ]
    path = tmp_path / "job.log"
    path.write_text(text_of(table, JobLog().steps(500), table, JobLog().steps(5)))
    assert [m.bit_per_s for m in scan([path]).measurements] == [391.9e9, 391.9e9]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([rule.pattern.pattern[:60] for rule in RULES] + list(TRIGGERS)), max_size=8), st.randoms()
)
def test_pieces_of_triggers_are_read_without_an_exception(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], source: random.Random
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "job.log"
    path.write_bytes(b"\n".join(piece + source.randbytes(9) for piece in pieces))
    assert scan([path]).num_bytes == path.stat().st_size
