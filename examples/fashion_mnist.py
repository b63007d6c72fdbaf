"""Train a wide multilayer perceptron on Fashion-MNIST, with plain DistributedDataParallel.

An ordinary training script for the opposite of a transformer: few, large matrices whose gradients are cheap to compute
and dear to send (5.8 M parameters, 23 MB per step). It reads the four files of Debian's package
`dataset-fashion-mnist` and downloads nothing; where they are absent it says so and ends with exit code 3.

    apt-get install dataset-fashion-mnist
    torchrun --nproc-per-node 4 examples/fashion_mnist.py
    wirespeed tune examples/fashion_mnist.py --lab 4x1gbit --fidelity compressed

The held-out loss is that of a fixed part of the test set. Ranks draw different images, from a generator seeded by
--seed and the rank.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wirespeed.train

IMAGES, LABELS = 0x803, 0x801  # first four bytes of an IDX file: unsigned bytes in three dimensions, in one
FILES = {
    "train-images-idx3-ubyte.gz": IMAGES,
    "train-labels-idx1-ubyte.gz": LABELS,
    "t10k-images-idx3-ubyte.gz": IMAGES,
    "t10k-labels-idx1-ubyte.gz": LABELS,
}


def read_idx(path: Path, magic: int) -> Tensor:
    """The array of a gzipped IDX file: four bytes of magic, the dimensions as big-endian int32, then unsigned bytes."""
    with gzip.open(path) as stream:
        content = stream.read()
    if int.from_bytes(content[:4], "big") != magic:
        raise SystemExit(
            f"{path} is not the IDX file it should be: got magic {content[:4].hex()}; expected {magic:08x}"
        )
    num_dims = magic & 0xFF
    shape = [int.from_bytes(content[4 + 4 * d : 8 + 4 * d], "big") for d in range(num_dims)]
    return torch.frombuffer(bytearray(content[4 + 4 * num_dims :]), dtype=torch.uint8).view(shape)


def scaled(images: Tensor) -> Tensor:
    """Pixels as rows with about zero mean and unit variance (mean and deviation are those of the training images)."""
    return (images.flatten(1).float() / 255 - 0.286) / 0.353


def make_model(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(28 * 28, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )


@torch.no_grad()
def held_out_loss(model: nn.Module, images: Tensor, labels: Tensor, device: torch.device) -> float:
    """Mean loss on the held-out images; each rank does a share, all get the same number."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    inputs, targets = scaled(images[mine]).to(device), labels[mine].long().to(device)
    total = nn.functional.cross_entropy(model(inputs), targets, reduction="sum").double()
    dist.all_reduce(total)
    return float(total) / len(images)


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = (read_idx(args.data / name, magic) for name, magic in FILES.items())
    test_images, test_labels = test_images[: args.eval_images], test_labels[: args.eval_images]

    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = make_model(args.hidden).to(device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    session = wirespeed.train.attach(ddp, optimizer)

    draw = torch.Generator().manual_seed(args.seed * num_ranks + rank)  # other images on every rank
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{num_parameters:,} parameters, {num_ranks} ranks x {args.batch} images per step")
    began, evaluating_s = time.perf_counter(), 0.0
    for step in range(1, args.steps + 1):
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / args.warmup)
        picked = torch.randint(len(images), (args.batch,), generator=draw)
        inputs, targets = scaled(images[picked]).to(device), labels[picked].long().to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        if step % args.eval_every == 0 or step == args.steps:
            paused = time.perf_counter()
            with session.evaluation():
                if step == args.steps:
                    session.synchronize()  # where ranks trained apart: what is judged in the end is one model
                held_out = held_out_loss(model, test_images, test_labels, device)
            session.record(step=step, eval_loss=held_out)
            evaluating_s += time.perf_counter() - paused
            step_ms = (time.perf_counter() - began - evaluating_s) / step * 1e3
            say(f"step {step:4d}  loss {loss.item():.3f}  held-out {held_out:.4f}  {step_ms:.0f} ms/step")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"), help="folder of the files"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=2048, help="units of both hidden layers")
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--warmup", type=int, default=20, help="steps over which the learning rate rises")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=10, help="steps")
    parser.add_argument("--eval-images", type=int, default=2000, help="held-out images, the first of the test set")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    missing = [name for name in FILES if not (args.data / name).is_file()]
    if missing:
        print(
            f"Fashion-MNIST is not at {args.data}: {', '.join(missing)} missing; "
            "hint: apt-get install dataset-fashion-mnist (Debian, Ubuntu), or name the folder of the four "
            "*-ubyte.gz files with --data",
            file=sys.stderr,
        )
        return 3
    torch.set_num_threads(1)  # ranks may share the cores of one machine
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
