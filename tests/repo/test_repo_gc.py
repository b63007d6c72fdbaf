"""Collections beside pushes, in every order that matters."""

from __future__ import annotations

from pathlib import Path

import pytest
from repo_tools import make_model, model_bytes, tree

from wirespeed.errors import DataError, PeerFailure
from wirespeed.repo import gc, names, versions
from wirespeed.repo.cache import Cache
from wirespeed.repo.push import _read_all, commit
from wirespeed.repo.repository import Repository
from wirespeed.repo.store import Store
from wirespeed.repo.upload import Uploader
from wirespeed.repo.versions import Claim


@pytest.fixture
def any_repository(store: Store, tmp_path: Path) -> Repository:
    return Repository(store, cache=Cache(tmp_path / "cache"))


def objects(store: Store) -> set[str]:
    return {stat.key for stat in store.list_objects("objects")}


def read_whole(repository: Repository, wanted: str) -> None:
    number = repository.version(wanted).number
    assert list(repository.verify(wanted.split("@", maxsplit=1)[0], number=number)) == [
        (repository.version(wanted), [])
    ]


class SlowPush:
    """A push that can be stopped between its steps."""

    def __init__(self, store: Store, path: Path, *, lease_s: float = 3600) -> None:
        self.claim = Claim(store, "m", lease_s=lease_s)
        view = gc.view(store)
        self.claim.saw_epoch(view.epoch)
        self.uploader = Uploader(store, view)
        self.path = path

    def upload(self) -> None:
        self.manifest = _read_all(
            self.uploader, self.path, is_as_is=False, is_quantized=False, progress=lambda done, total: None
        )

    def commit(self) -> None:
        commit(self.claim, self.uploader, self.manifest)
        self.claim.end()


