"""What a job's arguments name, and how it is read."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from pathlib import Path

import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.infer.inputs import Item, expand
from wirespeed.infer.reading import Loaded, ReadBounds, Reader


def shard(path: Path, mode: str, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def read_all(items: list[Item], *, start: int = 0, bounds: ReadBounds | None = None) -> dict[int, Loaded]:
    """Read everything; each input is released, and counts as written, as soon as it is there."""
    found: dict[int, Loaded] = {}
    is_done = threading.Event()
    ready = threading.Event()

    def take(batch: list[Loaded]) -> None:
        ready.wait(60)
        for loaded in batch:
            assert loaded.place not in found
            found[loaded.place] = loaded
            reader.release(len(loaded.data))
        reader.written(min(set(range(start, len(items) + 1)) - set(found)))
        if len(found) == len(items) - start:
            is_done.set()

    reader = Reader(items, start=start, bounds=ReadBounds() if bounds is None else bounds, deliver=take)
    ready.set()
    reader.start()
    assert is_done.wait(60)
    reader.stop()
    assert reader.used_bytes == 0
    return found


def test_folders_globs_lists_and_files_keep_their_order_and_each_input_once(tmp_path: Path) -> None:
    for name in ("b/2.JPG", "b/1.png", "b/note.txt", "b/.hidden.jpg", "b/.git/x.jpg", "b/deep/3.jpeg", "a.jpg", "odd"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "list").write_text(f"{tmp_path}/odd\n\n{tmp_path}/a.jpg\n")
    found = expand([f"{tmp_path}/b", f"{tmp_path}/*.jpg", f"@{tmp_path}/list"])
    names = [os.path.relpath(item.key, tmp_path) for item in found.items]
    assert names == ["b/1.png", "b/2.JPG", "b/deep/3.jpeg", "a.jpg", "odd"]
    assert found.num_repeated == 1


@pytest.mark.parametrize(
    ("suffix", "mode"), [("tar", "w"), ("tar.gz", "w:gz"), ("tar.bz2", "w:bz2"), ("tar.xz", "w:xz")]
)
def test_members_of_archives_are_read_where_they_lie(tmp_path: Path, suffix: str, mode: str) -> None:
    members = {f"{i:03}.{kind}": os.urandom(3000 + i) for i in range(30) for kind in ("jpg", "cls", "json")}
    path = shard(tmp_path / f"s.{suffix}", mode, members)
    items = expand([str(path)]).items
    assert [item.key for item in items] == [f"{path}::{i:03}.jpg" for i in range(30)]
    found = read_all(items, start=7, bounds=ReadBounds(budget_bytes=10_000, num_threads=3))
    assert {i: found[i].data for i in found} == {i: members[f"{i:03}.jpg"] for i in range(7, 30)}
    assert all(loaded.error is None for loaded in found.values())


def test_what_is_not_there_or_holds_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(UsageError, match=r"there is no .*missing"):
        expand([str(tmp_path / "missing.jpg")])
    with pytest.raises(UsageError, match="empty holds no inputs"):
        expand([str(tmp_path / "empty")])
    with pytest.raises(UsageError, match="holds no inputs"):
        expand([str(tmp_path / "*.jpg")])
    with pytest.raises(DataError, match=r"broken\.tar is not a tar archive"):
        expand([str(tmp_path / "broken.tar")])
    (tmp_path / "loop").write_text(f"@{tmp_path}/loop\n")
    with pytest.raises(UsageError, match="names another list"):
        expand([f"@{tmp_path}/loop"])


def test_an_input_that_cannot_be_read_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "good.jpg").write_bytes(b"x" * 10)
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "large.jpg").write_bytes(b"x" * 101)
    items = [
        Item(str(tmp_path / name), str(tmp_path / name)) for name in ("good.jpg", "empty.jpg", "large.jpg", "gone.jpg")
    ]
    items.append(Item("folder", str(tmp_path)))
    found = read_all(items, bounds=ReadBounds(max_item_bytes=100))
    assert found[0] == Loaded(0, b"x" * 10)
    assert [found[i].error for i in range(1, 5)] == [
        "it is empty",
        "it is larger than 100 B",
        "cannot be read: No such file or directory",
        "cannot be read: Is a directory",
    ]


def test_a_truncated_archive_is_an_error_of_the_members_it_lost(tmp_path: Path) -> None:
    path = shard(tmp_path / "s.tar", "w", {f"{i}.jpg": bytes([i + 1]) * 2000 for i in range(4)})
    items = expand([str(path)]).items
    content = path.read_bytes()
    path.write_bytes(content[: items[3].offset + 100])
    found = read_all(items)
    assert [found[i].error for i in range(3)] == [None, None, None]
    assert found[3].error == "cannot be read: the archive ends within it, at 100 of 2000 bytes"


def test_no_more_is_held_than_the_budget_and_one_input_per_thread(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i:02}.jpg").write_bytes(b"x" * 1000)
    items = expand([str(tmp_path)]).items
    peak = 0
    held: list[Loaded] = []
    came = threading.Semaphore(0)

    def take(batch: list[Loaded]) -> None:
        held.extend(batch)
        for _ in batch:
            came.release()

    reader = Reader(items, start=0, bounds=ReadBounds(budget_bytes=5000, num_threads=2), deliver=take)
    reader.start()
    for _ in range(40):
        assert came.acquire(timeout=60)
        peak = max(peak, reader.used_bytes)
        reader.release(1000)
    reader.stop()
    assert len(held) == 40
    assert peak <= 5000 + 2 * 1000


def test_reading_stops_ahead_of_what_is_written(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}.jpg").write_bytes(b"x")
    items = expand([str(tmp_path)]).items
    came = threading.Semaphore(0)
    reader = Reader(
        items, start=0, bounds=ReadBounds(max_ahead=6), deliver=lambda batch: [came.release() for _ in batch] and None
    )
    reader.start()
    for _ in range(6):
        assert came.acquire(timeout=60)
    assert not came.acquire(timeout=0.05)
    reader.written(14)
    for _ in range(14):
        assert came.acquire(timeout=60)
    reader.stop()


def test_a_file_that_does_not_tell_its_size_is_read_whole() -> None:
    assert Path("/proc/version").stat().st_size == 0
    found = read_all([Item("version", "/proc/version"), Item("limited", "/proc/version")])
    assert found[0] == Loaded(0, Path("/proc/version").read_bytes())
    limited = read_all([Item("version", "/proc/version")], bounds=ReadBounds(max_item_bytes=10))
    assert limited[0].error == "it is larger than 10 B"
