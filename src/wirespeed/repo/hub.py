"""A read endpoint for Hugging Face clients (``HF_ENDPOINT=http://node:port``) and, below /v2/, for container images.

Clients work unchanged. How images are found is told in ``registry``.

Models of the repository appear as ``org/name`` (or ``name``); a revision is an alias, ``v12``, a commit (the first 40
digits of the manifest's BLAKE3) or ``main``: the alias of that name where there is one, else the newest version. Files
come from the cache, chunk by chunk from the store where they are not there; ranges are honoured, so that downloads
resume. Only reading; anything else is refused. Beyond loopback a token is needed, as ``Authorization: Bearer``.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import logging
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from wirespeed.errors import UsageError, WirespeedError
from wirespeed.repo.fetch import Source
from wirespeed.repo.hub_pages import file_etag, tree, wanted_paths
from wirespeed.repo.manifest import FileEntry, Manifest
from wirespeed.repo.mirror import Mirror, Mirrored
from wirespeed.repo.names import Wanted, parse_version
from wirespeed.repo.reading import read_span
from wirespeed.repo.registry import API_VERSION, INDEX_TYPE, Registry, RegistryFault
from wirespeed.repo.repository import Repository
from wirespeed.repo.versions import Version

MAX_OPEN_MODELS = 16
IDLE_TIMEOUT_S = 60.0
MIRROR_WAIT_S = 8.0
"""Clients wait ten seconds for a first answer; after that they are told to ask again."""
MIRROR_RETRY_S = 5
_LOG = logging.getLogger("wirespeed.repo")
_RESOLVE = re.compile(r"/([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)")
_API = re.compile(r"/api/models/([^/]+(?:/[^/]+)?)")
_API_AT = re.compile(r"/api/models/([^/]+(?:/[^/]+)?)/(revision|tree|paths-info)/([^/]+)/?(.*)")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class _Open:
    """A version with what is needed to read it."""

    def __init__(self, version: Version, manifest: Manifest, source: Source) -> None:
        self.version = version
        self.manifest = manifest
        self.source = source
        self.commit = version.manifest_digest[:40]
        self.files = {file.path: file for file in manifest.files}


class _NotFound(Exception):  # noqa: N818
    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Busy(Exception):  # noqa: N818
    """Later."""


class HubServer(ThreadingHTTPServer):
    """Serves until ``shutdown``. Port 0 takes a free one."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        repository: Repository,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        if host not in ("127.0.0.1", "::1", "localhost") and not token:
            raise UsageError(
                f"got address {host!r} without a token", expected="loopback, or a token", hint="set WIRESPEED_TOKEN"
            )
        self.repository = repository
        self.registry = Registry(repository)
        self.token = token
        self.mirror = mirror
        self._mirrors = ThreadPoolExecutor(4, thread_name_prefix="wirespeed-mirror")
        self._mirroring: dict[tuple[str, str], Future[Mirrored]] = {}
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        super().__init__((host, port), _Handler)

    def server_close(self) -> None:
        """Stop listening; what is being mirrored is gone on with the next time."""
        super().server_close()
        self._mirrors.shutdown(wait=False, cancel_futures=True)

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT has to be."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def open(self, name: str, revision: str) -> _Open:
        """The version that a revision of a model means now."""
        try:
            version = self._resolve(name, revision)
        except UsageError as fault:
            code = "RevisionNotFound" if name in self.repository.models() else "RepoNotFound"
            raise _NotFound(code, str(fault)) from fault
        return self.open_version(version)

    def open_version(self, version: Version) -> _Open:
        """What is needed to read this version."""
        key = f"{version.label}/{version.manifest_digest}"
        with self._lock:
            if key in self._open:
                self._open.move_to_end(key)
                return self._open[key]
        manifest = self.repository.manifest(version)
        found = _Open(version, manifest, self.repository.source(version, manifest))
        with self._lock:
            self._open[key] = found
            while len(self._open) > MAX_OPEN_MODELS:
                self._open.popitem(last=False)
        return found

    def _mirror(self, name: str, revision: str) -> None:
        """Have what the upstream hub has; where it has nothing or does not answer, what is here counts."""
        assert self.mirror is not None
        branch = "main" if revision == "refs/heads/main" else revision
        if self.mirror.is_fresh(name, branch) or self._is_ours(name, branch):
            return
        key = (name, branch)
        with self._lock:
            task = self._mirroring.get(key)
            if task is None:
                task = self._mirroring[key] = self._mirrors.submit(self.mirror.bring, name, branch)
        try:
            task.result(timeout=MIRROR_WAIT_S)
        except TimeoutError:
            if not task.done():
                raise _Busy(f"{name} is being fetched from {self.mirror.upstream.url}: ask again") from None
        except WirespeedError as fault:
            _LOG.warning("cannot mirror %s at %s: %s", name, branch, fault)
        finally:
            if task.done():
                with self._lock:
                    self._mirroring.pop(key, None)

    def _is_ours(self, name: str, revision: str) -> bool:
        """A commit that this server gave out itself: no hub knows it."""
        if re.fullmatch(r"[0-9a-f]{40}", revision) is None:
            return False
        return any(version.manifest_digest.startswith(revision) for version in self.repository.versions(name))

    def _resolve(self, name: str, revision: str) -> Version:
        if self.mirror is not None:
            self._mirror(name, revision)
        if re.fullmatch(r"[0-9a-f]{40}", revision):
            with contextlib.suppress(UsageError):
                return self.repository.version(Wanted(name=name, alias=f"commit-{revision}"))
            for version in reversed(self.repository.versions(name)):
                if version.manifest_digest.startswith(revision):
                    return version
            raise UsageError(f"{name} has no commit {revision}")
        if revision in ("main", "refs/heads/main"):
            try:
                return self.repository.version(Wanted(name=name, alias="main"))
            except UsageError:
                return self.repository.version(Wanted(name=name))
        return self.repository.version(parse_version(name, revision))


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_TIMEOUT_S
    server_version = "wirespeed"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library does not print
        """Nothing."""

    def do_HEAD(self) -> None:
        """Headers of a file."""
        self._answer(has_body=False)

    def do_GET(self) -> None:
        """A file, or what is known about a model."""
        self._answer(has_body=True)

    def do_POST(self) -> None:
        """Only ``paths-info``, which asks about files."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if 0 <= length <= 1 << 20 else b""
        if length > 1 << 20:
            self.close_connection = True
        self._answer(has_body=True, posted=body)

    def _answer(self, *, has_body: bool, posted: bytes | None = None) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        try:
            if self.server.token is not None and not self._has_token():
                if path.startswith("/v2/"):
                    self._registry_fault(RegistryFault(401, "UNAUTHORIZED", "log in with the token as password"))
                    return
                self._error(HTTPStatus.UNAUTHORIZED, "GatedRepo", "a token is needed: Authorization: Bearer ...")
            elif path == "/v2" or path.startswith("/v2/"):
                self._registry(path, has_body=has_body, is_read=posted is None)
            elif posted is None and (found := _RESOLVE.fullmatch(path)) is not None:
                self._file(*found.groups(), has_body=has_body)
            elif (at := _API_AT.fullmatch(path)) is not None:
                self._about(*at.groups(), query=parse_qs(parts.query), posted=posted)
            elif posted is None and (model := _API.fullmatch(path)) is not None:
                self._json(self._info(self.server.open(model.group(1), "main")))
            else:
                self._error(HTTPStatus.NOT_FOUND, "EntryNotFound", f"nothing is served at {parts.path}")
        except _NotFound as fault:
            self._error(HTTPStatus.NOT_FOUND, fault.code, str(fault))
        except RegistryFault as fault:
            self._registry_fault(fault)
        except _Busy as fault:
            self._error(HTTPStatus.SERVICE_UNAVAILABLE, "", str(fault), retry_after_s=MIRROR_RETRY_S)
        except WirespeedError as fault:
            self._error(HTTPStatus.SERVICE_UNAVAILABLE, "", str(fault))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True

    def _has_token(self) -> bool:
        given = self.headers.get("Authorization", "")
        if given.startswith("Basic "):  # docker login: any user, the token as password
            try:
                given = f"Bearer {base64.b64decode(given[6:]).decode().partition(':')[2]}"
            except ValueError:
                return False
        return hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode())

    def _registry(self, path: str, *, has_body: bool, is_read: bool) -> None:
        registry = self.server.registry
        if not is_read:
            raise RegistryFault(405, "UNSUPPORTED", "images are pushed with `wirespeed repo push`")
        if path in ("/v2", "/v2/"):
            self._json({})
            return
        if path == "/v2/_catalog":
            self._json({"repositories": self.server.repository.models()})
            return
        route = registry.route(path)
        if route is None:
            raise RegistryFault(404, "NAME_UNKNOWN", f"nothing is served at {path}")
        name, what, reference = route
        if what == "tags" and reference == "list":
            self._json({"name": name, "tags": registry.tags(name)})
        elif what == "referrers":
            self._json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}, kind=INDEX_TYPE)
        elif what in ("manifests", "blobs"):
            found = registry.manifest(name, reference) if what == "manifests" else registry.blob(name, reference)
            opened = self.server.open_version(found.version)
            headers = {"Docker-Content-Digest": found.digest, "ETag": f'"{found.digest}"'}
            self._content(opened, found.file, kind=found.media_type, headers=headers, has_body=has_body)
        else:
            raise RegistryFault(404, "NAME_UNKNOWN", f"nothing is served at {path}")

    def _registry_fault(self, fault: RegistryFault) -> None:
        body = json.dumps({"errors": [{"code": fault.code, "message": str(fault)}]}).encode()
        self.send_response(fault.status)
        self.send_header("Docker-Distribution-Api-Version", API_VERSION)
        if fault.status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Basic realm="wirespeed"')
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _file(self, name: str, revision: str, path: str, *, has_body: bool) -> None:
        opened = self.server.open(name, revision)
        file = opened.files.get(path)
        if file is None:
            raise _NotFound("EntryNotFound", f"{opened.version.label} has no file {path!r}")
        etag = file_etag(opened.manifest, file)
        headers = {
            "ETag": f'"{etag}"', "X-Repo-Commit": opened.commit, "X-Linked-Size": str(file.size_bytes),
            "X-Linked-Etag": f'"{etag}"',
            "Content-Disposition": f"inline; filename*=UTF-8''{quote(path.rsplit('/', 1)[-1])}",
        }  # fmt: skip
        self._content(opened, file, kind="application/octet-stream", headers=headers, has_body=has_body)

    def _content(self, opened: _Open, file: FileEntry, *, kind: str, headers: dict[str, str], has_body: bool) -> None:
        """A file, or the range of it that is asked for."""
        span = self._span(file.size_bytes)
        if span is None:
            self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self.send_header("Content-Range", f"bytes */{file.size_bytes}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        begin, end, is_part = span
        self.send_response(HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK)
        if is_part:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{file.size_bytes}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Content-Type", kind)
        self.send_header("Accept-Ranges", "bytes")
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if has_body:
            self._send(opened, file, begin, end)

    def _span(self, size_bytes: int) -> tuple[int, int, bool] | None:
        """(begin, end, whether it is a part) that is asked for; None where it cannot be given."""
        wanted = self.headers.get("Range")
        match = None if wanted is None else _RANGE.fullmatch(wanted.strip())
        if match is None or match.groups() == ("", ""):
            return 0, size_bytes, False
        first, last = match.groups()
        if first == "":
            begin, end = max(0, size_bytes - int(last)), size_bytes
        else:
            begin = int(first)
            end = min(int(last) + 1, size_bytes) if last else size_bytes
        return (begin, end, True) if begin < end else None

    def _send(self, opened: _Open, file: FileEntry, begin: int, end: int) -> None:
        try:
            for content in read_span(self.server.repository, opened.source, file, begin=begin, end=end):
                self.wfile.write(content)
        except WirespeedError:
            # The head is sent: a short body is how the client learns of it, and it asks again.
            self.close_connection = True

    def _about(
        self, name: str, what: str, revision: str, path: str, *, query: dict[str, list[str]], posted: bytes | None
    ) -> None:
        opened = self.server.open(name, revision)
        if what == "revision":
            self._json(self._info(opened))
            return
        if what == "paths-info":
            wanted = wanted_paths(posted or b"", self.headers.get("Content-Type", ""))
            self._json([entry for entry in tree(opened.manifest, "", is_recursive=True) if entry["path"] in wanted])
            return
        is_recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = tree(opened.manifest, path.strip("/"), is_recursive=is_recursive)
        if path.strip("/") and not entries:
            raise _NotFound("EntryNotFound", f"{opened.version.label} has no folder {path!r}")
        self._json(entries)

    def _info(self, opened: _Open) -> dict[str, Any]:
        name = opened.version.name
        return {
            "_id": opened.commit[:24], "id": name, "modelId": name, "sha": opened.commit, "private": False,
            "disabled": False, "gated": False, "tags": [], "downloads": 0, "likes": 0,
            "lastModified": opened.version.created.replace("+00:00", ".000Z"),
            "createdAt": opened.version.created.replace("+00:00", ".000Z"),
            "siblings": [{"rfilename": path} for path in opened.files],
        }  # fmt: skip

    def _json(self, document: object, *, kind: str = "application/json; charset=utf-8") -> None:
        body = json.dumps(document).encode()
        self.send_response(HTTPStatus.OK)
        if self.path.startswith("/v2"):
            self.send_header("Docker-Distribution-Api-Version", API_VERSION)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: HTTPStatus, code: str, text: str, *, retry_after_s: int | None = None) -> None:
        line = " ".join(text.split())[:500].encode("ascii", "replace").decode()
        body = json.dumps({"error": text}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if retry_after_s is not None:
            self.send_header("Retry-After", str(retry_after_s))
        self.send_header("X-Error-Message", line)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
