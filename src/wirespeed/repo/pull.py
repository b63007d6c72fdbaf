"""Pull: a version becomes files, in the cache or in a folder of the user's.

Into the cache: each file is put together from what other files here hold, the hot tier and the store, and then linked
to from a folder per version. Into ``--to DIR``: the same straight into DIR, which may hold an interrupted pull or
another version; what fits is kept. ``.wirespeed-version.json`` is written last and removed first: a folder that has it
is whole. A pull that was killed goes on where it was: what lies there is hashed, not believed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from wirespeed.errors import DataError, WirespeedError
from wirespeed.repo.cache import Cache
from wirespeed.repo.fetch import NUM_WORKERS, Place, Source
from wirespeed.repo.manifest import FileEntry, Manifest
from wirespeed.repo.parts import PART_PREFIX, DiskFull, Part, check_room, disk_fault
from wirespeed.repo.push import MARKER
from wirespeed.repo.versions import Version

Progress = Callable[[int, int], None]
BATCH_FILES = 512
"""Files that are open at the same time at most."""


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """What a pull came to, in bytes of files but for ``store_bytes`` (read from the store)."""

    name: str
    number: int
    folder: str
    num_files: int
    num_bytes: int
    kept_bytes: int
    """Were there and right."""
    store_bytes: int
    hot_bytes: int
    local_bytes: int
    num_damaged: int
    peer_bytes: int = 0
    """From other hosts."""


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder holds, once it holds all of it. Paths with size and time of change."""

    name: str
    number: int
    manifest_digest: str
    files: dict[str, tuple[int, int]]


class _Job:
    def __init__(self, file: FileEntry, part: Part, publish: Callable[[Part], None]) -> None:
        self.file = file
        self.part = part
        self.publish = publish
        self.left = 0


def fill(
    source: Source, jobs: Sequence[tuple[FileEntry, Part, Callable[[Part], None], Path | None]], *, progress: Progress,
    done_bytes: int, total_bytes: int, workers: int = NUM_WORKERS,
) -> int:  # fmt: skip
    """Put files together and publish each as soon as it is whole. Gives the bytes that were there before.

    Each job: the file, its part, how to publish it, and an older file that may hold some of it.
    """
    manifest = source.manifest
    places: dict[int, list[tuple[_Job, int]]] = {}
    kept = 0
    lock = threading.Lock()
    done = done_bytes

    reservation = _Reservation()

    def use(index: int, content: memoryview) -> None:
        nonlocal done
        reservation.check()
        for job, offset in places[index]:
            job.part.write(offset, content)
            with lock:
                job.left -= 1
                done += len(content)
                is_whole = job.left == 0
                progress(done, total_bytes)
            if is_whole:
                job.publish(job.part)

    try:
        for file, part, publish, like in jobs:
            job = _Job(file, part, publish)
            missing = part.missing(like=like)
            absent = {file.chunks[at] for at in missing}
            source.kept(index for index in file.chunks if index not in absent)
            if not missing:
                kept += file.size_bytes
                publish(part)
                continue
            offsets = part.offsets()
            kept += file.size_bytes - sum(manifest.chunks[file.chunks[at]].length for at in missing)
            job.left = len(missing)
            for at in missing:
                places.setdefault(file.chunks[at], []).append((job, offsets[at]))
        done = done_bytes + kept
        progress(done, total_bytes)
        reservation.begin([part for _, part, _, _ in jobs if not part.is_published])
        source.read_many(list(places), use, workers=workers)
        reservation.end()
    except DiskFull:
        # Half of a model on a full disk helps nobody: what was taken is given back.
        for _, part, _, _ in jobs:
            part.discard()
        raise
    finally:
        reservation.stop()
        for _, part, _, _ in jobs:
            part.close()
    return kept


class _Reservation:
    """Room on the disk for parts, taken by a thread while the first bytes come in."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        self._is_stopped = False

    def begin(self, parts: Sequence[Part]) -> None:
        """Take it."""
        self._thread = threading.Thread(target=self._run, args=(parts,), name="wirespeed-reserve")
        self._thread.start()

    def _run(self, parts: Sequence[Part]) -> None:
        try:
            for part in parts:
                if self._is_stopped:
                    return
                if not part.is_published:
                    part.reserve()
        except BaseException as fault:
            self._fault = fault

    def check(self) -> None:
        """Raise what went wrong, as soon as it is known."""
        if self._fault is not None:
            raise self._fault

    def end(self) -> None:
        """Wait for it, and raise what went wrong."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def stop(self) -> None:
        """Take no more, and wait for what is under way."""
        self._is_stopped = True
        if self._thread is not None:
            self._thread.join()


