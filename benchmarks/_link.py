"""One way over a shaped link: messages of the data plane beside plain TCP, in turn, in one lab of two hosts.

Both move the same bytes and count from the first byte to the receiver's word that it has the last one. The link's rate,
headers and congestion control are those of both.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import sys
import time
from typing import Any

from wirespeed import wire
from wirespeed.lab import Lab, LabSpec

TOKEN = "benchmark-of-one-link"
MESSAGE_BYTES = 1_000_000
NUM_MESSAGES = 120
DEPTH = 4
ROUNDS = 5


def goodput(rate: str = "1gbit") -> dict[str, Any]:
    """Medians in bits per second, and the share of plain TCP's that the data plane reaches (median over rounds)."""
    lines: list[str] = []

    def on_line(rank: int, stream: str, line: str) -> None:
        if stream == "stdout" and rank == 1:
            lines.append(line)
        elif stream == "stderr":
            print(line, file=sys.stderr)

    with Lab(LabSpec.parse(f"2x{rate}")) as lab:
        result = lab.run([sys.executable, __file__], timeout_s=180, on_line=on_line)
    if result.returncode != 0 or not lines:
        raise RuntimeError(f"the ranks of the lab ended with {result.returncode}")
    runs: dict[str, list[float]] = json.loads(lines[-1])
    shares = [w / p for w, p in zip(runs["wire"], runs["plain"], strict=True)]
    return {
        "rate": rate,
        "message_bytes": MESSAGE_BYTES,
        "in_flight": DEPTH,
        "wire_bit_per_s": statistics.median(runs["wire"]),
        "plain_bit_per_s": statistics.median(runs["plain"]),
        "share": statistics.median(shares),
        "every_run": runs,
    }


async def receive(port: int) -> None:
    """Rank 0: a sink for both arms, until told to stop."""
    stop = asyncio.Event()
    total = MESSAGE_BYTES * NUM_MESSAGES

    def sink() -> None:
        listener = socket.create_server(("", port + 1))
        buffer = bytearray(1 << 20)
        while True:
            stream, _ = listener.accept()
            with stream:
                left = total
                while left and (got := stream.recv_into(buffer)):
                    left -= got
                stream.sendall(b"." if not left else b"!")

    def take(request: wire.Request) -> bytes:
        if len(request.payload) != MESSAGE_BYTES:
            raise ValueError(f"{len(request.payload)} bytes")
        return b"."

    def end(_: wire.Request) -> bytes:
        asyncio.get_running_loop().call_later(0.2, stop.set)
        return b""

    asyncio.get_running_loop().run_in_executor(None, sink).add_done_callback(lambda _: None)
    async with await wire.listen(f"0.0.0.0:{port}", {"take": take, "end": end}, security=wire.Security(token=TOKEN)):
        await stop.wait()
    os._exit(0)  # the sink's thread is in accept


async def send(host: str, port: int) -> dict[str, list[float]]:
    """Rank 1: both arms in turn, after a round that is not counted."""
    payload = os.urandom(MESSAGE_BYTES)
    bits = 8 * MESSAGE_BYTES * NUM_MESSAGES
    runs: dict[str, list[float]] = {"wire": [], "plain": []}
    connection = await connected(host, port)
    async with connection:
        for round_ in range(-1, ROUNDS):
            begin = time.perf_counter()
            left = iter(range(NUM_MESSAGES))

            async def caller(left: Any = left) -> None:
                for _ in left:
                    await connection.call("take", payload, timeout_s=60)

            await asyncio.gather(*(caller() for _ in range(DEPTH)))
            wire_s = time.perf_counter() - begin
            plain_s = await asyncio.get_running_loop().run_in_executor(None, plain_send, host, port + 1, payload)
            if round_ >= 0:
                runs["wire"].append(bits / wire_s)
                runs["plain"].append(bits / plain_s)
        await connection.call("end")
    return runs


def plain_send(host: str, port: int, payload: bytes) -> float:
    """Seconds for the same bytes over one blocking socket."""
    with socket.create_connection((host, port), timeout=60) as stream:
        begin = time.perf_counter()
        for _ in range(NUM_MESSAGES):
            stream.sendall(payload)
        if stream.recv(1) != b".":
            raise RuntimeError("the sink did not get every byte")
        return time.perf_counter() - begin


async def connected(host: str, port: int) -> wire.Connection:
    """A connection, tried again until rank 0 listens."""
    for _ in range(200):
        try:
            return await wire.connect(f"{host}:{port}", security=wire.Security(token=TOKEN))
        except wire.CallFailed:
            raise
        except Exception:
            await asyncio.sleep(0.05)
    raise RuntimeError("rank 0 does not listen")


if __name__ == "__main__":
    own_port = int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        wire.run(receive(own_port))
    else:
        print(json.dumps(wire.run(send(os.environ["MASTER_ADDR"], own_port))), flush=True)
