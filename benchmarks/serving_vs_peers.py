"""`wirespeed serve` beside MLServer, LitServe, BentoML, Ray Serve and Triton: the same models, requests and callers.

Each peer is measured against wirespeed in turn, round by round, with only those two servers up; figures are ratios of
one round. Every server is driven by the same closed loop at 1, 8 and 32 callers, each over what is fastest for it: Open
Inference Protocol v2 over gRPC (wirespeed, Triton, MLServer), kept HTTP connections (the others; BentoML takes arrays
from outside as JSON only). Every answer is checked. CPU per request and memory (PSS of the server's processes) are
stated beside.

`identity` gives its 16 KiB back; `features` takes 100 KB and gives 2 KB; `timed` sleeps 5 ms + 0.1 ms per row, at most
32 rows. Every peer lives in an environment of its own under .bench-envs/ (--install makes them; Triton needs a Python
with a shared library, such as Debian's). A peer that does not start is an error, unless it was left out by --peers.

    python benchmarks/serving_vs_peers.py --install
    python benchmarks/serving_vs_peers.py --check
    python benchmarks/serving_vs_peers.py --peers litserve,mlserver --join out/peers.json     # in parts: each within
    python benchmarks/serving_vs_peers.py --peers triton --join out/peers.json --check        # two minutes or so
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from _harness import Bar, finish
from _serving_models import FIXED_S, ITEMS, MAX_DELAY_S, MAX_ROWS, MODELS, PER_ROW_S
from wirespeed import wire
from wirespeed.measure.load import closed_loop
from wirespeed.serve.client import InferenceClient, encode_request
from wirespeed.serve.tensors import from_array

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent / ".bench-envs"
CALLERS = (1, 8, 32)
DATATYPES = {"float32": "FP32", "uint8": "UINT8"}
START_S = 90.0
TOML = """schema = 1
backend = "python"
[batching]
max_rows = {rows}
max_delay = "{delay_ms:g} ms"
[[input]]
name = "x"
datatype = "{datatype}"
shape = [{width}]
[[output]]
name = "y"
datatype = "FP32"
shape = [{out}]
"""


MODEL = """from _serving_models import MODELS


class Model:
    def infer(self, inputs):
        return {{"y": MODELS["{name}"](inputs["x"])}}
"""


class Peer(NamedTuple):
    """``packages``: what pip is given. ``door``: how it is spoken to."""

    packages: tuple[str, ...]
    door: str
    environment: str


PEERS = {
    # Its event loop policy is gone from newer uvloops.
    "mlserver": Peer(("mlserver==1.7.1", "uvloop<0.22"), "grpc", "mlserver"),
    "litserve": Peer(("litserve==0.2.19", "numpy"), "http", "litserve"),
    # Its binary bodies are for its own services only: from outside it takes JSON.
    "bentoml": Peer(("bentoml==1.4.40", "numpy"), "json", "bentoml"),
    "ray": Peer(("ray[serve]==2.60.0", "numpy"), "http", "ray"),
    "triton": Peer(("nvidia-pytriton==0.7.0",), "grpc", "pytriton"),
}


# --- requests


class Wanted(NamedTuple):
    """A request of one model, and what its answer holds somewhere, byte for byte."""

    model: str
    array: np.ndarray[Any, Any]
    tail: bytes


def wanted(model: str) -> Wanted:
    datatype, width, _ = ITEMS[model]
    rng = np.random.default_rng(7)
    array = rng.random((1, width), np.float32) if datatype == "float32" else rng.integers(0, 256, (1, width), np.uint8)
    answer = array if model == "timed" else MODELS[model](array)
    return Wanted(model, array, np.ascontiguousarray(answer, np.float32).tobytes())


class HttpConnections:
    """HTTP/1.1 to one server, one kept connection per call under way. As little as such a client can do."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, request: bytes) -> bytes:
        """The body of the answer to a whole request. Raises RuntimeError for any status but 200."""
        host, _, port = self._address.rpartition(":")
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection(host, int(port), limit=2**22)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        sizes = [line for line in lines if line.startswith(b"content-length:")]
        if sizes:
            body = await reader.readexactly(int(sizes[0].split(b":")[1]))
        elif b"transfer-encoding: chunked" in lines:
            body = b""
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        else:
            raise RuntimeError(f"an answer without a length: {head!r}")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{lines[0].decode()}: {body[:200].decode(errors='replace')}")
        self._free.append((reader, writer))
        return body

    async def close(self) -> None:
        """Close what is kept."""
        for _, writer in self._free:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def asking(door: str, address: str, want: Wanted) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """One checked request, over connections of its own."""
    if door == "grpc":
        message = encode_request(want.model, [from_array("x", want.array)])
        async with InferenceClient(address, num_connections=1, num_retries=0) as client:

            async def ask() -> None:
                if want.tail not in await client.infer_raw(message):
                    raise AssertionError("a wrong answer")

            yield ask
        return
    kind = "octet-stream" if door == "http" else "json"
    body = want.array.tobytes() if door == "http" else json.dumps({"x": want.array.tolist()}).encode()
    head = f"POST /{want.model} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/{kind}\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    connections = HttpConnections(address)

    async def ask_http() -> None:
        if want.tail not in await connections.post(request):
            raise AssertionError("a wrong answer")

    right: list[bytes] = []

    async def ask_json() -> None:
        answer = await connections.post(request)
        if not right and json.loads(answer) == [np.frombuffer(want.tail, np.float32).tolist()]:
            right.append(answer)
        if answer not in right:
            raise AssertionError("a wrong answer")

    try:
        yield ask_http if door == "http" else ask_json
    finally:
        await connections.close()


