"""What goes wrong, and what becomes of it: never a wrong byte, never a silent loss."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from repo_tools import SECOND_KEY, FaultProxy, Request, make_model, model_bytes, tree

from wirespeed.errors import DataError, MissingCapability, PeerFailure
from wirespeed.repo import names
from wirespeed.repo.cache import Cache
from wirespeed.repo.devstore import DevStore
from wirespeed.repo.fetch import Source
from wirespeed.repo.hot import Hot
from wirespeed.repo.repository import Repository
from wirespeed.repo.store import Store, open_store


@pytest.fixture
def proxy(seaweed: DevStore, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    found = FaultProxy(seaweed.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", found.endpoint)
    yield found
    found.close()


@pytest.fixture
def far(proxy: FaultProxy, s3_url: str, tmp_path: Path) -> Repository:
    return Repository(open_store(s3_url), cache=Cache(tmp_path / "cache"))


def once_in(period: int, kind: str, methods: str = "GET PUT HEAD DELETE") -> object:
    seen: dict[str, int] = {}

    def decide(request: Request) -> str | None:
        if request.method not in methods.split():
            return None
        seen[request.method] = seen.get(request.method, 0) + 1
        return kind if seen[request.method] % period == 0 else None

    return decide


@pytest.mark.parametrize("kind", ["503", "reset", "drop", "cut"])
def test_a_store_that_fails_now_and_then_is_only_slower(
    far: Repository, proxy: FaultProxy, tmp_path: Path, kind: str
) -> None:
    folder = make_model(tmp_path / "m")
    proxy.decide = once_in(3, kind)  # type: ignore[assignment]
    far.push(folder, "m")
    assert tree(Path(far.pull("m").folder)) == tree(folder)
    assert proxy.faults > 3
    proxy.decide = lambda request: None
    assert [problems for _, problems in far.verify("m")] == [[]]


def test_a_bit_that_fell_over_on_the_way_is_read_again(far: Repository, proxy: FaultProxy, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    far.push(folder, "m")
    flipped: set[str] = set()

    def decide(request: Request) -> str | None:
        if request.method == "GET" and "/objects/" in request.path and request.path not in flipped:
            flipped.add(request.path)
            return "flip"
        return None

    manifest = far.manifest(far.version("m"))
    proxy.decide = decide
    source = Source(far.store, manifest, label="m@v1")
    for file in manifest.files:
        assert b"".join(bytes(source.read(index)) for index in file.chunks) == (folder / file.path).read_bytes()
    assert source.counts.num_damaged > 0


def test_a_store_that_is_down_is_said_so(far: Repository, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy.close()
    with pytest.raises(PeerFailure, match="hint: the store did not answer"):
        far.models()


def test_credentials_that_expire_in_mid_push_are_read_again(
    seaweed: DevStore, s3_url: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "credentials"

    def write(access: str, secret: str) -> None:
        path.with_suffix(".new").write_text(f"[default]\naws_access_key_id={access}\naws_secret_access_key={secret}\n")
        os.replace(path.with_suffix(".new"), path)

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    write(seaweed.access_key, seaweed.secret_key)
    far = Repository(open_store(s3_url), cache=Cache(tmp_path / "cache"))
    far.models()
    expired = threading.Event()
    renewed = threading.Timer(0.5, write, SECOND_KEY)

    def decide(request: Request) -> str | None:
        if request.method == "PUT" and "/objects/" in request.path and not expired.is_set():
            expired.set()
            renewed.start()
        return "expired" if expired.is_set() and seaweed.access_key in request.authorization else None

    proxy.decide = decide
    folder = make_model(tmp_path / "m")
    far.push(folder, "m")
    assert expired.is_set()
    assert proxy.faults > 0
    assert tree(Path(far.pull("m").folder)) == tree(folder)


def test_credentials_that_never_worked_are_refused_at_once(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for attempt in (lambda s: list(s.list_objects("x")), lambda s: s.put("x", b"")):
        with pytest.raises(MissingCapability, match="AWS_ACCESS_KEY_ID") as caught:
            attempt(open_store(s3_url))
        assert "wrong" not in str(caught.value)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_object_in_the_store_is_an_error_and_is_named(
    repository: Repository, tmp_path: Path, damage: str
) -> None:
    folder = make_model(tmp_path / "m")
    version = repository.push(folder, "m").version
    assert repository.store.folder is not None
    manifest = repository.manifest(version)
    ref = max(manifest.objects, key=lambda ref: ref.size_bytes)
    path = repository.store.folder / names.object_key(ref.digest, ref.epoch)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    with pytest.raises((DataError, PeerFailure)):
        repository.pull("m", to=tmp_path / "out")
    assert not (tmp_path / "out" / ".wirespeed-version.json").exists()
    ((_, problems),) = repository.verify("m")
    assert {path for problem in problems for path in problem.files} == {"sub/tokens.bin"}
    assert repository.push(folder, "m", is_repair=True).uploaded_bytes > 0
    repository.pull("m", to=tmp_path / "out")
    assert tree(tmp_path / "out") == tree(folder)
    assert [problems for _, problems in repository.verify("m")] == [[], []]


def test_a_damaged_file_in_the_cache_is_found_out_and_replaced(repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    cached = Path(repository.pull("m").folder)
    victim = (cached / "model.safetensors").resolve()
    content = bytearray(victim.read_bytes())
    content[1000] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(content)
    pulled = repository.pull("m")
    assert tree(Path(pulled.folder)) == tree(folder)
    assert pulled.store_bytes > 0


def test_a_damaged_value_in_the_hot_tier_is_passed_over(repository: Repository, tmp_path: Path, redis_server) -> None:  # type: ignore[no-untyped-def]
    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    hot = Hot(redis_server.url, timeout_s=60)
    warm = Repository(repository.store, cache=Cache(tmp_path / "w"), hot=hot)
    warm.pull("m", to=tmp_path / "warm")
    again = Repository(repository.store, cache=Cache(tmp_path / "a"), hot=hot)
    assert again.pull("m", to=tmp_path / "again").hot_bytes > 0
    manifest = repository.manifest(repository.version("m"))
    for chunk in manifest.chunks:
        if hot.get(chunk.digest) is not None:
            hot.put(chunk.digest, b"wrong")
    pulled = Repository(repository.store, cache=Cache(tmp_path / "b"), hot=hot).pull("m", to=tmp_path / "b-out")
    assert pulled.num_damaged > 0
    assert tree(tmp_path / "b-out") == tree(folder)


def test_a_hot_tier_that_dies_costs_one_deadline(repository: Repository, tmp_path: Path, redis_server) -> None:  # type: ignore[no-untyped-def]
    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    hot = Hot(redis_server.url, timeout_s=0.2, pause_s=60)
    hot.put(b"x" * 32, b"1")
    redis_server.kill()
    assert tree(Path(Repository(repository.store, cache=repository.cache, hot=hot).pull("m").folder)) == tree(folder)
    # One failure, or as many as threads were on their way when it died; then it is left alone.
    assert 1 <= hot.num_failures <= 8


def test_two_pulls_at_the_same_time_into_the_same_places(repository: Repository, tmp_path: Path) -> None:
    from test_repo_versions import at_once

    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    results = at_once(4, lambda at: repository.pull("m", to=tmp_path / "out" if at % 2 else None))
    assert not [r for r in results if isinstance(r, Exception)]
    assert tree(tmp_path / "out") == tree(folder)
    assert tree(Path(repository.pull("m").folder)) == tree(folder)


def test_two_pushes_at_the_same_time_are_two_versions(repository: Repository, tmp_path: Path) -> None:
    from test_repo_versions import at_once

    folders = [make_model(tmp_path / f"m{at}", steps=at) for at in range(3)]
    results = at_once(3, lambda at: repository.push(folders[at], "m").version.number)
    for at, number in enumerate(results):
        assert tree(Path(repository.pull(f"m@{number}").folder)) == tree(folders[at])


def test_a_cache_that_is_too_small_says_so_and_evicts_what_is_oldest(folder_store: Store, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", limit_bytes=7_000_000)
    repository = Repository(folder_store, cache=cache)
    for at in range(3):
        path = tmp_path / f"{at}.bin"
        path.write_bytes(os.urandom(3_000_000))
        repository.push(path, f"m{at}")
        repository.pull(f"m{at}")
    assert cache.usage().num_files == 2
    assert repository.pull("m1").store_bytes == 0
    assert repository.pull("m0").store_bytes == 3_000_000
    (tmp_path / "big.bin").write_bytes(os.urandom(8_000_000))
    repository.push(tmp_path / "big.bin", "big")
    with pytest.raises(MissingCapability, match="WIRESPEED_CACHE_SIZE"):
        repository.pull("big")
    repository.pull("big", to=tmp_path / "out")
    assert (tmp_path / "out" / "big.bin").stat().st_size == 8_000_000


def test_another_users_file_is_verified_before_it_is_believed(folder_store: Store, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to be two users")
    repository = Repository(folder_store, cache=Cache(tmp_path / "cache"))
    repository.push(make_model(tmp_path / "m"), "m")
    manifest = repository.manifest(repository.version("m"))
    repository.pull("m")
    file = manifest.file("config.json")
    path = repository.cache.path_of(manifest.content_id(file))
    for mark in repository.cache.folder.glob("marks/*/*"):
        os.chown(mark, 1234, 1234)  # a mark that another user left in our name
    path.chmod(0o644)
    before = path.stat()
    path.write_bytes(b'{"a": 2}')
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert repository.cache.find(manifest, file) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small disk: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_met_before_the_first_byte(repository: Repository, tmp_path: Path, small_disk: Path) -> None:
    repository.push(make_model(tmp_path / "m"), "m")
    with pytest.raises(MissingCapability, match="are needed"):
        repository.pull("m", to=small_disk / "out")
    with pytest.raises(MissingCapability, match="WIRESPEED_CACHE"):
        Repository(repository.store, cache=Cache(small_disk / "cache")).pull("m")
    assert sum(p.stat().st_size for p in small_disk.rglob("*") if p.is_file()) < 100_000


def test_a_disk_that_fills_up_meanwhile_gives_its_room_back(
    repository: Repository, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.push(make_model(tmp_path / "m"), "m")
    monkeypatch.setattr("wirespeed.repo.pull.check_room", lambda folder, needed: None)
    with pytest.raises(MissingCapability, match="is full"):
        repository.pull("m", to=small_disk / "out")
    assert sum(p.stat().st_size for p in small_disk.rglob("*") if p.is_file()) < 2_100_000
    assert not list(small_disk.rglob(".wirespeed-part.*"))


def test_a_store_that_is_full_says_so_and_has_no_version(tmp_path: Path, small_disk: Path) -> None:
    repository = Repository(open_store(small_disk / "store"), cache=Cache(tmp_path / "cache"))
    with pytest.raises(MissingCapability, match="the store is full"):
        repository.push(make_model(tmp_path / "m"), "m")
    assert repository.versions("m") == []


def test_a_cache_that_cannot_be_written_still_gives_what_it_has(repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    repository.pull("m")
    made = subprocess.run(
        ["mount", "--bind", "-o", "ro", str(tmp_path / "cache"), str(tmp_path / "cache")],
        check=False,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip(f"cannot mount read-only: {made.stderr.decode().strip()}")
    try:
        pulled = repository.pull("m")
        assert pulled.store_bytes == 0
        assert tree(Path(pulled.folder)) == tree(folder)
        (folder / "config.json").write_text("new")
        repository.push(folder, "m")
        with pytest.raises(MissingCapability, match="WIRESPEED_CACHE"):
            repository.pull("m")
        repository.pull("m", to=tmp_path / "out")
        assert tree(tmp_path / "out") == tree(folder)
    finally:
        subprocess.run(["umount", str(tmp_path / "cache")], check=True)


def test_a_shared_cache_lets_the_group_in(folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRESPEED_CACHE_SHARED", "1")
    repository = Repository(folder_store, cache=Cache(tmp_path / "cache"))
    repository.push(make_model(tmp_path / "m"), "m")
    repository.pull("m")
    assert stat.S_IMODE((tmp_path / "cache" / "files").stat().st_mode) == 0o2775


def test_deltas_with_a_damaged_base_here_take_the_stores(repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    repository.push(folder, "m")
    out = tmp_path / "out"
    repository.pull("m", to=out)
    (folder / "model.safetensors").write_bytes(model_bytes(steps=1))
    repository.push(folder, "m", parent="v1")
    content = bytearray((out / "model.safetensors").read_bytes())
    content[100_000] ^= 1
    (out / "model.safetensors").write_bytes(content)
    fresh = Repository(repository.store, cache=Cache(tmp_path / "fresh"))
    pulled = fresh.pull("m", to=out)
    assert tree(out) == tree(folder)
    assert pulled.num_damaged > 0
