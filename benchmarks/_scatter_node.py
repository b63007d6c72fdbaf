"""One node's side of benchmarks/scatter_gather.py: a peer's server around the same work as the product's nodes.

The work of an image is a slept time and a feature that depends on every byte of it. ``grpc`` is a bare grpc.aio server
that takes raw bytes (no protobuf, messages of any size); ``rest`` a bare asyncio HTTP server that takes JSON with the
images in base64, as JSON has to. Both do the work in one thread, image after image, as the product's one instance does.

    python _scatter_node.py grpc|rest|sink ADDRESS IMAGE_S
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
SERVICE = "bench.Images"
DIMENSIONS = 512


def feature_of(image: bytes | memoryview) -> np.ndarray[Any, Any]:
    """512 numbers that follow from the whole image, cheaply: a checksum, stretched."""
    return np.full(DIMENSIONS, zlib.crc32(image), np.uint32).astype(np.float32) + np.arange(
        DIMENSIONS, dtype=np.float32
    )


def work(images: list[Any], image_s: float) -> bytes:
    """The features of all images, after the time that they take."""
    time.sleep(image_s * len(images))
    return np.stack([feature_of(image) for image in images]).tobytes()


def split(body: bytes) -> list[memoryview]:
    """Images as u32 length and bytes each."""
    view, start, found = memoryview(body), 0, []
    while start < len(view):
        size = struct.unpack_from("<I", view, start)[0]
        found.append(view[start + 4 : start + 4 + size])
        start += 4 + size
    return found


def join(images: list[bytes]) -> bytes:
    """The opposite."""
    return b"".join(part for image in images for part in (struct.pack("<I", len(image)), image))


async def serve_grpc(address: str, image_s: float) -> None:
    import grpc

    pool = ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()

    async def run(request: bytes, context: Any) -> bytes:
        return await loop.run_in_executor(pool, lambda: work(split(request), image_s))

    server = grpc.aio.server(options=UNLIMITED)
    handler = grpc.unary_unary_rpc_method_handler(run)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Run": handler}),))
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def serve_rest(address: str, image_s: float) -> None:
    pool = ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()

    def answer(body: bytes) -> bytes:
        images = [base64.b64decode(text) for text in json.loads(body)["images"]]
        features = np.frombuffer(work(images, image_s), np.float32).reshape(len(images), DIMENSIONS)
        return json.dumps({"features": features.tolist()}).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            size = next(
                int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
            )
            body = await reader.readexactly(size)
            said = await loop.run_in_executor(pool, answer, body)
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(said) + said
            )
            await writer.drain()

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    host, _, port = address.rpartition(":")
    server = await asyncio.start_server(quietly, host, int(port), limit=2**28)
    print("ready", flush=True)
    await server.serve_forever()


def serve_sink(address: str) -> None:
    """Counts what comes, and says so at the end: the goodput of plain TCP."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host, int(port)))

    def take(stream: socket.socket) -> None:
        buffer = bytearray(1 << 18)
        with stream:
            left = struct.unpack("<Q", stream.recv(8, socket.MSG_WAITALL))[0]
            while left and (got := stream.recv_into(buffer)):
                left -= got
            stream.sendall(b"!" if left else b".")

    print("ready", flush=True)
    while True:
        stream, _ = listener.accept()
        threading.Thread(target=take, args=(stream,), daemon=True).start()


if __name__ == "__main__":
    kind, where = sys.argv[1], sys.argv[2]
    if kind == "sink":
        serve_sink(where)
    else:
        asyncio.run({"grpc": serve_grpc, "rest": serve_rest}[kind](where, float(sys.argv[3])))
