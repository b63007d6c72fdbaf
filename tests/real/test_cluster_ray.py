"""Nodes that a real Ray cluster starts: placed by rack, started again, used while the head is away, and gone at the end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infer_models import check_results, expected_features, make_images, make_model
from wirespeed.serve.client import InferenceClient
from wirespeed.wire.security import Security

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'wirespeed[cluster]'"),
]
TOKEN = "a-token-of-the-tests-only"
FAST_FAULTS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RayCluster:
    """A head without CPUs and hosts of these racks, all on this machine."""

    def __init__(self, racks: list[str], root: Path) -> None:
        self.port = free_port()
        self.environment = {
            **os.environ, **FAST_FAULTS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64,
            "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        self.environment.pop("PYTHONPATH", None)
        self.root = root
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start(["--head", f"--port={self.port}", "--num-cpus=0", "--include-dashboard=false"])
        for rack in racks:
            self._start([f"--address=127.0.0.1:{self.port}", "--num-cpus=2", f"--labels=rack={rack}"])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _start(self, arguments: list[str]) -> None:
        ray = Path(sys.executable).parent / "ray"
        command = [str(ray), "start", "--block", "--node-ip-address=127.0.0.1", "--disable-usage-stats",
                   "--object-store-memory=80000000", *arguments]  # fmt: skip
        if "--head" in arguments:
            command.append(f"--temp-dir={self.root}")
        path = self.root.parent / f"{self.root.name}-{len(self.processes)}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)
        end_s = time.monotonic() + 60
        while "Ray runtime started" not in path.read_text(errors="replace"):
            assert process.poll() is None, path.read_text(errors="replace")[-2000:]
            assert time.monotonic() < end_s, path.read_text(errors="replace")[-2000:]
            time.sleep(0.1)
        time.sleep(3.0)  # hosts that start at the same moment take each other's ports

    def gcs(self) -> psutil.Process:
        """The head's control process."""
        below = psutil.Process(self.processes[0].pid).children(recursive=True)
        return next(process for process in below if "gcs_server" in " ".join(process.cmdline()))

    def close(self) -> None:
        for process in reversed(self.processes):
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            for left in below:
                if left.is_running():
                    left.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # Ray's sockets lie below this: their paths must be short.
    with tempfile.TemporaryDirectory(prefix="wsray-", dir="/tmp", ignore_cleanup_errors=True) as root:
        made = RayCluster(["r1", "r2", "r2"], Path(root) / "s")
        try:
            yield made
        finally:
            made.close()


class Serving:
    """``wirespeed serve --cluster`` as users start it."""

    def __init__(self, cluster: RayCluster, folder: Path, *options: str) -> None:
        environment = {**cluster.environment, "WIRESPEED_TOKEN": TOKEN}
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "wirespeed", "serve", str(folder), "--cluster", cluster.address, "--http", "none",
             "--grpc", "127.0.0.1:0", "--json", *options],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.news: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("\n}\n"):
            line = self.process.stdout.readline()
            assert line, self.news
            text += line
        self.door = str(json.loads(text)["grpc"])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.news.append(line.strip())

    def wait_news(self, word: str, count: int, timeout_s: float = 90.0) -> None:
        end_s = time.monotonic() + timeout_s
        while sum(word in line for line in self.news) < count:
            assert time.monotonic() < end_s, f"waited for {count} of {word!r} in {self.news}"
            assert self.process.poll() is None, self.news
            time.sleep(0.1)

    def nodes(self) -> list[psutil.Process]:
        """The nodes that Ray runs for it."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if str(self.folder) in words and "--node" in words and "-c" not in words:
                found.append(process)
        return found

    def let_go(self) -> None:
        self.process.wait(30)
        self._reader.join(30)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(90)
        self.let_go()
        assert self.nodes() == []
        assert self.process.returncode == 0, self.news


@contextmanager
def serving(cluster: RayCluster, folder: Path, *options: str) -> Iterator[Serving]:
    held = Serving(cluster, folder, *options)
    try:
        yield held
    except BaseException:
        held.process.kill()
        held.let_go()
        raise
    held.close()


def ask(door: str, count: int) -> None:
    """So many requests, each answered rightly."""
    import asyncio

    import numpy as np

    async def main() -> None:
        async with InferenceClient(door, security=Security(token=TOKEN)) as client:
            for number in range(count):
                content = number.to_bytes(4, "little") * 100
                answer = await client.infer("digest", {"image": np.array([content], object)}, timeout_s=30)
                assert answer["features"].tolist() == [expected_features(content)]

    asyncio.run(main())


def test_workers_are_spread_over_racks_started_again_and_serve_while_the_head_is_away(
    cluster: RayCluster, tmp_path: Path
) -> None:
    make_model(tmp_path / "models", row_s=0.001)
    with serving(cluster, tmp_path / "models") as served:
        served.wait_news("is up at", 3)
        assert sum("rack r2" in line for line in served.news) == 2
        ask(served.door, 30)
        victim = served.nodes()[0]
        victim.kill()
        ask(served.door, 30)  # by the others
        served.wait_news("is up at", 4)
        assert len(served.nodes()) == 3
        gcs = cluster.gcs()
        gcs.suspend()  # the head does not answer
        try:
            ask(served.door, 200)
        finally:
            gcs.resume()
        ask(served.door, 10)


def test_packed_workers_share_a_rack(cluster: RayCluster, tmp_path: Path) -> None:
    make_model(tmp_path / "models", row_s=0.001)
    with serving(cluster, tmp_path / "models", "--placement", "pack") as served:
        served.wait_news("is up at", 2)
        assert sum("rack r2" in line for line in served.news if "is up at" in line) == 2
        ask(served.door, 10)


def test_a_job_runs_on_the_cluster(cluster: RayCluster, tmp_path: Path) -> None:
    make_model(tmp_path / "models", row_s=0.001)
    paths = make_images(tmp_path / "inputs", 60)
    out = tmp_path / "out.parquet"
    done = subprocess.run(
        [sys.executable, "-m", "wirespeed", "infer", str(tmp_path / "inputs"), "--cluster", cluster.address, "--model",
         str(tmp_path / "models" / "digest"), "--out", str(out)],
        env={**cluster.environment, "WIRESPEED_TOKEN": TOKEN}, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_results(out, paths)


def test_what_cannot_be_placed_or_served_is_said(cluster: RayCluster, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "wirespeed", "serve", *arguments],
            env={**cluster.environment, "WIRESPEED_TOKEN": TOKEN}, capture_output=True, text=True, timeout=150,
            check=False,
        )  # fmt: skip

    missing = run(str(tmp_path / "nothing"), "--cluster", cluster.address)
    assert missing.returncode == 2, missing.stderr
    assert "cannot serve" in missing.stderr
    wrong = run(str(tmp_path), "--cluster", cluster.address, "--placement", "near")
    assert (wrong.returncode, "spread or pack" in wrong.stderr) == (2, True)
    both = run(str(tmp_path), "--cluster", cluster.address, "--nodes", "h:1")
    assert both.returncode == 2
