"""Files of models on this machine's disk, shared between processes and users, bounded in size.

    CACHE/files/AB/ID          a file's content, read-only; ID names its chunks' digests (``Manifest.content_id``)
    CACHE/files/AB/ID.chunks   digests and lengths of its chunks, so that other versions find them here
    CACHE/marks/UID/ID         this user has verified the file as it is now (inode, size, times, boot)
    CACHE/manifests/DIGEST     manifests, verified each time they are read
    CACHE/names/NAME/          versions that were brought here, and where aliases pointed then
    CACHE/parts/               files under way

A file is right once it is named: it is published by a rename after every chunk was verified. It is verified again where
its mark does not fit what lies there now, where another user wrote it, and once after a reboot, since nothing is synced
on the way (a power cut may keep a name and lose bytes). No lock is needed for any of that: on NFS, too, the worst that
two processes can do is to fetch the same bytes twice. Eviction is by last use, and by the mark's time, so that wrong
clocks change an order and nothing else. A file that is open or mapped while it is evicted stays readable.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from wirespeed import units
from wirespeed.errors import MissingCapability, UsageError
from wirespeed.repo.fetch import Place
from wirespeed.repo.manifest import FileEntry, Manifest
from wirespeed.repo.names import Wanted, check_alias, check_name
from wirespeed.repo.parts import Part, disk_fault, free_bytes
from wirespeed.repo.versions import Version

STALE_PART_S = 24 * 3600.0
STALE_MANIFEST_S = 30 * 24 * 3600.0
_SHARED_MODE = 0o2775


class Mark(msgspec.Struct, frozen=True):
    """What a verified file looked like."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    boot: str


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A name as it was last resolved here. ``since``: when, in seconds since 1970 by this host's clock."""

    version: Version
    since: float


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache holds."""

    num_files: int
    num_bytes: int
    limit_bytes: int


def default_folder() -> Path:
    """WIRESPEED_CACHE, else the user's cache folder."""
    chosen = os.environ.get("WIRESPEED_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "wirespeed" / "repo"


class Cache:
    """One cache folder. ``limit_bytes``: WIRESPEED_CACHE_SIZE, else half of the disk."""

    def __init__(self, folder: Path | None = None, *, limit_bytes: int | None = None) -> None:
        self.folder = default_folder() if folder is None else folder
        self._limit_bytes = limit_bytes
        self._is_shared = os.environ.get("WIRESPEED_CACHE_SHARED") == "1"

    @property
    def limit_bytes(self) -> int:
        """How large it may become."""
        if self._limit_bytes is None:
            text = os.environ.get("WIRESPEED_CACHE_SIZE")
            self._limit_bytes = _disk_bytes(self.folder) // 2 if not text else units.parse_size(text)
            if self._limit_bytes <= 0:
                raise UsageError(f"got WIRESPEED_CACHE_SIZE {text!r}", expected="a size above zero")
        return self._limit_bytes

    def path_of(self, content_id: str) -> Path:
        """Where the file of this content lies, or will."""
        return self.folder / "files" / content_id[:2] / content_id

    def find(self, manifest: Manifest, file: FileEntry) -> Path | None:
        """The file where it is here and right, else None. Verifies where no mark vouches for it; a wrong file goes."""
        content_id = manifest.content_id(file)
        path = self.path_of(content_id)
        if not path.is_file():
            return None
        if self._is_marked(content_id, path):
            self._touch(content_id)
            return path
        part = Part(path, [manifest.chunks[index] for index in file.chunks], size_bytes=file.size_bytes)
        if _is_right(path, part, file.size_bytes):
            self.mark(content_id, path)
            return path
        self._drop(content_id)
        return None

    def part(self, manifest: Manifest, file: FileEntry) -> Part:
        """A place to put this file together."""
        folder = self._make(self.folder / "parts")
        chunks = [manifest.chunks[index] for index in file.chunks]
        # One part per user: another's could not be written, and is not to be trusted before it is whole.
        return Part(folder / f"{manifest.content_id(file)}.{os.getuid()}", chunks, size_bytes=file.size_bytes)

    def publish(self, manifest: Manifest, file: FileEntry, part: Part) -> Path:
        """A part that is whole becomes the file."""
        content_id = manifest.content_id(file)
        path = self.path_of(content_id)
        self._make(path.parent)
        chunks = [(manifest.chunks[index].digest, manifest.chunks[index].length) for index in file.chunks]
        self._replace(path.with_name(path.name + ".chunks"), msgspec.msgpack.encode(chunks))
        part.publish(path, mode=0o444)
        self.mark(content_id, path)
        return path

    def mark(self, content_id: str, path: Path) -> None:
        """Remember that this file was verified as it is now. A cache that cannot be written is left as it is."""
        with contextlib.suppress(MissingCapability, OSError):
            folder = self._make(self.folder / "marks" / str(os.getuid()))
            self._replace(folder / content_id, msgspec.json.encode(_look(path)))

    def _is_marked(self, content_id: str, path: Path) -> bool:
        mark = self.folder / "marks" / str(os.getuid()) / content_id
        try:
            return mark.stat().st_uid == os.getuid() and msgspec.json.decode(mark.read_bytes(), type=Mark) == _look(
                path
            )
        except (OSError, msgspec.MsgspecError):
            return False

    def _touch(self, content_id: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.folder / "marks" / str(os.getuid()) / content_id)

    def manifest(self, digest: str, fetch: Callable[[], bytes]) -> bytes:
        """The bytes of a manifest, from here or from ``fetch`` (which verifies)."""
        from blake3 import blake3

        path = self.folder / "manifests" / digest
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            if blake3(content).hexdigest() == digest:
                with contextlib.suppress(OSError):
                    os.utime(path)
                return content
        content = fetch()
        with contextlib.suppress(MissingCapability, OSError):
            self._make(path.parent)
            self._replace(path, content)
        return content

    def remember(self, version: Version, alias: str | None = None) -> None:
        """This version is here; ``alias`` points at it. A cache that cannot be written is left as it is."""
        content = msgspec.json.encode(Known(version=version, since=time.time()))
        with contextlib.suppress(MissingCapability, OSError):
            folder = self._make(self._names_folder(version.name))
            self._replace(folder / f"v{version.number}", content)
            if alias is not None:
                self._replace(folder / f"@{alias}", content)

    def recall(self, wanted: Wanted) -> Known | None:
        """What ``name@v12`` or ``name@alias`` was when it was last brought here, or None. Not for ``name`` alone.

        Raises UsageError for a name or an alias that cannot be one: both come from elsewhere and become paths.
        """
        if wanted.number is None and wanted.alias is None:
            return None
        file = f"v{wanted.number}" if wanted.alias is None else f"@{check_alias(wanted.alias)}"
        try:
            known = msgspec.json.decode((self._names_folder(wanted.name) / file).read_bytes(), type=Known)
        except (OSError, msgspec.MsgspecError):
            return None
        return known if known.version.name == wanted.name and known.version.state == "live" else None

    def _names_folder(self, name: str) -> Path:
        return self.folder / "names" / check_name(name).replace("/", "=")

    def index(self) -> dict[bytes, Place]:
        """Where every chunk of every file here lies, by digest. To be verified by whoever reads there."""
        found: dict[bytes, Place] = {}
        for listing in self.folder.glob("files/*/*.chunks"):
            path = listing.with_name(listing.name.removesuffix(".chunks"))
            try:
                chunks = msgspec.msgpack.decode(listing.read_bytes(), type=list[tuple[bytes, int]])
            except (OSError, msgspec.MsgspecError):
                continue
            if not path.exists():
                continue
            offset = 0
            for digest, length in chunks:
                found.setdefault(digest, Place(path, offset))
                offset += length
        return found

    def usage(self) -> Usage:
        """What is here now."""
        sizes = [size for _, size, _ in self._files()]
        return Usage(num_files=len(sizes), num_bytes=sum(sizes), limit_bytes=self.limit_bytes)

    def reserve(self, needed_bytes: int, *, keep: frozenset[str] = frozenset()) -> None:
        """Evict what was used least recently until this much fits, under the limit and on the disk.

        ``keep``: contents that are about to be used. Raises MissingCapability where it cannot fit.
        """
        files = sorted(self._files(), key=lambda item: item[2])
        used = sum(size for _, size, _ in files)
        goal = self.limit_bytes - needed_bytes
        self._drop_stale()
        for content_id, size, _ in files:
            if used <= goal and free_bytes(self.folder) >= needed_bytes:
                break
            if content_id not in keep:
                self._drop(content_id)
                used -= size
        if used > goal:
            raise MissingCapability(
                f"the cache may hold {units.format_size(self.limit_bytes)} and "
                f"{units.format_size(needed_bytes)} are needed",
                hint="raise WIRESPEED_CACHE_SIZE, or pull with --to DIR, past the cache",
            )
        free = free_bytes(self.folder)
        if free < needed_bytes:
            raise MissingCapability(
                f"the disk of the cache {self.folder} has {units.format_size(free)} left and "
                f"{units.format_size(needed_bytes)} are needed",
                hint="free some space, or set WIRESPEED_CACHE to a folder on another disk",
            )

    def _files(self) -> Iterator[tuple[str, int, float]]:
        """(content, bytes, last use) of every file."""
        marks: dict[str, float] = {}
        for mark in self.folder.glob("marks/*/*"):
            with contextlib.suppress(OSError):
                marks[mark.name] = max(mark.stat().st_mtime, marks.get(mark.name, 0.0))
        for path in self.folder.glob("files/*/*"):
            if path.suffix == ".chunks" or path.name.startswith("."):
                continue
            with contextlib.suppress(OSError):
                found = path.stat()
                yield path.name, found.st_size, max(marks.get(path.name, 0.0), found.st_mtime)

    def _drop(self, content_id: str) -> None:
        path = self.path_of(content_id)
        for gone in (*self.folder.glob(f"marks/*/{content_id}"), path.with_name(path.name + ".chunks"), path):
            with contextlib.suppress(OSError):
                gone.unlink()

    def _drop_stale(self) -> None:
        for path in self.folder.glob("parts/*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - STALE_PART_S:
                    path.unlink()
        for path in self.folder.glob("manifests/*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - STALE_MANIFEST_S:
                    path.unlink()

    def _make(self, folder: Path) -> Path:
        try:
            missing = []
            at = folder
            while not at.is_dir():
                missing.append(at)
                at = at.parent
            for new in reversed(missing):
                new.mkdir(exist_ok=True)
                if self._is_shared:
                    # Beyond the umask: others of the group put files beside ours.
                    with contextlib.suppress(PermissionError):
                        new.chmod(_SHARED_MODE)
        except OSError as fault:
            raise disk_fault(fault, folder) from fault
        return folder

    def _replace(self, path: Path, content: bytes) -> None:
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(content)
                os.chmod(temporary, 0o644)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as fault:
            raise disk_fault(fault, path) from fault


def _is_right(path: Path, part: Part, size_bytes: int) -> bool:
    try:
        return path.stat().st_size == size_bytes and not part.wrong_in(path)
    except OSError:
        return False


def _look(path: Path) -> Mark:
    found = path.stat()
    return Mark(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, _boot())


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _disk_bytes(folder: Path) -> int:
    at = folder
    while not at.exists():
        at = at.parent
    found = os.statvfs(at)
    return found.f_blocks * found.f_frsize