def pull_to_cache(
    source: Source, version: Version, cache: Cache, *, progress: Progress = lambda done, total: None
) -> Pulled:
    """Have every file of the version in the cache; ``folder`` links to them under their own names."""
    manifest = source.manifest
    unique: dict[str, FileEntry] = {manifest.content_id(file): file for file in manifest.files}
    here = {content_id: path for content_id, file in unique.items() if (path := cache.find(manifest, file)) is not None}
    total = sum(file.size_bytes for file in unique.values())
    kept = sum(unique[content_id].size_bytes for content_id in here)
    wanted = [file for content_id, file in unique.items() if content_id not in here]
    source.kept(index for content_id in here for index in unique[content_id].chunks)
    if wanted:
        cache.reserve(sum(file.size_bytes for file in wanted), keep=frozenset(unique))
    for start in range(0, len(wanted), BATCH_FILES):
        batch = wanted[start : start + BATCH_FILES]

        def publisher(file: FileEntry) -> Callable[[Part], None]:
            def publish(part: Part) -> None:
                here[manifest.content_id(file)] = cache.publish(manifest, file, part)

            return publish

        jobs = [(file, cache.part(manifest, file), publisher(file), None) for file in batch]
        kept += fill(source, jobs, progress=progress, done_bytes=kept, total_bytes=total)
    folder = link_snapshot(cache, version, manifest, here)
    return _result(source, version, folder, kept)


def link_snapshot(cache: Cache, version: Version, manifest: Manifest, here: Mapping[str, Path]) -> Path:
    """Make the folder of a version that is whole in the cache: links to its files, under their own names."""
    folder = cache.folder / "versions" / version.name / f"v{version.number}-{version.manifest_digest[:12]}"
    try:
        for empty in ("", *manifest.folders):
            (folder / empty).mkdir(parents=True, exist_ok=True)
        for file in manifest.files:
            link, target = folder / file.path, here[manifest.content_id(file)]
            link.parent.mkdir(parents=True, exist_ok=True)
            if not (link.is_symlink() and Path(os.readlink(link)) == target):
                temporary = link.with_name(f"{PART_PREFIX}{os.getpid()}.{threading.get_native_id()}")
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
                temporary.symlink_to(target)
                os.replace(temporary, link)
    except OSError as fault:
        raise disk_fault(fault, folder) from fault
    return folder


def pull_to_folder(
    source: Source,
    version: Version,
    folder: Path,
    *,
    cache: Cache | None = None,
    progress: Progress = lambda done, total: None,
) -> Pulled:
    """Make ``folder`` hold the version. Files of the version it held before go, unless they were changed since."""
    manifest = source.manifest
    before = read_marker(folder)
    folder_path = Path(os.path.abspath(folder))
    try:
        folder_path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (folder_path / MARKER).unlink()
        for path in {str(Path(file.path).parent) for file in manifest.files} | set(manifest.folders):
            _make_inside(folder_path, path)
    except OSError as fault:
        raise disk_fault(fault, folder_path) from fault
    is_fresh = before is None and not any((folder_path / file.path).exists() for file in manifest.files)
    check_room(folder_path, 0 if not is_fresh else _room(manifest, folder_path))
    total = manifest.num_bytes
    kept = 0
    for start in range(0, len(manifest.files), BATCH_FILES):
        jobs = []
        for file in manifest.files[start : start + BATCH_FILES]:
            target = folder_path / file.path
            chunks = [manifest.chunks[index] for index in file.chunks]
            part_path = target.with_name(f"{PART_PREFIX}{manifest.content_id(file)[:20]}.{_short(file.path)}")
            part = Part(part_path, chunks, size_bytes=file.size_bytes)
            if _is_there(target, part, file):
                kept += file.size_bytes
                continue
            mode = 0o755 if file.is_executable else 0o644
            like = target if target.is_file() else (cache.find(manifest, file) if cache is not None else None)
            jobs.append((file, part, _folder_publisher(target, mode), like))
        kept += fill(source, jobs, progress=progress, done_bytes=kept, total_bytes=total)
    _tidy(folder_path, manifest, before)
    marker = Marker(
        name=version.name, number=version.number, manifest_digest=version.manifest_digest,
        files={file.path: _stamp(folder_path / file.path) for file in manifest.files},
    )  # fmt: skip
    _write_marker(folder_path, marker)
    return _result(source, version, folder_path, kept)


