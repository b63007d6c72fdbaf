"""The example scripts on real ranks over loopback, at sizes that train in seconds."""

import gzip
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wirespeed.spec.strategy import Strategy
from wirespeed.train.trace import RunDirective, RunTrace, decode_trace, write_directive
from wirespeed.tune.places import LoopbackPlace, worker_command

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_GPT = ("--width", "64", "--layers", "1", "--batch", "8", "--steps", "40", "--warmup", "5", "--lr", "0.1")


def held_out_losses(script: str, *arguments: str, folder: Path, num_ranks: int = 2) -> list[float]:
    """Run an example as a launcher would, dense, and read the held-out losses that it prints."""
    end = LoopbackPlace(num_ranks, why="a test").run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        env={"WIRESPEED_STRATEGY": "dense"},
        folder=folder,
        watch=None,
        timeout_s=240.0,
    )
    printed = "\n".join(end.tail[0])
    assert end.returncode == 0, printed
    return [float(loss) for loss in re.findall(r"held-out ([0-9.]+)", printed)]


def run_directed(script: str, *arguments: str, strategy: str, num_steps: int, folder: Path) -> list[RunTrace]:
    """Run an example as `tune` does, and give every rank's trace."""
    folder.mkdir()
    directive = RunDirective(
        label=strategy, strategy=Strategy.parse(strategy), num_steps=num_steps, folder=str(folder.resolve())
    )
    end = LoopbackPlace(2, why="a test").run(
        worker_command("wirespeed.tune.worker", str(EXAMPLES / script), *arguments),
        env={"WIRESPEED_RUN": str(write_directive(directive).resolve())},
        folder=folder,
        watch=None,
        timeout_s=240.0,
    )
    assert end.returncode == 0, end.tail
    return [decode_trace(directive.trace_path(rank).read_bytes(), source=f"rank {rank}") for rank in range(2)]


def held_out_of(trace: RunTrace) -> dict[int, float | None]:
    return {entry.step: entry.loss for entry in trace.losses if entry.is_held_out}


def write_idx(path: Path, magic: int, array: torch.Tensor) -> None:
    head = magic.to_bytes(4, "big") + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(head + array.to(torch.uint8).numpy().tobytes()))


@pytest.fixture
def small_mnist(tmp_path):
    """Four IDX files of ten classes: a bright band of rows says which."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 400), ("t10k", 100)):
        labels = torch.arange(count) % 10
        images = torch.randint(0, 60, (count, 28, 28), generator=generator)
        for index, label in enumerate(labels.tolist()):
            images[index, 2 * label + 2 : 2 * label + 4] = 220
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", 0x803, images)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", 0x801, labels)
    return folder


def test_char_gpt_learns_what_it_never_reads(tmp_path):
    losses = held_out_losses("char_gpt.py", *SMALL_GPT, folder=tmp_path)
    assert len(losses) == 4  # steps 10, 20, 30 and 40
    assert losses[-1] < 3.2  # 5.55 = ln 256 knows nothing; about 3.4 knows only how often each byte comes
    assert losses[-1] < losses[0]


def test_char_gpt_repeats_itself_for_a_seed_and_only_for_it(tmp_path):
    steps = ("--steps", "10")
    first = held_out_losses("char_gpt.py", *SMALL_GPT, *steps, folder=tmp_path)
    again = held_out_losses("char_gpt.py", *SMALL_GPT, *steps, folder=tmp_path)
    other = held_out_losses("char_gpt.py", *SMALL_GPT, *steps, "--seed", "1", folder=tmp_path)
    assert first == again
    assert first != other


def test_char_gpt_gives_every_rank_the_same_held_out_loss_and_int8_the_loss_of_dense(tmp_path):
    traces = {
        strategy: run_directed("char_gpt.py", *SMALL_GPT, strategy=strategy, num_steps=30, folder=tmp_path / strategy)
        for strategy in ("dense", "int8")
    }
    for ranks in traces.values():
        assert [trace.status for trace in ranks] == ["complete", "complete"]
        assert list(held_out_of(ranks[0])) == [10, 20, 30]
        assert held_out_of(ranks[0]) == held_out_of(ranks[1])
    dense, int8 = (held_out_of(traces[name][0]) for name in ("dense", "int8"))
    assert int8[30] == pytest.approx(dense[30], abs=0.02)
    assert int8 != dense  # the directive's strategy really was at work


def test_fashion_mnist_learns_its_held_out_images(small_mnist, tmp_path):
    losses = held_out_losses(
        "fashion_mnist.py", "--data", str(small_mnist), "--hidden", "64", "--steps", "40", folder=tmp_path
    )
    assert losses[-1] < 1.0  # 2.30 = ln 10 knows nothing


def test_fashion_mnist_names_what_is_missing_and_ends_with_three(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "fashion_mnist.py", "--data", tmp_path],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3
    assert "train-images-idx3-ubyte.gz" in done.stderr
    assert "apt-get install dataset-fashion-mnist" in done.stderr


def test_fashion_mnist_refuses_a_file_of_another_kind(small_mnist, tmp_path):
    write_idx(small_mnist / "t10k-labels-idx1-ubyte.gz", 0x802, torch.zeros(2, 2))
    end = LoopbackPlace(1, why="a test").run(
        [sys.executable, str(EXAMPLES / "fashion_mnist.py"), "--data", str(small_mnist)],
        env={"WIRESPEED_STRATEGY": "dense"},
        folder=tmp_path,
        watch=None,
        timeout_s=240.0,
    )
    assert end.returncode != 0
    assert any("got magic 00000802; expected 00000801" in line for line in end.tail[0])
