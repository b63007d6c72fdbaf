"""`wirespeed serve` beside a bare grpc.aio echo of the same bytes: what the server costs, and how well it batches.

Both are processes of their own, driven in turn by the same closed-loop client (raw bytes, answers checked) at 1, 8 and
32 callers. Models: `identity` gives 16 KiB back; `timed` sleeps 5 ms + 0.1 ms per row, at most 32 rows, 2 ms delay.

The bound of `timed` with c callers that each wait for their answer: a batch of all c takes 5 ms + c x 0.1 ms, and
between two batches every caller's message has to pass the bare stack once, c / (echoes per second at c callers, this
run). Nothing of that overlaps when everybody is in the batch, so at most c / (0.005 + 0.0001 c + c / echo rate)
requests a second.

    python benchmarks/serving_floor.py --check
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from _harness import Bar, arguments, finish
from wirespeed import wire
from wirespeed.measure.load import closed_loop
from wirespeed.serve.client import InferenceClient, encode_request
from wirespeed.serve.tensors import from_array

CALLERS = (1, 8, 32)
FIXED_S, PER_ROW_S = 0.005, 0.0001
MODELS = {
    "identity": ("FP32", 4096, "class Model:\n    def infer(self, inputs):\n        return {'y': inputs['x']}\n"),
    "timed": (
        "FP32",
        16,
        (
            "import time\n\n\nclass Model:\n    def infer(self, inputs):\n"
            f"        time.sleep({FIXED_S} + {PER_ROW_S} * len(inputs['x']))\n        return {{'y': inputs['x']}}\n"
        ),
    ),
}
TOML = """schema = 1
backend = "python"
[batching]
max_rows = 32
max_delay = "2 ms"
[[input]]
name = "x"
datatype = "{0}"
shape = [{1}]
[[output]]
name = "y"
datatype = "{0}"
shape = [{1}]
"""


def write_models(folder: Path) -> None:
    for name, (datatype, size, code) in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "model.toml").write_text(TOML.format(datatype, size))
        (folder / name / "model.py").write_text(code)


def serve_bare(ready: Any) -> None:
    wire.run(_serve_bare(ready))


async def _serve_bare(ready: Any) -> None:
    import grpc

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(echo)
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready.send(port)
    await asyncio.Event().wait()


async def drive(address: str, message: bytes, tail: bytes, callers: int, seconds: float) -> tuple[float, float]:
    """Requests per second and the 99th percentile; every answer ends with the payload that was sent."""
    async with InferenceClient(address, num_connections=1, num_retries=0) as client:

        async def ask() -> None:
            if not (await client.infer_raw(message)).endswith(tail):
                raise AssertionError("a wrong answer")

        report = await closed_loop(ask, concurrency=callers, duration_s=seconds, warmup_s=0.5)
    if report.num_failed or report.latency_p99_s is None:
        raise RuntimeError(f"failed: {report.failures}")
    return report.requests_per_s, report.latency_p99_s


def main() -> int:
    args = arguments(__doc__ or "")
    rounds, seconds = (2, 1.0) if args.quick else (5, 3.0)
    with tempfile.TemporaryDirectory(prefix="wirespeed-bench-") as held:
        write_models(Path(held))
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        bare = multiprocessing.get_context("spawn").Process(target=serve_bare, args=(theirs,), daemon=True)
        bare.start()
        bare_address = f"127.0.0.1:{ours.recv()}"
        command = [
            sys.executable,
            "-m",
            "wirespeed",
            "serve",
            held,
            "--grpc",
            "127.0.0.1:0",
            "--http",
            "none",
            "--json",
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            text = ""
            while not text.endswith("}\n"):
                text += server.stdout.readline()
            results = measure(bare_address, json.loads(text)["grpc"], rounds, seconds)
        finally:
            server.terminate()
            server.wait(30)
            bare.terminate()
            bare.join(10)
    bars = []
    for callers in CALLERS:
        row = results["timed"][str(callers)]
        if callers == 1:
            bars.append(Bar("timed, 1 caller: time over the ideal 5.1 ms", row["ms"] / 5.1, 1.15, at_least=False))
        else:
            bars.append(Bar(f"timed, {callers} callers: share of the bound", row["share_of_bound"], 0.95))
    return finish("serving_floor", bars, results, check=args.check, is_quick=args.quick, out=args.out)


def measure(bare: str, ours: str, rounds: int, seconds: float) -> dict[str, Any]:
    results: dict[str, Any] = {"identity": {}, "timed": {}}
    for name, (_, size, _) in MODELS.items():
        array = np.random.default_rng(1).random((1, size), np.float32)
        message, tail = encode_request(name, [from_array("x", array)]), array.tobytes()
        for callers in CALLERS:
            rates: dict[str, list[float]] = {"bare": [], "serve": []}
            p99_s: dict[str, list[float]] = {"bare": [], "serve": []}
            for _ in range(rounds):
                for arm, address in (("bare", bare), ("serve", ours)):
                    rate, p99 = wire.run(drive(address, message, tail, callers, seconds))
                    rates[arm].append(rate)
                    p99_s[arm].append(p99)
            row: dict[str, Any] = {
                "requests_per_s": {arm: statistics.median(held) for arm, held in rates.items()},
                "p99_s": {arm: statistics.median(held) for arm, held in p99_s.items()},
                "share_of_bare": statistics.median(s / b for s, b in zip(rates["serve"], rates["bare"], strict=True)),
                "every_run": rates,
            }
            if name == "timed":
                bounds = [callers / (FIXED_S + PER_ROW_S * callers + callers / rate) for rate in rates["bare"]]
                row["ms"] = 1000 / row["requests_per_s"]["serve"]
                row["share_of_bound"] = statistics.median(s / b for s, b in zip(rates["serve"], bounds, strict=True))
            results[name][str(callers)] = row
            told = {k: round(v, 3) for k, v in row.items() if isinstance(v, float)}
            print(
                name,
                callers,
                {k: round(v) for k, v in row["requests_per_s"].items()},
                told,
                file=sys.stderr,
                flush=True,
            )
    return results


if __name__ == "__main__":
    sys.exit(main())
