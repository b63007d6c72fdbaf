"""What a strategy cannot be honoured with: said at once, in words, instead of a hang or a silently dense run."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from wirespeed.errors import UsageError
from wirespeed.spec.strategy import Strategy
from wirespeed.train.scaling import LossScale

_OTHER_ENGINES = {
    "deepspeed": "DeepSpeed exchanges gradients by its own engine: use its compression, or train with DDP",
    "torch.distributed.fsdp": "FSDP shards parameters and has no gradient buckets: wrap the model in DDP instead",
    "apex": "Apex's own DDP has no communication hooks: use torch's",
}


def check_is_ddp(model: object) -> None:
    """Raise UsageError unless ``model`` is torch's DistributedDataParallel."""
    if isinstance(model, DistributedDataParallel):
        return
    bases = [base.__module__ for base in type(model).__mro__]
    hint = next(
        (text for name, text in _OTHER_ENGINES.items() if any(base.startswith(name) for base in bases)),
        "wrap the model first: ddp = DistributedDataParallel(model)",
    )
    raise UsageError(f"got a {type(model).__name__}", expected="a torch.nn.parallel.DistributedDataParallel", hint=hint)


def check_optimizer(optimizer: torch.optim.Optimizer | None) -> None:
    """Raise UsageError for an optimizer that changes gradients while they are exchanged."""
    if hasattr(optimizer, "_amp_stash"):
        raise UsageError(
            "this optimizer is patched by Apex AMP, which changes gradients while they are exchanged",
            hint="use torch.amp (autocast and GradScaler) instead of apex.amp",
        )


def check_model(ddp: DistributedDataParallel, strategy: Strategy) -> None:
    """Raise UsageError where DDP is set up so that no hook, or not every gradient, comes through."""
    if getattr(ddp, "_use_python_reducer", False):
        raise UsageError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer': DDP then has no gradient buckets",
            hint="set it to True ('ddp_optimizer') before DistributedDataParallel is made",
        )
    if getattr(ddp, "mixed_precision", None) is not None:
        raise UsageError(
            "DDP's own mixed_precision brings a communication hook of its own",
            hint="leave mixed_precision out and use torch.autocast",
        )
    if strategy == Strategy(bucket_bytes=strategy.bucket_bytes):
        return
    if getattr(ddp, "_delay_all_reduce_params", None):
        raise UsageError(
            "delay_all_reduce_named_params sends gradients around the communication hook",
            expected=f"all gradients in buckets for strategy {strategy.name!r}",
            hint="leave delay_all_reduce_named_params out",
        )
    if strategy.schedule == "async" and ddp.find_unused_parameters and not ddp.static_graph:
        raise UsageError(
            "find_unused_parameters=True with schedule 'async': DDP asks all ranks in every backward which are unused",
            expected="no collective that every rank has to reach",
            hint="leave it out, pass static_graph=True, or choose schedule local_sgd",
        )
    for name, module in ddp.module.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise UsageError(
                f"module {name!r} makes sparse gradients",
                expected=f"dense gradients for strategy {strategy.name!r}",
                hint="make it with sparse=False",
            )


def check_forward(ddp: DistributedDataParallel, strategy: Strategy, *, is_choosing: bool) -> None:
    """Raise UsageError where the ranks of a Join (uneven inputs) could not keep step."""
    join: Any = getattr(ddp, "_join_config", None)
    if join is None or not join.enable:
        return
    if not getattr(ddp, "_divide_by_initial_world_size", True):
        raise UsageError(
            "Join with divide_by_initial_world_size=False",
            expected="averages over all ranks, those without data counted with zeros",
            hint="leave divide_by_initial_world_size at True",
        )
    if strategy.schedule != "every_step":
        raise UsageError(
            f"uneven inputs (Join) with schedule {strategy.schedule!r}",
            expected="schedule every_step: a rank without data takes no optimizer steps to count",
            hint=f"strategy {strategy.codec_name!r}",
        )
    if is_choosing:
        raise UsageError(
            "uneven inputs (Join) while 'auto' measures: a rank without data could not join the decision",
            hint="name a strategy, such as the one that `wirespeed tune` finds",
        )


def check_scaler(scale: LossScale, strategy: Strategy) -> None:
    """Raise UsageError where a loss scaler and the schedule exclude each other."""
    if scale.is_known and strategy.schedule == "delayed":
        raise UsageError(
            "a GradScaler with schedule 'delayed': gradients would be unscaled by the scale of another step",
            hint="train in bfloat16 (autocast without a scaler), or choose schedule every_step",
        )
