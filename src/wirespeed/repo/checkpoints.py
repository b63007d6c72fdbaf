"""torch.distributed.checkpoint on a repository: every rank uploads its shards, one rank commits, any mesh reads.

    dcp.save(state, storage_writer=RepoWriter("run-7", repo="s3://bucket/models"))
    dcp.load(state, storage_reader=RepoReader("run-7@v3", repo="s3://bucket/models"))

A checkpoint is a version like any other: shards are chunks (so what did not change since an earlier checkpoint is not
sent, and with ``parent`` what changed a little goes as a difference), the plan is ``dcp.json``, and nothing is visible
before the commit. The plan holds no pickle. State that is no tensor is pickled by torch's planner; it is read back only
where torch's restricted unpickler accepts it.

``Saver`` saves a state dictionary from a training loop on a schedule, from a copy, while training goes on.
"""

from __future__ import annotations

import io
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from wirespeed.errors import DataError, UsageError, WirespeedError
from wirespeed.repo import gc, versions
from wirespeed.repo.checkpoint_plan import Where, decode_plan, dtype_of, encode_plan
from wirespeed.repo.manifest import FileEntry, Manifest, Tensor
from wirespeed.repo.push import Pushed, commit
from wirespeed.repo.repository import Repository
from wirespeed.repo.tensors import NAMES, bytes_of, make_uploader, save, spans
from wirespeed.repo.upload import Stored, Table, Uploader

PLAN_FILE = "dcp.json"


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank uploaded for one item of its plan; travels to the rank that commits."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    digests: tuple[bytes, ...]
    stored: tuple[Stored, ...]
    num_bytes: int


