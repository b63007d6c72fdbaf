"""Which requests run together, and when: pure policy, driven by a clock that the caller owns.

A batch is closed when a worker is free, not by a timer alone: what arrived while the model was busy runs next. Waiting
for more pays only when more is about to come, so that is what is predicted: callers that had an answer just now tend to
ask again, after a delay that is learned. With q rows queued and m expected within t, waiting saves m calls the wait for
a batch of their own, m (a - t), and costs the others q (t + b m), where a batch of n rows takes a + b n: also learned.
So one caller at a time never waits, and callers that fell into two alternating halves are brought together again.
``max_delay_s`` bounds how long a free worker is kept waiting.

How it can be wrong: callers that leave after one answer are waited for until the learned share of returns has fallen
(each such wait is at most ``max_delay_s``); a model whose time is not linear in rows is mispredicted, which costs the
same at most.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable
from typing import Any

import msgspec

from wirespeed.errors import UsageError

_MEMORY = 0.8
"""What an older observation weighs against the next one: about five batches are remembered."""


class BatchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds. ``max_rows`` 0: requests run one by one, whatever their shapes."""

    max_rows: int = 0
    max_delay_s: float = 0.002
    max_queue_rows: int = 1024
    max_queue_bytes: int = 512 * 1024**2

    def __post_init__(self) -> None:
        if self.max_rows < 0 or not 0 <= self.max_delay_s < math.inf:
            raise UsageError(
                f"got max_rows {self.max_rows}, max_delay_s {self.max_delay_s}", expected="neither below zero"
            )
        if self.max_queue_rows < max(1, self.max_rows) or self.max_queue_bytes < 1:
            raise UsageError(f"got max_queue_rows {self.max_queue_rows}", expected="room for one batch at least")


class Item:
    """One queued request. ``group``: only equal ones share a batch. ``priority``: lower runs first."""

    __slots__ = (
        "arrived_s",
        "deadline_s",
        "group",
        "is_alone",
        "is_queued",
        "num_bytes",
        "order",
        "owner",
        "priority",
        "rows",
    )

    def __init__(
        self,
        owner: Any,
        *,
        rows: int,
        num_bytes: int = 0,
        group: Hashable = None,
        priority: int = 0,
        deadline_s: float = math.inf,
        is_alone: bool = False,
    ) -> None:
        self.owner = owner
        self.rows = rows
        self.num_bytes = num_bytes
        self.group = group
        self.priority = priority
        self.deadline_s = deadline_s
        self.is_alone = is_alone
        self.arrived_s = 0.0
        self.order = 0
        self.is_queued = False


class QueueFull(Exception):  # noqa: N818 - it says what is the case
    """A bound of the queue was reached; the text says which."""


class BatchTimes:
    """How long a batch of n rows takes: a + b n, by least squares over recent batches."""

    def __init__(self) -> None:
        self._w = self._n = self._t = self._nn = self._nt = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """A batch ran."""
        k = _MEMORY
        self._w = k * self._w + 1
        self._n = k * self._n + rows
        self._t = k * self._t + seconds
        self._nn = k * self._nn + rows * rows
        self._nt = k * self._nt + rows * seconds

    @property
    def fixed_and_per_row_s(self) -> tuple[float, float]:
        """a and b, neither below zero. All of it is a where every batch had the same size, so that another is tried."""
        if self._w == 0:
            return 0.0, 0.0
        mean_n, mean_t = self._n / self._w, self._t / self._w
        spread = self._nn / self._w - mean_n * mean_n
        if spread < 1e-6 * mean_n * mean_n:
            return mean_t, 0.0
        per_row_s = (self._nt / self._w - mean_n * mean_t) / spread
        per_row_s = min(max(0.0, per_row_s), mean_t / mean_n)
        return max(0.0, mean_t - per_row_s * mean_n), per_row_s


class Returns:
    """Whether those who were just answered ask again, and how soon."""

    def __init__(self) -> None:
        self.share = 0.0
        self.delay_s = 0.0
        self._answered_s = -math.inf
        self._answered = 0
        self._returned = 0
        self._last_s = -math.inf

    def answered(self, num_requests: int, now_s: float) -> None:
        """A batch of so many requests is done."""
        missing = max(0, self._answered - self._returned)
        self._learn()
        # Those of the batch before who are still expected stay so, where batches end in quick succession.
        self._answered = num_requests + (missing if now_s - self._answered_s < self.delay_s else 0)
        self._returned = 0
        self._answered_s = now_s

    def arrived(self, now_s: float, within_s: float) -> None:
        """A request came. It counts as a return when it came soon enough to have been waited for."""
        if now_s - self._answered_s <= within_s and self._returned < self._answered:
            self._returned += 1
            self._last_s = now_s

    def _learn(self) -> None:
        if self._answered == 0:
            return
        share = self._returned / self._answered
        self.share = share if self.share == 0 else _MEMORY * self.share + (1 - _MEMORY) * share
        if self._returned:
            delay_s = self._last_s - self._answered_s
            self.delay_s = delay_s if self.delay_s == 0 else _MEMORY * self.delay_s + (1 - _MEMORY) * delay_s

    def expected(self, now_s: float) -> tuple[int, float, float]:
        """How many more are expected, by when they usually are all here, and until when to believe in it at all."""
        missing = round(self.share * self._answered) - self._returned
        usual_s = max(self._answered_s + self.delay_s, now_s + 0.1 * self.delay_s)
        last_s = self._answered_s + 1.5 * self.delay_s
        return (missing, usual_s, last_s) if missing > 0 and last_s > now_s else (0, now_s, now_s)