def _folder_publisher(target: Path, mode: int) -> Callable[[Part], None]:
    def publish(part: Part) -> None:
        part.publish(target, mode=mode)

    return publish


def _room(manifest: Manifest, folder: Path) -> int:
    parts = sum(path.stat().st_blocks * 512 for path in folder.rglob(f"{PART_PREFIX}*"))
    return max(0, manifest.num_bytes - parts)


def _short(path: str) -> str:
    import hashlib

    # Two files of one content in one folder must not share a part: a rename would take it from the other.
    return hashlib.blake2b(path.encode(), digest_size=6).hexdigest()


def _make_inside(root: Path, relative: str) -> None:
    """Folders below the root; a link in the way could lead out of it and is refused."""
    at = root
    for part in Path(relative).parts:
        at = at / part
        if at.is_symlink():
            raise DataError(f"{at} is a link", expected="a folder", hint="remove it, or pull into another folder")
        at.mkdir(exist_ok=True)


def _is_there(target: Path, part: Part, file: FileEntry) -> bool:
    """Whether a plain file already holds the content; a wrong mode is set right."""
    try:
        if (
            target.is_symlink()
            or not target.is_file()
            or target.stat().st_size != file.size_bytes
            or part.wrong_in(target)
        ):
            return False
        target.chmod(0o755 if file.is_executable else 0o644)
    except OSError:
        return False
    return True


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def read_marker(folder: Path) -> Marker | None:
    """What a folder says it holds, or None where it is not whole or holds something else."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=Marker)
    except (OSError, msgspec.MsgspecError):
        return None


def _write_marker(folder: Path, marker: Marker) -> None:
    temporary = folder / f"{PART_PREFIX}marker.{os.getpid()}.{threading.get_native_id()}"
    try:
        temporary.write_bytes(msgspec.json.encode(marker))
        os.replace(temporary, folder / MARKER)
    except FileNotFoundError:
        # Another pull into this folder has tidied up what it took for a leftover; it writes the marker itself.
        if read_marker(folder) is None:
            temporary.write_bytes(msgspec.json.encode(marker))
            os.replace(temporary, folder / MARKER)
    except OSError as fault:
        raise disk_fault(fault, folder) from fault


def _tidy(folder: Path, manifest: Manifest, before: Marker | None) -> None:
    wanted = {file.path for file in manifest.files}
    for path, stamp in ({} if before is None else before.files).items():
        gone = folder / path
        # Paths of a marker are a file's content, not ours: they stay inside or are left alone.
        if path in wanted or ".." in Path(path).parts or Path(path).is_absolute():
            continue
        with contextlib.suppress(OSError):
            if not gone.is_symlink() and _stamp(gone) == stamp:
                gone.unlink()
                with contextlib.suppress(OSError):
                    gone.parent.rmdir()
    for part in folder.rglob(f"{PART_PREFIX}*"):
        with contextlib.suppress(OSError):
            part.unlink()


def _result(source: Source, version: Version, folder: Path, kept: int) -> Pulled:
    counts = source.counts
    return Pulled(
        name=version.name, number=version.number, folder=str(folder), num_files=len(source.manifest.files),
        num_bytes=source.manifest.num_bytes, kept_bytes=kept, store_bytes=counts.store_bytes,
        hot_bytes=counts.hot_bytes, local_bytes=counts.local_bytes, num_damaged=counts.num_damaged,
        peer_bytes=counts.peer_bytes,
    )  # fmt: skip


def local_chunks(folder: Path, manifest: Manifest) -> dict[bytes, Place]:
    """Chunks of a version in a folder that was pulled earlier, to be verified when they are read."""
    found: dict[bytes, Place] = {}
    for file in manifest.files:
        offset = 0
        for index in file.chunks:
            chunk = manifest.chunks[index]
            found.setdefault(chunk.digest, Place(folder / file.path, offset))
            offset += chunk.length
    return found


def check_whole(folder: Path, manifest: Manifest) -> list[str]:
    """Paths in a pulled folder that are missing or not what the version holds."""
    wrong = []
    for file in manifest.files:
        part = Part(folder / file.path, [manifest.chunks[index] for index in file.chunks], size_bytes=file.size_bytes)
        try:
            is_right = (folder / file.path).stat().st_size == file.size_bytes and not part.wrong_in(folder / file.path)
        except (OSError, WirespeedError):
            is_right = False
        if not is_right:
            wrong.append(file.path)
    return wrong
