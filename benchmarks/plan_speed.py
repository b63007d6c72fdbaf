"""How fast the planner's network layer answers, on the sizes that issue 4 names, two cores.

Four bars: 200 strategies over 10,240 hosts on a real topology (a fat-tree, and rails with eight NICs and devices per
host) in under 5 s each; one ring over 65,536 hosts in under 2 s; and one `plan train` of a model over tensor, pipeline
and data parallel layouts in under 1 s, start-up included. A strategy is groups, order of ranks, algorithm and 40
bucket sizes; on the fat-tree all 200 differ in their order of ranks, so that nothing but the network is kept between
them. Each answer is checked against its cut bound in the timed run.

    python benchmarks/plan_speed.py --check
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from _harness import Bar, arguments, finish
from wirespeed.fabric.network import network_of
from wirespeed.fabric.placement import place
from wirespeed.fabric.timing import prepare
from wirespeed.fabric.topology import Fabric
from wirespeed.fabric.words import parse_words

NUM_HOSTS = 10_240
NUM_STRATEGIES = 200
SIZES = np.geomspace(2**10, 2**32, 40)
FAT_TREE = f"fat-tree hosts={NUM_HOSTS} nic=400g-ib oversubscription=2 core_oversubscription=2"
PLAN_TRAIN = (
    "plan", "train", "--model", "gpt3-175b", "--device", "h100", "--fabric",
    "fat-tree hosts=64 nic=400g-ib nics=8 island=nvlink4",
)  # fmt: skip
RAILS = f"rail hosts={NUM_HOSTS} group=32 nics=8 nic=400g-ib island=nvlink4 oversubscription=2"


def flat_strategies(fabric: Fabric) -> Iterator[dict[str, Any]]:
    """All ranks in groups of several sizes, each strategy in an order of its own."""
    algorithms = ("ring", "tree", "halving_doubling", "ring", "tree")
    for i in range(NUM_STRATEGIES):
        placement = place(fabric, seed=i) if i else place(fabric)
        width = (NUM_HOSTS, NUM_HOSTS // 2, NUM_HOSTS // 10, 64)[i // 5 % 4]
        # Columns: each group takes every (NUM_HOSTS / width)-th rank, so that all of them cross the network.
        groups = np.arange(NUM_HOSTS).reshape(width, -1).T.copy()
        operation = ("all_reduce", "all_reduce", "reduce_scatter", "all_gather")[i % 4]
        algorithm = "ring" if operation != "all_reduce" else algorithms[i // 20 % 5]
        yield {"placement": placement, "operation": operation, "groups": groups, "algorithm": algorithm}


def rail_strategies(fabric: Fabric) -> Iterator[dict[str, Any]]:
    """81,920 devices: 20 ways to lay out tensor and data parallel groups, 10 codecs and bucket sizes each.

    The ten share their groups, whose model ``prepare`` keeps, as a search over codecs and buckets does.
    """
    placement = place(fabric)
    ranks = np.arange(placement.num_ranks)
    for i in range(NUM_STRATEGIES):
        layout = i // 10
        tensor = (1, 2, 4, 8)[layout % 4]
        pipeline = 2 ** (layout // 4)
        # Ranks are (pipeline, data, tensor), the last fastest; one stage's data-parallel groups and tensor groups.
        stage = ranks.reshape(pipeline, -1, tensor)[0]
        is_data = tensor == 1 or i % 2 == 0
        groups = stage.T.copy() if is_data else stage
        yield {"placement": placement, "operation": "all_reduce", "groups": groups, "algorithm": "ring"}


def run(line: str, strategies: Any, limit: int) -> tuple[float, int]:
    """Seconds to build the fabric and answer 200, and how many answers fell below their bound (none may).

    Of fewer than 200 the time of the answers, not that of the fabric, is scaled up.
    """
    start = time.perf_counter()
    fabric = parse_words(line)
    network_of(fabric)
    built_s = time.perf_counter() - start
    start = time.perf_counter()
    wrong = 0
    for answered, strategy in enumerate(strategies(fabric)):
        if answered == limit:
            break
        operation, placement = strategy.pop("operation"), strategy.pop("placement")
        model = prepare(fabric, operation, placement, **strategy)
        times = model.seconds(SIZES)
        wrong += int((times < SIZES * model.bound.s_per_byte).any() or (np.diff(times) < 0).any())
    return built_s + (time.perf_counter() - start) * NUM_STRATEGIES / limit, wrong


def ring(num_hosts: int) -> float:
    """Seconds for one ring over so many hosts in random order, fabric included."""
    start = time.perf_counter()
    fabric = parse_words(f"fat-tree hosts={num_hosts} nic=100g-ib oversubscription=4 core_oversubscription=2")
    found = prepare(fabric, "all_reduce", place(fabric, seed=1), algorithm="ring").cost(2**27)
    assert found.seconds >= found.lower_bound_s > 0
    return time.perf_counter() - start


def plan_train() -> float:
    """Seconds of one whole command."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "wirespeed", *PLAN_TRAIN], check=True, capture_output=True, timeout=60)
    return time.perf_counter() - start


def main() -> int:
    options = arguments(__doc__ or "")
    limit = 20 if options.quick else NUM_STRATEGIES
    rounds = 1 if options.quick else 3
    flat = [run(FAT_TREE, flat_strategies, limit) for _ in range(rounds)]
    rails = [run(RAILS, rail_strategies, limit) for _ in range(rounds)]
    rings = [ring(65_536) for _ in range(rounds)]
    plan_train()  # the first one may have to compile
    commands = [plan_train() for _ in range(3 if options.quick else 7)]
    results = {
        "plan_train_s": commands,
        "fat_tree_s": [seconds for seconds, _ in flat],
        "rails_s": [seconds for seconds, _ in rails],
        "ring_65536_s": rings,
        "strategies_run": limit,
        "sizes_per_strategy": int(SIZES.size),
    }
    print(f"{'what':58} {'seconds, each run'}")
    for what, key in (
        (f"{NUM_STRATEGIES} strategies, {NUM_HOSTS} hosts, fat-tree 2:1, 2:1", "fat_tree_s"),
        (f"{NUM_STRATEGIES} strategies, {NUM_HOSTS} hosts x 8 devices, rails", "rails_s"),
        ("one random ring, 65,536 hosts, fat-tree 4:1, 2:1", "ring_65536_s"),
        ("wirespeed plan train, 512 devices, with start-up", "plan_train_s"),
    ):
        print(f"{what:58} {', '.join(f'{seconds:.2f}' for seconds in results[key])}")
    bars = [
        Bar("plan_speed.fat_tree_s", float(np.median([s for s, _ in flat])), 5.0, at_least=False),
        Bar("plan_speed.rails_s", float(np.median([s for s, _ in rails])), 5.0, at_least=False),
        Bar("plan_speed.ring_65536_s", float(np.median(rings)), 2.0, at_least=False),
        Bar("plan_speed.plan_train_s", float(np.median(commands)), 1.0, at_least=False),
        Bar("plan_speed.wrong_answers", sum(wrong for _, wrong in [*flat, *rails]), 0, at_least=False),
    ]
    return finish("plan_speed", bars, results, check=options.check, is_quick=options.quick, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
