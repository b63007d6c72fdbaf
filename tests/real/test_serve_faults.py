"""The doors of `wirespeed serve` under clients that die, never read, send too much, or send nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import psutil
import pytest

from infer_models import wait_for
from wirespeed import wire
from wirespeed.serve._generated import predict_pb2
from wirespeed.serve.client import InferenceClient, encode_request
from wirespeed.serve.tensors import from_array
from wirespeed.units import MIB

LIMIT = 16 * MIB
SERVICE = "/inference.GRPCInferenceService"
# Writes down every value that it runs; 99 holds the model until a file appears.
GATE = """
import os, time
import numpy as np

HERE = os.path.dirname(__file__)


class Model:
    def infer(self, inputs):
        with open(os.path.join(HERE, "ran"), "a") as log:
            log.writelines(f"{int(value)}\\n" for value in inputs["x"][:, 0])
        if (inputs["x"] == 99).any():
            while not os.path.exists(os.path.join(HERE, "go")):
                time.sleep(0.01)
        return {"y": inputs["x"]}
"""
ECHO = "class Model:\n    def infer(self, inputs):\n        return {'y': inputs['x']}\n"
TOML = """
schema = 1
backend = "python"
[batching]
max_rows = {rows}
[[input]]
name = "x"
datatype = "{datatype}"
shape = [-1]
[[output]]
name = "y"
datatype = "{datatype}"
shape = [-1]
"""


class Serving:
    """A server with the models ``gate`` and ``echo``."""

    def __init__(self, folder: Path) -> None:
        for name, code, datatype, rows in (("gate", GATE, "FP32", 1), ("echo", ECHO, "UINT8", 0)):
            (folder / name).mkdir(parents=True)
            (folder / name / "model.py").write_text(code)
            (folder / name / "model.toml").write_text(TOML.format(datatype=datatype, rows=rows))
        self.gate = folder / "gate"
        command = [sys.executable, "-m", "wirespeed", "serve", str(folder), "--grpc", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [*command, "--http", "127.0.0.1:0", "--max-message", "16 MiB", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline()
            assert line, "the server ended"
            text += line
        doors = json.loads(text)
        self.grpc, self.http = doors["grpc"], doors["http"]

    def gauge(self, name: str, model: str) -> int:
        """One number of /metrics."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=60) as answer:
            found = re.search(rf'^{name}{{model="{model}"}} (\S+)', answer.read().decode(), re.MULTILINE)
        assert found is not None
        return round(float(found[1]))

    def memory_bytes(self) -> int:
        """What the server's own process has."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def is_well(self) -> None:
        """Both doors answer, with the right bytes."""

        async def ask() -> None:
            async with InferenceClient(self.grpc, num_connections=1) as client:
                x = np.arange(200, dtype=np.uint8)
                assert (await client.infer("echo", {"x": x}, timeout_s=60))["y"].tolist() == x.tolist()

        wire.run(ask())
        with urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=60) as answer:
            assert answer.status == 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = Serving(tmp_path_factory.mktemp("models"))
    try:
        yield serving
    finally:
        serving.process.kill()
        serving.process.communicate(timeout=60)


# Sends its first value, the others once the model is at that one, and waits for answers that it will not see.
ASKS = """
import asyncio, os, sys
import numpy as np
from wirespeed.serve.client import InferenceClient

async def main():
    async with InferenceClient(sys.argv[1], num_connections=1, num_retries=0) as client:
        def ask(value):
            return asyncio.ensure_future(client.infer("gate", {"x": np.full((1, 1), value, np.float32)}, timeout_s=100))
        first, *others = map(int, sys.argv[3:])
        calls = [ask(first)]
        while not os.path.exists(sys.argv[2]):
            await asyncio.sleep(0.01)
        await asyncio.gather(*calls, *map(ask, others))