def test_only_what_no_version_needs_goes(any_repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    any_repository.push(folder, "m")
    kept = objects(any_repository.store)
    (folder / "more.bin").write_bytes(b"x" * 2_000_000)
    any_repository.push(folder, "m")
    versions.remove(any_repository.store, any_repository.version("m@2"))
    assert gc.collect(any_repository.store, grace_s=3600).num_deleted == 0
    dry = gc.collect(any_repository.store, grace_s=-5, is_dry_run=True)
    assert objects(any_repository.store) > kept
    outcome = gc.collect(any_repository.store, grace_s=-5)
    assert outcome.num_deleted == dry.num_condemned == 2
    assert objects(any_repository.store) == kept
    read_whole(any_repository, "m@1")


def test_a_push_that_began_before_the_list_is_waited_for(any_repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    store = any_repository.store
    orphan = SlowPush(store, folder)
    orphan.upload()
    orphan.claim.end()
    slow = SlowPush(store, folder)
    outcome = gc.collect(store, grace_s=-5)
    assert outcome.num_deleted == 0
    assert outcome.waiting_for == (f"m@v{slow.claim.number}",)
    slow.upload()  # counts on the orphan's objects, which are condemned by now
    slow.commit()
    assert gc.collect(store, grace_s=-5).num_deleted == 0
    read_whole(any_repository, "m")


def test_a_push_that_begins_after_the_list_does_not_count_on_it(any_repository: Repository, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    store = any_repository.store
    orphan = SlowPush(store, folder)
    orphan.upload()
    assert gc.collect(store, grace_s=-5).waiting_for
    late = SlowPush(store, folder)
    late.upload()
    orphan.claim.end()
    outcome = gc.collect(store, grace_s=-5)
    assert outcome.num_deleted == len(orphan.manifest.objects)
    # What it has uploaded is needed by no version yet, and so is on the next list: for that it is waited for.
    assert outcome.waiting_for == (f"m@v{late.claim.number}",)
    late.commit()
    assert gc.collect(store, grace_s=-5).num_deleted == 0
    read_whole(any_repository, "m")
    assert {parsed[1] for parsed in map(names.parse_object_key, objects(store)) if parsed is not None} == {1}


def test_a_paused_push_is_fenced_and_its_objects_go(any_repository: Repository, tmp_path: Path) -> None:
    store = any_repository.store
    paused = SlowPush(store, make_model(tmp_path / "m"))
    paused.upload()
    outcome = gc.collect(store, grace_s=-5, lease_s=-5)
    assert outcome.broken == (f"m@v{paused.claim.number}",)
    assert objects(store) == set()
    with pytest.raises(PeerFailure, match="lease"):
        paused.commit()
    paused.claim.end()
    assert any_repository.versions("m") == []


def test_a_collection_that_was_killed_between_its_phases_is_finished_by_the_next(
    repository: Repository, tmp_path: Path
) -> None:
    store = repository.store
    orphan = SlowPush(store, make_model(tmp_path / "m"))
    orphan.upload()
    gc.collect(store, grace_s=-5)  # waits for the push, as one that was killed here would leave it
    orphan.claim.end()
    assert gc.view(store).condemned
    assert gc.collect(store, grace_s=3600).num_deleted == len(orphan.manifest.objects)
    assert not gc.view(store).condemned


def skip_if_not_consistent(store: Store) -> None:
    if not store.can_create:
        pytest.skip("rclone removes a folder that became empty while another request writes into it")


def test_two_collections_at_the_same_time_do_no_harm(any_repository: Repository, tmp_path: Path) -> None:
    skip_if_not_consistent(any_repository.store)
    from test_repo_versions import at_once

    folder = make_model(tmp_path / "m")
    any_repository.push(folder, "m")
    for step in range(3):
        (folder / "model.safetensors").write_bytes(model_bytes(steps=step + 1))
        any_repository.push(folder, "m")
        versions.remove(any_repository.store, any_repository.version("m"))
    results = at_once(3, lambda at: gc.collect(any_repository.store, grace_s=-5))
    assert not [r for r in results if isinstance(r, Exception)]
    read_whole(any_repository, "m@1")


def test_pushes_and_collections_at_the_same_time_leave_only_whole_versions(
    any_repository: Repository, tmp_path: Path
) -> None:
    skip_if_not_consistent(any_repository.store)
    from test_repo_versions import at_once

    folders = [make_model(tmp_path / f"m{at}", steps=at % 2) for at in range(3)]

    def work(at: int) -> object:
        if at >= 3:
            return [gc.collect(any_repository.store, grace_s=-5) for _ in range(3)]
        return [any_repository.push(folders[at], "m") for _ in range(2)]

    results = at_once(5, work)
    assert not [r for r in results if isinstance(r, Exception)]
    found = list(any_repository.verify("m"))
    assert len(found) == 6
    assert all(problems == [] for _, problems in found)


def test_a_manifest_that_cannot_be_read_stops_the_collection(repository: Repository, tmp_path: Path) -> None:
    version = repository.push(make_model(tmp_path / "m"), "m").version
    key = names.object_key(bytes.fromhex(version.manifest_digest), version.manifest_epoch)
    repository.store.put(key, b"damaged")
    before = objects(repository.store)
    with pytest.raises(DataError, match="damaged"):
        gc.collect(repository.store, grace_s=-5)
    assert objects(repository.store) == before


def test_what_an_interrupted_write_left_in_a_folder_is_swept(repository: Repository, tmp_path: Path) -> None:
    repository.push(make_model(tmp_path / "m"), "m")
    assert repository.store.folder is not None
    left = next((repository.store.folder / "objects").iterdir()) / ("a" * 64 + "-0#1")
    left.write_bytes(b"half")
    gc.collect(repository.store, grace_s=3600)
    assert left.exists()
    gc.collect(repository.store, grace_s=-5)
    assert not left.exists()


def test_wrong_clocks_of_hosts_do_not_matter(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "m")
    monkeypatch.setattr("time.time", lambda: 0.0)
    repository.push(folder, "m")
    assert gc.collect(repository.store, grace_s=3600).num_deleted == 0
    assert tree(Path(repository.pull("m").folder)) == tree(folder)
