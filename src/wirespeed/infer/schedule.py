"""Which inputs go to which node next: pure policy, on a clock that the caller owns.

Nodes ask for work by finishing it. Each holds a window of inputs: enough to cover what it finishes within ``horizon_s``
(or within twice the shortest answer seen from it), so that the next input has arrived when the last is done, and no
more, so that a slow node does not sit on inputs that others could run. Inputs travel in chunks, to share the cost of a
message: bounded by bytes and rows, by 50 ms of the node's own speed, and near the end by half a fair share of what is
left; there inputs go to the node that would be done with its own first, so that all nodes end together.

When nothing is left to send, a node without work gets a copy of a chunk that another one has held for much longer than
chunks usually take; the first answer counts. The same happens when everything read ahead waits for such a chunk. Inputs
that come back are sent again, each in a chunk of its own. Those that were on a node when its process ended are suspects
besides: each gets a whole node to itself, so that whatever then happens to that node tells of this input and no other.

How it can be wrong: speeds that change within a window are noticed a window late; copies cost their transfer, once per
chunk at most.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Iterable

import msgspec

from wirespeed.errors import UsageError
from wirespeed.units import KIB, MIB

_CHUNK_S = 0.05
_MAX_CHUNKS = 64
_RECENT = 8
"""A node's speed is that of about so many chunks."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """``max_rows``: inputs in a chunk. ``max_window_bytes`` holds above two chunks only."""

    chunk_bytes: int = 512 * KIB
    max_rows: int = 32
    first_window_rows: int = 8
    """Before a node's speed is known; at least two chunks."""
    max_window_rows: int = 512
    max_window_bytes: int = 4 * MIB
    horizon_s: float = 0.1
    copy_after_s: float = 0.25
    """A chunk is never copied sooner."""
    copy_factor: float = 3.0
    """Nor before so many times the usual time of a chunk."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise UsageError(f"got {name} of {getattr(self, name)}", expected="a number above zero")


class Chunk:
    """Inputs on their way through one node.

    ``is_copy``: another node has them too. ``is_solitary``: one suspect, and its node has nothing else.
    """

    __slots__ = ("indices", "is_copied", "is_copy", "is_solitary", "node", "num_bytes", "rows_ahead", "sent_s")

    def __init__(
        self,
        node: str,
        indices: list[int],
        num_bytes: int,
        sent_s: float,
        *,
        is_copy: bool = False,
        is_solitary: bool = False,
    ) -> None:
        self.node = node
        self.indices = indices
        self.num_bytes = num_bytes
        self.sent_s = sent_s
        self.is_copy = is_copy
        self.is_solitary = is_solitary
        self.is_copied = False
        self.rows_ahead = 0
        """Inputs that its node had when it was sent, these included."""


class _Node:
    __slots__ = ("chunks", "least_s", "num_finished", "paused_until_s", "rate_per_s", "rows", "window_chunks")

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.rows = 0
        self.num_finished = 0
        self.rate_per_s = 0.0
        self.least_s = math.inf
        self.paused_until_s = 0.0
        self.window_chunks = _MAX_CHUNKS

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    def rows_per_s(self) -> float | None:
        """None before two chunks have ended."""
        return self.rate_per_s if self.num_finished >= 2 else None

    def learn(self, chunk: Chunk, took_s: float) -> None:
        """A node works off what it has in turn: what was there when the chunk was sent, in the time until it was done.

        Not the gaps between answers: those of one batch come all at once.
        """
        rate_per_s = chunk.rows_ahead / max(took_s, 1e-6)
        self.num_finished += 1
        self.rate_per_s += (rate_per_s - self.rate_per_s) / min(self.num_finished, _RECENT)
        self.least_s = min(self.least_s, took_s)


class Schedule:
    """See the module. Inputs are known by their place in the list."""

    def __init__(self, num_items: int, *, start: int = 0, bounds: Bounds | None = None) -> None:
        self._bounds = Bounds() if bounds is None else bounds
        self._nodes: dict[str, _Node] = {}
        self._ready: list[int] = []
        self._alone: list[int] = []
        self._suspects: list[int] = []
        self._sizes: dict[int, int] = {}
        self._num_unread = num_items - start
        self._num_held: dict[int, int] = {}
        """How many chunks an input is in."""
        self._took_s: deque[float] = deque(maxlen=64)
        self.num_copies = 0

    @property
    def num_open(self) -> int:
        """Inputs that have been offered and not settled."""
        return len(self._sizes)

    @property
    def num_left(self) -> int:
        """Inputs that no node has had yet."""
        return len(self._ready) + self._num_unread

    def set_nodes(self, names: Iterable[str]) -> None:
        """The nodes that take work now. One that is no longer among them keeps its chunks until they end."""
        wanted = list(names)
        for name in wanted:
            self._nodes.setdefault(name, _Node())
        for name in [name for name, node in self._nodes.items() if name not in wanted and not node.chunks]:
            del self._nodes[name]

    def offer(self, index: int, num_bytes: int) -> None:
        """An input has been read."""
        self._num_unread -= 1
        self._sizes[index] = num_bytes
        heapq.heappush(self._ready, index)

    def skip(self) -> None:
        """An input could not be read: it will not be offered."""
        self._num_unread -= 1

    def settle(self, index: int) -> bool:
        """An input has its result. False: it had one already, or was never offered."""
        return self._sizes.pop(index, None) is not None

    def put_back(self, index: int, *, is_suspect: bool = False) -> None:
        """Send an input again, in a chunk of its own; nothing where it has its result, or another node is at it."""
        if index in self._sizes and not self._num_held.get(index):
            heapq.heappush(self._suspects if is_suspect else self._alone, index)

    def pause(self, node: str, until_s: float) -> None:
        """A node said that it is full."""
        held = self._nodes.get(node)
        if held is not None:
            held.paused_until_s = until_s
            held.window_chunks = max(1, min(held.window_chunks, len(held.chunks) + 1) // 2)

    def next_chunk(self, name: str, now_s: float) -> Chunk | None:
        """What to send to a node now; None: nothing."""
        node = self._nodes.get(name)
        if node is None or not self._has_room(node, now_s):
            return None
        if self._is_pending(self._suspects):
            if node.chunks:
                return None  # it runs empty, and takes a suspect then
            return self._begin(name, node, [heapq.heappop(self._suspects)], now_s, is_solitary=True)
        indices = self._take_alone() or self._take_ready(node)
        if indices:
            return self._begin(name, node, indices, now_s)
        return None if node.chunks else self._copy(name, node, now_s)

    def finished(self, chunk: Chunk, now_s: float, *, has_answer: bool) -> None:
        """A chunk's call ended; its inputs are settled or put back after this."""
        node = self._nodes.get(chunk.node)
        for index in chunk.indices:
            left = self._num_held[index] - 1
            if left:
                self._num_held[index] = left
            else:
                del self._num_held[index]
        if node is None:
            return
        node.chunks.remove(chunk)
        node.rows -= len(chunk.indices)
        if has_answer:
            took_s = now_s - chunk.sent_s
            self._took_s.append(took_s)
            node.learn(chunk, took_s)
            node.window_chunks = min(_MAX_CHUNKS, node.window_chunks + 1)

    # --- arithmetic

    def _has_room(self, node: _Node, now_s: float) -> bool:
        if now_s < node.paused_until_s or len(node.chunks) >= node.window_chunks:
            return False
        is_with_suspect = bool(node.chunks) and node.chunks[0].is_solitary  # and then it has nothing else
        return not is_with_suspect and not self._is_full(node) and self._is_next(node)

    def _is_full(self, node: _Node) -> bool:
        bounds = self._bounds
        if len(node.chunks) < 2:
            return False
        rate = node.rows_per_s()
        window: float = bounds.first_window_rows
        if rate is not None:
            window = min(bounds.max_window_rows, rate * max(bounds.horizon_s, 2 * node.least_s))
        return node.rows >= window or node.num_bytes >= bounds.max_window_bytes

    def _is_next(self, node: _Node) -> bool:
        """Near the end: whether this node would be done no later than the others, but for one chunk.

        Until then every node's window is filled, and what windows hold is the same time for all, roughly; in the end
        the difference is what the job waits for. A node that has not shown its speed yet is taken to be like this one:
        whoever answers first would have all the rest of a short job otherwise.
        """
        rate = node.rows_per_s()
        if rate is None or self.num_left > sum(other.rows for other in self._nodes.values()):
            return True
        others = [other for other in self._nodes.values() if other is not node]
        others_s = [other.rows / (other.rows_per_s() or rate) for other in others]
        return node.rows / rate <= min(others_s, default=math.inf) + self._rows_of_chunk(node) / rate

    def _rows_of_chunk(self, node: _Node) -> int:
        fair = math.ceil(self.num_left / (2 * max(1, len(self._nodes))))
        rate = node.rows_per_s()
        by_time = self._bounds.max_rows if rate is None else max(1, int(rate * _CHUNK_S))
        return max(1, min(self._bounds.max_rows, fair, by_time))

    def _is_pending(self, put_back: list[int]) -> bool:
        """Whether the first of these is still to be sent. Those that are not any more are dropped."""
        while put_back and (put_back[0] not in self._sizes or self._num_held.get(put_back[0])):
            heapq.heappop(put_back)
        return bool(put_back)

    def _take_alone(self) -> list[int]:
        return [heapq.heappop(self._alone)] if self._is_pending(self._alone) else []

    def _take_ready(self, node: _Node) -> list[int]:
        rows, num_bytes = self._rows_of_chunk(node), 0
        indices: list[int] = []
        while self._ready and len(indices) < rows:
            size = self._sizes[self._ready[0]]
            if indices and num_bytes + size > self._bounds.chunk_bytes:
                break
            indices.append(heapq.heappop(self._ready))
            num_bytes += size
        return indices

    def _begin(
        self,
        name: str,
        node: _Node,
        indices: list[int],
        now_s: float,
        *,
        is_copy: bool = False,
        is_solitary: bool = False,
    ) -> Chunk:
        num_bytes = sum(self._sizes[index] for index in indices)
        chunk = Chunk(name, indices, num_bytes, now_s, is_copy=is_copy, is_solitary=is_solitary)
        node.chunks.append(chunk)
        node.rows += len(indices)
        chunk.rows_ahead = node.rows
        for index in indices:
            self._num_held[index] = self._num_held.get(index, 0) + 1
        return chunk

    def _copy(self, name: str, node: _Node, now_s: float) -> Chunk | None:
        """For a node without work: what another one is slow with."""
        chunk = self._slowest(name, now_s)
        if chunk is None:
            return None
        indices = [index for index in chunk.indices if index in self._sizes]
        chunk.is_copied = True
        self.num_copies += len(indices)
        return self._begin(name, node, indices, now_s, is_copy=True, is_solitary=chunk.is_solitary)

    def _slowest(self, name: str, now_s: float) -> Chunk | None:
        """The oldest chunk of another node that is worth a copy."""
        usual_s = statistics.median(self._took_s) if self._took_s else 10.0
        wait_s = max(self._bounds.copy_after_s, self._bounds.copy_factor * usual_s)
        oldest: Chunk | None = None
        for other, node in self._nodes.items():
            if other == name:
                continue
            for chunk in node.chunks:
                if chunk.is_copied or chunk.is_copy or now_s - chunk.sent_s < wait_s:
                    continue
                if not any(index in self._sizes for index in chunk.indices):
                    continue
                if oldest is None or chunk.sent_s < oldest.sent_s:
                    oldest = chunk
        return oldest
