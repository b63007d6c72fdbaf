"""Writes docs/validation.md from the results of the planner's benchmarks: own runs, published tables, speed, peers.

    python benchmarks/validation_page.py            # after validate_lab.py, validate_published.py, plan_speed.py, ...
    python benchmarks/validation_page.py --check    # exit 1 where the page is not what the results give

Nothing on the page is typed by hand but the words around the tables; bad cases are shown as they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _harness import RESULTS
from wirespeed.records import write_bytes

PAGE = Path(__file__).parents[1] / "docs" / "validation.md"

HEAD = """# How right the planner is

This page is written by `benchmarks/validation_page.py` from the results in `benchmarks/results/`; bad cases are in it.
`holds` and `short` are the bars of each benchmark, as it printed them.
"""

LAB = """
## Own runs: predicted first, then measured

`benchmarks/validate_lab.py --seed S` calibrates once on labs of 2 and 4 hosts in one rack (`bench links`, `bench
collectives`, `bench codecs`, `fabric calibrate`), draws scenarios from the seed, predicts all of them (`fabric extend`,
then what `plan collective` and `plan train` use), writes the predictions down, and only then runs them. Each scenario
has a lab of its own: other numbers of hosts, other rates, two racks with an oversubscribed uplink, ranks in random
order. Hosts of a lab share the cores of one machine ({cpus} here), which is part of what is predicted.

What binds is not taken from a model: the kernel's byte counters of every NIC and uplink are read every 40 ms while the
scenario runs. In the windows with traffic the busiest link of all binds where it carries 90 % of its rate (median over
windows); else the cores where 90 % of them are busy; else the link where it carries at least half; else nothing but
latency. "none" stands for cores and latency. A training step computes as well: there a link binds, said or seen, where
it is busy for at least half of the step.
"""

PUBLISHED = """
## Published tables

`benchmarks/validate_published.py` predicts tables that others measured, with one calibration per network or type of GPU
as each section says. Figures and sources are in `benchmarks/published/tables.json`.
"""

SPEED = """
## Speed

`benchmarks/plan_speed.py`, {cpus} cores: the network layer for 200 strategies on 10,240 hosts (each with its own order
of ranks, 40 sizes), a ring over 65,536 hosts in random order, and one whole command, start-up included.
"""

PEERS = """
## Beside other tools

