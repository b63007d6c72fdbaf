"""Aliases (``prod -> v12``): an append-only log per alias, of which the last entry counts.

Setting one creates the entry after the last: atomic, and of two that race one is told so and tries again after what it
now sees. History and rollback come with the log. Where the store has no conditions, entries carry a suffix of their
own; two that race are both kept, and the order of their names decides which is last.
"""

from __future__ import annotations

import getpass
import uuid

import msgspec

from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.repo import names
from wirespeed.repo.store import ObjectMissing, Store

KEEP_ENTRIES = 200
MAX_ENTRY_BYTES = 16 * 1024
_MAX_TRIES = 64


class AliasEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of an alias. ``number`` is None where it was taken away. ``created``: the setter's clock."""

    alias: str
    sequence: int
    number: int | None
    created: str
    entry_id: str
    who: str = ""
    message: str = ""


def _keys(store: Store, name: str, alias: str) -> list[str]:
    # The prefix ends in the alias itself: "prod" must not find the log of "prod-eu".
    prefix = names.aliases_prefix(name, alias)
    found = [stat.key for stat in store.list_objects(prefix) if stat.key.rsplit("/", 1)[0] == prefix]
    return sorted(key for key in found if names.number_in(key) is not None)


def _read(store: Store, key: str) -> AliasEntry:
    content = bytes(store.get(key, max_bytes=MAX_ENTRY_BYTES))
    try:
        return msgspec.json.decode(content, type=AliasEntry)
    except (msgspec.MsgspecError, RecursionError) as fault:
        raise DataError(f"the alias entry {key} is damaged: {fault}") from fault


def _last(store: Store, name: str, alias: str) -> AliasEntry | None:
    keys = _keys(store, name, alias)
    return _read(store, keys[-1]) if keys else None


def current(store: Store, name: str, alias: str) -> AliasEntry | None:
    """Where the alias points now, or None."""
    entry = _last(store, name, alias)
    return None if entry is None or entry.number is None else entry


def history(store: Store, name: str, alias: str) -> list[AliasEntry]:
    """What it pointed at, newest first."""
    entries = []
    for key in reversed(_keys(store, name, alias)):
        try:
            entries.append(_read(store, key))
        except ObjectMissing:  # trimmed since it was listed
            continue
    return entries


def list_aliases(store: Store, name: str) -> list[AliasEntry]:
    """All aliases of a model, by name."""
    found = (current(store, name, alias) for alias in store.list_folders(names.aliases_prefix(name)))
    return [entry for entry in found if entry is not None]


def pointing_at(store: Store, name: str, number: int) -> list[str]:
    """Aliases that point at this version."""
    return [entry.alias for entry in list_aliases(store, name) if entry.number == number]


def set_alias(
    store: Store, name: str, alias: str, number: int | None, *, expect: int | None = None, message: str = ""
) -> AliasEntry:
    """Point the alias at a live version, or (None) take it away.

    With ``expect`` only where it points there now: raises UsageError otherwise. Raises UsageError for a version that
    cannot be read.
    """
    from wirespeed.repo.versions import now_text, read_version, resolve

    names.check_alias(alias)
    if number is not None:
        resolve(store, names.Wanted(name=name, number=number))
    for _ in range(_MAX_TRIES):
        keys = _keys(store, name, alias)
        last = _read(store, keys[-1]) if keys else None
        now = None if last is None else last.number
        if expect is not None and now != expect:
            raise UsageError(
                f"alias {alias!r} points at {_text(now)}",
                expected=f"v{expect}",
                hint="someone else has moved it: look again",
            )
        entry = AliasEntry(
            alias=alias,
            sequence=1 if last is None else last.sequence + 1,
            number=number,
            created=now_text(),
            entry_id=uuid.uuid4().hex,
            who=_who(),
            message=message,
        )
        if _append(store, name, entry):
            if number is not None:
                # Removed between the look above and now: the alias would lead nowhere.
                version = read_version(store, name, number)
                if version is None or version.state != "live":
                    set_alias(store, name, alias, now, message=f"v{number} was removed meanwhile")
                    raise UsageError(
                        f"{name}@v{number} was removed meanwhile", hint=f"{alias!r} is back at {_text(now)}"
                    )
            store.delete(keys[: max(0, len(keys) - KEEP_ENTRIES)])
            return entry
    raise PeerFailure(
        f"could not set alias {alias!r} in {_MAX_TRIES} tries", hint="others set it all the time: try again"
    )


def _append(store: Store, name: str, entry: AliasEntry) -> bool:
    content = msgspec.json.encode(entry)
    if store.can_create:
        return store.create(names.alias_key(name, entry.alias, entry.sequence), content)
    store.put(names.alias_key(name, entry.alias, entry.sequence, f".{entry.entry_id}"), content)
    return True


def rollback(store: Store, name: str, alias: str) -> AliasEntry:
    """Back to what it pointed at before the version it points at now. Raises UsageError where there is none."""
    from wirespeed.repo.versions import read_version

    entries = history(store, name, alias)
    now = entries[0].number if entries else None
    for entry in entries[1:]:
        if entry.number is None or entry.number == now:
            continue
        version = read_version(store, name, entry.number)
        if version is not None and version.state == "live":
            return set_alias(store, name, alias, entry.number, expect=now, message=f"rolled back from {_text(now)}")
    raise UsageError(
        f"alias {alias!r} of {name} has pointed at nothing else that is still there",
        hint=f"`wirespeed repo alias {name} {alias} --history` shows its history",
    )


def _text(number: int | None) -> str:
    return "nothing" if number is None else f"v{number}"


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a passwd entry
        return ""
