"""Models straight into torch tensors, and state dictionaries straight into versions.

``load`` has two ways. Through the cache: files are mapped (privately: writing to a tensor changes memory, never the
cache), so that a warm load costs what touching the bytes costs. Through memory: chunks are read in parallel into the
memory that the tensors will own, each verified on the way, and nothing is written to disk.

Tied tensors are restored under all their names with one storage, from the aliases that safetensors' writers leave in
the head's metadata ({removed name: kept name}); ``save`` writes them the same way. Big-endian hosts are refused.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from wirespeed.errors import DataError, MissingCapability, UsageError
from wirespeed.repo import gc
from wirespeed.repo.chunks import PIECE_BYTES, is_safetensors
from wirespeed.repo.fetch import Source
from wirespeed.repo.manifest import FileEntry, Manifest, Tensor
from wirespeed.repo.names import parse_wanted
from wirespeed.repo.parts import DiskFull
from wirespeed.repo.pull import pull_to_cache
from wirespeed.repo.push import Pushed, commit, index_tensors, report
from wirespeed.repo.repository import Repository
from wirespeed.repo.safetensors import build_head, parse_head
from wirespeed.repo.upload import Base, Table, Uploader
from wirespeed.repo.versions import Claim, Version, newest

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Way = Literal["auto", "cache", "memory"]
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "fuse.juicefs", "9p"}


def load(
    name: str,
    *,
    repo: Repository | str | None = None,
    device: torch.device | str | int = "cpu",
    way: Way = "auto",
    only: Callable[[str], bool] | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a version (``name``, ``name@v3``, ``name@alias``), by name.

    ``way``: ``auto`` is ``cache``, or ``memory`` where the cache has no room or cannot be written. ``only`` chooses by
    name: through memory, only chunks of those are read. Raises DataError where a tensor is in two files, or missing of
    those that an index file lists.
    """
    if sys.byteorder != "little":
        raise MissingCapability("this host is big-endian", expected="a little-endian one: safetensors are")
    repository = repo if isinstance(repo, Repository) else Repository.open(repo)
    wanted = parse_wanted(name)
    version = repository.version(wanted, is_cache_enough=True)
    repository.bring(version)
    manifest = repository.manifest(version)
    files = [file for file in manifest.files if is_safetensors(file.path)]
    if not files:
        raise UsageError(f"{version.label} holds no safetensors file", hint="pull it and load it as what it is")
    source = repository.source(version, manifest)
    buffers = _buffers(repository, version, source, files, way=way, only=only, alias=wanted.alias)
    tensors: dict[str, torch.Tensor] = {}
    for file, buffer in zip(files, buffers, strict=True):
        for key, tensor in _views(file, buffer, only).items():
            if key in tensors:
                raise DataError(f"{version.label} has tensor {key!r} in two files")
            tensors[key] = tensor
    target = torch.device(device)
    if target.type == "cpu":
        return tensors
    # By storage: tied tensors stay tied on the device.
    moved: dict[tuple[int, int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
    result = {}
    for key, tensor in tensors.items():
        identity = (
            tensor.untyped_storage().data_ptr(),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.dtype,
        )
        if identity not in moved:
            moved[identity] = tensor.to(target)
        result[key] = moved[identity]
    return result


def _buffers(
    repository: Repository,
    version: Version,
    source: Source,
    files: list[FileEntry],
    *,
    way: Way,
    only: Callable[[str], bool] | None,
    alias: str | None,
) -> list[torch.Tensor]:
    manifest = source.manifest
    cached = [repository.cache.find(manifest, file) for file in files]
    if way != "memory" and any(path is None for path in cached):
        try:
            pull_to_cache(source, version, repository.cache)
            repository.cache.remember(version, alias)
            cached = [repository.cache.find(manifest, file) for file in files]
        except MissingCapability as fault:
            if way == "cache" or not (isinstance(fault, DiskFull) or "cache" in str(fault)):
                raise
    return [
        _map(path, file.size_bytes) if path is not None else _read(source, file, only)
        for file, path in zip(files, cached, strict=True)
    ]


def _map(path: Path, size_bytes: int) -> torch.Tensor:
    if file_system_of(path) in _NETWORK_FILE_SYSTEMS:
        # Page faults over a network are read one by one: many times slower than reading ahead in parallel.
        return _read_file(path, size_bytes)
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size_bytes)
    assert isinstance(storage, torch.UntypedStorage)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def file_system_of(path: Path, mountinfo: str | None = None) -> str:
    """The kind of file system a path lies on, or "unknown"."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8") if mountinfo is None else mountinfo
    except OSError:
        return "unknown"
    best, kind = "", "unknown"
    where = str(path if mountinfo is not None else path.resolve())
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        mount = fields.split(" ")[4].replace("\\040", " ")
        if (where == mount or where.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, rest.split(" ")[0]
    return kind


def _read_file(path: Path, size_bytes: int) -> torch.Tensor:
    buffer = torch.empty(size_bytes, dtype=torch.uint8)
    into = buffer.numpy().data

    def read(offset: int) -> None:
        end = min(offset + PIECE_BYTES, size_bytes)
        with path.open("rb", buffering=0) as stream:
            stream.seek(offset)
            done = offset
            while done < end:
                num = stream.readinto(into[done:end])
                if not num:
                    raise DataError(f"{path} became shorter while it was read")
                done += num

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(0, size_bytes, PIECE_BYTES)))
    return buffer


def _read(source: Source, file: FileEntry, only: Callable[[str], bool] | None) -> torch.Tensor:
    # Memory that nothing was read into is never touched, and so never taken.
    buffer = torch.empty(file.size_bytes, dtype=torch.uint8)
    into = buffer.numpy().data
    wanted = [(t.offset, t.offset + t.num_bytes) for t in file.tensors if only is None or only(t.name)]
    start_bytes = min((t.offset for t in file.tensors), default=file.size_bytes)
    wanted.append((0, start_bytes))
    places: dict[int, list[int]] = {}
    for index, offset, length in spans(source.manifest, file):
        if any(begin < offset + length and offset < end for begin, end in wanted):
            places.setdefault(index, []).append(offset)

    def use(index: int, content: memoryview) -> None:
        for offset in places[index]:
            into[offset : offset + len(content)] = content

    source.read_many(list(places), use)
    return buffer


def spans(manifest: Manifest, file: FileEntry) -> Iterator[tuple[int, int, int]]:
    """(chunk, offset in the file, length) in order."""
    offset = 0
    for index in file.chunks:
        length = manifest.chunks[index].length
        yield index, offset, length
        offset += length


def _views(file: FileEntry, buffer: torch.Tensor, only: Callable[[str], bool] | None) -> dict[str, torch.Tensor]:
    head_bytes = 8 + int.from_bytes(bytes(buffer[:8].numpy()), "little")
    head = parse_head(bytes(buffer[:head_bytes].numpy()), size_bytes=file.size_bytes, source=file.path)
    found = {t.name: _view(buffer, t) for t in head.tensors if only is None or only(t.name)}
    for alias, kept in head.metadata.items():
        if alias not in found and kept in found and (only is None or only(alias)):
            found[alias] = found[kept]
    return found


def _view(buffer: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise DataError(f"tensor {tensor.name!r} has dtype {tensor.dtype!r}", expected=f"one of {', '.join(DTYPES)}")
    flat = buffer[tensor.offset : tensor.offset + tensor.num_bytes]
    if flat.numel() == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    if (flat.data_ptr() % dtype.itemsize) != 0 or tensor.offset % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(tensor.shape)


def save(
    tensors: Mapping[str, torch.Tensor],
    name: str,
    *,
    repo: Repository | str | None = None,
    parent: str | None = None,
    message: str = "",
    metadata: Mapping[str, str] | None = None,
) -> Pushed:
    """A state dictionary becomes the next version of ``name``, as ``model.safetensors``, without a file in between.

    With ``parent`` (``v3``, an alias) changed tensors go as differences to it. Tensors that share one storage wholly
    are written once and restored under all names. Tensors may be on any device; they must not change meanwhile.
    """
    repository = repo if isinstance(repo, Repository) else Repository.open(repo, must_exist=False)
    kept, aliases = _untie(tensors)
    heads = [(key, NAMES[t.dtype], tuple(t.shape), t.numel() * t.element_size()) for key, t in kept.items()]
    head = build_head(heads, {**({} if metadata is None else metadata), **aliases})
    base_version = None if parent is None else repository.version(f"{name}@{parent}")
    with Claim(repository.store, name) as claim:
        view = gc.view(repository.store)
        claim.saw_epoch(view.epoch)
        uploader = make_uploader(repository, view, name, base_version)
        hasher = hashlib.sha256(head)
        entries: list[Tensor] = []
        offset = len(head)
        with ThreadPoolExecutor(4, thread_name_prefix="wirespeed-save") as pool:
            digests = uploader.add_long(pool, memoryview(head))
            for (key, dtype, shape, num_bytes), tensor in zip(heads, kept.values(), strict=True):
                entries.append(Tensor(name=key, dtype=dtype, shape=shape, offset=offset, num_bytes=num_bytes))
                offset += num_bytes
                content = bytes_of(tensor)
                hasher.update(content)
                digests += uploader.add_long(pool, content, width=tensor.element_size(), name=key)
        uploader.finish()
        table = Table(uploader.stored)
        file = FileEntry(
            path="model.safetensors", size_bytes=offset, sha256=hasher.digest(),
            chunks=tuple(table.index(digest) for digest in digests), tensors=tuple(entries),
        )  # fmt: skip
        manifest = Manifest(objects=table.objects(), chunks=table.chunks(), files=(file,))
        version = commit(claim, uploader, manifest, parent=base_version, message=message)
    return report(version, uploader.sent, has_conditions=repository.store.can_create)


def make_uploader(repository: Repository, view: gc.View, name: str, parent: Version | None) -> Uploader:
    """For bytes that are no files: finds chunks of the parent and of the newest versions again."""
    base = None
    if parent is not None:
        manifest = repository.manifest(parent)
        base = Base(manifest=manifest, source=repository.source(parent, manifest), by_key=index_tensors(manifest))
    siblings = tuple(repository.manifest(version) for version in newest(repository.store, name, 2))
    return Uploader(repository.store, view, base=base, siblings=siblings)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order; a copy only where it is not so already, or on a device."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for key in sorted(tensors):
        tensor = tensors[key]
        if tensor.dtype not in NAMES:
            raise UsageError(
                f"tensor {key!r} has dtype {tensor.dtype}", expected=f"one of {', '.join(map(str, NAMES))}"
            )
        if key == "__metadata__":
            raise UsageError("got a tensor named '__metadata__'", expected="another name: safetensors reserves it")
        identity = (
            tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape),
            tensor.stride(), tensor.dtype,
        )  # fmt: skip
        first = seen.setdefault(identity, key) if math.prod(tensor.shape) else key
        if first == key:
            kept[key] = tensor
        else:
            aliases[key] = first
    return kept, aliases
