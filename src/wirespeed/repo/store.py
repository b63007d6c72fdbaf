"""The only door to the object store: S3 and what speaks it, a local folder, GCS or Azure, through obstore.

Small whole-object operations with deadlines. Every object is one PUT: no multipart uploads, so no part limits and no
orphaned parts. ETags are never used. Whether the store honours "create only" is tried out before the first commit
(some servers accept the header and ignore it), and callers fall back to protocols that need no conditions.

Retries: 5xx, resets and time-outs by obstore; a rejected or expired credential is read again and tried again here.
What a store answers is not believed: callers verify digests.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from wirespeed.errors import DataError, MissingCapability, PeerFailure, UsageError
from wirespeed.repo.credentials import AwsCredentials

if TYPE_CHECKING:
    from obstore.store import ObjectStore

OPERATION_TIMEOUT_S = 120.0
"""One request, body included: 16 MiB at 1 Mbit/s just fit."""
STALL_TIMEOUT_S = 30.0
RETRY_TIMEOUT_S = 60.0
RENEWAL_TIMEOUT_S = 10.0
MAX_ATTEMPTS = 5
_NO_SPACE = re.compile(r"os error 28|No space left|QuotaExceeded|no writable volumes", re.IGNORECASE)
_REFUSED = re.compile(
    r"\b40[13] (Forbidden|Unauthorized)|ExpiredToken|TokenExpired|InvalidAccessKeyId|SignatureDoesNot|os error 13\b"
)
_PASSING = re.compile(
    r"HTTP error|body error|Connection|timed out|50[0234] |SlowDown|ConditionalRequestConflict", re.IGNORECASE
)
_T = TypeVar("_T")


class ObjectMissing(DataError):  # noqa: N818 - says what it is
    """There is no object of this key."""


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """An object as the store lists it. ``modified_s`` is by the store's clock, in seconds since 1970."""

    key: str
    size_bytes: int
    modified_s: float


