"""A model's parameters in flat parts that cross the network whole, for the schedules that exchange parameters.

Parameters are divided in reversed order, as DDP divides gradients, by type, up to the strategy's bucket size. Values
are kept in fp32 (fp64 for fp64 parameters), so that what is averaged or stepped is not rounded to 16 bits in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wirespeed.errors import DataError, UsageError
from wirespeed.spec.strategy import Strategy


@dataclass
class Fragment:
    """Parameters that cross together, flat. ``base``: where all ranks last stood (empty where it is not needed)."""

    index: int
    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]
    values: Tensor
    base: Tensor
    momentum: Tensor
    parts: tuple[Tensor, ...] = field(init=False)
    """Views of ``values``, one per parameter, in its shape."""

    def __post_init__(self) -> None:
        flat = torch.split(self.values, [p.numel() for p in self.parameters])
        self.parts = tuple(part.view(p.shape) for part, p in zip(flat, self.parameters, strict=True))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of its parameters, in their order."""
        return tuple(tuple(p.shape) for p in self.parameters)

    def read(self) -> None:
        """Parameters into ``values``."""
        for part, parameter in zip(self.parts, self.parameters, strict=True):
            part.copy_(parameter)

    def write(self) -> None:
        """``values`` into the parameters."""
        for part, parameter in zip(self.parts, self.parameters, strict=True):
            parameter.copy_(part)


def make_fragments(module: torch.nn.Module, strategy: Strategy, *, keeps_base: bool) -> list[Fragment]:
    """The fragments of a model. Raises UsageError for parameters whose elements share memory."""
    groups: list[list[tuple[str, Tensor]]] = []
    held: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, parameter in reversed(named):
        if torch._debug_has_internal_overlap(parameter) == 1:
            raise UsageError(
                f"elements of parameter {name!r} share memory", expected=f"ordinary parameters for {strategy.schedule}"
            )
        group = held.setdefault(parameter.dtype, [])
        group.append((name, parameter))
        if 4 * sum(p.numel() for _, p in group) >= strategy.bucket_bytes:
            groups.append(held.pop(parameter.dtype))
    groups += held.values()
    has_momentum = strategy.schedule == "diloco"
    return [_fragment(i, g, keeps_base=keeps_base, has_momentum=has_momentum) for i, g in enumerate(groups)]


def _fragment(index: int, named: list[tuple[str, Tensor]], *, keeps_base: bool, has_momentum: bool) -> Fragment:
    num_elements = sum(p.numel() for _, p in named)
    first = named[0][1]
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32

    def flat(size: int) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=first.device)

    return Fragment(
        index=index,
        names=tuple(name for name, _ in named),
        parameters=tuple(p for _, p in named),
        values=flat(num_elements),
        base=flat(num_elements if keeps_base else 0),
        momentum=flat(num_elements if has_momentum else 0),
    )


def averaged_buffers(module: torch.nn.Module) -> list[Tensor]:
    """Floating-point buffers that belong to the model's state: running means, not constants."""
    saved = module.state_dict(keep_vars=True)
    return [b for name, b in module.named_buffers() if name in saved and b.is_floating_point()]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All of them side by side, in fp32."""
    return torch.cat([t.detach().flatten().float() for t in tensors])


def fill(fragment: Fragment, flat: Tensor, held: dict[str, Tensor], what: str) -> None:
    """Copy saved values into their places. Raises DataError where one does not fit."""
    parts = torch.split(flat, [p.numel() for p in fragment.parameters])
    for name, part in zip(fragment.names, parts, strict=True):
        value = held.get(name)
        if value is None:
            continue
        if value.numel() != part.numel():
            raise DataError(f"the {what} of {name!r} has {value.numel()} elements", expected=f"{part.numel()} elements")
        part.copy_(value.flatten())


def write_flat(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Undo ``flatten``: copy each part into its tensor."""
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
