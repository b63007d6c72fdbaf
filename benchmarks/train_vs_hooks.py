"""Time to the same held-out loss: wirespeed's strategies beside PyTorch's own fp16 and PowerSGD hooks.

Per seed and rate dense runs first; the held-out loss that it ends with is the target. Every other arm then runs from
the same seed, at least as many steps and on until it is at the target (to at most three times the steps), in the same
lab, one after another, with the order of the arms turned by one place per seed. PowerSGD's rank is tuned: the best of
three counts. A time is training time; evaluation is in none.

    python benchmarks/train_vs_hooks.py --check
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from _arms import Arena, Arm, seconds_to
from _harness import Bar, finish

OURS = {"1gbit": ("lowrank@4", "lowrank@8", "int8"), "100mbit": ("lowrank@4", "lowrank@8", "topk@2%/2MiB")}
FP16 = "torch-fp16"
POWERSGD = ("torch-powersgd@2", "torch-powersgd@4", "torch-powersgd@8")
EXTRA = 3.0


def run_rate(rate: str, *, seeds: range, num_steps: int, script: str) -> list[dict[str, Any]]:
    """All arms at one rate, for every seed."""
    runs = []
    with Arena(f"4x{rate}", script) as arena:
        for seed in seeds:
            dense = arena.run(Arm("dense"), num_steps=num_steps, seed=seed)
            target = dense.losses[-1].loss
            assert target is not None
            others = [*OURS[rate], FP16, *POWERSGD]
            turned = others[seed % len(others) :] + others[: seed % len(others)]
            outcomes = {"dense": dense}
            for name in turned:
                outcomes[name] = arena.run(
                    Arm(name), num_steps=num_steps, seed=seed, target_loss=target, max_steps=round(EXTRA * num_steps)
                )
                told = seconds_to(outcomes[name], target)
                print(f"  {rate} seed {seed} {name}: {told and round(told, 1)} s", file=sys.stderr, flush=True)
            for name, outcome in outcomes.items():
                runs.append(
                    {
                        "rate": rate,
                        "seed": seed,
                        "arm": name,
                        "target": target,
                        "step_s": outcome.measured_step_s,
                        "num_steps": outcome.num_steps,
                        "final_loss": outcome.losses[-1].loss,
                        "time_to_loss_s": seconds_to(outcome, target),
                    }
                )
    return runs


def medians(runs: list[dict[str, Any]], rate: str) -> dict[str, float]:
    """Median time to the loss over seeds, by arm; infinite when any seed never got there."""
    times: dict[str, list[float]] = {}
    for run in runs:
        if run["rate"] == rate:
            reached = run["time_to_loss_s"]
            times.setdefault(run["arm"], []).append(float("inf") if reached is None else reached)
    return {arm: median(values) for arm, values in times.items()}


def bars_of(runs: list[dict[str, Any]], rate: str) -> list[Bar]:
    """Ours, the best, beside each peer: how many times as fast to the loss."""
    by_arm = medians(runs, rate)
    best = min(by_arm[name] for name in OURS[rate])
    powersgd = min(by_arm[name] for name in POWERSGD)
    return [
        Bar(f"{rate}: times as fast to dense's loss as PyTorch's fp16 hook", by_arm[FP16] / best, 1.0),
        Bar(f"{rate}: times as fast to dense's loss as PyTorch's PowerSGD hook, best rank", powersgd / best, 1.0),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="hold the figures against their bars")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: shows that it runs")
    parser.add_argument("--rates", default=",".join(OURS), help="some of them: results go to a file of their own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of dense; 0: 100 at 1gbit, 50 at 100mbit")
    parser.add_argument("--script", default="examples/char_gpt.py")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    bars: list[Bar] = []
    rates = args.rates.split(",")
    for rate in rates:
        steps = args.steps or {"1gbit": 100, "100mbit": 50}[rate]
        runs += run_rate(
            rate,
            seeds=range(1 if args.quick else args.seeds),
            num_steps=20 if args.quick else steps,
            script=args.script,
        )
        bars += bars_of(runs, rate)
    for rate in rates:
        for arm, seconds in sorted(medians(runs, rate).items(), key=lambda item: item[1]):
            steps = [r["step_s"] for r in runs if (r["rate"], r["arm"]) == (rate, arm)]
            spread = [r["time_to_loss_s"] for r in runs if (r["rate"], r["arm"]) == (rate, arm)]
            print(f"{rate:8s} {arm:18s} {seconds:8.1f} s to the loss, {median(steps) * 1e3:6.0f} ms a step; {spread}")
    name = "-".join(["train_vs_hooks", *(rates if set(rates) != set(OURS) else ())])
    return finish(name, bars, {"runs": runs}, check=args.check, is_quick=args.quick)


if __name__ == "__main__":
    sys.exit(main())
