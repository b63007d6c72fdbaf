"""Round trips: what comes out is what went in, and no more is moved than has to be."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from repo_tools import bf16, make_model, model_bytes, safetensors_bytes, tree, weights

from wirespeed.errors import DataError, UsageError
from wirespeed.repo import chunks, push
from wirespeed.repo.cache import Cache
from wirespeed.repo.parts import PART_PREFIX
from wirespeed.repo.pull import MARKER
from wirespeed.repo.repository import Repository
from wirespeed.repo.store import Store
from wirespeed.repo.upload import MAX_DELTA_DEPTH


def test_what_is_pulled_is_what_was_pushed(store: Store, tmp_path: Path) -> None:
    repository = Repository(store, cache=Cache(tmp_path / "cache"))
    folder = make_model(tmp_path / "m")
    (folder / "nothing").mkdir()
    pushed = repository.push(folder, "org/m", message="first")
    assert pushed.version.label == "org/m@v1"
    cached = Path(repository.pull("org/m").folder)
    repository.pull("org/m", to=tmp_path / "out")
    for found in (cached, tmp_path / "out"):
        assert tree(found) == tree(folder)
        assert os.access(found / "run.sh", os.X_OK) or found == cached
        assert (found / "nothing").is_dir()
    assert (tmp_path / "out" / "run.sh").stat().st_mode & 0o777 == 0o755


def test_a_file_alone_is_a_version(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "one.bin").write_bytes(b"content")
    repository.push(tmp_path / "one.bin", "m")
    repository.pull("m", to=tmp_path / "out")
    assert tree(tmp_path / "out") == {"one.bin": b"content"}


def test_a_version_of_no_bytes(store: Store, tmp_path: Path) -> None:
    repository = Repository(store, cache=Cache(tmp_path / "cache"))
    (tmp_path / "m").mkdir()
    repository.push(tmp_path / "m", "m")
    (tmp_path / "m" / "empty").touch()
    repository.push(tmp_path / "m", "m")
    for number, files in ((1, {}), (2, {"empty": b""})):
        repository.pull(f"m@{number}", to=tmp_path / f"out{number}")
        assert tree(tmp_path / f"out{number}") == files
        assert tree(Path(repository.pull(f"m@{number}").folder)) == files


def test_what_an_interrupted_push_has_uploaded_is_found_again(repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    put = repository.store.put

    def stop_at_the_manifest(key: str, content: bytes) -> None:
        if bytes(content[:4]) == b"WSM1":
            raise DataError("stop here")
        put(key, content)

    repository.store.put = stop_at_the_manifest  # type: ignore[method-assign, assignment]
    with pytest.raises(DataError, match="stop here"):
        repository.push(folder, "m")
    repository.store.put = put  # type: ignore[method-assign]
    pushed = repository.push(folder, "m")
    assert pushed.version.number == 1
    assert pushed.uploaded_bytes == pushed.version.manifest_bytes


def test_the_same_again_sends_nothing(repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    first = repository.push(folder, "m")
    again = repository.push(folder, "m")
    assert again.uploaded_bytes == 0
    assert again.version.manifest_digest == first.version.manifest_digest
    other = repository.push(folder, "other")
    # Large chunks are found by any model; small ones are in packs of the model's own.
    assert other.uploaded_bytes < 0.05 * first.uploaded_bytes + 2**21


def test_a_frozen_tensor_costs_nothing_wherever_it_moves(repository: Repository, tmp_path: Path) -> None:
    frozen = ("BF16", (2**20,), bf16(weights(2**20)).tobytes())
    adapter = np.random.default_rng(1).integers(0, 256, 200_000, dtype=np.uint8).tobytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"base": frozen}))
    repository.push(path, "m")
    path.write_bytes(safetensors_bytes({"lora": ("U8", (200_000,), adapter), "base": frozen}))
    pushed = repository.push(path, "m", parent="v1")
    assert 200_000 <= pushed.uploaded_bytes < 210_000


def test_a_step_goes_as_differences_and_comes_back_whole(repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    (folder / "model.safetensors").write_bytes(model_bytes(steps=1))
    pushed = repository.push(folder, "m", parent="v1")
    assert pushed.delta_bytes == 3 * 600_000
    assert pushed.delta_payload_bytes < 0.012 * pushed.delta_bytes
    assert pushed.version.parent == 1
    # On a machine that has the parent, only the differences are read.
    near = Repository(repository.store, cache=Cache(tmp_path / "near"))
    near.pull("m@1")
    pulled = near.pull("m@2")
    assert pulled.store_bytes < 0.02 * pushed.delta_bytes
    assert tree(Path(pulled.folder)) == tree(folder)
    far = Repository(repository.store, cache=Cache(tmp_path / "far"))
    assert tree(Path(far.pull("m@2").folder)) == tree(folder)


def test_chains_of_differences_are_bounded(repository: Repository, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    depths = []
    for step in range(MAX_DELTA_DEPTH + 4):
        path.write_bytes(model_bytes(num_layers=1, size=100_000, steps=step))
        version = repository.push(path, "m", parent=f"v{step}" if step else None).version
        manifest = repository.manifest(version)
        depths.append(max(manifest.depth(index) for file in manifest.files for index in file.chunks))
        out = tmp_path / f"out{step}"
        Repository(repository.store, cache=Cache(tmp_path / f"c{step}")).pull(version.label, to=out)
        assert tree(out)["model.safetensors"] == path.read_bytes()
    assert depths == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]


def test_a_child_outlives_its_parent(repository: Repository, tmp_path: Path) -> None:
    from wirespeed.repo import gc, versions

    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    (folder / "model.safetensors").write_bytes(model_bytes(steps=1))
    repository.push(folder, "m", parent="v1")
    versions.remove(repository.store, repository.version("m@1"))
    gc.collect(repository.store, grace_s=-5)
    far = Repository(repository.store, cache=Cache(tmp_path / "far"))
    assert tree(Path(far.pull("m").folder)) == tree(folder)


def test_a_fast_link_gets_bytes_as_they_are(repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    for name in ("near", "far"):
        repository.push(folder, name)
    (folder / "model.safetensors").write_bytes(model_bytes(steps=1))
    assert repository.push(folder, "far", parent="v1", link_bit_per_s=1e9).delta_bytes > 0
    assert repository.push(folder, "near", parent="v1", link_bit_per_s=400e9).delta_bytes == 0


def test_compression_is_undone(repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    pushed = repository.push(folder, "m", is_compressed=True)
    # bf16 of normal weights: two thirds, as the reference measured; the file of noise stays as it is.
    assert pushed.uploaded_bytes < 0.72 * 1_800_000 + 3_010_000
    assert tree(Path(repository.pull("m").folder)) == tree(folder)


def test_an_interrupted_pull_goes_on_where_it_was(repository: Repository, tmp_path: Path) -> None:
    path = tmp_path / "big.bin"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, 12_000_000, dtype=np.uint8).tobytes())
    repository.push(path, "m")
    repository.pull("m", to=tmp_path / "whole")
    manifest = repository.manifest(repository.version("m"))
    # Half of the file arrived, then the process was killed; a chunk in the middle of it is wrong as well.
    part = next(iter(_parts(repository, tmp_path / "out")))
    content = bytearray(path.read_bytes())
    content[1_000_000] ^= 1
    part.write_bytes(bytes(content[:6_000_000]) + bytes(6_000_000))
    pulled = repository.pull("m", to=tmp_path / "out")
    lengths = [manifest.chunks[i].length for i in manifest.files[0].chunks]
    assert tree(tmp_path / "out") == {"big.bin": path.read_bytes()}
    assert pulled.store_bytes <= 6_000_000 + 2 * max(lengths)


def _parts(repository: Repository, folder: Path) -> list[Path]:
    """Where a pull into this folder keeps its parts, by interrupting one."""
    wrong = repository.store.get_range

    def refuse(key: str, start: int, length: int, **options: object) -> memoryview:
        raise DataError("stop here")

    repository.store.get_range = refuse  # type: ignore[method-assign]
    try:
        with pytest.raises(DataError, match="stop here"):
            repository.pull("m", to=folder)
    finally:
        repository.store.get_range = wrong  # type: ignore[method-assign]
    return list(folder.rglob(f"{PART_PREFIX}*"))


def test_a_folder_moves_from_one_version_to_the_next(repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    out = tmp_path / "out"
    repository.pull("m", to=out)
    (out / "mine.txt").write_text("the user's own")
    (folder / "config.json").unlink()
    (folder / "new.txt").write_text("new")
    repository.push(folder, "m")
    pulled = repository.pull("m", to=out)
    assert tree(out) == {**tree(folder), "mine.txt": b"the user's own"}
    assert pulled.store_bytes <= 10


def test_a_file_that_the_user_changed_is_set_right_in_a_pull_and_kept_when_it_left_the_version(
    repository: Repository, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    out = tmp_path / "out"
    repository.pull("m", to=out)
    (out / "config.json").write_text("changed by the user")
    (out / "run.sh").write_text("wrong")
    (folder / "config.json").unlink()
    repository.push(folder, "m")
    repository.pull("m", to=out)
    assert (out / "config.json").read_text() == "changed by the user"
    assert (out / "run.sh").read_text() == "#!/bin/sh\n"


def test_two_files_of_the_same_content_in_one_folder(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for name in ("a", "b"):
        (tmp_path / "m" / name).write_bytes(b"same" * 100_000)
    repository.push(tmp_path / "m", "m")
    repository.pull("m", to=tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "m")


def test_a_link_in_the_folder_does_not_lead_a_pull_out_of_it(repository: Repository, tmp_path: Path) -> None:
    repository.push(make_model(tmp_path / "m"), "m")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sub").symlink_to(outside)
    with pytest.raises(DataError, match="link"):
        repository.pull("m", to=tmp_path / "out")
    assert list(outside.iterdir()) == []


def test_a_file_that_changes_while_it_is_pushed_is_refused(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "growing"
    path.write_bytes(bytes(1000))
    layout = push.layout_of

    def write_meanwhile(*args: object, **options: object) -> chunks.Layout:
        with path.open("ab") as stream:
            stream.write(b"more")
        return layout(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(push, "layout_of", write_meanwhile)
    with pytest.raises(DataError, match="written to while"):
        repository.push(path, "m")
    assert repository.versions("m") == []


def test_a_broken_link_and_a_pipe_are_refused(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "link").symlink_to("nowhere")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        repository.push(tmp_path / "m", "m")
    (tmp_path / "m" / "link").unlink()
    os.mkfifo(tmp_path / "m" / "pipe")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        repository.push(tmp_path / "m", "m")


def test_a_checkpoint_that_was_cut_short_is_refused_unless_it_is_wanted_so(
    repository: Repository, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(model_bytes()[:-1])
    with pytest.raises(DataError, match="cut short"):
        repository.push(path, "m")
    repository.push(path, "m", is_as_is=True)
    repository.pull("m", to=tmp_path / "out")
    assert tree(tmp_path / "out")["model.safetensors"] == path.read_bytes()


def test_no_path_is_a_usage_error(repository: Repository, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        repository.push(tmp_path / "nothing", "m")


def test_more_chunks_than_a_multipart_upload_has_parts(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MIN_CUT_BYTES", 64), ("PIECE_BYTES", 256), ("CUT_BITS", 7)):
        monkeypatch.setattr(chunks, name, value)
    content = np.random.default_rng(2).integers(0, 256, 1_900_000, dtype=np.uint8).tobytes()
    (tmp_path / "big.bin").write_bytes(content)
    version = repository.push(tmp_path / "big.bin", "m").version
    assert len(repository.manifest(version).files[0].chunks) > 10_000
    repository.pull("m", to=tmp_path / "out")
    assert (tmp_path / "out" / "big.bin").read_bytes() == content


@pytest.mark.parametrize("num_files", [3_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_version_of_many_files(repository: Repository, tmp_path: Path, num_files: int) -> None:
    folder = tmp_path / "m"
    for at in range(0, num_files, 1000):
        (folder / f"d{at:06d}").mkdir(parents=True)
        for file in range(at, min(at + 1000, num_files)):
            (folder / f"d{at:06d}" / f"{file}.txt").write_bytes(b"%d" % file)
    pushed = repository.push(folder, "m")
    assert pushed.version.num_files == num_files
    assert pushed.num_objects <= 4
    pulled = repository.pull("m", to=tmp_path / "out")
    assert pulled.num_files == num_files
    assert (tmp_path / "out" / "d001000" / "1234.txt").read_bytes() == b"1234"
    assert sum(len(files) for _, _, files in os.walk(tmp_path / "out")) == num_files + 1
    assert (tmp_path / "out" / MARKER).exists()


def test_diff_names_files_and_tensors(repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    tensors = bytearray((folder / "model.safetensors").read_bytes())
    tensors[-700_000] ^= 1  # in the last but one layer's weight
    (folder / "model.safetensors").write_bytes(tensors)
    (folder / "config.json").unlink()
    (folder / "new.json").write_text("{}")
    repository.push(folder, "m")
    changes = {change.path: change for change in repository.diff("m@1", "m@2")}
    assert {path: change.change for path, change in changes.items()} == {
        "model.safetensors": "changed", "config.json": "removed", "new.json": "added",
    }  # fmt: skip
    assert changes["model.safetensors"].tensors == ("layer.1.weight",)
    assert changes["model.safetensors"].new_bytes == 600_000
    assert repository.diff("m@1", "m@1") == []
