"""One rank that lives through many faults: torch is started once, and every case runs in a fork of this process.

``python fault_rank.py FOLDER``, under the SPMD variables. ``FOLDER/cases.json`` is a list of batches, a batch a list of
cases that run at the same time; the ranks of a case meet in ``FOLDER/BATCH/CASE``, over files, so that no fault of
theirs touches the machinery around them. What becomes of rank R is left there in ``rank-R.json``: the exception that
ended it or ``done``, when, and a hash of its parameters after every step at which the strategy makes them equal.

The victim fails in the step FAULT_STEP, at the phase that the case names:

    attach      before the session is made
    forward     before the model's forward
    backward    in its last gradient, with the exchange of earlier buckets under way
    exchange    in the exchange itself, between two of its collectives: of gradients, of a period, of a round of async
    optimizer   before the optimizer steps
    between     after it has stepped
    evaluation  before the ranks average a held-out loss, which is a collective of the script's own

and by a fault: ``kill`` (SIGKILL), ``pause`` (SIGSTOP until all others have ended), ``hiccup`` (SIGSTOP for a moment) or
``partition`` (whoever holds the network cuts it off once all victims of the batch have left a file ``at``).
"""

from __future__ import annotations

import datetime
import faulthandler
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_cases import FAULT_STEP
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import wirespeed.train
from wirespeed.train import lanes, native
from wirespeed.train.codecs import warm_up

NUM_STEPS = 18
MEET_S = 60.0
"""For all ranks to start one case: a busy machine forks slowly."""
HUNG_S = 75.0
"""A rank that has not ended so long after its fork hangs: its stacks are taken, and it is killed."""
HICCUP_S = 1.0
RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def wait_for(test: Any, what: str, timeout_s: float) -> None:
    """Poll until true; TimeoutError at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not test():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.01)


def leave(path: Path, text: str = "") -> None:
    """Write a file that is either whole or absent."""
    held = path.with_name(f".{path.name}-{RANK}")
    held.write_text(text)
    held.rename(path)


class Fault:
    """The fault of one case, on its victim; nothing on the other ranks."""

    def __init__(self, case: dict[str, Any], place: Path) -> None:
        self.step = 0
        self._case, self._place = case, place
        self._is_armed = case["victim"] == RANK
        self._num_collectives = 0
        if self._is_armed and case["phase"] == "exchange":
            self._listen_to_collectives()

    def at(self, phase: str) -> None:
        """The victim is here."""
        if not self._is_armed or phase != self._case["phase"]:
            return
        if phase != "attach" and self.step < FAULT_STEP:
            return
        self._is_armed = False
        leave(self._place / "at", repr(time.monotonic()))
        match self._case["fault"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "pause" | "hiccup":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "partition":
                wait_for((self._place.parent / "is-cut").exists, "the network is cut", MEET_S)

    def _listen_to_collectives(self) -> None:
        """Fail before the second collective of an exchange: the first has been sent, or is under way."""
        perform, all_reduce = lanes.perform, dist.all_reduce

        def heard() -> None:
            if self.step >= FAULT_STEP:
                self._num_collectives += 1
                if self._num_collectives == 2:
                    self.at("exchange")

        def performed(*args: Any, **options: Any) -> None:
            heard()
            perform(*args, **options)

        def reduced(*args: Any, **options: Any) -> Any:
            heard()
            return all_reduce(*args, **options)

        lanes.perform = performed
        dist.all_reduce = reduced
        # Dense that DDP reduces itself: every bucket has been given to the backend, none has been waited for.
        computed = native.NativeReduction._computed

        def begun(reduction: native.NativeReduction) -> None:
            if self.step >= FAULT_STEP:
                self.at("exchange")
            computed(reduction)

        native.NativeReduction._computed = begun


def join_group(case: dict[str, Any], place: Path) -> None:
    """The process group of one case, over a store that its rank 0 opens on a free port."""
    leave(place / f"ready-{RANK}")
    wait_for(lambda: len(list(place.glob("ready-*"))) == NUM_RANKS, "every rank has forked", MEET_S)
    timeout = datetime.timedelta(seconds=MEET_S)
    host = os.environ["MASTER_ADDR"]
    if RANK == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        leave(place / "port", str(store.port))
    else:
        wait_for((place / "port").exists, "rank 0 has opened its store", MEET_S)
        store = dist.TCPStore(host, int((place / "port").read_text()), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=NUM_RANKS, timeout=timeout)


def hash_of(model: torch.nn.Module) -> str:
    """Of every byte of the parameters."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def train(case: dict[str, Any], place: Path, told: dict[str, Any]) -> None:
    """Train as users do, and fail as the case says."""
    fault = Fault(case, place)
    join_group(case, place)
    torch.manual_seed(0)
    sizes = (64, 256, 256, 8)
    parts = [[torch.nn.Linear(a, b), torch.nn.ReLU()] for a, b in itertools.pairwise(sizes)]
    model = torch.nn.Sequential(*[layer for pair in parts for layer in pair][:-1])
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    os.environ["WIRESPEED_HOST"] = f"h{RANK // 2}"
    # Only now: on a busy machine forks begin seconds apart, and that is not what is tested.
    dist.barrier()
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=case["timeout_s"]), dist.group.WORLD)
    fault.at("attach")
    session = wirespeed.train.attach(ddp, optimizer, strategy=case["strategy"])
    next(model.parameters()).register_hook(lambda gradient: fault.at("backward"))
    optimizer.register_step_pre_hook(lambda *_: fault.at("optimizer"))
    for step in range(NUM_STEPS):
        fault.step = step
        generator = torch.Generator().manual_seed(1000 * step + RANK)
        x, y = torch.randn(16, 64, generator=generator), torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        fault.at("forward")
        loss = torch.nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        told["num_steps"] = step + 1
        if session.num_steps_apart == 0:
            told["hashes"][str(step)] = hash_of(model)
        fault.at("between")
        if step == FAULT_STEP and case["phase"] == "evaluation":
            session.synchronize()
            model.eval()
            with torch.no_grad(), session.evaluation():
                held_out = torch.nn.functional.mse_loss(ddp(x), y)
                fault.at("evaluation")
                dist.all_reduce(held_out)
            model.train()
    session.synchronize()
    told["hashes"]["end"] = hash_of(model)


