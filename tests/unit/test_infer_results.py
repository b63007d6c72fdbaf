"""The journal and the output: order, torn ends, full disks, other jobs, and what the columns hold."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from wirespeed.errors import DataError, MissingCapability, UsageError
from wirespeed.infer.columns import Row, make_batch, schema_of
from wirespeed.infer.inputs import Item
from wirespeed.infer.journal import JobIdentity
from wirespeed.infer.results import Results, identity_of
from wirespeed.serve.config import TensorSpec

SPECS = (TensorSpec(name="features", datatype="FP32", shape=(4,)), TensorSpec(name="count", datatype="INT32", shape=()))
ITEMS = [Item(f"{i}.jpg", f"{i}.jpg") for i in range(10)]


def identity(model: str = "m", items: list[Item] = ITEMS) -> JobIdentity:
    return identity_of(items, model=model, version="1", encoding="fp32", outputs=SPECS)


def row(i: int) -> Row:
    return Row(f"{i}.jpg", (np.full(4, i, np.float32), np.int32(i).reshape(())))


def failed(i: int) -> Row:
    return Row(f"{i}.jpg", None, "no image")


def begun(path: Path, num: int, *, model: str = "m") -> Results:
    results = Results(path, SPECS)
    results.open(identity(model))
    for i in range(num):
        results.put(i, row(i))
    results.write(*results.take())
    return results


def test_results_that_come_in_any_order_are_written_in_that_of_the_inputs(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.parquet", SPECS)
    assert results.open(identity()) == 0
    for i in (3, 0, 9, 2, 1, 5, 4, 8, 7, 6):
        results.put(i, failed(i) if i == 5 else row(i))
        results.write(*results.take())
    results.finish()
    table = pq.read_table(tmp_path / "r.parquet")
    assert table["key"].to_pylist() == [item.key for item in ITEMS]
    assert table["error"].to_pylist() == [None] * 5 + ["no image"] + [None] * 4
    assert table["features"].to_pylist() == [None if i == 5 else [float(i)] * 4 for i in range(10)]
    assert table["count"].to_pylist() == [None if i == 5 else i for i in range(10)]
    assert [path.name for path in tmp_path.iterdir()] == ["r.parquet"]


def test_a_job_goes_on_behind_what_is_written_and_cuts_off_a_torn_end(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    begun(out, 4).close()
    journal = tmp_path / "r.parquet.partial"
    whole = journal.read_bytes()
    results = begun(out, 0)
    results.put(4, row(4))
    results.write(*results.take())
    results.close()
    grown = journal.read_bytes()
    for cut in range(len(whole), len(grown)):
        journal.write_bytes(grown[:cut])
        results = Results(out, SPECS)
        assert results.open(identity()) == 4
        results.close()
        assert journal.read_bytes() == whole
    journal.write_bytes(grown[:-1] + bytes([grown[-1] ^ 1]))
    results = Results(out, SPECS)
    assert results.open(identity()) == 4  # the last block does not fit its checksum
    for i in range(4, 10):
        results.put(i, row(i))
    results.write(*results.take())
    results.finish()
    assert pq.read_table(out)["count"].to_pylist() == list(range(10))


def test_damage_before_the_end_is_told_and_not_written_out(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    results = begun(out, 4)
    results.put(4, row(4))
    results.write(*results.take())
    results.close()
    journal = tmp_path / "r.parquet.partial"
    content = bytearray(journal.read_bytes())
    content[content.index(b"BLK1") + 60] ^= 1
    journal.write_bytes(bytes(content))
    results = Results(out, SPECS)
    assert results.open(identity()) == 5
    with pytest.raises(DataError, match="results 0 to 3 do not fit their checksum"):
        results.finish()
    assert not out.exists()
    results.close()


def test_a_journal_of_another_job_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    begun(out, 3, model="other").close()
    before = (tmp_path / "r.parquet.partial").read_bytes()
    with pytest.raises(UsageError, match=r"unfinished job of model other \(now m\)"):
        Results(out, SPECS).open(identity())
    with pytest.raises(UsageError, match=r"inputs: 10 \(now 9\)"):
        Results(out, SPECS).open(identity("other", ITEMS[:-1]))
    with pytest.raises(UsageError, match="of other inputs"):
        Results(out, SPECS).open(identity("other", ITEMS[::-1]))
    assert (tmp_path / "r.parquet.partial").read_bytes() == before
    results = Results(out, SPECS)
    assert results.open(identity(), restart=True) == 0
    results.close()


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    first = begun(tmp_path / "r.parquet", 1)
    with pytest.raises(UsageError, match="another run is writing"):
        Results(tmp_path / "r.parquet", SPECS).open(identity())
    first.close()


FILL = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_infer_results import Results, SPECS, identity, row
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
results = Results(Path(sys.argv[1]), SPECS)
results.open(identity())
try:
    for i in range(10):
        results.put(i, row(i))
        results.write(*results.take())
except Exception as fault:
    print(type(fault).__name__, fault, flush=True)
    results.put(9, row(9)) if i < 9 else None
    results.write(i + 1, [row(9)])  # rows behind a gap
    print(results.num_written)
"""


