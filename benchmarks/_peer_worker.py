"""Run a script as `wirespeed.tune.worker` does, with one of PyTorch's own communication hooks in place of a strategy.

``python benchmarks/_peer_worker.py PEER SCRIPT [ARGS]`` with PEER ``torch-fp16`` or ``torch-powersgd@RANK``. The clock,
the loss and the end of the run are those of every other arm: only what happens to a bucket differs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from wirespeed.train.listening import after_backward
from wirespeed.train.session import Session
from wirespeed.tune import worker

POWERSGD_START = 2
"""The earliest that the hook allows: DDP forms its buckets anew after the first step. Anything later is slower."""

ONE_BUCKET_MIB = 1024
"""PowerSGD's hook hangs or aborts on gloo with several buckets: collectives issued in callbacks lose their order."""


def make_hook(peer: str) -> tuple[Any, Any]:
    """``(hook, state)`` of a peer."""
    if peer == "torch-fp16":
        return default_hooks.fp16_compress_hook, None
    name, _, rank = peer.partition("@")
    if name == "torch-powersgd":
        return powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=int(rank),
            start_powerSGD_iter=POWERSGD_START,
            min_compression_rate=1,
        )
    raise SystemExit(f"unknown peer {peer!r}")


def install(peer: str) -> None:
    """From now on every session's exchange is the peer's hook."""
    held: dict[int, tuple[Any, Any]] = {}

    def exchange(session: Session, bucket: Any) -> Any:
        if bucket.is_last():
            session.clock.mark("last_bucket_ready")
            after_backward(session._backward_ended)
        else:
            session.clock.mark("bucket_ready")
        hook, state = held.setdefault(id(session), make_hook(peer))
        return hook(state, bucket)

    Session.exchange = exchange  # type: ignore[method-assign]
    if "powersgd" in peer:
        construct: Any = DistributedDataParallel.__init__

        def with_one_bucket(ddp: Any, *args: Any, **options: Any) -> None:
            construct(ddp, *args, **{**options, "bucket_cap_mb": ONE_BUCKET_MIB})

        patched: Any = DistributedDataParallel
        patched.__init__ = with_one_bucket


if __name__ == "__main__":
    torch.set_num_threads(1)
    install(sys.argv[1])
    assert not dist.is_initialized()
    worker.main(sys.argv[2:])
