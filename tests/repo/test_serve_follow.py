"""A server that follows an alias: updates while requests run, updates that are refused, a store that goes away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repo_tools import SERVED_TOML

from wirespeed.repo.aliases import rollback, set_alias
from wirespeed.repo.cache import Cache
from wirespeed.repo.repository import Repository

pytest.importorskip("grpc", reason="needs the extra `serve`")

CODE = """
import time
from pathlib import Path

import numpy as np


class Model:
    def __init__(self, config):
        self.weights = np.fromfile(Path(config.folder) / "weights.bin", np.float32)
        assert self.weights.size, "no weights"

    def infer(self, inputs):
        time.sleep(0.002)
        return {"y": inputs["x"] * self.weights.sum()}
"""


def make_model(folder: Path, value: float, *, max_drift: float | None = None, reference: object = None) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    limit = "" if max_drift is None else f'[reference]\nfile = "reference.npz"\nmax_drift = {max_drift}\n'
    (folder / "model.toml").write_text(SERVED_TOML + limit)
    (folder / "model.py").write_text(CODE)
    (folder / "weights.bin").write_bytes(b"" if value == 0 else np.array([value], np.float32).tobytes())
    if max_drift is not None:
        rows = np.array([1, 2, 3, 4], np.float32) if reference is None else reference
        np.savez(folder / "reference.npz", x=np.asarray(rows))
    return folder


class Following:
    """A server on its way, and what it says."""

    def __init__(self, process: subprocess.Popen[str], http: str) -> None:
        self._process = process
        self.http = http
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        self._reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as fault:
            return fault.code, ""

    def ask(self) -> float:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": [1.0, 2.0, 3.0, 4.0]}]}
        request = urllib.request.Request(
            f"http://{self.http}/v2/models/faces/infer", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            data: list[float] = json.loads(answer.read())["outputs"][0]["data"]
        assert data == [data[0] * n for n in (1, 2, 3, 4)]
        return data[0]

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < end_s, f"{what}; it said: {''.join(self.lines)}"
            time.sleep(0.02)

    def says(self, text: str) -> None:
        self.until(lambda: any(text in line for line in self.lines), f"it never said {text!r}")


@contextmanager
def following(tmp_path: Path, *options: str) -> Iterator[Following]:
    command = [
        sys.executable, "-m", "wirespeed", "serve", "repo:org/faces@prod", "--repo", str(tmp_path / "store"),
        "--grpc", "none", "--http", "127.0.0.1:0", "--json", "--follow", "200 ms", *options,
    ]  # fmt: skip
    environment = {**os.environ, "WIRESPEED_CACHE": str(tmp_path / "server-cache")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    text = ""
    while not text.endswith("}\n"):
        line = process.stdout.readline()
        assert line, f"the server ended: {process.communicate()[1]}"
        text += line
    server = Following(process, json.loads(text)["http"])
    try:
        yield server
    finally:
        server.end()


@pytest.fixture
def publish(tmp_path: Path, folder_store: Any) -> Callable[..., str]:
    repository = Repository(folder_store, cache=Cache(tmp_path / "pusher"))

    def push(value: float, **more: Any) -> str:
        pushed = repository.push(make_model(tmp_path / "m", value, **more), "org/faces")
        set_alias(folder_store, "org/faces", "prod", pushed.version.number)
        return pushed.version.label

    return push


def test_an_update_goes_live_while_requests_run_and_none_is_dropped_or_mixed(
    tmp_path: Path, publish: Callable[..., str], folder_store: Any
) -> None:
    publish(0.5)
    with following(tmp_path) as server:
        seen: list[float] = []
        faults: list[BaseException] = []
        done = threading.Event()

        def ask_on() -> None:
            while not done.is_set():
                try:
                    seen.append(server.ask())
                except Exception as fault:
                    faults.append(fault)

        threads = [threading.Thread(target=ask_on) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            server.until(lambda: len(seen) > 20, "no answers")
            for value in (2.0, 8.0):
                publish(value)
                server.until(lambda value=value: value in seen[-3:], f"{value} never went live")  # type: ignore[misc]
            rollback(folder_store, "org/faces", "prod")
            server.until(lambda: seen[-1] == 2.0, "the rollback never went live")
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert faults == []
        assert set(seen) == {0.5, 2.0, 8.0}
        # In order, but for answers of the old workers to what they had when the new ones took over.
        first_new = seen.index(2.0)
        assert 0.5 not in seen[first_new + 10 :]
        assert 'wirespeed_model_origin{model="faces",origin="org/faces@v2"} 1.0' in server.get("/metrics")[1]
        server.says("repo:org/faces@prod is org/faces@v2 now")


def test_an_update_that_drifts_too_far_or_does_not_load_stays_out(tmp_path: Path, publish: Callable[..., str]) -> None:
    publish(1.0, max_drift=0.05)
    with following(tmp_path) as server:
        publish(1.02, max_drift=0.05)
        server.says("drift on the reference batch: y 2 %")
        server.until(lambda: server.ask() == pytest.approx(1.02), "a small change never went live")
        assert 'wirespeed_update_drift{model="faces"} 0.0' in server.get("/metrics")[1]

        publish(1.5, max_drift=0.05)
        server.says(
            "org/faces@v3 is not served: failed to load 'faces': drift on the reference batch: y 47.1 %, of which 5 %"
        )
        publish(0.0, max_drift=0.05)
        server.says("org/faces@v4 is not served")
        publish(1.03, max_drift=0.05, reference=np.zeros(4, np.float64))
        server.says("org/faces@v5 is not served: failed to load 'faces': array 'x' is of float64")
        assert server.ask() == pytest.approx(1.02)
        assert sum("org/faces@v3 is not served" in line for line in server.lines) == 1
        assert server.get("/v2/health/ready")[0] == 200

        publish(1.03, max_drift=0.05)
        server.until(lambda: server.ask() == pytest.approx(1.03), "what follows a refused update never went live")


def test_a_store_that_goes_away_is_said_once_and_past_the_bound_the_model_is_not_ready(
    tmp_path: Path, publish: Callable[..., str]
) -> None:
    publish(0.5)
    with following(tmp_path, "--max-staleness", "1 s") as server:
        assert server.get("/v2/health/ready")[0] == 200
        (tmp_path / "store").rename(tmp_path / "away")
        server.says("cannot follow repo:org/faces@prod for the moment")
        server.until(lambda: server.get("/v2/health/ready")[0] != 200, "it stayed ready")
        server.says("model 'faces' is not ready: the store has not said for")
        assert server.ask() == 0.5
        text = server.get("/metrics")[1]
        age_s = float(text.split('wirespeed_model_staleness_seconds{model="faces"} ')[1].split("\n")[0])
        assert 1 < age_s < 30
        (tmp_path / "away").rename(tmp_path / "store")
        server.until(lambda: server.get("/v2/health/ready")[0] == 200, "it never came back")
        assert sum("cannot follow" in line for line in server.lines) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["repo:org/faces@v1", "--follow", "10s"], "nothing that can change"),
        (["repo:org/faces@prod", "--follow", "10s", "--max-staleness", "5s"], "more than --follow"),
        (["repo:org/faces@prod", "--max-staleness", "5s"], "without --follow"),
        (["repo:org/faces@prod", "--follow", "0s"], "more than 0"),
    ],
)
def test_what_cannot_be_followed_is_a_usage_error(
    tmp_path: Path, publish: Callable[..., str], arguments: list[str], told: str
) -> None:
    publish(0.5)
    ended = subprocess.run(
        [sys.executable, "-m", "wirespeed", "serve", *arguments, "--repo", str(tmp_path / "store")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert told in ended.stderr
