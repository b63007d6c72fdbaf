"""How one rank projects a matrix with error feedback: compiled loops, compiled loops around BLAS, or plain torch.

All three make the same sums in different order. A projection is one rank's own contribution to a sum, so ranks of one
group may take different ways; the averaged gradient and the factors are made of the sum alone, in ``lowrank``.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, Protocol

import torch
from torch import Tensor

from wirespeed.train.codecs.kernels import Kernels

FUSED_RANKS = 8
"""Up to this many columns one compiled pass beats BLAS (25 MB, rank 4: 8 ms against 11.5; rank 16: 15 against 14)."""


class Project(Protocol):
    """Project ``matrix + rest`` (rows, columns), and leave in ``rest`` what the projection leaves out.

    ``left`` is P (rows, r) and ``right`` Qᵀ (r, columns). With ``is_rows`` P is known and ``right`` becomes
    ``Pᵀ (matrix + rest)``, else Q is known and ``left`` becomes ``(matrix + rest) Q``. Where the sum is not finite the
    projection holds nan or inf and ``rest`` stays what it was, to rounding. ``matrix`` may be overwritten.
    """

    def __call__(self, matrix: Tensor, rest: Tensor, left: Tensor, right: Tensor, *, is_rows: bool) -> None:
        """Do it."""
        ...


def projection(kernels: Kernels, matrix_rank: int) -> Project:
    """The fastest way with these kernels."""
    if kernels.name != "numba":
        return project_plain
    return _Fused() if matrix_rank <= FUSED_RANKS else _Added()


def project_plain(matrix: Tensor, rest: Tensor, left: Tensor, right: Tensor, *, is_rows: bool) -> None:
    """In torch, on any device."""
    matrix.add_(rest)
    if is_rows:
        torch.mm(left.t(), matrix, out=right)
    else:
        torch.mm(matrix, right.t(), out=left)
    sent = right if is_rows else left
    if matrix.is_cuda:  # without asking the device: the answer would stall the host
        torch.where(torch.isfinite(sent).all(), torch.addmm(matrix, left, right, alpha=-1), rest, out=rest)
    elif math.isfinite(torch.linalg.vector_norm(sent, ord=math.inf)):
        torch.addmm(matrix, left, right, alpha=-1, out=rest)


class _Compiled:
    """Holds the compiled loops, which are made when first wanted."""

    def __init__(self) -> None:
        self._loops: Any = importlib.import_module("wirespeed.train.codecs.lowrank_compiled")


class _Fused(_Compiled):
    """Everything in one compiled pass."""

    def __call__(self, matrix: Tensor, rest: Tensor, left: Tensor, right: Tensor, *, is_rows: bool) -> None:
        known, sent = (left, right) if is_rows else (right, left)
        run = self._loops.project_on_rows if is_rows else self._loops.project_on_columns
        done = run(matrix.numpy(), rest.numpy(), known.numpy(), sent.numpy())
        if done == matrix.shape[1 if is_rows else 0]:
            return
        if is_rows:
            rest[:, :done] += torch.mm(left, right[:, :done]) - matrix[:, :done]
        else:
            rest[:done] += torch.mm(left[:done], right) - matrix[:done]
        sent.fill_(math.nan)


class _Added(_Compiled):
    """The residual is added by a compiled loop, which sees what is not finite in passing; BLAS does the products."""

    def __call__(self, matrix: Tensor, rest: Tensor, left: Tensor, right: Tensor, *, is_rows: bool) -> None:
        done = self._loops.add_finite(matrix.numpy(), rest.numpy())
        if done < matrix.shape[0]:
            rest[:done] -= matrix[:done]
            (right if is_rows else left).fill_(math.nan)
            return
        if is_rows:
            torch.mm(left.t(), rest, out=right)
        else:
            torch.mm(rest, right.t(), out=left)
        rest.addmm_(left, right, alpha=-1)
