"""lowrank: of every matrix M send M Q in one step and Mᵀ P in the next; one all_reduce, error feedback.

The alternating form of PowerSGD (ACP-SGD, arXiv 2306.08881). A matrix is approximated by P Qᵀ with ``matrix_rank``
columns each. In a step one of the two factors is known to all ranks and has orthonormal columns; each rank projects its
gradient plus residual onto it, the projections are summed, and their mean gives both the averaged gradient and, made
orthonormal in fp32, the known factor of the next step. So a bucket costs one all_reduce of a few rows and columns,
which keeps DDP's overlap and needs no second hop. The matrices of a bucket take such turns that the messages of two
steps are of like size. Vectors, and matrices too small to gain, are summed as they are in the same message.

What a projection leaves out stays in the residual. A matrix that holds inf or nan on any rank comes out with nan on
every rank; its residual stays as it was (to rounding) and its factor starts anew. All ranks must hold equal factors:
they are made of the all_reduce's result, which gloo and NCCL give to every rank in equal bytes, by torch's products and
QR; on processors of unlike make their last bits can differ, and parameters with them, as under PowerSGD.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wirespeed.errors import UsageError
from wirespeed.spec.payloads import Shapes, lowrank_matrix, square_shape
from wirespeed.spec.strategy import Strategy
from wirespeed.train.codecs.base import Message, average_alone
from wirespeed.train.codecs.kernels import KernelChoice, kernels_for
from wirespeed.train.codecs.lowrank_projection import Project, projection

_ROWS, _COLUMNS = 1.0, 2.0
"""Which factor a matrix's state holds: P, one row per row of the matrix, or Q, one per column. 0: none yet."""


@dataclass
class _Factor:
    """The known factor of one matrix, in the bucket's state: ``[side][P: rows x r or Q: columns x r]``."""

    rows: int
    columns: int
    matrix_rank: int
    state_s: Tensor
    side: float
    """A copy of the state's first number, so that no step waits for the device to read it."""
    starts: tuple[Tensor, Tensor]
    """Orthonormal P and Qᵀ to begin with, the same on all ranks."""

    @property
    def known(self) -> Tensor:
        """P (rows, r), or Qᵀ (r, columns)."""
        return self._room(self.side)

    def set_known(self, side: float, mean: Tensor) -> None:
        """Take the mean projection, made orthonormal, as the factor of the next step."""
        is_rows = side == _ROWS
        mean = torch.where(torch.isfinite(mean).all(), mean, self.starts[0 if is_rows else 1])
        self.side = side
        self.state_s[0] = side
        if is_rows:
            self._room(side).copy_(torch.linalg.qr(mean).Q)
        else:
            self._room(side).copy_(torch.linalg.qr(mean.t()).Q.t())

    def _room(self, side: float) -> Tensor:
        r = self.matrix_rank
        if side == _ROWS:
            return self.state_s[1 : 1 + self.rows * r].view(self.rows, r)
        return self.state_s[1 : 1 + self.columns * r].view(r, self.columns)


@dataclass
class LowrankBuffers:
    """One bucket: its tensors as ``(first element, elements, factor or None)``, and the message."""

    parts: list[tuple[int, int, _Factor | None]]
    message_n: Tensor
    project: Project


