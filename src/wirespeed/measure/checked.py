"""One collective with its buffers: filled with numbers from which a wrong, stale or misplaced result can be told.

Every element is a small whole number that depends on its place, its rank, its part and the run; sums of them are exact
in fp32 and fp16 in any order, so results are compared for equality. The pattern is a short tile, repeated, so that
checking 256 MiB needs no second buffer of that size.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from wirespeed.measure.exchange import all_gather_single, all_to_all, reduce_scatter_single
from wirespeed.records import Collective

EXACT_FP16 = 2048
"""fp16 holds every whole number up to here."""
_TILE = 2**20


class CheckedCollective:
    """Buffers of one collective at one size; rounds the size down to whole elements per rank (at least one)."""

    def __init__(
        self, collective: Collective, dtype: str, size_bytes: int, *, rank: int, num_ranks: int, device: torch.device
    ) -> None:
        self.collective, self.dtype = collective, dtype
        self._rank, self._num_ranks = rank, num_ranks
        held: torch.dtype = getattr(torch, dtype)
        parts = 1 if collective in ("all_reduce", "broadcast") else self._num_ranks
        self._part = max(1, size_bytes // (parts * held.itemsize))
        self.size_bytes = parts * self._part * held.itemsize
        # 251 and 17 are prime: a part that lands in another part's place does not fit. Sums are exact whatever the
        # order: fp32 up to 700,000 ranks, fp16 up to 682 with the smaller numbers.
        period, self._steps = (251, 8) if dtype == "uint8" else (17, 8)
        if dtype == "float16" and self._num_ranks * 23 > EXACT_FP16:
            period, self._steps = 3, 2
        length = min(_TILE, self._part)
        self._tile = (torch.arange(length, device=device) % period).to(held)
        whole, part = (torch.zeros(n, dtype=held, device=device) for n in (parts * self._part, self._part))
        self._send, self._receive = {
            "all_reduce": (whole, whole),
            "broadcast": (whole, whole),
            "all_gather": (part, whole),
            "reduce_scatter": (whole, part),
            "all_to_all": (whole, torch.zeros_like(whole)),
            "scatter": (whole if rank == 0 else whole[:0], part),
        }[collective]

    def fill(self, run: int) -> None:
        """Put this rank's numbers of this run into the send buffer, and spoil the receive buffer."""
        if self._receive is not self._send:
            self._receive.fill_(255)
        for part in range(self._send.numel() // self._part):
            self._write(self._send[part * self._part : (part + 1) * self._part], self._value(self._rank, part, run))

    def issue(self) -> None:
        """Run the collective to its end on the host's side."""
        match self.collective:
            case "all_reduce":
                dist.all_reduce(self._send)
            case "broadcast":
                dist.broadcast(self._send, src=0)
            case "all_gather":
                all_gather_single(self._receive, self._send)
            case "reduce_scatter":
                reduce_scatter_single(self._receive, self._send)
            case "all_to_all":
                all_to_all(self._receive, self._send)
            case "scatter":
                dist.scatter(self._receive, list(self._send.chunk(self._num_ranks)) if self._rank == 0 else None, src=0)

    def is_right(self, run: int) -> bool:
        """Whether every element of the result is what it has to be."""
        for part in range(self._receive.numel() // self._part):
            held = self._receive[part * self._part : (part + 1) * self._part]
            match self.collective:
                case "all_reduce" | "reduce_scatter":
                    mine = self._rank if self.collective == "reduce_scatter" else part
                    total = sum(self._value(rank, mine, run) for rank in range(self._num_ranks))
                    is_same = self._matches(held, total, self._num_ranks)
                case "broadcast":
                    is_same = self._matches(held, self._value(0, part, run), 1)
                case "all_gather":
                    is_same = self._matches(held, self._value(part, 0, run), 1)
                case "all_to_all":
                    is_same = self._matches(held, self._value(part, self._rank, run), 1)
                case "scatter":
                    is_same = self._matches(held, self._value(0, self._rank, run), 1)
            if not is_same:
                return False
        return True

    def _value(self, rank: int, part: int, run: int) -> int:
        """What is added to the pattern."""
        return (3 * rank + 5 * part + run) % self._steps

    def _write(self, target: Tensor, value: int) -> None:
        for start in range(0, target.numel(), _TILE):
            piece = target[start : start + _TILE]
            torch.add(self._tile[: piece.numel()], value, out=piece)

    def _matches(self, held: Tensor, value: int, factor: int) -> bool:
        wanted = self._tile * factor + value
        return all(
            torch.equal(piece := held[start : start + _TILE], wanted[: piece.numel()])
            for start in range(0, held.numel(), _TILE)
        )
