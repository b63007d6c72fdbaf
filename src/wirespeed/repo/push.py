"""Push: a folder or a file becomes a version.

Order is what makes it safe: claim a number, read what may be counted on, upload bytes, upload the manifest, and then
commit with one small write. Whatever ends a push before that leaves no version, and the next push finds what was
uploaded. A file that changes while it is read is an error: a version is what a folder was, not a mixture.
"""

from __future__ import annotations

import hashlib
import os
import stat as modes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from wirespeed.errors import DataError, MissingCapability, UsageError
from wirespeed.repo import gc, names
from wirespeed.repo.chunks import Piece, cut_stream, layout_of
from wirespeed.repo.fetch import Source
from wirespeed.repo.manifest import FileEntry, Manifest, Tensor, encode
from wirespeed.repo.store import ObjectMissing, Store
from wirespeed.repo.upload import Base, Sent, Table, Uploader
from wirespeed.repo.versions import LEASE_S, Claim, Version, newest, now_text
from wirespeed.wire.buffers import BufferPool

NUM_WORKERS = 6
IN_FLIGHT_BYTES = 96 * 1024**2
NUM_SIBLINGS = 4
"""Newest versions of the same model whose chunks are looked through, besides the parent."""
MARKER = ".wirespeed-version.json"
_POOLED_BYTES = 1024**2
DECODE_BYTES_PER_S = 1e9
"""What a node decodes of deltas: to decide whether a slow link is helped by a smaller form."""


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What a push came to. Bytes of files unless said otherwise."""

    version: Version
    read_bytes: int
    uploaded_bytes: int
    """Bytes that crossed the network, without the manifest."""
    found_bytes: int
    delta_bytes: int
    delta_payload_bytes: int
    num_objects: int
    has_conditions: bool


class _File:
    def __init__(self, path: str, size_bytes: int, is_executable: bool) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.is_executable = is_executable
        self.sha256 = b""
        self.digests: list[Future[bytes]] = []
        self.tensors: tuple[Tensor, ...] = ()


def push(
    store: Store,
    path: Path,
    name: str,
    *,
    parent: Version | None = None,
    read_manifest: Callable[[Version], Manifest],
    source_of: Callable[[Version, Manifest], Source] | None = None,
    message: str = "",
    who: str = "",
    is_compressed: bool = False,
    is_as_is: bool = False,
    is_quantized: bool = False,
    is_repair: bool = False,
    link_bit_per_s: float | None = None,
    lease_s: float = LEASE_S,
    seal: Callable[[Version], Version] = lambda version: version,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pushed:
    """Make the next version of ``name`` from a folder or a file.

    With ``parent``, tensors that changed are sent as differences to it. ``link_bit_per_s`` is how fast readers are
    reached: above what they can decode, bytes are sent as they are. ``progress`` is told (done, total) bytes. ``seal``
    signs the version just before it is committed. ``is_quantized``: changes of weights to the parent's are rounded to 8
    bits, and the version is what that makes of the files (see ``quantize``).
    """
    names.check_name(name)
    if is_quantized and (parent is None or is_as_is):
        raise UsageError(
            "got --quantize " + ("with --as-is" if is_as_is else "without a parent"),
            expected="--parent, whose weights the changes are to",
        )
    if not path.exists():
        raise UsageError(f"got {path}, which does not exist", expected="a folder or a file")
    _begin(store)
    with Claim(store, name, who=who, lease_s=lease_s) as claim:
        view = gc.view(store)
        claim.saw_epoch(view.epoch)
        uploader = _uploader(
            store, view, name, parent=parent, read_manifest=read_manifest, source_of=source_of,
            is_compressed=is_compressed, is_repair=is_repair, link_bit_per_s=link_bit_per_s,
        )  # fmt: skip
        manifest = _read_all(uploader, path, is_as_is=is_as_is, is_quantized=is_quantized, progress=progress)
        version = commit(claim, uploader, manifest, parent=parent, message=message, seal=seal)
    return report(version, uploader.sent, has_conditions=store.can_create)


def report(version: Version, sent: Sent, *, has_conditions: bool) -> Pushed:
    """What a push came to."""
    return Pushed(
        version=version, read_bytes=sent.read_bytes, uploaded_bytes=sent.uploaded_bytes,
        found_bytes=sent.found_bytes, delta_bytes=sent.delta_bytes,
        delta_payload_bytes=sent.delta_payload_bytes, num_objects=sent.num_objects, has_conditions=has_conditions,
    )  # fmt: skip


def commit(
    claim: Claim,
    uploader: Uploader,
    manifest: Manifest,
    *,
    parent: Version | None = None,
    message: str = "",
    seal: Callable[[Version], Version] = lambda version: version,
) -> Version:
    """Upload the manifest and make the version it describes, as ``seal`` gives it back."""
    ref = uploader.put_object(encode(manifest))
    version = seal(Version(
        name=claim.name, number=claim.number, push_id=claim.push_id, state="live", created=now_text(),
        manifest_digest=ref.digest.hex(), manifest_epoch=ref.epoch, manifest_bytes=ref.size_bytes,
        num_bytes=manifest.num_bytes, num_files=len(manifest.files),
        parent=parent.number if parent is not None and parent.name == claim.name else None, message=message,
    ))  # fmt: skip
    claim.commit(version)
    return version


def _begin(store: Store) -> None:
    try:
        content = bytes(store.get(names.FORMAT_KEY, max_bytes=4096))
    except ObjectMissing:
        store.put(names.FORMAT_KEY, b'{"format": 1}')
        return
    try:
        found = msgspec.json.decode(content, type=dict[str, int]).get("format")
    except msgspec.MsgspecError:
        found = None
    if found != 1:
        raise DataError(f"{store.url} has format {found}", expected="format 1", hint="upgrade wirespeed to use it")


def _uploader(
    store: Store,
    view: gc.View,
    name: str,
    *,
    parent: Version | None,
    read_manifest: Callable[[Version], Manifest],
    source_of: Callable[[Version, Manifest], Source] | None,
    is_compressed: bool,
    is_repair: bool,
    link_bit_per_s: float | None,
) -> Uploader:
    base = None
    if parent is not None:
        manifest = read_manifest(parent)
        source = Source(store, manifest, label=parent.label) if source_of is None else source_of(parent, manifest)
        base = Base(manifest=manifest, source=source, by_key=index_tensors(manifest))
    siblings = []
    for version in newest(store, name, NUM_SIBLINGS):
        if parent is None or version.number != parent.number or version.name != parent.name:
            try:
                siblings.append(read_manifest(version))
            except DataError:  # what cannot be read cannot be shared; verify tells
                continue

    def decide(raw_bytes: int, small_bytes: int) -> bool:
        if link_bit_per_s is None:
            return True
        rate_bytes_per_s = link_bit_per_s / 8
        return small_bytes / rate_bytes_per_s + raw_bytes / DECODE_BYTES_PER_S < raw_bytes / rate_bytes_per_s

    return Uploader(
        store,
        view,
        base=base,
        siblings=tuple(siblings),
        is_compressed=is_compressed,
        decide=decide,
        is_repair=is_repair,
    )


def index_tensors(manifest: Manifest) -> dict[tuple[str, int], int]:
    """Chunk index by (tensor, offset in it), for chunks that start in a tensor, whichever file it is in."""
    found: dict[tuple[str, int], int] = {}
    for file in manifest.files:
        tensors = iter(file.tensors)
        tensor = next(tensors, None)
        offset = 0
        for index in file.chunks:
            while tensor is not None and tensor.offset + max(tensor.num_bytes, 1) <= offset:
                tensor = next(tensors, None)
            if tensor is not None and tensor.offset <= offset:
                found.setdefault((tensor.name, offset - tensor.offset), index)
            offset += manifest.chunks[index].length
    return found


def walk(root: Path) -> tuple[list[str], list[str]]:
    """(files, empty folders) below a folder, as sorted relative paths. Links to files are followed, to folders not.

    Raises DataError for what is neither a file nor a folder, and for a link that leads nowhere.
    """
    files: list[str] = []
    empty: list[str] = []
    stack = [root]
    while stack:
        folder = stack.pop()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        if not entries and folder != root:
            empty.append(folder.relative_to(root).as_posix())
        for entry in entries:
            path = Path(entry.path)
            relative = path.relative_to(root).as_posix()
            if entry.is_dir(follow_symlinks=False):
                stack.append(path)
            elif entry.is_file():
                if not (relative == MARKER or entry.name.startswith(".wirespeed-part.")):
                    files.append(relative)
            else:
                raise DataError(
                    f"{path} is neither a file nor a folder",
                    expected="files and folders",
                    hint="a link to a folder or to nothing cannot be pushed: replace it by what it stands for",
                )
    return sorted(files), sorted(empty)


def _read_all(
    uploader: Uploader, path: Path, *, is_as_is: bool, is_quantized: bool, progress: Callable[[int, int], None]
) -> Manifest:
    if path.is_dir():
        files, empty = walk(path)
        roots = [(relative, path / relative) for relative in files]
    else:
        roots, empty = [(path.name, path)], []
    total = sum(real.stat().st_size for _, real in roots)
    room = _Room(IN_FLIGHT_BYTES)
    buffers = BufferPool(IN_FLIGHT_BYTES)
    done = 0
    made: list[_File] = []
    pool = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="wirespeed-push")
    try:
        for relative, real in roots:
            file = _read_file(
                uploader, pool, room, buffers, relative, real, is_as_is=is_as_is, is_quantized=is_quantized
            )
            made.append(file)
            done += file.size_bytes
            progress(done, total)
        for file in made:
            for future in file.digests:
                future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    uploader.finish()
    table = Table(uploader.stored)
    entries = tuple(
        FileEntry(
            path=file.path,
            size_bytes=file.size_bytes,
            sha256=file.sha256,
            chunks=tuple(table.index(future.result()) for future in file.digests),
            is_executable=file.is_executable,
            tensors=file.tensors,
        )
        for file in made
    )
    return Manifest(objects=table.objects(), chunks=table.chunks(), files=entries, folders=tuple(empty))


class _Room:
    """Bytes in flight are bounded: a reader waits until there is room."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self._limit = limit_bytes
        self._freed = threading.Condition()
        self.fault: BaseException | None = None

    def take(self, num_bytes: int) -> None:
        with self._freed:
            while self._left < min(num_bytes, self._limit) and self.fault is None:
                self._freed.wait(timeout=1.0)
            if self.fault is not None:
                raise self.fault
            self._left -= num_bytes

    def give(self, num_bytes: int, fault: BaseException | None) -> None:
        with self._freed:
            self._left += num_bytes
            self.fault = self.fault if fault is None else fault
            self._freed.notify_all()


