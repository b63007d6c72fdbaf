"""One rank of a replay in which wirespeed's strategies and their peers take turns in one process group.

    _peer_replay_rank.py FOLDER MODEL COMPUTE_S SCALE NUM_STEPS ROUND ARM...     # under RANK and WORLD_SIZE

Every arm has a DDP model of its own over the same sleeping layers. ``torch-dense`` is plain DDP; ``auto`` and
``auto-compressed`` choose first, untimed. Arms that send once in so many steps are timed over a whole period. Leaves
``rank-R.json``: seconds per step of every arm, by this rank's clock, and what ``auto`` chose.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wirespeed.train
from _averaging_peers import is_averaging, make_averaging
from _peers import ONE_BUCKET_MIB, is_peer, make_averager, make_hook, needs_one_bucket, period_of
from wirespeed.plan.models import load_model, replay_workload
from wirespeed.spec.strategy import Strategy
from wirespeed.spec.workload import TrainingWorkload
from wirespeed.tune.replay_layers import ReplayModule, ReplayOptimizer

WARM_UP = 2
MAX_CHOOSING = 60
DEFAULT_BUCKET_MIB = 25


class ArmAtWork:
    """One arm's model, and how it takes a step."""

    def __init__(self, name: str, workload: TrainingWorkload, scale: float, rank: int) -> None:
        self.name = name
        module = ReplayModule(workload, seed=rank)
        for layer in module.layers:  # of their own memory: what averages parameters writes to every one of them
            layer.parameter = torch.nn.Parameter(torch.zeros(layer.parameter.shape))
        self._optimizer = ReplayOptimizer(module.parameters(), step_s=workload.optimizer_s + workload.other_s)
        is_others = is_peer(name)
        self.session: Any = None
        self._average: Any = None
        self._averaging: Any = None
        cap_mib = ONE_BUCKET_MIB if is_others and needs_one_bucket(name) else DEFAULT_BUCKET_MIB / scale
        self._ddp = DistributedDataParallel(
            module, bucket_cap_mb=cap_mib, gradient_as_bucket_view=True, init_sync=False, broadcast_buffers=False
        )
        self._module = module
        self._batch = torch.zeros(())
        if is_others and name != "torch-dense":
            hook, state = make_hook(name, local_start=0)
            self._ddp.register_comm_hook(state, hook)
            self._average = make_averager(name, local_start=0)
            if is_averaging(name):
                self._averaging = make_averaging(name, module)
        elif name.startswith("auto"):
            fidelity: Any = name.partition("-")[2] or "half"
            self.session = wirespeed.train.attach(self._ddp, self._optimizer, strategy="auto", fidelity=fidelity)
        elif not is_others:
            strategy = Strategy.parse(name)
            strategy = msgspec.structs.replace(strategy, bucket_bytes=round(strategy.bucket_bytes / scale))
            self.session = wirespeed.train.attach(self._ddp, self._optimizer, strategy=strategy)

    def take(self) -> float:
        """One step, in seconds."""
        began_s = time.monotonic()
        self._optimizer.zero_grad()
        self._ddp(self._batch).backward()
        self._optimizer.step()
        if self._average is not None:
            self._average(self._module.parameters())
        if self._averaging is not None:
            self._averaging.stepped(self._optimizer)
        return time.monotonic() - began_s

    def close(self) -> None:
        """Leave nothing of it at work."""
        if self.session is not None:
            self.session.release()
        if self._averaging is not None:
            self._averaging.close()

    def choose(self) -> str | None:
        """Let ``auto`` come to its end; what it chose."""
        if not self.name.startswith("auto"):
            return None
        for _ in range(MAX_CHOOSING):
            if not self.session.is_choosing:
                break
            self.take()
        return str(self.session.strategy.name)


def main() -> None:
    folder, model, compute_s, scale = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    num_steps, round_, names = int(sys.argv[5]), int(sys.argv[6]), sys.argv[7:]
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
    dist.init_process_group("gloo")
    workload = replay_workload(load_model(model), num_ranks=num_ranks, compute_s=compute_s, scale=scale)
    told: dict[str, Any] = {}
    for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
        arm = ArmAtWork(name, workload, scale, rank)
        dist.barrier()
        chosen = arm.choose()
        for _ in range(WARM_UP):
            arm.take()
        dist.barrier()
        num_timed = max(num_steps, period_of(name))
        told[name] = {"steps_s": [arm.take() for _ in range(num_timed)], "chosen": chosen}
        arm.close()
        if rank == 0:
            print(f"{name}: {told[name]['steps_s']} {chosen or ''}", file=sys.stderr, flush=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
