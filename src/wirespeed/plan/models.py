"""Models as `wirespeed bench replay` runs them, without their weights: the catalogue's, in a recorded order if known.

``plan.catalogue`` generates every model from its configuration, its gradients in reverse forward order. Of some the
order is recorded, as data in the package: autograd's own (which is not the reversed order of the parameters), with the
share of the backward pass after which each gradient is ready. ``benchmarks/record_models.py`` makes those files from
transformers' configurations; nothing here needs transformers or torch. The shares are those of a roofline, so they are
``assumed``: right in order, and in time as far as all kernels reach the roofline alike. Batch-norm buffers are left
out.
"""

from __future__ import annotations

import math
from importlib import resources

import msgspec

from wirespeed.errors import DataError, UsageError
from wirespeed.plan.catalogue import find_model
from wirespeed.plan.compute import workload_of
from wirespeed.plan.devices import find_device
from wirespeed.spec.workload import GradientTensor, TrainingWorkload

SCHEMA = 1
ROOFLINE_EFFICIENCY = 0.4
"""Assumed share of the roofline that a training step reaches; MLPerf-class steps on A100 report 0.35 to 0.5."""


GENERATED_IMAGES, GENERATED_SEQUENCES = 64, 8
"""Samples in the step of a model whose order is generated: like those of the recorded ones."""


class ModelTensor(msgspec.Struct, frozen=True, array_like=True):
    """One gradient. ``ready_share``: how far the backward pass is when it is accumulated, 0 to 1."""

    name: str
    shape: tuple[int, ...]
    ready_share: float

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


class ReplayModel(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="replay_model"):
    """A model as its gradients: ``tensors`` in backward order. ``roofline_s``: forward and backward at the roofline."""

    schema: int
    name: str
    title: str
    batch: str
    source: str
    roofline_s: float
    forward_share: float
    tensors: tuple[ModelTensor, ...]

    def __post_init__(self) -> None:
        shares = [tensor.ready_share for tensor in self.tensors]
        if not shares or shares != sorted(shares) or not 0 <= shares[0] <= shares[-1] <= 1:
            raise DataError(f"the model {self.name!r} is not in backward order", expected="shares rising from 0 to 1")
        if not 0 < self.forward_share < 1 or self.roofline_s <= 0:
            raise DataError(f"the model {self.name!r} has no forward or no backward pass")

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def assumed_compute_s(self) -> float:
        """Forward and backward of the recorded batch on an A100, at the assumed share of its roofline."""
        return self.roofline_s / ROOFLINE_EFFICIENCY


def model_names() -> tuple[str, ...]:
    """The models whose backward order is recorded."""
    folder = resources.files("wirespeed.plan") / "models"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def load_model(name: str) -> ReplayModel:
    """A recorded model, else one of the catalogue in its generated order. Raises UsageError naming those that exist."""
    if name not in model_names():
        return _generated(name)
    content = (resources.files("wirespeed.plan") / "models" / f"{name}.json").read_bytes()
    return msgspec.json.decode(content, type=ReplayModel)


def _generated(name: str) -> ReplayModel:
    """A model of ``plan.catalogue``, with the times that ``plan.compute`` gives it on an A100."""
    try:
        model = find_model(name)
    except UsageError as fault:
        raise UsageError(
            f"got model {name!r}",
            expected=f"one of {', '.join(model_names())}, or another of the planner's catalogue",
            hint=fault.hint,
        ) from fault
    is_image = model.transformer is None or model.transformer.vocab == 0
    batch = GENERATED_IMAGES if is_image else GENERATED_SEQUENCES
    workload = workload_of(model, find_device("a100"), batch=batch, num_ranks=2, dtype="bf16", is_fused_attention=True)
    both_s = workload.forward_s + workload.backward_s
    tensors = tuple(
        ModelTensor(gradient.name, gradient.shape, min(1.0, gradient.ready_s / workload.backward_s))
        for gradient in workload.gradients
    )
    return ReplayModel(
        schema=SCHEMA,
        name=name,
        title=model.name,
        batch=f"{batch} x {model.sample}",
        source=f"generated in reverse forward order: {model.source or model.origin}",
        roofline_s=both_s * ROOFLINE_EFFICIENCY,
        forward_share=workload.forward_s / both_s,
        tensors=tensors,
    )


def replay_workload(
    model: ReplayModel, *, num_ranks: int, compute_s: float | None = None, scale: float = 1.0
) -> TrainingWorkload:
    """One step of the model on ``num_ranks``, with ``1 / scale`` of its gradient.

    ``compute_s``: forward and backward together; None takes ``assumed_compute_s``. Nothing contends for cores: the
    compute of a replay sleeps.
    """
    compute_s = model.assumed_compute_s if compute_s is None else compute_s
    if not 0 < compute_s < math.inf:
        raise UsageError(f"got a compute time of {compute_s:g} s", expected="above zero")
    backward_s = compute_s * (1 - model.forward_share)
    full = TrainingWorkload(
        gradients=tuple(
            GradientTensor(
                name=tensor.name,
                num_elements=tensor.num_elements,
                ready_s=tensor.ready_share * backward_s,
                shape=tensor.shape,
            )
            for tensor in model.tensors
        ),
        forward_s=compute_s - backward_s,
        backward_s=backward_s,
        optimizer_s=0.0,
        num_ranks=num_ranks,
        origin="assumed",
    )
    return scaled_workload(full, scale)


def scaled_workload(workload: TrainingWorkload, scale: float) -> TrainingWorkload:
    """The workload with ``1 / scale`` of its gradient elements and the times that it had.

    The longest side of each tensor is cut. What rounding adds to one tensor is taken from the next ones, so that every
    stretch of the backward pass, and so every bucket, keeps its share. No tensor vanishes: at scales beyond a tensor's
    size the sum stays a little higher. A cut matrix is less square, so low-rank factors shrink by less than the scale.
    """
    if not 1 <= scale < math.inf:
        raise UsageError(f"got a scale of {scale:g}", expected="1 (as it is) or more")
    wanted = 0.0
    made = 0
    gradients = []
    for gradient in workload.gradients:
        wanted += gradient.num_elements / scale
        shape = _cut(gradient.shape or (gradient.num_elements,), wanted - made)
        num_elements = math.prod(shape)
        made += num_elements
        gradients.append(
            msgspec.structs.replace(gradient, num_elements=num_elements, shape=shape if gradient.shape else ())
        )
    return msgspec.structs.replace(workload, gradients=tuple(gradients))


def _cut(shape: tuple[int, ...], num_elements: float) -> tuple[int, ...]:
    """The shape with its longest side cut so that about ``num_elements`` are left, and at least one slice."""
    longest = max(range(len(shape)), key=shape.__getitem__)
    others = math.prod(shape) // shape[longest]
    side = min(max(1, round(num_elements / others)), shape[longest])
    return (*shape[:longest], side, *shape[longest + 1 :])
