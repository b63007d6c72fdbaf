"""Collection of objects that no version needs, safe beside pushes and beside itself.

Two phases. First the unneeded objects are written down under a new epoch (``gc/EPOCH``): condemned. Pushes that begin
later read the list, do not count on what is in it, and upload under the new epoch's keys, which no list up to it can
hold. Then, once every push that may have begun earlier has ended or has lost its lease, needs are computed again and
what is still unneeded is deleted. Between the last look at the needs and the deletion the list is read again: another
collector that finished it in between stops this one. So neither a paused push nor a paused collector can do harm, and
no clock of a host matters; only the age of leases does, by the store's clock, and breaking one is a commit of its own.

A version whose manifest cannot be read stops the collection: what it needs is unknown.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from wirespeed.errors import DataError
from wirespeed.repo import names
from wirespeed.repo.manifest import Manifest, decode
from wirespeed.repo.store import ObjectMissing, Stat, Store
from wirespeed.repo.versions import LEASE_S, Lease, Version, break_lease, list_models, list_numbers, read_version

GRACE_S = 24 * 3600.0
"""Younger objects and younger removals are left alone: a push that failed finds its uploads, a pull ends in peace."""
MAX_LIST_BYTES = 1024**3
_MAX_RECORD_BYTES = 1 << 16
_KEEP_LISTS = 4


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """One list: what is condemned, or (done) that it was dealt with."""

    epoch: int
    state: Literal["condemned", "done"]
    collector_id: str
    keys: tuple[str, ...] = ()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did. ``waiting_for``: pushes that have to end before the condemned objects can go."""

    num_deleted: int
    num_deleted_bytes: int
    num_condemned: int
    num_condemned_bytes: int
    num_needed: int
    waiting_for: tuple[str, ...]
    broken: tuple[str, ...]
    """Pushes whose leases had run out."""
    is_dry_run: bool = False


def collections(store: Store) -> list[tuple[str, Collection]]:
    """All lists with their keys, oldest first."""
    import zstandard

    found = []
    for key in sorted(stat.key for stat in store.list_objects("gc")):
        try:
            content = store.get(key, max_bytes=MAX_LIST_BYTES)
            plain = zstandard.ZstdDecompressor().decompress(content, max_output_size=MAX_LIST_BYTES)
            found.append((key, msgspec.msgpack.decode(plain, type=Collection)))
        except ObjectMissing:
            continue
        except (zstandard.ZstdError, msgspec.MsgspecError) as fault:
            raise DataError(f"the collection list {store.url}/{key} is damaged: {fault}") from fault
    return found


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a push may count on: objects of this epoch, and those of live versions that are not condemned."""

    epoch: int
    condemned: frozenset[str]


def view(store: Store) -> View:
    """To be read after the push's number was claimed."""
    lists = collections(store)
    condemned = {key for _, collection in lists if collection.state == "condemned" for key in collection.keys}
    return View(epoch=max((c.epoch for _, c in lists), default=0), condemned=frozenset(condemned))


def _write(store: Store, collection: Collection, key: str | None = None) -> tuple[str, bool]:
    import zstandard

    content = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(collection))
    if key is not None:
        store.put(key, content)
        return key, True
    key = names.collection_key(collection.epoch)
    if store.can_create:
        return key, store.create(key, content)
    key = f"{key}.{collection.collector_id}"
    store.put(key, content)
    return key, True


class _Needs:
    """Which objects are needed, by reading manifests; each is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_manifest: dict[str, frozenset[str]] = {}

    def now(self, *, now_s: float, grace_s: float) -> set[str]:
        needed: set[str] = set()
        for name in list_models(self._store):
            for number in list_numbers(self._store, name):
                version = read_version(self._store, name, number)
                if version is None or version.state == "broken":
                    continue
                if version.state == "removed":
                    stat = self._store.stat(names.version_key(name, number))
                    if stat is None or stat.modified_s < now_s - grace_s:
                        continue
                needed |= self._of(version)
        return needed

    def _of(self, version: Version) -> frozenset[str]:
        known = self._by_manifest.get(version.manifest_digest)
        if known is not None:
            return known
        try:
            manifest = read_manifest(self._store, version)
        except ObjectMissing:
            if version.state == "removed":
                return frozenset()
            raise
        key = names.object_key(bytes.fromhex(version.manifest_digest), version.manifest_epoch)
        found = frozenset([key, *(names.object_key(ref.digest, ref.epoch) for ref in manifest.objects)])
        self._by_manifest[version.manifest_digest] = found
        return found


def read_manifest(store: Store, version: Version) -> Manifest:
    """The manifest of a version, checked against the digest in its record. Raises DataError, ObjectMissing."""
    return decode(read_manifest_bytes(store, version), source=f"the manifest of {version.label}")


def read_manifest_bytes(store: Store, version: Version) -> bytes:
    """The manifest as it is stored, checked against the digest in the version's record."""
    from blake3 import blake3

    digest = bytes.fromhex(version.manifest_digest)
    content = store.get(names.object_key(digest, version.manifest_epoch), max_bytes=MAX_LIST_BYTES)
    if blake3(content).digest() != digest:
        raise DataError(
            f"the manifest of {version.label} in {store.url} is damaged",
            expected=f"BLAKE3 {version.manifest_digest[:16]}...",
            hint=f"push the version again, or `wirespeed repo rm {version.label}`",
        )
    return bytes(content)


