"""Train a small GPT on the text of Python's own standard library, with plain DistributedDataParallel.

An ordinary training script: nothing is downloaded, the gradients cross the network once per step, and every rank reads
its own text. Its sizes are those of a large model on fast GPUs seen through a slow network: few tokens per rank and
step for its number of parameters, so that a 1 Gbit/s link takes most of the step. The loss that is compared is that of
files the model never trains on.

    torchrun --nproc-per-node 4 examples/char_gpt.py
    wirespeed tune examples/char_gpt.py --lab 4x1gbit --fidelity compressed

Deterministic for a seed, a Python version (whose library is the text) and a number of ranks. README.md beside this file
says why the sizes and the optimizer are what they are, and what they are not.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wirespeed.train

NUM_BYTES = 256  # the vocabulary: one token per byte
HELD_OUT_EVERY = 20  # every 20th file of the library is held out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp(self.norm_mlp(x))


class CharGPT(nn.Module):
    def __init__(self, *, width: int, layers: int, seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Parameter(torch.zeros(seq, width))
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def library_text() -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's top-level modules, as (training text, held-out text)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [torch.frombuffer(bytearray(file.read_bytes() + b"\n"), dtype=torch.uint8) for file in files]
    train = [text for index, text in enumerate(texts) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return torch.cat(train), torch.cat(texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])


def windows(text: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets of the windows of ``seq`` bytes that begin at ``starts``."""
    at = starts[:, None] + torch.arange(seq + 1)
    tokens = text[at].long()
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    inputs, targets = (part.to(device) for part in batch)
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Mean loss over the same held-out windows at every call; each rank does a share, all get the same number."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    starts = torch.linspace(0, len(text) - args.seq - 1, args.eval_windows).long()
    mine = starts[rank::num_ranks]
    total = torch.zeros(2, dtype=torch.float64)
    if len(mine) > 0:
        total[0] = loss_of(model, windows(text, mine, args.seq), device).double() * len(mine)
        total[1] = len(mine)
    total = total.to(device)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then half a cosine down to a twentieth. Steps count from 1."""
    if step <= args.warmup:
        return args.lr * step / args.warmup
    done = (step - 1 - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    text, held_out = library_text()

    torch.manual_seed(args.seed)  # the same first weights on every rank
    model = CharGPT(width=args.width, layers=args.layers, seq=args.seq).to(device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9, nesterov=True, fused=True)
    session = wirespeed.train.attach(ddp, optimizer)

    draw = torch.Generator().manual_seed(args.seed * num_ranks + rank)  # other text on every rank
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{num_parameters:,} parameters, {num_ranks} ranks x {args.batch} x {args.seq} bytes per step")
    began, evaluating_s = time.perf_counter(), 0.0
    for step in range(1, args.steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, args)
        starts = torch.randint(len(text) - args.seq - 1, (args.batch,), generator=draw)
        optimizer.zero_grad()
        loss = loss_of(ddp, windows(text, starts, args.seq), device)
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        if step % args.eval_every == 0 or step == args.steps:
            paused = time.perf_counter()
            with session.evaluation():
                if step == args.steps:
                    session.synchronize()  # where ranks trained apart: what is judged in the end is one model
                held_out_now = held_out_loss(model, held_out, args, device)
            session.record(step=step, eval_loss=held_out_now)
            evaluating_s += time.perf_counter() - paused
            step_ms = (time.perf_counter() - began - evaluating_s) / step * 1e3
            say(f"step {step:4d}  loss {loss.item():.3f}  held-out {held_out_now:.4f}  {step_ms:.0f} ms/step")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=180, help="also the length of the learning-rate schedule")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq", type=int, default=16, help="bytes per window")
    parser.add_argument("--batch", type=int, default=1, help="windows per rank and step")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--lr", type=float, help="default: 0.05 for sgd, 0.0003 for adamw")
    parser.add_argument("--warmup", type=int, default=30, help="steps over which the learning rate rises")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=10, help="steps")
    parser.add_argument("--eval-windows", type=int, default=256, help="held-out windows, shared out over the ranks")
    args = parser.parse_args(arguments)
    if args.lr is None:
        args.lr = {"sgd": 0.05, "adamw": 3e-4}[args.optimizer]
    return args


def main() -> int:
    args = parse()
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
