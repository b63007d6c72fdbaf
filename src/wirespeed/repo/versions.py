"""Versions of a model: numbers are claimed, then committed or broken, each by one small conditional PUT.

A push claims the next number by creating ``pushes/NAME/NUMBER`` and keeps that object fresh: its lease. It commits by
creating ``versions/NAME/NUMBER``. Whoever finds a lease that was not kept fresh breaks it by creating that same key:
exactly one of the two writes succeeds, so a push that was paused for an hour cannot commit on top of a collection that
no longer counted on it. Numbers are never used twice.

Where the store does not honour "create only", the same is reached by writing a key of one's own and then looking for
others' (each writes before it looks, so of two at least one sees the other and steps back). It needs a store that lists
what was written, and may leave gaps in the numbers. Ages are by the store's clock.
"""

from __future__ import annotations

import threading
import time
import uuid
from datetime import UTC, datetime
from typing import Literal

import msgspec

from wirespeed.errors import DataError, PeerFailure, UsageError, WirespeedError
from wirespeed.repo import names
from wirespeed.repo.names import Wanted
from wirespeed.repo.store import ObjectMissing, Store

SCHEMA = 1
LEASE_S = 3600.0
"""A push whose lease was not renewed for this long is taken for dead. Renewed every twelfth of it."""
MAX_RECORD_BYTES = 64 * 1024
_MAX_TRIES = 32


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A push that is under way."""

    push_id: str
    started: str
    who: str = ""
    epoch: int = -1
    """The newest collection list that it has read; -1 before it has."""
    beat: int = 0


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """By whom (the public key) a version was signed; both hexadecimal. See ``signing``."""

    key: str
    signature: str


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The commit of a version, or the mark that its number will never be one.

    ``created`` is by the writer's clock, for people. ``state``: ``live``; ``broken`` by whoever broke the lease;
    ``removed``: the manifest is kept until its objects are collected.
    """

    name: str
    number: int
    push_id: str
    state: Literal["live", "broken", "removed"]
    created: str
    manifest_digest: str = ""
    manifest_epoch: int = 0
    manifest_bytes: int = 0
    num_bytes: int = 0
    num_files: int = 0
    parent: int | None = None
    message: str = ""
    signatures: tuple[Signature, ...] = ()
    schema: int = SCHEMA

    @property
    def label(self) -> str:
        """``name@v12``."""
        return f"{self.name}@v{self.number}"


