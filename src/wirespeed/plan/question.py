"""A question to the planner, as one value: which model, on which devices, over which fabric, with what batch.

``ask`` answers it: transformers by a search over layouts, and, where a whole replica fits on one device, every model by
a search over the strategies of data parallelism as well. A scenario file (TOML) holds one question, so that ``compare``
can set several side by side.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import numpy as np

from wirespeed.errors import DataError, UsageError, WirespeedError
from wirespeed.fabric.placement import Placement, place
from wirespeed.fabric.topology import Fabric
from wirespeed.fabric.words import load_fabric
from wirespeed.plan.axes import PlacedCosts
from wirespeed.plan.catalogue import find_model
from wirespeed.plan.compute import workload_of
from wirespeed.plan.devices import find_device
from wirespeed.plan.layouts import LayoutSearch, parse_layout, search_layouts
from wirespeed.plan.search import Choice, Search, choose, rank
from wirespeed.plan.space import legal_strategies
from wirespeed.sim.cadence import Cadence, CadencePrediction, predict_cadence, scaled
from wirespeed.sim.layout import Layout
from wirespeed.sim.memory import memory_use
from wirespeed.sim.training import predict_step
from wirespeed.spec.device import Device
from wirespeed.spec.model import Model
from wirespeed.spec.prediction import Prediction
from wirespeed.spec.strategy import Fidelity, Strategy
from wirespeed.spec.workload import TrainingWorkload

DEFAULT_BATCH_PER_DEVICE = 32
"""Samples per device and step where a question names no batch and the model is small enough for data parallelism."""
DEFAULT_TOKENS = 2**22
"""Tokens per step where a question about a language model names no batch: GPT-3's 3.2 million and Llama's 4 million."""


CADENCES = {
    "every step": Cadence(),
    "accumulated over 4": Cadence(accumulation=4),
    "delayed by a step": Cadence(name="delayed"),
    "local SGD, every 8": Cadence(name="local_sgd", period=8),
    "DiLoCo, every 64 in 4 fragments": Cadence(name="diloco", period=64, fragments=4),
}


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What to predict. ``global_batch`` None takes a customary one; ``current`` is the layout in use, if any."""

    model: Model
    fabric: Fabric
    device: Device
    placement: Placement
    global_batch: int
    dtype: str = "bf16"
    fidelity: Fidelity = "half"
    samples_per_s: float | None = None
    current: Layout | None = None
    is_fused_attention: bool = True
    slowdown: float = 1.0
    backend: str = "any"
    price_per_host_hour: float | None = None
    name: str = ""

    @property
    def num_ranks(self) -> int:
        """Devices that train."""
        return self.placement.num_ranks

    @property
    def num_hosts(self) -> int:
        """Hosts that hold them."""
        return int(np.unique(self.placement.host).size)

    @property
    def base_layout(self) -> Layout:
        """What a search over layouts leaves as it is."""
        return Layout(global_batch=self.global_batch, dtype=self.dtype, is_fused_attention=self.is_fused_attention)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """``layouts`` is None for what is no transformer, ``strategies`` where a replica does not fit on one device."""

    question: Question
    layouts: LayoutSearch | None
    strategies: Search | None
    choice: Choice | None
    workload: TrainingWorkload | None
    bindings: dict[str, str]
    """The link behind each collective of the strategies."""
    cadences: dict[str, CadencePrediction] = {}
    """The chosen strategy exchanged less often, by name: steps of the same samples, but not of the same algorithm."""

    @property
    def step_s(self) -> float:
        """The step of what is advised."""
        if self.layouts is not None and (
            self.choice is None or self.layouts.chosen.step_s <= self.choice.prediction.step_s
        ):
            return self.layouts.chosen.step_s
        assert self.choice is not None
        return self.choice.prediction.step_s

    @property
    def samples_per_s(self) -> float:
        """Of all devices together."""
        return self.question.global_batch / self.step_s

    @property
    def cost_per_step(self) -> float | None:
        """In the currency of ``price_per_host_hour``; None where no price is known."""
        price = self.question.price_per_host_hour
        return None if price is None else price * self.question.num_hosts * self.step_s / 3600


