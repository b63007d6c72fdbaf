"""What attaching costs where nothing is gained: ``attach(..., "dense")`` against plain DistributedDataParallel.

Two ranks on loopback train two copies of a model, one with a session and one without, in one process each: a pair of
blocks of a few steps, the order turned from pair to pair, all ranks meeting before each block. Two plain copies differ
by up to 1 %, for the whole life of a process, by where their tensors lie; so the session goes from one copy to the
other every few pairs, and a pair from before is taken together with one from after: the geometric mean of their two
ratios, in which what a copy itself costs cancels. The overhead is the median of these, less one; its upper 95 % bound
is that of the median's confidence interval by order statistics, which assumes nothing of how disturbances are
distributed. Parameters of both are compared byte by byte at the end: the session must not change what is learned.

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
from wirespeed.train.session import Session

RANKS = 2
NUM_PAIRS, NUM_QUICK_PAIRS = 960, 80
PAIRS_PER_TURN = 10
STEPS_PER_BLOCK = 3
WARMUP_PAIRS, WARMUP_PAIRS_PER_TURN = 5, 1
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

    def __init__(self, rank: int) -> None:
        self.model = make_model()
        self._ddp = DistributedDataParallel(self.model)
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=0.01, momentum=0.9)
        self._session: Session | None = None
        source = torch.Generator().manual_seed(rank)
        self._inputs = torch.randn(BATCH, SIZES[0], generator=source)
        self._labels = torch.randint(SIZES[-1], (BATCH,), generator=source)

    def attach(self) -> None:
        """Train with a session from now on."""
        self._session = wirespeed.train.attach(self._ddp, self._optimizer, strategy="dense")

    def release(self) -> None:
        """Train as plain DDP from now on."""
        if self._session is not None:
            self._session.release()
            self._session = None

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
    first, second = Trainer(rank), Trainer(rank)
    for _ in range(WARMUP_PAIRS):
        first.block_s()
        second.block_s()
    turns = []
    for turn in range(num_pairs // PAIRS_PER_TURN):
        plain, ours = (first, second) if turn % 2 == 0 else (second, first)
        ours.attach()
        turns.append(pairs_of_turn(plain, ours))
        ours.release()
    both = zip(first.model.parameters(), second.model.parameters(), strict=True)
    is_equal = all(torch.equal(mine, other) for mine, other in both)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps({"turns": turns, "is_equal": is_equal}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def pairs_of_turn(plain: Trainer, ours: Trainer) -> list[tuple[float, float]]:
    """Seconds of blocks without and with the session, while it stays with one of the two."""
    pairs = []
    for pair in range(-WARMUP_PAIRS_PER_TURN, PAIRS_PER_TURN):
        times = {}
        for trainer in (plain, ours) if pair % 2 == 0 else (ours, plain):
            times[trainer is ours] = trainer.block_s()
        if pair >= 0:
            pairs.append((times[False], times[True]))
    return pairs


def overheads(turns: list[list[list[float]]]) -> list[float]:
    """Of one pair of a turn and one of the next, in which the copies have changed places: the mean ratio of both."""
    return [
        math.sqrt(ours / plain * other_ours / other_plain)
        for turn, other in zip(turns[::2], turns[1::2], strict=True)
        for (plain, ours), (other_plain, other_ours) in zip(turn, other, strict=True)
    ]


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
    num_pairs = NUM_QUICK_PAIRS if options.quick else NUM_PAIRS
    with tempfile.TemporaryDirectory(prefix="wirespeed-bench-") as folder:
        mp.spawn(run_rank, (folder, num_pairs), nprocs=RANKS)
        held: dict[str, Any] = json.loads(Path(folder, "times.json").read_text(encoding="utf-8"))
    if not held["is_equal"]:
        raise SystemExit("the session changed what was learned: parameters differ from plain DDP's")
    ratios = overheads(held["turns"])
    lower, upper = median_bounds(ratios)
    step_ms = median(plain for turn in held["turns"] for plain, _ in turn) / STEPS_PER_BLOCK * 1e3
    print(
        f"{num_pairs} pairs of blocks of {STEPS_PER_BLOCK} steps of {step_ms:.1f} ms, {RANKS} ranks: "
        f"overhead {median(ratios) - 1:+.2%} ({lower - 1:+.2%} to {upper - 1:+.2%}), equal parameters"
    )
    bars = [Bar("overhead of dense over plain DDP, upper 95 % bound of the median, %", 100 * (upper - 1), 1.0, False)]
    results = {"step_ms": step_ms, "overhead": median(ratios) - 1, "bounds": [lower - 1, upper - 1], **held}
    return finish("overhead", bars, results, check=options.check, is_quick=options.quick, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
