"""Models of another hub: fetched once, verified, resumed, and served while that hub is away. Both hubs are real servers."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from repo_tools import FaultProxy, Request, make_model, tree

from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.repo import aliases
from wirespeed.repo.cache import Cache
from wirespeed.repo.hub import HubServer
from wirespeed.repo.mirror import Mirror, Upstream
from wirespeed.repo.repository import Repository
from wirespeed.repo.store import open_store


class Served:
    def __init__(self, repository: Repository, **options: object) -> None:
        self.server = HubServer(repository, **options)  # type: ignore[arg-type]
        self.url = self.server.endpoint
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join(timeout=60)

    def ask(self, path: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, content


@pytest.fixture
def far(tmp_path: Path) -> Repository:
    """The repository behind the other hub."""
    found = Repository(open_store(tmp_path / "far", must_exist=False), cache=Cache(tmp_path / "far-cache"))
    found.push(make_model(tmp_path / "m"), "org/m")
    return found


@pytest.fixture
def hub(far: Repository) -> Iterator[Served]:
    found = Served(far)
    yield found
    found.close()


def test_a_model_is_fetched_once_and_follows_its_branch(
    hub: Served, far: Repository, repository: Repository, tmp_path: Path
) -> None:
    mirror = Mirror(repository, Upstream(url=hub.url))
    first = mirror.bring("org/m")
    assert first.fetched_bytes == sum(map(len, tree(tmp_path / "m").values()))
    assert tree(Path(repository.pull("org/m@main").folder).resolve()) == tree(tmp_path / "m")
    again = mirror.bring("org/m")
    assert (again.fetched_bytes, again.version.number) == (0, 1)
    (tmp_path / "m" / "config.json").write_text('{"a": 2}')
    far.push(tmp_path / "m", "org/m")
    second = mirror.bring("org/m")
    assert second.version.number == 2
    main = aliases.current(repository.store, "org/m", "main")
    assert main is not None
    assert main.number == 2
    old = repository.version(f"org/m@commit-{first.commit}")
    assert old.number == 1
    assert mirror.bring("org/m", first.commit).fetched_bytes == 0


def test_what_broke_off_is_gone_on_with_and_what_is_wrong_is_refused(
    hub: Served, repository: Repository, tmp_path: Path
) -> None:
    proxy = FaultProxy(hub.url)
    try:
        mirror = Mirror(repository, Upstream(url=proxy.endpoint))
        cut: list[str] = []

        def once(request: Request) -> str | None:
            if request.path.endswith("tokens.bin") and not cut:
                cut.append(request.path)
                return "cut"
            return None

        proxy.decide = once
        mirror.bring("org/m")
        assert len([r for r in proxy.requests if r.path.endswith("tokens.bin")]) == 2
        assert tree(Path(repository.pull("org/m").folder).resolve()) == tree(tmp_path / "m")

        other = Repository(open_store(tmp_path / "other", must_exist=False), cache=Cache(tmp_path / "other-cache"))
        proxy.decide = lambda request: "flip" if request.path.endswith("tokens.bin") else None
        with pytest.raises(DataError, match=r"sub/tokens.bin of org/m is not what"):
            Mirror(other, Upstream(url=proxy.endpoint)).bring("org/m")
        assert other.models() == []
    finally:
        proxy.close()


def test_a_hub_server_fetches_what_it_lacks_and_serves_it_when_its_upstream_is_gone(
    hub: Served, repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near = Served(repository, mirror=Mirror(repository, Upstream(url=hub.url)))
    try:
        status, headers, content = near.ask("/org/m/resolve/main/config.json")
        assert (status, content) == (200, b'{"a": 1}')
        assert json.loads(near.ask("/api/models/org/m")[2])["sha"] == headers["x-repo-commit"]
        status, _, _ = near.ask("/org/none/resolve/main/config.json")
        assert status == 404
        hub.close()
        near.server.mirror._asked_s.clear()  # type: ignore[union-attr]  # as after five minutes
        status, _, content = near.ask("/org/m/resolve/main/sub/tokens.bin")
        assert (status, content) == (200, (tmp_path / "m" / "sub" / "tokens.bin").read_bytes())
        assert "does not answer" in caplog.text
    finally:
        near.close()


def test_a_token_goes_to_the_hub_and_errors_say_what_to_do(far: Repository, repository: Repository) -> None:
    hub = Served(far, token="sesame-of-sixteen")
    try:
        with pytest.raises(UsageError, match="HF_TOKEN"):
            Mirror(repository, Upstream(url=hub.url)).bring("org/m")
        upstream = Upstream(url=hub.url, token="sesame-of-sixteen")
        assert "sesame" not in repr(upstream)
        assert Mirror(repository, upstream).bring("org/m").version.number == 1
        with pytest.raises(UsageError, match="does not exist"):
            Mirror(repository, upstream).bring("org/none")
    finally:
        hub.close()
    with pytest.raises(PeerFailure, match="does not answer"):
        Mirror(repository, upstream).bring("org/m")
