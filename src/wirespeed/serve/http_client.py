"""The least HTTP/1.1 client that a load test needs: kept-alive connections, a body there, a status and a body back."""

from __future__ import annotations

import asyncio

from wirespeed.errors import PeerFailure
from wirespeed.wire.sockets import split_address

_MAX_HEAD_BYTES = 64 * 1024
_MAX_BODY_BYTES = 2**31


class HttpClient:
    """Connections to one server, as many as there are calls at once. Plain HTTP only."""

    def __init__(self, address: str, *, token: str | None = None) -> None:
        self._host, self._port = split_address(address)
        self._address = address
        self._authorization = "" if token is None else f"authorization: Bearer {token}\r\n"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for _reader, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def request(
        self, method: str, path: str, body: bytes = b"", *, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case) and body. Raises PeerFailure where the connection breaks."""
        try:
            reader, writer = (
                self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port, limit=1 << 20)
            )
            extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
            head = f"{method} {path} HTTP/1.1\r\nhost: {self._address}\r\ncontent-length: {len(body)}\r\n"
            head += f"{self._authorization}{extra}\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            status, found = await _head(reader)
            answer = await _body(reader, found)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as fault:
            raise PeerFailure(f"no answer from {self._address}: {fault}") from fault
        if found.get("connection", "") == "close":
            writer.close()
        else:
            self._idle.append((reader, writer))
        return status, found, answer


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw[:_MAX_HEAD_BYTES].decode("latin-1").split("\r\n")
    found = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip().lower()] = value.strip()
    return int(first.split(" ")[1]), found


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "") == "chunked":
        parts = []
        while size := int(await reader.readline(), 16):
            parts.append(await reader.readexactly(size))
            await reader.readline()
        await reader.readline()
        return b"".join(parts)
    size = int(headers.get("content-length", "0"))
    if not 0 <= size <= _MAX_BODY_BYTES:
        raise ValueError(f"content-length {size}")
    return await reader.readexactly(size)
