"""Quality of service: training beside bursts of inference traffic on the same links, with and without traffic classes.

Four hosts. Training is real DDP over ResNet-50's gradients (compute is a sleep, so that the network and not two cores
decide); each host also sends bursts of answers to the next one that on their own take half of its link. One process
group trains in blocks, in turn: quiet, beside the bursts, beside the bursts with its connections marked (a DSCP that
the links let go first), and marked without bursts. A speed is the quiet blocks' step over the block's, of one run.

Checked in the run: bytes in the links' first class are those that training states for its marked steps, and no others;
what the bursts get, and how long one takes, is printed beside, since somebody pays.

    python benchmarks/qos.py --check
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from _harness import Bar, finish
from _qos_rank import ALONE, ARMS, WARM_UP
from wirespeed import units
from wirespeed.lab import Lab, LabSpec
from wirespeed.lab.layout import HEADER_EFFICIENCY

RANK = str(Path(__file__).with_name("_qos_rank.py"))
BURSTS = str(Path(__file__).with_name("_qos_bursts.py"))
DSCP = 26
NUM_HOSTS = 4
LOAD = 0.5
"""Of the link's goodput: what the bursts ask for."""
PERIOD_S = 0.25
PORT = 6100
KEPT, LOST = 0.90, 0.80
"""With classes training keeps at least so much of its speed; without, at most so much is left ("visibly")."""
BYTES_LOW, BYTES_HIGH = 0.98, 1.10
"""Of the stated bytes: headers are 4.6 %, acknowledgements of what comes in and barriers the rest."""


def run(rate: str, *, rounds: int, steps: int, compute_s: float, scale: float, strategy: str) -> dict[str, Any]:
    """One lab, one job: what every rank and every burst left, and the links' counters."""
    rate_bit_per_s = units.parse_rate(rate)
    burst_bytes = round(LOAD * rate_bit_per_s / 8 * HEADER_EFFICIENCY * PERIOD_S)
    spec = LabSpec(hosts=NUM_HOSTS, rate_bit_per_s=rate_bit_per_s, first_dscp=DSCP)
    with tempfile.TemporaryDirectory(prefix="wirespeed-bench-") as held, Lab(spec) as lab:
        folder = Path(held)
        for index, host in enumerate(lab.hosts):
            following = lab.hosts[(index + 1) % NUM_HOSTS].name
            arguments = (held, host.name, following, PORT, burst_bytes, PERIOD_S)
            lab.popen(host.name, [sys.executable, BURSTS, *map(str, arguments)])
        before = lab.status()
        job = (held, rounds, steps, compute_s, scale, DSCP, strategy)
        end = lab.run([sys.executable, RANK, *map(str, job)], timeout_s=900)
        after = lab.status()
        if end.returncode != 0:
            raise RuntimeError(f"the job ended with {end.returncode}: {end.tails}")
        ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(NUM_HOSTS)]
        bursts = [
            tuple(map(float, line.split()))
            for host in lab.hosts
            for line in (folder / f"bursts-{host.name}").read_text().splitlines()
        ]
    first = [
        (one.sent_by_class or (0, 0))[0] - (was.sent_by_class or (0, 0))[0]
        for one, was in zip(after.hosts, before.hosts, strict=True)
    ]
    return {"ranks": ranks, "bursts": bursts, "first_class_bytes": first}


def steps_of(told: dict[str, Any], arm: str) -> list[float]:
    """Every timed step of an arm, by the slowest rank's clock."""
    by_rank = [[block["steps_s"] for block in rank["blocks"] if block["arm"] == arm] for rank in told["ranks"]]
    return [max(times) for blocks in zip(*by_rank, strict=True) for times in zip(*blocks, strict=True)]


def marked_share(told: dict[str, Any]) -> float:
    """Bytes in the first class over the bytes that training states for its marked steps, warm-up included."""
    stated = 0.0
    for rank in told["ranks"]:
        for block in rank["blocks"]:
            if ARMS.get(block["arm"], (False, False))[0]:
                num_steps = len(block["steps_s"])
                stated += block["stated_bytes"] * (num_steps + WARM_UP) / num_steps
    return sum(told["first_class_bytes"]) / stated


def bursts_of(told: dict[str, Any], arm: str) -> dict[str, float]:
    """Of the bursts that ended within an arm's blocks: their rate per host, and how long one took."""
    spans = [(block["began_s"], block["ended_s"]) for block in told["ranks"][0]["blocks"] if block["arm"] == arm]
    inside = [burst for burst in told["bursts"] if any(began <= burst[0] <= ended for began, ended in spans)]
    lasted_s = sum(ended - began for began, ended in spans)
    took = [burst[1] for burst in inside]
    return {
        "bit_per_s_per_host": sum(burst[2] for burst in inside) * 8 / lasted_s / NUM_HOSTS,
        "median_s": median(took) if took else float("inf"),
        "p95_s": quantiles(took, n=20)[-1] if len(took) > 1 else float("inf"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="hold the figures against their bars")
    parser.add_argument("--quick", action="store_true", help="one round, under a minute; results are not kept")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="timed steps per block")
    parser.add_argument("--compute", type=float, default=0.4, help="seconds of compute per step")
    parser.add_argument("--scale", type=float, default=16.0, help="what the model's bytes are divided by")
    parser.add_argument("--strategy", default="dense")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where results go (benchmarks/results/qos.json)")
    args = parser.parse_args()
    told = run(
        args.rate, rounds=1 if args.quick else args.rounds, steps=6 if args.quick else args.steps,
        compute_s=args.compute, scale=args.scale, strategy=args.strategy,
    )  # fmt: skip
    quiet_s = median(steps_of(told, "quiet"))
    share = marked_share(told)
    rows: dict[str, Any] = {}
    for arm in ARMS:
        steps = steps_of(told, arm)
        rows[arm] = {"median_step_s": median(steps), "speed": quiet_s / median(steps), "steps_s": steps}
        text = f"{arm:16s} {median(steps) * 1e3:6.0f} ms a step, {quiet_s / median(steps):4.2f} of its speed"
        if ARMS[arm][1]:
            rows[arm]["bursts"] = bursts_of(told, arm)
            text += _burst_words(rows[arm]["bursts"])
        print(text)
    rows[ALONE] = {"bursts": bursts_of(told, ALONE)}
    print(f"{ALONE:16s}{_burst_words(rows[ALONE]['bursts'])}")
    print(f"{told['ranks'][0]['num_marked']} connections marked per rank; the first class carried {share:.3f} of what")
    print("training states for its marked steps")
    bars = [
        Bar("speed kept beside bursts, with classes", rows["bursts, classes"]["speed"], KEPT),
        Bar("speed kept beside bursts, without classes", rows["bursts"]["speed"], LOST, at_least=False),
        Bar("first-class bytes over those stated for marked steps, at least", share, BYTES_LOW),
        Bar("first-class bytes over those stated for marked steps, at most", share, BYTES_HIGH, at_least=False),
    ]
    results = {"rate": args.rate, "strategy": args.strategy, "arms": rows, "first_class_share": share}
    return finish("qos", bars, results, check=args.check, is_quick=args.quick, out=args.out)


def _burst_words(bursts: dict[str, float]) -> str:
    rate = units.format_rate(bursts["bit_per_s_per_host"])
    return f"; bursts {rate} per host, {bursts['median_s'] * 1e3:.0f} ms each (p95 {bursts['p95_s'] * 1e3:.0f})"


if __name__ == "__main__":
    sys.exit(main())
