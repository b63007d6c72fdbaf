"""A model over several processes, each with a part of its layers: the same answers as whole, and what its faults do."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("grpc", reason="needs the extra `serve`")

from wirespeed.errors import UsageError
from wirespeed.serve.config import ModelConfig, read_config
from wirespeed.serve.repository import ModelRepository
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.status import RequestFailed
from wirespeed.serve.tensors import from_array, to_array
from wirespeed.wire import run

pytestmark = pytest.mark.torch

CODE = """
import os

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model:
    def __init__(self, config):
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2)).eval()
        if config.tensor_parallel > 1:
            from wirespeed.serve.tensor_parallel import mesh

            for block in self.blocks:
                parallelize_module(block, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
            self.shape = tuple(self.blocks[0].up.weight.to_local().shape)
            if torch.distributed.get_rank() == config.parameters.get("fails_on", -1):
                raise ValueError("these weights are not for me")
        else:
            self.shape = tuple(self.blocks[0].up.weight.shape)

    def infer(self, inputs):
        x = torch.from_numpy(inputs["x"].copy())
        if bool((x == 99).any()):
            raise ValueError("99 is not allowed")
        with torch.inference_mode():
            for block in self.blocks:
                x = block(x)
        rows = len(x)
        return {"y": x.numpy(), "shape": torch.tensor([self.shape] * rows).numpy()}
"""


def write(folder: Path, *, size: int = 2, more: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(CODE)
    (folder / "model.toml").write_text(
        f'schema = 1\nbackend = "python"\ntensor_parallel = {size}\n[batching]\nmax_rows = 16\n{more}\n'
        '[[input]]\nname = "x"\ndatatype = "FP32"\nshape = [32]\n[[output]]\nname = "y"\ndatatype = "FP32"\nshape = [32]\n'
        '[[output]]\nname = "shape"\ndatatype = "INT64"\nshape = [2]\n'
    )
    return folder


async def ask(models: ModelRepository, name: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    answer = await models.get(name).infer(InferRequest([from_array("x", rows)]))
    return {tensor.name: to_array(tensor).copy() for tensor in answer}


@pytest.mark.slow
def test_split_over_ranks_it_answers_as_whole_and_survives_data_and_dead_ranks(tmp_path: Path) -> None:
    for size in (1, 2, 4):
        write(tmp_path / f"over-{size}", size=size)

    async def serve() -> None:
        told: list[str] = []
        models = ModelRepository(tmp_path, on_news=told.append)
        await models.load_all()
        try:
            rows = np.random.default_rng(0).normal(size=(5, 32)).astype(np.float32)
            whole = await ask(models, "over-1", rows)
            for size in (2, 4):
                split = await ask(models, f"over-{size}", rows)
                np.testing.assert_allclose(split["y"], whole["y"], rtol=1e-5, atol=1e-6)
                assert split["shape"][0].tolist() == [64 // size, 32]
            bad = rows.copy()
            bad[2] = 99
            good, failed, also_good = await asyncio.gather(
                ask(models, "over-2", rows), ask(models, "over-2", bad), ask(models, "over-2", rows[:1]),
                return_exceptions=True,
            )  # fmt: skip
            assert isinstance(failed, RequestFailed)
            assert "99 is not allowed" in str(failed)
            for answer in (good, also_good):
                assert isinstance(answer, dict)
                np.testing.assert_allclose(answer["y"], whole["y"][: len(answer["y"])], rtol=1e-5, atol=1e-6)

            (worker,) = models.get("over-2").worker_pids
            (other,) = psutil.Process(worker).children()
            other.kill()
            split = await ask(models, "over-2", rows)
            np.testing.assert_allclose(split["y"], whole["y"], rtol=1e-5, atol=1e-6)
            assert models.get("over-2").worker_pids != [worker]
            assert any("died" in line for line in told)

            (worker,) = models.get("over-2").worker_pids
            (other,) = psutil.Process(worker).children()
            os.kill(worker, signal.SIGKILL)
            split = await ask(models, "over-2", rows)
            np.testing.assert_allclose(split["y"], whole["y"], rtol=1e-5, atol=1e-6)
            await asyncio.to_thread(psutil.wait_procs, [other], 5)
            assert not other.is_running()
        finally:
            pids = [pid for model in models.models.values() for pid in model.worker_pids]
            families = [child for pid in pids for child in psutil.Process(pid).children()]
            await models.close()
        assert not [process for process in families if process.is_running()]

    run(serve())


def test_a_rank_that_cannot_load_is_named(tmp_path: Path) -> None:
    write(tmp_path / "half", more="[parameters]\nfails_on = 1")

    async def serve() -> None:
        models = ModelRepository(tmp_path)
        with pytest.raises(RequestFailed, match="rank 1: ValueError: these weights are not for me"):
            await models.load("half")
        await models.close()

    run(serve())


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got tensor_parallel of 0"):
        ModelConfig(backend="python", tensor_parallel=0)
    with pytest.raises(UsageError, match="got tensor_parallel with backend 'onnx'"):
        ModelConfig(backend="onnx", tensor_parallel=2)
    folder = write(tmp_path / "fine")
    assert read_config(folder).tensor_parallel == 2
