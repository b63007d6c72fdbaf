import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirespeed.errors import DataError
from wirespeed.measure.spans import clip, intersect, shared, subtract, total, union
from wirespeed.measure.timeline import collective_of, step_spans

times = st.integers(0, 60)
some = st.lists(st.tuples(times, times).map(lambda ends: (float(min(ends)), float(max(ends)))), max_size=12)


def covered(spans) -> set[int]:
    """Unit cells that spans with whole ends cover."""
    return {cell for begin, end in spans for cell in range(int(begin), int(end))}


def test_union_joins_spans_that_overlap_or_touch_or_lie_within_each_other():
    assert union([(5, 6), (0, 4), (1, 2), (4, 5), (8, 9)]).tolist() == [[0, 6], [8, 9]]


@given(some)
def test_union_covers_what_its_spans_cover_and_is_disjoint(spans):
    joined = union(spans)
    assert covered(joined) == covered(spans)
    assert total(joined) == len(covered(spans))
    assert (joined[1:, 0] >= joined[:-1, 1]).all()


@given(some, some)
def test_intersection_and_difference_are_those_of_sets(one, other):
    a, b = union(one), union(other)
    assert covered(intersect(a, b)) == covered(one) & covered(other)
    assert covered(subtract(a, b)) == covered(one) - covered(other)
    assert total(intersect(a, b)) + total(subtract(a, b)) == pytest.approx(total(a))


@given(some, some)
def test_what_windows_share_with_spans_is_what_lies_in_both(windows, spans):
    held = union(spans)
    together = shared(np.array(windows, dtype=float).reshape(-1, 2), held)
    assert together.tolist() == pytest.approx([len(covered([window]) & covered(spans)) for window in windows])


def test_a_window_cuts_spans_at_its_ends():
    assert clip(union([(0, 4), (6, 9)]), 3, 7).tolist() == [[3, 4], [6, 7]]


@pytest.mark.parametrize(
    ("work_end_s", "end_s"),
    [
        (2.4, 2.4),  # the device runs on after the range that launched its work
        (1.0, 1.5),  # it was done before
        (9.0, 1.5),  # work of something else, much later
    ],
)
def test_the_last_step_ends_with_the_work_that_it_launched(work_end_s, end_s):
    assert step_spans([(0.0, 0.3), (1.0, 1.5)], work_end_s) == ((0.0, 1.0), (1.0, end_s))


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("_allgather_base", "all_gather"),
        ("all_to_allv", "all_to_all"),
        ("ncclDevKernel_Generic", "other"),
    ],
)
def test_names_of_kernels_and_operations_tell_the_collective(name, collective):
    assert collective_of(name) == collective


@pytest.mark.parametrize("spans", [[(2.0, 1.0)], [(0.0, np.nan)], [(np.inf, np.inf)]])
def test_an_impossible_event_is_an_error(spans):
    with pytest.raises(DataError, match="ends before it begins"):
        union(spans)