asyncio.run(main())
"""


def test_requests_of_a_client_that_was_killed_leave_the_queue(server: Serving) -> None:
    values = [99, *range(1, 9)]
    client = subprocess.Popen([sys.executable, "-c", ASKS, server.grpc, str(server.gate / "ran"), *map(str, values)])
    try:
        wait_for(lambda: server.gauge("wirespeed_queued_requests", "gate") == 8, "one runs, eight wait")
        client.send_signal(signal.SIGKILL)
        wait_for(lambda: server.gauge("wirespeed_queued_requests", "gate") == 0, "those that wait are taken back")
    finally:
        client.kill()
        client.wait(60)
        (server.gate / "go").touch()

    async def ask() -> None:
        async with InferenceClient(server.grpc, num_connections=1) as other:
            answer = await other.infer("gate", {"x": np.full((1, 1), 7.0, np.float32)}, timeout_s=60)
            assert answer["y"].tolist() == [[7.0]]

    wire.run(ask())
    assert (server.gate / "ran").read_text().split() == ["99", "7"]
    server.is_well()


def test_a_stream_whose_answers_nobody_reads_is_stopped_and_others_are_served(server: Serving) -> None:
    message = encode_request("echo", [from_array("x", np.zeros(4 * MIB, np.uint8))])
    before_bytes = server.memory_bytes()

    async def main() -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(server.grpc, options=options) as channel:
            stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(timeout=100)
            written = 0
            while True:
                try:
                    # What is not taken within so long is not going to be: on its own the model takes milliseconds.
                    await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(stream.write(message))), 3)
                except TimeoutError:
                    break
                written += 1
                assert written < 100, "400 MiB were taken from a client that reads nothing"
            # 64 MiB of requests and answers, one more message on either side, and what the connection itself holds.
            assert 16 <= written <= 32
            assert server.memory_bytes() - before_bytes < 400 * MIB
            await asyncio.get_running_loop().run_in_executor(None, server.is_well)
            for _ in range(written):  # nothing is lost for being late
                assert len(await asyncio.wait_for(stream.read(), 60)) > 4 * MIB
            stream.cancel()

    wire.run(main())
    server.is_well()


def test_http_clients_that_never_read_or_stop_half_way_hold_up_nobody(server: Serving) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [MIB], "data": [0] * MIB}]}).encode()
    head = f"POST /v2/models/echo/infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    host, _, port = server.http.rpartition(":")
    held: list[socket.socket] = []
    try:
        for place in range(6):
            sock = socket.create_connection((host, int(port)), timeout=60)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            held.append(sock)
            sock.sendall(head.encode() + (body if place % 2 else body[: len(body) // 2]))
        server.is_well()
        for sock in held:  # gone in the middle of whatever it is
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    finally:
        for sock in held:
            sock.close()
    server.is_well()
    wait_for(lambda: server.gauge("wirespeed_running_requests", "echo") == 0, "nothing is left of them")


def test_messages_above_the_limit_are_refused_by_name_at_every_door(server: Serving) -> None:
    over = np.zeros(LIMIT + 1, np.uint8)

    async def main() -> None:
        async with grpc.aio.insecure_channel(server.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
            for method in (f"{SERVICE}/ModelInfer", "/wirespeed.v1.Inference/Predict"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(method)(encode_request("echo", [from_array("x", over)]), timeout=60)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert str(LIMIT) in (caught.value.details() or "")

    wire.run(main())
    # By its stated length: not one byte of it has to come.
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.putrequest("POST", "/v2/models/echo/infer")
    connection.putheader("content-length", str(LIMIT + 1))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 429
    assert "the body is larger than 16 MiB; hint: raise --max-message" in json.loads(answer.read())["error"]
    connection.close()
    server.is_well()


def damaged(message: bytes, rng: np.random.Generator) -> bytes:
    """A message with some bytes changed, cut out, put in twice, or its end cut off."""
    found = bytearray(message)
    for _ in range(int(rng.integers(1, 5))):
        place = int(rng.integers(0, len(found)))
        kind = rng.integers(0, 4)
        if kind == 0:
            found[place] = int(rng.integers(0, 256))
        elif kind == 1:
            del found[place : place + int(rng.integers(1, 9))]
        elif kind == 2:
            found[place:place] = found[place : place + 8]
        else:
            del found[max(1, place) :]
        if not found:
            break
    return bytes(found)


def test_damaged_messages_are_refused_with_a_reason_and_never_as_a_bug(server: Serving) -> None:
    rng = np.random.default_rng(11)
    good = encode_request("echo", [from_array("x", np.arange(64, dtype=np.uint8))], ["y"], {"priority": 1})
    prediction = predict_pb2.PredictRequest(request_id="r", input_data=bytes(64), parameters={"model": "echo"})
    whole = prediction.SerializeToString()
    # A changed name is another model's, or another output's; everything else that is wrong is the message's.
    allowed = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED}

    async def main() -> None:
        async with grpc.aio.insecure_channel(server.grpc) as channel:
            infer = channel.unary_unary(f"{SERVICE}/ModelInfer")
            predict = channel.unary_unary("/wirespeed.v1.Inference/Predict")
            codes: dict[grpc.StatusCode, int] = {}
            for place in range(400):
                message = rng.bytes(int(rng.integers(0, 200))) if place % 4 == 0 else damaged(good, rng)
                call = infer(message, timeout=60)
                code, details = await call.code(), await call.details()
                codes[code] = codes.get(code, 0) + 1
                if code is not grpc.StatusCode.OK:
                    assert code in allowed, (code, details, message)
                    assert details
                    assert "a bug of the server" not in details, message
            assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 100
            num_refused = 0
            for place in range(200):
                message = rng.bytes(int(rng.integers(0, 200))) if place % 4 == 0 else damaged(whole, rng)
                answer = predict_pb2.PredictResponse.FromString(await predict(message, timeout=60))
                assert answer.success != bool(answer.error_message), message
                assert "a bug of the server" not in answer.error_message, message
                num_refused += not answer.success
            assert num_refused > 50
            await stream_of(channel, [damaged(good, rng) for _ in range(100)] + [good])

    async def stream_of(channel: Any, messages: list[bytes]) -> None:
        from wirespeed.serve._generated import open_inference_pb2 as pb

        stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(timeout=100)
        answers = []
        for message in messages:
            await stream.write(message)
            answers.append(pb.ModelStreamInferResponse.FromString(await stream.read()))
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert not any("a bug of the server" in answer.error_message for answer in answers)
        assert sum(bool(answer.error_message) for answer in answers) > 20
        assert answers[-1].infer_response.raw_output_contents[0] == bytes(range(64))

    wire.run(main())
    server.is_well()


def test_nonsense_on_a_doors_port_costs_its_own_connection_only(server: Serving) -> None:
    rng = np.random.default_rng(12)
    for address in (server.grpc, server.http):
        host, _, port = address.rpartition(":")
        for size in (1, 100, 20_000):
            address_of = (host, int(port))
            # It is cut off, sooner or later.
            with socket.create_connection(address_of, timeout=60) as sock, contextlib.suppress(OSError):
                sock.sendall(rng.bytes(size))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
    assert os.waitid(os.P_PID, server.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    server.is_well()
