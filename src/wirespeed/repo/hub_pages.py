"""What a Hugging Face hub says about the files of a version: listings, hashes, what was asked about."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import parse_qs

from wirespeed.repo.manifest import FileEntry, Manifest


def file_etag(manifest: Manifest, file: FileEntry) -> str:
    """SHA-256 in hexadecimal, as the Hub gives for large files; the content's identity where that is unknown."""
    return file.sha256.hex() if file.sha256 else manifest.content_id(file)


def tree(manifest: Manifest, folder: str, *, is_recursive: bool) -> list[dict[str, Any]]:
    """Files and folders below ``folder``, as the Hub lists them."""
    entries: dict[str, dict[str, Any]] = {}
    prefix = f"{folder}/" if folder else ""
    for path, file in ((file.path, file) for file in manifest.files):
        if not path.startswith(prefix):
            continue
        rest = path[len(prefix) :]
        if "/" in rest:
            sub = prefix + rest.split("/", 1)[0]
            oid = hashlib.blake2b(sub.encode(), digest_size=20).hexdigest()
            entries.setdefault(sub, {"type": "directory", "path": sub, "oid": oid, "size": 0})
        if "/" not in rest or is_recursive:
            etag = file_etag(manifest, file)
            entries[path] = {
                "type": "file", "path": path, "size": file.size_bytes, "oid": etag[:40],
                "lfs": {"oid": etag, "size": file.size_bytes, "pointerSize": 134},
            }  # fmt: skip
    return list(entries.values())


def wanted_paths(posted: bytes, content_type: str) -> set[str]:
    """The paths that a request of ``paths-info`` asks about."""
    try:
        if "json" in content_type:
            found = json.loads(posted).get("paths", [])
            return {found} if isinstance(found, str) else set(map(str, found))
        return set(parse_qs(posted.decode()).get("paths", []))
    except (ValueError, AttributeError):
        return set()
