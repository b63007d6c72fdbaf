"""Batch jobs scattered over workers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wirespeed.errors import UsageError
from wirespeed.sim.scatter import ScatterJob, predict_scatter

JOB = ScatterJob(num_items=1000, in_bytes=100e3, out_bytes=10e3, item_s=2e-3)


def test_one_after_another_is_the_sum_of_its_parts():
    found = predict_scatter(JOB, root_bytes_per_s=125e6, worker_bytes_per_s=(125e6,) * 4, is_overlapped=False)
    # 100 MB out at 125 MB/s, 250 items each of 2 ms, 10 MB in.
    assert found.total_s == pytest.approx(0.8 + 0.5 + 0.08)
    assert found.binding == "root NIC, sending"


def test_chunks_hide_compute_and_results_behind_sending():
    found = predict_scatter(JOB, root_bytes_per_s=125e6, worker_bytes_per_s=(125e6,) * 4)
    assert found.total_s == pytest.approx(0.8, rel=0.02)
    assert sum(found.parts_s.values()) == pytest.approx(found.total_s, rel=1e-6)


def test_slow_workers_get_fewer_items():
    even = predict_scatter(
        ScatterJob(num_items=300, in_bytes=1, out_bytes=1, item_s=1e-2), root_bytes_per_s=1e9,
        worker_bytes_per_s=(1e9,) * 2, worker_speed=(2.0, 1.0),
    )  # fmt: skip
    # 200 items at twice the speed and 100 at one: both take a second.
    assert even.total_s == pytest.approx(1.0, rel=0.02)
    assert even.binding == "compute"


def test_a_gather_of_large_results_is_bound_by_the_root():
    job = ScatterJob(num_items=100, in_bytes=1e3, out_bytes=1e6, item_s=1e-5)
    found = predict_scatter(job, root_bytes_per_s=125e6, worker_bytes_per_s=(125e6,) * 8, gather_share=0.5)
    assert found.binding == "root NIC, receiving"
    assert found.total_s >= 100e6 / (125e6 * 0.5)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 200),
    st.floats(1, 1e6),
    st.floats(0, 1e6),
    st.floats(0, 1e-2),
    st.lists(st.floats(1e7, 1e9), min_size=1, max_size=5),
    st.booleans(),
)
def test_no_job_beats_its_bound_and_overlap_never_hurts(items, in_bytes, out_bytes, item_s, rates, is_chunked):
    job = ScatterJob(num_items=items, in_bytes=in_bytes, out_bytes=out_bytes, item_s=item_s)
    size = 1 if is_chunked else None
    plain, overlapped = (
        predict_scatter(job, root_bytes_per_s=1e8, worker_bytes_per_s=rates, is_overlapped=way, chunk_items=size)
        for way in (False, True)
    )
    assert overlapped.total_s <= plain.total_s * (1 + 1e-9)
    assert overlapped.total_s >= max(items * in_bytes / 1e8, items * out_bytes / 1e8) * (1 - 1e-9)


@pytest.mark.parametrize(
    "wrong", [{"worker_bytes_per_s": ()}, {"worker_bytes_per_s": (0.0,)}, {"gather_share": 0.0}, {"chunk_items": 0}]
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(UsageError):
        predict_scatter(JOB, **{"root_bytes_per_s": 1e8, "worker_bytes_per_s": (1e8,), **wrong})