def make_question(
    *,
    model: str | Model,
    fabric: str | Fabric,
    device: str | Device = "a100",
    global_batch: int | None = None,
    batch_per_device: int | None = None,
    current: str | None = None,
    num_ranks: int | None = None,
    order_seed: int | None = None,
    **rest: object,
) -> Question:
    """A question from names and lines, checked. Raises UsageError or DataError naming the part that is wrong."""
    held_model = find_model(model) if isinstance(model, str) else model
    held_fabric = load_fabric(fabric) if isinstance(fabric, str) else fabric
    held_device = find_device(device) if isinstance(device, str) else device
    placement = place(held_fabric, num_ranks, seed=order_seed)
    if global_batch is not None and batch_per_device is not None:
        raise UsageError("got both a global batch and a batch per device", expected="one of them")
    if global_batch is None:
        if batch_per_device is not None:
            global_batch = batch_per_device * placement.num_ranks
        else:
            global_batch = customary_batch(held_model, placement.num_ranks)
    if global_batch < 1:
        raise UsageError(f"got a global batch of {global_batch}", expected="1 sample or more")
    question = Question(
        model=held_model,
        fabric=held_fabric,
        device=held_device,
        placement=placement,
        global_batch=global_batch,
        **rest,  # type: ignore[arg-type]
    )
    if question.dtype not in held_device.flop_per_s:
        raise UsageError(
            f"got dtype {question.dtype!r} for {held_device.name}", expected=", ".join(sorted(held_device.flop_per_s))
        )
    if current is not None:
        if held_model.transformer is None:
            raise UsageError(f"got a layout for {held_model.name}", expected="a transformer: others are data parallel")
        layout = parse_layout(current, global_batch=global_batch, base=question.base_layout)
        if layout.num_ranks != placement.num_ranks:
            raise UsageError(
                f"got the layout {layout.name} of {layout.num_ranks} devices on a fabric of {placement.num_ranks}",
                expected="tensor x pipeline x data x context = the fabric's devices",
            )
        question = msgspec.structs.replace(question, current=layout)
    return question


