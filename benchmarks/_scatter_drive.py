"""The dispatcher's side of benchmarks/scatter_gather.py, inside the lab: every arm in turn, every result checked.

Reads one JSON order on stdin, prints one JSON line. The images lie in files, which all arms read; connections are made,
and every arm has run once on a few images, before its clock starts. ``infer`` is the product as its command runs it:
reading, scattering, gathering, and the Parquet file, whose rows are then read back and checked.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from _scatter_node import DIMENSIONS, SERVICE, UNLIMITED, feature_of, join
from wirespeed import wire

PORTS = {"wire": 7000, "grpc": 7001, "rest": 7002, "sink": 7003}
IN_FLIGHT = 8
"""Images under way on each node of the concurrent arm: more make it slower here, fewer too."""


def shares(paths: list[Path], num_nodes: int) -> list[list[Path]]:
    """One stretch of the images for each node."""
    bounds = [len(paths) * place // num_nodes for place in range(num_nodes + 1)]
    return [paths[bounds[i] : bounds[i + 1]] for i in range(num_nodes)]


def check(features: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], arm: str) -> None:
    if features.shape != expected.shape or not np.array_equal(features, expected):
        raise AssertionError(f"{arm}: wrong features")


def rest(addresses: list[str], paths: list[Path]) -> np.ndarray[Any, Any]:
    """One node after another over JSON / REST: a node's whole share in one request."""
    found = []
    for address, share in zip(addresses, shares(paths, len(addresses)), strict=True):
        body = json.dumps({"images": [base64.b64encode(path.read_bytes()).decode() for path in share]})
        connection = http.client.HTTPConnection(address, PORTS["rest"], timeout=120)
        connection.request("POST", "/", body, {"content-type": "application/json"})
        found.append(np.array(json.loads(connection.getresponse().read())["features"], np.float32))
        connection.close()
    return np.concatenate(found)


async def grpc_sequential(methods: list[Any], paths: list[Path]) -> np.ndarray[Any, Any]:
    """One node after another over gRPC: a node's whole share in one message."""
    found = []
    for method, share in zip(methods, shares(paths, len(methods)), strict=True):
        found.append(await method(join([path.read_bytes() for path in share]), timeout=120))
    return np.frombuffer(b"".join(found), np.float32).reshape(-1, DIMENSIONS)


async def grpc_concurrent(methods: list[Any], paths: list[Path]) -> np.ndarray[Any, Any]:
    """All nodes at once over grpc.aio, image by image, IN_FLIGHT of them on each node."""
    found = np.empty((len(paths), DIMENSIONS), np.float32)
    left = iter(enumerate(paths))

    async def caller(method: Any) -> None:
        for place, path in left:
            found[place] = np.frombuffer(await method(join([path.read_bytes()]), timeout=120), np.float32)

    await asyncio.gather(*(caller(method) for method in methods for _ in range(IN_FLIGHT)))
    return found


async def grpc_shares_at_once(methods: list[Any], paths: list[Path]) -> np.ndarray[Any, Any]:
    """All nodes at once over grpc.aio, each its whole share in one message."""

    async def one(method: Any, share: list[Path]) -> bytes:
        return await method(join([path.read_bytes() for path in share]), timeout=120)

    parts = await asyncio.gather(*(one(m, s) for m, s in zip(methods, shares(paths, len(methods)), strict=True)))
    return np.frombuffer(b"".join(parts), np.float32).reshape(-1, DIMENSIONS)


async def infer(nodes: list[str], paths: list[Path], folder: Path, token: str) -> tuple[float, dict[str, Any]]:
    """The product, from the list of files to the finished Parquet file; reading it back is not timed."""
    import pyarrow.parquet as pq

    from wirespeed.infer.crew import RemoteCrew
    from wirespeed.infer.inputs import Item
    from wirespeed.infer.job import Job, JobOptions

    out = folder / "results.parquet"
    out.unlink(missing_ok=True)
    crew = RemoteCrew(nodes, model="images", encoding="fp32", security=wire.Security(token=token))
    job = Job([Item(str(path), str(path)) for path in paths], crew, out, JobOptions())
    begin_s = time.perf_counter()
    summary = await job.run()
    took_s = time.perf_counter() - begin_s
    table = pq.read_table(out)
    if table["key"].to_pylist() != [str(path) for path in paths] or table["error"].null_count != len(paths):
        raise AssertionError("infer: wrong rows")
    values = table["features"].combine_chunks().flatten().to_numpy().reshape(-1, DIMENSIONS)
    return took_s, {"features": values, "management_bytes": summary.management_bytes, "per_node": summary.per_node}


