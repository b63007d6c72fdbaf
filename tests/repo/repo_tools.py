"""Models to push, and a proxy that breaks what goes through it in front of a real store."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from wirespeed.repo.safetensors import build_head

SECOND_KEY = ("second-access", "second-secret")

SERVED_TOML = """
schema = 1
backend = "python"
[[input]]
name = "x"
datatype = "FP32"
shape = [4]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
"""
"""Of a model that takes and gives four numbers, by a ``model.py`` beside it."""


def wait_for_port(port: int, timeout_s: float = 60.0) -> bool:
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def weights(size: int, *, steps: int = 0, seed: int = 0) -> np.ndarray:
    """fp32 weights after ``steps`` small steps from the same start."""
    values = (np.random.default_rng(seed).standard_normal(size) * 0.02).astype(np.float32)
    for step in range(steps):
        values += np.random.default_rng(1000 + step).standard_normal(size).astype(np.float32) * np.float32(3e-7)
    return values


def safetensors_bytes(
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str] | None = None
) -> bytes:
    rows = [(name, dtype, shape, len(content)) for name, (dtype, shape, content) in tensors.items()]
    return build_head(rows, metadata or {}) + b"".join(content for _, _, content in tensors.values())


def model_bytes(*, num_layers: int = 3, size: int = 300_000, steps: int = 0) -> bytes:
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for layer in range(num_layers):
        values = bf16(weights(size, steps=steps, seed=layer))
        tensors[f"layer.{layer}.weight"] = ("BF16", (size,), values.tobytes())
        tensors[f"layer.{layer}.bias"] = ("F32", (16,), bytes(64))
    return safetensors_bytes(tensors)


def make_model(folder: Path, **options: int) -> Path:
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(model_bytes(**options))
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "sub" / "tokens.bin").write_bytes(
        np.random.default_rng(5).integers(0, 256, 3_000_000, dtype=np.uint8).tobytes()
    )
    (folder / "empty").write_bytes(b"")
    script = folder / "run.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below, by path, without our marker."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".wirespeed-version.json"
    }


class Request:
    def __init__(self, method: str, path: str, authorization: str) -> None:
        self.method = method
        self.path = path
        self.authorization = authorization


class FaultProxy:
    """Forwards HTTP to a real store. ``decide`` says of each request what becomes of it:

    None passes it on; "503"; "expired" (403 ExpiredToken); "reset" (after the request was carried out); "cut" (half of
    the answer's body); "flip" (one bit of the body is wrong); "drop" (the connection ends before anything is done).
    """

    def __init__(self, endpoint: str) -> None:
        upstream = urlsplit(endpoint)
        self.decide: Callable[[Request], str | None] = lambda request: None
        self.requests: list[Request] = []
        self.faults = 0
        proxy = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def log_message(self, *args: object) -> None:
                pass

            def _go(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with lock:
                    authorization = self.headers.get("Authorization", "")
                    request = Request(self.command, self.path, authorization)
                    proxy.requests.append(request)
                    fault = proxy.decide(request)
                    proxy.faults += fault is not None
                if fault == "503":
                    self._send(503, [], b"<Error><Code>SlowDown</Code></Error>")
                    return
                if fault == "expired":
                    self._send(
                        403, [], b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"
                    )
                    return
                if fault == "drop":
                    self._abort()
                    return
                connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=30)
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                answer = connection.getresponse()
                content = answer.read()
                headers = [
                    (n, v) for n, v in answer.getheaders() if n.lower() not in ("connection", "transfer-encoding")
                ]
                if self.command == "HEAD":
                    self._send(answer.status, headers, None)
                elif fault == "reset":
                    self._abort()
                elif fault == "cut":
                    self._send(answer.status, headers, content, cut=len(content) // 2)
                elif fault == "flip" and content:
                    wrong = bytearray(content)
                    wrong[len(wrong) // 2] ^= 1
                    self._send(answer.status, headers, bytes(wrong))
                else:
                    self._send(answer.status, headers, content)
                connection.close()

            def _send(
                self, status: int, headers: list[tuple[str, str]], body: bytes | None, cut: int | None = None
            ) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() != "content-length" or body is None:
                        self.send_header(name, value)
                if body is not None:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if body is not None:
                    self.wfile.write(body if cut is None else body[:cut])
                if cut is not None:
                    self._abort()

            def _abort(self) -> None:
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _go

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
