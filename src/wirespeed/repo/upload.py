"""Turns pieces of bytes into chunks that lie in the store: found again, made small against a base, packed, uploaded.

One ``Uploader`` serves one push. It may count on two kinds of objects: those of live versions that no collection has
condemned, and those under the current epoch's keys (what an interrupted push left is found and not sent again).
Chunks of 1 MiB and more are objects of their own, so that any two pushes share them; smaller ones share packs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import cast

import msgspec

from wirespeed.repo import delta, names
from wirespeed.repo.chunks import PIECE_BYTES
from wirespeed.repo.fetch import Source
from wirespeed.repo.gc import View
from wirespeed.repo.manifest import Chunk, Encoding, Manifest, ObjectRef
from wirespeed.repo.quantize import DTYPES, WIDTHS, Dtype, quantize
from wirespeed.repo.store import Store

OWN_OBJECT_BYTES = 1024**2
PACK_BYTES = 8 * 1024**2
MAX_DELTA_DEPTH = 8
"""A longer chain would cost every cold reader; beyond it the chunk is stored whole: a new base."""
CHAIN_SHARE = 0.5
"""Neither may all deltas that a chunk rests on add up to more than this share of it."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk that is, or will be, in the store. ``base`` is the digest of what a delta rests on."""

    digest: bytes
    length: int
    object: ObjectRef
    offset: int
    stored_bytes: int
    encoding: Encoding = "raw"
    width: int = 1
    base: bytes | None = None


