"""The data plane beside a bare grpc.aio echo and a raw uvloop framed echo: requests per second between two processes.

Client and server are two processes on loopback; every arm sends the same bytes, with the same number of requests under
way, and every answer is checked. Two processes of one host share memory for large messages, unless told not to: that
arm ("by socket") is what they do between hosts, and stands beside. grpc.aio carries raw bytes (no protobuf), with
messages of any size allowed. The raw echo is the floor: one length field, no checks, no deadlines, no credit, callbacks
instead of futures, buffers reused.

    python benchmarks/data_plane.py --check
    python benchmarks/data_plane.py --quick --check

With the right to make network namespaces the goodput of 1 MB messages over a link of 1 Gbit/s is measured too (--lab),
against plain TCP on that link in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from _harness import Bar, finish
from wirespeed import wire

SIZES = {"100 B": (100, 64), "100 KB": (100_000, 8), "1 MB": (1_000_000, 4), "16 MB": (16_000_000, 2)}
METHOD = "/bench.Echo/Echo"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def is_echo(got: bytes | memoryview, payload: bytes) -> bool:
    """Whether an answer is the payload, by its length and three slices.

    A whole comparison of a view takes longer than the echo; ``check_whole`` does it once per run.
    """
    middle = len(payload) // 2
    return (
        len(got) == len(payload)
        and bytes(got[:32]) == payload[:32]
        and bytes(got[middle : middle + 32]) == payload[middle : middle + 32]
        and bytes(got[-32:]) == payload[-32:]
    )


def check_whole(got: bytes | memoryview, payload: bytes) -> None:
    if bytes(got) != payload:
        raise AssertionError("a wrong echo")


# --- the raw floor: u32 length, payload


class RawEcho(asyncio.BufferedProtocol):
    """Frames of u32 length and payload, received into one preallocated buffer."""

    def __init__(self, capacity: int, on_frame: Callable[[asyncio.Transport, memoryview], None]) -> None:
        self.buffer = memoryview(bytearray(max(4 * (capacity + 4), 1 << 18)))
        self.start = self.end = 0
        self.on_frame = on_frame
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """See asyncio.BufferedProtocol."""
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        if self.start == self.end:
            self.start = self.end = 0
        elif self.end > len(self.buffer) // 2:
            rest = self.end - self.start
            self.buffer[:rest] = self.buffer[self.start : self.end]
            self.start, self.end = 0, rest
        return self.buffer[self.end :]

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        self.end += nbytes
        while self.end - self.start >= 4:
            stop = self.start + 4 + int.from_bytes(self.buffer[self.start : self.start + 4], "little")
            if stop > self.end:
                return
            self.on_frame(self.transport, self.buffer[self.start : stop])
            self.start = stop

    def eof_received(self) -> bool:
        """See asyncio.BufferedProtocol."""
        return False


async def serve_raw(capacity: int, ready: Any) -> None:
    def echo(transport: Any, frame: memoryview) -> None:
        transport.write(bytes(frame))  # the buffer is used again before the transport is done with it

    server = await asyncio.get_running_loop().create_server(lambda: RawEcho(capacity, echo), "127.0.0.1", 0)
    ready.send(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


async def drive_raw(port: int, payload: bytes, depth: int, seconds: float) -> tuple[int, float]:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[float] = loop.create_future()
    frame = struct.pack("<I", len(payload)) + payload
    state = {"sent": depth, "got": 0}
    begin = time.perf_counter()
    clock = time.perf_counter

    def take(transport: Any, got: memoryview) -> None:
        if not is_echo(got[4:], payload):
            raise AssertionError("a wrong echo")
        if not state["got"]:
            check_whole(got[4:], payload)
        state["got"] += 1
        now = clock()
        if now - begin < seconds:
            state["sent"] += 1
            transport.write(frame)
        elif state["got"] == state["sent"] and not done.done():
            done.set_result(now)

    transport, _ = await loop.create_connection(lambda: RawEcho(len(payload), take), "127.0.0.1", port)
    begin = clock()
    for _ in range(depth):
        transport.write(frame)
    end = await done
    transport.close()
    return state["got"], end - begin


# --- the two arms


async def serve_wire(_: int, ready: Any, limits: wire.Limits | None = None) -> None:
    async with await wire.listen("127.0.0.1:0", {"echo": lambda request: request.payload}, limits=limits) as server:
        ready.send(int(server.address.rpartition(":")[2]))
        await asyncio.Event().wait()


async def drive_wire(
    port: int, payload: bytes, depth: int, seconds: float, limits: wire.Limits | None = None
) -> tuple[int, float]:
    async with await wire.connect(f"127.0.0.1:{port}", limits=limits) as connection:
        check_whole((await connection.call("echo", payload, timeout_s=30)).payload, payload)

        async def call() -> bool:
            return is_echo((await connection.call_soon("echo", payload, timeout_s=30)).payload, payload)

        return await closed_loop(call, depth, seconds)


SOCKETS = wire.Limits(segment_bytes=0)


async def serve_sockets(size: int, ready: Any) -> None:
    await serve_wire(size, ready, SOCKETS)


async def drive_sockets(port: int, payload: bytes, depth: int, seconds: float) -> tuple[int, float]:
    return await drive_wire(port, payload, depth, seconds, SOCKETS)


async def serve_grpc(_: int, ready: Any) -> None:
    import grpc

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server(options=UNLIMITED)
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready.send(port)
    await asyncio.Event().wait()


async def drive_grpc(port: int, payload: bytes, depth: int, seconds: float) -> tuple[int, float]:
    import grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED) as channel:
        method = channel.unary_unary(METHOD)

        check_whole(await method(payload, timeout=30), payload)

        async def call() -> bool:
            return is_echo(await method(payload, timeout=30), payload)

        return await closed_loop(call, depth, seconds)


async def closed_loop(call: Callable[[], Awaitable[bool]], depth: int, seconds: float) -> tuple[int, float]:
    begin = time.perf_counter()

    async def worker() -> int:
        count = 0
        while time.perf_counter() - begin < seconds:
            if not await call():
                raise AssertionError("a wrong echo")
            count += 1
        return count

    counts = await asyncio.gather(*(worker() for _ in range(depth)))
    return sum(counts), time.perf_counter() - begin


ARMS: dict[str, tuple[Any, Any]] = {
    "wire": (serve_wire, drive_wire),
    "wire by socket": (serve_sockets, drive_sockets),
    "grpc.aio": (serve_grpc, drive_grpc),
    "raw uvloop": (serve_raw, drive_raw),
}


def serve(arm: str, size: int, ready: Any) -> None:
    wire.run(ARMS[arm][0](size, ready))


def measure(sizes: dict[str, tuple[int, int]], rounds: int, seconds: float) -> dict[str, Any]:
    """Requests per second of every arm at every size, arms in turn."""
    context = multiprocessing.get_context("spawn")
    results: dict[str, Any] = {}
    for name, (size, depth) in sizes.items():
        payload = os.urandom(size)
        servers, ports = {}, {}
        for arm in ARMS:
            ours, theirs = context.Pipe()
            servers[arm] = context.Process(target=serve, args=(arm, size, theirs), daemon=True)
            servers[arm].start()
            if not ours.poll(60):
                raise RuntimeError(f"the server of {arm} did not start")
            ports[arm] = ours.recv()
        rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
        cpu_s: dict[str, list[float]] = {arm: [] for arm in ARMS}
        try:
            for round_ in range(-1, rounds):
                for arm in ARMS:
                    cpu = time.process_time()
                    count, took = wire.run(ARMS[arm][1](ports[arm], payload, depth, seconds if round_ >= 0 else 0.2))
                    if round_ >= 0:
                        rates[arm].append(count / took)
                        cpu_s[arm].append((time.process_time() - cpu) / count)
        finally:
            for process in servers.values():
                process.terminate()
                process.join(10)
        # Ratios of one round, so that a disturbance hits both sides of each.
        results[name] = {
            "size_bytes": size,
            "in_flight": depth,
            "requests_per_s": {arm: statistics.median(rates[arm]) for arm in ARMS},
            "client_cpu_us": {arm: statistics.median(cpu_s[arm]) * 1e6 for arm in ARMS},
            "over_grpc": statistics.median(w / g for w, g in zip(rates["wire"], rates["grpc.aio"], strict=True)),
            "over_raw": statistics.median(w / r for w, r in zip(rates["wire"], rates["raw uvloop"], strict=True)),
            "socket_over_raw": statistics.median(
                w / r for w, r in zip(rates["wire by socket"], rates["raw uvloop"], strict=True)
            ),
            "every_run": rates,
        }
        told = "  ".join(f"{arm} {results[name]['requests_per_s'][arm]:>9,.0f}/s" for arm in ARMS)
        print(
            f"{name:>7}  {told}  {results[name]['over_grpc']:.2f}x grpc  {results[name]['over_raw']:.2f}x raw",
            file=sys.stderr,
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="hold the figures against their bars")
    parser.add_argument("--quick", action="store_true", help="under a minute; no lab")
    parser.add_argument("--lab", action="store_true", help="only the goodput over a link of 1 Gbit/s")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    bars: list[Bar] = []
    if not args.lab:
        results["loopback"] = measure(SIZES, 3 if args.quick else 7, 0.5 if args.quick else 2.0)
        held = results["loopback"]
        bars += [Bar(f"{n}: requests/s over grpc.aio", held[n]["over_grpc"], 4.0) for n in ("100 KB", "1 MB")]
        bars += [Bar(f"{n}: requests/s over the raw echo", held[n]["over_raw"], 0.8) for n in SIZES]
    if not args.quick:
        from _link import goodput

        results["lab"] = goodput()
        bars.append(Bar("1 Gbit/s: goodput over plain TCP's", results["lab"]["share"], 0.98))
    return finish("data_plane", bars, results, check=args.check, is_quick=args.quick, out=args.out)


if __name__ == "__main__":
    sys.exit(main())
