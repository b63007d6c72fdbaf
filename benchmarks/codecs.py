"""How fast gradients are encoded and decoded on one core, beside memcpy and torch.topk.

One 25 MiB bucket of fp32 gradient among 4 ranks; this process is bound to one CPU and torch to one thread. Speeds are
GB/s of fp32 gradient from the median CPU time of the timed thread, so that other processes' turns on the core do not
count (their use of memory does: read the ratio to memcpy in the same run). Every round is checked: what was sent plus
what is held back equals gradient plus what was held back before, top-k sent exactly k entries per chunk, and all kinds
of data lose little energy by selecting within chunks.
"""

# ruff: noqa: A005 - a script, never imported
from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from _harness import Bar, Runs, arguments, finish, run_interleaved
from wirespeed.cli import render
from wirespeed.spec.payloads import INT8_BLOCK, TOPK_CHUNK
from wirespeed.spec.strategy import Strategy
from wirespeed.train.codecs import kernels_for, make_codec, warm_up
from wirespeed.train.codecs.kernels import BlockBuffers, HalfBuffers, TopkBuffers

ELEMENTS = 25 * 2**20 // 4
RANKS = 4
RATIO = 0.01
CPU = torch.device("cpu")

INT8_ENCODE, INT8_REDUCE, TOPK_ENCODE = "int8 encode", "int8 decode-and-add", "top-k 1 % encode"
PEER = "torch.topk"