def customary_batch(model: Model, num_ranks: int) -> int:
    """Samples per step where nobody says: 32 images per device, or about 4 million tokens, divisible by the devices."""
    if model.transformer is None or model.transformer.vocab == 0:
        return DEFAULT_BATCH_PER_DEVICE * num_ranks
    samples = max(1, DEFAULT_TOKENS // model.transformer.sequence)
    if samples >= num_ranks:
        return samples // num_ranks * num_ranks
    return samples


def ask(question: Question) -> Answer:
    """Answer a question. Raises UsageError where nothing is legal, with the commonest reason."""
    shape = question.model.transformer
    layouts = None
    trouble: UsageError | None = None
    if shape is not None:
        try:
            layouts = search_layouts(
                shape,
                question.device,
                question.fabric,
                global_batch=question.global_batch,
                placement=question.placement,
                base=question.base_layout,
                current=question.current,
                backend=question.backend,
                slowdown=question.slowdown,
            )
        except UsageError as fault:
            trouble = fault
    found = _ask_strategies(question) if _replica_fits(question) else None
    if layouts is None and found is None:
        raise trouble or UsageError(
            f"got {question.model.name} with a batch of {question.global_batch} on {question.num_ranks} devices, "
            f"{question.global_batch / question.num_ranks:.3g} samples each",
            expected="whole samples per device, and a replica that fits on one",
        )
    if found is not None:
        return msgspec.structs.replace(found, layouts=layouts)
    return Answer(
        question=question,
        layouts=layouts,
        strategies=None,
        choice=None,
        workload=None,
        bindings={},
    )


def _replica_fits(question: Question) -> bool:
    if question.global_batch % question.num_ranks:
        return False
    batch = question.global_batch // question.num_ranks
    shape = question.model.transformer
    if shape is None:
        activations = 8.0 * sum(layer.activations for layer in question.model.layers) * batch
        return 16 * question.model.num_parameters + activations < question.device.memory_bytes
    layout = Layout(
        data=question.num_ranks,
        micro_batch=batch,
        global_batch=question.global_batch,
        dtype=question.dtype,
        is_fused_attention=question.is_fused_attention,
        sequence_parallel=False,
    )
    return memory_use(shape, layout).fits(question.device)


def _ask_strategies(question: Question) -> Answer:
    workload = workload_of(
        question.model,
        question.device,
        batch=question.global_batch // question.num_ranks,
        num_ranks=question.num_ranks,
        ranks_per_host=max(1, question.num_ranks // question.num_hosts),
        dtype=question.dtype,
        samples_per_s=question.samples_per_s,
        is_fused_attention=question.is_fused_attention,
    )
    workload = scaled(workload, question.slowdown)
    costs = PlacedCosts(question.fabric, question.placement, question.device, backend=question.backend)
    held: list[Prediction] = []
    skipped: dict[str, str] = {}
    for strategy in legal_strategies(workload, question.fidelity):
        try:
            held.append(predict_step(workload, strategy, costs))
        except DataError as fault:
            skipped[strategy.name] = str(fault)
    if Strategy() not in [one.strategy for one in held]:
        raise DataError(next(iter(skipped.values()), "dense cannot be predicted on this fabric"))
    found = Search(predictions=rank(held), skipped=skipped)
    choice = choose(held, question.fidelity)
    return Answer(
        question=question,
        layouts=None,
        strategies=found,
        choice=choice,
        workload=workload,
        bindings={str(collective): link for collective, link in costs.bindings.items()},
        cadences={
            name: predict_cadence(workload, choice.strategy, costs, cadence) for name, cadence in CADENCES.items()
        }
        if question.num_ranks > 1
        else {},
    )


class _Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    model: str
    fabric: str
    name: str = ""
    device: str = "a100"
    global_batch: int | None = None
    batch_per_device: int | None = None
    dtype: str = "bf16"
    fidelity: Fidelity = "half"
    layout: str | None = None
    samples_per_s: float | None = None
    slowdown: float = 1.0
    price_per_host_hour: float | None = None


SCENARIO_SCHEMA = 1


def read_scenario(path: str | Path) -> Question:
    """The question in a scenario file. ``fabric`` is one line, or a path relative to the file. Raises DataError."""
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise DataError(f"cannot read the scenario {source}: {fault}", expected="a TOML file") from fault
    schema = document.get("schema")
    if not isinstance(schema, int):
        raise DataError(f"{source} has no schema", expected=f"schema = {SCENARIO_SCHEMA} at its top")
    if schema > SCENARIO_SCHEMA:
        raise DataError(
            f"{source} has schema {schema}", expected=f"schema {SCENARIO_SCHEMA}", hint="upgrade wirespeed to read it"
        )
    try:
        held = msgspec.convert(document, type=_Scenario)
    except msgspec.ValidationError as fault:
        raise DataError(f"{source} is not a scenario: {fault}", expected="the fields of a scenario") from fault
    beside = source.parent / held.fabric
    try:
        return make_question(
            model=held.model,
            fabric=str(beside) if held.fabric.endswith(".toml") else held.fabric,
            device=held.device,
            global_batch=held.global_batch,
            batch_per_device=held.batch_per_device,
            current=held.layout,
            dtype=held.dtype,
            fidelity=held.fidelity,
            samples_per_s=held.samples_per_s,
            slowdown=held.slowdown,
            price_per_host_hour=held.price_per_host_hour,
            name=held.name or source.stem,
        )
    except WirespeedError as fault:
        raise DataError(f"{source}: {fault.problem}", expected=fault.expected, hint=fault.hint) from fault
