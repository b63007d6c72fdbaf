"""Which inputs go where: windows, chunks, the tail, lost nodes and copies, on a clock of the test's own."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirespeed.errors import UsageError
from wirespeed.infer.schedule import Bounds, Chunk, Schedule


def ready(num: int, *, size: int = 1000, nodes: tuple[str, ...] = ("a", "b"), bounds: Bounds | None = None) -> Schedule:
    schedule = Schedule(num, bounds=bounds)
    schedule.set_nodes(nodes)
    for index in range(num):
        schedule.offer(index, size)
    return schedule


def next_of(schedule: Schedule, node: str, now_s: float = 0.0) -> Chunk:
    chunk = schedule.next_chunk(node, now_s)
    assert chunk is not None
    return chunk


def test_chunks_are_bounded_by_rows_and_bytes_and_keep_the_order() -> None:
    schedule = ready(1000, size=1000, bounds=Bounds(max_rows=8))
    assert next_of(schedule, "a").indices == list(range(8))
    assert next_of(schedule, "b").indices == list(range(8, 16))
    schedule = ready(1000, size=100_000, bounds=Bounds(chunk_bytes=256_000))
    assert next_of(schedule, "a").indices == [0, 1]


def test_an_input_larger_than_a_chunk_goes_alone() -> None:
    schedule = ready(100, size=10**7)
    assert next_of(schedule, "a").indices == [0]


def test_a_new_node_gets_two_chunks_or_a_few_rows_and_then_has_to_finish_one() -> None:
    schedule = ready(1000, bounds=Bounds(max_rows=3))
    assert [len(next_of(schedule, "a").indices) for _ in range(3)] == [3, 3, 3]  # 8 rows and the chunk that they end in
    assert schedule.next_chunk("a", 0.0) is None
    schedule = ready(1000)
    first = next_of(schedule, "a")
    next_of(schedule, "a")
    assert schedule.next_chunk("a", 0.0) is None
    schedule.finished(first, 0.1, has_answer=True)
    assert schedule.next_chunk("a", 0.1) is not None


def test_the_tail_is_cut_finer_so_that_all_nodes_end_together() -> None:
    # 10 left for 2 nodes: half a fair share is ceil(10 / 4) = 3, then ceil(7 / 4) = 2.
    schedule = ready(10)
    assert [len(next_of(schedule, node).indices) for node in ("a", "b")] == [3, 2]


def test_a_window_follows_the_nodes_speed() -> None:
    bounds = Bounds(max_rows=4, horizon_s=0.1)
    windows = {}
    for name, row_s in (("slow", 0.02), ("fast", 0.001)):
        schedule = ready(5000, nodes=(name,), bounds=bounds)
        now_s, under_way = 0.0, []
        for _ in range(40):
            while (chunk := schedule.next_chunk(name, now_s)) is not None:
                under_way.append(chunk)
            first = under_way.pop(0)
            now_s += row_s * len(first.indices)
            schedule.finished(first, now_s, has_answer=True)
        windows[name] = sum(len(chunk.indices) for chunk in under_way)
    # 50 rows/s over 0.1 s are 5 rows, in chunks of int(50 * 0.05) = 2; 1000 rows/s are 100.
    assert 2 <= windows["slow"] <= 6
    assert 90 <= windows["fast"] <= 104


def test_inputs_of_a_lost_node_go_out_again_each_alone() -> None:
    schedule = ready(100, bounds=Bounds(max_rows=4))
    chunk = next_of(schedule, "a")
    schedule.finished(chunk, 1.0, has_answer=False)
    for index in chunk.indices:
        schedule.put_back(index)
    schedule.set_nodes(["b"])
    assert [next_of(schedule, "b", 1.0).indices for _ in range(2)] == [[0], [1]]


def test_a_suspect_gets_a_whole_node_to_itself() -> None:
    schedule = ready(100, bounds=Bounds(max_rows=4))
    lost, kept = next_of(schedule, "a"), next_of(schedule, "b")
    schedule.finished(lost, 1.0, has_answer=False)
    for index in lost.indices[:2]:
        schedule.put_back(index, is_suspect=True)
    schedule.set_nodes(["b", "c"])
    assert schedule.next_chunk("b", 1.0) is None  # it has something else
    alone = next_of(schedule, "c", 1.0)
    assert (alone.indices, alone.is_solitary) == ([0], True)
    assert schedule.next_chunk("c", 1.0) is None  # and gets nothing else
    schedule.finished(kept, 1.1, has_answer=True)
    assert next_of(schedule, "b", 1.1).indices == [1]
    schedule.settle(0)
    schedule.finished(alone, 1.2, has_answer=True)
    follower = next_of(schedule, "c", 1.2)
    assert (len(follower.indices), follower.is_solitary) == (4, False)


def test_an_idle_node_gets_a_copy_of_what_takes_much_longer_than_usual() -> None:
    schedule = ready(8, bounds=Bounds(max_rows=4, copy_after_s=0.25, copy_factor=3.0))
    slow = next_of(schedule, "a")  # ceil(8 / 4) = 2 rows
    assert slow.indices == [0, 1]
    now_s = 0.0
    while (chunk := schedule.next_chunk("b", now_s)) is not None:
        assert not chunk.is_copy
        now_s += 0.01
        for index in chunk.indices:
            assert schedule.settle(index)
        schedule.finished(chunk, now_s, has_answer=True)
    assert schedule.next_chunk("b", 0.2) is None  # not yet
    copy = next_of(schedule, "b", 0.3)
    assert (copy.indices, copy.is_copy, schedule.num_copies) == ([0, 1], True, 2)
    assert schedule.next_chunk("b", 9.0) is None  # once is enough
    assert [schedule.settle(index) for index in copy.indices] == [True, True]
    assert [schedule.settle(index) for index in slow.indices] == [False, False]
    schedule.finished(copy, 0.4, has_answer=True)
    schedule.finished(slow, 0.5, has_answer=True)
    assert schedule.num_open == 0


def test_a_copy_keeps_an_input_from_being_sent_a_third_time() -> None:
    schedule = ready(2, bounds=Bounds(max_rows=4))
    slow = next_of(schedule, "a")
    other = next_of(schedule, "b")
    schedule.settle(other.indices[0])
    schedule.finished(other, 0.01, has_answer=True)
    copy = next_of(schedule, "b", 5.0)
    schedule.finished(slow, 6.0, has_answer=False)  # its node was lost
    schedule.put_back(slow.indices[0])
    assert schedule.next_chunk("a", 6.0) is None
    schedule.finished(copy, 6.1, has_answer=False)
    schedule.put_back(copy.indices[0])
    assert next_of(schedule, "a", 6.2).indices == slow.indices


def test_a_full_node_is_left_alone_for_a_while() -> None:
    schedule = ready(100)
    schedule.pause("a", 1.0)
    assert schedule.next_chunk("a", 0.9) is None
    assert schedule.next_chunk("a", 1.0) is not None


def test_bounds_of_zero_are_refused() -> None:
    with pytest.raises(UsageError, match="chunk_bytes"):
        Bounds(chunk_bytes=0)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 120))
def test_every_input_is_settled_once_whatever_nodes_do(seed: int, num_nodes: int, num_items: int) -> None:
    """Nodes answer late, lose chunks, vanish and return at random; one always comes back."""
    rng = random.Random(seed)
    nodes = [f"n{i}" for i in range(num_nodes)]
    schedule = Schedule(num_items, bounds=Bounds(max_rows=5))
    offered = settled = 0
    now_s = 0.0
    events: list[tuple[float, int, Chunk]] = []
    for step in range(100_000):
        if settled == num_items:
            break
        while offered < num_items and rng.random() < 0.9:
            schedule.offer(offered, rng.randrange(1, 200_000))
            offered += 1
        alive = [node for node in nodes if rng.random() < 0.9] or [nodes[0]]
        schedule.set_nodes(alive)
        for node in alive:
            while (chunk := schedule.next_chunk(node, now_s)) is not None:
                heapq.heappush(events, (now_s + rng.expovariate(20), step * 1000 + len(events), chunk))
        if not events:
            now_s += 0.1
            continue
        now_s, _, chunk = heapq.heappop(events)
        has_answer = rng.random() < 0.8
        schedule.finished(chunk, now_s, has_answer=has_answer)
        for index in chunk.indices:
            if has_answer:
                settled += schedule.settle(index)
            else:
                schedule.put_back(index, is_suspect=rng.random() < 0.5)
    assert settled == num_items
    assert schedule.num_open == 0


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 80), st.sets(st.integers(0, 79), max_size=4))
def test_whatever_dies_in_solitude_is_what_kills_nodes(
    seed: int, num_nodes: int, num_items: int, killers: set[int]
) -> None:
    """Nodes that get a killer lose all that they have, are reborn, and answer everything else in any order."""
    rng = random.Random(seed)
    nodes = [f"n{i}" for i in range(num_nodes)]
    schedule = ready(num_items, nodes=tuple(nodes), bounds=Bounds(max_rows=5))
    held: dict[str, list[Chunk]] = {node: [] for node in nodes}
    blamed = set()
    for step in range(10_000):
        if not schedule.num_open:
            break
        for node in nodes:
            while (chunk := schedule.next_chunk(node, float(step))) is not None:
                held[node].append(chunk)
        node = rng.choice([node for node in nodes if held[node]])
        if killers & {index for chunk in held[node] for index in chunk.indices} and rng.random() < 0.5:
            lost, held[node] = held[node], []
            for chunk in lost:
                schedule.finished(chunk, float(step), has_answer=False)
                for index in chunk.indices:
                    if chunk.is_solitary:
                        blamed.add(index)
                        schedule.settle(index)
                    schedule.put_back(index, is_suspect=True)
        else:
            answered = [chunk for chunk in held[node] if not killers & set(chunk.indices)]
            if answered:
                chunk = rng.choice(answered)
                held[node].remove(chunk)
                schedule.finished(chunk, float(step), has_answer=True)
                for index in chunk.indices:
                    schedule.settle(index)
    assert blamed == {killer for killer in killers if killer < num_items}


def test_the_first_to_answer_does_not_get_all_the_rest_of_a_short_job() -> None:
    schedule = ready(40, nodes=("a", "b", "c", "d"), bounds=Bounds(max_rows=4, first_window_rows=8))
    held: dict[str, list[Chunk]] = {name: [] for name in "abcd"}
    for name in "abcd":
        while (chunk := schedule.next_chunk(name, 0.0)) is not None:
            held[name].append(chunk)
    # 4 x 8 of 40 are out. "a" is done with its 8 after 40 ms, before anyone else has answered at all.
    for chunk in held["a"]:
        schedule.finished(chunk, 0.04, has_answer=True)
    taken = 0
    while (chunk := schedule.next_chunk("a", 0.04)) is not None:
        taken += len(chunk.indices)
    # The others hold 8 each. As fast as "a", they end with it once it has 8 again; one more chunk is of one input.
    assert 0 < taken <= 9
