"""The dispatcher's side of benchmarks/scatter_gather.py, inside the lab: every arm in turn, every result checked.

Reads one JSON order on stdin, prints one JSON line. Every arm does the same job on the same clock: from the list of
image files, over connections that it makes, to a Parquet file of keys and features, whose rows are then read back and
checked, untimed. What the peers' file costs is in their favour: one call of pyarrow, no journal, no fsync. Every arm
has run once on a few images, so that modules are loaded, before its clock starts.
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


async def over_grpc(arm: Callable[..., Any], addresses: list[str], paths: list[Path]) -> np.ndarray[Any, Any]:
    """One of the arms above, over connections of its own."""
    import grpc

    channels = [grpc.aio.insecure_channel(f"{a}:{PORTS['grpc']}", options=UNLIMITED) for a in addresses]
    try:
        features: np.ndarray[Any, Any] = await arm([c.unary_unary(f"/{SERVICE}/Run") for c in channels], paths)
        return features
    finally:
        for channel in channels:
            await channel.close()


def write_features(out: Path, paths: list[Path], features: np.ndarray[Any, Any]) -> None:
    """A peer's result file, as one would write it by hand."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), DIMENSIONS)
    table = pa.table({"key": [str(path) for path in paths], "features": column})
    pq.write_table(table, out, compression="none", use_dictionary=False)


def read_features(out: Path, paths: list[Path]) -> np.ndarray[Any, Any]:
    """What a result file holds, after a look at its keys and errors."""
    import pyarrow.parquet as pq

    table = pq.read_table(out)
    if table["key"].to_pylist() != [str(path) for path in paths]:
        raise AssertionError("wrong rows")
    if "error" in table.column_names and table["error"].null_count != len(paths):
        raise AssertionError("error rows")
    values: np.ndarray[Any, Any] = table["features"].combine_chunks().flatten().to_numpy().reshape(-1, DIMENSIONS)
    return values


async def infer(nodes: list[str], paths: list[Path], out: Path, token: str) -> int:
    """The product, as its command runs it. Gives the bytes of its management traffic."""
    from wirespeed.infer.crew import RemoteCrew
    from wirespeed.infer.inputs import Item
    from wirespeed.infer.job import Job, JobOptions

    crew = RemoteCrew(nodes, model="images", encoding="fp32", security=wire.Security(token=token))
    summary = await Job([Item(str(path), str(path)) for path in paths], crew, out, JobOptions()).run()
    return summary.management_bytes


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
    addresses: list[str] = order["addresses"]
    paths = [Path(path) for path in order["paths"]]
    expected = np.stack([feature_of(path.read_bytes()) for path in paths])
    few, few_expected = paths[: 2 * len(addresses)], expected[: 2 * len(addresses)]
    nodes = [f"{address}:{PORTS['wire']}" for address in addresses]
    runs: dict[str, list[float]] = {arm: [] for arm in order["arms"]}
    rates: list[float] = []
    management: list[int] = []
    busy: dict[str, list[float]] = {arm: [] for arm in order["arms"]}
    total = sum(path.stat().st_size for path in paths)
    over = {
        "sequential gRPC": grpc_sequential,
        "concurrent gRPC": grpc_concurrent,
        "gRPC, shares at once": grpc_shares_at_once,
    }
    with tempfile.TemporaryDirectory() as text:
        out = Path(text) / "results.parquet"
        for round_ in range(-1, order["rounds"]):
            chosen, right = (few, few_expected) if round_ < 0 else (paths, expected)
            for arm in order["arms"]:
                out.unlink(missing_ok=True)
                before_s, begin_s = cpu_s(order["pids"]), time.perf_counter()
                if arm == "infer":
                    management.append(await infer(nodes, chosen, out, order["token"]))
                elif arm == "sequential REST":
                    features = await asyncio.get_running_loop().run_in_executor(None, rest, addresses, chosen)
                    write_features(out, chosen, features)
                else:
                    write_features(out, chosen, await over_grpc(over[arm], addresses, chosen))
                took_s = time.perf_counter() - begin_s
                features = read_features(out, chosen)
                check(features, right, arm)
                if round_ >= 0:
                    runs[arm].append(took_s)
                    busy[arm].append(cpu_s(order["pids"]) - before_s)
                    print(f"  {arm}: {took_s:.3f} s", file=sys.stderr, flush=True)
            if round_ >= 0:
                rates.append(
                    await asyncio.get_running_loop().run_in_executor(None, goodput, addresses, min(total, 10**8))
                )
    return {
        "runs": runs,
        "cpu_s": busy,
        "goodput_bytes_per_s": rates,
        "total_bytes": total,
        "management_bytes": management,
    }


if __name__ == "__main__":
    print(json.dumps(wire.run(drive(json.load(sys.stdin)))), flush=True)
