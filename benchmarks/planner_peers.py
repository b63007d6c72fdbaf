"""The planner beside other tools: one ring all-reduce on one switch, the answer and the time it takes to come.

SimGrid is asked through its Python package, by an interpreter that has it (--python; without one, --why-not is
recorded). On Debian 12 that is the system's, after `apt-get install python3-simgrid`; the package index holds sources
only. Calculon is not in the package index: the name there belongs to another project. Start-up of each tool is counted,
imports included.

    python benchmarks/planner_peers.py --python /usr/bin/python3 --check
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _harness import Bar, finish

HOSTS = 64
SIZE_BYTES = 64 * 2**20
RATE_BIT_PER_S = 10e9
LATENCY_S = 10e-6
ROUNDS = 3
CALCULON = "does not install: the package index has another project of that name, and none of Calculon's own"


def closed_form() -> float:
    """2 (p - 1) steps, each a latency and 1 / p of the bytes at the NIC's rate."""
    return 2 * (HOSTS - 1) * (LATENCY_S + SIZE_BYTES / HOSTS * 8 / RATE_BIT_PER_S)


def ours() -> dict[str, float]:
    command = [
        sys.executable, "-m", "wirespeed", "plan", "collective", "all_reduce", "--bytes", str(SIZE_BYTES), "--fabric",
        f"star hosts={HOSTS} rate={RATE_BIT_PER_S:.0f}bit latency={LATENCY_S * 1e6:g}us", "--algorithm", "ring",
        "--json",
    ]  # fmt: skip
    return timed(command, lambda text: json.loads(text)["predictions"][0]["seconds"])


def simgrid(python: Path) -> dict[str, float]:
    script = Path(__file__).with_name("_simgrid_ring.py")
    arguments = [str(HOSTS), str(SIZE_BYTES), str(RATE_BIT_PER_S / 8), str(LATENCY_S)]
    return timed([str(python), str(script), *arguments], lambda text: json.loads(text.splitlines()[-1])["answer_s"])


def timed(command: list[str], answer: Any) -> dict[str, float]:
    """The median of some runs of a whole command; its answer must be the same in all."""
    times, answers = [], set()
    for _ in range(ROUNDS + 1):  # the first one is not counted
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        times.append(time.perf_counter() - begin)
        answers.add(answer(done.stdout))
    (only,) = answers
    return {"answer_s": only, "took_s": statistics.median(times[1:]), "off": only / closed_form() - 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="interpreter that has SimGrid")
    parser.add_argument("--why-not", default="", help="what its installation said, where it did not install")
    parser.add_argument("--check", action="store_true", help="print one line per bar, and exit 1 if one is short")
    parser.add_argument("--quick", action="store_true", help="the same; results are not kept unless --out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where results go")
    args = parser.parse_args()
    tools: list[dict[str, Any]] = [{"tool": "wirespeed plan collective", **ours()}]
    if args.python is None:
        tools.append({"tool": "SimGrid", "why": args.why_not or "not asked: no interpreter was named"})
    else:
        version = subprocess.run(
            [args.python, "-c", "from simgrid import simgrid_version as v; print(v)"],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout.strip()  # fmt: skip
        tools.append({"tool": f"SimGrid {version} (Python, model CM02)", **simgrid(args.python)})
    tools.append({"tool": "Calculon", "why": CALCULON})
    question = {
        "hosts": HOSTS, "size": f"{SIZE_BYTES // 2**20} MiB", "rate": f"{RATE_BIT_PER_S / 1e9:g}",
        "latency": f"{LATENCY_S * 1e6:g}",
    }  # fmt: skip
    for tool in tools:
        print(tool)
    bars = [
        Bar(f"peers: {tool['tool']}, distance from the closed form", abs(tool["off"]), 0.01, at_least=False)
        for tool in tools
        if "off" in tool
    ]
    return finish(
        "planner_peers", bars, {"question": question, "tools": tools}, check=args.check, is_quick=args.quick,
        out=args.out,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
