"""Records: written whole, read only when understood."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_records import make_record

from wirespeed import records
from wirespeed.errors import DataError, MissingCapability
from wirespeed.records import CodecsRecord, CollectivesRecord, Environment, LinksRecord
from wirespeed.spec.comparison import LossPoint, TuneRecord

ENVIRONMENT = Environment(host="h", kernel="6.1", cpu=None, num_cpus=2, versions={}, command="wirespeed bench")
LINKS = LinksRecord(
    environment=ENVIRONMENT,
    hosts=("a", "b"),
    samples=(records.LinkSample(source="a", target="b", streams=1, num_bytes=10, bit_per_s=(1e9, 9e8)),),
    socket_options={"TCP_NODELAY": "1"},
)


def test_record_reads_back_equal(tmp_path: Path):
    path = records.write(tmp_path / "deep" / "links.json", LINKS)
    assert records.read(path, LinksRecord) == LINKS


def test_comparison_reads_back_equal(tmp_path: Path):
    path = records.write(tmp_path / "tune.json", make_record())
    assert records.read(path, TuneRecord) == make_record()


def test_file_says_its_kind_first_and_its_schema():
    document = json.loads(records.to_json(LINKS))
    assert next(iter(document)) == "kind"
    assert (document["kind"], document["schema"]) == ("links", 1)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_is_kept_as_absent_and_the_record_can_be_read(tmp_path: Path, loss: float):
    record = make_record()
    outcome = msgspec.structs.replace(record.strategies[0], losses=(LossPoint(step=1, train_s=0.5, loss=loss),))
    path = records.write(tmp_path / "tune.json", msgspec.structs.replace(record, strategies=(outcome,)))
    assert records.read(path, TuneRecord).strategies[0].losses[0].loss is None


def changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(records.to_json(LINKS)), **fields}).encode()


def test_newer_schema_is_refused_with_the_way_out():
    with pytest.raises(DataError, match=r"schema 99 of 'links'.*newer wirespeed: upgrade"):
        records.from_json(changed(schema=99), LinksRecord, source="x.json")


def test_other_kind_is_refused_by_name():
    with pytest.raises(DataError, match=r"x\.json is a record of kind 'links'; expected kind 'codecs'"):
        records.from_json(records.to_json(LINKS), CodecsRecord, source="x.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"schema": 1}',
        b'{"kind": "links"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"kind": "links", "schema": 1, "x": ' + b"[" * 100_000,
        changed(hosts=3),
        changed(samples=[{"source": "a"}]),
        changed(environment=None),
        changed(schema="1"),
    ],
)
def test_damaged_content_is_a_data_error_that_names_the_source(content: bytes):
    with pytest.raises(DataError, match=r"x\.json"):
        records.from_json(content, LinksRecord, source="x.json")


def test_value_that_its_type_refuses_is_a_data_error_that_names_the_source():
    document = json.loads(records.to_json(make_record()))
    document["strategies"][0]["strategy"]["bucket_bytes"] = 1
    with pytest.raises(DataError, match=r"x\.json is damaged: got a bucket of 1 bytes"):
        records.from_json(json.dumps(document).encode(), TuneRecord, source="x.json")


@given(st.binary(max_size=200), st.integers(min_value=0, max_value=2000))
def test_bytes_changed_in_a_record_never_raise_anything_else(noise: bytes, position: int):
    whole = records.to_json(LINKS)
    content = whole[:position] + noise + whole[position + len(noise) :]
    try:
        record = records.from_json(content, LinksRecord)
    except DataError:
        return
    assert isinstance(record, LinksRecord)


def test_absent_file_is_a_data_error(tmp_path: Path):
    with pytest.raises(DataError, match=r"cannot read .*none\.json: No such file"):
        records.read(tmp_path / "none.json", LinksRecord)


def test_file_too_large_to_be_a_record_is_not_taken_into_memory(tmp_path: Path):
    path = tmp_path / "large.json"
    with path.open("wb") as stream:
        stream.truncate(records.MAX_RECORD_BYTES + 1)
    with pytest.raises(DataError, match="is over"):
        records.read(path, LinksRecord)


def test_writing_leaves_the_old_file_where_it_fails_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = records.write_bytes(tmp_path / "r.json", b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MissingCapability, match=r"cannot write .*r\.json: No space left on device; hint: free some"):
        records.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["r.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every file has a name from the start")
def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file_and_no_other(tmp_path: Path):
    path = records.write_bytes(tmp_path / "r.json", b"old")
    code = "import os, sys; from wirespeed import records; "
    code += "os.fsync = lambda _: os.kill(os.getpid(), 9); records.write_bytes(sys.argv[1], b'new')"
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert done.returncode == -9
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["r.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every file has a name from the start")
def test_where_files_need_a_name_from_the_start_they_are_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def open_named(path: str, flags: int, *args: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *args)

    real = os.open
    monkeypatch.setattr(os, "open", open_named)
    path = records.write_bytes(tmp_path / "r.json", b"new")
    monkeypatch.undo()
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o644)
    assert os.listdir(tmp_path) == ["r.json"]


def test_folder_in_the_place_of_the_file_is_an_error(tmp_path: Path):
    with pytest.raises(MissingCapability, match="Is a directory"):
        records.write_bytes(tmp_path, b"x")


def test_symbolic_link_stays_and_its_target_is_replaced(tmp_path: Path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "latest.json").symlink_to("real.json")
    records.write_bytes(tmp_path / "latest.json", b"new")
    assert (tmp_path / "latest.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"


def test_device_is_written_to_and_not_replaced(tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("making a device node needs root")
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        records.write_bytes(device, b"x")
    except (PermissionError, MissingCapability) as fault:
        pytest.skip(f"device nodes cannot be used here: {fault}")
    assert stat.S_ISCHR(device.stat().st_mode)


def test_standard_output_can_be_named_as_the_file():
    code = "from wirespeed.records import write_bytes; write_bytes('/dev/stdout', b'whole')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"whole"


@pytest.mark.parametrize("kind", [LinksRecord, CollectivesRecord, CodecsRecord, TuneRecord])
def test_kinds_have_a_tag_and_a_schema(kind: type[records.Record]):
    assert kind.__struct_config__.tag is not None
    assert kind.SCHEMA == 1
