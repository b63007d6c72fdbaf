"""A long run at 70 % of what the server can do: no error, and no memory that grows.

`wirespeed serve --nodes` in front of two nodes, so that doors, routing, data plane, batching and workers take part.
The rate is 70 % of what closed-loop callers reached just before, as a Poisson process. Memory (resident, of every
process of ours) is read every few seconds; growth is the median of the last quarter over the median of the second: the
first one warms up.

    python benchmarks/soak.py --check                # 10 minutes
    python benchmarks/soak.py --seconds 120 --check
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from _harness import Bar, finish
from wirespeed import wire
from wirespeed.measure.load import LoadReport, closed_loop, open_loop
from wirespeed.serve.load_targets import open_target

SHARE = 0.7
CALLERS = 16
MODEL = "class Model:\n    def infer(self, inputs):\n        return {'y': inputs['x'] * 2}\n"
TOML = """schema = 1
backend = "python"
[batching]
max_rows = 32
[[input]]
name = "x"
datatype = "FP32"
shape = [4096]
[[output]]
name = "y"
datatype = "FP32"
shape = [4096]
"""


def start(*arguments: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A server, and its doors."""
    command = [sys.executable, "-m", "wirespeed", "serve", *arguments, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    text = ""
    while not text.endswith("}\n"):
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a server did not start")
        text += line
    return process, json.loads(text)


def resident_bytes(processes: list[subprocess.Popen[str]]) -> int:
    """Of the servers and their workers."""
    held = [psutil.Process(process.pid) for process in processes]
    every = held + [child for parent in held for child in parent.children(recursive=True)]
    return sum(process.memory_info().rss for process in every)


async def drive(
    url: str, seconds: float, processes: list[subprocess.Popen[str]]
) -> tuple[LoadReport, LoadReport, list[int]]:
    memory: list[int] = []

    async def watch() -> None:
        while True:
            memory.append(resident_bytes(processes))
            await asyncio.sleep(max(0.5, seconds / 200))

    async with open_target(url, shapes={}, num_connections=2, security=wire.Security(), timeout_s=30) as target:
        most = await closed_loop(target, concurrency=CALLERS, duration_s=min(10.0, seconds / 5))
        watching = asyncio.ensure_future(watch())
        report = await open_loop(target, rate_per_s=SHARE * most.requests_per_s, duration_s=seconds, timeout_s=30)
        watching.cancel()
    return most, report, memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="hold the figures against their bars")
    parser.add_argument("--quick", action="store_true", help="20 s; not kept")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seconds = 20.0 if args.quick else args.seconds
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="wirespeed-bench-") as held:
        (Path(held) / "double").mkdir()
        (Path(held) / "double" / "model.toml").write_text(TOML)
        (Path(held) / "double" / "model.py").write_text(MODEL)
        try:
            nodes = []
            for _ in range(2):
                process, doors = start(held, "--grpc", "none", "--http", "none", "--node", "127.0.0.1:0")
                processes.append(process)
                nodes.append(doors["node"])
            front, doors = start("--nodes", ",".join(nodes), "--grpc", "127.0.0.1:0", "--http", "none")
            processes.append(front)
            most, report, memory = wire.run(drive(f"grpc://{doors['grpc']}/double", seconds, processes))
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.communicate(timeout=60)
    quarter = len(memory) // 4
    growth = statistics.median(memory[-quarter:]) / statistics.median(memory[quarter : 2 * quarter])
    results = {
        "seconds": seconds,
        "closed_loop_per_s": most.requests_per_s,
        "offered_per_s": report.offered_per_s,
        "answered_per_s": report.requests_per_s,
        "num_ok": report.num_ok,
        "num_failed": report.num_failed,
        "failures": report.failures,
        "p50_s": report.latency_p50_s,
        "p99_s": report.latency_p99_s,
        "max_s": report.latency_max_s,
        "memory_bytes": memory,
        "memory_growth": growth,
    }
    told = {key: value for key, value in results.items() if key != "memory_bytes"}
    print(json.dumps(told, indent=1), file=sys.stderr)
    bars = [
        Bar("requests that failed", report.num_failed, 0, at_least=False),
        Bar("requests answered over offered", report.requests_per_s / (report.offered_per_s or 1.0), 0.98),
        Bar("memory, last quarter over second", growth, 1.02, at_least=False),
    ]
    return finish("soak", bars, results, check=args.check, is_quick=args.quick, out=args.out)


if __name__ == "__main__":
    sys.exit(main())
