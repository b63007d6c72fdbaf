"""A data set over nodes: `infer` beside one node after another (JSON / REST, gRPC) and beside concurrent grpc.aio.

A lab of nodes and a dispatcher, all with links of one rate. Images of random bytes lie in files; the work of all images
of a node takes 0.5 s of slept time when they are spread evenly, and their features depend on every byte. Every arm's
results are checked in the timed run. `infer` has to come within a tenth of what no arm can beat: the bytes over the
goodput that plain TCP to all nodes at once reached in this run, or the compute, whichever is longer.

    python benchmarks/scatter_gather.py --check                  # the mission's case
    python benchmarks/scatter_gather.py --case 2MB --check       # 4 nodes, images of 2 MB; also 10KB, 16
    python benchmarks/scatter_gather.py --quick --check

Needs the right to make network namespaces. Parts are kept in one result file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from _harness import RESULTS, Bar, finish
from _scatter_drive import PORTS
from wirespeed.lab import Lab, LabSpec

TOKEN = "benchmark-of-scatter-and-gather"
COMPUTE_S = 0.5
HERE = Path(__file__).parent


class Case(NamedTuple):
    """``rate`` of every link; ``rounds`` keeps a case under 150 s."""

    nodes: int
    rate: str
    images: int
    image_bytes: int
    rounds: int
    arms: tuple[str, ...] = ("sequential REST", "sequential gRPC", "concurrent gRPC", "gRPC, shares at once", "infer")


CASES = {
    "mission": Case(4, "1gbit", 1000, 100_000, 5),
    "10KB": Case(4, "1gbit", 1000, 10_000, 5),
    "2MB": Case(4, "1gbit", 200, 2_000_000, 3),
    "16": Case(16, "100mbit", 1000, 100_000, 1),
    "16-10KB": Case(16, "100mbit", 1000, 10_000, 3),
    "16-2MB": Case(16, "100mbit", 64, 2_000_000, 1),
}
QUICK = Case(4, "1gbit", 400, 100_000, 1)

MODEL = """
import time
import numpy as np
from _scatter_node import feature_of

class Model:
    def __init__(self, config):
        self.image_s = config.parameters["image_s"]

    def infer(self, inputs):
        images = inputs["image"]
        time.sleep(self.image_s * len(images))
        return {"features": np.stack([feature_of(image) for image in images])}
"""
TOML = """
schema = 1
backend = "python"
[batching]
max_rows = 16
[[input]]
name = "image"
datatype = "BYTES"
shape = []
[[output]]
name = "features"
datatype = "FP32"
shape = [512]
[parameters]
image_s = {image_s}
"""


def prepare(folder: Path, case: Case, image_s: float) -> list[str]:
    """The images and the model; gives the images' names."""
    model = folder / "models" / "images"
    model.mkdir(parents=True)
    (model / "model.py").write_text(MODEL)
    (model / "model.toml").write_text(TOML.format(image_s=image_s))
    rng = random.Random(5)
    images = folder / "images"
    images.mkdir()
    paths = []
    for place in range(case.images):
        path = images / f"{place:05}.jpg"
        path.write_bytes(rng.randbytes(case.image_bytes))
        paths.append(str(path))
    return paths


def run_case(case: Case) -> dict[str, Any]:
    """One lab, every arm in it."""
    image_s = COMPUTE_S * case.nodes / case.images
    folder = Path(tempfile.mkdtemp(prefix="scatter-"))
    try:
        paths = prepare(folder, case, image_s)
        with Lab(LabSpec.parse(f"{case.nodes + 1}x{case.rate}")) as lab:
            return drive(lab, case, folder, paths, image_s)
    finally:
        shutil.rmtree(folder)


