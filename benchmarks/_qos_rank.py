"""One rank of the job in benchmarks/qos.py: real DDP over ResNet-50's gradients, its compute a sleep.

    _qos_rank.py FOLDER ROUNDS STEPS COMPUTE_S SCALE DSCP STRATEGY     # under RANK and WORLD_SIZE

Trains in blocks, all in one process group: with and without the mark on its connections, with and without the bursts,
which it switches on and off by files in FOLDER. Leaves ``rank-R.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from wirespeed.plan.models import load_model, replay_workload
from wirespeed.spec.strategy import Strategy
from wirespeed.train.registry import start_session
from wirespeed.tune.replay_layers import ReplayModule, ReplayOptimizer

ARMS = {"quiet": (False, False), "bursts": (False, True), "bursts, classes": (True, True), "classes": (True, False)}
"""Whether connections are marked, and whether there are bursts."""
ALONE = "bursts alone"
ALONE_S = 3.0
WARM_UP = 2
SETTLE_S = 1.5
"""For bursts to come into their rhythm, or to drain, before a block begins."""


def main() -> None:
    folder = Path(sys.argv[1])
    num_rounds, num_steps = int(sys.argv[2]), int(sys.argv[3])
    compute_s, scale, dscp = float(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
    dist.init_process_group("gloo")
    workload = replay_workload(load_model("resnet50"), num_ranks=num_ranks, compute_s=compute_s, scale=scale)
    strategy = Strategy.parse(sys.argv[7])
    strategy = msgspec.structs.replace(strategy, bucket_bytes=round(strategy.bucket_bytes / scale))
    module = ReplayModule(workload, seed=rank)
    ddp = DistributedDataParallel(
        module,
        bucket_cap_mb=strategy.bucket_bytes / 2**20,
        gradient_as_bucket_view=True,
        init_sync=False,
        broadcast_buffers=False,
    )
    optimizer = ReplayOptimizer(module.parameters(), step_s=workload.optimizer_s + workload.other_s)
    session = start_session(ddp, optimizer, strategy)
    batch = torch.zeros(())

    def take() -> float:
        began_s = time.monotonic()
        optimizer.zero_grad()
        ddp(batch).backward()
        optimizer.step()
        return time.monotonic() - began_s

    def switch_bursts(*, on: bool) -> None:
        dist.barrier()
        if rank == 0:
            (folder / "on").touch() if on else (folder / "on").unlink(missing_ok=True)
        time.sleep(SETTLE_S)
        dist.barrier()

    blocks = []
    num_marked = 0
    for _ in range(3):  # buckets are formed, connections grow their windows
        take()
    names = list(ARMS)
    for round_ in range(num_rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            is_marked, has_bursts = ARMS[name]
            num_marked = max(num_marked, session.mark_traffic(dscp if is_marked else 0))
            switch_bursts(on=has_bursts)
            for _ in range(WARM_UP):
                take()
            stated_before, began_s = session.wire[-1][0], time.monotonic()
            steps_s = [take() for _ in range(num_steps)]
            ended_s, stated = time.monotonic(), session.wire[-1][0] - stated_before
            blocks.append(
                {"arm": name, "began_s": began_s, "ended_s": ended_s, "steps_s": steps_s, "stated_bytes": stated}
            )
        switch_bursts(on=True)
        began_s = time.monotonic()
        time.sleep(ALONE_S)
        blocks.append({"arm": ALONE, "began_s": began_s, "ended_s": time.monotonic(), "steps_s": [], "stated_bytes": 0})
        switch_bursts(on=False)
    told = {"blocks": blocks, "num_marked": num_marked, "stated_bytes": session.wire[-1][0], "first_class": None}
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