class Bench:
    """One bucket as rank 0 sees it, and the checks of what became of it."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(0)
        self.grad = torch.randn(ELEMENTS, generator=source)
        self.copy = torch.empty(ELEMENTS)
        self.result = torch.empty(ELEMENTS)
        self.kernels = kernels_for("auto", CPU)
        self.half: HalfBuffers = self._buffers(Strategy(codec="half"))
        self.int8: BlockBuffers = self._buffers(Strategy(codec="int8"))
        self.topk: TopkBuffers = self._buffers(Strategy(codec="topk", ratio=RATIO))
        # As after many steps: int8 holds back a fraction of a step, top-k several gradients.
        self.held_int8 = torch.randn(ELEMENTS, generator=source) * 0.01
        self.held_topk = torch.randn(ELEMENTS, generator=source) * 3
        self.packed: dict[str, BlockBuffers] = {
            "int4": self._buffers(Strategy(codec="int4")),
            "sign": self._buffers(Strategy(codec="sign")),
        }
        self.held_packed = {name: torch.randn(ELEMENTS, generator=source) * 0.5 for name in self.packed}
        self.before_packed = {name: torch.empty(ELEMENTS) for name in self.packed}
        self.before_int8, self.before_topk = torch.empty(ELEMENTS), torch.empty(ELEMENTS)
        self.magnitude = self.grad.abs()
        k = self.topk.layout.num_entries
        self.peer_out = (torch.empty(k), torch.empty(k, dtype=torch.int64))

    def _buffers(self, strategy: Strategy) -> Any:
        return make_codec(strategy).make_buffers(ELEMENTS, RANKS, CPU)

    def arms(self) -> dict[str, Callable[[], object]]:
        """In the order of an exchange; the messages of the other ranks are delivered untimed, in ``before_round``."""
        k = self.kernels
        return {
            "memcpy": lambda: self.copy.copy_(self.grad),
            "half encode": lambda: k.half_encode(self.grad, self.half),
            "half decode": lambda: k.half_decode(self.result, self.half),
            INT8_ENCODE: lambda: k.block_encode(self.grad, self.held_int8, self.int8),
            INT8_REDUCE: lambda: k.block_reduce(self.held_int8, self.int8, 0),
            "int8 decode": lambda: k.block_decode(self.result, self.int8),
            "int4 encode": lambda: k.block_encode(self.grad, self.held_packed["int4"], self.packed["int4"]),
            "int4 decode-and-add": lambda: k.block_reduce(self.held_packed["int4"], self.packed["int4"], 0),
            "int4 decode": lambda: k.block_decode(self.result, self.packed["int4"]),
            "sign encode": lambda: k.block_encode(self.grad, self.held_packed["sign"], self.packed["sign"]),
            "sign decode-and-add": lambda: k.block_reduce(self.held_packed["sign"], self.packed["sign"], 0),
            "sign decode": lambda: k.block_decode(self.result, self.packed["sign"]),
            TOPK_ENCODE: lambda: k.topk_encode(self.grad, self.held_topk, self.topk),
            "top-k 1 % decode": lambda: k.topk_decode(self.result, self.topk),
            PEER: lambda: torch.topk(self.magnitude, len(self.peer_out[0]), sorted=False, out=self.peer_out),
        }

    def before_round(self) -> None:
        """Remember what is held back. Messages from the last round stand for what the other ranks send."""
        self.before_int8.copy_(self.held_int8)
        self.before_topk.copy_(self.held_topk)
        shard = self.int8.send_b.view(RANKS, -1)[0]
        self.received = shard.clone()
        self.int8.received_b.view(RANKS, -1).copy_(shard)
        self.topk.gathered_b.view(RANKS, -1).copy_(self.topk.send_b)
        for name, buffers in self.packed.items():
            self.before_packed[name].copy_(self.held_packed[name])
            buffers.received_b.view(RANKS, -1).copy_(buffers.send_b.view(RANKS, -1)[0])

    def check_round(self) -> None:
        """Raise where the timed runs lost something or did not do the whole work."""
        assert (self.half.send_n.float() / 4096).isfinite().all()
        self._check_int8()
        self._check_packed()
        self._check_topk()

    def _check_int8(self) -> None:
        layout = self.int8.layout
        wanted = self.grad + self.before_int8
        sent = self._decoded(self.int8.send_b)[:ELEMENTS]
        # The owner's shard also takes the rounding of the sum, which is N times the shard that was received.
        summed = RANKS * self._decoded(self.received)
        sent[: layout.shard] += self._decoded(self.int8.own_b) - summed
        error = (sent + self.held_int8 - wanted).abs().max()
        assert error < 2e-5, f"int8 lost {error}"

    def _check_packed(self) -> None:
        """Of the shards that other ranks own: what was sent and what is held back are what there was."""
        for name, buffers in self.packed.items():
            decoded = torch.empty(ELEMENTS)
            received = buffers.received_b.clone()
            buffers.received_b.copy_(buffers.send_b)
            self.kernels.block_decode(decoded, buffers)
            buffers.received_b.copy_(received)
            first = buffers.layout.shard
            wanted = (self.grad + self.before_packed[name])[first:]
            error = (decoded[first:] * RANKS + self.held_packed[name][first:] - wanted).abs().max()
            assert error < 2e-5, f"{name} lost {error}"

    def _decoded(self, records_b: Tensor) -> Tensor:
        rows = records_b.view(-1, self.int8.layout.shard_bytes)
        values = rows[:, : self.int8.layout.shard].contiguous().view(torch.int8).float().view(-1, INT8_BLOCK)
        scales = rows[:, self.int8.layout.shard :].contiguous().view(torch.float32).view(-1, 1)
        return (values * scales).view(-1)

    def _check_topk(self) -> None:
        layout = self.topk.layout
        wanted = self.grad + self.before_topk
        sent = wanted - self.held_topk
        counts = torch.nn.functional.pad(sent.ne(0), (0, -ELEMENTS % TOPK_CHUNK)).view(-1, TOPK_CHUNK).sum(1)
        assert (counts[: layout.whole] == layout.per_chunk).all()
        gathered = torch.zeros(ELEMENTS)
        scales = self.topk.send_b[: layout.values_at].view(torch.float32)
        values = self.topk.send_b[layout.values_at : layout.indices_at].view(torch.float16).float()
        chunk = torch.arange(layout.num_entries) // layout.per_chunk
        at = self.topk.send_b[layout.indices_at :].view(torch.int16).long() + chunk * TOPK_CHUNK
        gathered[at] = values * scales[chunk]
        error = (gathered + self.held_topk - wanted).abs().max()
        assert error < 2e-5, f"top-k lost {error}"


def captured_energy(grad: Tensor) -> dict[str, float]:
    """Energy that top-k 1 % sends of one gradient, over that of an exact selection in each chunk, and of the whole."""
    codec = make_codec(Strategy(codec="topk", ratio=RATIO))
    buffers: TopkBuffers = codec.make_buffers(len(grad), 2, CPU)
    held = torch.zeros_like(grad)
    next(iter(codec.exchange(grad.clone(), held, buffers, rank=0, num_ranks=2)))
    layout = buffers.layout
    sent = float(grad.double().square().sum() - held.double().square().sum())
    split = layout.whole * TOPK_CHUNK
    best = grad[:split].view(-1, TOPK_CHUNK).abs().topk(layout.per_chunk, 1).values.double().square().sum()
    if layout.rest > 0:
        best += grad[split:].abs().topk(layout.per_rest).values.double().square().sum()
    whole = grad.abs().topk(layout.num_entries).values.double().square().sum()
    return {"of_exact_in_chunks": sent / float(best), "of_exact_in_bucket": sent / float(whole)}


def gradients() -> dict[str, Tensor]:
    """Normal, heavy-tailed (Student's t, 2.1 degrees of freedom), and a real one: an MLP in training."""
    torch.manual_seed(0)
    n = 40 * TOPK_CHUNK + 5000
    return {
        "normal": torch.randn(n),
        "heavy-tailed": torch.distributions.StudentT(2.1).sample((n,)),
        "MLP": mlp_gradient(),
    }


def mlp_gradient() -> Tensor:
    """The gradient of a 784-512-512-10 classifier after 50 steps on noisy prototypes, in backward order."""
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prototypes = torch.randn(10, 784)
    for _ in range(50):
        labels = torch.randint(0, 10, (64,))
        inputs = prototypes[labels] + 2 * torch.randn(64, 784)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return torch.cat([p.grad.flatten() for p in reversed(list(model.parameters())) if p.grad is not None])


def gb_per_s(runs: Runs) -> float:
    """GB/s of fp32 gradient, from the median CPU time."""
    return 4 * ELEMENTS / float(runs.summary()["median_cpu_s"]) / 1e9


def main() -> int:
    """Run, print the table, and give the exit status."""
    options = arguments(str(__doc__))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    warm_up()
    bench = Bench()
    runs = run_interleaved(
        bench.arms(), 7 if options.quick else 31, before_round=bench.before_round, after_round=bench.check_round
    )
    speeds = {name: gb_per_s(held) for name, held in runs.items()}
    energy = {name: captured_energy(grad) for name, grad in gradients().items()}
    rows = [
        (name, f"{speed:.2f}", f"{speed / speeds['memcpy']:.2f}", f"{speed / speeds[PEER]:.1f}",
         f"{runs[name].summary()['spread_cpu']:.1%}")
        for name, speed in speeds.items()
    ]  # fmt: skip
    title = f"25 MiB of fp32 gradient, {RANKS} ranks, one core, {bench.kernels.name} kernels"
    render.show(render.make_table(("stage", "GB/s", "of memcpy", f"x {PEER}", "spread"), rows, title=title))
    for name, share in energy.items():
        print(f"top-k 1 % of a {name} gradient captures {share['of_exact_in_bucket']:.1%} of the energy that an exact")
        print(f"  selection over the bucket does, and {share['of_exact_in_chunks']:.2%} of one in each chunk")
    bars = [
        Bar("int8 encode with error feedback, GB/s", speeds[INT8_ENCODE], 2.5),
        Bar("int8 decode-and-add, GB/s", speeds[INT8_REDUCE], 5.0),
        Bar("top-k 1 % encode with error feedback, GB/s", speeds[TOPK_ENCODE], 3.0),
        Bar("top-k 1 % energy over exact selection", min(e["of_exact_in_chunks"] for e in energy.values()), 0.95),
        Bar("top-k 1 % encode over torch.topk", speeds[TOPK_ENCODE] / speeds[PEER], 5.0),
    ]
    results = {
        "elements": ELEMENTS,
        "ranks": RANKS,
        "kernels": bench.kernels.name,
        "stages": {
            name: {
                "gb_per_s": speeds[name],
                "of_memcpy": speeds[name] / speeds["memcpy"],
                **held.summary(),
            }
            for name, held in runs.items()
        },
        "energy": energy,
    }
    return finish("codecs", bars, results, check=options.check, is_quick=options.quick, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
