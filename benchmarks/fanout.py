"""Fan-out of 256 MB to 1 to 16 hosts of a lab, beside what else could be done, against the time of one copy.

A seed host holds the version; the time is that of ``wirespeed repo warm``, from its first question to the last host's
last byte on disk, verified and published. B is the goodput of one plain TCP stream over one of the same links in the
same run. Beside it: every host pulling from a real S3 server (SeaweedFS) on the seed host, torch.distributed.broadcast
(gloo), and BitTorrent (libtorrent). With two racks, uplinks of a quarter of what their hosts could send are counted at
their interfaces. Caches lie in memory (/dev/shm): all hosts of a lab share one disk, which real ones do not.

Before each run, of whatever is compared, memory is touched and given back. A virtual machine may return free memory to
its host (free page reporting), and the first touch of a page then costs the machine ten times what writing it does:
that would be a figure of the machine under the lab. What bounds a run is told by the processors' time beside it, of
the peers, of the kernel's network work, and idle.

    python benchmarks/fanout.py --check                 all parts, about eight minutes
    python benchmarks/fanout.py --part hosts-16 --check  one part, under 150 s; results of the others are kept
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from _fanout_arms import checked
from _harness import RESULTS, Bar, finish
from wirespeed.cli.signals import terminable
from wirespeed.lab import Lab, LabSpec
from wirespeed.repo.cache import Cache
from wirespeed.repo.repository import Repository
from wirespeed.repo.store import open_store

SIZE_BYTES = 256_000_000
ARMS = str(Path(__file__).with_name("_fanout_arms.py"))
TOKEN = "benchmark-of-the-fan-out"
PORT = 7710
UPLINK_COPIES = 1.1


class Part:
    """One lab and what is sent in it. ``compare_bytes``: what the other arms send, where 256 MB would take minutes."""

    def __init__(self, lab: str, counts: tuple[int, ...], *, limit: float, compare_bytes: int, rounds: int = 3) -> None:
        self.lab = lab
        self.counts = counts
        self.limit = limit
        self.compare_bytes = compare_bytes
        self.rounds = rounds


PARTS = {
    "hosts-1-2-4": Part("5x1gbit", (1, 2, 4), limit=1.10, compare_bytes=SIZE_BYTES),
    "hosts-8": Part("9x200mbit", (8,), limit=1.10, compare_bytes=32_000_000),
    "hosts-16": Part("17x200mbit", (16,), limit=1.20, compare_bytes=16_000_000, rounds=2),
    # Five hosts in the first rack, four in the second; a rack of four could send 800 Mbit/s.
    "racks": Part("9x200mbit/2racks:200mbit", (8,), limit=1.10, compare_bytes=0),
}


def touch_memory(num_bytes: int) -> None:
    """Take so much memory and give it back: see the module."""
    with mmap.mmap(-1, num_bytes) as memory:
        for at in range(0, num_bytes, mmap.PAGESIZE):
            memory[at] = 1


def processors_s() -> dict[str, float]:
    """Seconds that all processors of this machine spent since it began, by what on."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    return {name: int(value) / os.sysconf("SC_CLK_TCK") for name, value in zip(names, fields, strict=False)}


