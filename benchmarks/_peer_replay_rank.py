"""One rank of a replay in which wirespeed's strategies and PyTorch's hooks take turns in one process group.

    _peer_replay_rank.py FOLDER MODEL COMPUTE_S SCALE NUM_STEPS ROUND ARM...     # under RANK and WORLD_SIZE

Every arm has a DDP model of its own over the same sleeping layers. ``torch-dense`` is plain DDP; ``auto`` and
``auto-compressed`` choose first, untimed. Leaves ``rank-R.json``: seconds per step of every arm, by this rank's clock,
and what ``auto`` chose.
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
from _peers import ONE_BUCKET_MIB, make_averager, make_hook, needs_one_bucket
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
        is_peer = name.startswith("torch-")
        self.session: Any = None
        self._average: Any = None
        cap_mib = ONE_BUCKET_MIB if is_peer and needs_one_bucket(name) else DEFAULT_BUCKET_MIB / scale
        self._ddp = DistributedDataParallel(
            module, bucket_cap_mb=cap_mib, gradient_as_bucket_view=True, init_sync=False, broadcast_buffers=False
        )
        self._module = module
        self._batch = torch.zeros(())
        if is_peer and name != "torch-dense":
            hook, state = make_hook(name)
            self._ddp.register_comm_hook(state, hook)
            self._average = make_averager(name)
        elif name.startswith("auto"):
            fidelity: Any = name.partition("-")[2] or "half"
            self.session = wirespeed.train.attach(self._ddp, self._optimizer, strategy="auto", fidelity=fidelity)
        elif not is_peer:
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
        return time.monotonic() - began_s

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
        told[name] = {"steps_s": [arm.take() for _ in range(num_steps)], "chosen": chosen}
        if arm.session is not None:
            arm.session.release()
        if rank == 0:
            print(f"{name}: {told[name]['steps_s']} {chosen or ''}", file=sys.stderr, flush=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