class Store:
    """A store below one prefix. Thread-safe. ``url`` carries no secret."""

    def __init__(
        self, raw: ObjectStore, url: str, *, credentials: AwsCredentials | None = None, folder: Path | None = None
    ) -> None:
        self.raw = raw
        self.url = url
        self.folder = folder
        """The local folder, where the store is one."""
        self._credentials = credentials
        self._can_create: bool | None = None
        self._has_answered = False

    def get(self, key: str, *, max_bytes: int) -> memoryview:
        """A whole object. Raises ObjectMissing, DataError above ``max_bytes``, PeerFailure, MissingCapability."""
        import obstore

        def read() -> memoryview:
            result = obstore.get(self.raw, key)
            size_bytes = result.meta["size"]
            if size_bytes > max_bytes:
                raise DataError(f"{self._at(key)} has {size_bytes} bytes", expected=f"at most {max_bytes}")
            return memoryview(result.bytes())

        return self._try(f"read {self._at(key)}", read)

    def get_range(self, key: str, start: int, length: int, *, whole_bytes: int | None = None) -> memoryview:
        """``length`` bytes from ``start`` of an object of ``whole_bytes``. Raises DataError where it ends before."""
        import obstore
        from obstore.exceptions import GenericError

        def read() -> memoryview:
            if start == 0 and length == whole_bytes:
                return memoryview(obstore.get(self.raw, key).bytes())
            try:
                return memoryview(obstore.get_range(self.raw, key, start=start, length=length))
            except GenericError as fault:
                # Some servers answer with the whole object, which obstore refuses; objects are small enough for that.
                if "non-partial response" not in str(fault):
                    raise
                return memoryview(obstore.get(self.raw, key).bytes())[start : start + length]

        found = self._try(f"read {self._at(key)}", read)
        if len(found) != length:
            raise DataError(
                f"{self._at(key)} gave {len(found)} bytes from {start}",
                expected=f"{length}",
                hint="the object was cut short: `wirespeed repo verify` lists what is damaged",
            )
        return found

    def put(self, key: str, content: bytes | bytearray | memoryview) -> None:
        """Write or replace an object, in one request."""
        import obstore

        self._try(f"write {self._at(key)}", lambda: obstore.put(self.raw, key, content, use_multipart=False))

    def create(self, key: str, content: bytes) -> bool:
        """Write an object that must not exist: True where it is now ours, False where another's stands there.

        ``content`` has to be unique to the caller: an answer that got lost is told from a lost race by reading back.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def write() -> bool:
            try:
                obstore.put(self.raw, key, content, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        if self._try(f"create {self._at(key)}", write):
            return True
        try:
            return bytes(self.get(key, max_bytes=64 * 1024**2)) == content
        except ObjectMissing:  # it stood there, and was taken away since
            return False

    def stat(self, key: str) -> Stat | None:
        """Size and time of an object, or None where there is none."""
        import obstore

        try:
            found = self._try(f"look at {self._at(key)}", lambda: obstore.head(self.raw, key))
        except ObjectMissing:
            return None
        return _stat(found)

    def list_objects(self, prefix: str) -> list[Stat]:
        """All objects below a prefix, in no promised order."""
        import obstore

        def read() -> list[Stat]:
            return [_stat(found) for page in obstore.list(self.raw, prefix, chunk_size=1000) for found in page]

        return self._try(f"list {self._at(prefix)}", read)

    def list_folders(self, prefix: str) -> list[str]:
        """The last parts of the folders directly below a prefix, sorted."""
        import obstore

        found = self._try(f"list {self._at(prefix)}", lambda: obstore.list_with_delimiter(self.raw, prefix))
        return sorted(str(folder).rstrip("/").rsplit("/", 1)[-1] for folder in found["common_prefixes"])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. One that is not there is fine."""
        import obstore

        for key in keys:
            with contextlib.suppress(ObjectMissing):
                self._try(f"delete {self._at(key)}", lambda key=key: obstore.delete(self.raw, key))  # type: ignore[misc]

    def now_s(self) -> float:
        """The store's clock: leases and graces are ages by one clock, whatever the hosts' clocks say."""
        key = f"probes/{uuid.uuid4().hex}"
        self.put(key, b"now")
        try:
            found = self.stat(key)
        finally:
            self.delete([key])
        if found is None:
            raise PeerFailure(
                f"{self.url} does not show what was just written", expected="read-after-write consistency"
            )
        return found.modified_s

    @property
    def can_create(self) -> bool:
        """Whether "create only" is honoured, tried out once: of two such writes the second has to fail."""
        if self._can_create is None:
            key = f"probes/{uuid.uuid4().hex}"
            try:
                self._can_create = self.create(key, b"first") and not self.create(key, b"second")
            except (MissingCapability, PeerFailure) as fault:
                if "not yet implemented" not in str(fault) and "NotImplemented" not in str(fault):
                    raise
                self._can_create = False
            finally:
                self.delete([key])
        return self._can_create

    def _at(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _try(self, what: str, attempt: Callable[[], _T]) -> _T:
        from obstore import exceptions as faults

        give_up_s = time.monotonic() + RETRY_TIMEOUT_S
        pause_s = 0.1
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            used = None if self._credentials is None else self._credentials.key()
            try:
                answer = attempt()
            except (FileNotFoundError, faults.NotFoundError) as fault:
                raise ObjectMissing(f"cannot {what}: it is not there") from fault
            except (faults.BaseError, OSError, NotImplementedError) as fault:
                if not _is_refusal(fault):
                    # obstore does not repeat what it cannot know to be idempotent; all that comes here is.
                    if attempts_left and _PASSING.search(str(fault)) is not None and time.monotonic() < give_up_s:
                        time.sleep(pause_s)
                        pause_s *= 3
                        continue
                    raise self._failure(what, fault) from fault
                if self._credentials is not None and used is not None and time.monotonic() < give_up_s:
                    # A credential that never worked is not waited for; one that expired is about to be renewed.
                    wait_s = RENEWAL_TIMEOUT_S if self._has_answered else 0.0
                    if self._credentials.wait_renewed(used, timeout_s=wait_s):
                        continue
                raise MissingCapability(
                    f"cannot {what}: {_first_line(fault)}",
                    expected="credentials that may do this" if self.folder is None else "permission to do this",
                    hint=_CREDENTIAL_HINT if self.folder is None else "check the folder's owner and mode",
                ) from fault
            self._has_answered = True
            return answer
        raise PeerFailure(f"cannot {what}: refused with every credential that was tried", hint=_CREDENTIAL_HINT)

    def _failure(self, what: str, fault: BaseException) -> MissingCapability | PeerFailure:
        text = str(fault)
        if _NO_SPACE.search(text):
            return MissingCapability(
                f"cannot {what}: the store is full", hint="free some space there: `wirespeed repo gc`"
            )
        if "os error 30" in text:
            return MissingCapability(f"cannot {what}: {_first_line(fault)}", hint="the folder is mounted read-only")
        return PeerFailure(
            f"cannot {what}: {_first_line(fault)}",
            hint="the store did not answer as it should, after retries; check that it runs, then try again",
        )


def _is_refusal(fault: BaseException) -> bool:
    from obstore import exceptions as faults

    if isinstance(fault, (PermissionError, faults.PermissionDeniedError, faults.UnauthenticatedError)):
        return True
    # Listings and expired tokens (some answer 400) come as generic errors.
    return _REFUSED.search(str(fault)) is not None


_CREDENTIAL_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE with ~/.aws/credentials "
    "(read again while a command runs)"
)