class LowrankCodec:
    """Alternating low-rank approximation of every matrix."""

    stages: tuple[str, ...] = ("encode", "decode")
    has_residual = True

    def __init__(self, strategy: Strategy, kernels: KernelChoice = "auto") -> None:
        assert strategy.matrix_rank is not None
        self.strategy = strategy
        self._kernels: KernelChoice = kernels
        self._rank = strategy.matrix_rank

    def state_sizes(self, shapes: Shapes) -> tuple[int, ...]:
        """See ``Codec.state_sizes``: the side and the larger of the two factors."""
        matrices = [lowrank_matrix(shape, self._rank) for shape in shapes]
        return tuple(0 if m is None else 1 + self._rank * max(m) for m in matrices)

    def make_buffers(
        self,
        num_elements: int,
        num_ranks: int,
        device: torch.device,
        *,
        shapes: Shapes | None = None,
        state_s: Tensor | None = None,
    ) -> LowrankBuffers:
        """The message, and three factors per matrix: some ``3 r / columns`` of the bucket."""
        shapes = square_shape(num_elements) if shapes is None else shapes
        sizes = self.state_sizes(shapes)
        state_s = torch.zeros(sum(sizes), device=device) if state_s is None else state_s
        parts: list[tuple[int, int, _Factor | None]] = []
        matrices = [lowrank_matrix(shape, self._rank) for shape in shapes]
        turns = iter(balanced_turns([matrix for matrix in matrices if matrix is not None]))
        first = message_size = 0
        for shape, matrix, state in zip(shapes, matrices, torch.split(state_s, list(sizes)), strict=True):
            elements = int(torch.Size(shape).numel())
            if matrix is None:
                parts.append((first, elements, None))
                message_size += elements
            else:
                parts.append((first, elements, self._factor(*matrix, state, sends_rows=next(turns))))
                message_size += self._rank * max(matrix)
            first += elements
        if first != num_elements:
            raise UsageError(f"got shapes of {first} elements for a bucket of {num_elements}", expected="as many")
        return LowrankBuffers(
            parts=parts,
            message_n=torch.zeros(message_size, device=device),
            project=projection(kernels_for(self._kernels, device), self._rank),
        )

    def exchange(
        self, grad_n: Tensor, residual_n: Tensor | None, buffers: LowrankBuffers, *, rank: int, num_ranks: int
    ) -> Iterator[Message]:
        """See ``Codec.exchange``."""
        if average_alone(grad_n, residual_n, num_ranks):
            return
        assert residual_n is not None
        end = 0
        for first, elements, factor in buffers.parts:
            grad, residual = grad_n[first : first + elements], residual_n[first : first + elements]
            sent = buffers.message_n[end : end + _message_size(elements, factor)]
            if factor is None:
                torch.add(grad, residual, out=sent)
                residual.zero_()
            else:
                matrix, rest = (t.view(factor.rows, factor.columns) for t in (grad, residual))
                buffers.project(matrix, rest, *_factors(factor, sent), is_rows=factor.side == _ROWS)
            end += len(sent)
        message_n = buffers.message_n[:end]
        yield Message("all_reduce", message_n, message_n)
        message_n.div_(num_ranks)
        end = 0
        for first, elements, factor in buffers.parts:
            grad = grad_n[first : first + elements]
            mean = message_n[end : end + _message_size(elements, factor)]
            if factor is None:
                grad.copy_(mean)
            else:
                _expand(grad, factor, mean)
            end += len(mean)

    def _factor(self, rows: int, columns: int, state_s: Tensor, *, sends_rows: bool) -> _Factor:
        starts = (
            _orthonormal(rows, self._rank).to(state_s.device),
            _orthonormal(columns, self._rank).t().contiguous().to(state_s.device),
        )
        side = float(state_s[0])
        factor = _Factor(rows, columns, self._rank, state_s, side, starts)
        if side == 0:
            factor.set_known(_COLUMNS if sends_rows else _ROWS, starts[1 if sends_rows else 0])
        return factor


def balanced_turns(matrices: Sequence[tuple[int, int]]) -> list[bool]:
    """Which matrices, of ``(rows, columns)``, first send their rows' factor; the others send their columns'.

    What one step sends more than the next is the sum of ``rows - columns``, less those of the others: the largest
    differences are set against each other first. The same on every rank, since it depends on shapes alone.
    """
    sends_rows = [index % 2 == 0 for index in range(len(matrices))]
    more = 0
    for index in sorted(range(len(matrices)), key=lambda index: -abs(matrices[index][0] - matrices[index][1])):
        rows, columns = matrices[index]
        if rows != columns:
            sends_rows[index] = (more < 0) == (rows > columns) if more else True
            more += rows - columns if sends_rows[index] else columns - rows
    return sends_rows


def _message_size(elements: int, factor: _Factor | None) -> int:
    if factor is None:
        return elements
    return factor.matrix_rank * (factor.columns if factor.side == _ROWS else factor.rows)


def _factors(factor: _Factor, sent: Tensor) -> tuple[Tensor, Tensor]:
    """P (rows, r) and Qᵀ (r, columns): the known one, and the room of the one that is sent."""
    if factor.side == _ROWS:
        return factor.known, sent.view(factor.matrix_rank, factor.columns)
    return sent.view(factor.rows, factor.matrix_rank), factor.known


def _expand(grad: Tensor, factor: _Factor, mean: Tensor) -> None:
    """Write the averaged gradient, and make the mean projection the known factor of the next step."""
    matrix = grad.view(factor.rows, factor.columns)
    if factor.side == _ROWS:
        mean = mean.view(factor.matrix_rank, factor.columns)
        torch.mm(factor.known, mean, out=matrix)
        factor.set_known(_COLUMNS, mean)
    else:
        mean = mean.view(factor.rows, factor.matrix_rank)
        torch.mm(mean, factor.known, out=matrix)
        factor.set_known(_ROWS, mean)


def _orthonormal(length: int, matrix_rank: int) -> Tensor:
    """(length, matrix_rank), random but the same everywhere for the same size."""
    source = torch.Generator().manual_seed(length * 1009 + matrix_rank)
    factor: Tensor = torch.linalg.qr(torch.randn(length, matrix_rank, generator=source)).Q
    return factor
