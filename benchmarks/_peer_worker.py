"""Run a script as `wirespeed.tune.worker` does, with a peer's exchange in place of a strategy.

``python benchmarks/_peer_worker.py PEER SCRIPT [ARGS]`` with a PEER of ``_peers.py``. The clock, the loss and the end
of the run are those of every other arm: only what happens to a bucket, and after a step, differs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from _averaging_peers import is_averaging, make_averaging
from _peers import ONE_BUCKET_MIB, make_averager, make_hook, needs_one_bucket
from wirespeed.train.listening import after_backward
from wirespeed.train.session import Session
from wirespeed.tune import worker


def install(peer: str) -> None:
    """From now on every session's exchange is the peer's hook."""
    held: dict[int, tuple[Any, Any]] = {}
    averagers: list[Any] = []

    def exchange(session: Session, bucket: Any) -> Any:
        if bucket.is_last():
            session.clock.mark("last_bucket_ready")
            after_backward(session._backward_ended)
        else:
            session.clock.mark("bucket_ready")
        hook, state = held.setdefault(id(session), make_hook(peer))
        return hook(state, bucket)

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if dist.is_initialized():
            averagers.append(make_averager(peer)) if not averagers else None
            averagers[0](optimizer.param_groups)

    if is_averaging(peer):
        average_from_construction(peer)
    if peer.startswith("torch-post-local-sgd"):
        # Before the session's own hook, which ends the step: the averaging is part of it.
        register_optimizer_step_post_hook(stepped)
    Session.exchange = exchange  # type: ignore[method-assign]
    Session._is_native = property(lambda _: False)  # type: ignore[assignment, method-assign]  # dense has no hook else
    if needs_one_bucket(peer):
        construct: Any = DistributedDataParallel.__init__

        def with_one_bucket(ddp: Any, *args: Any, **options: Any) -> None:
            construct(ddp, *args, **{**options, "bucket_cap_mb": ONE_BUCKET_MIB})

        patched: Any = DistributedDataParallel
        patched.__init__ = with_one_bucket
    write = worker.write_trace

    def write_if_called(directive: Any, trace: Any) -> Any:
        if not held and trace.error is None:  # a figure of dense would stand for the peer's
            raise SystemExit(f"the hook of {peer} was never called")
        return write(directive, trace)

    worker.write_trace = write_if_called


def average_from_construction(peer: str) -> None:
    """Set the peer up where the script makes its DDP model, which no step's time holds, and call it after steps."""
    at_work: list[Any] = []
    construct: Any = DistributedDataParallel.__init__

    def with_averaging(ddp: Any, *args: Any, **options: Any) -> None:
        construct(ddp, *args, **options)
        at_work.append(make_averaging(peer, ddp.module))

    patched: Any = DistributedDataParallel
    patched.__init__ = with_averaging
    register_optimizer_step_post_hook(lambda optimizer, *_: at_work[0].stepped(optimizer) if at_work else None)
    destroy = dist.destroy_process_group

    def close_and_destroy(*args: Any, **options: Any) -> None:
        while at_work:
            at_work.pop().close()
        destroy(*args, **options)

    dist.destroy_process_group = close_and_destroy


if __name__ == "__main__":
    torch.set_num_threads(1)
    install(sys.argv[1])
    assert not dist.is_initialized()
    worker.main(sys.argv[2:])
