"""Compiled CPU loops of low rank: the error feedback of a matrix in one pass over memory.

Each adds the residual to the gradient, projects the sum onto the known factor, takes the projection's own
approximation away and leaves the rest as the residual, while the row (or the block of columns) is in the core's cache.
BLAS would need a pass each, and is slow for products as narrow as these. Sums may be taken in any order
(``reassoc``): a projection is one rank's own, so nothing needs its bytes to equal another kernel's. inf and nan keep
their meaning, since no other fast-math flag is set.

A kernel ends where it meets what is not finite, before it touches the residual there, and gives the number of rows or
columns that it has finished: as many as the matrix has where all went well.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from wirespeed.train.codecs.compiling import jit

BLOCK_COLUMNS = 512
"""Columns taken at once where P is known. Fewer would stay in the cache from one loop to the next, but rows of a
matrix lie whole powers of two apart and push each other out: 128 columns took 1.5 times as long."""


_loop = functools.partial(jit, fastmath=("reassoc", "contract"))


@_loop
def add_finite(grad: Any, residual: Any) -> Any:
    """``residual += grad``, row by row. Both C-contiguous fp32."""
    num_rows, num_columns = grad.shape
    for row in range(num_rows):
        gradients, rest = grad[row], residual[row]
        check = np.float32(0)
        for j in range(num_columns):
            check += (gradients[j] + rest[j]) * np.float32(0)
        if check != 0:  # nan: 0 times inf, or nan itself
            return row
        for j in range(num_columns):
            rest[j] += gradients[j]
    return num_rows


@_loop
def project_on_columns(grad: Any, residual: Any, known: Any, sent: Any) -> Any:
    """``sent (rows, r) = M Q``, ``residual = M - sent Qᵀ`` for ``known`` Qᵀ (r, columns). All C-contiguous fp32."""
    num_rows, num_columns = grad.shape
    matrix_rank = known.shape[0]
    paired = matrix_rank - matrix_rank % 4
    total = np.empty(num_columns, np.float32)
    for row in range(num_rows):
        gradients, rest = grad[row], residual[row]
        check = np.float32(0)
        for j in range(num_columns):
            total[j] = gradients[j] + rest[j]
            check += total[j] * np.float32(0)
        if check != 0:  # nan: 0 times inf, or nan itself
            return row
        for k in range(0, paired, 4):
            q0, q1, q2, q3 = known[k], known[k + 1], known[k + 2], known[k + 3]
            sum0 = sum1 = sum2 = sum3 = np.float32(0)
            for j in range(num_columns):
                value = total[j]
                sum0 += value * q0[j]
                sum1 += value * q1[j]
                sum2 += value * q2[j]
                sum3 += value * q3[j]
            sent[row, k], sent[row, k + 1], sent[row, k + 2], sent[row, k + 3] = sum0, sum1, sum2, sum3
            for j in range(num_columns):
                total[j] -= sum0 * q0[j] + sum1 * q1[j] + sum2 * q2[j] + sum3 * q3[j]
        for k in range(paired, matrix_rank):
            q0 = known[k]
            sum0 = np.float32(0)
            for j in range(num_columns):
                sum0 += total[j] * q0[j]
            sent[row, k] = sum0
            for j in range(num_columns):
                total[j] -= sum0 * q0[j]
        for j in range(num_columns):
            rest[j] = total[j]
    return num_rows


@_loop
def project_on_rows(grad: Any, residual: Any, known: Any, sent: Any) -> Any:  # noqa: PLR0912 - numba inlines no views
    """``sent (r, columns) = Pᵀ M``, ``residual = M - P sent`` for ``known`` P (rows, r). All C-contiguous fp32."""
    num_rows, num_columns = grad.shape
    matrix_rank = known.shape[1]
    total = np.empty((4, BLOCK_COLUMNS), np.float32)
    projected = np.empty((matrix_rank, BLOCK_COLUMNS), np.float32)
    for first in range(0, num_columns, BLOCK_COLUMNS):
        width = min(BLOCK_COLUMNS, num_columns - first)
        end = first + width
        projected[:, :] = np.float32(0)
        for top in range(0, num_rows, 4):
            count = min(4, num_rows - top)
            check = np.float32(0)
            for i in range(count):
                gradients, rest, into = grad[top + i][first:end], residual[top + i][first:end], total[i]
                for j in range(width):
                    into[j] = gradients[j] + rest[j]
                    check += into[j] * np.float32(0)
            if check != 0:  # nan: 0 times inf, or nan itself
                for row in range(top):
                    gradients, rest = grad[row][first:end], residual[row][first:end]
                    for j in range(width):
                        rest[j] -= gradients[j]
                return first
            for i in range(count):
                rest, into = residual[top + i][first:end], total[i]
                for j in range(width):
                    rest[j] = into[j]
            if count == 4:
                p, m0, m1, m2, m3 = known[top : top + 4], total[0], total[1], total[2], total[3]
                for k in range(matrix_rank):
                    p0, p1, p2, p3 = p[0, k], p[1, k], p[2, k], p[3, k]
                    sums = projected[k]
                    for j in range(width):
                        sums[j] += p0 * m0[j] + p1 * m1[j] + p2 * m2[j] + p3 * m3[j]
            else:
                for i in range(count):
                    for k in range(matrix_rank):
                        p0, m0, sums = known[top + i, k], total[i], projected[k]
                        for j in range(width):
                            sums[j] += p0 * m0[j]
        paired = matrix_rank - matrix_rank % 4
        for row in range(num_rows):
            rest = residual[row][first:end]
            for k in range(0, paired, 4):
                p0, p1, p2, p3 = known[row, k], known[row, k + 1], known[row, k + 2], known[row, k + 3]
                s0, s1, s2, s3 = projected[k], projected[k + 1], projected[k + 2], projected[k + 3]
                for j in range(width):
                    rest[j] -= p0 * s0[j] + p1 * s1[j] + p2 * s2[j] + p3 * s3[j]
            for k in range(paired, matrix_rank):
                p0, s0 = known[row, k], projected[k]
                for j in range(width):
                    rest[j] -= p0 * s0[j]
        sent[:, first:end] = projected[:, :width]
    return num_columns
