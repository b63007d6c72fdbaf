"""How well and how fast logs are read: every format of NCCL 2.4 to 2.30, one core, constant memory, damaged logs.

Logs are made up in the formats of each version (tests/nccl_job_logs.py). Speed is MB/s of CPU time of one process bound
to one core, for a log of channel lines of 512 ranks, one that is mostly the job's own lines, and both with failures
among them; the slowest counts. Memory is the peak of a process that reads 1 GB less that of one that reads 64 MB of the
same log: jobs restart in it with new process numbers, as real long logs have it. Healthy logs are cut, interleaved and
laced with rubbish; each must be read without an exception and without a finding.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from _harness import Bar, arguments, finish
from log_damage import DAMAGES
from nccl_job_logs import LAUNCHERS, VERSIONS, JobLog, text_of
from wirespeed.cli import render
from wirespeed.doctor.diagnose import causes_of
from wirespeed.doctor.dossier import Dossier
from wirespeed.doctor.log_scan import scan

MB = 10**6
SPEED_MB = 64
MEMORY_MB = 1000
MIN_MB_PER_S = 40
MAX_GROWTH_MB = 16
"""Between 64 MB and 1 GB: the interpreter's own arenas move by a few MB."""

_PEAK = """
import resource, sys
from wirespeed.doctor.log_scan import scan
facts = scan([sys.argv[1]])
assert facts.nccl.num_lines > 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def channel_text(restart: int) -> bytes:
    """The set-up of 512 ranks."""
    job = JobLog(version="2.21.5", hosts=64, gpus=8, channels=16)
    return text_of(job.lines()).replace(b":41".decode(), f":{41 + restart}").encode()


def step_text(count: int) -> bytes:
    """Lines of the job itself."""
    return text_of(JobLog().steps(count)).encode()


def make(path: Path, size_mb: int, *, kind: str) -> Path:
    """A log of about that size: "channels", "steps" or "mixed"."""
    steps = step_text(20_000)
    failure = text_of(
        JobLog(version="2.28.7").warn(1, "socketProgress: Connection closed by remote peer ripe-01<1>")
    ).encode()
    written = restart = 0
    with path.open("wb") as file:
        while written < size_mb * MB:
            parts = {"channels": [channel_text(restart)], "steps": [steps]}.get(
                kind, [channel_text(restart), steps, steps, failure]
            )
            written += sum(file.write(part) for part in parts)
            restart += 1
    return path


def speeds(folder: Path, size_mb: int, rounds: int) -> dict[str, list[float]]:
    """MB per second of CPU time, by kind of log; memcpy beside."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
    paths = {kind: make(folder / f"{kind}.log", size_mb, kind=kind) for kind in ("channels", "steps", "mixed")}
    found: dict[str, list[float]] = {kind: [] for kind in (*paths, "memcpy")}
    for round_ in range(-1, rounds):
        for kind, path in paths.items():
            start = time.process_time()
            facts = scan([path])
            spent = time.process_time() - start
            assert facts.num_bytes == path.stat().st_size
            if round_ >= 0:
                found[kind].append(facts.num_bytes / MB / spent)
        data = bytearray(SPEED_MB * MB)
        start = time.process_time()
        bytes(data)
        if round_ >= 0:
            found["memcpy"].append(SPEED_MB / (time.process_time() - start))
    return found


def peak_bytes(path: Path) -> int:
    """Peak memory of a process that reads the file."""
    result = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, check=True, timeout=900
    )
    return int(result.stdout)


def formats_read(folder: Path) -> tuple[int, int]:
    """How many of all versions x launchers x networks are read right, and how many there are."""
    right = total = 0
    path = folder / "format.log"
    for version in VERSIONS:
        for launcher in LAUNCHERS:
            for layer in ("IB", "RoCE", "Socket"):
                for has_gdr in (True, False) if layer != "Socket" else (False,):
                    job = JobLog(version=version, launcher=launcher, layer=layer, has_gdr=has_gdr)
                    path.write_text(text_of(job.lines()))
                    nccl = scan([path]).nccl
                    total += 1
                    right += (
                        nccl.version == version
                        and nccl.hosts == ("ripe-00", "ripe-01")
                        and nccl.uses_sockets == (layer == "Socket")
                        and nccl.num_via("NET", has_gdr=has_gdr) == 8
                        and nccl.num_via("P2P") == 24
                        and (layer == "Socket" or nccl.is_roce == (layer == "RoCE"))
                        and len(nccl.comms) == 1
                        and not nccl.comms[0].is_hung
                    )
    return right, total


def damaged(folder: Path, count: int) -> tuple[int, list[str]]:
    """Damage healthy logs; how many were read without exception or finding, and what the others said."""
    path = folder / "damaged.log"
    fine = 0
    complaints: list[str] = []
    for seed in range(count):
        source = random.Random(seed)
        job = JobLog(
            version=source.choice(VERSIONS),
            launcher=source.choice(LAUNCHERS),
            layer=source.choice(("IB", "RoCE", "Socket")),
        )
        text = text_of(job.lines(), job.steps(100)).encode()
        for damage in source.sample(DAMAGES, source.randrange(1, 4)):
            text = damage(text, source)
        path.write_bytes(text)
        causes = causes_of(Dossier(facts=scan([path])))
        # A log that ends within the set-up does look like a hang: that is not a false cause, and it says so.
        wrong = [c.id for c in causes if c.id != "nccl.init-hang" and c.finding.severity != "notice"]
        fine += not wrong
        complaints += [f"seed {seed}: {', '.join(wrong)}"] if wrong else []
    return fine, complaints


def main() -> int:
    """Run, show, check."""
    options = arguments(__doc__ or "")
    count = 60 if options.quick else 600
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        right, total = formats_read(folder)
        fine, complaints = damaged(folder, count)
        small = peak_bytes(make(folder / "small.log", 64, kind="mixed"))
        large_mb = 200 if options.quick else MEMORY_MB
        large = peak_bytes(make(folder / "large.log", large_mb, kind="mixed"))
        (folder / "large.log").unlink()
        speed = speeds(folder, 16 if options.quick else SPEED_MB, 3 if options.quick else 5)
    medians = {kind: sorted(values)[len(values) // 2] for kind, values in speed.items()}
    rows = [[kind, f"{value:.0f}", f"{value / medians['memcpy']:.4f}"] for kind, value in medians.items()]
    render.show(render.make_table(["log", "MB/s", "of memcpy"], rows, title="one core, CPU time"))
    print(f"peak memory: {small / MB:.0f} MB for 64 MB, {large / MB:.0f} MB for {large_mb} MB of log")
    print(f"formats: {right} of {total} read right; damaged logs: {fine} of {count} without a finding")
    for complaint in complaints[:10]:
        print(f"  {complaint}")
    slowest = min(value for kind, value in medians.items() if kind != "memcpy")
    bars = [
        Bar("formats read right (share)", right / total, 1.0),
        Bar("slowest kind of log (MB/s)", slowest, MIN_MB_PER_S),
        Bar("memory growth to 1 GB (MB)", (large - small) / MB, MAX_GROWTH_MB, at_least=False),
        Bar("damaged healthy logs without a finding (share)", fine / count, 1.0),
    ]
    results = {
        "speed_mb_per_s": speed, "peak_small_bytes": small, "peak_large_bytes": large, "large_mb": large_mb,
        "formats": total, "damaged": count, "complaints": complaints,
    }  # fmt: skip
    return finish("doctor_logs", bars, results, check=options.check, is_quick=options.quick, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
