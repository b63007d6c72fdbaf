"""Training scripts of many shapes, and ways to run them under `tune` without a survey or through the command."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SETUP = """\
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(  # 100,616 parameters
    torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)
)


def batch(step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 64, generator=generator)
    return x, x[:, :8]


def loss_of(model, step):
    x, y = batch(step)
    return torch.nn.functional.mse_loss(model(x), y)

"""

LOOP = """\
ddp = DDP(net)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
for step in range(1, NUM):
    AT_STEP
    loss = loss_of(ddp, step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def plain(at_step: str = "pass", *, num_steps: int = 100) -> str:
    """An ordinary script; ``at_step`` is a statement at the beginning of every step."""
    return SETUP + LOOP.replace("AT_STEP", at_step).replace("NUM", str(num_steps + 1))


def shaped(body: str) -> str:
    """The set-up, then this."""
    return SETUP + textwrap.dedent(body)


class Quiet:
    """Progress that nobody sees."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, text: str, *, total: int | None = None) -> None:
        pass

    def advance(self, step: int) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


def write_script(folder: Path, text: str, name: str = "train.py") -> Path:
    script = folder / name
    script.write_text(text)
    return script


def processes_naming(text: str) -> list[int]:
    """Processes, other than this one, with this text in their environment or command line."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            held = Path(f"/proc/{entry}/environ").read_bytes() + Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in held:
            found.append(int(entry))
    return found


def wait_for(test: Callable[[], object], what: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not test():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def assert_nothing_left(folder: Path) -> None:
    """No process that names the folder, and no temporary file in it."""
    wait_for(lambda: not processes_naming(str(folder)), "every process of the run has ended", 60.0)
    assert [path for path in folder.rglob(".*") if path.is_file()] == []


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "wirespeed", *map(str, arguments)]


def wirespeed(
    *arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    return run(command(*arguments), cwd=cwd, env=env, timeout_s=timeout_s)


def run(
    words: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )
