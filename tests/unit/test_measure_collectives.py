from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import cast

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))
import torch
from spmd import run_ranks

from wirespeed.errors import PeerFailure, UsageError
from wirespeed.measure.checked import CheckedCollective
from wirespeed.measure.collectives import COLLECTIVES, _projected_s, measure_collectives
from wirespeed.records import Collective, CollectivesRecord, from_json

pytestmark = pytest.mark.torch

BENCH = ["-m", "wirespeed", "bench", "collectives", "--repeats", "3", "--warmup", "1", "--json"]


def test_every_collective_is_timed_and_right_on_three_ranks() -> None:
    ended = run_ranks([*BENCH, "--sizes", "1KiB,100000"], 3)
    assert [rank.returncode for rank in ended] == [0, 0, 0], ended[0].stderr
    assert ended[1].stdout == ended[2].stdout == ""
    record = from_json(ended[0].stdout.encode(), CollectivesRecord)
    assert (record.backend, record.num_ranks, record.ranks_per_host) == ("gloo", 3, 1)
    kinds = [
        ("all_reduce", "float32"), ("all_reduce", "float16"), ("all_gather", "uint8"), ("reduce_scatter", "float32"),
        ("all_to_all", "uint8"), ("broadcast", "uint8"), ("scatter", "uint8"),
    ]  # fmt: skip
    assert [(s.collective, s.dtype) for s in record.samples] == kinds * 2
    assert all(sample.is_correct for sample in record.samples)
    for sample in record.samples:
        assert len(sample.times_s) == 3
        assert min(sample.times_s) > 0
        assert sample.cpu_s > 0
    # Whole elements for each of three ranks: 341 bytes or 85 floats at 1 KiB, 33333 bytes or 8333 floats at 100 kB.
    sizes = [sample.size_bytes for sample in record.samples]
    small, large = [1024, 1024, 1023, 1020, 1023, 1024, 1023], [100000, 100000, 99999, 99996, 99999, 100000, 99999]
    assert sizes == [*small, *large]
    assert any("reduce_scatter" in note for note in record.notes)


def test_ranks_of_one_machine_share_its_cores() -> None:
    ended = run_ranks([*BENCH, "--sizes", "1KiB", "--only", "broadcast"], 2, ranks_per_host=2)
    record = from_json(ended[0].stdout.encode(), CollectivesRecord)
    assert record.ranks_per_host == 2
    assert record.cpus_per_rank == record.environment.num_cpus / 2


def test_collectives_beside_compute_are_right_and_say_so() -> None:
    ended = run_ranks([*BENCH, "--sizes", "1KiB", "--only", "all_gather", "--beside-compute", "2"], 2)
    assert [rank.returncode for rank in ended] == [0, 0], ended[0].stderr
    record = from_json(ended[0].stdout.encode(), CollectivesRecord)
    assert record.compute_threads == 2
    assert all(sample.is_correct for sample in record.samples)


def test_sizes_past_the_deadline_are_skipped_and_noted_on_every_rank_alike() -> None:
    ended = run_ranks([*BENCH, "--sizes", "1KiB,4KiB,16KiB", "--only", "all_gather", "--deadline", "1us"], 2)
    assert [rank.returncode for rank in ended] == [0, 0]
    record = from_json(ended[0].stdout.encode(), CollectivesRecord)
    assert record.samples == ()
    skipped = [note for note in record.notes if "skipped" in note]
    assert len(skipped) == 3
    assert skipped[0].startswith("all_gather uint8 1 KiB skipped")


def test_the_smallest_sizes_can_be_had_whatever_the_deadline(tmp_path: Path) -> None:
    program = tmp_path / "measures.py"
    program.write_text(
        "import sys, torch.distributed as dist\n"
        "from wirespeed.measure.collectives import measure_collectives\n"
        "from wirespeed.records import to_json\n"
        "record = measure_collectives(collectives=['all_gather', 'broadcast'], sizes_bytes=[4096, 1024, 65536],\n"
        "    repeats=3, deadline_s=1e-6, min_sizes=2)\n"
        "sys.stdout.buffer.write(b'' if record is None else to_json(record))\n"
    )
    ended = run_ranks([str(program)], 2)
    record = from_json(ended[0].stdout.encode(), CollectivesRecord)
    assert [(sample.collective, sample.size_bytes) for sample in record.samples] == [
        ("all_gather", 1024), ("broadcast", 1024), ("all_gather", 4096), ("broadcast", 4096),
    ]  # fmt: skip
    assert len([note for note in record.notes if "skipped" in note]) == 2


