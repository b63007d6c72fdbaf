"""The hot tier: small chunks that many nodes read at the same time, in Redis. Optional, and it may die at any time.

Every call has a short deadline; after a failure the tier is left alone for a while, so that a dead server costs one
deadline and not one per chunk. What it gives is verified by whoever asked: it may lie, lose and forget.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from wirespeed.errors import MissingCapability, UsageError

MAX_VALUE_BYTES = 1024**2
"""Redis moves values of this size best; larger ones come quicker from a disk or the store."""
TIMEOUT_S = 0.5
PAUSE_S = 15.0
EXPIRE_S = 24 * 3600


class Hot:
    """A Redis server as a cache of chunks. Thread-safe; never raises after it was made."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S, pause_s: float = PAUSE_S) -> None:
        try:
            import redis
        except ImportError as fault:
            raise MissingCapability(
                "the package redis is not installed", hint="pip install 'wirespeed[repo]'"
            ) from fault
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, protocol=2, retry=None
            )
        except ValueError as fault:
            raise UsageError(f"got a hot tier that is no Redis URL: {fault}", expected="redis://host:port/0") from fault
        self._faults: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._resume_s = 0.0
        self.num_failures = 0

    def get(self, digest: bytes) -> bytes | None:
        """The value, unverified, or None."""
        value = self._call("get", _key(digest))
        return value if isinstance(value, bytes) else None

    def put(self, digest: bytes, content: memoryview | bytes) -> None:
        """Keep a value for others, for a day."""
        self._call("set", _key(digest), bytes(content), ex=EXPIRE_S)

    def drop(self, digest: bytes) -> None:
        """Forget a value that was wrong."""
        self._call("delete", _key(digest))

    def _call(self, what: str, *arguments: object, **options: object) -> object:
        if time.monotonic() < self._resume_s:
            return None
        try:
            return getattr(self._client, what)(*arguments, **options)
        except self._faults:
            with self._lock:
                self.num_failures += 1
                self._resume_s = time.monotonic() + self._pause_s
            return None


def _key(digest: bytes) -> bytes:
    return b"wirespeed:" + digest