class Batcher:
    """The queue of one model. Times are seconds on the caller's clock and never run backwards."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.times = BatchTimes()
        self.returns = Returns()
        self.queued_rows = 0
        self.queued_bytes = 0
        self.num_queued = 0
        self._groups: dict[Hashable, list[tuple[int, int, Item]]] = {}
        self._deadlines: list[tuple[float, int, Item]] = []
        self._order = itertools.count(1)
        self._group_rows: dict[Hashable, int] = {}
        self._kept_since_s: float | None = None
        """Since when a free worker has been kept waiting for the batch to grow."""

    def add(self, item: Item, now_s: float) -> None:
        """Queue a request. Raises QueueFull; nothing has changed then."""
        policy = self.policy
        if self.queued_rows + item.rows > policy.max_queue_rows:
            raise QueueFull(f"{self.queued_rows} rows are queued; at most {policy.max_queue_rows} are")
        if self.queued_bytes + item.num_bytes > policy.max_queue_bytes and self.num_queued:
            raise QueueFull(f"{self.queued_bytes} bytes are queued; at most {policy.max_queue_bytes} are")
        self.returns.arrived(now_s, max(policy.max_delay_s, 2 * self.returns.delay_s))
        self._push(item, now_s)

    def put_back(self, item: Item, now_s: float) -> None:
        """Queue again what was taken and could not be run, ahead of its equals, whatever the bounds say."""
        order = item.order
        self._push(item, now_s, order=order)

    def remove(self, item: Item) -> bool:
        """Take a request out again; False where it is no longer queued."""
        if not item.is_queued:
            return False
        self._leave(item)
        return True

    def expire(self, now_s: float) -> list[Item]:
        """Take out the requests whose deadline has come."""
        late = []
        while self._deadlines and (self._deadlines[0][0] <= now_s or not self._deadlines[0][2].is_queued):
            item = heapq.heappop(self._deadlines)[2]
            if item.is_queued:
                self._leave(item)
                late.append(item)
        return late

    def next_batch(self, now_s: float) -> tuple[list[Item], float]:
        """For a worker that is free: the requests to run now, or none and when to ask again (inf: after ``add``)."""
        head = self._most_urgent()
        if head is None:
            return [], math.inf
        if self.policy.max_rows == 0 or head.is_alone:
            self._leave(head)
            return [head], now_s
        until_s = self._wait_until(head, now_s)
        if until_s > now_s:
            return [], until_s
        self._kept_since_s = None
        return self._take(head), now_s

    def ran(self, rows: int, num_requests: int, seconds: float, now_s: float) -> None:
        """A batch is done and its callers are answered."""
        self.times.observe(rows, seconds)
        self.returns.answered(num_requests, now_s)

    @property
    def next_deadline_s(self) -> float:
        """When ``expire`` has something to do at the earliest; inf: never."""
        while self._deadlines and not self._deadlines[0][2].is_queued:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _wait_until(self, head: Item, now_s: float) -> float:
        policy = self.policy
        rows = self._group_rows[head.group]
        if rows >= policy.max_rows or policy.max_delay_s == 0:
            return now_s
        if self._kept_since_s is None:
            self._kept_since_s = now_s
        latest_s = self._kept_since_s + policy.max_delay_s
        more, usual_s, last_s = self.returns.expected(now_s)
        if more == 0 or latest_s <= now_s:
            return now_s
        fixed_s, per_row_s = self.times.fixed_and_per_row_s
        # Of those who usually take longer than we may wait, some come sooner: as many as the time we have is of theirs.
        wait_s = min(usual_s, latest_s) - now_s
        more_by_then = more * wait_s / (usual_s - now_s)
        gain_s = more_by_then * (fixed_s - wait_s)
        cost_s = rows * (wait_s + per_row_s * more_by_then)
        return min(last_s, latest_s) if gain_s > cost_s else now_s

    def _take(self, head: Item) -> list[Item]:
        heap = self._groups[head.group]
        batch: list[Item] = []
        rows = 0
        while heap:
            item = heap[0][2]
            if item.is_queued:
                if item.is_alone or (batch and rows + item.rows > self.policy.max_rows):
                    break
                rows += item.rows
                self._leave(item)
                batch.append(item)
            if heap and heap[0][2] is item:
                heapq.heappop(heap)
        return batch

    def _most_urgent(self) -> Item | None:
        best: tuple[int, int, Item] | None = None
        for group in list(self._groups):
            heap = self._groups[group]
            while heap and not heap[0][2].is_queued:
                heapq.heappop(heap)
            if not heap:
                del self._groups[group]
                self._group_rows.pop(group, None)
            elif best is None or heap[0] < best:
                best = heap[0]
        return None if best is None else best[2]

    def _push(self, item: Item, now_s: float, *, order: int = 0) -> None:
        item.order = order or next(self._order)
        if not order:
            item.arrived_s = now_s
        item.is_queued = True
        self.queued_rows += item.rows
        self.queued_bytes += item.num_bytes
        self.num_queued += 1
        heapq.heappush(self._groups.setdefault(item.group, []), (item.priority, item.order, item))
        self._group_rows[item.group] = self._group_rows.get(item.group, 0) + item.rows
        if item.deadline_s < math.inf:
            heapq.heappush(self._deadlines, (item.deadline_s, item.order, item))

    def _leave(self, item: Item) -> None:
        item.is_queued = False
        self.queued_rows -= item.rows
        self.queued_bytes -= item.num_bytes
        self.num_queued -= 1
        self._group_rows[item.group] -= item.rows
        if len(self._deadlines) > 2 * self.num_queued + 64:
            # Entries of requests that are gone would keep their tensors until their deadlines.
            self._deadlines = [entry for entry in self._deadlines if entry[2].is_queued]
            heapq.heapify(self._deadlines)