def _read_file(  # noqa: PLR0917 - one caller
    uploader: Uploader,
    pool: ThreadPoolExecutor,
    room: _Room,
    buffers: BufferPool,
    relative: str,
    real: Path,
    *,
    is_as_is: bool,
    is_quantized: bool,
) -> _File:
    try:
        handle = os.open(real, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as fault:
        raise MissingCapability(f"cannot read {real}: {fault.strerror}", hint="check its owner and mode") from fault
    try:
        before = os.fstat(handle)
        file = _File(relative, before.st_size, bool(before.st_mode & modes.S_IXUSR))
        layout = layout_of("" if is_as_is else str(real), handle=handle, size_bytes=before.st_size)
        file.tensors = layout.tensors
        dtypes = {tensor.name: tensor.dtype for tensor in layout.tensors}
        hasher = hashlib.sha256()
        read = _Reader(handle, real, buffers)
        pieces: Iterator[Piece] = iter(layout.pieces) if layout.pieces is not None else cut_stream(read, before.st_size)
        for piece in pieces:
            room.take(piece.length)
            content = read(piece.offset, piece.length)
            rounded = None
            if is_quantized and piece.key is not None:
                rounded = uploader.rounded(content, dtype=dtypes[piece.key[0]], key=piece.key)
                content = content if rounded is None else rounded.content
            hasher.update(content)
            future = pool.submit(
                uploader.add, content, width=piece.width, key=piece.key, ticket=uploader.ticket(), rounded=rounded
            )
            num_bytes = piece.length
            future.add_done_callback(
                lambda done, num_bytes=num_bytes: room.give(
                    num_bytes, done.exception() if not done.cancelled() else None
                )  # type: ignore[misc]
            )
            file.digests.append(future)
        after = os.fstat(handle)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise DataError(
                f"{real} was written to while it was pushed", hint="push when whoever writes it has finished"
            )
        file.sha256 = hasher.digest()
    finally:
        os.close(handle)
    return file


class _Reader:
    """Reads of one file; each gives memory that is used again when nobody looks at it any more."""

    def __init__(self, handle: int, source: Path, buffers: BufferPool) -> None:
        self._handle = handle
        self._source = source
        self._buffers = buffers

    def __call__(self, offset: int, length: int) -> memoryview:
        # The kernel clears fresh pages: for large pieces that costs a third of reading them.
        content = self._buffers.take(length) if length >= _POOLED_BYTES else memoryview(bytearray(length))
        done = 0
        while done < length:
            num = os.preadv(self._handle, [content[done:]], offset + done)
            if num == 0:
                raise DataError(f"{self._source} became shorter while it was pushed")
            done += num
        return content