class Hosts:
    """A lab with a peer on every host; host 0 is the seed."""

    def __init__(self, lab: Lab, base: Path, store: Path, racks: list[str]) -> None:
        self.lab = lab
        self.base = base
        self.store = store
        self.addresses = [f"{host.address}:{PORT}" for host in lab.hosts]
        self.processes: list[subprocess.Popen[bytes]] = []
        for at, host in enumerate(lab.hosts):
            process = lab.popen(
                host.name,
                [
                    sys.executable, "-m", "wirespeed", "repo", "peer", "--listen", self.addresses[at], "--json",
                    "--rack", racks[at],
                ],
                env={"WIRESPEED_CACHE": str(self.cache(at)), "WIRESPEED_TOKEN": TOKEN},
                stdout=subprocess.PIPE,
            )  # fmt: skip
            self.processes.append(process)
        for process in self.processes:
            assert process.stdout is not None
            while (line := process.stdout.readline()) != b"}\n":
                if not line:
                    raise RuntimeError("a peer did not start")

    def cache(self, at: int) -> Path:
        """Of one host."""
        return self.base / f"cache{at}"

    def cpu_s(self) -> float:
        """Of all peers together, in user and kernel mode."""
        total = 0.0
        for process in self.processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def warm(self, count: int) -> dict[str, Any]:
        """Have the version on the first ``count`` hosts, whose caches are emptied before."""
        for at in range(1, count + 1):
            shutil.rmtree(self.cache(at), ignore_errors=True)
        touch_memory(int(count * (SIZE_BYTES + 100e6)) + 200_000_000)
        before_s, machine_s = self.cpu_s(), processors_s()
        done = self.lab.exec(
            "h0",
            [
                sys.executable, "-m", "wirespeed", "repo", "warm", "m@v1", "-r", str(self.store), "--json",
                "--seeds", self.addresses[0], "--hosts", ",".join(self.addresses[1 : count + 1]),
            ],
            env={"WIRESPEED_TOKEN": TOKEN, "WIRESPEED_CACHE": str(self.base / "driver")},
            timeout_s=120,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"warm ended with {done.returncode}: {done.stderr}\n{done.stdout}")
        found: dict[str, Any] = json.loads(done.stdout)
        spent_s = {name: round(value - machine_s[name], 2) for name, value in processors_s().items()}
        passed = [note for host in found["hosts"] for note in host["progress"]["passed_over"]]
        return {
            "seconds": found["seconds"],
            "cpu_s_per_gb": (self.cpu_s() - before_s) / (count * SIZE_BYTES / 1e9),
            "processors_s": spent_s,
            "passed_over": passed,
            "host_seconds": [host["progress"]["seconds"] for host in found["hosts"]],
        }

    def check(self, count: int, wanted: str) -> None:
        """Every byte on every host, hashed anew."""
        for at in range(1, count + 1):
            if checked_version(self.cache(at)) != wanted:
                raise RuntimeError(f"host {at} holds wrong bytes")

    def close(self) -> None:
        """End the peers."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(timeout=20)
            assert process.stdout is not None
            process.stdout.close()


def checked_version(cache: Path) -> str:
    folders = list((cache / "versions" / "m").iterdir())
    return checked(folders[0].resolve()) if len(folders) == 1 else ""


def goodput(lab: Lab, num_bytes: int, *, to: str = "h1") -> float:
    """Bits per second of one TCP stream from the seed to another host."""
    receiver = lab.popen(
        to, [sys.executable, ARMS, "raw", "receive", "-", "7800", str(num_bytes)], stdout=subprocess.PIPE
    )
    assert receiver.stdout is not None
    receiver.stdout.readline()
    address = next(host.address for host in lab.hosts if host.name == to)
    sent = lab.exec("h0", [sys.executable, ARMS, "raw", "send", address, "7800", str(num_bytes)], timeout_s=120)
    receiver.wait(timeout=20)
    receiver.stdout.close()
    if sent.returncode != 0:
        raise RuntimeError(sent.stderr)
    return 8 * num_bytes / float(json.loads(sent.stdout)["seconds"])


def broadcast(lab: Lab, count: int, num_bytes: int) -> float:
    """Seconds of the second of two broadcasts."""
    port = str(lab.free_port("h0"))
    ranks = [
        lab.popen(
            host.name,
            [sys.executable, ARMS, "gloo", str(rank), str(count + 1), lab.hosts[0].address, port, str(num_bytes), "2"],
            stdout=subprocess.PIPE,
        )
        for rank, host in enumerate(lab.hosts[: count + 1])
    ]
    out = [rank.communicate(timeout=140)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a rank of the broadcast failed")
    return float(json.loads(out[0])["seconds"][1])


def bittorrent(lab: Lab, base: Path, count: int, num_bytes: int) -> float:
    """Seconds until the last of ``count`` has everything."""
    import libtorrent as lt

    folder = base / "torrent"
    seed = folder / "0"
    seed.mkdir(parents=True)
    (seed / "weights.bin").write_bytes(np.random.default_rng(3).bytes(num_bytes))
    storage = lt.file_storage()
    lt.add_files(storage, str(seed / "weights.bin"))
    made = lt.create_torrent(storage, 256 * 1024)
    lt.set_piece_hashes(made, str(seed))
    (folder / "m.torrent").write_bytes(lt.bencode(made.generate()))
    addresses = ",".join(host.address for host in lab.hosts[: count + 1])
    peers = []
    for at, host in enumerate(lab.hosts[: count + 1]):
        (folder / str(at)).mkdir(exist_ok=True)
        peers.append(
            lab.popen(
                host.name,
                [
                    sys.executable, ARMS, "torrent", str(at), str(folder / str(at)), str(folder / "m.torrent"),
                    addresses, "7900", str(folder / "go"),
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
        )  # fmt: skip
    for peer in peers:
        assert peer.stdout is not None
        if peer.stdout.readline() != b"ready\n":
            raise RuntimeError("a torrent peer did not start")
    temporary = folder / "go.new"
    temporary.write_text(repr(time.time()))
    os.replace(temporary, folder / "go")
    seconds = []
    for peer in peers[1:]:
        assert peer.stdout is not None
        seconds.append(float(json.loads(peer.stdout.readline())["seconds"]))
    for peer in peers:
        assert peer.stdin is not None
        peer.stdin.close()
        peer.wait(timeout=20)
        assert peer.stdout is not None
        peer.stdout.close()
    wanted = checked(seed)
    for at in range(1, count + 1):
        if checked(folder / str(at)) != wanted:
            raise RuntimeError("a torrent peer holds wrong bytes")
    shutil.rmtree(folder)
    return max(seconds)


def pulls(lab: Lab, base: Path, count: int, num_bytes: int) -> float:
    """Seconds until every host has pulled from a SeaweedFS on the seed host, all at the same time."""
    data = base / "weed"
    starter = [sys.executable, ARMS, "store", str(data), lab.hosts[0].address]
    store = lab.popen("h0", starter, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert store.stdout is not None
        environment = json.loads(store.stdout.readline())
        model = base / "small"
        model.mkdir()
        (model / "weights.bin").write_bytes(np.random.default_rng(3).bytes(num_bytes))
        command = [sys.executable, "-m", "wirespeed", "repo"]
        done = lab.exec(
            "h0", [*command, "push", str(model), "-n", "m"],
            env={**environment, "WIRESPEED_CACHE": str(base / "pushed")}, timeout_s=60,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        begin = time.perf_counter()
        running = [
            lab.popen(
                host.name, [*command, "pull", "m@v1", "--json"],
                env={**environment, "WIRESPEED_CACHE": str(base / f"pull{at}")}, stdout=subprocess.PIPE,
            )
            for at, host in enumerate(lab.hosts[1 : count + 1])
        ]  # fmt: skip
        for process in running:
            process.communicate(timeout=140)
        seconds = time.perf_counter() - begin
        if any(process.returncode for process in running):
            raise RuntimeError("a pull failed")
        return seconds
    finally:
        assert store.stdin is not None
        store.stdin.close()
        try:
            store.wait(timeout=20)
        except subprocess.TimeoutExpired:
            store.kill()
            store.wait()
        for path in base.glob("pull*"):
            shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(base / "small", ignore_errors=True)
        shutil.rmtree(data, ignore_errors=True)


def counters(lab: Lab) -> dict[str, int]:
    """Bytes that each rack's uplink sent (up) and was given (down), from the interface counters of its veth pair."""
    found = {}
    for line in Path(f"/proc/{lab.status().keeper_pid}/net/dev").read_text().splitlines()[2:]:
        name, _, rest = line.partition(":")
        if name.strip().startswith("up"):
            fields = rest.split()
            found[f"{name.strip()} in"] = int(fields[0])
            found[f"{name.strip()} out"] = int(fields[8])
    return found


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="wirespeed-fanout-", dir=shared if shared.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_part(
    part: Part, results: dict[str, Any], *, is_quick: bool, is_alone: bool, say: Callable[[str], None],
    save: Callable[[], None],
) -> None:  # fmt: skip
    """Fill ``results``, and ``save`` after each step: what was measured outlives what fails after it."""
    rounds = 1 if is_quick else part.rounds
    with scratch() as base:
        model = base / "model"
        model.mkdir()
        (model / "weights.bin").write_bytes(np.random.default_rng(11).bytes(SIZE_BYTES))
        wanted = checked(model)
        repository = Repository(open_store(base / "store", must_exist=False), cache=Cache(base / "cache0"))
        repository.push(model, "m")
        repository.pull("m@v1")
        shutil.rmtree(model)
        with Lab(LabSpec.parse(part.lab)) as lab:
            results |= {"lab": part.lab, "size_bytes": SIZE_BYTES, "hosts": {}}
            racks = [f"r{host.rack}" for host in lab.hosts]
            streams = [goodput(lab, 100_000_000 if "1gbit" in part.lab else 32_000_000) for _ in range(3)]
            # The best: what a busy machine takes from this measurement would be given to the bars.
            b = results["goodput_bit_per_s"] = max(streams)
            results["every_goodput_bit_per_s"] = streams
            ideal_s = results["one_copy_s"] = 8 * SIZE_BYTES / b
            hosts = Hosts(lab, base, base / "store", racks)
            try:
                for count in part.counts:
                    before = counters(lab)
                    runs = [hosts.warm(count) for _ in range(rounds)]
                    after = counters(lab)
                    hosts.check(count, wanted)
                    seconds = statistics.median(run["seconds"] for run in runs)
                    found = results["hosts"][str(count)] = {
                        "median_s": seconds, "ratio": seconds / ideal_s, "limit": part.limit, "runs": runs,
                    }  # fmt: skip
                    say(f"{count} hosts: {seconds:.3f} s, {seconds / ideal_s:.3f} of one copy")
                    if len(set(racks)) > 1:
                        found["uplink_copies"] = {
                            key: (after[key] - before[key]) / rounds / SIZE_BYTES for key in after
                        }
                    save()
            finally:
                hosts.close()
            if part.compare_bytes and not is_quick and not is_alone:
                count = part.counts[-1]
                num_bytes = part.compare_bytes
                one_s = 8 * num_bytes / b
                compared: dict[str, Any] = results.setdefault("compared", {})
                compared |= {"hosts": count, "size_bytes": num_bytes, "one_copy_s": one_s}
                for arm, run in (
                    ("gloo broadcast", lambda: broadcast(lab, count, num_bytes)),
                    ("BitTorrent", lambda: bittorrent(lab, base, count, num_bytes)),
                    ("pulls from the store", lambda: pulls(lab, base, count, num_bytes)),
                ):
                    touch_memory(int(count * 1.5 * num_bytes) + 200_000_000)
                    try:
                        taken_s = run()
                    except Exception as fault:  # the others are still worth their time; this one is told as failed
                        compared[arm] = {"failed": f"{type(fault).__name__}: {fault}"[:2000]}
                        say(f"  {arm} FAILED: {fault}")
                        continue
                    compared[arm] = {"seconds": taken_s, "ratio": taken_s / one_s}
                    say(f"  {arm}, {num_bytes / 1e6:.0f} MB: {taken_s:.3f} s, {taken_s / one_s:.3f} of one copy")
                    save()


