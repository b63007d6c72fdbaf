"""The commands `serve` and `load` as users start them: doors, token, drain, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from wirespeed.serve.client import InferenceClient
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.wire import Security, run

TOKEN = "a-token-of-enough-length"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "double").mkdir()
    (folder / "double" / "model.toml").write_text(
        'schema = 1\nbackend = "python"\n[batching]\nmax_rows = 16\n'
        '[[input]]\nname = "x"\ndatatype = "FP32"\nshape = [-1]\n[[output]]\nname = "y"\ndatatype = "FP32"\nshape = [-1]\n'
    )
    (folder / "double" / "model.py").write_text(
        "import os, time\n\n\nclass Model:\n    def infer(self, inputs):\n        x = inputs['x']\n"
        f"        if x[0, 0] == 99:\n            open({str(folder.with_name('begun'))!r}, 'w').close()\n"
        f"            while not os.path.exists({str(folder.with_name('go'))!r}):\n                time.sleep(0.01)\n"
        "        return {'y': x * 2}\n"
    )
    return folder


def wirespeed(*arguments: str, token: str | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wirespeed", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(token), check=False)


def environment(token: str | None) -> dict[str, str]:
    held = {key: value for key, value in os.environ.items() if key != "WIRESPEED_TOKEN"}
    return held if token is None else {**held, "WIRESPEED_TOKEN": token}


@contextmanager
def serving(
    models: Path, *options: str, token: str | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    command = [
        sys.executable,
        "-m",
        "wirespeed",
        "serve",
        str(models),
        "--grpc",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
        "--json",
    ]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(token)
    )
    assert process.stdout is not None
    try:
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            assert line, f"the server ended: {process.stderr.read() if process.stderr else ''}"
            text += line
        yield process, json.loads(text)
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def get(url: str, *, token: str | None = None, body: bytes | None = None) -> tuple[int, bytes]:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers), timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as fault:
        with fault:
            return fault.code, fault.read()


def test_every_door_answers_and_load_measures_each(models: Path) -> None:
    with serving(models) as (process, doors):
        base = f"http://{doors['http']}"
        body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2]}]}).encode()
        status, answer = get(f"{base}/v2/models/double/infer", body=body)
        assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [3.0, -4.0])
        for url in (
            f"grpc://{doors['grpc']}/double",
            f"http://{doors['http']}/double",
            f"predict://{doors['grpc']}/double",
        ):
            how = ("--rate", "100") if url.startswith("http") else ("-c", "2")
            done = wirespeed("load", url, "--shape", "x:2,8", "--duration", "1 s", "--warmup", "100 ms", "--json", *how)
            assert done.returncode == 0, done.stderr
            report = json.loads(done.stdout)
            assert report["num_ok"] > 10
            assert report["num_failed"] == 0
        metrics = get(f"{base}/metrics")[1].decode()
        assert 'wirespeed_requests_total{model="double",outcome="ok"}' in metrics
        assert 'wirespeed_request_seconds_bucket{le="+Inf",model="double"}' in metrics
        assert get(f"{base}/readyz")[0] == 200
        assert get(f"{base}/v2/models/nothing")[0] == 404
        assert get(f"{base}/v2/models/double/infer", body=b"{")[0] == 400
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_load_of_a_model_that_is_not_there_says_so(models: Path) -> None:
    with serving(models) as (_, doors):
        done = wirespeed("load", f"grpc://{doors['grpc']}/nothing", "--duration", "100 ms")
        assert done.returncode == 2
        assert "Request for unknown model: 'nothing'" in done.stderr
        done = wirespeed("load", f"grpc://{doors['grpc']}/double", "--duration", "100 ms")
        assert done.returncode == 2
        assert "expected --shape x:SIZE,SIZE" in done.stderr


def test_a_token_is_asked_for_at_every_door(models: Path) -> None:
    with serving(models, token=TOKEN) as (_, doors):
        base = f"http://{doors['http']}"
        assert get(f"{base}/v2")[0] == 401
        assert get(f"{base}/v2", token="wrong" * 5)[0] == 401
        assert get(f"{base}/v2", token=TOKEN)[0] == 200
        assert get(f"{base}/healthz")[0] == 200

        async def ask(security: Security) -> list[list[float]]:
            async with InferenceClient(doors["grpc"], security=security, num_retries=0) as client:
                outputs = await client.infer("double", {"x": np.ones((1, 2), np.float32)}, timeout_s=60)
                return outputs["y"].tolist()  # type: ignore[no-any-return]

        assert run(ask(Security(token=TOKEN))) == [[2.0, 2.0]]
        with pytest.raises(RequestFailed, match="asks for a token"):
            run(ask(Security()))


async def first_refusal(client: InferenceClient) -> str:
    """Ask until refused. What is not refused waits behind the request that holds the only instance."""
    while True:
        try:
            await client.infer("double", {"x": np.ones((1, 2), np.float32)}, timeout_s=0.3)
        except RequestFailed as fault:
            if fault.reason is not Reason.DEADLINE:
                return str(fault)


def test_at_sigterm_what_is_under_way_is_finished_and_new_requests_are_refused(models: Path) -> None:
    with serving(models) as (process, doors):

        async def main() -> None:
            async with InferenceClient(doors["grpc"], num_connections=1, num_retries=0) as client:
                await client.infer("double", {"x": np.ones((1, 2), np.float32)}, timeout_s=60)
                slow = asyncio.ensure_future(
                    client.infer("double", {"x": np.full((1, 2), 99, np.float32)}, timeout_s=100)
                )
                async with asyncio.timeout(60):
                    while not models.with_name("begun").exists():
                        await asyncio.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(60):
                    refusal = await first_refusal(client)
                assert re.search("shutting down|UNAVAILABLE", refusal), refusal
                models.with_name("go").touch()
                assert (await slow)["y"].tolist() == [[198.0, 198.0]]

        run(main())
        assert process.wait(60) == 0


def test_two_servers_share_a_port_where_asked_to_and_not_otherwise(models: Path) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        with serving(models, "--reuse-port", "--http", address), serving(models, "--reuse-port", "--http", address):
            assert get(f"http://{address}/readyz")[0] == 200
            done = wirespeed("serve", str(models), "--grpc", "none", "--http", address)
    assert done.returncode == 2
    assert "is the port in use?" in done.stderr


def test_what_cannot_be_served_is_said_before_anything_is_open(models: Path, tmp_path: Path) -> None:
    done = wirespeed("serve", str(models), "--grpc", "0.0.0.0:0")
    assert (done.returncode, "refuse to listen on 0.0.0.0" in done.stderr) == (2, True)
    done = wirespeed("serve", str(tmp_path))
    assert (done.returncode, "holds no models" in done.stderr) == (2, True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.toml").write_text("backend = 3")
    done = wirespeed("serve", str(tmp_path))
    assert done.returncode == 2
    assert "failed to load 'broken'" in done.stderr
    assert "model.toml" in done.stderr
