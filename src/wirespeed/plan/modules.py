"""Any ``torch.nn.Module`` as a model: walked on the meta device, so that nothing is allocated and nothing computed.

Parameters are exact. Work is counted while the module's forward runs on meta tensors: two operations per multiply-add
of every linear layer, convolution, embedding bag and attention that runs as a module; what is called as a function
(``torch.matmul``, ``scaled_dot_product_attention``) is counted by torch's own counter where it is installed with it.
Parameters that forward does not reach have no work. Needs torch; nothing else in ``plan`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wirespeed.errors import MissingCapability, UsageError
from wirespeed.spec.model import Layer, Model, Tensor

if TYPE_CHECKING:
    import torch


def from_module(
    make: Callable[[], torch.nn.Module],
    inputs: Callable[[], Sequence[torch.Tensor]] | None = None,
    *,
    name: str = "module",
    sample: str = "sample",
) -> Model:
    """The model that ``make()`` builds; both callables run under the meta device.

    ``inputs()`` gives forward's arguments for ONE sample (batch size 1), to count work; None counts parameters only, so
    that all layers have no work and only sizes can be planned with. Raises UsageError for a module without parameters
    or whose forward does not run on meta tensors, MissingCapability without torch.
    """
    try:
        import torch
        from torch.utils.flop_counter import FlopCounterMode
    except ImportError as fault:
        raise MissingCapability("torch is not installed", hint="pip install 'wirespeed[train]'") from fault
    with torch.device("meta"):
        module = make()
    owners = [(path, part) for path, part in module.named_modules() if list(part.parameters(recurse=False))]
    if not owners:
        raise UsageError(f"got {name}, a module without parameters", expected="at least one parameter")
    flops: dict[str, float] = {}
    activations: dict[str, int] = {}
    order: list[str] = []
    if inputs is not None:
        handles = [part.register_forward_hook(_recorder(path, order, activations)) for path, part in owners]
        try:
            # Display off: the counter prints otherwise. Work is read per module afterwards.
            with torch.device("meta"), FlopCounterMode(display=False) as counter:
                module(*inputs())
        except Exception as fault:
            raise UsageError(
                f"forward of {name} does not run on the meta device: {fault}",
                expected="inputs for one sample that forward takes",
                hint="give no inputs to count parameters only",
            ) from fault
        finally:
            for handle in handles:
                handle.remove()
        flops = _work(counter.get_flop_counts(), {path for path, _ in owners}, type(module).__name__)
    found = []
    seen: set[int] = set()
    ordered = {path: place for place, path in enumerate(order)}
    for path, part in sorted(owners, key=lambda one: ordered.get(one[0], len(ordered))):
        tensors = []
        for key, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in seen:  # a tied parameter has one gradient
                seen.add(id(parameter))
                shape = tuple(parameter.shape)
                tensors.append(Tensor(name=f"{path}.{key}" if path else key, shape=shape))
        if tensors or flops.get(path):
            found.append(
                Layer(
                    name=path or name,
                    tensors=tuple(tensors),
                    flops=flops.get(path, 0.0),
                    activations=activations.get(path, 0),
                )
            )
    return Model(name=name, sample=sample, layers=tuple(found), origin="declared", source="walked on the meta device")


def _recorder(path: str, order: list[str], activations: dict[str, int]) -> Callable[..., None]:
    def record(_module: Any, _inputs: Any, output: Any) -> None:
        if path not in order:
            order.append(path)
        size = getattr(output, "numel", None)
        if size is not None:
            activations[path] = activations.get(path, 0) + int(size())

    return record


def _work(counts: dict[str, dict[Any, int]], owners: set[str], root: str) -> dict[str, float]:
    """Operations by owner of parameters: a module's count less those below it.

    What is done outside of any owner goes to the nearest owner above.
    """
    totals = {
        path.removeprefix(root).removeprefix("."): float(sum(by_kind.values()))
        for path, by_kind in counts.items()
        if path != "Global"
    }
    own = dict(totals)
    for path, total in totals.items():
        above = path
        while above:
            above = above.rpartition(".")[0]
            if above in totals:
                own[above] -= total
                break
    found: dict[str, float] = {}
    first = next(iter(sorted(owners)))
    for path, value in own.items():
        at = path
        while at not in owners and at:
            at = at.rpartition(".")[0]
        holder = at if at in owners else next((one for one in sorted(owners) if one.startswith(path)), first)
        found[holder] = found.get(holder, 0.0) + value
    return found
