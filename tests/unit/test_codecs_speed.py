"""Measuring the codecs: every stage is there, the record round-trips, the command speaks tables and JSON."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

import typer  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from wirespeed import records  # noqa: E402
from wirespeed.cli.bench_codecs import bench_codecs  # noqa: E402
from wirespeed.errors import UsageError  # noqa: E402
from wirespeed.records import CodecsRecord  # noqa: E402
from wirespeed.spec.strategy import Strategy  # noqa: E402
from wirespeed.train.codecs import make_codec  # noqa: E402
from wirespeed.train.speed import bucket_shapes, measure_codecs  # noqa: E402

pytestmark = pytest.mark.torch

NAMES = ("dense", "half", "int8", "topk@1%")
app = typer.Typer()
app.command("codecs")(bench_codecs)


def _measure(**changes) -> CodecsRecord:
    settings = {"num_ranks": 3, "repeats": 2, "concurrent": 5, "kernels": "torch"} | changes
    return measure_codecs([Strategy.parse(name) for name in NAMES], [4096, 70000], **settings)


def test_every_stage_of_every_codec_is_timed_at_every_size():
    record = _measure()
    stages = {(name, stage) for name in NAMES for stage in make_codec(Strategy.parse(name)).stages}
    expected = {(*pair, size) for pair in stages | {("memcpy", "copy")} for size in (4096, 70000)}
    assert {(s.codec, s.stage, s.size_bytes) for s in record.samples} == expected
    assert len(record.samples) == len(expected)
    assert all(len(s.times_s) == 2 and min(s.times_s) > 0 for s in record.samples)
    assert (record.num_ranks, record.concurrent, record.kernels, record.device) == (3, 5, "torch", "cpu")


def test_bucket_sizes_of_strategies_do_not_matter():
    record = measure_codecs(
        [Strategy.parse("int8/4MiB"), Strategy.parse("int8")], [4096], num_ranks=2, repeats=1, kernels="torch"
    )
    assert sorted(s.codec for s in record.samples) == ["int8", "int8", "int8", "memcpy"]


def test_a_deadline_that_has_passed_still_gives_one_run_of_each():
    record = _measure(repeats=50, deadline_s=1e-9)
    assert {len(s.times_s) for s in record.samples} == {1}


def test_record_is_read_back_as_written(tmp_path):
    record = _measure(repeats=1)
    assert records.read(records.write(tmp_path / "codecs.json", record), CodecsRecord) == record


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"num_ranks": 1}, "got 1 ranks"), ({"repeats": 0}, "repeats=0"), ({"deadline_s": 0.0}, "deadline_s=0")],
)
def test_what_cannot_be_measured_is_refused(changes, said: str):
    with pytest.raises(UsageError, match=said):
        _measure(**changes)


def test_a_bucket_below_one_element_is_refused():
    with pytest.raises(UsageError, match="3 bytes"):
        measure_codecs([Strategy()], [3], num_ranks=2)


QUICK = ["--sizes", "4KiB", "--repeats", "1", "--kernels", "torch"]


def test_command_prints_a_table_with_a_row_per_codec():
    result = CliRunner().invoke(app, [*QUICK, "--strategies", "int8,topk@1%"])
    assert result.exit_code == 0
    words = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert [row[0] for row in words[-3:]] == ["4", "int8", "topk@1%"]
    assert words[-3][:3] == ["4", "KiB", "memcpy"]


def test_command_prints_one_json_document_and_writes_the_same(tmp_path):
    result = CliRunner().invoke(app, [*QUICK, "--json", "--out", str(tmp_path / "c.json")])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["kind"] == "codecs"
    assert document == json.loads((tmp_path / "c.json").read_bytes())


def test_command_leaves_torch_threads_as_they_were():
    before = torch.get_num_threads()
    CliRunner().invoke(app, [*QUICK, "--threads", "1", "--json"])
    assert torch.get_num_threads() == before


def test_command_refuses_kernels_that_do_not_exist():
    result = CliRunner().invoke(app, ["--kernels", "cuda"])
    assert isinstance(result.exception, UsageError)
    assert "expected auto, numba, torch" in str(result.exception)


class TestBucketShapes:
    def test_a_bucket_takes_the_models_tensors_in_turn_and_ends_with_a_vector(self):
        # 12 + 4 = 16, once more 12 + 4 = 32, then only (4,) fits: 36, and 2 are left of 38.
        assert bucket_shapes([(3, 4), (4,)], 38) == [(3, 4), (4,), (3, 4), (4,), (4,), (2,)]

    def test_tensors_that_are_too_large_are_passed_over(self):
        assert bucket_shapes([(100, 100), (5,)], 11) == [(5,), (5,), (1,)]

    def test_without_tensors_there_is_nothing_to_go_by(self):
        assert bucket_shapes([], 10) is None
        assert bucket_shapes([(0, 3)], 10) is None


def test_a_stage_counts_as_long_as_the_slowest_rank_says():
    record = measure_codecs(
        [Strategy(codec="int8")], [4096], num_ranks=2, repeats=2, deadline_s=5.0, slowest=lambda seconds: seconds + 7.0
    )
    # The share of the deadline is asked for by the same way: 7 s past it, so one round was measured.
    assert all(len(sample.times_s) == 1 and 7.0 < sample.times_s[0] < 8.0 for sample in record.samples)