def collect(
    store: Store,
    *,
    grace_s: float = GRACE_S,
    lease_s: float = LEASE_S,
    wait_s: float = 0.0,
    is_dry_run: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Delete what no version needs. With ``wait_s`` wait that long for pushes that are under way."""
    needs = _Needs(store)
    now_s = store.now_s()
    needed = needs.now(now_s=now_s, grace_s=grace_s)
    objects = {stat.key: stat for stat in store.list_objects("objects")}
    if is_dry_run:
        doomed = _doomed(objects, needed, before_s=now_s - grace_s)
        sizes = sum(objects[key].size_bytes for key in doomed)
        return Outcome(
            num_deleted=0, num_deleted_bytes=0, num_condemned=len(doomed), num_condemned_bytes=sizes,
            num_needed=len(needed), waiting_for=(), broken=(), is_dry_run=True,
        )  # fmt: skip
    lists = collections(store)
    epoch = max((c.epoch for _, c in lists), default=0) + 1
    doomed = _doomed(objects, needed, before_s=now_s - grace_s)
    # What an unfinished list holds stays there; only the rest is listed anew.
    listed = {key for _, c in lists if c.state == "condemned" for key in c.keys}
    fresh = tuple(key for key in doomed if key not in listed and _epoch_of(key) < epoch)
    if fresh:
        _write(store, Collection(epoch=epoch, state="condemned", collector_id=uuid.uuid4().hex, keys=fresh))
    # Known before pushes are looked at: a list that appears later may have pushes that did not read it.
    published = {key: c.epoch for key, c in collections(store) if c.state == "condemned"}
    broken, waiting = _settle_pushes(store, epoch=epoch, lease_s=lease_s, wait_s=wait_s, say=say)
    # A list may be dealt with once every push that is still under way has read it.
    last_epoch = min(waiting.values(), default=epoch)
    ready = {key for key, list_epoch in published.items() if list_epoch <= last_epoch}
    deleted = _finish(store, needs, ready, grace_s=grace_s)
    _sweep(store, now_s=now_s, grace_s=grace_s)
    left = [key for _, c in collections(store) if c.state == "condemned" for key in c.keys]
    return Outcome(
        num_deleted=len(deleted),
        num_deleted_bytes=sum(objects[key].size_bytes for key in deleted if key in objects),
        num_condemned=len(left),
        num_condemned_bytes=sum(objects[key].size_bytes for key in left if key in objects),
        num_needed=len(needed),
        waiting_for=tuple(waiting),
        broken=tuple(broken),
    )


def _epoch_of(key: str) -> int:
    parsed = names.parse_object_key(key)
    assert parsed is not None
    return parsed[1]


def _doomed(objects: dict[str, Stat], needed: set[str], *, before_s: float) -> list[str]:
    return sorted(
        key
        for key, stat in objects.items()
        # An object younger than the grace is left; one that is not ours to judge as well.
        if key not in needed and stat.modified_s <= before_s and names.parse_object_key(key) is not None
    )


def _settle_pushes(
    store: Store, *, epoch: int, lease_s: float, wait_s: float, say: Callable[[str], None]
) -> tuple[list[str], dict[str, int]]:
    """Break leases that ran out. Gives them, and the pushes under way that have not read this list."""
    broken: list[str] = []
    give_up_s = time.monotonic() + wait_s
    while True:
        now_s = store.now_s()
        waiting: dict[str, int] = {}
        for stat in store.list_objects("pushes"):
            folder, number = stat.key.split("/")[1], names.number_in(stat.key)
            name = names.name_of_folder(folder)
            if name is None or number is None:
                continue
            if read_version(store, name, number) is not None:
                store.delete([stat.key])  # committed or broken: its owner could not tidy up
            elif stat.modified_s < now_s - lease_s:
                if break_lease(store, name, number):
                    broken.append(f"{name}@v{number}")
                store.delete([stat.key])
            elif (seen := _seen_epoch(store, stat.key)) < epoch:
                waiting[f"{name}@v{number}"] = seen
        if not waiting or time.monotonic() >= give_up_s:
            return broken, waiting
        say(f"waiting for {len(waiting)} pushes that are under way: {', '.join(list(waiting)[:4])}")
        time.sleep(min(5.0, max(0.1, give_up_s - time.monotonic())))


def _seen_epoch(store: Store, key: str) -> int:
    try:
        lease = msgspec.json.decode(bytes(store.get(key, max_bytes=_MAX_RECORD_BYTES)), type=Lease)
    except (ObjectMissing, msgspec.MsgspecError):
        return -1
    return lease.epoch


def _finish(store: Store, needs: _Needs, ready: set[str], *, grace_s: float) -> list[str]:
    deleted: list[str] = []
    if not ready:
        return deleted
    needed = needs.now(now_s=store.now_s(), grace_s=grace_s)
    # Read again after the needs: a list that another collector has finished may hold what a new push now counts on.
    for key, collection in collections(store):
        if collection.state != "condemned" or key not in ready:
            continue
        gone = [object_key for object_key in collection.keys if object_key not in needed]
        store.delete(gone)
        deleted += gone
        _write(store, Collection(epoch=collection.epoch, state="done", collector_id=collection.collector_id), key)
    return deleted


def _sweep(store: Store, *, now_s: float, grace_s: float) -> None:
    """Leftovers without meaning: probes, old lists, and what an interrupted write to a folder left."""
    store.delete([stat.key for stat in store.list_objects("probes") if stat.modified_s < now_s - 3600])
    done = [key for key, c in collections(store) if c.state == "done"]
    store.delete(done[:-_KEEP_LISTS])
    if store.folder is not None:
        for path in store.folder.glob("objects/*/*#*"):
            _drop_staging(path, before_s=now_s - grace_s)


def _drop_staging(path: Path, *, before_s: float) -> None:
    if re.search(r"#\d+$", path.name) is None:
        return
    try:
        if path.stat().st_mtime < before_s:
            path.unlink()
    except OSError:  # gone, or not ours: the next collection looks again
        return