def test_a_rank_that_dies_is_a_peer_failure_on_the_others(tmp_path: Path) -> None:
    program = tmp_path / "dies.py"
    program.write_text(
        "import os, sys, torch.distributed as dist\n"
        "from wirespeed.cli.main import main\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "os._exit(9) if dist.get_rank() == 1 else sys.exit(main(['bench', 'collectives', '--sizes', '1KiB']))\n"
    )
    ended = run_ranks([str(program)], 2)
    assert ended[1].returncode == 9
    assert ended[0].returncode == 4
    assert "a collective failed" in ended[0].stderr


def test_the_tables_verdict_and_wire_rate_are_for_people() -> None:
    ended = run_ranks([*BENCH[:-1], "--sizes", "1KiB", "--only", "all_reduce", "--dtypes", "float32"], 2)
    out = ended[0].stdout
    for word in ("gloo, 2 ranks, 1 per host", "algbw", "busbw", "of wire", "spread", "right", "wire rate:", "verdict:"):
        assert word in out
    with pytest.raises(json.JSONDecodeError):
        json.loads(out)


def case(
    collective: Collective, rank: int, num_ranks: int, dtype: str | None = None, size_bytes: int = 4096
) -> CheckedCollective:
    held = dtype if dtype is not None else "float32" if collective in ("all_reduce", "reduce_scatter") else "uint8"
    cpu = torch.device("cpu")
    return CheckedCollective(collective, held, size_bytes, rank=rank, num_ranks=num_ranks, device=cpu)


def perform(cases: list[CheckedCollective], run: int) -> None:
    """What the collective has to do, over all ranks in one process."""
    name, num_ranks = cases[0].collective, len(cases)
    for one in cases:
        one.fill(run)
    sends = [one._send.clone() for one in cases]
    for rank, one in enumerate(cases):
        match name:
            case "all_reduce":
                one._receive.copy_(torch.stack(sends).sum(0))
            case "reduce_scatter":
                one._receive.copy_(torch.stack(sends).sum(0).chunk(num_ranks)[rank])
            case "broadcast":
                one._receive.copy_(sends[0])
            case "all_gather":
                one._receive.copy_(torch.cat(sends))
            case "all_to_all":
                one._receive.copy_(torch.cat([send.chunk(num_ranks)[rank] for send in sends]))
            case "scatter":
                one._receive.copy_(sends[0].chunk(num_ranks)[rank])


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_check_accepts_the_right_result_only(collective: Collective, num_ranks: int) -> None:
    cases = [case(collective, rank, num_ranks) for rank in range(num_ranks)]
    for run in (0, 3):
        perform(cases, run)
        assert all(one.is_right(run) for one in cases)
    last = cases[-1]
    assert not last.is_right(4)  # the result of an earlier run
    for place in (0, last._receive.numel() // 2, last._receive.numel() - 1):
        kept = last._receive[place].clone()
        last._receive[place] += 1
        assert not last.is_right(3)
        last._receive[place] = kept
    assert last.is_right(3)


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "reduce_scatter"])
def test_the_check_sees_parts_in_the_wrong_place(collective: Collective) -> None:
    cases = [case(collective, rank, 3) for rank in range(3)]
    perform(cases, 1)
    cases[0]._receive.copy_(cases[0]._receive.roll(8))
    assert not cases[0].is_right(1)


def test_the_check_sees_a_collective_that_did_nothing() -> None:
    for collective in ("all_gather", "all_to_all", "reduce_scatter"):
        one = case(cast(Collective, collective), 0, 2)
        one.fill(0)
        assert not one.is_right(0)


@pytest.mark.parametrize("num_ranks", [64, 600])
def test_fp16_sums_are_exact_in_any_order(num_ranks: int) -> None:
    cases = [case("all_reduce", rank, num_ranks, "float16", 256) for rank in range(num_ranks)]
    for one in cases:
        one.fill(2)
    total = torch.zeros_like(cases[0]._send)
    for one in reversed(cases):
        total += one._send
    cases[0]._receive.copy_(total)
    assert cases[0].is_right(2)


def test_projection_follows_the_marginal_rate() -> None:
    assert _projected_s([], 1000) == 0.0
    assert _projected_s([(1000, 0.5)], 4000) == 0.5
    # 1 s for 3000 more bytes: 12000 more take 4 s.
    assert _projected_s([(1000, 1.0), (4000, 2.0)], 16000) == pytest.approx(6.0)
    assert _projected_s([(1000, 2.0), (4000, 1.0)], 16000) == 1.0