def goodput(addresses: list[str], num_bytes: int) -> float:
    """Bytes per second of plain TCP from here to all nodes at once."""
    block = memoryview(bytes(1 << 18))
    share = num_bytes // len(addresses)
    faults: list[BaseException] = []

    def send(stream: socket.socket) -> None:
        try:
            stream.sendall(struct.pack("<Q", share))
            left = share
            while left:
                left -= stream.send(block[: min(left, len(block))])
            assert stream.recv(1) == b".", "the sink did not get every byte"
        except BaseException as fault:
            faults.append(fault)

    streams = [socket.create_connection((address, PORTS["sink"]), timeout=120) for address in addresses]
    begin_s = time.perf_counter()
    threads = [threading.Thread(target=send, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - begin_s
    for stream in streams:
        stream.close()
    if faults:
        raise faults[0]
    return share * len(addresses) / took_s


def cpu_s(pids: list[int]) -> float:
    """CPU time of processes, their children and this one."""
    held = [psutil.Process(pid) for pid in pids]
    every = [psutil.Process(), *held, *(child for parent in held for child in parent.children(recursive=True))]
    return sum(sum(process.cpu_times()[:2]) for process in every)


async def drive(order: dict[str, Any]) -> dict[str, Any]:
    import grpc

    addresses: list[str] = order["addresses"]
    paths = [Path(path) for path in order["paths"]]
    expected = np.stack([feature_of(path.read_bytes()) for path in paths])
    few, few_expected = paths[: 2 * len(addresses)], expected[: 2 * len(addresses)]
    channels = [grpc.aio.insecure_channel(f"{a}:{PORTS['grpc']}", options=UNLIMITED) for a in addresses]
    methods = [channel.unary_unary(f"/{SERVICE}/Run") for channel in channels]
    nodes = [f"{address}:{PORTS['wire']}" for address in addresses]
    runs: dict[str, list[float]] = {arm: [] for arm in order["arms"]}
    rates: list[float] = []
    management: list[int] = []
    busy: dict[str, list[float]] = {arm: [] for arm in order["arms"]}
    total = sum(path.stat().st_size for path in paths)
    arms: dict[str, Callable[[list[Path]], Any]] = {
        "sequential gRPC": lambda chosen: grpc_sequential(methods, chosen),
        "concurrent gRPC": lambda chosen: grpc_concurrent(methods, chosen),
        "gRPC, shares at once": lambda chosen: grpc_shares_at_once(methods, chosen),
    }
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for round_ in range(-1, order["rounds"]):
            chosen, right = (few, few_expected) if round_ < 0 else (paths, expected)
            for arm in order["arms"]:
                before_s, begin_s = cpu_s(order["pids"]), time.perf_counter()
                if arm == "infer":
                    took_s, told = await infer(nodes, chosen, folder, order["token"])
                    features = told["features"]
                    management.append(told["management_bytes"])
                elif arm == "sequential REST":
                    features = await asyncio.get_running_loop().run_in_executor(None, rest, addresses, chosen)
                    took_s = time.perf_counter() - begin_s
                else:
                    features = await arms[arm](chosen)
                    took_s = time.perf_counter() - begin_s
                check(features, right, arm)
                if round_ >= 0:
                    runs[arm].append(took_s)
                    busy[arm].append(cpu_s(order["pids"]) - before_s)
                    print(f"  {arm}: {took_s:.3f} s", file=sys.stderr, flush=True)
            if round_ >= 0:
                rates.append(
                    await asyncio.get_running_loop().run_in_executor(None, goodput, addresses, min(total, 10**8))
                )
    for channel in channels:
        await channel.close()
    return {
        "runs": runs,
        "cpu_s": busy,
        "goodput_bytes_per_s": rates,
        "total_bytes": total,
        "management_bytes": management,
    }


if __name__ == "__main__":
    print(json.dumps(wire.run(drive(json.load(sys.stdin)))), flush=True)
