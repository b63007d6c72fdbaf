"""huggingface_hub itself, unmodified, in processes of its own, against the read endpoint."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from repo_tools import make_model, model_bytes, tree

from wirespeed.errors import UsageError
from wirespeed.repo import aliases
from wirespeed.repo.hub import HubServer
from wirespeed.repo.repository import Repository

needs_hub = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed"
)


@pytest.fixture
def server(repository: Repository) -> Iterator[HubServer]:
    found = HubServer(repository)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join(timeout=60)


def client(server: HubServer, home: Path, code: str, **environment: str) -> str:
    """What a process with Hugging Face's client prints."""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "HF_ENDPOINT": server.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def ask(server: HubServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, content


@needs_hub
def test_a_snapshot_is_the_version(server: HubServer, repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    repository.push(folder, "org/m")
    out = client(server, tmp_path / "home", "import huggingface_hub as h; print(h.snapshot_download('org/m'))").strip()
    assert tree(Path(out)) == tree(folder)
    assert Path(out).name == repository.version("org/m").manifest_digest[:40]


@needs_hub
def test_revisions_are_aliases_versions_and_commits(server: HubServer, repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    digests = []
    for step in range(3):
        (folder / "config.json").write_text(str(step))
        digests.append(repository.push(folder, "org/m").version.manifest_digest)
    aliases.set_alias(repository.store, "org/m", "prod", 2)
    code = (
        "import huggingface_hub as h\n"
        f"for r in ('v1', 'prod', '{digests[0][:40]}', 'main'):\n"
        "    print(open(h.hf_hub_download('org/m', 'config.json', revision=r)).read(), end=' ')\n"
        "try: h.hf_hub_download('org/m', 'config.json', revision='nope')\n"
        "except h.errors.RevisionNotFoundError: print('no revision', end=' ')\n"
        "try: h.hf_hub_download('org/m', 'nope.json')\n"
        "except h.errors.EntryNotFoundError: print('no file', end=' ')\n"
        "try: h.hf_hub_download('org/other', 'config.json')\n"
        "except h.errors.RepositoryNotFoundError: print('no model')\n"
    )
    assert client(server, tmp_path / "home", code).split("\n")[0] == "0 1 0 2 no revision no file no model"


@needs_hub
def test_an_interrupted_download_is_gone_on_with(server: HubServer, repository: Repository, tmp_path: Path) -> None:
    repository.push(make_model(tmp_path / "m"), "org/m")
    etag = repository.manifest(repository.version("org/m")).file("model.safetensors").sha256.hex()
    content = (tmp_path / "m" / "model.safetensors").read_bytes()
    blobs = tmp_path / "home" / "hub" / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{etag}.incomplete").write_bytes(content[:1_000_000])
    sent: list[int] = []
    from wirespeed.repo import hub

    real = hub.read_span

    def counted(*args: object, begin: int, end: int) -> object:
        sent.append(end - begin)
        return real(*args, begin=begin, end=end)  # type: ignore[arg-type]

    hub.read_span = counted  # type: ignore[assignment]
    try:
        out = client(
            server,
            tmp_path / "home",
            "import huggingface_hub as h; print(h.hf_hub_download('org/m', 'model.safetensors'))",
        )
    finally:
        hub.read_span = real
    assert Path(out.strip()).read_bytes() == content
    assert sent in ([len(content) - 1_000_000], [len(content)])  # newer clients start over in a file of their own


@needs_hub
def test_the_clients_own_verification_agrees(server: HubServer, repository: Repository, tmp_path: Path) -> None:
    repository.push(make_model(tmp_path / "m"), "org/m")
    code = (
        "import huggingface_hub as h\n"
        "h.snapshot_download('org/m')\n"
        "r = h.HfApi().verify_repo_checksums('org/m')\n"
        "print(len(r.mismatches), len(r.missing_paths), r.checked_count)\n"
    )
    if not hasattr(__import__("huggingface_hub").HfApi, "verify_repo_checksums"):
        pytest.skip("this huggingface_hub has no verify_repo_checksums")
    assert client(server, tmp_path / "home", code).split() == ["0", "0", "5"]


@needs_hub
@pytest.mark.slow
def test_a_model_loads_offline_through_it(server: HubServer, repository: Repository, tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    make = (
        "import torch, transformers as t\n"
        "torch.manual_seed(0)\n"
        "m = t.GPT2LMHeadModel(t.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16)).eval()\n"
        f"m.save_pretrained({str(tmp_path / 'm')!r})\n"
        "print(float(m(torch.arange(8)[None]).logits.double().sum()))\n"
    )
    expected = client(server, tmp_path / "home", make).strip()
    repository.push(tmp_path / "m", "org/gpt")
    load = (
        "import torch, transformers as t\n"
        "m = t.GPT2LMHeadModel.from_pretrained('org/gpt')\n"
        "assert m.lm_head.weight.data_ptr() == m.transformer.wte.weight.data_ptr()\n"
        "print(float(m(torch.arange(8)[None]).logits.double().sum()))\n"
    )
    assert client(server, tmp_path / "home2", load).strip() == expected
    server.shutdown()
    assert client(server, tmp_path / "home2", load, HF_HUB_OFFLINE="1").strip() == expected


def test_ranges_are_honoured(server: HubServer, repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    repository.push(folder, "org/m")
    content = (folder / "model.safetensors").read_bytes()
    path = "/org/m/resolve/main/model.safetensors"
    status, headers, body = ask(server, path, "HEAD")
    assert (status, body, int(headers["content-length"])) == (200, b"", len(content))
    for wanted, expected in (
        ("bytes=0-9", content[:10]), ("bytes=700000-", content[700_000:]), ("bytes=-5", content[-5:]),
        ("bytes=590000-610000", content[590_000:610_001]), (f"bytes=0-{len(content) + 5}", content),
    ):  # fmt: skip
        status, headers, body = ask(server, path, Range=wanted)
        assert (status, body) == (206, expected)
    status, headers, _ = ask(server, path, Range=f"bytes={len(content)}-")
    assert (status, headers["content-range"]) == (416, f"bytes */{len(content)}")


def test_a_cached_file_and_a_stored_one_answer_alike(server: HubServer, repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    (folder / "model.safetensors").write_bytes(model_bytes(steps=1))
    repository.push(folder, "m", parent="v1")
    far = ask(server, "/m/resolve/v2/model.safetensors", Range="bytes=1000-900000")
    repository.pull("m")
    near = ask(server, "/m/resolve/v2/model.safetensors", Range="bytes=1000-900000")
    assert far[2] == near[2] == (folder / "model.safetensors").read_bytes()[1000:900_001]
    assert far[1]["etag"] == near[1]["etag"]


def test_the_tree_lists_folders_and_files(server: HubServer, repository: Repository, tmp_path: Path) -> None:
    repository.push(make_model(tmp_path / "m"), "m")
    _, _, body = ask(server, "/api/models/m/tree/main")
    assert {(e["type"], e["path"]) for e in json.loads(body)} == {
        ("directory", "sub"), ("file", "config.json"), ("file", "empty"), ("file", "model.safetensors"), ("file", "run.sh"),
    }  # fmt: skip
    _, _, body = ask(server, "/api/models/m/tree/main?recursive=true")
    assert ("file", "sub/tokens.bin") in {(e["type"], e["path"]) for e in json.loads(body)}


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/etc/passwd",
        "/m/resolve/main/../../../etc/passwd",
        "/api/models/a/b/c/d",
        "/api/models/%00",
        "/m/resolve/main/%2e%2e/x",
    ],
)
def test_what_is_not_a_model_is_not_found(server: HubServer, repository: Repository, tmp_path: Path, path: str) -> None:
    repository.push(make_model(tmp_path / "m"), "m")
    assert ask(server, path)[0] == 404


def test_a_token_is_needed_beyond_loopback_and_is_checked(repository: Repository, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="token"):
        HubServer(repository, host="0.0.0.0")
    repository.push(make_model(tmp_path / "m"), "m")
    server = HubServer(repository, token="secret")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        assert ask(server, "/api/models/m")[0] == 401
        assert ask(server, "/api/models/m", Authorization="Bearer wrong")[0] == 401
        assert ask(server, "/api/models/m", Authorization="Bearer secret")[0] == 200
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=60)
