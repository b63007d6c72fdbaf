"""The batching policy on a clock of its own: what runs together, when, and who waits how long."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirespeed.errors import UsageError
from wirespeed.serve.batcher import Batcher, BatchPolicy, BatchTimes, Item, QueueFull


def batcher(**changes: float) -> Batcher:
    return Batcher(BatchPolicy(**{"max_rows": 8, "max_delay_s": 0.002, **changes}))  # type: ignore[arg-type]


def item(name: object, rows: int = 1, **more: object) -> Item:
    return Item(name, rows=rows, **more)  # type: ignore[arg-type]


def owners(batch: list[Item]) -> list[object]:
    return [held.owner for held in batch]


def test_a_lone_request_runs_at_once() -> None:
    b = batcher()
    b.add(item("a"), 0.0)
    assert owners(b.next_batch(0.0)[0]) == ["a"]
    assert b.next_batch(0.0) == ([], math.inf)


def test_what_arrived_while_the_model_was_busy_runs_together_up_to_max_rows() -> None:
    b = batcher()
    for name, rows in (("a", 3), ("b", 3), ("c", 3), ("d", 1)):
        b.add(item(name, rows), 0.0)
    # a and b are 6 rows; c would make it 9. d does not overtake c.
    assert owners(b.next_batch(1.0)[0]) == ["a", "b"]
    assert owners(b.next_batch(1.0)[0]) == ["c", "d"]
    assert (b.queued_rows, b.num_queued) == (0, 0)


def test_only_equal_groups_share_a_batch_and_the_longest_waiting_goes_first() -> None:
    b = batcher()
    for name, group in (("a", 1), ("b", 2), ("c", 1)):
        b.add(item(name, group=group), 0.0)
    assert owners(b.next_batch(0.1)[0]) == ["a", "c"]
    assert owners(b.next_batch(0.1)[0]) == ["b"]


def test_urgent_requests_go_first_and_equals_in_order() -> None:
    b = batcher(max_rows=2)
    for name, priority in (("late", 5), ("a", 1), ("b", 1), ("first", 0)):
        b.add(item(name, priority=priority), 0.0)
    assert owners(b.next_batch(0.1)[0]) == ["first", "a"]
    assert owners(b.next_batch(0.1)[0]) == ["b", "late"]


def test_a_model_that_does_not_batch_runs_one_request_at_a_time() -> None:
    b = batcher(max_rows=0)
    b.add(item("a"), 0.0)
    b.add(item("b"), 0.0)
    assert owners(b.next_batch(0.0)[0]) == ["a"]
    assert owners(b.next_batch(0.0)[0]) == ["b"]


def test_a_request_that_must_run_alone_does() -> None:
    b = batcher()
    b.add(item("a"), 0.0)
    b.add(item("poison", is_alone=True), 0.0)
    b.add(item("c"), 0.0)
    assert [owners(b.next_batch(0.0)[0]) for _ in range(3)] == [["a"], ["poison"], ["c"]]


def test_removed_and_expired_requests_never_run() -> None:
    b = batcher()
    gone, late, kept = item("gone"), item("late", deadline_s=1.0), item("kept", deadline_s=9.0)
    for held in (gone, late, kept):
        b.add(held, 0.0)
    assert b.next_deadline_s == 1.0
    assert b.remove(gone)
    assert not b.remove(gone)
    assert owners(b.expire(1.0)) == ["late"]
    assert b.expire(1.0) == []
    assert b.next_deadline_s == 9.0
    assert owners(b.next_batch(1.0)[0]) == ["kept"]
    assert (b.queued_rows, b.num_queued, b.next_deadline_s) == (0, 0, math.inf)


def test_a_full_queue_says_so_and_changes_nothing() -> None:
    b = batcher(max_queue_rows=10, max_queue_bytes=100)
    b.add(item("a", 8, num_bytes=60), 0.0)
    with pytest.raises(QueueFull, match="8 rows are queued; at most 10"):
        b.add(item("b", 3), 0.0)
    with pytest.raises(QueueFull, match="60 bytes are queued; at most 100"):
        b.add(item("c", 1, num_bytes=41), 0.0)
    assert (b.queued_rows, b.queued_bytes) == (8, 60)


def test_what_is_put_back_runs_before_what_came_later() -> None:
    b = batcher(max_rows=1)
    b.add(item("a"), 0.0)
    b.add(item("b"), 0.0)
    taken = b.next_batch(0.0)[0][0]
    b.put_back(taken, 5.0)
    assert owners(b.next_batch(5.0)[0]) == ["a"]


def test_batch_times_are_a_line_through_what_was_seen() -> None:
    times = BatchTimes()
    for rows in (1, 32, 8, 16, 4, 1, 32):
        times.observe(rows, 0.005 + 0.0001 * rows)
    assert times.fixed_and_per_row_s == pytest.approx((0.005, 0.0001), rel=1e-6)


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="room for one batch"):
        BatchPolicy(max_rows=32, max_queue_rows=16)


def test_requests_that_ran_are_let_go_of_before_their_deadlines() -> None:
    b = batcher()
    for n in range(1000):
        b.add(item(n, deadline_s=1e6), float(n))
        b.next_batch(float(n))
    assert len(b._deadlines) <= 64


class Closed:
    """Callers that ask again as soon as they are answered, on a model of ``fixed_s + rows * per_row_s``; no real time."""

    def __init__(
        self, callers: int, *, turn_s: float, fixed_s: float = 0.005, per_row_s: float = 0.0001, **policy: float
    ) -> None:
        self.batcher = batcher(**{"max_rows": 32, **policy})
        self.turn_s, self.fixed_s, self.per_row_s = turn_s, fixed_s, per_row_s
        self.events: list[tuple[float, int, str, object]] = []
        self.order = 0
        self.busy = False
        self.now_s = 0.0
        self.latencies_s: list[float] = []
        self.batches: list[int] = []
        for caller in range(callers):
            self.at(caller * turn_s / max(1, callers), "ask", caller)

    def at(self, when_s: float, what: str, about: object) -> None:
        self.order += 1
        heapq.heappush(self.events, (when_s, self.order, what, about))

    def run(self, num_answers: int) -> float:
        now_s = self.now_s
        while len(self.latencies_s) < num_answers:
            now_s, _, what, about = heapq.heappop(self.events)
            if what == "ask":
                self.batcher.add(item(about), now_s)
            elif what == "done":
                batch, seconds = about  # type: ignore[misc]
                self.busy = False
                self.batcher.ran(len(batch), len(batch), seconds, now_s)
                for held in batch:
                    self.latencies_s.append(now_s - held.arrived_s)
                    self.order += 1
                    self.at(now_s + self.turn_s * (0.5 + 0.5 * (self.order % 7) / 6), "ask", held.owner)
            if not self.busy:
                batch, again_s = self.batcher.next_batch(now_s)
                if batch:
                    self.busy = True
                    seconds = self.fixed_s + self.per_row_s * len(batch)
                    self.batches.append(len(batch))
                    self.at(now_s + seconds, "done", (batch, seconds))
                elif again_s < math.inf:
                    self.at(max(again_s, now_s), "tick", None)
        self.now_s = now_s
        return num_answers / now_s


def test_one_caller_at_a_time_never_waits() -> None:
    case = Closed(1, turn_s=0.0005)
    case.run(300)
    assert max(case.latencies_s) == pytest.approx(0.0051)


@pytest.mark.parametrize("callers", [2, 8, 31, 32])
def test_a_closed_loop_of_callers_comes_together_in_one_batch(callers: int) -> None:
    case = Closed(callers, turn_s=0.0005)
    case.run(callers * 130)
    late = case.batches[-60:]
    # Everybody in every batch: the best that any policy can do here.
    assert sum(late) / len(late) >= 0.95 * callers


def test_the_rate_of_a_closed_loop_is_near_its_bound_where_timers_would_halve_it() -> None:
    # Eight callers, 0.5 ms until they ask again: a cycle is 5.8 ms of model and at most 0.5 of waiting.
    bound = 8 / (0.0058 + 0.0005)
    assert Closed(8, turn_s=0.0005).run(4000) >= 0.95 * bound
    # Two alternating halves, which never waiting would give, reach 4 / 5.4 ms = 740 per second.
    assert Closed(8, turn_s=0.0005, max_delay_s=0.0).run(4000) < 0.75 * bound


def test_callers_that_leave_are_not_waited_for_long() -> None:
    case = Closed(16, turn_s=0.0005)
    case.run(1000)
    case.events = [event for event in case.events if not (event[2] == "ask" and event[3] != 0)]
    # Only caller 0 is left (others are still in the batch that runs and then fall silent).
    before = len(case.latencies_s)
    original = case.at

    def only_first(when_s: float, what: str, about: object) -> None:
        if what != "ask" or about == 0:
            original(when_s, what, about)

    case.at = only_first  # type: ignore[method-assign]
    case.run(before + 80)
    assert max(case.latencies_s[before + 40 :]) <= 0.0051 + 1e-9


def test_waiting_never_exceeds_max_delay() -> None:
    case = Closed(8, turn_s=0.004, max_delay_s=0.001)
    case.run(2000)
    # At most the batch before (all 8 rows), the delay, and the own batch.
    assert max(case.latencies_s) <= 0.0058 + 0.001 + 0.0058 + 1e-9


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 3), st.sampled_from(["add", "take", "remove", "expire"])),
        max_size=60,
    ),
    st.integers(9, 20),
)
def test_nothing_is_lost_nothing_runs_twice_and_no_batch_is_too_large(
    steps: list[tuple[int, int, str]], max_rows: int
) -> None:
    b = batcher(max_rows=max_rows, max_delay_s=0.0)
    now_s, names = 0.0, 0
    waiting: dict[int, Item] = {}
    ended: list[int] = []
    for rows, group, what in steps:
        now_s += 0.001
        if what == "add":
            names += 1
            held = item(names, rows, group=group, deadline_s=now_s + rows * 0.004)
            waiting[names] = held
            b.add(held, now_s)
        elif what == "take":
            batch = b.next_batch(now_s)[0]
            assert sum(held.rows for held in batch) <= max_rows
            assert len({held.group for held in batch}) <= 1
            ended += [held.owner for held in batch]
        elif what == "remove" and waiting:
            held = waiting[max(waiting)]
            if b.remove(held):
                ended.append(held.owner)
        elif what == "expire":
            ended += owners(b.expire(now_s))  # type: ignore[arg-type]
        for name in ended:
            waiting.pop(name, None)
        assert b.queued_rows == sum(held.rows for held in waiting.values())
    while batch := b.next_batch(now_s)[0]:
        ended += [held.owner for held in batch]
    assert sorted(ended) == list(range(1, names + 1))
