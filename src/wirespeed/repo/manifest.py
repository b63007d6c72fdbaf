"""What a version is made of: files as lists of chunks, chunks as places in objects, all bound by BLAKE3-256.

A manifest is complete in itself. It names every object that is needed, those of a delta's bases included, so that a
parent version may be removed and a collection has to read nothing else. It is stored as an object (zstd over msgpack,
arrays instead of field names: 200,000 files take about 25 MB) and named by its own digest in the version's commit.

Everything here came from a store and may be damaged or hostile: bounds, order and paths are checked when it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from wirespeed.errors import DataError

SCHEMA = 1
DIGEST_BYTES = 32
MAX_MANIFEST_BYTES = 1024**3
MAX_CHUNK_BYTES = 64 * 1024**2
MAX_FILES = 5_000_000
MAX_DEPTH = 64
"""No reader follows a longer chain of deltas, whatever a writer did."""
_MAGIC = b"WSM1"

Encoding = Literal["raw", "zstd", "planes", "sparse", "diff", "int8"]
"""``raw``: the bytes. ``zstd``, ``planes``: compressed alone. ``sparse``, ``diff``, ``int8``: against a base chunk."""
DELTAS: frozenset[str] = frozenset({"sparse", "diff", "int8"})


class ObjectRef(msgspec.Struct, frozen=True, array_like=True):
    """One stored object."""

    digest: bytes
    epoch: int
    size_bytes: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a file. They are ``stored_bytes`` at ``offset`` of an object (an index), once decoded ``length`` bytes.

    ``digest`` is that of the decoded bytes. ``base`` is the index of an earlier chunk, for a delta, else -1. ``width``
    is the size of one element.
    """

    digest: bytes
    length: int
    object: int
    offset: int
    stored_bytes: int
    encoding: Encoding = "raw"
    width: int = 1
    base: int = -1


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a safetensors file. ``offset`` counts from the start of the file. dtype as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """One file: its chunks (indices) in order, and what is in it."""

    path: str
    size_bytes: int
    sha256: bytes
    """Of the whole file, for other tools; empty where the file was never in one place. Reading verifies chunks."""
    chunks: tuple[int, ...]
    is_executable: bool = False
    tensors: tuple[Tensor, ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one version."""

    schema: int = SCHEMA
    objects: tuple[ObjectRef, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    files: tuple[FileEntry, ...] = ()
    folders: tuple[str, ...] = ()
    """Folders that hold nothing."""

    @property
    def num_bytes(self) -> int:
        """Of all files, as they are on disk."""
        return sum(file.size_bytes for file in self.files)

    def file(self, path: str) -> FileEntry:
        """The file of this path. Raises DataError where there is none."""
        for file in self.files:
            if file.path == path:
                return file
        raise DataError(f"there is no file {path!r} in this version", hint="`wirespeed repo show` lists its files")

    def content_id(self, file: FileEntry) -> str:
        """Names a file's content by what is verified on reading: digests and lengths of its chunks. Hexadecimal."""
        identity = hashlib.blake2b(digest_size=32, person=b"wirespeed-file")
        for index in file.chunks:
            chunk = self.chunks[index]
            identity.update(chunk.digest + chunk.length.to_bytes(8, "little"))
        return identity.hexdigest()

    def depth(self, index: int) -> int:
        """How many deltas have to be applied to get this chunk."""
        depth = 0
        while (base := self.chunks[index].base) >= 0:
            index, depth = base, depth + 1
        return depth

    def needed_objects(self, indices: Sequence[int]) -> set[int]:
        """Objects (indices) that hold these chunks and their bases."""
        objects: set[int] = set()
        seen: set[int] = set()
        for start in indices:
            index = start
            while index >= 0 and index not in seen:
                seen.add(index)
                objects.add(self.chunks[index].object)
                index = self.chunks[index].base
        return objects


def encode(manifest: Manifest) -> bytes:
    """As it is stored."""
    import zstandard

    check(manifest)
    return _MAGIC + zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(manifest))


