"""Residuals: what error feedback holds back, keyed by parameter; and, likewise, what a codec has learned.

DDP forms its buckets anew after the first step and whenever the bucket size changes, so a residual belongs to a
parameter's name, never to a bucket's index. Inside a bucket the residuals lie side by side in one flat fp32 tensor, as
the gradients do; when a bucket with other parameters appears its flat tensor is put together from the names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wirespeed.errors import DataError


class Residuals:
    """State of one rank by parameter, allocated bucket by bucket on first use. ``what`` names the values in errors.

    For error feedback it comes to one fp32 copy of the gradients.
    """

    def __init__(self, what: str = "residual") -> None:
        self._what = what
        self._flat: dict[tuple[str, ...], Tensor] = {}
        self._by_name: dict[str, Tensor] = {}

    def for_bucket(self, names: tuple[str, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
        """The flat values of a bucket holding these parameters in this order; kept values move with their names."""
        flat = self._flat.get(names)
        if flat is not None:
            return flat
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        for name, view in zip(names, torch.split(flat, list(sizes)), strict=True):
            held = self._by_name.get(name)
            if held is not None:
                if held.numel() != view.numel():
                    raise DataError(
                        f"the {self._what} of {name!r} has {held.numel()} elements", expected=f"{view.numel()} elements"
                    )
                view.copy_(held)
            self._by_name[name] = view
        moved = set(names)
        self._flat = {key: value for key, value in self._flat.items() if moved.isdisjoint(key)}
        self._flat[names] = flat
        return flat

    def clear(self) -> None:
        """Forget everything held back (after a step that was exchanged exactly)."""
        self._flat.clear()
        self._by_name.clear()

    def multiply(self, factor: float) -> None:
        """Multiply all that is held, whether or not its bucket has appeared yet."""
        for value in self._by_name.values():
            value.mul_(factor)

    def norm(self) -> float:
        """L2 norm over all parameters; 0 when nothing is held."""
        if not self._by_name:
            return 0.0
        return float(
            torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(v) for v in self._by_name.values()]))
        )

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(flat.numel() * 4 for flat in self._flat.values())

    def state_dict(self, *, divided_by: float = 1.0) -> dict[str, Tensor]:
        """A copy by parameter name, for this rank."""
        return {name: view.detach().clone().div_(divided_by) for name, view in self._by_name.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace what is held. Shapes are checked when the bucket of a parameter next appears."""
        self.clear()
        for name, value in state.items():
            if value.dtype != torch.float32 or not bool(torch.isfinite(value).all()):
                raise DataError(f"the {self._what} of {name!r} is not finite fp32")
            self._by_name[name] = value.detach().clone().flatten()