def drive(lab: Lab, case: Case, folder: Path, paths: list[str], image_s: float) -> dict[str, Any]:
    env = {"WIRESPEED_TOKEN": TOKEN, "PYTHONPATH": str(HERE)}
    servers: list[subprocess.Popen[bytes]] = []
    addresses = []
    for host in lab.hosts[1:]:
        addresses.append(host.address)
        node = str(HERE / "_scatter_node.py")
        for kind in ("grpc", "rest", "sink"):
            command = [sys.executable, node, kind, f"{host.address}:{PORTS[kind]}", str(image_s)]
            servers.append(lab.popen(host.name, command, env=env, stdout=subprocess.PIPE))
        command = [
            sys.executable,
            "-m",
            "wirespeed",
            "serve",
            str(folder / "models"),
            "--grpc",
            "none",
            "--http",
            "none",
        ]
        command += ["--node", f"{host.address}:{PORTS['wire']}", "--json"]
        servers.append(lab.popen(host.name, command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    for server in servers:
        assert server.stdout is not None
        if not server.stdout.readline():
            raise RuntimeError("a server did not start")
    order = {
        "pids": [server.pid for server in servers],
        "addresses": addresses,
        "paths": paths,
        "token": TOKEN,
        "rounds": case.rounds,
        "arms": case.arms,
    }
    driver = lab.popen(
        "h0", [sys.executable, str(HERE / "_scatter_drive.py")], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    out, _ = driver.communicate(json.dumps(order).encode(), timeout=400)
    for server in servers:
        server.terminate()
    for server in servers:
        server.communicate(timeout=60)
    if driver.returncode != 0:
        raise RuntimeError(f"the dispatcher ended with {driver.returncode}")
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


def summarize(case: Case, told: dict[str, Any]) -> dict[str, Any]:
    """Medians of times, and of ratios within a round."""
    runs: dict[str, list[float]] = told["runs"]
    wire_s = [told["total_bytes"] / rate for rate in told["goodput_bytes_per_s"]]
    bound_s = [max(one, COMPUTE_S) for one in wire_s]
    less = [1 - i / s for i, s in zip(runs["infer"], runs["sequential gRPC"], strict=True)]
    over = [i / c for i, c in zip(runs["infer"], runs["concurrent gRPC"], strict=True)]
    at_once = [i / c for i, c in zip(runs["infer"], runs["gRPC, shares at once"], strict=True)]
    above = [i / b for i, b in zip(runs["infer"], bound_s, strict=True)]
    return {
        **case._asdict(),
        "median_cpu_s": {arm: statistics.median(times) for arm, times in told["cpu_s"].items()},
        "median_s": {arm: statistics.median(times) for arm, times in runs.items()},
        "wire_bound_s": statistics.median(wire_s),
        "compute_bound_s": COMPUTE_S,
        "goodput_bit_per_s": 8 * statistics.median(told["goodput_bytes_per_s"]),
        "less_than_sequential_grpc": statistics.median(less),
        "over_concurrent_grpc": statistics.median(over),
        "over_grpc_shares_at_once": statistics.median(at_once),
        "over_bound": statistics.median(above),
        "management_bytes": told["management_bytes"],
        "every_run_s": runs,
        "every_goodput_bytes_per_s": told["goodput_bytes_per_s"],
    }


def bars_of(name: str, result: dict[str, Any]) -> list[Bar]:
    """What a case promises."""
    return [
        Bar(f"{name}: less than sequential gRPC", result["less_than_sequential_grpc"], 0.385),
        Bar(f"{name}: over concurrent grpc.aio", result["over_concurrent_grpc"], 1.0, at_least=False),
        Bar(f"{name}: over max(wire bound, compute bound)", result["over_bound"], 1.1, at_least=False),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="hold the figures against their bars")
    parser.add_argument("--quick", action="store_true", help="under a minute; 400 images, one round, not kept")
    parser.add_argument("--case", choices=(*CASES, "all"), default="mission")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(HERE))
    chosen = {"quick": QUICK} if args.quick else CASES if args.case == "all" else {args.case: CASES[args.case]}
    held = RESULTS / "scatter_gather.json"
    results: dict[str, Any] = {}
    if not args.quick and args.out is None and held.is_file():
        results = json.loads(held.read_text()).get("results", {})
    for name, given in chosen.items():
        case = given if args.rounds is None else given._replace(rounds=args.rounds)
        what = f"{case.nodes} nodes at {case.rate}, {case.images} images of {case.image_bytes} B"
        print(f"{name}: {what}", file=sys.stderr)
        results[name] = summarize(case, run_case(case))
        for arm, median_s in results[name]["median_s"].items():
            busy_s = results[name]["median_cpu_s"][arm]
            print(f"  {arm:>22} {median_s:8.3f} s, {busy_s:.3f} s of CPU", file=sys.stderr)
        print(f"  {'wire bound':>22} {results[name]['wire_bound_s']:8.3f} s", file=sys.stderr)
    bars = [bar for name, result in results.items() for bar in bars_of(name, result)]
    finish("scatter_gather", bars, results, is_quick=args.quick, out=args.out)
    if not args.check:
        return 0
    now = [bar for name in chosen for bar in bars_of(name, results[name])]
    for bar in now:
        print(bar.line)
    return 0 if all(bar.holds for bar in now) else 1


if __name__ == "__main__":
    sys.exit(main())
