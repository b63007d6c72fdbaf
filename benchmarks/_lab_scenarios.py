"""Scenarios of ``validate_lab.py``, drawn from a seed: a lab, an order of ranks, and something to run on it.

Every seed gives the same kinds of scenarios, each on a lab of its own: all collectives in one rack and across an
oversubscribed uplink with ranks in random order, messages between two hosts, weights sent from one host to all, every
codec in training, one collective of small messages, and one on so many fast hosts that the two cores are the limit.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from wirespeed.lab import LabSpec
from wirespeed.units import KIB, MIB

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter")
STRATEGIES = ("dense", "half", "int8", "topk@1%", "lowrank@4")
MODELS = ("resnet50", "bert-base")
PARAMETER_BYTES = {"resnet50": 102_228_128, "bert-base": 438_057_192}
MIN_RATE, MAX_RATE = 100e6, 1e9
MAX_TOTAL = 4e9
"""Of all hosts' links together, where the cores are not to be the limit (``tune.replay`` keeps to the same)."""
OVERSUBSCRIPTIONS = (1.6, 2.7, 3.5)


@dataclass(frozen=True)
class Scenario:
    """``what``: collective, send or training. ``order``: hosts in the order of ranks; those not named are idle."""

    number: int
    name: str
    what: str
    operation: str
    hosts: int
    rate_bit_per_s: float
    racks: int
    uplink_bit_per_s: float | None
    order: tuple[str, ...]
    size_bytes: int = 0
    repeats: int = 6
    strategy: str = ""
    model: str = ""
    scale: float = 1.0
    compute_s: float = 0.0

    @property
    def spec(self) -> LabSpec:
        """The lab it runs on."""
        return LabSpec(
            hosts=self.hosts,
            rate_bit_per_s=self.rate_bit_per_s,
            racks=self.racks,
            uplink_bit_per_s=self.uplink_bit_per_s,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def draw(seed: int) -> list[Scenario]:
    """The scenarios of a seed."""
    drawn: list[Scenario] = []

    def add(name: str, what: str, **fields: Any) -> None:
        drawn.append(Scenario(number=len(drawn), name=name, what=what, **fields))

    dice = random.Random(f"wirespeed lab {seed}")
    for operation in COLLECTIVES:
        add(operation, "collective", operation=operation, **_sized(dice, operation, _one_rack(dice)))
        add(operation, "collective", operation=operation, **_sized(dice, operation, _two_racks(dice)))
    for lab in (_one_rack(dice), _two_racks(dice, hosts=4)):
        add("send", "send", operation="send", size_bytes=16 * MIB, **{**lab, "order": _far_pair(lab)})
    for lab in (_one_rack(dice, hosts=8), _two_racks(dice)):
        lab["order"] = tuple(f"h{i}" for i in range(lab["hosts"]))
        add("weights to all", "collective", operation="broadcast", **_sized(dice, "broadcast", lab, seconds=1.5))
    small = _one_rack(dice, hosts=dice.choice((4, 6, 8)), rate=500e6)
    size = dice.choice((4, 8)) * KIB
    add("small all_reduce", "collective", operation="all_reduce", size_bytes=size, **{**small, "repeats": 40})
    crowd = _one_rack(dice, hosts=8, rate=1e9)
    operation = dice.choice(("all_reduce", "all_gather"))
    add(f"crowded {operation}", "collective", operation=operation, **_sized(dice, operation, crowd))
    for place, strategy in enumerate((*STRATEGIES, "dense")):
        lab = _two_racks(dice) if place in (1, 3, 5) else _one_rack(dice, hosts=dice.choice((3, 4, 6)))
        add(f"training, {strategy}", "training", operation="", strategy=strategy, **_training(dice, lab))
    return drawn


def quick(seed: int) -> list[Scenario]:
    """Three of them: two racks, a root, and training."""
    return [one for one in draw(seed) if one.number in (1, 8, 20)]


def _rate(dice: random.Random, hosts: int) -> float:
    high = min(MAX_RATE, MAX_TOTAL / hosts)
    return round(math.exp(dice.uniform(math.log(MIN_RATE), math.log(high))) / 1e7) * 1e7


def _one_rack(dice: random.Random, hosts: int | None = None, rate: float | None = None) -> dict[str, Any]:
    num = dice.randint(2, 8) if hosts is None else hosts
    return {
        "hosts": num,
        "rate_bit_per_s": _rate(dice, num) if rate is None else rate,
        "racks": 1,
        "uplink_bit_per_s": None,
        "order": _shuffled(dice, num),
    }


def _two_racks(dice: random.Random, hosts: int | None = None) -> dict[str, Any]:
    num = dice.choice((4, 6, 8)) if hosts is None else hosts
    rate = _rate(dice, num)
    uplink = round(rate * num / 2 / dice.choice(OVERSUBSCRIPTIONS) / 1e6) * 1e6
    return {
        "hosts": num, "rate_bit_per_s": rate, "racks": 2, "uplink_bit_per_s": uplink, "order": _shuffled(dice, num),
    }  # fmt: skip


def _shuffled(dice: random.Random, num: int) -> tuple[str, ...]:
    names = [f"h{i}" for i in range(num)]
    dice.shuffle(names)
    return tuple(names)


def _far_pair(lab: dict[str, Any]) -> tuple[str, str]:
    """The first host and the last, which are in different racks where there are two."""
    return ("h0", f"h{lab['hosts'] - 1}")


def _sized(dice: random.Random, operation: str, lab: dict[str, Any], *, seconds: float = 0.4) -> dict[str, Any]:
    """The lab with a size that keeps its NICs busy for about so long, were nothing else in the way."""
    factor = {"all_reduce": 2.0, "reduce_scatter": 2.0, "broadcast": max(1.0, math.log2(lab["hosts"]))}
    target = lab["rate_bit_per_s"] / 8 * seconds * dice.uniform(0.6, 1.4) / factor.get(operation, 1.0)
    return {**lab, "size_bytes": max(1, round(target / MIB * 4)) * MIB // 4}


def _training(dice: random.Random, lab: dict[str, Any]) -> dict[str, Any]:
    """A model scaled so that dense keeps NICs busy for longer than compute takes, and a quarter of it would not."""
    model = dice.choice(MODELS)
    wire_s = dice.uniform(0.5, 0.8)
    gradient_bytes = lab["rate_bit_per_s"] / 8 * wire_s / 2
    scale = max(1.0, round(PARAMETER_BYTES[model] / gradient_bytes, 1))
    return {**lab, "model": model, "scale": scale, "compute_s": round(dice.uniform(0.3, 0.4), 2)}
