"""Does the model still learn? Held-out loss after a fixed number of steps, of every strategy over that of dense.

Char GPT and Fashion-MNIST (the examples), 4 ranks on loopback: the network does not matter here, only what is learned.
For each seed dense and every strategy start from the same parameters and see the same data. `half`, `int8` and
`lowrank` are held to a mean over the seeds of at most 1.005 times dense's loss; the gap of all others is measured and
shown, and held to nothing. With one of the four ranks slowed 3x (its compute is a sleep), `async` is held to 0.9 of
the speed that the others have when none is slowed; dense and `local_sgd` stand beside. Where Fashion-MNIST is not
installed it is left out, and the bars with it are short.

    python benchmarks/quality.py --check
    python benchmarks/quality.py --quick       # one seed and some steps of a small model: shows that it runs
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from _arms import Arena, Arm
from _harness import Bar, finish
from wirespeed.cli import render
from wirespeed.tune.places import LoopbackPlace

RANKS = 4
LIMIT = 1.005
SLOWDOWN, SLOW_COMPUTE_S, KEPT_SPEED = 3.0, 0.06, 0.9
BESIDE_A_SLOW_HOST = ("dense", "dense/local_sgd@8", "dense/async", "int8/async")
FAITHFUL = ("half", "int8", "lowrank")
REPORTED = (
    "int4",
    "topk@5%",
    "topk@1%",
    "sign",
    "dense/delayed",
    "dense/async",
    "dense/local_sgd@8",
    "int8/local_sgd@8",
    "int8/diloco@16",
)
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
SCRIPTS = {
    "char GPT": ("examples/char_gpt.py", 180, ("--eval-windows", "512")),
    "Fashion-MNIST": ("examples/fashion_mnist.py", 300, ()),
}
"""Script, steps (also the length of its learning-rate schedule) and further arguments."""
QUICK = {
    "char GPT": (20, ("--width", "64", "--eval-windows", "64")),
    "Fashion-MNIST": (20, ("--hidden", "128")),
}
QUICK_STRATEGIES = ("int8", "sign", "dense/delayed", "int8/diloco@16")


def run_model(
    model: str, strategies: tuple[str, ...], seeds: range, num_steps: int, more: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The final held-out loss of dense and of every strategy, for each seed."""
    script = SCRIPTS[model][0]
    arguments = ("--steps", str(num_steps), "--eval-every", str(num_steps), *more)
    runs = []
    with Arena(RANKS, script, arguments) as arena:
        for seed in seeds:
            for name in ("dense", *strategies):
                outcome = arena.run(Arm(name), num_steps=num_steps, seed=seed)
                loss = outcome.losses[-1].loss
                runs.append({"model": model, "seed": seed, "strategy": name, "num_steps": num_steps, "loss": loss})
                print(f"  {model} seed {seed} {name}: {loss}", file=sys.stderr, flush=True)
    return runs


def kept_speed(strategy: str, *, num_steps: int) -> dict[str, Any]:
    """The slowest of the other ranks' speed with one host slowed 3x, over its speed with none slowed."""
    worker = str(Path(__file__).with_name("_slow_host.py"))
    steps_s: dict[float, list[float]] = {}
    for slowdown in (1.0, SLOWDOWN):
        with tempfile.TemporaryDirectory(prefix="wirespeed-bench-") as name:
            folder = Path(name)
            arguments = (str(folder), strategy, str(num_steps), str(SLOW_COMPUTE_S), str(slowdown))
            end = LoopbackPlace(RANKS, why="its compute is a sleep").run(
                [sys.executable, worker, *arguments], env={}, folder=folder, watch=None, timeout_s=300.0
            )
            if end.returncode != 0:
                raise SystemExit(f"{strategy} with a host slowed {slowdown:g}x failed: {end.tail}")
            steps_s[slowdown] = [
                json.loads((folder / f"slow-{rank}.json").read_text())["step_s"] for rank in range(RANKS)
            ]
    kept = min(own / beside for own, beside in zip(steps_s[1.0][:-1], steps_s[SLOWDOWN][:-1], strict=True))
    return {"strategy": strategy, "steps_s": {f"{k:g}": v for k, v in steps_s.items()}, "kept": kept}


def ratios(runs: list[dict[str, Any]], model: str, strategy: str) -> list[float]:
    """Loss over dense's, seed by seed; infinite where it is not finite."""
    by_seed = {(r["seed"], r["strategy"]): r["loss"] for r in runs if r["model"] == model}
    found = []
    for (seed, name), loss in by_seed.items():
        if name == strategy:
            dense = by_seed[seed, "dense"]
            found.append(float("inf") if loss is None or dense is None else loss / dense)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="hold the figures against their bars")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: shows that it runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", default=",".join(SCRIPTS))
    parser.add_argument("--strategies", default=",".join((*FAITHFUL, *REPORTED)))
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    strategies = QUICK_STRATEGIES if args.quick else tuple(args.strategies.split(","))
    runs: list[dict[str, Any]] = []
    bars: list[Bar] = []
    rows = []
    for model in filter(None, args.models.split(",")):
        if model == "Fashion-MNIST" and not FASHION_MNIST.is_dir():
            print("Fashion-MNIST is not installed (apt-get install dataset-fashion-mnist): left out", file=sys.stderr)
            bars += [
                Bar(f"{model}: {name}, mean held-out loss over dense's", float("nan"), LIMIT, False)
                for name in FAITHFUL
            ]
            continue
        _, num_steps, more = SCRIPTS[model]
        if args.quick:
            num_steps, more = QUICK[model]
        runs += run_model(model, strategies, range(1 if args.quick else args.seeds), num_steps, more)
        for name in strategies:
            found = ratios(runs, model, name)
            spread = f"{stdev(found):.4f}" if len(found) > 1 else "-"
            rows.append((model, name, f"{fmean(found):.4f}", spread, f"{min(found):.4f} to {max(found):.4f}"))
            if name in FAITHFUL:
                bars.append(Bar(f"{model}: {name}, mean held-out loss over dense's", fmean(found), LIMIT, False))
    render.show(
        render.make_table(("model", "strategy<", "loss over dense's", "spread", "range"), rows, title="held-out loss")
    )
    slow = [kept_speed(name, num_steps=20 if args.quick else 100) for name in BESIDE_A_SLOW_HOST]
    render.show(
        render.make_table(
            ("strategy<", "speed of the others over their own"),
            [(found["strategy"], f"{found['kept']:.3f}") for found in slow],
            title=f"one host of {RANKS} slowed {SLOWDOWN:g}x",
        )
    )
    bars += [
        Bar(f"{found['strategy']}: others' speed with one host slowed 3x", found["kept"], KEPT_SPEED)
        for found in slow
        if found["strategy"].endswith("async")
    ]
    kept = [bar for bar in bars if bar.value == bar.value]
    if args.check:
        for bar in bars:
            print(bar.line)
    status = finish("quality", kept, {"runs": runs, "slow_host": slow}, is_quick=args.quick, out=args.out)
    return 1 if args.check and not all(bar.holds for bar in bars) else status


if __name__ == "__main__":
    sys.exit(main())
