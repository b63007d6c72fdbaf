"""Whether `wirespeed doctor fabric` names what is wrong in a lab, and nothing where nothing is wrong.

Each run builds a lab of 8 hosts at 200 Mbit/s, breaks one thing (another host each time), and runs the command as users
do; right is the finding of the right kind with the right subject and no other. Racks hold two hosts each with an uplink
of 400 Mbit/s, so that nothing is oversubscribed until an uplink is halved. A path of one pair is slowed by an htb class
for the destination; the flapping link goes down for 150 ms every 0.7 s.

The whole takes about a quarter of an hour. It can be done in parts: `--join FILE` goes on where the results in FILE
end, `--seconds 120` begins no run after so long, `--faults NAME,...` runs some kinds only.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from _harness import Bar, finish
from wirespeed.cli import render
from wirespeed.lab import Lab, LabSpec
from wirespeed.lab.layout import host_address
from wirespeed.lab.shaping import shape_of

RATE = 200e6
HOSTS, RACKS = 8, 4
DURATION = "200 ms"
"""5 MB per transfer, in windows of 1 MB."""
RACK_LIST = ";".join(f"h{2 * rack},h{2 * rack + 1}" for rack in range(RACKS))

_SLOW_SEND = """
import sys
from pyroute2 import IPRoute
rate, burst, limit, gso = map(int, sys.argv[1:5])
with IPRoute() as netlink:
    device = netlink.link_lookup(ifname="eth0")[0]
    netlink.tc("change", "tbf", device, 0x10000, rate=rate, burst=burst, limit=limit)
    netlink.link("set", index=device, gso_max_size=gso)