class Rounded(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk becomes where its change may be rounded, and its form against the base (a digest)."""

    content: memoryview
    small: delta.Encoded
    base: bytes


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier version that chunks may be found in, or rest on."""

    manifest: Manifest
    source: Source
    by_key: dict[tuple[str, int], int]
    """Chunk index by (tensor, offset in it)."""


class Sent:
    """What a push came to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.read_bytes = 0
        self.uploaded_bytes = 0
        self.found_bytes = 0
        """Bytes of files that were in the store before."""
        self.delta_bytes = 0
        """Bytes of files that went as deltas, and what those came to."""
        self.delta_payload_bytes = 0
        self.num_objects = 0

    def add(self, **more: int) -> None:
        """Add to the fields of these names."""
        with self._lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)


class _Small:
    """A small chunk, and what is to be told where it lies."""

    def __init__(self, payload: memoryview | bytes, place: Callable[[ObjectRef, int], None]) -> None:
        self.payload = payload
        self.place = place


class _Turn:
    """The one time that a chunk says what it has for the packs."""

    def __init__(self, uploader: Uploader, ticket: int) -> None:
        self._uploader = uploader
        self._ticket: int | None = ticket

    def take(self, small: _Small | None) -> None:
        """Say it. Later calls are ignored."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._uploader.put_in_order(ticket, small)


class _Pack:
    """Small chunks on their way into one object. Its reference is known once it is full."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.waiting: list[tuple[Callable[[ObjectRef, int], None], int]] = []


class Uploader:
    """Chunks of one push. ``add`` is thread-safe; ``finish`` comes after all of them."""

    def __init__(
        self,
        store: Store,
        view: View,
        *,
        base: Base | None = None,
        siblings: tuple[Manifest, ...] = (),
        is_compressed: bool = False,
        decide: Callable[[int, int], bool] = lambda raw, small: True,
        is_repair: bool = False,
    ) -> None:
        self.store = store
        self.sent = Sent()
        self._view = view
        self._base = base
        self._is_compressed = is_compressed
        self._decide = decide
        self._is_repair = is_repair
        self._lock = threading.Lock()
        self._known: dict[bytes, Stored] = {}
        self._in_flight: dict[bytes, threading.Event] = {}
        self._pack = _Pack()
        self._num_tickets = 0
        self._next_ticket = 0
        self._by_ticket: dict[int, _Small | None] = {}
        for manifest in siblings if base is None else (base.manifest, *siblings):
            self._learn(manifest)

    def _learn(self, manifest: Manifest) -> None:
        if self._is_repair:
            return
        usable = [names.object_key(o.digest, o.epoch) not in self._view.condemned for o in manifest.objects]
        fine: list[bool] = []
        for chunk in manifest.chunks:
            is_fine = usable[chunk.object] and (chunk.base < 0 or fine[chunk.base])
            fine.append(is_fine)
            if is_fine:
                self._known.setdefault(chunk.digest, _stored(manifest, chunk))

    def ticket(self) -> int:
        """A place in the order of chunks, for one ``add``. Packs are filled in that order, whichever thread is first.

        So the same files make the same packs, and what an interrupted push has uploaded is found again.
        """
        with self._lock:
            self._num_tickets += 1
            return self._num_tickets - 1

    def rounded(self, content: memoryview, *, dtype: str, key: tuple[str, int]) -> Rounded | None:
        """This part of a tensor with its change to the parent's in 8 bits, or exact where that is as small.

        None where it has no parent to rest on, or not enough of it changed.
        """
        found = self._base_of(key, len(content))
        if found is None or self._base is None or dtype not in DTYPES:
            return None
        index, digest = found
        base = self._base.source.read(index)
        made = quantize(base, content, dtype=cast("Dtype", dtype))
        if made is None:
            return None
        exact = delta.encode_delta(base, content, width=WIDTHS[dtype])
        if exact is not None and len(exact.payload) <= len(made[1]):
            # Small steps of 16-bit weights: nothing is won by rounding.
            return Rounded(content=content, small=exact, base=digest)
        return Rounded(content=made[0], small=delta.Encoded(encoding="int8", payload=made[1]), base=digest)

    def add(
        self,
        content: memoryview,
        *,
        width: int = 1,
        key: tuple[str, int] | None = None,
        ticket: int | None = None,
        rounded: Rounded | None = None,
    ) -> bytes:
        """Have this chunk in the store, now or at ``finish``. Gives its digest. ``rounded``: it is that one's."""
        turn = _Turn(self, self.ticket() if ticket is None else ticket)
        try:
            return self._add(content, width, key, turn, rounded)
        finally:
            turn.take(None)

    def put_in_order(self, ticket: int, small: _Small | None) -> None:
        """What this ticket's chunk has for the packs, or nothing."""
        full: list[_Pack] = []
        with self._lock:
            self._by_ticket[ticket] = small
            while self._next_ticket in self._by_ticket:
                found = self._by_ticket.pop(self._next_ticket)
                self._next_ticket += 1
                if found is None:
                    continue
                self._pack.waiting.append((found.place, len(self._pack.content)))
                self._pack.content += found.payload
                if len(self._pack.content) >= PACK_BYTES:
                    full.append(self._pack)
                    self._pack = _Pack()
        for pack in full:
            self._flush(pack)

    def _add(
        self, content: memoryview, width: int, key: tuple[str, int] | None, turn: _Turn, rounded: Rounded | None
    ) -> bytes:
        from blake3 import blake3

        digest = blake3(content).digest()
        self.sent.add(read_bytes=len(content))
        while True:
            with self._lock:
                if digest in self._known:
                    self.sent.add(found_bytes=len(content))
                    return digest
                other = self._in_flight.get(digest)
                if other is None:
                    self._in_flight[digest] = threading.Event()
                    break
            # The twin has its own turn; what waits for it here must not hold up those behind.
            turn.take(None)
            other.wait(timeout=600)
        try:
            self._store(digest, content, width, key, turn, rounded)
        finally:
            with self._lock:
                self._in_flight.pop(digest).set()
        return digest

    def add_long(self, pool: Executor, content: memoryview, *, width: int = 1, name: str | None = None) -> list[bytes]:
        """Bytes of any length, such as those of the tensor ``name``, cut as its file would be. Gives the digests."""

        def add(at: int, ticket: int) -> bytes:
            key = None if name is None else (name, at)
            return self.add(content[at : at + PIECE_BYTES], width=width, key=key, ticket=ticket)

        starts = range(0, len(content), PIECE_BYTES)
        return list(pool.map(add, starts, [self.ticket() for _ in starts]))

    def _store(  # noqa: PLR0917 - one caller
        self,
        digest: bytes,
        content: memoryview,
        width: int,
        key: tuple[str, int] | None,
        turn: _Turn,
        rounded: Rounded | None,
    ) -> None:
        small: delta.Encoded | None
        base: bytes | None
        if rounded is not None:
            small, base = rounded.small, rounded.base
        else:
            small, base = self._smaller(content, width, key)
        payload: memoryview | bytes = content if small is None else small.payload
        encoding: Encoding = "raw" if small is None else small.encoding

        def place(ref: ObjectRef, offset: int) -> None:
            stored = Stored(
                digest=digest, length=len(content), object=ref, offset=offset, stored_bytes=len(payload),
                encoding=encoding, width=width, base=base,
            )  # fmt: skip
            with self._lock:
                self._known[digest] = stored

        if base is not None:
            self.sent.add(delta_bytes=len(content), delta_payload_bytes=len(payload))
        if len(payload) >= OWN_OBJECT_BYTES:
            # Those behind do not wait for an upload to end: they would pile up in memory.
            turn.take(None)
            place(self._upload(payload, digest if small is None else None), 0)
            return
        with self._lock:
            # Known from here on, so that a twin is not packed twice; where it lies is told when the pack is full.
            self._known[digest] = Stored(
                digest=digest, length=len(content), object=_PENDING, offset=0, stored_bytes=len(payload)
            )
        turn.take(_Small(payload, place))

    def _flush(self, pack: _Pack) -> None:
        ref = self._upload(bytes(pack.content), None)
        for place, offset in pack.waiting:
            place(ref, offset)

    def _smaller(
        self, content: memoryview, width: int, key: tuple[str, int] | None
    ) -> tuple[delta.Encoded | None, bytes | None]:
        base = None if key is None else self._base_of(key, len(content))
        if base is not None and self._base is not None:
            index, digest = base
            found = delta.encode_delta(self._base.source.read(index), content, width=width)
            if found is not None and self._decide(len(content), len(found.payload)):
                return found, digest
        if self._is_compressed:
            found = delta.encode_alone(content, width=width)
            if found is not None and self._decide(len(content), len(found.payload)):
                return found, None
        return None, None

    def _base_of(self, key: tuple[str, int], length: int) -> tuple[int, bytes] | None:
        """The parent's chunk of this part, by index and digest, where a difference may rest on it."""
        index = None if self._base is None else self._base.by_key.get(key)
        if index is None or self._base is None:
            return None
        old = self._base.manifest.chunks[index]
        known = self._known.get(old.digest)
        if old.length != length or known is None or not self._may_rest_on(known, length):
            return None
        return index, old.digest

    def _may_rest_on(self, stored: Stored, length: int) -> bool:
        depth, delta_bytes = 0, 0
        at: Stored | None = stored
        while at is not None and at.base is not None:
            depth += 1
            delta_bytes += at.stored_bytes
            at = self._known.get(at.base)
        return at is not None and depth + 1 <= MAX_DELTA_DEPTH and delta_bytes <= CHAIN_SHARE * length

    def _upload(self, payload: memoryview | bytes, digest: bytes | None) -> ObjectRef:
        from blake3 import blake3

        name = blake3(payload).digest() if digest is None else digest
        ref = ObjectRef(digest=name, epoch=self._view.epoch, size_bytes=len(payload))
        key = names.object_key(name, self._view.epoch)
        if not self._is_repair:
            stat = self.store.stat(key)
            if stat is not None and stat.size_bytes == len(payload):
                self.sent.add(found_bytes=len(payload))
                return ref
        self.store.put(key, payload)
        self.sent.add(uploaded_bytes=len(payload), num_objects=1)
        return ref

    def put_object(self, payload: bytes) -> ObjectRef:
        """An object of its own, such as the manifest."""
        return self._upload(payload, None)

    def finish(self) -> None:
        """Upload what is still in the pack."""
        if self._pack.content:
            self._flush(self._pack)
        self._pack = _Pack()

    def stored(self, digest: bytes) -> Stored:
        """Where a chunk lies. Only after ``finish``."""
        found = self._known[digest]
        assert found.object is not _PENDING
        return found


_PENDING = ObjectRef(digest=b"", epoch=0, size_bytes=0)


def _stored(manifest: Manifest, chunk: Chunk) -> Stored:
    return Stored(
        digest=chunk.digest,
        length=chunk.length,
        object=manifest.objects[chunk.object],
        offset=chunk.offset,
        stored_bytes=chunk.stored_bytes,
        encoding=chunk.encoding,
        width=chunk.width,
        base=manifest.chunks[chunk.base].digest if chunk.base >= 0 else None,
    )


class Table:
    """Collects chunks and objects into the tables of a manifest, bases before what rests on them."""

    def __init__(self, find: Callable[[bytes], Stored]) -> None:
        self._find = find
        self._objects: dict[tuple[bytes, int], int] = {}
        self._refs: list[ObjectRef] = []
        self._indices: dict[bytes, int] = {}
        self._chunks: list[Chunk] = []

    def index(self, digest: bytes) -> int:
        """Of this chunk, in the table."""
        known = self._indices.get(digest)
        if known is not None:
            return known
        stored = self._find(digest)
        base = -1 if stored.base is None else self.index(stored.base)
        at = self._objects.setdefault((stored.object.digest, stored.object.epoch), len(self._refs))
        if at == len(self._refs):
            self._refs.append(stored.object)
        self._indices[digest] = len(self._chunks)
        self._chunks.append(
            Chunk(
                digest=digest,
                length=stored.length,
                object=at,
                offset=stored.offset,
                stored_bytes=stored.stored_bytes,
                encoding=stored.encoding,
                width=stored.width,
                base=base,
            )
        )
        return self._indices[digest]

    def objects(self) -> tuple[ObjectRef, ...]:
        """All objects that are needed."""
        return tuple(self._refs)

    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks."""
        return tuple(self._chunks)