def bars_of(name: str, results: dict[str, Any]) -> list[Bar]:
    bars = []
    for count, found in results.get("hosts", {}).items():
        bars.append(Bar(f"{name}: time to {count} hosts / one copy", found["ratio"], found["limit"], at_least=False))
        bars += [
            Bar(f"{name}: copies over {key}", copies, UPLINK_COPIES, at_least=False)
            for key, copies in found.get("uplink_copies", {}).items()
        ]
    return bars


def bars_of_all(results: dict[str, Any]) -> list[Bar]:
    return [bar for name in PARTS if name in results for bar in bars_of(name, results[name])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this part; may be repeated")
    parser.add_argument("--check", action="store_true", help="print one line per bar, and exit 1 if one is short")
    parser.add_argument("--quick", action="store_true", help="4 hosts, one round, nothing beside it; not kept")
    parser.add_argument("--alone", action="store_true", help="nothing beside it; what was measured of that is kept")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where results go")
    given = parser.parse_args()
    os.environ.setdefault("WIRESPEED_STATE_DIR", f"/tmp/wirespeed-fanout-{secrets.token_hex(4)}")
    parts = given.part or (["hosts-1-2-4"] if given.quick else list(PARTS))
    target = given.out if given.out is not None else RESULTS / "fanout.json"
    results: dict[str, Any] = {}
    if not given.quick and target.exists():
        results = json.loads(target.read_text())["results"]
    for name in parts:
        begin = time.perf_counter()
        kept = results.get(name, {}) if given.alone else {}
        results[name] = {"compared": kept["compared"]} if "compared" in kept else {}

        def save() -> None:
            finish("fanout", bars_of_all(results), results, is_quick=given.quick, out=given.out)

        run_part(
            PARTS[name], results[name], is_quick=given.quick, is_alone=given.alone, save=save,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )  # fmt: skip
        results[name]["created"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        print(f"{name} took {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    return finish("fanout", bars_of_all(results), results, check=given.check, is_quick=given.quick, out=given.out)


if __name__ == "__main__":
    with terminable():  # caches of gigabytes must not stay in memory
        sys.exit(main())
