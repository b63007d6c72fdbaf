"""The codecs over real collectives: three gloo processes on loopback, one of them with the torch kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from codec_group import CPU, Group, bytes_of, gradients  # noqa: E402
from wirespeed.spec.strategy import Strategy  # noqa: E402
from wirespeed.train.codecs import has_numba, make_codec  # noqa: E402

pytestmark = pytest.mark.torch

NAMES = ("dense", "half", "int8", "int4", "sign", "topk@1%", "lowrank@4")
NUM_RANKS, NUM_ELEMENTS, NUM_STEPS = 3, 40_001, 2


def _run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    results = {name: _exchange(name, rank) for name in NAMES}
    results["ddp"] = _ddp_gradient(rank, hook=None)
    results["dense in ddp"] = _ddp_gradient(rank, hook=_dense_hook)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _exchange(name: str, rank: int) -> torch.Tensor:
    codec = make_codec(Strategy.parse(name), kernels="numba" if has_numba() and rank > 0 else "torch")
    buffers = codec.make_buffers(NUM_ELEMENTS, NUM_RANKS, CPU)
    residual = torch.zeros(NUM_ELEMENTS) if codec.has_residual else None
    for step in range(NUM_STEPS):
        grad = gradients("layers", NUM_ELEMENTS, NUM_RANKS, seed=step)[rank]
        for message in codec.exchange(grad, residual, buffers, rank=rank, num_ranks=NUM_RANKS):
            _perform(message)
    return grad


def _perform(message) -> None:
    match message.collective:
        case "all_reduce":
            dist.all_reduce(message.send)
        case "all_gather":
            dist.all_gather_into_tensor(message.receive, message.send)
        case "all_to_all":
            dist.all_to_all_single(message.receive, message.send)


def _ddp_gradient(rank: int, hook) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 200)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    if hook is not None:
        ddp.register_comm_hook(rank, hook)
    inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(rank))
    ddp(inputs).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def _dense_hook(rank, bucket):
    buffer = bucket.buffer()
    for message in make_codec(Strategy()).exchange(buffer, None, None, rank=rank, num_ranks=NUM_RANKS):
        _perform(message)
    done = torch.futures.Future()
    done.set_result(buffer)
    return done


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    folder: Path = tmp_path_factory.mktemp("gloo")
    mp.spawn(_run_rank, (str(folder),), nprocs=NUM_RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_with_different_kernels_end_with_equal_bytes(by_rank, name: str):
    assert len({bytes_of(results[name]) for results in by_rank}) == 1


@pytest.mark.parametrize("name", ["int8", "topk@1%"])
def test_result_is_that_of_the_same_ranks_in_one_process(by_rank, name: str):
    group = Group(name, NUM_ELEMENTS, NUM_RANKS)
    for step in range(NUM_STEPS):
        grads = gradients("layers", NUM_ELEMENTS, NUM_RANKS, seed=step)
        group.step(grads)
    assert bytes_of(by_rank[0][name]) == bytes_of(grads[0])


@pytest.mark.parametrize("name", ["dense", "half"])
def test_sums_are_those_of_the_gradients(by_rank, name: str):
    grads = gradients("layers", NUM_ELEMENTS, NUM_RANKS, seed=NUM_STEPS - 1)
    exact = torch.stack(grads).double().mean(0)
    # Three terms and two sums, each rounded by 2^-12 (fp16) or 2^-24 of at most 4.5.
    tolerance = 5 * 4.5 * {"dense": 2.0**-24, "half": 2.0**-12}[name]
    assert (by_rank[0][name].double() - exact).abs().max() < tolerance


def test_dense_as_a_hook_gives_the_bytes_of_ddp_itself(by_rank):
    assert bytes_of(by_rank[0]["dense in ddp"]) == bytes_of(by_rank[0]["ddp"])
