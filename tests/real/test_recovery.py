"""Recovery: a rank is killed in the middle of a step, torchrun starts all ranks again, and training goes on from the
last checkpoint that all ranks have, to the very bits of a run in which nothing happened.

Covered: killed in backward with an exchange under way, and again, in the second life, in an exchange of a period; every
kind of schedule and the codecs that keep state. async, whose runs never repeat bit by bit, ends with equal parameters.
"""

import json
import os
import subprocess
import sys

import pytest
from ranks import PREAMBLE

PROGRAM = (
    PREAMBLE.replace('dist.init_process_group("gloo")', "")
    + """
import datetime, hashlib, signal
from wirespeed.train import lanes

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
folder = Path(sys.argv[1])
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
NUM_STEPS, SAVE_EVERY = 11, 3
REPEATS = ["dense", "int8/64KiB", "topk@5%/64KiB", "lowrank@2/64KiB", "int8/64KiB/delayed", "dense/local_sgd@4",
           "int8/64KiB/diloco@4"]


class Run:
    def __init__(self, name):
        self.name = name
        self.model = make_model()
        # Buckets that never change: int8 blocks then begin at the same elements in every life.
        self.ddp = DDP(self.model, find_unused_parameters="async" not in name)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=0.9)
        self.session = wirespeed.train.attach(self.ddp, self.optimizer, strategy=name)

    def take(self, step):
        x, y = batch(step)
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.ddp(x), y).backward()
        self.optimizer.step()

    def state(self):
        if "async" in self.name:
            self.session.synchronize()
        return dict(model=self.model.state_dict(), optimizer=self.optimizer.state_dict(), session=self.session.state_dict())

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.session.load_state_dict(state["session"])


def place_of(step):
    return folder / f"step-{step}-rank-{rank}.pt"


def last_of_all():
    # A rank may have died before it saved what another has.
    mine = max((step for step in range(NUM_STEPS) if place_of(step).exists()), default=0)
    common = torch.tensor([mine])
    dist.all_reduce(common, op=dist.ReduceOp.MIN)
    return int(common)


runs = {name: Run(name) for name in [*REPEATS, "int8/64KiB/async"]}
begin = last_of_all()
if begin:
    held = torch.load(place_of(begin), weights_only=True)
    for name, run in runs.items():
        run.load(held[name])
now = None
def die(at):
    if rank == 1 and now == at:
        os.kill(os.getpid(), signal.SIGKILL)

perform = lanes.perform
def performed(*args, **options):
    die((1, 7, "int8/64KiB/diloco@4"))  # where the second period ends
    perform(*args, **options)
lanes.perform = performed
next(runs["int8/64KiB"].model.parameters()).register_hook(lambda gradient: die((0, 4, "int8/64KiB")))
for step in range(begin, NUM_STEPS):
    for name, run in runs.items():
        now = (life, step, name)
        run.take(step)
    if (step + 1) % SAVE_EVERY == 0:
        kept = {name: run.state() for name, run in runs.items()}
        torch.save(kept, folder / f"writing-{rank}")
        os.replace(folder / f"writing-{rank}", place_of(step + 1))
now = None
for run in runs.values():
    run.session.synchronize()
finals = {name: flat(run.model) for name, run in runs.items()}
asynchronous = agree(runs["int8/64KiB/async"].model)
for run in runs.values():
    run.session.detach()
told = {}
for name in REPEATS:
    straight = Run(name)
    for step in range(NUM_STEPS):
        straight.take(step)
    straight.session.synchronize()
    told[name] = torch.equal(flat(straight.model), finals[name])
    straight.session.detach()
(folder / f"told-{rank}.json").write_text(json.dumps(dict(equal=told, agree=asynchronous, life=life, begin=begin)))
sys.stdout.flush()
dist.barrier()
os._exit(0)
"""
)


@pytest.mark.slow
def test_killed_ranks_are_started_again_and_come_to_the_same_bits(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # torchrun 2.13 keeps its store over a restart, with the addresses of the ranks that died: gloo then dials those.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launched, "--max-restarts", "2", str(program), str(tmp_path)],
        env={**os.environ, **own_store, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert (told["life"], told["begin"]) == (2, 6), "it died twice, and went on from step 6"
        assert told["agree"]
        assert all(told["equal"].values()), told["equal"]