def test_where_the_disk_takes_no_more_what_is_written_stays_whole(tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(out), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    told, count = done.stdout.splitlines()
    assert told.startswith("MissingCapability cannot write")
    assert f"{count} results are safe" in told
    assert 0 < int(count) < 10
    results = Results(out, SPECS)
    assert results.open(identity()) == int(count)
    for i in range(int(count), 10):
        results.put(i, row(i))
    results.write(*results.take())
    results.finish()
    assert pq.read_table(out)["count"].to_pylist() == list(range(10))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 3000


def test_every_shape_and_datatype_comes_back_as_it_went(tmp_path: Path) -> None:
    specs = (
        TensorSpec(name="fixed", datatype="FP16", shape=(2, 3)),
        TensorSpec(name="boxes", datatype="FP32", shape=(-1, 4)),
        TensorSpec(name="loose", datatype="INT8", shape=("h", "w")),
        TensorSpec(name="flag", datatype="BOOL", shape=()),
        TensorSpec(name="brain", datatype="BF16", shape=(2,)),
        TensorSpec(name="label", datatype="BYTES", shape=()),
        TensorSpec(name="words", datatype="BYTES", shape=(-1,)),
    )

    def values(num_boxes: int) -> tuple[np.ndarray, ...]:
        return (
            np.arange(6, dtype=np.float16).reshape(2, 3),
            np.arange(4 * num_boxes, dtype=np.float32).reshape(num_boxes, 4),
            np.full((num_boxes, 2), 5, np.int8),
            np.bool_(num_boxes > 1).reshape(()),
            np.array([0x3F80, 0xC000], np.uint16),  # 1.0 and -2.0
            np.array(b"cat", object).reshape(()),
            np.array([b"x"] * num_boxes, object),
        )

    rows = [Row("a", values(2)), Row("b\udcff", None, "bad"), Row("c", values(0)), Row("d", values(1))]
    schema = schema_of(specs)
    batch = make_batch(rows, specs, schema)
    pq.write_table(__import__("pyarrow").Table.from_batches([batch]), tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table["key"].to_pylist() == ["a", "b\\xff", "c", "d"]
    assert table["fixed"].to_pylist()[:2] == [[[0, 1, 2], [3, 4, 5]], None]
    assert table["boxes"].to_pylist() == [[[0, 1, 2, 3], [4, 5, 6, 7]], None, [], [[0, 1, 2, 3]]]
    assert table["loose"].to_pylist() == [[5] * 4, None, [], [5, 5]]
    assert table["loose_shape"].to_pylist() == [[2, 2], None, [0, 2], [1, 2]]
    assert table["flag"].to_pylist() == [True, None, False, False]
    assert table["brain"].to_pylist() == [[1.0, -2.0], None, [1.0, -2.0], [1.0, -2.0]]
    assert table["label"].to_pylist() == [b"cat", None, b"cat", b"cat"]
    assert table["words"].to_pylist() == [[b"x", b"x"], None, [], [b"x"]]


def test_a_block_of_errors_alone_has_null_outputs() -> None:
    batch = make_batch([failed(0), failed(1)], SPECS, schema_of(SPECS))
    assert batch.column("features").null_count == 2
    assert batch.column("count").null_count == 2


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingCapability, match="cannot write"):
        Results(tmp_path / "file" / "r.parquet", SPECS).open(identity())
    assert os.listdir(tmp_path) == ["file"]


WIDE = (TensorSpec(name="features", datatype="FP32", shape=(512,)),)


def wide(num: int) -> list[Row]:
    return [Row(f"{i}.jpg", (np.full(512, i, np.float32),)) for i in range(num)]


def opened(out: Path, num: int) -> Results:
    items = [Item(f"{i}.jpg", f"{i}.jpg") for i in range(num)]
    results = Results(out, WIDE)
    results.open(identity_of(items, model="m", version="1", encoding="fp32", outputs=WIDE))
    return results


def test_the_output_is_written_along_and_a_resumed_run_makes_the_same_of_the_journal(tmp_path: Path) -> None:
    rows = wide(1000)
    tables = []
    for place, cut in enumerate((1000, 700)):
        out = tmp_path / f"{place}.parquet"
        results = opened(out, 1000)
        results.warm_up()
        for first in range(0, cut, 100):
            results.write(first, rows[first : first + 100])
        assert (tmp_path / f".{place}.parquet.writing").stat().st_size > 512 * 4 * cut // 2  # most of it is there
        if cut < 1000:
            results.close()
            assert [path.name for path in tmp_path.glob(f"*{place}.parquet*")] == [f"{place}.parquet.partial"]
            results = opened(out, 1000)
            results.warm_up()
            results.write(cut, rows[cut:])
        results.finish()
        tables.append(pq.read_table(out))
        assert [path.name for path in tmp_path.iterdir() if path.name not in ("0.parquet", "1.parquet")] == []
    assert tables[0] == tables[1]
    assert tables[0]["features"].combine_chunks().flatten().to_numpy().reshape(1000, 512)[:, 5].tolist() == list(
        range(1000)
    )


def test_groups_grow_with_the_file(tmp_path: Path) -> None:
    results = opened(tmp_path / "r.parquet", 4000)
    results.warm_up()
    rows = wide(4000)
    for first in range(0, 4000, 10):
        results.write(first, rows[first : first + 10])
    results.finish()
    told = pq.read_metadata(tmp_path / "r.parquet")
    groups = [told.row_group(i).num_rows for i in range(told.num_row_groups)]
    assert sum(groups) == 4000
    assert groups[0] == 130  # of 512 numbers and a key: the first ten rows above 256 KiB
    assert groups[:-1] == sorted(groups[:-1])
    assert groups[-2] > 500  # about a quarter of what was before
    assert len(groups) < 15


def test_an_output_that_cannot_be_written_along_is_made_of_the_journal_at_the_end(tmp_path: Path) -> None:
    results = opened(tmp_path / "r.parquet", 1000)
    in_the_way = tmp_path / ".r.parquet.writing"
    in_the_way.mkdir()
    results.warm_up()
    results.write(0, wide(1000))
    with pytest.raises(MissingCapability, match="all 1000 results are safe"):
        results.finish()
    in_the_way.rmdir()
    results.finish()
    assert pq.read_metadata(tmp_path / "r.parquet").num_rows == 1000
