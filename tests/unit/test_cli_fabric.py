from __future__ import annotations

import json
from pathlib import Path

import pytest

from wirespeed.cli.bench import _sizes
from wirespeed.cli.main import main
from wirespeed.errors import UsageError
from wirespeed.fabric.files import read_fabric
from wirespeed.records import (
    CodecSample,
    CodecsRecord,
    CollectiveSample,
    CollectivesRecord,
    Environment,
    LinkSample,
    LinksRecord,
    write,
)

ENVIRONMENT = Environment(host="a", kernel="6", cpu=None, num_cpus=2, versions={}, command="")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path / "links.json",
        LinksRecord(
            environment=ENVIRONMENT, hosts=("a", "b"), socket_options={},
            samples=tuple(
                LinkSample(source=s, target=t, streams=1, num_bytes=1, bit_per_s=(9.5e8,), rtt_median_s=1e-4)
                for s, t in (("a", "b"), ("b", "a"))
            ),
        ),
    )  # fmt: skip
    write(
        tmp_path / "collectives.json",
        CollectivesRecord(
            environment=ENVIRONMENT, backend="gloo", num_ranks=2, ranks_per_host=1, cpus_per_rank=1,
            samples=tuple(
                CollectiveSample(
                    collective="all_reduce", size_bytes=size, times_s=(time_s,) * 3, cpu_s=1e-4, is_correct=True
                )
                for size, time_s in ((1024, 1e-3), (4096, 5e-4), (2**20, 1e-2))
            ),
        ),
    )  # fmt: skip
    write(
        tmp_path / "codecs.json",
        CodecsRecord(
            environment=ENVIRONMENT, device="cpu", kernels="numba", num_ranks=2, concurrent=2,
            samples=(CodecSample(codec="int8", stage="encode", size_bytes=2**20, times_s=(1e-3,)),),
        ),
    )  # fmt: skip
    return tmp_path


def test_records_in_any_order_become_a_fabric(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["codecs.json", "collectives.json", "links.json"]
    out = folder / "net.toml"
    assert main(["fabric", "calibrate", *(str(folder / name) for name in names), "-o", str(out)]) == 0
    fabric = read_fabric(out)
    assert fabric.name == "net"
    assert [(host.name, host.cpus) for host in fabric.hosts] == [("a", 1), ("b", 1)]
    assert len(fabric.collectives) == len(fabric.codecs) == 1
    said = capsys.readouterr()
    assert "wrote" in said.err
    # 1 ms and 0.5 ms are pooled to 0.707 ms, 41 % above the second: that is shown and named.
    assert "41.4 %" in said.out
    assert "noisy: all_reduce float32 over 2 ranks" in said.out


def test_show_gives_a_table_or_one_json_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(folder / "net.toml")
    assert main(["fabric", "calibrate", str(folder / "links.json"), "-o", out, "--cpus-per-host", "2.5"]) == 0
    capsys.readouterr()
    assert main(["fabric", "show", out]) == 0
    table = capsys.readouterr().out
    assert "950 Mbit/s" in table
    assert "round trip: 100 us (measured)" in table
    assert main(["fabric", "show", out, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [host["cpus"] for host in document["hosts"]] == [2.5, 2.5]


def test_files_that_do_not_fit_are_named_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other.json").write_text('{"kind": "comparison", "schema": 1}')
    (folder / "torn.json").write_text('{"kind": "links"')
    out = folder / "net.toml"
    for names, problem in (
        (["other.json"], "other.json is a record of kind 'comparison'; expected links, collectives or codecs"),
        (["torn.json"], "torn.json is not a wirespeed record"),
        (["absent.json"], "absent.json: No such file"),
        (["links.json", "links.json"], "got 2 records of links"),
        (["codecs.json"], "got no record of links or collectives"),
    ):
        assert main(["fabric", "calibrate", *(str(folder / name) for name in names), "-o", str(out)]) == 2
        assert problem in capsys.readouterr().err
    assert not out.exists()


def test_without_a_launcher_bench_says_how_to_start_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    for command in ("links", "collectives"):
        assert main(["bench", command]) == 2
        assert "wirespeed lab run" in capsys.readouterr().err


def test_size_ranges_go_by_fours_and_lists_stay_lists() -> None:
    assert _sizes("1KiB..64KiB") == (1024, 4096, 16384, 65536)
    assert _sizes("1KiB..10KiB") == (1024, 4096)
    assert _sizes("1MB,25 MiB") == (10**6, 25 * 2**20)
    with pytest.raises(UsageError, match=r"FIRST\.\.LAST"):
        _sizes("4KiB..1KiB")
    with pytest.raises(UsageError):
        _sizes("0..1KiB")