`benchmarks/planner_peers.py` asks other tools the same question in the same minute: a ring all-reduce of {size} over
{hosts} hosts on one switch, {rate} Gbit/s a NIC, {latency} us a hop. The closed form is on paper:
2 (p - 1) (latency + size / p / rate).
"""


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_bytes()) if path.is_file() else None


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    lab = load("validate_lab")
    if lab is not None:
        parts += [LAB.format(cpus=lab["environment"]["num_cpus"]), told(lab), *lab_tables(lab)]
    for name, text, body in (
        ("validate_published", PUBLISHED, published_tables),
        ("plan_speed", SPEED, speed_table),
        ("planner_peers", PEERS, peers_table),
    ):
        held = load(name)
        if held is not None:
            facts = {"cpus": held["environment"]["num_cpus"], **held["results"].get("question", {})}
            parts += [text.format(**facts), told(held), *body(held)]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def told(document: dict[str, Any]) -> str:
    """When and where, and the bars."""
    where = document["environment"]
    made = f"Run on {document['created'][:10]}, {where['cpu'] or 'an unknown CPU'}, {where['num_cpus']} cores."
    rows = [
        (
            "holds" if bar["holds"] else "**short**",
            bar["name"],
            f"{bar['value']:.4g}",
            f"{'>=' if bar['at_least'] else '<='} {bar['target']:.4g}",
        )
        for bar in document["bars"]
    ]
    return f"{made}\n\n" + table(("", "bar", "value", "target"), rows)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def lab_tables(document: dict[str, Any]) -> Iterable[str]:
    for run in document["results"]["runs"]:
        errors = [abs(row["error"]) for row in run["rows"]]
        wrong = sum(not row["is_named_right"] for row in run["rows"])
        yield (
            f"### Seed {run['seed']}\n\n{len(errors)} scenarios: mean error {statistics.fmean(errors):.1%}, worst "
            f"{max(errors):.1%}, binding link named wrong in {wrong}.\n"
        )
        yield table(
            ("scenario", "network", "what", "predicted", "measured", "error", "predicted to bind", "seen to bind"),
            [lab_row(row) for row in run["rows"]],
        )


def lab_row(row: dict[str, Any]) -> Sequence[str]:
    held, predicted, measured = row["scenario"], row["predicted"], row["measured"]
    reading = measured["reading"]
    network = f"{len(held['order'])} of {held['hosts']} hosts, {held['rate_bit_per_s'] / 1e6:.0f} Mbit/s"
    if held["uplink_bit_per_s"] is not None:
        network += f", 2 racks, uplinks {held['uplink_bit_per_s'] / 1e6:.0f}"
    what = f"{held['size_bytes'] / 2**20:.3g} MiB" if held["size_bytes"] else f"{held['model']} / {held['scale']:g}"
    mean = "mean_" if held["what"] == "training" else ""
    load = f"NIC {reading[f'{mean}nic']:.0%}"
    load += f", uplink {reading[f'{mean}uplink']:.0%}" if held["uplink_bit_per_s"] else ""
    seen = (
        f"{measured['verdict']} ({load}, cores {reading['cores']:.0%})" if reading["active"] else "none (no link busy)"
    )
    return (
        held["name"], network, what, duration(predicted["seconds"]), duration(measured["seconds"]),
        f"{row['error']:+.1%}", f"{row['named']}: {predicted['binding']}", seen,
    )  # fmt: skip


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def published_tables(document: dict[str, Any]) -> Iterable[str]:
    results = document["results"]
    yield "### 3.1 ResNet-50 on three networks, seconds per step (no overlap / every tensor alone / merged)\n"
    yield table(
        ("network", "GPUs", "predicted", "published", "errors"),
        [
            (
                row["network"],
                str(row["gpus"]),
                " / ".join(f"{one:.3f}" for one in row["predicted_s"]),
                " / ".join(f"{one:.3f}" for one in row["published_s"]),
                " / ".join(f"{one:+.1%}" for one in row["errors"]),
            )
            for row in results["3.1"]
            if row.get("predicted_s")
        ],
    )
    for key, rows in results["3.2"].items():
        if not isinstance(rows, list) or not rows or "case" not in rows[0]:
            continue
        yield f"### 3.2 {key}\n"
        yield table(
            ("case", "predicted", "published", "error"),
            [(r["case"], f"{r['predicted']:.4g}", f"{r['published']:.4g}", f"{r['error']:+.1%}") for r in rows],
        )
    yield "### 3.3 What-if simulator, scaling in %\n"
    yield table(
        ("model", "Gbit/s", "compression", "published", "on measured layer times", "on the catalogue's"),
        [
            (
                r["model"], f"{r['gbit_per_s']:g}", f"{r['compression']:g}", f"{r['published']:.1f}",
                f"{r['measured']:.1f}", f"{r['generated']:.1f}",
            )
            for r in results["3.3"]
        ],
    )  # fmt: skip
    yield "### 3.4 Bucket size chosen for PyTorch DDP\n"
    yield table(
        ("model", "backend", "GPUs", "chosen", "published step over the best"),
        [
            (r["model"], r["backend"], str(r["gpus"]), f"{r['chosen_MB']} MB", f"{r['regret']:.1%}")
            for r in results["3.4"]
        ],
    )
    for key, errors in results["3.5"].items():
        yield f"### 3.5 {key}, each size from the others\n"
        yield table(("bytes", "error"), [(f"{int(size):,}", f"{error:+.1%}") for size, error in errors.items()])


def speed_table(document: dict[str, Any]) -> Iterable[str]:
    results = document["results"]
    names = {
        "fat_tree_s": "200 strategies, 10,240 hosts, fat-tree",
        "rails_s": "200 strategies, 10,240 hosts of 8 devices, rails",
        "ring_65536_s": "one ring, 65,536 hosts in random order",
        "plan_train_s": "`wirespeed plan train`, 512 devices, start-up included",
    }
    yield table(
        ("what", "seconds of every run"),
        [(name, ", ".join(f"{one:.2f}" for one in results[key])) for key, name in names.items() if key in results],
    )


def peers_table(document: dict[str, Any]) -> Iterable[str]:
    yield table(
        ("tool", "answer", "off the closed form", "time to answer"),
        [
            (
                one["tool"],
                duration(one["answer_s"]) if "answer_s" in one else "none",
                f"{one['off']:+.2%}" if "off" in one else "-",
                duration(one["took_s"]) if "took_s" in one else one["why"],
            )
            for one in document["results"]["tools"]
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where the page is not what the results give")
    made = page()
    if parser.parse_args().check:
        is_same = PAGE.is_file() and PAGE.read_text() == made
        print(f"{'holds' if is_same else 'short'}  docs/validation.md is what the results give  {int(is_same)}  >=1")
        return 0 if is_same else 1
    write_bytes(PAGE, made.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