def now_text() -> str:
    """The time now, for people."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_version(store: Store, name: str, number: int) -> Version | None:
    """The record under this number whatever its state, or None. Raises DataError where it is damaged."""
    key = names.version_key(name, number)
    try:
        content = bytes(store.get(key, max_bytes=MAX_RECORD_BYTES))
    except ObjectMissing:
        return None
    version = _decode(content, key)
    if version.name != name or version.number != number:
        raise DataError(f"{store.url}/{key} is the record of {version.label}", hint="it was copied to a wrong place")
    return version


def _decode(content: bytes, key: str) -> Version:
    try:
        version = msgspec.json.decode(content, type=Version)
    except (msgspec.MsgspecError, RecursionError) as fault:
        raise DataError(f"the version record {key} is damaged: {fault}") from fault
    if version.schema != SCHEMA:
        raise DataError(
            f"the version record {key} has schema {version.schema}",
            expected=f"schema {SCHEMA}",
            hint="it was written by a newer wirespeed: upgrade to read it",
        )
    if version.state == "live" and len(version.manifest_digest) != 64:
        raise DataError(f"the version record {key} names no manifest")
    return version


def list_numbers(store: Store, name: str) -> list[int]:
    """Numbers that have a record of any state and were not broken, ascending."""
    found: set[int] = set()
    broken: set[int] = set()
    for stat in store.list_objects(names.versions_prefix(name)):
        number = names.number_in(stat.key)
        if number is not None:
            (broken if stat.key.endswith(".broken") else found).add(number)
    return sorted(found - broken)


def live_versions(store: Store, name: str) -> list[Version]:
    """All versions that can be read, ascending."""
    found = (read_version(store, name, number) for number in list_numbers(store, name))
    return [version for version in found if version is not None and version.state == "live"]


def newest(store: Store, name: str, count: int = 1) -> list[Version]:
    """The live versions of the highest numbers, newest first; no more records are read than that takes."""
    found: list[Version] = []
    for number in reversed(list_numbers(store, name)):
        if len(found) == count:
            break
        version = read_version(store, name, number)
        if version is not None and version.state == "live":
            found.append(version)
    return found


def list_models(store: Store) -> list[str]:
    """Names that have versions, sorted."""
    found = (names.name_of_folder(folder) for folder in store.list_folders("versions"))
    return sorted(name for name in found if name is not None)


def resolve(store: Store, wanted: Wanted) -> Version:
    """The live version that is meant. Raises UsageError that says what there is instead."""
    from wirespeed.repo.aliases import current

    number = wanted.number
    if wanted.alias is not None:
        entry = current(store, wanted.name, wanted.alias)
        if entry is None:
            raise UsageError(
                f"{wanted.name} has no alias {wanted.alias!r} in {store.url}",
                hint=f"`wirespeed repo alias {wanted.name}`",
            )
        number = entry.number
    if number is None:
        latest = newest(store, wanted.name)
        if not latest:
            raise UsageError(f"there is no version of {wanted.name} in {store.url}", hint=_others(store))
        return latest[0]
    version = None if number not in list_numbers(store, wanted.name) else read_version(store, wanted.name, number)
    if version is None or version.state == "broken":
        raise UsageError(
            f"there is no version {number} of {wanted.name} in {store.url}", hint=_others(store, wanted.name)
        )
    if version.state == "removed":
        raise UsageError(f"{version.label} was removed", hint=_others(store, wanted.name))
    return version


def _others(store: Store, name: str | None = None) -> str:
    if name is not None:
        numbers = [f"v{version.number}" for version in reversed(newest(store, name, 8))]
        if numbers:
            return f"there are {', '.join(numbers)}"
    models = list_models(store)[:8]
    return f"models here: {', '.join(models)}" if models else "the repository holds no model yet"


class Claim:
    """A number that is ours, with its lease kept fresh by a thread until ``end``. Use as a context manager."""

    def __init__(self, store: Store, name: str, *, who: str = "", lease_s: float = LEASE_S) -> None:
        self.store = store
        self.name = name
        self.push_id = uuid.uuid4().hex
        self._lease_s = lease_s
        self._lease = Lease(push_id=self.push_id, started=now_text(), who=who)
        self.number = self._take()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep_fresh, name="wirespeed-lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        try:
            self.end()
        except WirespeedError:
            # What ended the push is what has to be told; a lease that stays runs out by itself.
            if fault is None:
                raise

    def _take(self) -> int:
        number = 0
        for _ in range(_MAX_TRIES):
            number = max(number, _highest(self.store, self.name)) + 1
            if self._try_number(number):
                return number
        raise PeerFailure(
            f"could not claim a version of {self.name} in {_MAX_TRIES} tries",
            hint="many pushes of this model run at the same time: try again",
        )

    def _try_number(self, number: int) -> bool:
        key = names.push_key(self.name, number)
        content = msgspec.json.encode(self._lease)
        if self.store.can_create:
            self._key = key
            if not self.store.create(key, content):
                return False
            # Someone who looked before us may have claimed, committed and tidied up since: the number is used.
            if self.store.stat(names.version_key(self.name, number)) is None:
                return True
            self.store.delete([key])
            return False
        self._key = f"{key}.{self.push_id}"
        self.store.put(self._key, content)
        # Any other claim of this number, whoever was first: of two claimants at least the later writer sees both.
        others = [
            s for s in self.store.list_objects(names.pushes_prefix(self.name)) if names.number_in(s.key) == number
        ]
        used = (names.version_key(self.name, number), names.broken_key(self.name, number))
        if len(others) == 1 and all(self.store.stat(key) is None for key in used):
            return True
        self.store.delete([self._key])
        # Two that step back in the same way would meet again.
        time.sleep((uuid.uuid4().int % 1000) / 1000 * 0.1)
        return False

    def _keep_fresh(self) -> None:
        while not self._done.wait(self._lease_s / 12):
            try:
                self._beat(self._lease.epoch)
            except Exception:  # noqa: S112 - no harm: the commit itself tells whether it came too late
                continue

    def _beat(self, epoch: int) -> None:
        with self._lock:
            if not self._done.is_set():
                self._lease = msgspec.structs.replace(self._lease, epoch=epoch, beat=self._lease.beat + 1)
                self.store.put(self._key, msgspec.json.encode(self._lease))

    def saw_epoch(self, epoch: int) -> None:
        """Tell collectors up to which list this push knows what is condemned: they need not wait for it."""
        self._beat(epoch)

    def commit(self, version: Version) -> None:
        """Make the version. Raises PeerFailure where the lease was broken in the meantime."""
        lost = PeerFailure(
            f"the lease of {version.label} was broken while it was pushed",
            expected=f"a sign of life within {self._lease_s:g} s",
            hint="this process was stopped for too long; push again: what was uploaded is found again",
        )
        key = names.version_key(self.name, self.number)
        content = msgspec.json.encode(version)
        if self.store.can_create:
            if not self.store.create(key, content):
                raise lost
            return
        self.store.put(key, content)
        if self.store.stat(names.broken_key(self.name, self.number)) is not None:
            self.store.delete([key])
            raise lost

    def end(self) -> None:
        """Stop keeping the lease fresh, and drop it: without a commit the number stays unused."""
        if self._done.is_set():
            return
        with self._lock:
            self._done.set()
        self.store.delete([self._key])


def _highest(store: Store, name: str) -> int:
    numbers = [
        number
        for prefix in (names.versions_prefix(name), names.pushes_prefix(name))
        for stat in store.list_objects(prefix)
        if (number := names.number_in(stat.key)) is not None
    ]
    return max(numbers, default=0)


def break_lease(store: Store, name: str, number: int) -> bool:
    """Make sure that this push can no longer commit: True; False where it has."""
    version = Version(name=name, number=number, push_id=uuid.uuid4().hex, state="broken", created=now_text())
    if store.can_create:
        if store.create(names.version_key(name, number), msgspec.json.encode(version)):
            return True
        found = read_version(store, name, number)
        return found is not None and found.state == "broken"
    mark = names.broken_key(name, number)
    store.put(mark, msgspec.json.encode(version))
    if read_version(store, name, number) is None:
        return True
    store.delete([mark])
    return False


def remove(store: Store, version: Version) -> None:
    """Take a version out of sight. Its objects go with a later collection, after a time of grace."""
    from wirespeed.repo.aliases import pointing_at

    aliases = pointing_at(store, version.name, version.number)
    if aliases:
        raise UsageError(
            f"{version.label} is what alias {', '.join(map(repr, aliases))} points at",
            expected="a version without aliases",
            hint="point them elsewhere first: `wirespeed repo alias`",
        )
    gone = msgspec.structs.replace(version, state="removed")
    store.put(names.version_key(version.name, version.number), msgspec.json.encode(gone))
