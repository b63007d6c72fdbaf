"""S3 credentials that are read again: from the environment, or from the shared credentials file.

A long push outlives short-lived credentials. Whatever renews them rewrites the file; this provider reads it again
when the store refuses, and once a minute. Where neither source exists, obstore asks the instance itself (IMDS, web
identity).
"""

from __future__ import annotations

import configparser
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypedDict

from wirespeed.errors import MissingCapability

READ_AGAIN_S = 60.0


class Credential(TypedDict):
    """What obstore wants of a provider."""

    access_key_id: str
    secret_access_key: str
    token: str | None
    expires_at: datetime | None


class AwsCredentials:
    """Callable that gives the current credential."""

    def __init__(self, path: Path | None, profile: str) -> None:
        self._path = path
        self._profile = profile

    @classmethod
    def find(cls) -> AwsCredentials | None:
        """From the environment, else from the credentials file; None where there is neither."""
        if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
            return cls(None, "")
        path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
        return cls(path, os.environ.get("AWS_PROFILE", "default")) if path.is_file() else None

    def __call__(self) -> Credential:
        """The credential now, good for a minute: then it is read again."""
        return self._read()

    def key(self) -> tuple[str, str, str | None]:
        """What tells one credential from another; to be kept in memory only."""
        now = self._read()
        return now["access_key_id"], now["secret_access_key"], now["token"]

    def wait_renewed(self, refused: tuple[str, str, str | None], *, timeout_s: float) -> bool:
        """Whether the source holds, or comes to hold in time, something else than what was refused."""
        give_up_s = time.monotonic() + timeout_s
        while self.key() == refused:
            if time.monotonic() >= give_up_s:
                return False
            time.sleep(0.2)
        return True

    def _read(self) -> Credential:
        if self._path is None:
            source = {name.lower(): os.environ.get(name, "") for name in _NAMES}
        else:
            parser = configparser.RawConfigParser()
            try:
                parser.read(self._path, encoding="utf-8")
            except configparser.Error as fault:
                raise MissingCapability(f"cannot read {self._path}: not a credentials file") from fault
            if not parser.has_section(self._profile):
                raise MissingCapability(f"{self._path} has no profile {self._profile!r}", hint="set AWS_PROFILE")
            source = dict(parser.items(self._profile))
        return Credential(
            access_key_id=source.get("aws_access_key_id", ""),
            secret_access_key=source.get("aws_secret_access_key", ""),
            token=source.get("aws_session_token") or None,
            expires_at=datetime.now(UTC) + timedelta(seconds=READ_AGAIN_S),
        )


_NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
