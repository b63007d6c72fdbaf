"""A read-only OCI Distribution endpoint: container images that were pushed as OCI layouts, for docker, podman, skopeo.

An image is a version whose root holds ``oci-layout``, ``index.json`` and ``blobs/sha256/...``, as ``skopeo copy ...
oci:DIR`` or ``docker buildx build -o type=oci,tar=false`` write it. Its layers are files like any other: deduplicated,
warmed and cached. A tag is an alias, a version (``v3``), ``latest`` (the newest, unless it is an alias), or a name that
the layout's index gives. Everything else is found by digest, in the newest versions first. Nothing can be pushed here.
"""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import msgspec

from wirespeed.errors import DataError, UsageError
from wirespeed.repo.manifest import FileEntry, Manifest
from wirespeed.repo.names import Wanted, parse_version
from wirespeed.repo.reading import read_span
from wirespeed.repo.repository import Repository
from wirespeed.repo.versions import Version

API_VERSION = "registry/2.0"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
REF_NAME = "org.opencontainers.image.ref.name"
MAX_DOCUMENT_BYTES = 8 * 1024**2
MAX_SEARCHED = 64
"""Versions that are looked through for a digest that no tag led to."""
MAX_REMEMBERED = 100_000
_ROUTE = re.compile(r"/v2/(?P<name>[^/]+(?:/[^/]+)?)/(?P<what>manifests|blobs|referrers|tags)/(?P<ref>[^/]+)")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class RegistryFault(Exception):  # noqa: N818 - becomes an HTTP answer
    """What the specification has a code for."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.code = code


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest or a blob: a file of a version."""

    version: Version
    file: FileEntry
    digest: str
    media_type: str


