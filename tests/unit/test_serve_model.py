"""A model with real workers: processes that crash, hang or refuse to load; queues that fill; hot changes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from wirespeed.errors import DataError, MissingCapability
from wirespeed.serve.config import ModelConfig, read_config
from wirespeed.serve.model import Model
from wirespeed.serve.repository import ModelRepository
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Tensor, from_array, to_array
from wirespeed.wire import run

CODE = """
import os, sys, time
import numpy as np

class Model:
    def __init__(self, config):
        self.scale = config.parameters.get("scale", 2)
        if config.parameters.get("breaks"):
            raise RuntimeError("no weights here")

    def infer(self, inputs, batch):
        x = inputs["x"]
        first = float(x.reshape(-1)[0]) if x.size else 0.0
        if first == 13: os._exit(3)
        if first == 14: time.sleep(60)
        if first == 15: return {"y": x[:-1]}
        if first == 16: return {"y": x.astype(np.float64)}
        if first == 17: return {}
        if first == 18: time.sleep(0.6)
        if first == 19: x[0] = 1
        tag = sum(p.get("add", 0) for p in batch.parameters)
        return {"y": x * np.float32(self.scale) + np.float32(tag)}
"""
TOML = """
schema = 1
backend = "python"
{top}
[batching]
max_rows = 4
max_delay = "1 ms"
[queue]
max_rows = 8
[instances]
{instances}
[[input]]
name = "x"
datatype = "FP32"
shape = [-1]
[[output]]
name = "y"
datatype = "FP32"
shape = [-1]
[parameters]
{parameters}
"""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ModelConfig]:
    def make(
        name: str = "m", *, top: str = "", instances: str = "", parameters: str = "", code: str = CODE
    ) -> ModelConfig:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "model.py").write_text(code)
        (folder / "model.toml").write_text(TOML.format(top=top, instances=instances, parameters=parameters))
        return read_config(folder)

    return make


def ask(*values: float, **more: object) -> InferRequest:
    array = np.array([[value, 1.0] for value in values], np.float32)
    return InferRequest([from_array("x", array)], **more)  # type: ignore[arg-type]


def value(outputs: list[Tensor]) -> list[list[float]]:
    return to_array(outputs[0]).tolist()  # type: ignore[no-any-return]


def using(config: ModelConfig, test: Callable[[Model], Awaitable[None]]) -> None:
    async def main() -> None:
        model = Model(config)
        await model.load()
        try:
            await asyncio.wait_for(test(model), 120)
        finally:
            pids = model.worker_pids
            await model.close()
            assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    run(main())


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_answers_go_to_their_owners(make: Callable[..., ModelConfig], isolation: str) -> None:
    async def test(model: Model) -> None:
        results = await asyncio.gather(*(model.infer(ask(100 + n)) for n in range(8)))
        assert [value(result) for result in results] == [[[200.0 + 2 * n, 2.0]] for n in range(8)]
        two = await model.infer(ask(1, 2))
        assert value(two) == [[2.0, 2.0], [4.0, 2.0]]
        assert model.statistics.num_success == 9
        assert model.statistics.num_executions < 9

    using(make(instances=f'isolation = "{isolation}"'), test)


def test_a_request_that_kills_the_worker_fails_alone(make: Callable[..., ModelConfig]) -> None:
    async def test(model: Model) -> None:
        results = await asyncio.gather(*(model.infer(ask(v)) for v in (1, 13, 2, 3)), return_exceptions=True)
        assert isinstance(results[1], RequestFailed)
        assert results[1].reason is Reason.UNAVAILABLE
        assert "exit status 3" in str(results[1])
        assert [value(r) for n, r in enumerate(results) if n != 1] == [[[2.0, 2.0]], [[4.0, 2.0]], [[6.0, 2.0]]]  # type: ignore[arg-type]
        assert model.statistics.num_restarts >= 2

    using(make(), test)


def test_what_is_not_idempotent_is_not_run_again(make: Callable[..., ModelConfig]) -> None:
    async def test(model: Model) -> None:
        results = await asyncio.gather(model.infer(ask(13)), model.infer(ask(1)), return_exceptions=True)
        assert isinstance(results[0], RequestFailed)
        assert model.statistics.num_restarts == 1

    using(make(top="idempotent = false"), test)


def test_a_worker_killed_from_outside_costs_no_answer(make: Callable[..., ModelConfig]) -> None:
    async def test(model: Model) -> None:
        pending = [asyncio.ensure_future(model.infer(ask(18))), asyncio.ensure_future(model.infer(ask(5)))]
        await asyncio.sleep(0.1)
        os.kill(model.worker_pids[0], signal.SIGKILL)
        assert [value(result) for result in await asyncio.gather(*pending)] == [[[36.0, 2.0]], [[10.0, 2.0]]]

    using(make(), test)


def test_a_worker_that_hangs_is_killed_and_replaced(make: Callable[..., ModelConfig]) -> None:
    async def test(model: Model) -> None:
        with pytest.raises(RequestFailed, match=r"took longer than 2 s"):
            await model.infer(ask(14))
        assert value(await model.infer(ask(1))) == [[2.0, 2.0]]

    using(make(top="idempotent = false", instances='run_timeout = "2 s"'), test)


@pytest.mark.parametrize(
    ("trigger", "text"),
    [(15, "has shape"), (16, "float64; expected FP32"), (17, "gave no output 'y'"), (19, "read-only")],
)
def test_a_model_that_breaks_its_word_is_named(make: Callable[..., ModelConfig], trigger: int, text: str) -> None:
    async def test(model: Model) -> None:
        with pytest.raises(RequestFailed, match=text) as fault:
            await model.infer(ask(trigger))
        assert fault.value.reason is Reason.FAILED
        assert value(await model.infer(ask(1))) == [[2.0, 2.0]]

    using(make(), test)


def test_a_full_queue_refuses_and_recovers(make: Callable[..., ModelConfig]) -> None:
    async def test(model: Model) -> None:
        busy = asyncio.ensure_future(model.infer(ask(18)))
        await asyncio.sleep(0.05)
        queued = [model.infer(ask(n)) for n in range(20, 28)]
        with pytest.raises(RequestFailed, match="8 rows are queued; at most 8") as fault:
            model.infer(ask(1))
        assert fault.value.reason is Reason.EXHAUSTED
        await asyncio.gather(busy, *queued)
        assert value(await model.infer(ask(1))) == [[2.0, 2.0]]

    using(make(), test)


def test_a_deadline_passes_in_the_queue_and_a_cancelled_request_leaves_it(make: Callable[..., ModelConfig]) -> None:
    async def test(model: Model) -> None:
        busy = asyncio.ensure_future(model.infer(ask(18)))
        await asyncio.sleep(0.05)
        now_s = asyncio.get_running_loop().time()
        late = model.infer(ask(1, deadline_s=now_s + 0.05))
        gone = model.infer(ask(2))
        gone.cancel()
        with pytest.raises(RequestFailed, match="past its deadline") as fault:
            await late
        assert fault.value.reason is Reason.DEADLINE
        assert model.num_queued == 0
        await busy
        assert model.statistics.num_executions == 1

    using(make(), test)


def test_parameters_reach_the_model(make: Callable[..., ModelConfig]) -> None:
    async def test(model: Model) -> None:
        assert value(await model.infer(ask(1, parameters={"add": 5}))) == [[7.0, 7.0]]

    using(make(), test)


def test_a_batch_that_is_too_large_for_the_memory_is_an_error_of_it(make: Callable[..., ModelConfig]) -> None:
    async def test(model: Model) -> None:
        large = np.zeros((1, 300_000), np.float32)
        with pytest.raises(
            RequestFailed, match=r"take more than 1048576 bytes; expected less; hint: raise instances.max_batch_size"
        ):
            await model.infer(InferRequest([from_array("x", large)]))
        # Two that fit alone and not together are run apart.
        half = np.ones((1, 150_000), np.float32)
        busy = asyncio.ensure_future(model.infer(ask(18)))
        await asyncio.sleep(0.05)
        both = await asyncio.gather(*(model.infer(InferRequest([from_array("x", half)])) for _ in range(2)))
        assert [float(to_array(answer[0]).sum()) for answer in both] == [300_000.0, 300_000.0]
        await busy
        assert value(await model.infer(ask(1))) == [[2.0, 2.0]]

    using(make(instances='max_batch_size = "1 MiB"'), test)


def test_a_model_that_cannot_load_says_why_and_leaves_nothing(make: Callable[..., ModelConfig]) -> None:
    async def main() -> None:
        with pytest.raises(DataError, match="failed to load: RuntimeError: no weights here"):
            await Model(make("a", parameters="breaks = true")).load()
        with pytest.raises(DataError, match=r"failed to load: .*defines no class Model"):
            await Model(make("b", code="x = 1")).load()

    run(main())


def test_a_change_that_does_not_load_leaves_the_old_model_serving(
    make: Callable[..., ModelConfig], tmp_path: Path
) -> None:
    async def main() -> None:
        make("m")
        models = ModelRepository(tmp_path)
        await models.load("m")
        assert value(await models.get("m").infer(ask(3))) == [[6.0, 2.0]]
        make("m", parameters="breaks = true")
        with pytest.raises(RequestFailed, match=r"failed to load 'm'.*no weights here"):
            await models.load("m")
        assert value(await models.get("m").infer(ask(3))) == [[6.0, 2.0]]
        make("m", parameters="scale = 10")
        await models.load("m")
        assert value(await models.get("m").infer(ask(3))) == [[30.0, 10.0]]
        await models.unload("m")
        with pytest.raises(RequestFailed, match="unknown model") as fault:
            models.get("m")
        assert fault.value.reason is Reason.UNAVAILABLE
        await models.close()

    run(main())


def test_an_onnx_file_needs_no_inputs_in_its_toml(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper

    folder = tmp_path / "net"
    folder.mkdir()
    nodes = [helper.make_node("Add", ["a", "b"], ["total"])]
    held = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in ("a", "b")]
    out = [helper.make_tensor_value_info("total", TensorProto.FLOAT, ["n", 3])]
    graph = helper.make_graph(nodes, "g", held, out)
    model_file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model_file, str(folder / "model.onnx"))
    (folder / "model.toml").write_text(
        'schema = 1\nbackend = "onnx"\n[batching]\nmax_rows = 8\n[instances]\nthreads = 1\n'
    )

    async def test(model: Model) -> None:
        assert [(spec.name, spec.datatype, spec.shape) for spec in model.inputs] == [
            ("a", "FP32", (3,)),
            ("b", "FP32", (3,)),
        ]
        a = np.arange(6, dtype=np.float32).reshape(2, 3)
        answer = await model.infer(InferRequest([from_array("a", a), from_array("b", a)]))
        assert to_array(answer[0]).tolist() == (2 * a).tolist()

    using(read_config(folder), test)


def test_a_backend_whose_library_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from wirespeed.serve.backends import load_backend

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else real(name))
    with pytest.raises(MissingCapability, match="hint: pip install onnxruntime"):
        load_backend("onnx")


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("", "missing required field `backend`"),
        ('backend = "python"\nschema = 9', "got schema 9"),
        ('backend = "python"\nbatch = 3', "batch"),
        ('backend = "python"\n[[input]]\nname = "x"\ndatatype = "FLOAT"\nshape = [1]', "got datatype 'FLOAT'"),
        ('backend = "python"\n[batching]\nmax_rows = 4\npad = ["length"]', "got pad of length"),
        ('backend = "python"\n[batching]\nmax_rows = 4096', "room for one batch"),
        ('backend = "python"\n[batching]\nmax_delay = "2 parsecs"', "2 parsecs"),
        ('backend = "python"\n[instances]\ncount = 0', "got 0 instances"),
        ("backend = ", "model.toml"),
    ],
)
def test_a_wrong_model_toml_names_the_file_and_the_field(tmp_path: Path, toml: str, text: str) -> None:
    (tmp_path / "model.toml").write_text(toml)
    with pytest.raises(DataError) as fault:
        read_config(tmp_path)
    assert text in str(fault.value)
    assert "model.toml" in str(fault.value)


def test_workers_end_with_the_server_however_it_ends(make: Callable[..., ModelConfig]) -> None:
    config = make()
    code = f"""
import asyncio, os, sys
from pathlib import Path
from wirespeed.serve.config import read_config
from wirespeed.serve.model import Model
async def main():
    model = Model(read_config(Path({config.folder!r})))
    await model.load()
    print(*model.worker_pids, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    import subprocess
    import time

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    pid = int(done.stdout)
    end_s = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end_s:
        state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        if state == "Z":  # dead; whoever is its parent now has not looked yet
            return
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