def test_arguments_are_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"got collectives \['gossip'\]; expected some of all_reduce"):
        measure_collectives(collectives=[cast(Collective, "gossip")])
    with pytest.raises(UsageError, match=r"got sizes \[0\]"):
        measure_collectives(sizes_bytes=[0])
    with pytest.raises(UsageError, match="got 2 runs"):
        measure_collectives(repeats=2)
    with pytest.raises(UsageError, match=r"got element types \['int8'\]"):
        measure_collectives(dtypes=["int8"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="lacks RANK"):
        measure_collectives()


def test_ranks_that_do_not_come_are_a_peer_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from wirespeed.system import free_port

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    before = os.sched_getscheduler(0)
    with pytest.raises(PeerFailure, match=r"a collective failed"):
        measure_collectives(sizes_bytes=[1024], timeout_s=1.0)
    assert os.sched_getscheduler(0) == before


def test_what_was_disturbed_is_measured_once_more_and_the_quieter_counts(tmp_path: Path) -> None:
    program = tmp_path / "again.py"
    program.write_text(
        "import dataclasses, json, sys, time, torch.distributed as dist\n"
        "from wirespeed.measure import collectives as c\n"
        "dist.init_process_group('gloo')\n"
        "group = c._Group()\n"
        "def timed(size, share):\n"
        "    return dataclasses.replace(c._time_case(group, 'all_gather', 'uint8', size, 3, 1), steal_share=share)\n"
        # A share above 1 cannot be topped; one of 0.0 needs no second time.
        "held = [timed(1024, 0.0), timed(2048, 2.0), timed(4096, 3.0)]\n"
        "before, notes, told = list(held), [], []\n"
        "c._time_again(group, held, 3, 1, time.monotonic() + 60, told.append, notes)\n"
        "late = [timed(1024, 2.0)]\n"
        "kept = late[0]\n"
        "c._time_again(group, late, 3, 1, time.monotonic() - 1, told.append, notes)\n"
        "json.dump([[a is b for a, b in zip(held, before)], late[0] is kept, told, notes], sys.stdout)\n"
        "dist.destroy_process_group()\n"
    )
    ended = run_ranks([str(program)], 2)
    assert [rank.returncode for rank in ended] == [0, 0], ended[0].stderr
    is_same, is_kept, told, notes = json.loads(ended[0].stdout)
    assert is_same == [True, False, False]
    assert told[:2] == ["all_gather uint8 4 KiB, again", "all_gather uint8 2 KiB, again"]
    assert is_kept  # no time was left for it
    assert notes[0].startswith("2 of 3 cases")
    assert notes[0].endswith("2 were replaced by quieter ones")
    assert notes[1].endswith("0 were replaced by quieter ones")


def test_what_moves_fewer_bytes_per_second_than_a_smaller_size_is_measured_again_and_the_faster_counts(
    tmp_path: Path,
) -> None:
    program = tmp_path / "falling.py"
    program.write_text(
        "import dataclasses, json, msgspec, sys, time, torch.distributed as dist\n"
        "from wirespeed.measure import collectives as c\n"
        "dist.init_process_group('gloo')\n"
        "group = c._Group()\n"
        "def timed(size, time_s):\n"
        "    held = c._time_case(group, 'all_gather', 'uint8', size, 3, 1)\n"
        "    sample = msgspec.structs.replace(held.sample, times_s=(time_s,) * 3)\n"
        "    return dataclasses.replace(held, sample=sample, steal_share=0.0)\n"
        # The second took a minute, which it will not again; the third is as fast as the first, the fourth as good.
        "held = [timed(1024, 0.5), timed(4096, 60.0), timed(8192, 4.0), timed(16384, 8.2)]\n"
        "before, notes, told = list(held), [], []\n"
        "c._time_again(group, held, 3, 1, time.monotonic() + 60, told.append, notes)\n"
        "json.dump([[a is b for a, b in zip(held, before)], told, notes], sys.stdout)\n"
        "dist.destroy_process_group()\n"
    )
    ended = run_ranks([str(program)], 2)
    assert [rank.returncode for rank in ended] == [0, 0], ended[0].stderr
    is_same, told, notes = json.loads(ended[0].stdout)
    assert is_same == [True, False, True, True]
    assert told == ["all_gather uint8 4 KiB, again"]
    assert notes == []