def _stat(found: Any) -> Stat:
    modified: datetime = found["last_modified"]
    return Stat(key=str(found["path"]), size_bytes=int(found["size"]), modified_s=modified.astimezone(UTC).timestamp())


def _first_line(fault: BaseException) -> str:
    text = str(fault).strip().split("\n\nDebug source", 1)[0].split("\n", 1)[0]
    # A presigned or signed URL in an error would carry a signature.
    return re.sub(r"(X-Amz-[A-Za-z-]+=)[^&\s\"]+", r"\1...", text)[:400]


def within(do: Callable[[], _T], *, timeout_s: float, what: str) -> _T:
    """The result of ``do``, or PeerFailure after ``timeout_s``; it then goes on in a thread, and what comes is dropped.

    For what has another way out: a store's own deadlines are as long as a slow answer may take.
    """
    outcome: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((do(), None))
        except BaseException as fault:
            outcome.put((None, fault))

    threading.Thread(target=run, name="wirespeed-store", daemon=True).start()
    try:
        result, fault = outcome.get(timeout=timeout_s)
    except queue.Empty:
        raise PeerFailure(f"{what} did not answer within {timeout_s:g} s") from None
    if fault is not None:
        raise fault
    return result  # type: ignore[return-value]


def open_store(url: str | os.PathLike[str], *, must_exist: bool = False) -> Store:
    """Open ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///path`` or a path. No request is made yet.

    For S3: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID ..., AWS_PROFILE and ~/.aws/credentials as elsewhere.
    """
    try:
        import obstore.store as stores
    except ImportError as fault:
        raise MissingCapability("the package obstore is not installed", hint="pip install 'wirespeed[repo]'") from fault

    text = os.fspath(url)
    parts = urlsplit(text)
    if parts.scheme in ("", "file"):
        folder = Path(parts.path if parts.scheme == "file" else text).expanduser().absolute()
        if must_exist and not folder.is_dir():
            raise UsageError(
                f"got repository {text!r}, which is not a folder",
                expected="a folder, or a URL such as s3://bucket/models",
            )
        try:
            return Store(stores.LocalStore(folder, mkdir=True), f"file://{folder}", folder=folder)
        except Exception as fault:
            raise MissingCapability(f"cannot use {folder}: {_first_line(fault)}") from fault
    if parts.username is not None or parts.password is not None:
        raise UsageError("got credentials in the repository's URL", expected="none there", hint=_CREDENTIAL_HINT)
    clean = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    retry: Any = {
        "max_retries": 8,
        "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
    }
    client: Any = {
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=OPERATION_TIMEOUT_S),
        "read_timeout": timedelta(seconds=STALL_TIMEOUT_S),
        # A body that was compressed on the way would not be the object.
        "default_headers": {"accept-encoding": "identity"},
    }
    if parts.scheme in ("s3", "s3a"):
        if not parts.netloc:
            raise UsageError(f"got repository {text!r}", expected="s3://bucket/prefix")
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        config: Any = {"region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"}
        if endpoint:
            config["endpoint"] = endpoint
            client["allow_http"] = endpoint.startswith("http://")
        credentials = AwsCredentials.find()
        provider: Any = credentials
        raw = stores.S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            config=config,
            client_options=client,
            retry_config=retry,
            credential_provider=provider,
        )
        return Store(raw, clean, credentials=credentials)
    try:
        return Store(stores.from_url(clean, client_options=client, retry_config=retry), clean)
    except Exception as fault:
        raise UsageError(
            f"got repository {text!r}: {_first_line(fault)}", expected="s3://bucket/prefix, gs://, az:// or a folder"
        ) from fault
