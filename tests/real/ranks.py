"""Run a piece of a training program on several real ranks over loopback."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from wirespeed.tune.places import LoopbackPlace, RunEnd

PREAMBLE = """
import json, os, sys, warnings
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import wirespeed.train
from wirespeed.spec.strategy import Strategy

torch.set_num_threads(1)
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def make_model(sizes=(64, 256, 256, 8), seed=0):
    torch.manual_seed(seed)
    layers = []
    for before, after in zip(sizes, sizes[1:]):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def batch(step, sizes=(64, 8)):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, sizes[0], generator=generator), torch.randn(16, sizes[1], generator=generator)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def agree(model):
    mine = flat(model)
    every = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


def report(**values):
    Path(sys.argv[1], f"result-{rank}.json").write_text(json.dumps(values))


dist.init_process_group("gloo")
"""

ENDING = """

# What is tested ends here. Under gloo a process that still holds a group can abort while the interpreter is taken down.
sys.stdout.flush()
sys.stderr.flush()
if dist.is_initialized():
    dist.destroy_process_group()
os._exit(0)
"""


def run_program(
    program: str, tmp_path: Path, *, num_ranks: int = 2, env: dict[str, str] | None = None, timeout_s: float = 300.0
) -> tuple[RunEnd, list[dict]]:
    """Run ``PREAMBLE`` and the program on every rank. Gives how it ended, and what each rank reported."""
    script = tmp_path / "program.py"
    script.write_text(PREAMBLE + textwrap.dedent(program) + ENDING)
    end = LoopbackPlace(num_ranks, why="a test").run(
        [sys.executable, str(script), str(tmp_path)], env=env or {}, folder=tmp_path, watch=None, timeout_s=timeout_s
    )
    results = []
    for rank in range(num_ranks):
        left = tmp_path / f"result-{rank}.json"
        results.append(json.loads(left.read_text()) if left.is_file() else {})
    return end, results


def fine(program: str, tmp_path: Path, **options) -> list[dict]:
    """``run_program`` for a program that has to end well."""
    end, results = run_program(program, tmp_path, **options)
    assert end.returncode == 0, "\n".join(line for lines in end.tail.values() for line in lines)
    return results
