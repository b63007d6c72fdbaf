"""A version as a folder on this host, for whoever is about to run it: from the cache where it was warmed.

A numbered version that is whole in the cache costs no question to the store, and needs none to be named. An alias is
looked up, unless WIRESPEED_OFFLINE is 1; where the store is away it is what it was when it was last brought here, and a
warning says so. What is not here is pulled. The folder holds links into the cache: it stays right while its files are
used (eviction goes by last use), and is made again by asking again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from wirespeed.errors import UsageError, WirespeedError
from wirespeed.repo import signing
from wirespeed.repo.cache import Cache
from wirespeed.repo.manifest import decode
from wirespeed.repo.names import Wanted, parse_wanted
from wirespeed.repo.pull import link_snapshot
from wirespeed.repo.repository import Repository
from wirespeed.repo.versions import Version


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a version lies. ``store_bytes``, ``peer_bytes``: what had to be fetched for it."""

    version: Version
    folder: Path
    store_bytes: int = 0
    peer_bytes: int = 0


class _NotHere(WirespeedError):  # noqa: N818 - never leaves this module
    pass


def place(
    wanted: str,
    *,
    repo: str | None = None,
    cache: Cache | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Placed:
    """Have ``name@v3`` or ``name@alias`` (or ``name``, the newest) in a folder of its own.

    ``repo``: the store, by default that of WIRESPEED_REPO; without one only what is in the cache can be placed. Raises
    UsageError where it is not there, SignatureMissing where WIRESPEED_REQUIRE_SIGNATURE asks for one, and what pulling
    raises.
    """
    asked = parse_wanted(wanted)
    held = Cache() if cache is None else cache
    has_store = bool(repo or os.environ.get("WIRESPEED_REPO"))
    is_cache_enough = asked.number is not None or not has_store or os.environ.get("WIRESPEED_OFFLINE") == "1"
    if is_cache_enough:
        found = _from_cache(asked, held)
        if found is not None:
            return found
    if not has_store:
        raise UsageError(
            f"{asked} is not whole in the cache {held.folder}, and no repository was named",
            hint="warm it to this host, name the store with --repo or WIRESPEED_REPO, or is WIRESPEED_CACHE another's?",
        )
    repository = Repository.open(repo, cache=held.folder)
    pulled = repository.pull(asked, progress=progress)
    return Placed(
        version=repository.version(Wanted(name=pulled.name, number=pulled.number), is_cache_enough=True),
        folder=Path(pulled.folder), store_bytes=pulled.store_bytes, peer_bytes=pulled.peer_bytes,
    )  # fmt: skip


def _from_cache(asked: Wanted, cache: Cache) -> Placed | None:
    known = cache.recall(asked)
    if known is None:
        return None
    version = known.version
    signing.check(version, signing.trusted_from(None))
    try:
        content = cache.manifest(version.manifest_digest, _not_here)
    except _NotHere:
        return None
    manifest = decode(content, source=f"the manifest of {version.label}")
    here: dict[str, Path] = {}
    for file in manifest.files:
        content_id = manifest.content_id(file)
        if content_id not in here:
            path = cache.find(manifest, file)
            if path is None:
                return None
            here[content_id] = path
    return Placed(version=version, folder=link_snapshot(cache, version, manifest, here))


def _not_here() -> bytes:
    raise _NotHere("not in the cache")
