"""Layout: how a model is spread over devices: tensor, pipeline, data, context and expert parallel, and what is kept.

Ranks are numbered as Megatron-LM numbers them: tensor fastest, then context, data, pipeline slowest, so that tensor
groups fall inside a host where hosts are filled in order. Expert groups are cut out of the data-parallel ranks. What
cannot be run is refused here, with the numbers that do not divide.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from wirespeed.errors import UsageError
from wirespeed.spec.model import Transformer

Recompute = Literal["none", "selective", "full"]
Axis = Literal["tensor", "context", "data", "pipeline", "expert"]
"""What a group of ranks does together; ``data`` includes sharding of parameters and optimizer state."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train one model.

    ``micro_batch`` is samples per device at a time, ``global_batch`` samples per step. ``interleave`` is the number of
    model chunks per pipeline stage. ``zero``: 0 replicates, 1 shards the optimizer, 2 gradients too, 3 parameters too
    (FSDP). ``sequence_parallel`` splits norms and dropouts over the tensor group too. ``is_fused_attention`` keeps no
    attention matrix (flash attention). ``overlap``: gradient exchange runs beside backward; ``tensor_overlap``: the
    share of tensor-parallel communication hidden behind matrix products.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    interleave: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    zero: int = 0
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    is_fused_attention: bool = True
    overlap: bool = True
    tensor_overlap: float = 0.0
    dtype: str = "bf16"
    gradient_bytes: float = 4.0
    """Bytes of one gradient element where gradients are reduced: fp32 by default, as bf16 training does."""
    loss_in_last_stage: bool = True

    def __post_init__(self) -> None:
        for field in ("tensor", "pipeline", "data", "context", "expert", "interleave", "micro_batch", "global_batch"):
            if getattr(self, field) < 1:
                raise UsageError(f"got {field} = {getattr(self, field)}", expected="1 or more")
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"got zero = {self.zero}", expected="0, 1, 2 or 3")
        if not 0 <= self.tensor_overlap <= 1 or not 0 < self.gradient_bytes <= 8:
            raise UsageError(
                f"got tensor_overlap = {self.tensor_overlap:g}, gradient_bytes = {self.gradient_bytes:g}",
                expected="an overlap of 0 to 1 and 1 to 8 bytes",
            )

    @property
    def num_ranks(self) -> int:
        """Devices that the layout needs."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that one pipeline runs per step."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def name(self) -> str:
        """Short, such as ``tp8 pp8x3 dp4 mb1 zero1 full``."""
        parts = [f"tp{self.tensor}" + ("+sp" if self.sequence_parallel and self.tensor > 1 else "")]
        parts.append(f"pp{self.pipeline}" + (f"x{self.interleave}" if self.interleave > 1 else ""))
        parts.append(f"dp{self.data}")
        parts += [f"cp{self.context}"] if self.context > 1 else []
        parts += [f"ep{self.expert}"] if self.expert > 1 else []
        parts.append(f"mb{self.micro_batch}")
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += [f"{self.recompute}-recompute"] if self.recompute != "none" else []
        return " ".join(parts)

    def check(self, shape: Transformer) -> None:
        """Raise UsageError naming the sizes that do not divide."""
        share = self.data * self.micro_batch
        rules = (
            (self.global_batch, share, f"global_batch {self.global_batch}", f"data x micro_batch = {share}"),
            (shape.num_heads, self.tensor, f"{shape.num_heads} heads", f"tensor = {self.tensor}"),
            (shape.ffn, self.tensor, f"an MLP of {shape.ffn}", f"tensor = {self.tensor}"),
            (
                shape.num_layers,
                self.pipeline * self.interleave,
                f"{shape.num_layers} layers",
                f"pipeline x interleave = {self.pipeline * self.interleave}",
            ),
            (
                shape.sequence,
                self.context * (self.tensor if self.sequence_parallel else 1),
                f"a sequence of {shape.sequence}",
                f"context x tensor = {self.context * (self.tensor if self.sequence_parallel else 1)}",
            ),
            (shape.experts, self.expert, f"{shape.experts} experts", f"expert = {self.expert}"),
            (
                self.data * self.context,
                self.expert,
                f"data x context = {self.data * self.context}",
                f"expert = {self.expert}",
            ),
        )
        for whole, part, what, by in rules:
            if whole % part:
                raise UsageError(f"got {what} and {by}", expected="the first divisible by the second")
        if self.interleave > 1:
            if self.pipeline == 1:
                raise UsageError("got an interleaved schedule without a pipeline", expected="interleave = 1")
            if self.num_microbatches % self.pipeline:
                raise UsageError(
                    f"got {self.num_microbatches} micro-batches over {self.pipeline} interleaved stages",
                    expected="micro-batches divisible by the stages (Megatron-LM's schedule needs it)",
                )
        if self.zero >= 2 and self.pipeline > 1:
            raise UsageError(
                f"got zero = {self.zero} with a pipeline",
                expected="zero 0 or 1: gradients stay whole between micro-batches",
            )


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
