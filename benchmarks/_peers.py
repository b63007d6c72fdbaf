"""PyTorch's own ways to send fewer gradients, and others' averaging, as arms: what each registers, and what it needs.

    torch-fp16                   fp16_compress_hook
    torch-powersgd@RANK          powerSGD_hook, error feedback and warm start, from the second step on
    torch-quantize, -channels    quantization_pertensor_hook, quantization_perchannel_hook
    torch-post-local-sgd@PERIOD  post_localSGD_hook, with PeriodicModelAverager after every step
    torchft-*, hivemind*         see _averaging_peers.py

Hooks that issue collectives out of callbacks hang or abort on gloo with several buckets, because the order is lost
(pytorch#48478): they get one bucket, which is what a user on gloo has to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from _averaging_peers import is_averaging, keep_gradient

POWERSGD_START = 2
"""The earliest that the hook allows: DDP forms its buckets anew after the first step. Anything later is slower."""
LOCAL_START = 10
"""Steps with every gradient averaged before the ranks part, where a model is trained."""
ONE_BUCKET_MIB = 1024


def make_hook(peer: str, *, local_start: int = LOCAL_START) -> tuple[Any, Any]:
    """``(hook, state)`` of a peer; the process group has to be there."""
    name, _, parameter = peer.partition("@")
    if is_averaging(peer):
        return keep_gradient, None
    match name:
        case "torch-fp16":
            return default_hooks.fp16_compress_hook, None
        case "torch-quantize":
            return quantization_hooks.quantization_pertensor_hook, None
        case "torch-quantize-channels":
            return quantization_hooks.quantization_perchannel_hook, None
        case "torch-powersgd":
            return powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=int(parameter),
                start_powerSGD_iter=POWERSGD_START,
                min_compression_rate=1,
            )
        case "torch-post-local-sgd":
            return post_localSGD_hook.post_localSGD_hook, post_localSGD_hook.PostLocalSGDState(
                process_group=None,
                subgroup=None,
                start_localSGD_iter=local_start,
                post_local_gradient_allreduce=False,
            )
    raise SystemExit(f"unknown peer {peer!r}")


def needs_one_bucket(peer: str) -> bool:
    """Whether the hook issues collectives out of callbacks."""
    return peer.startswith(("torch-powersgd", "torch-quantize"))


def make_averager(peer: str, *, local_start: int = LOCAL_START) -> Callable[[Any], None] | None:
    """What the script has to call with its parameters after every optimizer step, if anything."""
    if not peer.startswith("torch-post-local-sgd"):
        return None
    averager = PeriodicModelAverager(period=int(peer.partition("@")[2]), warmup_steps=local_start)
    return averager.average_parameters


def is_peer(arm: str) -> bool:
    """Whether the arm is somebody else's, and no strategy of wirespeed's."""
    return arm.startswith("torch-") or is_averaging(arm)


def period_of(arm: str) -> int:
    """Steps of which one sends and the others do not; 1 where every step sends."""
    is_periodic = is_averaging(arm) or "local-sgd" in arm or "local_sgd" in arm
    return int(arm.rpartition("@")[2]) if is_periodic else 1
