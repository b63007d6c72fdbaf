"""Boxes of a face detector as arrays: suppression of doubles, regression, squares. Arithmetic only.

A box is a row x1, y1, x2, y2 in pixels, x2 and y2 included, as the cascade's networks were trained on (Zhang et al.,
"Joint Face Detection and Alignment using Multi-task Cascaded Convolutional Networks", 2016).
"""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Places = np.ndarray[Any, np.dtype[np.int64]]


def keep_best(boxes: Floats, scores: Floats, threshold: float, *, over_smaller: bool = False) -> Places:
    """Places of the boxes that no better one overlaps by more than ``threshold``, best first; ties in order.

    The overlap is that over both together, or with ``over_smaller`` over the smaller of the two.
    """
    areas = (boxes[:, 2] - boxes[:, 0] + 1) * (boxes[:, 3] - boxes[:, 1] + 1)
    order = np.argsort(-scores, kind="stable")
    kept = []
    while order.size:
        best, rest = order[0], order[1:]
        kept.append(best)
        left_top = np.maximum(boxes[best, :2], boxes[rest, :2])
        right_bottom = np.minimum(boxes[best, 2:], boxes[rest, 2:])
        shared = np.prod(np.maximum(0, right_bottom - left_top + 1), axis=1)
        whole = np.minimum(areas[best], areas[rest]) if over_smaller else areas[best] + areas[rest] - shared
        order = rest[shared <= threshold * whole]
    return np.array(kept, np.int64)


def move(boxes: Floats, by: Floats) -> Floats:
    """Boxes with their sides moved by shares of their width and height."""
    sizes = boxes[:, 2:] - boxes[:, :2] + 1
    return (boxes + by * np.concatenate((sizes, sizes), axis=1)).astype(np.float32)


def make_square(boxes: Floats) -> Floats:
    """Squares of the longer side around the same middle."""
    sizes = boxes[:, 2:] - boxes[:, :2]
    side = sizes.max(axis=1, keepdims=True)
    corner = boxes[:, :2] + (sizes - side) / 2
    return np.concatenate((corner, corner + side), axis=1).astype(np.float32)


def scales_of(width: int, height: int, *, min_face: float, factor: float = 0.709, window: int = 12) -> list[float]:
    """By what to shrink an image so that faces of ``min_face`` pixels and larger fill the first network's window."""
    scale = window / min_face
    found = []
    while min(width, height) * scale >= window:
        found.append(scale)
        scale *= factor
    return found


def candidates(
    probabilities: Floats, by: Floats, scale: float, threshold: float, *, stride: int = 2, window: int = 12
) -> tuple[Floats, Floats, Floats]:
    """Boxes, scores and regressions where the first network's map ([y, x]) reaches the threshold."""
    y, x = np.nonzero(probabilities >= threshold)
    corner = np.stack((x, y), axis=1) * stride
    boxes = np.concatenate((np.trunc((corner + 1) / scale), np.trunc((corner + window) / scale)), axis=1)
    return boxes.astype(np.float32), probabilities[y, x].astype(np.float32), by[y, x].astype(np.float32)