class RepoWriter(StorageWriter):
    """Saves one checkpoint as the next version of ``name``. ``version`` says which, after the save."""

    def __init__(
        self, name: str, *, repo: Repository | str | None = None, parent: str | None = None, message: str = ""
    ) -> None:
        super().__init__()
        self.version: versions.Version | None = None
        self._repository = repo if isinstance(repo, Repository) else Repository.open(repo, must_exist=False)
        self._name = name
        self._parent = parent
        self._message = message
        self._claim: versions.Claim | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Ours are names of models."""
        return isinstance(checkpoint_id, str)

    def reset(self, checkpoint_id: object = None) -> None:
        """A new checkpoint; ``checkpoint_id``, where given, is the model's name."""
        if checkpoint_id is not None:
            self._name = str(checkpoint_id)
        if self._claim is not None:
            self._claim.end()
            self._claim = None
        self.version = None

    def storage_meta(self) -> StorageMeta | None:
        """The model's name as the checkpoint's."""
        return StorageMeta(checkpoint_id=self._name)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The committing rank claims the version's number before anyone uploads: collectors then wait for it."""
        if is_coordinator:
            self._claim = versions.Claim(self._repository.store, self._name)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank a file name."""
        import dataclasses

        return [dataclasses.replace(plan, storage_data=f"rank-{at:05d}.bin") for at, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload this rank's shards."""
        store = self._repository.store
        # Read after the claim was made, by whichever rank: what it condemns is not counted on.
        view = gc.view(store)
        parent = None if self._parent is None else self._repository.version(f"{self._name}@{self._parent}")
        uploader = make_uploader(self._repository, view, self._name, parent)
        pieces: list[tuple[WriteItem, str, str, tuple[int, ...], list[bytes], int]] = []
        with ThreadPoolExecutor(4, thread_name_prefix="wirespeed-save") as pool:
            for item in plan.items:
                name, dtype, shape, content, width = _content(item, planner)
                digests = uploader.add_long(pool, content, width=width, name=name)
                pieces.append((item, name, dtype, shape, digests, len(content)))
        uploader.finish()
        results = []
        for item, name, dtype, shape, digests, num_bytes in pieces:
            made = _Item(
                file=str(plan.storage_data), name=name, dtype=dtype, shape=shape, digests=tuple(digests),
                stored=tuple(_closure(uploader, digests)), num_bytes=num_bytes,
            )  # fmt: skip
            results.append(WriteResult(index=item.index, size_in_bytes=num_bytes, storage_data=made))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the plan and commit the version. Runs on one rank."""
        assert self._claim is not None
        store = self._repository.store
        try:
            view = gc.view(store)
            uploader = make_uploader(self._repository, view, self._name, None)
            known: dict[bytes, Stored] = {}
            by_file: dict[str, list[tuple[MetadataIndex, _Item]]] = {}
            for result in (one for rank in results for one in rank):
                item: _Item = result.storage_data
                known |= {stored.digest: stored for stored in item.stored}
                by_file.setdefault(item.file, []).append((result.index, item))
            where: list[tuple[MetadataIndex, Where]] = []
            rows: list[tuple[str, list[bytes], tuple[Tensor, ...], int]] = []
            for file, items in sorted(by_file.items()):
                offset = 0
                tensors: list[Tensor] = []
                digests: list[bytes] = []
                for index, item in items:
                    where.append((index, Where(file, offset, item.num_bytes)))
                    tensors.append(Tensor(item.name, item.dtype, item.shape, offset, item.num_bytes))
                    digests += item.digests
                    offset += item.num_bytes
                rows.append((file, digests, tuple(tensors), offset))
            plan = encode_plan(metadata, where)
            with ThreadPoolExecutor(1) as pool:
                plan_digests = uploader.add_long(pool, memoryview(plan))
            uploader.finish()
            rows.append((PLAN_FILE, plan_digests, (), len(plan)))
            table = Table(lambda digest: known[digest] if digest in known else uploader.stored(digest))
            files = tuple(
                FileEntry(
                    path=path, size_bytes=size, sha256=b"", chunks=tuple(map(table.index, digests)), tensors=tensors
                )
                for path, digests, tensors, size in rows
            )  # fmt: skip
            manifest = Manifest(objects=table.objects(), chunks=table.chunks(), files=files)
            parent = None if self._parent is None else self._repository.version(f"{self._name}@{self._parent}")
            self.version = commit(self._claim, uploader, manifest, parent=parent, message=self._message)
        finally:
            self._claim.end()
            self._claim = None


def _content(item: WriteItem, planner: SavePlanner) -> tuple[str, str, tuple[int, ...], memoryview, int]:
    """(name, dtype, shape, bytes, width) of one item. The name tells shards of one tensor apart."""
    found = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(found, io.BytesIO)
        return item.index.fqn, "bytes", (), found.getbuffer(), 1
    assert isinstance(found, torch.Tensor)
    offset = item.index.offset
    at = "" if offset is None or not any(offset) else "@" + ",".join(map(str, offset))
    content = bytes_of(found)
    width = found.element_size() if found.element_size() in (1, 2, 4, 8) else 1
    return item.index.fqn + at, NAMES.get(found.dtype, str(found.dtype)), tuple(found.shape), content, width


def _closure(uploader: Uploader, digests: Sequence[bytes]) -> list[Stored]:
    found: dict[bytes, Stored] = {}
    for digest in digests:
        at: bytes | None = digest
        while at is not None and at not in found:
            found[at] = uploader.stored(at)
            at = found[at].base
    return list(found.values())


class RepoReader(StorageReader):
    """Reads a checkpoint that RepoWriter saved, on any number of ranks; each reads only chunks it needs."""

    def __init__(self, wanted: str, *, repo: Repository | str | None = None) -> None:
        super().__init__()
        self._repository = repo if isinstance(repo, Repository) else Repository.open(repo)
        self._open(wanted)
        self._where: Mapping[MetadataIndex, Where] = {}

    def _open(self, wanted: str) -> None:
        self.version = self._repository.version(wanted)
        self._manifest = self._repository.manifest(self.version)
        self._source = self._repository.source(self.version, self._manifest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Ours are names of models."""
        return isinstance(checkpoint_id, str)

    def reset(self, checkpoint_id: object = None) -> None:
        """Another checkpoint, where one is named."""
        if checkpoint_id is not None:
            self._open(str(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The plan, from ``dcp.json``."""
        if all(file.path != PLAN_FILE for file in self._manifest.files):
            raise UsageError(f"{self.version.label} is no distributed checkpoint", expected="one that RepoWriter saved")
        file = self._manifest.file(PLAN_FILE)
        content = b"".join(bytes(self._source.read(index)) for index in file.chunks)
        return decode_plan(content, source=f"{self.version.label}/{PLAN_FILE}")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep where items lie."""
        self._where = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, each stored item once."""
        by_item: dict[MetadataIndex, list[ReadItem]] = {}
        for request in plan.items:
            by_item.setdefault(request.storage_index, []).append(request)
        for index, requests in by_item.items():
            if index not in self._where:
                raise DataError(f"{self.version.label} does not hold {index.fqn!r} at {index.offset}")
            where = self._where[index]
            file = self._manifest.file(where.file)
            if requests[0].type == LoadItemType.BYTE_IO:
                content = self._bytes(file, where.offset, where.offset + where.num_bytes)
                for request in requests:
                    planner.load_bytes(request, _checked_pickle(content, index.fqn))
                continue
            entry = next((t for t in file.tensors if t.offset == where.offset and t.num_bytes == where.num_bytes), None)
            if entry is None:
                raise DataError(f"{self.version.label} has no tensor where its plan says {index.fqn!r} is")
            self._tensors(planner, file, entry, requests)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _tensors(self, planner: LoadPlanner, file: FileEntry, entry: Tensor, requests: Sequence[ReadItem]) -> None:
        from wirespeed.repo.tensors import DTYPES

        dtype = DTYPES[entry.dtype] if entry.dtype in DTYPES else dtype_of(entry.dtype.removeprefix("torch."))
        first, last = 0, entry.shape[0] if entry.shape else 1
        if entry.shape:
            # Rows that nobody here asks for are not read.
            first = min(r.storage_offsets[0] for r in requests)
            last = max(r.storage_offsets[0] + r.lengths[0] for r in requests)
        row_bytes = dtype.itemsize * math.prod(entry.shape[1:]) if entry.shape else entry.num_bytes
        begin = entry.offset + first * row_bytes
        buffer = self._bytes(file, begin, entry.offset + last * row_bytes)
        shape = (last - first, *entry.shape[1:]) if entry.shape else ()
        stored = buffer.view(dtype).reshape(shape) if buffer.numel() else torch.empty(shape, dtype=dtype)
        for request in requests:
            part = stored
            for dim, (start, length) in enumerate(zip(request.storage_offsets, request.lengths, strict=True)):
                part = part.narrow(dim, start - first if dim == 0 else start, length)
            target = planner.resolve_tensor(request).detach()
            if target.shape != part.shape:
                raise DataError(f"{entry.name!r} has shape {tuple(part.shape)}", expected=f"{tuple(target.shape)}")
            target.copy_(part)
            planner.commit_tensor(request, target)

    def _bytes(self, file: FileEntry, begin: int, end: int) -> torch.Tensor:
        buffer = torch.empty(max(0, end - begin), dtype=torch.uint8)
        into = buffer.numpy().data
        places: dict[int, list[int]] = {}
        for index, offset, length in spans(self._manifest, file):
            if offset < end and begin < offset + length:
                places.setdefault(index, []).append(offset)

        def use(index: int, content: memoryview) -> None:
            for offset in places[index]:
                start, stop = max(offset, begin), min(offset + len(content), end)
                into[start - begin : stop - begin] = content[start - offset : stop - offset]

        self._source.read_many(list(places), use)
        return buffer


def _checked_pickle(content: torch.Tensor, name: str) -> io.BytesIO:
    """The planner unpickles without restriction: what it gets was accepted by the restricted unpickler before."""
    raw = content.numpy().tobytes()
    try:
        torch.load(io.BytesIO(raw), weights_only=True)
    except Exception as fault:
        raise DataError(
            f"{name!r} holds a pickle that may run code: {str(fault).splitlines()[0][:200]}",
            expected="tensors, numbers, strings and plain containers",
        ) from fault
    return io.BytesIO(raw)


class Saver:
    """Saves from a training loop on a schedule: ``saver.step(state)`` after each step; ``close`` at the end.

    State is copied to host memory on the caller's time, and uploaded by a thread; while an upload runs, due saves are
    put off, never queued. Every ``anchor_every``-th version is whole, the others go as differences to the one before.
    A failed upload is raised by the next ``step`` or by ``close``.
    """

    def __init__(
        self, name: str, *, repo: Repository | str | None = None, every_s: float = 600.0, anchor_every: int = 8
    ) -> None:
        self.saved: list[Pushed] = []
        self._repository = repo if isinstance(repo, Repository) else Repository.open(repo, must_exist=False)
        self._name = name
        self._every_s = every_s
        self._anchor_every = anchor_every
        self._next_s = time.monotonic() + every_s
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def step(self, state: Mapping[str, torch.Tensor], *, is_due: bool | None = None) -> bool:
        """Whether a save was begun: the time has come (or ``is_due`` says so) and none is under way."""
        self._raise()
        wanted = time.monotonic() >= self._next_s if is_due is None else is_due
        if not wanted or (self._thread is not None and self._thread.is_alive()):
            return False
        copies: dict[int, torch.Tensor] = {}
        copy = {key: copies.setdefault(id(t), t.detach().to("cpu", copy=True)) for key, t in state.items()}
        self._next_s = time.monotonic() + self._every_s
        self._thread = threading.Thread(target=self._save, args=(copy,), name="wirespeed-saver", daemon=True)
        self._thread.start()
        return True

    def _save(self, state: Mapping[str, torch.Tensor]) -> None:
        try:
            is_anchor = len(self.saved) % self._anchor_every == 0
            parent = None if is_anchor else f"v{self.saved[-1].version.number}"
            self.saved.append(save(state, self._name, repo=self._repository, parent=parent))
        except BaseException as fault:
            self._fault = fault

    def _raise(self) -> None:
        fault, self._fault = self._fault, None
        if isinstance(fault, WirespeedError) or fault is not None:
            raise fault

    def close(self, *, timeout_s: float = 3600.0) -> None:
        """Wait for what is under way. Raises what went wrong, and TimeoutError."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"a save of {self._name} has not ended in {timeout_s:g} s")
        self._raise()
