"""What optimizers hold, made equal on all ranks.

Where ranks have trained apart, each has momenta of its own. As long as parameters are exchanged that is as it should
be; once gradients are exchanged again, equal gradients would move parameters apart. So their floating-point state is
averaged when that begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from wirespeed.errors import UsageError
from wirespeed.train.exchanger import Exchanger
from wirespeed.train.lanes import peer_failures


def average_state(optimizers: Iterable[torch.optim.Optimizer], module: torch.nn.Module, exchanger: Exchanger) -> None:
    """Average the state of the module's parameters in these optimizers; a collective.

    Raises UsageError where ranks hold state of unlike size, as when some have stepped and others never have.
    """
    tensors = list(_state_of(list(optimizers), module))
    num_elements = sum(tensor.numel() for tensor in tensors)
    extent = torch.tensor([num_elements, -num_elements], dtype=torch.int64, device=exchanger.device)
    with peer_failures():
        dist.all_reduce(extent, op=dist.ReduceOp.MIN, group=exchanger.group)
    if int(extent[0]) != -int(extent[1]):
        raise UsageError(
            f"the optimizers of some ranks hold {int(extent[0])} numbers and those of others {-int(extent[1])}",
            expected="as many on all ranks before gradients are exchanged again",
            hint="switch after every rank has stepped",
        )
    if not tensors:
        return
    flat = torch.cat([tensor.detach().flatten().to(exchanger.device, torch.float32) for tensor in tensors])
    exchanger.all_reduce(flat).wait()
    exchanger.raise_failure()
    with torch.no_grad():
        for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _state_of(optimizers: list[torch.optim.Optimizer], module: torch.nn.Module) -> Iterator[Tensor]:
    """In the order of the module's parameters and of the state's names: the same on all ranks."""
    for parameter in module.parameters():
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {})
            for name in sorted(key for key in state if isinstance(key, str)):
                value = state[name]
                if isinstance(value, Tensor) and value.is_floating_point():
                    yield value
