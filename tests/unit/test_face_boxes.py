"""The arithmetic of face boxes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirespeed.serve.backends.face_boxes import candidates, keep_best, make_square, move, scales_of


def boxes(*rows: tuple[float, float, float, float]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_the_best_of_overlapping_boxes_is_kept() -> None:
    # 10 x 10 each; the second shares 9 x 10 = 90 of 110 with the first, the third nothing.
    held = boxes((0, 0, 9, 9), (1, 0, 10, 9), (50, 50, 59, 59))
    assert keep_best(held, np.array([0.8, 0.9, 0.5], np.float32), 0.5).tolist() == [1, 2]
    assert keep_best(held, np.array([0.8, 0.9, 0.5], np.float32), 90 / 110).tolist() == [1, 0, 2]


def test_over_the_smaller_a_box_inside_another_is_dropped() -> None:
    held = boxes((0, 0, 99, 99), (10, 10, 19, 19))
    scores = np.array([0.9, 0.8], np.float32)
    assert keep_best(held, scores, 0.7).tolist() == [0, 1]  # 100 of 10000 in common
    assert keep_best(held, scores, 0.7, over_smaller=True).tolist() == [0]


def test_sides_move_by_shares_of_the_size_and_squares_keep_the_middle() -> None:
    assert move(boxes((10, 20, 19, 39)), boxes((0.1, 0.1, -0.1, 0.5))).tolist() == [[11, 22, 18, 49]]
    assert make_square(boxes((10, 20, 20, 40))).tolist() == [[5, 20, 25, 40]]


def test_candidates_lie_where_the_map_says() -> None:
    probabilities = np.zeros((3, 4), np.float32)
    probabilities[2, 1] = 0.9
    by = np.arange(48, dtype=np.float32).reshape(3, 4, 4)
    found, scores, moved = candidates(probabilities, by, 0.5, 0.6)
    # x = 1, y = 2: (2 * 1 + 1) / 0.5 to (2 * 1 + 12) / 0.5, and so on.
    assert found.tolist() == [[6, 10, 28, 32]]
    assert scores.tolist() == [pytest.approx(0.9)]
    assert moved.tolist() == [[36, 37, 38, 39]]


def test_scales_end_where_the_window_no_longer_fits() -> None:
    # 12 / 40 = 0.3: a side of 100 is 30 long, then 30 * 0.709 = 21.27, 15.08, 10.69.
    assert scales_of(100, 200, min_face=40) == pytest.approx([0.3, 0.3 * 0.709, 0.3 * 0.709**2])
    assert scales_of(30, 30, min_face=40) == []


@given(
    st.lists(st.tuples(*[st.integers(0, 60)] * 4, st.integers(1, 100)), min_size=1, max_size=30), st.floats(0.1, 0.9)
)
def test_what_is_kept_does_not_overlap_and_what_is_dropped_does(rows: list[tuple[int, ...]], threshold: float) -> None:
    held = np.array([(x, y, x + w, y + h) for x, y, w, h, _ in rows], np.float32)
    scores = np.array([row[4] for row in rows], np.float32)
    kept = keep_best(held, scores, threshold).tolist()

    def overlap(a: int, b: int) -> float:
        size = np.minimum(held[a, 2:], held[b, 2:]) - np.maximum(held[a, :2], held[b, :2]) + 1
        shared = float(np.prod(np.maximum(size, 0)))
        areas = [float(np.prod(held[one, 2:] - held[one, :2] + 1)) for one in (a, b)]
        return shared / (sum(areas) - shared)

    for place, one in enumerate(kept):
        assert all(overlap(one, other) <= threshold + 1e-6 for other in kept[:place])
    for one in set(range(len(rows))) - set(kept):
        assert any(overlap(one, other) >= threshold - 1e-6 and scores[other] >= scores[one] for other in kept)
