"""The arithmetic under the codecs: what a set of kernels offers, and which set runs on which device.

Two sets exist, compiled CPU loops (numba) and plain torch operations for every device. Both give equal bytes, so ranks
of one group may mix them, and a test holds them to it (NaN payloads of the half codec excepted). Everything here works
on preallocated tensors; ``work`` is whatever scratch space a set asked for.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from wirespeed.errors import MissingCapability, UsageError
from wirespeed.train.codecs.layout import BlockLayout, TopkLayout

KernelChoice = Literal["auto", "numba", "torch"]

HALF_MAX = 65504.0
HALF_TARGET_EXPONENT = 7
"""The scale aims at 2^7 <= largest averaged entry < 2^8. One rank's entry may then exceed that average 128-fold before
it saturates, and entries 2^21 times smaller than the largest are still sent with all 11 bits."""
HALF_JUMP_EXPONENT = 8
"""The scale grows twofold per step, but at once to within 2^8 of its aim: gradients that shrank must not be lost."""
HALF_SCALE_EXPONENT_LIMIT = 100
HALF_TINY = 2.0**-24
"""fp16's smallest. Entries that are not zero are sent as no less, so that an all-zero sum means zero gradients, and not
that the scale is too small to see them. A sum that N of these can make up is then taken for zero."""
BLOCK_TINY = 2.0**-100
"""A block whose largest entry is below this is sent as zeros and stays in the residual: its scale would be denormal."""
TOPK_SCALE_EXPONENT = 14
"""A chunk's largest value is sent as 2^14 up to 2^15: no overflow, and full precision 2^28 below it."""
TOPK_SCALE_EXPONENT_MIN = -100


@dataclass
class HalfBuffers:
    """``state_2``: the scale, and whether it has been adapted (1) or is the first guess (0)."""

    kernels: Kernels
    num_ranks: int
    limit: float
    send_n: Tensor
    state_2: Tensor
    work: Any


@dataclass
class BlockBuffers:
    """Of int8, int4, sign. ``send_b`` and ``received_b`` (both collectives' results) hold N records, ``own_b`` one."""

    kernels: Kernels
    layout: BlockLayout
    send_b: Tensor
    received_b: Tensor
    own_b: Tensor
    work: Any


@dataclass
class TopkBuffers:
    """``send_b`` holds one record, ``gathered_b`` N."""

    kernels: Kernels
    layout: TopkLayout
    send_b: Tensor
    gathered_b: Tensor
    work: Any


class Kernels(Protocol):
    """One set of kernels. Tensors are flat; ``grad_n`` and ``residual_n`` fp32, messages uint8 (half: fp16)."""

    name: str

    def half_work(self, num_elements: int, device: torch.device) -> Any:
        """Scratch space for the half kernels."""
        ...

    def half_encode(self, grad_n: Tensor, buffers: HalfBuffers) -> None:
        """``send = fp16(grad * scale / N)``, its size kept between HALF_TINY and the limit; not finite becomes nan."""
        ...

    def half_decode(self, grad_n: Tensor, buffers: HalfBuffers) -> None:
        """``grad = send / scale``, zero up to N x HALF_TINY; then adapt the scale to the largest sum."""
        ...

    def block_work(self, layout: BlockLayout, device: torch.device) -> Any:
        """Scratch space for the kernels of ``layout.codec``."""
        ...

    def block_encode(self, grad_n: Tensor, residual_n: Tensor, buffers: BlockBuffers) -> None:
        """Quantize ``grad + residual`` by blocks into N records; what that took away becomes the residual.

        int8 and int4 round to 127 and 7 times a block's scale, its largest magnitude over as much; sign sends its mean
        magnitude and which entries are above zero.
        """
        ...

    def block_reduce(self, residual_n: Tensor, buffers: BlockBuffers, rank: int) -> None:
        """Add the N received records in fp32 and quantize the sum; what is lost goes to the owner's residual."""
        ...

    def block_decode(self, grad_n: Tensor, buffers: BlockBuffers) -> None:
        """``grad = q * scale / N`` from the N gathered records (sign: plus or minus the scale)."""
        ...

    def topk_work(self, layout: TopkLayout, device: torch.device) -> Any:
        """Scratch space for the top-k kernels."""
        ...

    def topk_encode(self, grad_n: Tensor, residual_n: Tensor, buffers: TopkBuffers) -> None:
        """Send the k largest of ``grad + residual`` of every chunk; the rest, and fp16's rounding, is the residual.

        Among entries of equal size the lower index is sent. Indices within a chunk ascend.
        """
        ...

    def topk_decode(self, grad_n: Tensor, buffers: TopkBuffers) -> None:
        """``grad`` = the sum of the N records, entry by entry in rank order, over N."""
        ...


def has_numba() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def kernels_for(choice: KernelChoice, device: torch.device) -> Kernels:
    """The kernels that run on ``device``: with "auto", numba for CPU tensors where it works, else torch."""
    from wirespeed.train.codecs.kernels_torch import TorchKernels

    if choice == "torch" or (choice == "auto" and (device.type != "cpu" or not has_numba())):
        return TorchKernels()
    if device.type != "cpu":
        raise UsageError(f"got kernels 'numba' for device {device}", expected="kernels 'auto' or 'torch' off the CPU")
    if not has_numba():
        raise MissingCapability("numba is not installed", hint="pip install 'wirespeed[train]', or kernels='torch'")
    try:
        from wirespeed.train.codecs.kernels_numba import NumbaKernels
    except ImportError as fault:  # such as numba refusing a numpy that is newer than itself
        if choice == "numba":
            raise MissingCapability(f"numba cannot be used: {fault}", hint="upgrade it, or kernels='torch'") from fault
        warnings.warn(f"numba cannot be used, codecs run several times slower: {fault}", RuntimeWarning, stacklevel=2)
        return TorchKernels()
    return NumbaKernels()


def half_limit(num_ranks: int) -> float:
    """The largest magnitude that each of N ranks may send so that no partial fp16 sum can overflow.

    Every addition rounds up by at most a factor 1 + 2^-11, so N terms of L stay below N L (1 + 2^-11)^(N - 1).
    """
    limit = HALF_MAX / num_ranks / (1 + 2.0**-11) ** (num_ranks - 1)
    rounded = float(torch.tensor(limit).half())
    return rounded if rounded <= limit else float(torch.tensor(limit * (1 - 2.0**-10)).half())
