"""A repository as its users see it: a store, with this machine's cache and the hot tier in front of it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from wirespeed.errors import DataError, PeerFailure, UsageError, WirespeedError
from wirespeed.repo import names, signing
from wirespeed.repo.cache import Cache
from wirespeed.repo.fetch import Source
from wirespeed.repo.gc import read_manifest, read_manifest_bytes
from wirespeed.repo.hot import Hot
from wirespeed.repo.manifest import FileEntry, Manifest, decode
from wirespeed.repo.names import Wanted, parse_version, parse_wanted
from wirespeed.repo.pull import Pulled, local_chunks, pull_to_cache, pull_to_folder, read_marker
from wirespeed.repo.push import Pushed, push
from wirespeed.repo.store import Store, open_store, within
from wirespeed.repo.versions import LEASE_S, Version, list_models, live_versions, read_version, resolve

Progress = Callable[[int, int], None]
NAMES_S = 4.0
"""So long the store may take to say what a name means, where this host knows what it meant before."""
_LOG = logging.getLogger("wirespeed.repo")


def _no_progress(done: int, total: int) -> None:
    pass


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a version. ``files``: those that cannot be read because of it."""

    version: str
    problem: str
    files: tuple[str, ...] = ()


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    """How a file differs between two versions."""

    path: str
    change: str
    size_bytes: int
    new_bytes: int
    """Of its chunks that the older version does not have."""
    tensors: tuple[str, ...] = ()
    """Those that changed, appeared or went."""


