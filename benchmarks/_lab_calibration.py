"""What the planner is calibrated on: links, collectives and codecs of small labs, as `wirespeed bench` records them.

A record that was made while the machine's neighbours took more than ``QUIET_SHARE`` of its CPU is made again, at most
twice; the least disturbed one counts, and what share each attempt lost is kept beside the records.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from _harness import least_disturbed, until_quiet
from wirespeed.fabric.files import read_fabric, write_fabric
from wirespeed.fabric.topology import Fabric
from wirespeed.lab import Lab, LabSpec
from wirespeed.records import CodecsRecord, CollectivesRecord, LinksRecord, read, write_bytes

LINES_BIT_PER_S = (250e6, 1e9)
"""Of the labs it is calibrated on: a shaper's segments, and so what a byte costs the cores, depend on the rate."""
SIZES = {250e6: "4KiB,64KiB,512KiB,2MiB,8MiB", 1e9: "4KiB,256KiB,2MiB,8MiB,32MiB"}
QUICK_SIZES = "4KiB,256KiB,2MiB"
SMALL_SIZES = "1KiB,4KiB,16KiB"
REPEATS, QUICK_REPEATS = 8, 6
RUN_TIMEOUT_S = 120.0
LOSSES = "steal.json"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def bench(lab: Lab, arguments: Sequence[str], *, order: Sequence[str] | None = None) -> None:
    """`wirespeed bench ...` on every rank of a lab; raises RuntimeError with what it said where it fails."""
    told: list[str] = []
    result = lab.run(
        [sys.executable, "-m", "wirespeed", "bench", *arguments],
        timeout_s=RUN_TIMEOUT_S,
        on_line=lambda rank, stream, line: told.append(f"[{rank}] {line}"),
        order=order,
    )
    if result.returncode != 0:
        raise RuntimeError(f"bench {arguments[0]} ended with {result.returncode}: " + "\n".join(told[-12:]))


def calibrated(work: Path, strategies: Sequence[str], lines: Sequence[float]) -> list[Fabric]:
    """One fabric per line rate, from the records in the work folder; what is missing there is measured."""
    measure_all(work, strategies, lines)
    targets = [work / f"fabric-{line / 1e6:.0f}.toml" for line in lines]
    for target, fabric in zip(targets, fit(work, lines), strict=True):
        write_fabric(target, fabric)
    return [read_fabric(target) for target in targets]


def measure_all(work: Path, strategies: Sequence[str], lines: Sequence[float]) -> None:
    """The records that the fabrics are calibrated with: 2 and 4 hosts, one rack, and nothing else."""
    is_quick = len(lines) == 1
    codecs = [name for name in strategies if name != "dense"]
    for line in lines:
        sizes, repeats = (QUICK_SIZES, QUICK_REPEATS) if is_quick else (SIZES[line], REPEATS)
        for hosts in (4, 2):
            began = time.monotonic()
            links = work / f"links-{line / 1e6:.0f}.json"
            collectives = work / f"collectives-{line / 1e6:.0f}-{hosts}.json"
            small = work / f"collectives-{line / 1e6:.0f}-{hosts}-small.json"
            stages = work / f"codecs-{hosts}.json"
            if all(path.is_file() for path in (links, collectives, small, stages)):
                continue
            with Lab(LabSpec(hosts=hosts, rate_bit_per_s=line)) as lab:
                duration = "300 ms" if is_quick else "700 ms"
                record(lab, ["links", "--streams", "1", "--duration", duration], links)
                # Sums of fp16 matter to one codec; what they cost more than fp32 is the same at any rate.
                dtypes = "float32,float16" if line == lines[0] else "float32"
                many = ["--sizes", sizes, "--dtypes", dtypes, "--repeats", str(repeats), "--deadline", "80 s"]
                record(lab, ["collectives", *many], collectives)
                # What takes some milliseconds is disturbed the most: many runs cost nothing.
                few = ["--sizes", SMALL_SIZES, "--dtypes", "float32", "--repeats", "40"]
                record(lab, ["collectives", *few], small)
                if codecs:
                    # One process is enough: where ranks outnumber the cores, it is CPU time that is counted.
                    sized = ["--sizes", "16KiB,128KiB,512KiB,2MiB", "--ranks", str(hosts), "--concurrent", str(hosts)]
                    named = ["--strategies", ",".join(codecs), *sized, "--time", "3 s"]
                    record(lab, ["codecs", *named], stages, order=["h0"])
            say(f"calibration: {hosts} hosts at {line / 1e6:.0f} Mbit/s in {time.monotonic() - began:.0f} s")


def record(lab: Lab, arguments: Sequence[str], target: Path, *, order: Sequence[str] | None = None) -> None:
    """One record, unless it is there already; beside it what the neighbours took of each attempt."""
    if target.is_file():
        return

    def once() -> bytes:
        made = target.with_name(f"new-{target.name}")
        bench(lab, [*arguments, "--out", str(made)], order=order)
        content = made.read_bytes()
        made.unlink()
        return content

    attempts = until_quiet(once)
    write_bytes(target, least_disturbed(attempts))
    held = losses(target.parent)
    held[target.name] = [share for _, share in attempts]
    write_bytes(target.parent / LOSSES, json.dumps(held, indent=1).encode())


def losses(work: Path) -> dict[str, list[float]]:
    """Per record of the calibration, the share of the CPU that neighbours took of each attempt."""
    target = work / LOSSES
    held: dict[str, list[float]] = json.loads(target.read_bytes()) if target.is_file() else {}
    return held


def fit(work: Path, lines: Sequence[float]) -> list[Fabric]:
    """The same as `wirespeed fabric calibrate` with the records of each line rate."""
    from wirespeed.fabric.calibrate import calibrate

    codecs = [read(path, CodecsRecord) for path in sorted(work.glob("codecs-*.json"))]
    return [
        calibrate(
            read(work / f"links-{line / 1e6:.0f}.json", LinksRecord),
            [read(path, CollectivesRecord) for path in sorted(work.glob(f"collectives-{line / 1e6:.0f}-*.json"))],
            codecs,
            name=f"lab at {line / 1e6:.0f} Mbit/s",
        )
        for line in lines
    ]