async def drive(door: str, address: str, want: Wanted, callers: int, seconds: float) -> dict[str, float]:
    async with asking(door, address, want) as ask:
        report = await closed_loop(ask, concurrency=callers, duration_s=seconds, warmup_s=min(0.5, seconds))
    if report.num_failed or report.latency_p99_s is None or report.latency_p50_s is None:
        raise RuntimeError(f"{address}: {report.num_failed} requests failed: {report.failures}")
    return {"per_s": report.requests_per_s, "p50_s": report.latency_p50_s, "p99_s": report.latency_p99_s}


# --- servers


def free_ports(count: int) -> int:
    """The first of so many TCP ports in a row that are free at this moment."""
    while True:
        with contextlib.ExitStack() as held:
            first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for place in range(1, count):
                    held.enter_context(socket.create_server(("127.0.0.1", first + place)))
            except (OSError, OverflowError):
                continue
            return int(first)


class Running(NamedTuple):
    """A server that answers."""

    door: str
    address: str
    process: subprocess.Popen[Any]

    def family(self) -> list[psutil.Process]:
        """Its processes."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def cpu_s(self) -> float:
        """CPU time of all of them so far."""
        found = 0.0
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += sum(process.cpu_times()[:2])
        return found

    def memory_bytes(self) -> int:
        """Memory of all of them, each shared page counted once."""
        found = 0
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                found += process.memory_full_info().pss
        return found


@contextmanager
def ours(folder: Path) -> Iterator[Running]:
    for name, (datatype, width, out) in ITEMS.items():
        (folder / name).mkdir()
        settings = {"rows": MAX_ROWS, "delay_ms": MAX_DELAY_S * 1e3, "width": width, "out": out}
        (folder / name / "model.toml").write_text(TOML.format(datatype=DATATYPES[datatype], **settings))
        (folder / name / "model.py").write_text(MODEL.format(name=name))
    command = [sys.executable, "-m", "wirespeed", "serve", str(folder), "--grpc", "127.0.0.1:0", "--http", "none"]
    command.append("--json")
    with serving(command, {"PYTHONPATH": str(HERE)}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("wirespeed serve ended")
            text += line
        yield Running("grpc", json.loads(text)["grpc"], process)


def interpreter(name: str) -> tuple[str, dict[str, str]]:
    """The peer's Python, and what its environment needs."""
    own = ENVIRONMENTS / PEERS[name].environment
    python = own / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{name} is not installed; expected {own}; hint: benchmarks/serving_vs_peers.py --install")
    if name != "triton":
        return str(python), {}
    # Triton's Python backend loads libpython; an interpreter that was built without one borrows the system's.
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    system = Path(f"/usr/bin/python{version}")
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") and system.exists():
        return str(system), {
            "PYTHONPATH": str(own / "lib" / f"python{version}" / "site-packages"),
            "PYTHONNOUSERSITE": "1",
        }
    return str(python), {}


@contextmanager
def peer(name: str, folder: Path) -> Iterator[Running]:
    python, env = interpreter(name)
    port = free_ports(3)
    log = folder / "log.txt"
    command = [python, str(HERE / "_serving_peer.py"), name, str(port), str(folder)]
    quiet = {"BENTOML_DO_NOT_TRACK": "True", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "HOME": str(folder)}
    with log.open("w") as stream, serving(command, env | quiet, stdout=stream, stderr=subprocess.STDOUT) as process:
        running = Running(PEERS[name].door, f"127.0.0.1:{port}", process)
        wait_ready(name, running, log)
        yield running


@contextmanager
def serving(command: list[str], env: dict[str, str], **streams: Any) -> Iterator[subprocess.Popen[Any]]:
    """A server in a session of its own, with which all of its processes end."""
    search = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(HERE)]))
    process = subprocess.Popen(
        command, env={**os.environ, **env, "PYTHONPATH": search}, text=True, start_new_session=True, **streams
    )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            family = [*parent.children(recursive=True), parent]
            process.terminate()
            _, left = psutil.wait_procs(family, timeout=15)
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        process.wait(30)


def wait_ready(name: str, running: Running, log: Path) -> None:
    """Until every model gives a right answer."""
    end_s, problem = time.monotonic() + START_S, ""
    for model in ITEMS:
        while True:
            if running.process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"{name} does not start: {problem}\n{log.read_text()[-3000:]}")
            try:
                wire.run(once(running, wanted(model)))
                break
            except Exception as fault:
                problem = f"{type(fault).__name__}: {fault}"
                time.sleep(0.3)


