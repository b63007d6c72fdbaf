"""Models in stages: over hosts, in micro-batches that overlap, with the errors and deadlines of any other model."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from infer_models import Node
from wirespeed.errors import UsageError
from wirespeed.serve.config import ModelConfig, Stage
from wirespeed.serve.repository import ModelRepository
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.staged import in_order
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import from_array, to_array

PART = """
import time
class Model:
    def __init__(self, config):
        self.times, self.row_s = config.parameters["times"], config.parameters["row_s"]
    def infer(self, inputs):
        (value,) = inputs.values()
        if (value == 13).any():
            raise ValueError("an unlucky row")
        time.sleep(self.row_s * len(value))
        return {"h": value * self.times + 1}
"""
PART_TOML = """
schema = 1
backend = "python"
[batching]
max_rows = 64
max_delay = "0 ms"
[[input]]
name = "{name}"
datatype = "FP32"
shape = [3]
[[output]]
name = "h"
datatype = "FP32"
shape = [3]
[parameters]
times = {times}
row_s = {row_s}
"""
STAGED_TOML = """
schema = 1
backend = "stages"
micro_rows = {micro}
[batching]
max_rows = 64
"""


def write_part(folder: Path, name: str, *, times: float, given: str = "h", row_s: float = 0.0) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "model.py").write_text(PART)
    (folder / name / "model.toml").write_text(PART_TOML.format(name=given, times=times, row_s=row_s))


def write_staged(folder: Path, name: str, stages: list[tuple[str, str]], *, micro: int = 4) -> None:
    (folder / name).mkdir(parents=True)
    text = STAGED_TOML.format(micro=micro)
    for model, node in stages:
        text += f'[[stages]]\nmodel = "{model}"\nnode = "{node}"\n'
    (folder / name / "model.toml").write_text(text)


def request_of(values: np.ndarray, **more: object) -> InferRequest:
    return InferRequest([from_array("x", values.astype(np.float32))], **more)  # type: ignore[arg-type]


async def answers(repository: ModelRepository, values: np.ndarray) -> np.ndarray:
    (found,) = await repository.get("whole").infer(request_of(values))
    assert found.name == "h"
    return to_array(found)


def test_stages_of_this_server_and_of_nodes_are_one_model(tmp_path: Path) -> None:
    write_part(tmp_path / "far", "two", times=3)
    write_part(tmp_path / "far", "three", times=5, given="other")  # a name of its own: joined by order
    node = Node(tmp_path / "far")
    try:
        address = node.wait_open().address
        write_part(tmp_path / "near", "one", times=2, given="x")
        write_staged(tmp_path / "near", "whole", [("one", ""), ("two", address), ("three", address)])

        async def main() -> None:
            repository = ModelRepository(tmp_path / "near")
            await repository.load_all()
            try:
                assert [spec.name for spec in repository.get("whole").inputs] == ["x"]
                for rows in (1, 4, 23):
                    values = np.arange(rows * 3).reshape(rows, 3) + 100
                    expected = ((values * 2 + 1) * 3 + 1) * 5 + 1
                    assert (await answers(repository, values) == expected).all()
                with pytest.raises(RequestFailed, match="an unlucky row"):
                    await repository.get("whole").infer(request_of(np.full((8, 3), 13)))
                with pytest.raises(RequestFailed) as caught:
                    await repository.get("whole").infer(request_of(np.zeros((65, 3))))
                assert caught.value.reason is Reason.INVALID
                with pytest.raises(RequestFailed) as caught:
                    await repository.get("whole").infer(request_of(np.zeros((2, 3)), deadline_s=time.monotonic() - 1))
                assert caught.value.reason is Reason.DEADLINE
            finally:
                await repository.close()

        asyncio.run(main())
    finally:
        node.close()


def test_micro_batches_keep_all_stages_at_work(tmp_path: Path) -> None:
    for place, name in enumerate(("a", "b", "c")):
        write_part(tmp_path, name, times=1, row_s=0.02, given="x" if place == 0 else "h")
    stages = [("a", ""), ("b", ""), ("c", "")]
    write_staged(tmp_path, "whole", stages, micro=2)
    write_staged(tmp_path, "slow", stages, micro=0)

    async def main() -> None:
        repository = ModelRepository(tmp_path)
        await repository.load_all()
        try:
            values = np.zeros((12, 3))
            took = {}
            for name in ("slow", "whole", "slow", "whole"):
                begin_s = time.perf_counter()
                await repository.get(name).infer(request_of(values))
                took[name] = min(took.get(name, 9.0), time.perf_counter() - begin_s)
            # One after another 0.72 s; in six micro-batches (6 + 2) x 0.04 s.
            assert took["slow"] >= 0.72
            assert took["whole"] < 0.75 * took["slow"]
        finally:
            await repository.close()

    asyncio.run(main())


def test_a_lost_node_is_an_error_and_what_is_missing_is_said(tmp_path: Path) -> None:
    write_part(tmp_path / "far", "two", times=3)
    node = Node(tmp_path / "far")
    try:
        address = node.wait_open().address
        write_part(tmp_path / "near", "one", times=2, given="x")
        write_staged(tmp_path / "near", "whole", [("one", ""), ("two", address)])

        async def main() -> None:
            repository = ModelRepository(tmp_path / "near")
            await repository.load_all()
            try:
                assert repository.get("whole").is_ready
                node.process.kill()
                node.process.wait(10)
                with pytest.raises(RequestFailed) as caught:
                    await answers(repository, np.ones((2, 3)))
                assert caught.value.reason is Reason.UNAVAILABLE
                async with asyncio.timeout(10):
                    while repository.get("whole").is_ready:
                        await asyncio.sleep(0.05)
            finally:
                await repository.close()
            missing = ModelRepository(tmp_path / "other")
            write_staged(tmp_path / "other", "whole", [("nothing", "")])
            with pytest.raises(RequestFailed, match="not known yet"):
                await missing.load_all()
            await missing.close()

        asyncio.run(main())
    finally:
        node.close()


def test_stages_that_contain_each_other_are_refused() -> None:
    def staged(*models: str) -> ModelConfig:
        return ModelConfig(backend="stages", stages=tuple(Stage(model=model) for model in models))

    assert in_order({"a": staged("b", "x"), "b": staged("c"), "c": staged("x")}) == ["c", "b", "a"]
    with pytest.raises(UsageError, match="a -> b -> a"):
        in_order({"a": staged("b"), "b": staged("a")})
    with pytest.raises(UsageError, match="backend"):
        ModelConfig(backend="onnx", stages=(Stage(model="a"),))
