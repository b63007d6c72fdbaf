"""Chunks for a pull, from other files of this host and from the peers before it in the chain.

``repo.pull`` puts files together from whatever a ``Source`` gives it, resumes what was interrupted, and publishes what
is whole. This is a source whose far chunks come over the wire; the pull does not know.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from wirespeed.errors import PeerFailure
from wirespeed.repo.fetch import NUM_WORKERS, Place, Source
from wirespeed.repo.hot import Hot
from wirespeed.repo.manifest import Chunk
from wirespeed.repo.store import Store
from wirespeed.repo.swarm.board import Board

if TYPE_CHECKING:
    from wirespeed.repo.swarm.download import Download


class SwarmSource(Source):
    """Reads chunks of one version for one peer. Used by the pull's thread; the rest runs on ``loop``."""

    def __init__(
        self,
        store: Store | None,
        board: Board,
        *,
        loop: asyncio.AbstractEventLoop,
        local: Mapping[bytes, Place],
        hot: Hot | None,
        label: str,
    ) -> None:
        super().__init__(store, board.manifest, local=local, hot=hot, label=label)
        self.download: Download | None = None
        self._board = board
        self._loop = loop
        self._differences = {
            chunk.digest: index for index, chunk in enumerate(board.manifest.chunks) if chunk.base >= 0
        }

    def kept(self, indices: Iterable[int]) -> None:
        """See Source."""
        self._loop.call_soon_threadsafe(self._board.keep, list(indices))

    def read_many(
        self, wanted: Sequence[int], use: Callable[[int, memoryview], None], *, workers: int = NUM_WORKERS
    ) -> None:
        """See Source. What lies in other files here is read while the rest comes in."""
        chunks = self.manifest.chunks
        near = [index for index in wanted if chunks[index].digest in self._local]
        is_near = set(near)
        # Where the base is here, what is stored of a difference is enough, and travels instead of the chunk.
        by_difference = frozenset(
            index
            for index in wanted
            if chunks[index].base >= 0
            and chunks[chunks[index].base].digest in self._local
            and chunks[index].stored_bytes < chunks[index].length
        )
        task = self._fetch([index for index in wanted if index not in is_near], use, by_difference)
        late = []
        try:
            for index in near:
                content = self.nearby(chunks[index])
                if content is None:
                    late.append(index)
                    continue
                self._loop.call_soon_threadsafe(self._board.right, index, content)
                use(index, content)
                self._loop.call_soon_threadsafe(self._board.written, index)
            task.result()
        finally:
            task.cancel()
        if late:  # damaged or evicted since the index was made
            self._fetch(late, use).result()
        assert self.download is not None
        self.counts.peer_bytes = self.download.peer_bytes

    def _fetch(
        self,
        indices: Sequence[int],
        use: Callable[[int, memoryview], None],
        by_difference: frozenset[int] = frozenset(),
    ) -> _Task:
        assert self.download is not None
        return asyncio.run_coroutine_threadsafe(self.download.run(indices, use, by_difference), self._loop)

    def decode(self, index: int, payload: memoryview) -> memoryview:
        """The chunk that a stored difference gives; verified. Raises DataError, or what reading the base raises."""
        return super()._decoded(self.manifest.chunks[index], payload)

    def _decoded(self, chunk: Chunk, payload: memoryview) -> memoryview:
        content = super()._decoded(chunk, payload)
        index = self._differences.get(chunk.digest)
        if index is not None:
            self._loop.call_soon_threadsafe(self._board.keep_payload, index, bytes(payload))
        return content

    def from_store(self, wanted: Sequence[int], use: Callable[[int, memoryview], None], stop: threading.Event) -> None:
        """Read these from the store, until ``stop``."""

        def put(index: int, content: memoryview) -> None:
            if stop.is_set():
                raise PeerFailure("reading from the store was stopped")
            use(index, content)

        super().read_many(wanted, put)


if TYPE_CHECKING:
    from concurrent.futures import Future

    _Task = Future[None]