def decode(content: bytes | memoryview, *, source: str) -> Manifest:
    """Read and check. Raises DataError that names ``source``."""
    import zstandard

    if bytes(content[:4]) != _MAGIC:
        raise DataError(f"{source} is not a manifest", expected=f"it to start with {_MAGIC!r}")
    body = content[4:]
    try:
        size_bytes = zstandard.frame_content_size(body)
        if not 0 <= size_bytes <= MAX_MANIFEST_BYTES:
            raise DataError(f"{source} says it unpacks to {size_bytes} bytes", expected=f"at most {MAX_MANIFEST_BYTES}")
        plain = zstandard.ZstdDecompressor().decompress(body, max_output_size=size_bytes)
        head = msgspec.msgpack.decode(plain, type=_Head)
        if head.schema != SCHEMA:
            raise DataError(
                f"{source} has schema {head.schema}",
                expected=f"schema {SCHEMA}",
                hint="it was written by a newer wirespeed: upgrade to read it",
            )
        manifest = msgspec.msgpack.decode(plain, type=Manifest)
    except (zstandard.ZstdError, msgspec.MsgspecError, RecursionError) as fault:
        raise DataError(
            f"{source} is damaged: {fault}", hint="`wirespeed repo verify` says which versions are whole"
        ) from fault
    try:
        check(manifest)
    except DataError as fault:
        raise DataError(f"{source} is damaged: {fault.problem}", expected=fault.expected) from fault
    return manifest


class _Head(msgspec.Struct):
    schema: int


def check(manifest: Manifest) -> None:
    """Bounds, order and paths. Raises DataError."""
    for stored in manifest.objects:
        if len(stored.digest) != DIGEST_BYTES or stored.size_bytes < 0 or stored.epoch < 0:
            raise DataError("an object has no proper digest, size or epoch")
    depths: list[int] = []
    for index, chunk in enumerate(manifest.chunks):
        depths.append(_check_chunk(manifest, index, chunk, depths))
    if len(manifest.files) > MAX_FILES:
        raise DataError(f"got {len(manifest.files)} files", expected=f"at most {MAX_FILES}")
    for file in manifest.files:
        _check_file(manifest, file)
    _check_paths([file.path for file in manifest.files], manifest.folders)


def _check_chunk(manifest: Manifest, index: int, chunk: Chunk, depths: Sequence[int]) -> int:
    is_delta = chunk.encoding in DELTAS
    if len(chunk.digest) != DIGEST_BYTES or not 0 < chunk.length <= MAX_CHUNK_BYTES:
        raise DataError(f"chunk {index} has {chunk.length} bytes", expected=f"1 to {MAX_CHUNK_BYTES}, and a digest")
    if not 0 <= chunk.object < len(manifest.objects) or chunk.offset < 0 or chunk.stored_bytes <= 0:
        raise DataError(f"chunk {index} lies in no object")
    if chunk.offset + chunk.stored_bytes > manifest.objects[chunk.object].size_bytes:
        raise DataError(f"chunk {index} ends after its object")
    if chunk.encoding == "raw" and chunk.stored_bytes != chunk.length:
        raise DataError(f"chunk {index} is raw and has {chunk.stored_bytes} of {chunk.length} bytes")
    if chunk.width not in (1, 2, 4, 8) or (chunk.length % chunk.width and chunk.encoding != "raw"):
        raise DataError(f"chunk {index} has elements of {chunk.width} bytes", expected="1, 2, 4 or 8 that divide it")
    if not is_delta:
        if chunk.base != -1:
            raise DataError(f"chunk {index} has a base and is no delta")
        return 0
    # Bases come before what is built on them: there can be no cycle.
    if not 0 <= chunk.base < index or manifest.chunks[chunk.base].length != chunk.length:
        raise DataError(f"chunk {index} has no proper base")
    depth = depths[chunk.base] + 1
    if depth > MAX_DEPTH:
        raise DataError(f"chunk {index} is {depth} deltas deep", expected=f"at most {MAX_DEPTH}")
    return depth


def _check_file(manifest: Manifest, file: FileEntry) -> None:
    if any(not 0 <= index < len(manifest.chunks) for index in file.chunks):
        raise DataError(f"file {file.path!r} names a chunk that is not there")
    size_bytes = sum(manifest.chunks[index].length for index in file.chunks)
    if size_bytes != file.size_bytes or len(file.sha256) not in (0, DIGEST_BYTES):
        raise DataError(
            f"file {file.path!r} has {size_bytes} bytes in chunks", expected=f"{file.size_bytes}, and a SHA-256"
        )
    for tensor in file.tensors:
        if tensor.offset < 0 or tensor.num_bytes < 0 or tensor.offset + tensor.num_bytes > file.size_bytes:
            raise DataError(f"tensor {tensor.name!r} lies outside {file.path!r}")


def _check_paths(paths: Sequence[str], folders: Sequence[str]) -> None:
    names = set(paths)
    if len(names) != len(paths):
        raise DataError("two files have the same path")
    parents: set[str] = set()
    for path in [*paths, *folders]:
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path or len(path) > 4096:
            raise DataError(f"got path {path!r}", expected="a relative path that stays in its folder")
        parents.update("/".join(parts[:end]) for end in range(1, len(parts)))
    clash = names & (parents | set(folders))
    if clash:
        raise DataError(f"{min(clash)!r} is a file and a folder")
