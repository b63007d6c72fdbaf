"""Chunks from wherever they are nearest: a file on this machine, the hot tier, the store. Verified where they are used.

What came from the hot tier or a local file and is wrong is passed over and counted; what the store gives wrong is read
once more and is then an error: damaged bytes are never handed out. Runs of chunks that lie together in an object are
one request. Memory: ``workers`` times a run (16 MiB at most) and what it decodes to.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from wirespeed.errors import DataError, UsageError
from wirespeed.repo import delta, names
from wirespeed.repo.hot import MAX_VALUE_BYTES, Hot
from wirespeed.repo.manifest import Chunk, Manifest
from wirespeed.repo.store import ObjectMissing, Store

NUM_WORKERS = 8
RUN_BYTES = 16 * 1024**2
GAP_BYTES = 256 * 1024
"""Bytes between two wanted chunks that are read along rather than asked for apart."""


class Place(msgspec.Struct, frozen=True):
    """Where a chunk's bytes lie on this machine."""

    path: Path
    offset: int


class Counts:
    """Where bytes came from. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.store_bytes = 0
        self.hot_bytes = 0
        self.local_bytes = 0
        self.peer_bytes = 0
        self.num_requests = 0
        self.num_damaged = 0
        """Chunks of the hot tier or of local files that were wrong and were passed over."""

    def add(self, **more: int) -> None:
        """Add to the fields of these names."""
        with self._lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)


class Source:
    """Reads chunks of one manifest. Thread-safe."""

    def __init__(
        self,
        store: Store | None,
        manifest: Manifest,
        *,
        local: Mapping[bytes, Place] | None = None,
        hot: Hot | None = None,
        label: str = "",
    ) -> None:
        self.store = store
        self.manifest = manifest
        self.counts = Counts()
        self._local = {} if local is None else local
        self._hot = hot
        self._label = label

    def kept(self, indices: Iterable[int]) -> None:
        """Told by a pull of chunks that it found where they belong. Those who pass a version on give these as well."""

    def read(self, index: int) -> memoryview:
        """The decoded, verified bytes of one chunk."""
        chunk = self.manifest.chunks[index]
        found = self.nearby(chunk)
        if found is not None:
            return found
        return self._from_payload(index, self._payloads([index])[0])

    def nearby(self, chunk: Chunk) -> memoryview | None:
        """The chunk from a local file or the hot tier, or None."""
        place = self._local.get(chunk.digest)
        if place is not None:
            content = _pread(place, chunk.length)
            if content is not None:  # None: evicted or replaced since the index was made
                if self._is_right(chunk, content):
                    self.counts.add(local_bytes=chunk.length)
                    return content
                self.counts.add(num_damaged=1)
        if self._hot is not None and chunk.length <= MAX_VALUE_BYTES:
            value = self._hot.get(chunk.digest)
            if value is not None:
                if len(value) == chunk.length and self._is_right(chunk, value):
                    self.counts.add(hot_bytes=chunk.length)
                    return memoryview(value)
                self._hot.drop(chunk.digest)
                self.counts.add(num_damaged=1)
        return None

    def read_many(
        self, wanted: Sequence[int], use: Callable[[int, memoryview], None], *, workers: int = NUM_WORKERS
    ) -> None:
        """Read chunks and hand each (index, bytes) to ``use``, in any order, from several threads.

        Raises the first error, after work that was under way has ended.
        """
        stop = threading.Event()

        def work(run: Sequence[int]) -> None:
            if stop.is_set():
                return
            far = []
            for index in run:
                found = self.nearby(self.manifest.chunks[index])
                if found is None:
                    far.append(index)
                else:
                    use(index, found)
            if not far:
                return
            for index, payload in zip(far, self._payloads(far), strict=True):
                if stop.is_set():
                    return
                use(index, self._from_payload(index, payload))

        runs = self._runs(wanted)
        if len(runs) <= 1 or workers == 1:
            for run in runs:
                work(run)
            return
        with ThreadPoolExecutor(workers, thread_name_prefix="wirespeed-fetch") as pool:
            futures = [pool.submit(work, run) for run in runs]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)

    def _runs(self, wanted: Sequence[int]) -> list[list[int]]:
        chunks = self.manifest.chunks
        runs: list[list[int]] = []
        ordered = sorted(wanted, key=lambda index: (chunks[index].object, chunks[index].offset))
        start = end = 0
        for index in ordered:
            chunk = chunks[index]
            stop = chunk.offset + chunk.stored_bytes
            is_near = (
                runs
                and chunks[runs[-1][-1]].object == chunk.object
                and chunk.offset - end <= GAP_BYTES
                and max(stop, end) - start <= RUN_BYTES
            )
            if is_near:
                runs[-1].append(index)
                end = max(end, stop)
            else:
                runs.append([index])
                start, end = chunk.offset, stop
        # In the order in which they were asked for: what a reader wants first comes first.
        rank = {index: at for at, index in enumerate(wanted)}
        return sorted(runs, key=lambda run: rank[run[0]])

    def _payloads(self, run: Sequence[int]) -> list[memoryview]:
        """Stored bytes of chunks of one object, in as few requests as their gaps allow."""
        chunks = [self.manifest.chunks[index] for index in run]
        start = min(chunk.offset for chunk in chunks)
        stop = max(chunk.offset + chunk.stored_bytes for chunk in chunks)
        ref = self.manifest.objects[chunks[0].object]
        store = self._needed_store()
        try:
            content = store.get_range(
                names.object_key(ref.digest, ref.epoch), start, stop - start, whole_bytes=ref.size_bytes
            )
        except ObjectMissing as fault:
            raise ObjectMissing(
                f"{self._label or 'a version'} needs an object that {store.url} no longer has: "
                f"{ref.digest.hex()[:16]}...",
                hint="was the version removed and collected? `wirespeed repo verify` lists what is missing",
            ) from fault
        self.counts.add(store_bytes=stop - start, num_requests=1)
        return [content[c.offset - start : c.offset - start + c.stored_bytes] for c in chunks]

    def _from_payload(self, index: int, payload: memoryview) -> memoryview:
        chunk = self.manifest.chunks[index]
        try:
            content = self._decoded(chunk, payload)
        except DataError:
            # Once more: a bit that fell over on the way is not a damaged object.
            self.counts.add(num_damaged=1)
            content = self._decoded(chunk, self._payloads([index])[0])
        if self._hot is not None and chunk.length <= MAX_VALUE_BYTES:
            self._hot.put(chunk.digest, content)
        return content

    def _decoded(self, chunk: Chunk, payload: memoryview) -> memoryview:
        base = self.read(chunk.base) if chunk.base >= 0 else None
        if chunk.encoding == "raw":
            content = payload
        else:
            content = delta.decode(payload, encoding=chunk.encoding, width=chunk.width, length=chunk.length, base=base)
        if not self._is_right(chunk, content):
            ref = self.manifest.objects[chunk.object]
            raise DataError(
                f"a chunk of {self._label or 'a version'} is damaged in {self._needed_store().url}: "
                f"object {ref.digest.hex()[:16]}... at {chunk.offset}",
                expected=f"BLAKE3 {chunk.digest.hex()[:16]}...",
                hint="push the version again from a good copy: damaged objects are replaced with --repair",
            )
        return content

    def _needed_store(self) -> Store:
        if self.store is None:
            raise UsageError(
                f"{self._label or 'a version'} has to be read from a store, and none was named",
                hint="start it with --repo URL, or set WIRESPEED_REPO",
            )
        return self.store

    @staticmethod
    def _is_right(chunk: Chunk, content: memoryview | bytes) -> bool:
        from blake3 import blake3

        return len(content) == chunk.length and blake3(content).digest() == chunk.digest


def _pread(place: Place, length: int) -> memoryview | None:
    try:
        handle = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = bytearray(length)
        view = memoryview(content)
        done = 0
        while done < length:
            num = os.preadv(handle, [view[done:]], place.offset + done)
            if num == 0:
                return None
            done += num
    except OSError:
        return None
    else:
        return view
    finally:
        os.close(handle)