class Repository:
    """One repository. Thread-safe but for the cache's eviction, which runs where files are pulled."""

    def __init__(
        self,
        store: Store,
        *,
        cache: Cache | None = None,
        hot: Hot | None = None,
        trusted: Sequence[bytes] | None = None,
    ) -> None:
        self.store = store
        self.trusted = signing.trusted_from(None) if trusted is None else tuple(trusted)
        """Public keys; where there are any, versions that none of them signed are refused."""
        self.cache = Cache() if cache is None else cache
        self.hot = hot

    @classmethod
    def open(
        cls, url: str | os.PathLike[str] | None = None, *, cache: Path | None = None, must_exist: bool = True
    ) -> Repository:
        """Open by URL or folder, else by WIRESPEED_REPO. WIRESPEED_HOT names a Redis, WIRESPEED_CACHE the cache."""
        found = os.fspath(url) if url is not None else os.environ.get("WIRESPEED_REPO", "")
        if not found:
            raise UsageError(
                "got no repository",
                expected="s3://bucket/models or a folder",
                hint="name it with --repo, or set WIRESPEED_REPO",
            )
        hot = os.environ.get("WIRESPEED_HOT")
        return cls(
            open_store(found, must_exist=must_exist),
            cache=Cache(cache),
            hot=None if not hot else Hot(hot),
        )

    def models(self) -> list[str]:
        """Names of all models."""
        return list_models(self.store)

    def versions(self, name: str) -> list[Version]:
        """Live versions, ascending."""
        return live_versions(self.store, names.check_name(name))

    def version(self, wanted: str | Wanted, *, is_cache_enough: bool = False) -> Version:
        """The version that ``name``, ``name@v12`` or ``name@alias`` means now.

        Where the store does not answer within ``NAMES_S``, or WIRESPEED_OFFLINE is 1, that is what it meant when it was
        last brought to this host, and a warning says so. ``is_cache_enough``: for a numbered version that is here the
        store is not asked at all (that it was removed since is then not noticed). Raises SignatureMissing where
        signatures are required.
        """
        asked = parse_wanted(wanted) if isinstance(wanted, str) else wanted
        found = self._version(asked, is_cache_enough=is_cache_enough)
        signing.check(found, self.trusted)
        return found

    def _version(self, asked: Wanted, *, is_cache_enough: bool) -> Version:
        known = self.cache.recall(asked)
        if known is None:
            return resolve(self.store, asked)
        if os.environ.get("WIRESPEED_OFFLINE") == "1" or (is_cache_enough and asked.number is not None):
            return known.version
        try:
            return within(lambda: resolve(self.store, asked), timeout_s=NAMES_S, what=f"{self.store.url}")
        except PeerFailure as fault:
            then = datetime.fromtimestamp(known.since, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            _LOG.warning("%s; using %s, which %s was at %s", fault, known.version.label, asked, then)
            return known.version

    def manifest(self, version: Version) -> Manifest:
        """What the version is made of, from the cache or the store; verified."""
        return decode(self.manifest_bytes(version), source=f"the manifest of {version.label}")

    def manifest_bytes(self, version: Version) -> bytes:
        """As they are stored; from the cache, else from the store; verified."""
        return self.cache.manifest(version.manifest_digest, lambda: read_manifest_bytes(self.store, version))

    def source(
        self, version: Version, manifest: Manifest, *, is_local: bool = True, folder: Path | None = None
    ) -> Source:
        """Reads chunks of a version: from this machine where they are here, else from the hot tier and the store."""
        local = self.cache.index() if is_local else {}
        if folder is not None and (before := self._earlier(folder)) is not None:
            local = {**local_chunks(folder, before), **local}
        return Source(self.store, manifest, local=local, hot=self.hot, label=version.label)

    def _earlier(self, folder: Path) -> Manifest | None:
        marker = read_marker(folder)
        if marker is None:
            return None
        with contextlib.suppress(WirespeedError):
            version = read_version(self.store, marker.name, marker.number)
            if version is not None and version.manifest_digest == marker.manifest_digest:
                return self.manifest(version)
        return None

    def push(
        self,
        path: str | os.PathLike[str],
        name: str,
        *,
        parent: str | None = None,
        message: str = "",
        who: str = "",
        is_compressed: bool = False,
        is_as_is: bool = False,
        is_quantized: bool = False,
        is_repair: bool = False,
        link_bit_per_s: float | None = None,
        lease_s: float = LEASE_S,
        sign_with: Path | None = None,
        progress: Progress = _no_progress,
    ) -> Pushed:
        """Make the next version of ``name`` from a folder or a file. See ``wirespeed.repo.push.push``.

        ``sign_with``: a file with an ed25519 key.
        """
        key = None if sign_with is None else signing.read_secret(sign_with)
        base = None if parent is None else self.version(_in_model(name, parent))
        return push(
            self.store, Path(path), name, parent=base, read_manifest=self.manifest,
            source_of=self.source, message=message, who=who, is_compressed=is_compressed, is_as_is=is_as_is,
            is_quantized=is_quantized, is_repair=is_repair, link_bit_per_s=link_bit_per_s, lease_s=lease_s,
            progress=progress, seal=lambda version: version if key is None else signing.sign(version, key),
        )  # fmt: skip

    def pull(
        self, wanted: str | Wanted, *, to: str | os.PathLike[str] | None = None, progress: Progress = _no_progress
    ) -> Pulled:
        """Have a version on this machine: in the cache, or in the folder ``to``."""
        asked = parse_wanted(wanted) if isinstance(wanted, str) else wanted
        version = self.version(asked)
        self.bring(version)
        manifest = self.manifest(version)
        if to is None:
            pulled = pull_to_cache(self.source(version, manifest), version, self.cache, progress=progress)
            self.cache.remember(version, asked.alias)
            return pulled
        folder = Path(to)
        source = self.source(version, manifest, folder=folder)
        return pull_to_folder(source, version, folder, cache=self.cache, progress=progress)

    def bring(self, version: Version) -> None:
        """Have this host's peer (WIRESPEED_PEER, on the same cache) fetch the version from other hosts.

        Without a peer nothing happens; where it fails, a warning says so, and the store is read as if there were none.
        """
        address = os.environ.get("WIRESPEED_PEER")
        if not address:
            return
        from wirespeed.repo.swarm.local import bring

        problem = bring(address, version)
        if problem:
            _LOG.warning("the peer at %s did not bring %s: %s; reading the store", address, version.label, problem)

    def verify(
        self, name: str, *, number: int | None = None, is_deep: bool = True
    ) -> Iterator[tuple[Version, list[Problem]]]:
        """Look at every version (or one): whether its manifest and objects are there and, if deep, right."""
        for version in self.versions(name):
            if number is None or version.number == number:
                yield version, self._problems(version, is_deep=is_deep)

    def _problems(self, version: Version, *, is_deep: bool) -> list[Problem]:
        try:
            manifest = read_manifest(self.store, version)
        except DataError as fault:
            return [Problem(version=version.label, problem=str(fault))]
        bad: dict[int, str] = {}
        source = Source(self.store, manifest, label=version.label)
        if is_deep:
            for index in range(len(manifest.chunks)):
                try:
                    source.read_many([index], lambda at, content: None, workers=1)
                except DataError as fault:
                    bad[index] = fault.problem
        else:
            for at, ref in enumerate(manifest.objects):
                stat = self.store.stat(names.object_key(ref.digest, ref.epoch))
                if stat is None or stat.size_bytes != ref.size_bytes:
                    what = "missing" if stat is None else f"{stat.size_bytes} bytes long instead of {ref.size_bytes}"
                    bad |= {
                        index: f"object {ref.digest.hex()[:16]}... is {what}"
                        for index, chunk in enumerate(manifest.chunks) if chunk.object == at
                    }  # fmt: skip
        found: dict[str, list[str]] = {}
        for file in manifest.files:
            for index in file.chunks:
                if index in bad:
                    found.setdefault(bad[index], []).append(file.path)
                    break
        return [Problem(version=version.label, problem=what, files=tuple(files)) for what, files in found.items()]

    def diff(self, old: str, new: str) -> list[FileChange]:
        """What changed from one version to another, by file and tensor, with the bytes that a pull would need."""
        first, second = (self.manifest(self.version(wanted)) for wanted in (old, new))
        known = {first.chunks[index].digest for file in first.files for index in file.chunks}
        before = {file.path: file for file in first.files}
        changes = []
        for file in second.files:
            earlier = before.pop(file.path, None)
            if earlier is not None and first.content_id(earlier) == second.content_id(file):
                if earlier.is_executable != file.is_executable:
                    changes.append(FileChange(path=file.path, change="mode", size_bytes=file.size_bytes, new_bytes=0))
                continue
            fresh = {second.chunks[i].digest: second.chunks[i].length for i in file.chunks}
            new_bytes = sum(length for digest, length in fresh.items() if digest not in known)
            changes.append(
                FileChange(
                    path=file.path,
                    change="added" if earlier is None else "changed",
                    size_bytes=file.size_bytes,
                    new_bytes=new_bytes,
                    tensors=() if earlier is None else _changed_tensors(first, earlier, second, file),
                )
            )
        changes += [
            FileChange(path=path, change="removed", size_bytes=file.size_bytes, new_bytes=0)
            for path, file in before.items()
        ]
        return sorted(changes, key=lambda change: change.path)


def _in_model(name: str, parent: str) -> Wanted:
    """A parent as people write it: ``v3`` or ``prod`` of the same model, or ``other@v3``."""
    return parse_wanted(parent) if "@" in parent or "/" in parent else parse_version(name, parent)


def _changed_tensors(first: Manifest, old: FileEntry, second: Manifest, new: FileEntry) -> tuple[str, ...]:
    before, after = (_tensor_digests(manifest, file) for manifest, file in ((first, old), (second, new)))
    return tuple(sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)))


def _tensor_digests(manifest: Manifest, file: FileEntry) -> dict[str, tuple[object, ...]]:
    spans: list[tuple[int, int, bytes]] = []
    offset = 0
    for index in file.chunks:
        chunk = manifest.chunks[index]
        spans.append((offset, offset + chunk.length, chunk.digest))
        offset += chunk.length
    found: dict[str, tuple[object, ...]] = {}
    at = 0
    for tensor in file.tensors:
        while at < len(spans) and spans[at][1] <= tensor.offset:
            at += 1
        end = tensor.offset + tensor.num_bytes
        inside = at
        digests: list[object] = []
        while inside < len(spans) and spans[inside][0] < end:
            # A shared chunk counts with its place: another of its tensors may be what changed, and so is named too.
            digests.append(spans[inside][2])
            inside += 1
        found[tensor.name] = (tensor.dtype, tensor.shape, *digests)
    return found