class Registry:
    """Names, tags and digests to files of versions. Thread-safe."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self._lock = threading.Lock()
        self._versions: dict[tuple[str, str], Version] = {}

    def route(self, path: str) -> tuple[str, str, str] | None:
        """(name, what, reference) of a path below /v2/, or None."""
        match = _ROUTE.fullmatch(path)
        return None if match is None else (match["name"], match["what"], match["ref"])

    def manifest(self, name: str, reference: str) -> Found:
        """What a tag or a digest names. Raises RegistryFault."""
        if _DIGEST.fullmatch(reference) is not None:
            version, manifest, file = self._by_digest(name, reference, code="MANIFEST_UNKNOWN")
            return Found(version=version, file=file, digest=reference, media_type=self._type(version, manifest, file))
        version, manifest, tag = self._tagged(name, reference)
        index = _file(manifest, "index.json", version)
        entries = self._document(version, manifest, index).get("manifests", [])
        named = [entry for entry in entries if entry.get("annotations", {}).get(REF_NAME) == tag]
        chosen = named if named else entries
        if len(chosen) != 1:
            if not index.sha256:
                raise RegistryFault(404, "MANIFEST_UNKNOWN", f"{version.label} has an index without a digest")
            return Found(
                version=version, file=index, digest=f"sha256:{index.sha256.hex()}", media_type=INDEX_TYPE
            )  # its parts are found by digest
        digest = str(chosen[0].get("digest", ""))
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise RegistryFault(404, "MANIFEST_UNKNOWN", f"{version.label} names a manifest by {digest!r}, not sha256")
        self._remember(name, version, manifest)
        file = _file(manifest, f"blobs/sha256/{match[1]}", version)
        media_type = str(chosen[0].get("mediaType") or self._type(version, manifest, file))
        return Found(version=version, file=file, digest=digest, media_type=media_type)

    def blob(self, name: str, digest: str) -> Found:
        """A layer or configuration. Raises RegistryFault."""
        if _DIGEST.fullmatch(digest) is None:
            raise RegistryFault(400, "DIGEST_INVALID", f"got digest {digest!r}; expected sha256:...")
        version, _, file = self._by_digest(name, digest, code="BLOB_UNKNOWN")
        return Found(version=version, file=file, digest=digest, media_type="application/octet-stream")

    def tags(self, name: str) -> list[str]:
        """Aliases and versions that are images."""
        from wirespeed.repo.aliases import list_aliases

        versions = self._live(name)
        if not versions:
            raise RegistryFault(404, "NAME_UNKNOWN", f"there is no image {name}")
        aliases = [entry.alias for entry in list_aliases(self.repository.store, name)]
        return sorted({*aliases, *(f"v{version.number}" for version in versions), "latest"})

    def _tagged(self, name: str, tag: str) -> tuple[Version, Manifest, str]:
        try:
            version = self._resolve(name, tag)
        except UsageError as fault:
            # Perhaps a name within the newest layout.
            try:
                version = self.repository.version(Wanted(name=name))
            except UsageError:
                raise RegistryFault(404, "NAME_UNKNOWN", str(fault)) from fault
            manifest = self.repository.manifest(version)
            entries = self._document(version, manifest, _file(manifest, "index.json", version)).get("manifests", [])
            if not any(entry.get("annotations", {}).get(REF_NAME) == tag for entry in entries):
                raise RegistryFault(404, "MANIFEST_UNKNOWN", str(fault)) from fault
            return version, manifest, tag
        return version, self.repository.manifest(version), tag

    def _resolve(self, name: str, tag: str) -> Version:
        if tag == "latest":
            try:
                return self.repository.version(Wanted(name=name, alias="latest"))
            except UsageError:
                return self.repository.version(Wanted(name=name))
        return self.repository.version(parse_version(name, tag))

    def _live(self, name: str) -> list[Version]:
        try:
            return self.repository.versions(name)
        except UsageError:
            return []

    def _by_digest(self, name: str, digest: str, *, code: str) -> tuple[Version, Manifest, FileEntry]:
        with self._lock:
            known = self._versions.get((name, digest))
        for version in ([known] if known is not None else []) + self._live(name)[: -MAX_SEARCHED - 1 : -1]:
            manifest = self.repository.manifest(version)
            self._remember(name, version, manifest)
            for file in manifest.files:
                if file.path == f"blobs/sha256/{digest[7:]}" or (
                    file.path == "index.json" and file.sha256.hex() == digest[7:]
                ):
                    return version, manifest, file
        raise RegistryFault(404, code, f"{name} has no {digest} in its {MAX_SEARCHED} newest versions")

    def _remember(self, name: str, version: Version, manifest: Manifest) -> None:
        with self._lock:
            if len(self._versions) > MAX_REMEMBERED:
                self._versions.clear()
            for file in manifest.files:
                if file.path.startswith("blobs/sha256/"):
                    self._versions[name, f"sha256:{file.path[13:]}"] = version

    def _type(self, version: Version, manifest: Manifest, file: FileEntry) -> str:
        document = self._document(version, manifest, file)
        found = document.get("mediaType")
        return str(found) if found else INDEX_TYPE if "manifests" in document else MANIFEST_TYPE

    def _document(self, version: Version, manifest: Manifest, file: FileEntry) -> dict[str, Any]:
        if file.size_bytes > MAX_DOCUMENT_BYTES:
            raise RegistryFault(404, "MANIFEST_UNKNOWN", f"{file.path} of {version.label} is too large for a manifest")
        source = self.repository.source(version, manifest)
        content = b"".join(read_span(self.repository, source, file, begin=0, end=file.size_bytes))
        try:
            document = json.loads(content)
        except ValueError as fault:
            raise RegistryFault(404, "MANIFEST_UNKNOWN", f"{file.path} of {version.label} is no JSON") from fault
        if not isinstance(document, dict):
            raise RegistryFault(404, "MANIFEST_UNKNOWN", f"{file.path} of {version.label} is no manifest")
        return document


def _file(manifest: Manifest, path: str, version: Version) -> FileEntry:
    try:
        return manifest.file(path)
    except DataError as fault:
        raise RegistryFault(404, "MANIFEST_UNKNOWN", f"{version.label} is no image: it has no {path}") from fault
