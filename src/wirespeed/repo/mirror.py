"""Models of a Hugging Face hub as versions here: fetched once, verified, and served from then on without it.

A commit of the hub becomes a version, with the alias ``commit-SHA``; a branch or tag becomes an alias that follows it.
Files are verified by what the hub says of them: SHA-256 of large ones, git's SHA-1 of small ones. What was interrupted
is gone on with. A hub that does not answer leaves what is here as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

import msgspec

from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.repo import aliases, names
from wirespeed.repo.parts import check_room, disk_fault
from wirespeed.repo.repository import Repository
from wirespeed.repo.versions import Version

TIMEOUT_S = 30.0
CHECK_EVERY_S = 300.0
"""So long a branch counts as where it was when the hub was last asked."""
MAX_ANSWER_BYTES = 64 * 1024**2
NUM_TRIES = 4
_BLOCK = 1 << 20
_SHA = re.compile(r"[0-9a-f]{40}")


class Upstream(msgspec.Struct, frozen=True, kw_only=True):
    """A hub. ``token`` is sent to it alone, never to where it redirects."""

    url: str
    token: str | None = None

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise UsageError(f"got hub {self.url!r}", expected="http://... or https://...")

    def __repr__(self) -> str:
        return f"Upstream({self.url})"


class Mirrored(msgspec.Struct, frozen=True, kw_only=True):
    """What mirroring came to. ``fetched_bytes`` is 0 where the commit was here."""

    version: Version
    commit: str
    fetched_bytes: int


class _SameHost(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]  # noqa: PLR0917
        """Follow, but leave the token behind where that leads to another host."""
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            made.headers.pop("Authorization", None)
        return made


class Mirror:
    """One hub's models in one repository. Thread-safe: a model is fetched by one thread at a time."""

    def __init__(self, repository: Repository, upstream: Upstream) -> None:
        self.repository = repository
        self.upstream = upstream
        self._opener = urllib.request.build_opener(_SameHost)
        self._locks: dict[str, threading.Lock] = {}
        self._asked_s: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def bring(
        self, name: str, revision: str = "main", *, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Mirrored:
        """Have what ``revision`` of the hub's model ``name`` is now as a version, under its name.

        Raises UsageError where the hub has no such thing or refuses it, PeerFailure where it does not answer, DataError
        where a file is not what the hub says.
        """
        names.check_name(name)
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            info = self._info(name, revision)
            commit = str(info.get("sha", ""))
            if _SHA.fullmatch(commit) is None:
                raise DataError(f"{self.upstream.url} gives {name} no commit", expected="40 hexadecimal digits")
            here = aliases.current(self.repository.store, name, f"commit-{commit}")
            fetched = 0
            if here is not None and here.number is not None:
                version = self.repository.version(names.Wanted(name=name, number=here.number))
            else:
                version, fetched = self._fetch(name, commit, info, progress)
                aliases.set_alias(self.repository.store, name, f"commit-{commit}", version.number)
            self._follow(name, revision, version)
            self._asked_s[name, revision] = time.monotonic()
            return Mirrored(version=version, commit=commit, fetched_bytes=fetched)

    def is_fresh(self, name: str, revision: str) -> bool:
        """Whether the hub was asked about this a short time ago, or can say nothing new (a commit that is here)."""
        if _SHA.fullmatch(revision) is not None:
            return aliases.current(self.repository.store, name, f"commit-{revision}") is not None
        asked_s = self._asked_s.get((name, revision))
        return asked_s is not None and time.monotonic() - asked_s < CHECK_EVERY_S

    def _follow(self, name: str, revision: str, version: Version) -> None:
        if _SHA.fullmatch(revision) is not None:
            return
        # What the hub calls by a version's name (v1) or by something that cannot be an alias is found by its commit.
        with contextlib.suppress(UsageError):
            alias = names.check_alias(revision)
            now = aliases.current(self.repository.store, name, alias)
            if now is None or now.number != version.number:
                aliases.set_alias(self.repository.store, name, alias, version.number, message=self.upstream.url)

    def _info(self, name: str, revision: str) -> dict[str, Any]:
        url = f"{self.upstream.url.rstrip('/')}/api/models/{name}/revision/{quote(revision, safe='')}"
        with self._open(url) as answer:
            content = answer.read(MAX_ANSWER_BYTES + 1)
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict) or len(content) > MAX_ANSWER_BYTES:
            raise DataError(f"{url} is not what a hub says about a model")
        return found

    def _fetch(
        self, name: str, commit: str, info: dict[str, Any], progress: Callable[[int, int], None]
    ) -> tuple[Version, int]:
        folder = self.repository.cache.folder / "mirror" / name.replace("/", "=") / commit
        paths = [str(entry.get("rfilename", "")) for entry in info.get("siblings", [])]
        if not paths:
            raise UsageError(f"{name} at {commit[:12]} holds no files in {self.upstream.url}")
        sizes = {str(e.get("rfilename")): e["size"] for e in info.get("siblings", []) if isinstance(e.get("size"), int)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_room(folder, max(0, sum(sizes.values()) - _held(folder)))
            done = 0
            for path in paths:
                target = folder / path
                if path.startswith("/") or ".." in Path(path).parts or not path:
                    raise DataError(f"{self.upstream.url} names a file {path!r}", expected="a path within the model")
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    self._file(name, commit, path, target)
                done += target.stat().st_size
                progress(done, max(done, sum(sizes.values())))
        except OSError as fault:
            raise disk_fault(fault, folder) from fault
        pushed = self.repository.push(folder, name, message=f"{self.upstream.url} {name}@{commit}", is_as_is=False)
        shutil.rmtree(folder, ignore_errors=True)
        return pushed.version, done

    def _file(self, name: str, commit: str, path: str, target: Path) -> None:
        """One file, on from where an earlier attempt ended."""
        url = f"{self.upstream.url.rstrip('/')}/{name}/resolve/{commit}/{quote(path)}"
        part = target.with_name(target.name + ".wirespeed-mirror")
        etag = ""
        for tried in range(NUM_TRIES):
            have = part.stat().st_size if part.exists() else 0
            try:
                with self._open(url, start=have) as answer, part.open("ab") as stream:
                    if have and answer.status != 206:
                        stream.truncate(0)
                    etag = (answer.headers.get("X-Linked-Etag") or answer.headers.get("ETag") or etag).strip('"W/')
                    while block := answer.read(_BLOCK):
                        stream.write(block)
                break
            except (PeerFailure, http.client.HTTPException, TimeoutError, ConnectionError) as fault:
                if tried == NUM_TRIES - 1:
                    raise PeerFailure(f"{url} broke off {NUM_TRIES} times: {fault}") from fault
                time.sleep(0.2 * 2**tried)
        if not _is_right(part, etag):
            part.unlink()
            raise DataError(f"{path} of {name} is not what {self.upstream.url} says it is", expected=f"hash {etag}")
        part.rename(target)

    def _open(self, url: str, *, start: int = 0) -> Any:
        headers = {"User-Agent": "wirespeed", "Accept-Encoding": "identity"}
        if self.upstream.token is not None:
            headers["Authorization"] = f"Bearer {self.upstream.token}"
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            return self._opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)  # noqa: S310
        except urllib.error.HTTPError as fault:
            if fault.code == 416 and start:  # all of it is here
                return contextlib.nullcontext(_Nothing(fault.headers))
            _raise(fault, url)
        except (urllib.error.URLError, OSError) as fault:
            raise PeerFailure(f"{url} does not answer: {fault}", hint="what is here is served as before") from fault


class _Nothing:
    status = 206

    def __init__(self, headers: Any) -> None:
        self.headers = headers

    def read(self, size: int) -> bytes:
        """Nothing more."""
        return b""


def _raise(fault: urllib.error.HTTPError, url: str) -> NoReturn:
    text = fault.headers.get("X-Error-Message") or fault.reason
    fault.close()
    if fault.code == 404:
        raise UsageError(f"{url} does not exist: {text}") from fault
    if fault.code in (401, 403):
        raise UsageError(f"{url} is refused: {text}", hint="set HF_TOKEN to a token that may read it") from fault
    raise PeerFailure(f"{url} answers {fault.code}: {text}") from fault


def _held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _is_right(path: Path, etag: str) -> bool:
    """Against a SHA-256 or git's SHA-1; a hub that says neither is believed, as its own client does."""
    if re.fullmatch(r"[0-9a-f]{64}", etag) is not None:
        digest = hashlib.sha256()
    elif _SHA.fullmatch(etag) is not None:
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    else:
        return True
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest() == etag
