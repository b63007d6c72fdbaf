"""One rank of a job in which the last host may be slow: a real model and DDP, and a sleep that stands for compute.

    _slow_host.py FOLDER STRATEGY STEPS COMPUTE_S SLOWDOWN     # under RANK and WORLD_SIZE

Leaves ``slow-RANK.json``: seconds per step by this rank's own clock, and whether all ranks agree in the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wirespeed.train

WARM_UP = 5


def main() -> None:
    folder, strategy = Path(sys.argv[1]), sys.argv[2]
    num_steps, compute_s, slowdown = int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    session = wirespeed.train.attach(ddp, optimizer, strategy=strategy)
    mine_s = compute_s * (slowdown if rank == num_ranks - 1 else 1.0)
    data = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    began = 0.0
    for step in range(num_steps + WARM_UP):
        if step == WARM_UP:
            began = time.perf_counter()
        optimizer.zero_grad()
        loss = (ddp(data) - data).pow(2).mean()
        time.sleep(mine_s)
        loss.backward()
        optimizer.step()
    step_s = (time.perf_counter() - began) / num_steps
    session.synchronize()
    session.check_agreement()
    (folder / f"slow-{rank}.json").write_text(json.dumps({"step_s": step_s, "loss": float(loss.detach())}))
    session.release()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
