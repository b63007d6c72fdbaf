"""Container images out of the repository: the requests that docker, podman and skopeo make, and skopeo itself."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from wirespeed.repo import aliases
from wirespeed.repo.hub import HubServer
from wirespeed.repo.repository import Repository

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def make_image(folder: Path, *, seed: int = 0, tags: tuple[str | None, ...] = (None,)) -> list[str]:
    """An OCI layout with an image per tag; gives the manifests' digests."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(content: bytes) -> tuple[str, int]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return f"sha256:{digest}", len(content)

    entries = []
    for at, tag in enumerate(tags):
        layer = put(np.random.default_rng(seed + at).bytes(700_000))
        config = put(
            json.dumps(
                {
                    "architecture": "amd64",
                    "os": "linux",
                    "rootfs": {"type": "layers", "diff_ids": [layer[0]]},
                    "config": {},
                }
            ).encode()
        )
        document = {
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config[0], "size": config[1]},
            "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer[0], "size": layer[1]}],
        }  # fmt: skip
        digest, size = put(json.dumps(document).encode())
        entry: dict[str, object] = {"mediaType": MANIFEST, "digest": digest, "size": size}
        if tag is not None:
            entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
        entries.append(entry)
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    return [str(entry["digest"]) for entry in entries]


def start(repository: Repository, **options: str) -> tuple[HubServer, threading.Thread]:
    found = HubServer(repository, **options)  # type: ignore[arg-type]
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    return found, thread


@pytest.fixture
def server(repository: Repository) -> Iterator[HubServer]:
    found, thread = start(repository)
    yield found
    found.shutdown()
    found.server_close()
    thread.join(timeout=60)


def ask(server: HubServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, content


def test_an_image_is_pulled_as_docker_does(server: HubServer, repository: Repository, tmp_path: Path) -> None:
    (digest,) = make_image(tmp_path / "i")
    repository.push(tmp_path / "i", "team/image")
    assert ask(server, "/v2/")[0] == 200
    status, headers, content = ask(server, "/v2/team/image/manifests/v1", "HEAD", Accept=MANIFEST)
    assert (status, headers["docker-content-digest"], headers["content-type"], content) == (200, digest, MANIFEST, b"")
    status, headers, content = ask(server, f"/v2/team/image/manifests/{digest}")
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == digest
    assert headers["content-type"] == MANIFEST
    document = json.loads(content)
    for blob in (document["config"], *document["layers"]):
        status, headers, content = ask(server, f"/v2/team/image/blobs/{blob['digest']}")
        assert status == 200
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == blob["digest"]
    status, headers, part = ask(server, f"/v2/team/image/blobs/{blob['digest']}", Range="bytes=699990-")
    assert (status, part) == (206, content[-10:])


def test_tags_are_aliases_versions_latest_and_names_of_the_layout(
    server: HubServer, repository: Repository, tmp_path: Path
) -> None:
    (old,) = make_image(tmp_path / "a")
    repository.push(tmp_path / "a", "image")
    new, other = make_image(tmp_path / "b", seed=5, tags=("cpu", "gpu"))
    repository.push(tmp_path / "b", "image")
    aliases.set_alias(repository.store, "image", "prod", 1)

    def digest_of(tag: str) -> str:
        return ask(server, f"/v2/image/manifests/{tag}", "HEAD")[1]["docker-content-digest"]

    assert digest_of("prod") == digest_of("v1") == old
    assert (digest_of("cpu"), digest_of("gpu")) == (new, other)
    index = (tmp_path / "b" / "index.json").read_bytes()
    assert digest_of("latest") == digest_of("v2") == f"sha256:{hashlib.sha256(index).hexdigest()}"
    assert ask(server, f"/v2/image/manifests/{digest_of('v2')}")[2] == index
    assert json.loads(ask(server, "/v2/image/tags/list")[2]) == {
        "name": "image",
        "tags": ["latest", "prod", "v1", "v2"],
    }
    aliases.set_alias(repository.store, "image", "latest", 1)
    assert digest_of("latest") == old


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v2/none/manifests/v1", 404, "NAME_UNKNOWN"),
        ("/v2/image/manifests/v9", 404, "MANIFEST_UNKNOWN"),
        ("/v2/image/manifests/sha256:" + "0" * 64, 404, "MANIFEST_UNKNOWN"),
        ("/v2/image/blobs/sha256:" + "0" * 64, 404, "BLOB_UNKNOWN"),
        ("/v2/image/blobs/md5:00", 400, "DIGEST_INVALID"),
        ("/v2/model/manifests/v1", 404, "MANIFEST_UNKNOWN"),
        ("/v2/image/other/v1", 404, "NAME_UNKNOWN"),
    ],
)
def test_what_is_not_there_is_told_in_the_specifications_words(
    path: str, status: int, code: str, server: HubServer, repository: Repository, tmp_path: Path
) -> None:
    make_image(tmp_path / "i")
    repository.push(tmp_path / "i", "image")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a").write_text("no image")
    repository.push(tmp_path / "m", "model")
    found, _, content = ask(server, path)
    assert (found, json.loads(content)["errors"][0]["code"]) == (status, code)


def test_nothing_can_be_pushed(server: HubServer) -> None:
    status, _, content = ask(server, "/v2/image/blobs/uploads/", "POST")
    assert (status, json.loads(content)["errors"][0]["code"]) == (405, "UNSUPPORTED")


def test_a_token_is_the_password(repository: Repository, tmp_path: Path) -> None:
    make_image(tmp_path / "i")
    repository.push(tmp_path / "i", "image")
    server, thread = start(repository, token="sesame-of-sixteen")
    try:
        status, headers, _ = ask(server, "/v2/")
        assert (status, headers["www-authenticate"]) == (401, 'Basic realm="wirespeed"')
        right = base64.b64encode(b"anyone:sesame-of-sixteen").decode()
        assert ask(server, "/v2/image/manifests/v1", Authorization=f"Basic {right}")[0] == 200
        wrong = base64.b64encode(b"anyone:no").decode()
        assert ask(server, "/v2/image/manifests/v1", Authorization=f"Basic {wrong}")[0] == 401
        assert ask(server, "/v2/", Authorization="Basic %%%")[0] == 401
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=60)


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed: apt-get install skopeo")
def test_skopeo_copies_an_image_unchanged(server: HubServer, repository: Repository, tmp_path: Path) -> None:
    (digest,) = make_image(tmp_path / "i")
    repository.push(tmp_path / "i", "team/image")
    where = urlsplit(server.endpoint).netloc
    done = subprocess.run(
        ["skopeo", "--insecure-policy", "copy", "--src-tls-verify=false", f"docker://{where}/team/image:v1", f"oci:{tmp_path / 'out'}:x"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for path in (tmp_path / "i" / "blobs" / "sha256").iterdir():
        assert (tmp_path / "out" / "blobs" / "sha256" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "out" / "blobs" / "sha256" / digest[7:]).exists()