"""

_SLOW_PATH = """
import sys
from pyroute2 import IPRoute
full, slow = (int(text) // 8 for text in sys.argv[1:3])
target = sys.argv[3]
with IPRoute() as netlink:
    device = netlink.link_lookup(ifname="eth0")[0]
    netlink.tc("del", index=device, handle=0x10000, parent=0xFFFFFFFF)
    netlink.tc("add", "htb", device, 0x10000, default=0x10)
    for handle, rate in ((0x10010, full), (0x10020, slow)):
        netlink.tc("add-class", "htb", device, handle, parent=0x10000, rate=rate, ceil=rate,
                   burst=max(16384, rate // 2000), cburst=max(16384, rate // 2000))
    number = int.from_bytes(bytes(map(int, target.split("."))), "big")
    netlink.tc("add-filter", "u32", device, parent=0x10000, prio=1, protocol=0x0800, target=0x10020,
               keys=[f"{number:#x}/0xffffffff+16"])
"""


def python(lab: Lab, host: str, code: str, *words: object) -> None:
    """Run some Python in a host."""
    result = lab.exec(host, [sys.executable, "-c", code, *map(str, words)], timeout_s=30)
    if result.returncode != 0:
        raise RuntimeError(f"{host}: {result.stderr[-400:]}")


def healthy(lab: Lab, source: random.Random) -> tuple[tuple[str, str] | None, AbstractContextManager[Any]]:
    """Nothing is wrong."""
    return None, nullcontext()


def slow_host(lab: Lab, source: random.Random) -> tuple[tuple[str, str], AbstractContextManager[Any]]:
    """60 % both ways."""
    host = f"h{source.randrange(HOSTS)}"
    lab.fault(host, "rate", rate_bit_per_s=0.6 * RATE)
    return ("link.slow-host", host), nullcontext()


def slow_direction(lab: Lab, source: random.Random) -> tuple[tuple[str, str], AbstractContextManager[Any]]:
    """60 % sending only."""
    host = f"h{source.randrange(HOSTS)}"
    shape = shape_of(0.6 * RATE)
    python(lab, host, _SLOW_SEND, shape.rate_bytes_per_s, shape.burst_bytes, shape.queue_bytes, shape.segment_bytes)
    return ("link.slow-tx", host), nullcontext()


def slow_path(lab: Lab, source: random.Random) -> tuple[tuple[str, str], AbstractContextManager[Any]]:
    """One pair at 60 %, one way."""
    one, other = source.sample(range(HOSTS), 2)
    python(lab, f"h{one}", _SLOW_PATH, int(RATE), int(0.6 * RATE), host_address(other))
    return ("link.slow-path", f"h{one} -> h{other}"), nullcontext()


def slow_uplink(lab: Lab, source: random.Random) -> tuple[tuple[str, str], AbstractContextManager[Any]]:
    """A rack's uplink at half."""
    rack = source.randrange(RACKS)
    lab.fault(f"rack{rack}", "rate", rate_bit_per_s=RATE)
    return ("link.slow-uplink", f"r{rack}"), nullcontext()


def flapping(lab: Lab, source: random.Random) -> tuple[tuple[str, str], AbstractContextManager[Any]]:
    """A link that goes down for 150 ms every 0.7 s."""
    host = f"h{source.randrange(1, HOSTS)}"  # h0 keeps the measurement's own control connections

    @contextmanager
    def flaps() -> Any:
        done = threading.Event()

        def work() -> None:
            while not done.wait(0.55):
                lab.fault(host, "down")
                done.wait(0.15)
                lab.fault(host, "up")

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    return ("link.flapping", host), flaps()


Break = Callable[[Lab, random.Random], tuple[tuple[str, str] | None, AbstractContextManager[Any]]]
KINDS: dict[str, tuple[str, Break, int]] = {
    "host": ("host at 60 %", slow_host, 10),
    "direction": ("one direction at 60 %", slow_direction, 10),
    "path": ("one path at 60 %", slow_path, 10),
    "uplink": ("rack uplink halved", slow_uplink, 10),
    "flapping": ("flapping link", flapping, 10),
    "healthy": ("healthy", healthy, 20),
}
"""Short name to words, what breaks it, and runs."""


def run_once(kind: str, seed: int) -> dict[str, Any]:
    """Whether it was named rightly, what was found, what was expected, and what was dropped after the retest."""
    source = random.Random(f"{kind} {seed}")
    started_at = time.monotonic()
    with Lab(LabSpec(hosts=HOSTS, rate_bit_per_s=RATE, racks=RACKS, uplink_bit_per_s=2 * RATE)) as lab:
        expected, during = KINDS[kind][1](lab, source)
        out: list[str] = []
        err: list[str] = []

        def on_line(rank: int, stream: str, line: str) -> None:
            (err if stream == "stderr" else out).append(line)

        command = [
            sys.executable, "-m", "wirespeed", "doctor", "fabric", "--racks", RACK_LIST, "--streams", "1",
            "--duration", DURATION, "--congestion", "cubic", "--json",
        ]  # fmt: skip
        with during:
            result = lab.run(command, timeout_s=300, on_line=on_line)
    seconds = round(time.monotonic() - started_at, 1)
    if result.returncode not in (0, 1) or not out:
        found, dropped = [("failed", "\n".join(err)[-300:])], []
    else:
        report = json.loads("\n".join(out))
        found = [(finding["id"], finding["subject"]) for finding in report["findings"]]
        dropped = report["dropped"]
    is_right = found == ([] if expected is None else [expected])
    return {
        "seed": seed, "is_right": is_right, "found": found, "expected": expected, "dropped": dropped, "seconds": seconds
    }  # fmt: skip


def options_of() -> argparse.Namespace:
    """Those of every benchmark, and which kinds to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print one line per bar, and exit 1 if one is short")
    parser.add_argument("--quick", action="store_true", help="one run of each kind; kept only with --out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where results go (benchmarks/results/NAME.json)")
    parser.add_argument("--faults", metavar="NAME,...", help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--join", type=Path, metavar="FILE", help="go on where these results end")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    options = parser.parse_args()
    options.kinds = list(KINDS) if options.faults is None else options.faults.split(",")
    unknown = [kind for kind in options.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"got {', '.join(unknown)}; expected some of {', '.join(KINDS)}")
    return options


def write_and_check(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]], *, check: bool) -> int:
    """The results so far, and the exit status."""
    bars = []
    for kind, (name, _, wanted) in KINDS.items():
        held = runs.get(kind, [])
        if held or options.faults is None:
            count = max(len(held), 1) if options.quick else wanted
            bars.append(Bar(f"{name}: named rightly (runs of {count})", sum(run["is_right"] for run in held), count))
    return finish("doctor_lab", bars, {"runs": runs}, check=check, is_quick=options.quick, out=options.out)


def main() -> int:
    """Run, show, check."""
    options = options_of()
    started_at = time.monotonic()
    runs: dict[str, list[dict[str, Any]]] = {}
    if options.join is not None and options.join.exists():
        runs = json.loads(options.join.read_bytes())["results"]["runs"]
    # One of each kind in turn: what disturbs the machine for a while hits all kinds.
    for seed in range(max(KINDS[kind][2] for kind in options.kinds)):
        for kind in options.kinds:
            count = (2 if kind == "healthy" else 1) if options.quick else KINDS[kind][2]
            is_done = seed >= count or any(run["seed"] == seed for run in runs.get(kind, []))
            if is_done or time.monotonic() - started_at > options.seconds:
                continue
            run = run_once(kind, seed)
            runs.setdefault(kind, []).append(run)
            words = "right" if run["is_right"] else f"expected {run['expected']}, found {run['found']}"
            print(f"{kind} {seed}: {words} ({run['seconds']} s)", file=sys.stderr, flush=True)
            write_and_check(options, runs, check=False)
    rows = [
        [name, f"{sum(run['is_right'] for run in held)} of {len(held)}" if (held := runs.get(kind, [])) else "not run"]
        for kind, (name, _, _) in KINDS.items()
    ]
    render.show(render.make_table(["lab", "named rightly"], rows))
    return write_and_check(options, runs, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
