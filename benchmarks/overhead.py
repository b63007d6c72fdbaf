"""What attaching costs where nothing is gained: ``attach(..., "dense")`` against plain DistributedDataParallel.

Two ranks on loopback train the same model twice over, once with a session and once without, in one process each: a pair
of blocks of a few steps, the order turned from pair to pair, all ranks meeting before each block. The overhead is the
median over pairs of the ratio of their times, less one; its upper 95 % bound is that of the median's confidence
interval by order statistics, which assumes nothing of how disturbances are distributed. Parameters of both are compared
byte by byte at the end: the session must not change what is learned.

    python benchmarks/overhead.py --check
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wirespeed.train
from _harness import Bar, arguments, finish

RANKS = 2
PAIRS, QUICK_PAIRS = 240, 40
STEPS_PER_BLOCK = 3
WARMUP_PAIRS = 5
SIZES = (784, 1024, 1024, 1024, 10)
BATCH = 128
CONFIDENCE = 0.95


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(SIZES):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Trainer:
    """One of the two: a model in DDP, an optimizer, and a fixed batch."""

    def __init__(self, rank: int, *, has_session: bool) -> None:
        self.model = make_model()
        self._ddp = DistributedDataParallel(self.model)
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=0.01, momentum=0.9)
        self.session = wirespeed.train.attach(self._ddp, self._optimizer, strategy="dense") if has_session else None
        source = torch.Generator().manual_seed(rank)
        self._inputs = torch.randn(BATCH, SIZES[0], generator=source)
        self._labels = torch.randint(SIZES[-1], (BATCH,), generator=source)

    def block_s(self) -> float:
        """Seconds of one block, from a point where all ranks have met."""
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK):
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self._ddp(self._inputs), self._labels).backward()
            self._optimizer.step()
        return time.perf_counter() - began_s


def run_rank(rank: int, folder: str, num_pairs: int) -> None:
    """All pairs on one rank; rank 0 leaves the times in the folder."""
    torch.set_num_threads(1)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    plain, ours = Trainer(rank, has_session=False), Trainer(rank, has_session=True)
    pairs = []
    for pair in range(-WARMUP_PAIRS, num_pairs):
        times = {}
        for trainer in (plain, ours) if pair % 2 == 0 else (ours, plain):
            times[trainer is ours] = trainer.block_s()
        if pair >= 0:
            pairs.append((times[False], times[True]))
    is_equal = all(
        torch.equal(mine, other) for mine, other in zip(plain.model.parameters(), ours.model.parameters(), strict=True)
    )
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps({"pairs": pairs, "is_equal": is_equal}), encoding="utf-8")
    dist.barrier()
    if ours.session is not None:
        ours.session.release()
    dist.destroy_process_group()


def median_bounds(values: list[float]) -> tuple[float, float]:
    """The two-sided 95 % confidence interval of the median, by order statistics (the binomial taken as normal)."""
    ordered, count = sorted(values), len(values)
    half = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * math.sqrt(count) / 2
    first = max(0, math.floor(count / 2 - half))
    last = min(count - 1, math.ceil(count / 2 + half))
    return ordered[first], ordered[last]


def main() -> int:
    options = arguments(str(__doc__))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    num_pairs = QUICK_PAIRS if options.quick else PAIRS
    with tempfile.TemporaryDirectory(prefix="wirespeed-bench-") as folder:
        mp.spawn(run_rank, (folder, num_pairs), nprocs=RANKS)
        held: dict[str, Any] = json.loads(Path(folder, "times.json").read_text(encoding="utf-8"))
    if not held["is_equal"]:
        raise SystemExit("the session changed what was learned: parameters differ from plain DDP's")
    ratios = [ours / plain for plain, ours in held["pairs"]]
    lower, upper = median_bounds(ratios)
    step_ms = median(plain for plain, _ in held["pairs"]) / STEPS_PER_BLOCK * 1e3
    print(
        f"{num_pairs} pairs of {STEPS_PER_BLOCK} steps of {step_ms:.1f} ms, {RANKS} ranks: "
        f"overhead {median(ratios) - 1:+.2%} ({lower - 1:+.2%} to {upper - 1:+.2%}), equal parameters"
    )
    bars = [Bar("overhead of dense over plain DDP, upper 95 % bound of the median, %", 100 * (upper - 1), 1.0, False)]
    results = {"step_ms": step_ms, "overhead": median(ratios) - 1, "bounds": [lower - 1, upper - 1], **held}
    return finish("overhead", bars, results, check=options.check, is_quick=options.quick, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
