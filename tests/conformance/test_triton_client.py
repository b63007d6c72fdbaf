"""Conformance: the real `tritonclient`, over gRPC (sync, aio, streaming), HTTP and shared memory, against the real command.

Runs in an environment of its own with `make conformance`, or in this one where tritonclient is installed.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

grpcclient = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed; hint: make conformance")
import tritonclient.grpc.aio as aioclient  # noqa: E402
import tritonclient.http as httpclient  # noqa: E402
from triton_server import Serving, serving  # noqa: E402
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, serialize_byte_tensor  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # the client's own warnings are not ours
NUMPY = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "INT8": np.int8,
    "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--allow-client-shm", "--compat-server-name", "triton") as held:
        yield held


@pytest.fixture
def grpc_client(server: Serving) -> Iterator[Any]:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        yield client


@pytest.fixture
def http_client(server: Serving) -> Iterator[Any]:
    with httpclient.InferenceServerClient(server.http) as client:
        yield client


@pytest.fixture(params=["grpc", "http"])
def door(request: pytest.FixtureRequest, server: Serving) -> Iterator[tuple[ModuleType, Any]]:
    module, url = (grpcclient, server.grpc) if request.param == "grpc" else (httpclient, server.http)
    with module.InferenceServerClient(url) as client:
        yield module, client


def inputs_of(module: ModuleType, **arrays: np.ndarray) -> list[Any]:
    made = []
    for name, array in arrays.items():
        held = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        held.set_data_from_numpy(array)
        made.append(held)
    return made


def simple(module: ModuleType, start: int = 0, rows: int = 1) -> tuple[list[Any], np.ndarray, np.ndarray]:
    a = np.arange(start, start + 16 * rows, dtype=np.int32).reshape(rows, 16)
    b = np.full((rows, 16), 3, np.int32)
    return inputs_of(module, INPUT0=a, INPUT1=b), a + b, a - b


def field(message: Any, name: str) -> Any:
    return message[name] if isinstance(message, dict) else getattr(message, name)


def test_health_and_metadata(door: tuple[ModuleType, Any]) -> None:
    _, client = door
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert not client.is_model_ready("no_such_model")
    server = client.get_server_metadata()
    assert field(server, "name") == "triton"
    assert "system_shared_memory" in field(server, "extensions")
    model = client.get_model_metadata("simple")
    assert [field(i, "name") for i in field(model, "inputs")] == ["INPUT0", "INPUT1"]
    assert [list(map(int, field(o, "shape"))) for o in field(model, "outputs")] == [[-1, 16], [-1, 16]]


def test_inference(door: tuple[ModuleType, Any]) -> None:
    module, client = door
    inputs, total, difference = simple(module, rows=3)
    result = client.infer("simple", inputs, request_id="my-request")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), total)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), difference)
    assert field(result.get_response(), "id") == "my-request"


def test_only_the_outputs_that_are_asked_for_in_that_order(door: tuple[ModuleType, Any]) -> None:
    module, client = door
    inputs, _, difference = simple(module)
    result = client.infer("simple", inputs, outputs=[module.InferRequestedOutput("OUTPUT1")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), difference)
    assert result.as_numpy("OUTPUT0") is None


@pytest.mark.parametrize("datatype", list(NUMPY))
def test_every_datatype_comes_back_bit_for_bit(door: tuple[ModuleType, Any], datatype: str) -> None:
    module, client = door
    raw = np.random.default_rng(5).bytes(2 * 6 * np.dtype(NUMPY[datatype]).itemsize)
    array = (
        np.frombuffer(raw, NUMPY[datatype]).reshape(2, 6)
        if datatype != "BOOL"
        else np.arange(12).reshape(2, 6) % 3 == 0
    )
    result = client.infer(f"identity_{datatype.lower()}", inputs_of(module, INPUT0=array))
    assert result.as_numpy("OUTPUT0").tobytes() == array.tobytes()
    assert result.as_numpy("OUTPUT0").shape == (2, 6)


def test_bfloat16(door: tuple[ModuleType, Any]) -> None:
    module, client = door
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    array = np.array([[1.0, -2.5, 0.0, 65280.0]], bfloat16)
    held = module.InferInput("INPUT0", [1, 4], "BF16")
    held.set_data_from_numpy(array)
    result = client.infer("identity_bf16", [held])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0").astype(np.float32), array.astype(np.float32))


def test_strings_of_any_bytes(door: tuple[ModuleType, Any]) -> None:
    module, client = door
    array = np.array([[b"", b"\x00\xff", "grüße".encode(), b"x" * 70_000]], dtype=np.object_)
    result = client.infer("identity_bytes", inputs_of(module, INPUT0=array))
    assert result.as_numpy("OUTPUT0").tolist() == array.tolist()


def test_strings_as_numbers(door: tuple[ModuleType, Any]) -> None:
    module, client = door
    a = np.array([[str(n) for n in range(16)]], dtype=np.object_)
    b = np.array([["1"] * 16], dtype=np.object_)
    result = client.infer("simple_string", inputs_of(module, INPUT0=a, INPUT1=b))
    assert [int(text) for text in result.as_numpy("OUTPUT0")[0]] == list(range(1, 17))
    assert [int(text) for text in result.as_numpy("OUTPUT1")[0]] == list(range(-1, 15))


def test_json_data_over_http(http_client: Any) -> None:
    a = np.array([["a", "ä"]], dtype=np.object_)
    held = httpclient.InferInput("INPUT0", [1, 2], "BYTES")
    held.set_data_from_numpy(a, binary_data=False)
    out = httpclient.InferRequestedOutput("OUTPUT0", binary_data=False)
    result = http_client.infer("identity_bytes", [held], outputs=[out])
    assert result.as_numpy("OUTPUT0").tolist() == [["a", "ä"]] or result.as_numpy("OUTPUT0").tolist() == [
        [b"a", "ä".encode()]
    ]
    numbers = httpclient.InferInput("INPUT0", [2, 3], "INT16")
    numbers.set_data_from_numpy(np.array([[1, -2, 3], [4, 5, 32767]], np.int16), binary_data=False)
    result = http_client.infer("identity_int16", [numbers], outputs=[out])
    assert result.as_numpy("OUTPUT0").tolist() == [[1, -2, 3], [4, 5, 32767]]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_messages(door: tuple[ModuleType, Any], algorithm: str) -> None:
    module, client = door
    inputs, total, _ = simple(module)
    keyword = "compression_algorithm" if module is grpcclient else "request_compression_algorithm"
    result = client.infer("simple", inputs, **{keyword: algorithm})
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), total)


def test_typed_contents_over_grpc(server: Serving) -> None:
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        cases = {
            "INT8": ("int_contents", [-128, 127]), "INT32": ("int_contents", [-5, 2**31 - 1]), "INT64": ("int64_contents", [-(2**63), 7]),
            "UINT16": ("uint_contents", [0, 65535]), "UINT64": ("uint64_contents", [2**64 - 1, 1]), "BOOL": ("bool_contents", [True, False]),
            "FP32": ("fp32_contents", [1.5, -2.0]), "FP64": ("fp64_contents", [1e300, 0.1]), "BYTES": ("bytes_contents", [b"ab", b""]),
        }  # fmt: skip
        for datatype, (name, values) in cases.items():
            request = service_pb2.ModelInferRequest(model_name=f"identity_{datatype.lower()}")
            held = request.inputs.add(name="INPUT0", datatype=datatype, shape=[1, 2])
            getattr(held.contents, name).extend(values)
            response = stub.ModelInfer(request, timeout=10)
            if datatype == "BYTES":
                assert response.raw_output_contents[0] == b"\x02\x00\x00\x00ab\x00\x00\x00\x00"
            else:
                assert np.frombuffer(response.raw_output_contents[0], NUMPY[datatype]).tolist() == values
        request = service_pb2.ModelInferRequest(model_name="identity_int8")
        held = request.inputs.add(name="INPUT0", datatype="INT8", shape=[1, 2])
        held.contents.int_contents.extend([1, 200])
        with pytest.raises(grpc.RpcError, match="do not fit INT8"):
            stub.ModelInfer(request, timeout=10)
        held.contents.int_contents[:] = [1, 2]
        request.raw_input_contents.append(b"ab")
        with pytest.raises(grpc.RpcError, match="contents field must not be specified when using raw_input_contents"):
            stub.ModelInfer(request, timeout=10)


def test_sixty_four_megabytes(door: tuple[ModuleType, Any]) -> None:
    module, client = door
    array = np.arange(16 * 1024 * 1024, dtype=np.float32).reshape(4096, 4096)
    result = client.infer("whole", inputs_of(module, x=array))
    assert np.array_equal(result.as_numpy("y"), array)


def test_empty_tensors(door: tuple[ModuleType, Any]) -> None:
    module, client = door
    result = client.infer("whole", inputs_of(module, x=np.zeros((0, 5), np.float32)))
    assert result.as_numpy("y").shape == (0, 5)


def test_async_calls_of_the_sync_client(grpc_client: Any) -> None:
    done: queue.Queue[Any] = queue.Queue()
    expected = {}
    for n in range(20):
        inputs, total, _ = simple(grpcclient, start=n)
        expected[str(n)] = total
        grpc_client.async_infer(
            "simple", inputs, callback=lambda result, error: done.put((result, error)), request_id=str(n)
        )
    for _ in range(20):
        result, error = done.get(timeout=10)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), expected.pop(result.get_response().id))


def test_aio_client(server: Serving) -> None:
    async def test() -> None:
        async with aioclient.InferenceServerClient(server.grpc) as client:
            assert await client.is_server_live()
            cases = [simple(aioclient, start=n) for n in range(40)]
            results = await asyncio.gather(*(client.infer("simple", inputs) for inputs, _, _ in cases))
            for result, (_, total, _) in zip(results, cases, strict=True):
                np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), total)

            async def requests() -> Any:
                for n, (inputs, _, _) in enumerate(cases[:10]):
                    yield {"model_name": "simple", "inputs": inputs, "request_id": str(n)}

            place = 0
            async for result, error in client.stream_infer(requests(), stream_timeout=20):
                assert error is None
                assert result.get_response().id == str(place)
                np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), cases[place][1])
                place += 1
            assert place == 10

    asyncio.run(test())


def test_streaming_keeps_the_order_and_goes_on_after_an_error(grpc_client: Any) -> None:
    done: queue.Queue[Any] = queue.Queue()
    grpc_client.start_stream(callback=lambda result, error: done.put((result, error)))
    inputs, total, _ = simple(grpcclient)
    for n in range(5):
        grpc_client.async_stream_infer("simple" if n != 2 else "no_such_model", inputs, request_id=str(n))
    for n in range(5):
        result, error = done.get(timeout=10)
        if n == 2:
            assert "Request for unknown model" in str(error)
            continue
        assert result.get_response().id == str(n)
        assert result.get_response().parameters["triton_final_response"].bool_param
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), total)
    grpc_client.stop_stream()


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("unknown model", lambda m: ("nope", simple(m)[0])),
        ("unable to find data for input tensor 'INPUT1'", lambda m: ("simple", simple(m)[0][:1])),
        (
            "unexpected inference input 'extra'",
            lambda m: ("simple", [*simple(m)[0], *inputs_of(m, extra=np.zeros((1, 16), np.int32))]),
        ),
        (
            "unexpected shape for input 'INPUT0'",
            lambda m: ("simple", inputs_of(m, INPUT0=np.zeros((1, 15), np.int32), INPUT1=np.zeros((1, 16), np.int32))),
        ),
        (
            "is INT64",
            lambda m: ("simple", inputs_of(m, INPUT0=np.zeros((1, 16), np.int64), INPUT1=np.zeros((1, 16), np.int32))),
        ),
        ("batch-size", lambda m: ("simple", simple(m, rows=9)[0])),
        (
            "has 2 rows",
            lambda m: ("simple", inputs_of(m, INPUT0=np.zeros((1, 16), np.int32), INPUT1=np.zeros((2, 16), np.int32))),
        ),
    ],
)
def test_wrong_requests_say_what_is_wrong(door: tuple[ModuleType, Any], text: str, make: Any) -> None:
    module, client = door
    model, inputs = make(module)
    with pytest.raises(InferenceServerException, match=text):
        client.infer(model, inputs)


def test_wrong_outputs_and_parameters(door: tuple[ModuleType, Any]) -> None:
    module, client = door
    inputs = simple(module)[0]
    with pytest.raises(InferenceServerException, match="unexpected inference output 'OUTPUT9'"):
        client.infer("simple", inputs, outputs=[module.InferRequestedOutput("OUTPUT9")])
    twice = [module.InferRequestedOutput("OUTPUT0"), module.InferRequestedOutput("OUTPUT0")]
    with pytest.raises(InferenceServerException, match="output 'OUTPUT0' already exists in request"):
        client.infer("simple", inputs, outputs=twice)
    with pytest.raises(InferenceServerException, match="no sequence batcher"):
        client.infer("simple", inputs, sequence_id=5, sequence_start=True)


def test_a_shape_that_claims_more_than_the_bytes_is_refused(grpc_client: Any) -> None:
    held = grpcclient.InferInput("INPUT0", [4, 16], "INT32")
    held._raw_content = bytes(64)  # one row's bytes for four rows
    with pytest.raises(InferenceServerException, match="has 64 bytes; expected 256"):
        grpc_client.infer("simple", [held, *simple(grpcclient, rows=4)[0][1:]])


def test_configuration_statistics_and_index(door: tuple[ModuleType, Any]) -> None:
    module, client = door
    config = client.get_model_config("simple")
    config = config if isinstance(config, dict) else config.config
    assert int(field(config, "max_batch_size")) == 8
    before = client.get_inference_statistics("simple")
    client.infer("simple", simple(module, rows=2)[0])
    after = client.get_inference_statistics("simple")
    (old,), (new,) = field(before, "model_stats"), field(after, "model_stats")
    assert int(field(new, "inference_count")) - int(field(old, "inference_count")) == 2
    assert int(field(new, "execution_count")) - int(field(old, "execution_count")) == 1
    index = client.get_model_repository_index()
    listed = index if isinstance(index, list) else list(index.models)
    assert {field(held, "state") for held in listed} == {"READY"}
    assert "simple" in {field(held, "name") for held in listed}


def test_load_and_unload(grpc_client: Any) -> None:
    grpc_client.unload_model("ragged")
    assert not grpc_client.is_model_ready("ragged")
    with pytest.raises(InferenceServerException, match="unknown model"):
        grpc_client.infer("ragged", inputs_of(grpcclient, x=np.ones((1, 3), np.float32)))
    grpc_client.load_model("ragged")
    assert grpc_client.is_model_ready("ragged")
    with pytest.raises(InferenceServerException, match="failed to load"):
        grpc_client.load_model("no_such_model")
    grpc_client.load_model("ragged", config='{"max_batch_size": 4}')
    assert grpc_client.get_model_config("ragged").config.max_batch_size == 4
    grpc_client.load_model("ragged")
    assert grpc_client.get_model_config("ragged").config.max_batch_size == 16


def test_loading_again_drops_no_request(server: Serving) -> None:
    faults: list[BaseException] = []
    answered = [0]
    stop = threading.Event()

    def ask() -> None:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            inputs, total, _ = simple(grpcclient)
            while not stop.is_set():
                try:
                    np.testing.assert_array_equal(client.infer("simple", inputs).as_numpy("OUTPUT0"), total)
                    answered[0] += 1
                except BaseException as fault:
                    faults.append(fault)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for _ in range(2):
            client.load_model("simple")
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []
    assert answered[0] > 0


def test_system_shared_memory(door: tuple[ModuleType, Any]) -> None:
    shm = pytest.importorskip("tritonclient.utils.shared_memory")
    module, client = door
    client.unregister_system_shared_memory()
    key = f"/wirespeed_{module.__name__.replace('.', '_')}"
    a, b = np.arange(16, dtype=np.int32), np.ones(16, np.int32)
    given = shm.create_shared_memory_region("given", f"{key}_in", 128)
    got = shm.create_shared_memory_region("got", f"{key}_out", 128)
    try:
        shm.set_shared_memory_region(given, [a, b])
        client.register_system_shared_memory("given", f"{key}_in", 128)
        client.register_system_shared_memory("got", f"{key}_out", 128)
        inputs = [module.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        inputs[0].set_shared_memory("given", 64)
        inputs[1].set_shared_memory("given", 64, offset=64)
        outputs = [module.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
        outputs[0].set_shared_memory("got", 64)
        outputs[1].set_shared_memory("got", 64, offset=64)
        client.infer("simple", inputs, outputs=outputs)
        held = shm.get_contents_as_numpy(got, np.int32, [2, 16])
        np.testing.assert_array_equal(held, np.stack([a + b, a - b]))
        status = client.get_system_shared_memory_status()
        names = {region["name"] for region in status} if isinstance(status, list) else set(status.regions)
        assert names == {"given", "got"}
        outputs[0].set_shared_memory("got", 32)
        with pytest.raises(InferenceServerException, match="should be at least 64 bytes"):
            client.infer("simple", inputs, outputs=outputs[:1])
        inputs[0].set_shared_memory("given", 64, offset=100)
        with pytest.raises(InferenceServerException, match="within its 128 bytes"):
            client.infer("simple", inputs)
        with pytest.raises(InferenceServerException, match=r"expected within|within the 128"):
            client.register_system_shared_memory("large", f"{key}_in", 4096)
        for wrong in ("/../etc/passwd", "/a/b", ""):
            with pytest.raises(InferenceServerException):
                client.register_system_shared_memory("wrong", wrong, 16)
        client.unregister_system_shared_memory()
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region"):
            client.infer("simple", inputs)
    finally:
        shm.destroy_shared_memory_region(given)
        shm.destroy_shared_memory_region(got)


def test_a_deadline_ends_the_request_and_frees_the_model(grpc_client: Any) -> None:
    seconds = inputs_of(grpcclient, seconds=np.array([1.0], np.float32))
    begin_s = time.monotonic()
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        grpc_client.infer("slow", seconds, client_timeout=0.2)
    assert time.monotonic() - begin_s < 0.9
    # Queued behind it with a deadline that passes before the model is free: it never runs.
    with pytest.raises(InferenceServerException, match=r"deadline|Deadline"):
        grpc_client.infer("slow", inputs_of(grpcclient, seconds=np.array([0.0], np.float32)), timeout=100_000)
    quick = inputs_of(grpcclient, seconds=np.array([0.0], np.float32))
    assert grpc_client.infer("slow", quick).as_numpy("seconds_out")[0] == 0.0


def test_a_cancelled_call_leaves_the_queue(grpc_client: Any) -> None:
    done: queue.Queue[Any] = queue.Queue()
    running = grpc_client.async_infer(
        "slow",
        inputs_of(grpcclient, seconds=np.array([0.5], np.float32)),
        callback=lambda result, error: done.put((result, error)),
    )
    time.sleep(0.15)  # so that it is the one that runs
    queued = grpc_client.async_infer(
        "slow",
        inputs_of(grpcclient, seconds=np.array([5.0], np.float32)),
        callback=lambda result, error: done.put((result, error)),
    )
    time.sleep(0.1)
    queued.cancel()
    begin_s = time.monotonic()
    quick = grpc_client.infer("slow", inputs_of(grpcclient, seconds=np.array([0.0], np.float32)))
    assert quick.as_numpy("seconds_out")[0] == 0.0
    assert time.monotonic() - begin_s < 2.0
    del running


def test_an_error_in_one_requests_data_fails_that_request_alone(server: Serving) -> None:
    async def test() -> None:
        async with aioclient.InferenceServerClient(server.grpc) as client:
            values = [1.0, -1.0, 2.0, 3.0, -5.0, 4.0] * 4
            calls = [client.infer("picky", inputs_of(aioclient, x=np.array([[v]], np.float32))) for v in values]
            results = await asyncio.gather(*calls, return_exceptions=True)
            for value, result in zip(values, results, strict=True):
                if value < 0:
                    assert "a negative number" in str(result)
                else:
                    assert result.as_numpy("y").tolist() == [[2 * value]]

    asyncio.run(test())


def test_a_request_that_kills_its_worker_fails_alone_and_the_worker_comes_back(server: Serving) -> None:
    async def test() -> None:
        async with aioclient.InferenceServerClient(server.grpc) as client:
            values = [1.0, 13.0, 2.0, 3.0]
            calls = [client.infer("picky", inputs_of(aioclient, x=np.array([[v]], np.float32))) for v in values]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert "died" in str(results[1])
            assert [r.as_numpy("y").tolist() for place, r in enumerate(results) if place != 1] == [
                [[2.0]],
                [[4.0]],
                [[6.0]],
            ]

    asyncio.run(test())


def test_requests_are_batched_and_split_to_their_owners(server: Serving) -> None:
    async def test() -> None:
        async with aioclient.InferenceServerClient(server.grpc) as client:
            rng = np.random.default_rng(3)
            arrays = [rng.random((int(rows), 1), np.float32) for rows in rng.integers(1, 6, 200)]
            results = await asyncio.gather(*(client.infer("picky", inputs_of(aioclient, x=array)) for array in arrays))
            sizes = []
            for array, result in zip(arrays, results, strict=True):
                np.testing.assert_array_equal(result.as_numpy("y"), array * 2)
                sizes.append(int(result.as_numpy("rows")[0, 0]))
            assert max(sizes) <= 16
            assert sum(sizes) / len(sizes) > 3  # how soon they come together is the client's doing

    asyncio.run(test())


def test_mixed_shapes_are_padded_where_the_model_says_so(server: Serving) -> None:
    async def test() -> None:
        async with aioclient.InferenceServerClient(server.grpc) as client:
            arrays = [np.full((1 + n % 2, n), n, np.float32) for n in range(1, 30)]
            results = await asyncio.gather(*(client.infer("ragged", inputs_of(aioclient, x=array)) for array in arrays))
            widths = set()
            for array, result in zip(arrays, results, strict=True):
                np.testing.assert_array_equal(result.as_numpy("sum"), array.sum(axis=1, keepdims=True))
                np.testing.assert_array_equal(result.as_numpy("plus_one"), array + 1)
                widths.add(int(result.as_numpy("width")[0, 0]))
            assert len(widths) < len(arrays)  # some did share a batch

    asyncio.run(test())


def test_classification(door: tuple[ModuleType, Any]) -> None:
    module, client = door
    array = np.array([[0.1, 0.7, 0.2], [5, 1, 9]], np.float32)
    out = module.InferRequestedOutput("OUTPUT0", class_count=2)
    result = client.infer("identity_fp32", inputs_of(module, INPUT0=array), outputs=[out]).as_numpy("OUTPUT0")
    found = [[text.decode() if isinstance(text, bytes) else text for text in row] for row in result]
    assert found == [["0.700000:1", "0.200000:2"], ["9.000000:2", "5.000000:0"]]


def test_byte_elements_whose_lengths_lie_are_refused(grpc_client: Any) -> None:
    good = serialize_byte_tensor(np.array([b"abc", b"de"], dtype=np.object_)).item()
    for raw, text in (
        (good[:-1], "longer than"),
        (good + b"\x00", "ends within the length"),
        (good + b"\0\0\0\0", "expected 2"),
    ):
        held = grpcclient.InferInput("INPUT0", [1, 2], "BYTES")
        held._raw_content = raw
        with pytest.raises(InferenceServerException, match=text):
            grpc_client.infer("identity_bytes", [held])


def test_token_drain_and_health() -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with serving(models=Path(__file__).parent / "models", token="a-token-of-enough-length") as held:
        with grpcclient.InferenceServerClient(held.grpc) as client:
            with pytest.raises(InferenceServerException, match="asks for a token"):
                client.is_server_live()
            headers = {"authorization": "Bearer a-token-of-enough-length"}
            assert client.is_server_live(headers=headers)
            with grpc.insecure_channel(held.grpc) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                assert (
                    check(health_pb2.HealthCheckRequest(), timeout=5).status == health_pb2.HealthCheckResponse.SERVING
                )
            done: queue.Queue[Any] = queue.Queue()
            slow = inputs_of(grpcclient, seconds=np.array([1.0], np.float32))
            client.async_infer("slow", slow, callback=lambda result, error: done.put((result, error)), headers=headers)
            time.sleep(0.3)
            held.process.terminate()
            result, error = done.get(timeout=10)
            assert error is None
            assert result.as_numpy("seconds_out")[0] == 1.0
        assert held.process.wait(20) == 0