def live(case: dict[str, Any], place: Path) -> None:
    """The child of one case: never returns."""
    stacks = (place / f"stack-{RANK}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    told: dict[str, Any] = {"end": "done", "message": "", "num_steps": 0, "hashes": {}}
    try:
        train(case, place, told)
    except BaseException as fault:
        told["end"], told["message"] = type(fault).__name__, str(fault)
    told["ended_s"] = time.monotonic()
    leave(place / f"rank-{RANK}.json", json.dumps(told))
    os._exit(0)


def run_batch(batch: list[dict[str, Any]], folder: Path) -> None:
    """Fork a child per case, let stopped ones go on when it is time, and see to it that all end."""
    children: dict[int, tuple[dict[str, Any], Path]] = {}
    stopped_s: dict[int, float] = {}
    for case in batch:
        place = folder / case["name"]
        place.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            live(case, place)
        children[pid] = (case, place)
    deadline_s = time.monotonic() + HUNG_S
    while children:
        for pid, (case, place) in list(children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if ended and os.WIFSTOPPED(status):
                stopped_s[pid] = time.monotonic()
            elif ended:
                del children[pid]
                continue
            if pid in stopped_s and may_go_on(case, place, stopped_s[pid]):
                del stopped_s[pid]
                os.kill(pid, signal.SIGCONT)
            if time.monotonic() > deadline_s:
                give_up(pid, place)
        time.sleep(0.01)
    if batch[0]["fault"] == "partition":
        wait_for((folder / "is-healed").exists, "the network is whole again", MEET_S + HUNG_S)


def may_go_on(case: dict[str, Any], place: Path, since_s: float) -> bool:
    """Whether a stopped victim has been stopped for long enough."""
    if case["fault"] == "hiccup":
        return time.monotonic() - since_s > HICCUP_S
    return all((place / f"rank-{rank}.json").exists() for rank in range(NUM_RANKS) if rank != RANK)


def give_up(pid: int, place: Path) -> None:
    """Take the stacks of a child that hangs, and kill it."""
    os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    stacks = (place / f"stack-{RANK}").read_text()
    told = {"end": "hung", "message": stacks, "num_steps": 0, "hashes": {}, "ended_s": time.monotonic()}
    leave(place / f"rank-{RANK}.json", json.dumps(told))


def main() -> None:
    """Every batch in turn."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Before the forks, which inherit it: what is compiled, and some seconds of modules that torch imports on first use.
    warm_up()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.zero_grad()
    optimizer.step()
    torch.compiler.disable(lambda: None)()
    for number, batch in enumerate(json.loads((folder / "cases.json").read_text())):
        run_batch(batch, folder / str(number))


if __name__ == "__main__":
    main()