async def once(running: Running, want: Wanted) -> None:
    async with asyncio.timeout(5), asking(running.door, running.address, want) as ask:
        await ask()


# --- the comparison


def compare(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """wirespeed and one peer, in turn."""
    found: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="wirespeed-peers-"))
    try:
        for part in ("ours", "peer"):
            (folder / part).mkdir()
        with ours(folder / "ours") as mine, peer(name, folder / "peer") as other:
            arms = {"wirespeed": mine, name: other}
            for model in ITEMS:
                want, found[model] = wanted(model), {}
                for callers in CALLERS:
                    found[model][str(callers)] = row = one_row(arms, want, callers, rounds, seconds)
                    told = "  ".join(
                        f"{arm} {row['per_s'][arm]:7.0f}/s p99 {row['p99_s'][arm] * 1e3:6.1f} ms" for arm in arms
                    )
                    print(f"{model:>9} {callers:>2}  {told}  {row['rate_ratio']:.2f}x", file=sys.stderr, flush=True)
            found["memory_bytes"] = {arm: running.memory_bytes() for arm, running in arms.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def one_row(arms: dict[str, Running], want: Wanted, callers: int, rounds: int, seconds: float) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm, running in arms.items():
            cpu_s = running.cpu_s()
            told = wire.run(drive(running.door, running.address, want, callers, seconds))
            # The warm-up is of the same length as far as it is shorter than half a second.
            told["cpu_s_per_request"] = (running.cpu_s() - cpu_s) / (told["per_s"] * (seconds + min(0.5, seconds)))
            runs[arm].append(told)
    mine, theirs = (runs[arm] for arm in arms)
    columns = ("per_s", "p50_s", "p99_s", "cpu_s_per_request")
    return {
        **{key: {arm: statistics.median(run[key] for run in held) for arm, held in runs.items()} for key in columns},
        "rate_ratio": statistics.median(m["per_s"] / t["per_s"] for m, t in zip(mine, theirs, strict=True)),
        "p99_ratio": statistics.median(m["p99_s"] / t["p99_s"] for m, t in zip(mine, theirs, strict=True)),
        "every_run": runs,
    }


def bars_of(results: dict[str, Any]) -> list[Bar]:
    """What is promised, against the best of the peers that were measured."""
    bars = []
    for model, least in (("identity", 1.25), ("features", 1.1), ("timed", 1.5)):
        for callers in map(str, CALLERS):
            rows = {name: found[model][callers] for name, found in results.items()}
            best = min(rows, key=lambda name: float(rows[name]["rate_ratio"]))
            slow = max(rows, key=lambda name: float(rows[name]["p99_ratio"]))
            if model == "timed" and callers == "1":
                ideal_s = FIXED_S + PER_ROW_S
                over = statistics.median(1 / row["per_s"]["wirespeed"] / ideal_s for row in rows.values())
                bars.append(Bar("timed, 1 caller: time over the ideal 5.1 ms", over, 1.15, at_least=False))
                continue
            many = f"{callers} caller{'s' if callers != '1' else ''}"
            bars.append(Bar(f"{model}, {many}: requests/s over {best}, the best", rows[best]["rate_ratio"], least))
            if model != "timed":
                bars.append(
                    Bar(f"{model}, {many}: p99 over {slow}'s, the lowest", rows[slow]["p99_ratio"], 1.0, at_least=False)
                )
    return bars


def install(names: list[str]) -> int:
    """Make the environments that are not there; 0 where all are."""
    failed = []
    for name in names:
        own = ENVIRONMENTS / PEERS[name].environment
        python = own / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(own)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEERS[name].packages]
        print(" ".join(command), file=sys.stderr, flush=True)
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"not installed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print one line per bar, and exit 1 if one is short")
    parser.add_argument("--quick", action="store_true", help="two peers, two short rounds; not kept")
    parser.add_argument("--install", action="store_true", help="make the peers' environments, and do nothing else")
    parser.add_argument("--peers", help=f"some of {','.join(PEERS)}")
    parser.add_argument("--join", type=Path, metavar="FILE", help="take up the peers that FILE holds, and add these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="of every run, after half a second or less of warm-up"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = (args.peers or ("litserve,mlserver" if args.quick else ",".join(PEERS))).split(",")
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        parser.error(f"got peers {', '.join(unknown)}; expected some of {', '.join(PEERS)}")
    if args.install:
        return install(names)
    results: dict[str, Any] = {}
    if args.join is not None and args.join.is_file():
        results = json.loads(args.join.read_text())["results"]
    rounds, seconds = (2, 0.5) if args.quick else (args.rounds, args.seconds)
    for name in names:
        print(f"beside {name}", file=sys.stderr, flush=True)
        results[name] = compare(name, rounds, seconds)
        if args.join is not None:  # a later part that fails leaves this one
            finish("serving_vs_peers", bars_of(results), results, is_quick=args.quick, out=args.join)
    out = args.join if args.out is None else args.out
    return finish("serving_vs_peers", bars_of(results), results, check=args.check, is_quick=args.quick, out=out)


if __name__ == "__main__":
    sys.exit(main())
