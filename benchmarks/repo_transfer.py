"""Moving a checkpoint to and from SeaweedFS, and into torch, beside raw clients on the same bytes in the same rounds.

Pull: the product against one object of the same size read by ranges by obstore and boto3, and by s5cmd; each writes a
file. The product verifies every chunk by BLAKE3; raw clients verify nothing. Push: likewise, with SHA-256 and BLAKE3 on
the product's side. Load: from a warm cache into torch, against safetensors with its file in the page cache; both touch
every byte. Memory is the peak of a process of its own that pulls to disk, and one that loads through memory.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from _harness import RESULTS, Bar, Runs, finish, run_interleaved
from wirespeed.measure import stats
from wirespeed.repo.cache import Cache
from wirespeed.repo.devstore import DevStore, dev_store
from wirespeed.repo.parts import is_in_memory
from wirespeed.repo.repository import Repository
from wirespeed.repo.safetensors import build_head
from wirespeed.repo.store import open_store

RAW_PART_BYTES = 16 * 1024**2
WORKERS = 8


def make_model(path: Path, size_bytes: int) -> None:
    """bf16 weights, a few tensors of 64 MiB: what no server or client can compress."""
    rng = np.random.default_rng(0)
    num = size_bytes // (64 * 1024**2)
    head = build_head([(f"w{i}", "BF16", (2**25,), 2**26) for i in range(num)], {})
    with path.open("wb") as stream:
        stream.write(head)
        for _ in range(num):
            stream.write(rng.integers(0, 2**63, 2**23, dtype=np.int64).tobytes())


class Raw:
    """The clients to beat, on one object of the same size."""

    def __init__(self, store: DevStore, folder: Path, model: Path) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self.store = store
        self.folder = folder
        self.model = model
        self.size = model.stat().st_size
        self.s3 = boto3.client(
            "s3", endpoint_url=store.endpoint, aws_access_key_id=store.access_key,
            aws_secret_access_key=store.secret_key,
            region_name="us-east-1",
            config=Config(
                s3={"addressing_style": "path"}, request_checksum_calculation="when_required",
                response_checksum_validation="when_required", max_pool_connections=WORKERS,
            ),
        )  # fmt: skip
        self.transfer = TransferConfig(
            multipart_threshold=RAW_PART_BYTES, multipart_chunksize=RAW_PART_BYTES, max_concurrency=WORKERS
        )
        self.obstore = open_store(f"s3://{store.bucket}/raw").raw

    def pull_obstore(self) -> Path:
        """By ranges, in threads."""
        import obstore

        target = self.folder / "obstore"
        handle = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(handle, self.size)

        def part(start: int) -> None:
            length = min(RAW_PART_BYTES, self.size - start)
            content = memoryview(obstore.get_range(self.obstore, "whole", start=start, length=length))
            os.pwrite(handle, content, start)

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(part, range(0, self.size, RAW_PART_BYTES)))
        os.close(handle)
        return target

    def pull_boto3(self) -> Path:
        """Its own transfer manager."""
        self.s3.download_file(self.store.bucket, "raw/whole", str(self.folder / "boto3"), Config=self.transfer)
        return self.folder / "boto3"

    def pull_s5cmd(self) -> Path:
        """Its own program."""
        self._s5cmd(
            "cp", "-c", str(WORKERS), "-p", "16", f"s3://{self.store.bucket}/raw/whole", str(self.folder / "s5cmd")
        )
        return self.folder / "s5cmd"

    def push_obstore(self) -> None:
        """As a multipart upload."""
        import obstore

        obstore.put(self.obstore, "push-obstore", self.model, chunk_size=RAW_PART_BYTES, max_concurrency=WORKERS)

    def push_boto3(self) -> None:
        """Its own transfer manager."""
        self.s3.upload_file(str(self.model), self.store.bucket, "raw/push-boto3", Config=self.transfer)

    def push_s5cmd(self) -> None:
        """Its own program."""
        self._s5cmd("cp", "-c", str(WORKERS), "-p", "16", str(self.model), f"s3://{self.store.bucket}/raw/push-s5cmd")

    def _s5cmd(self, *arguments: str) -> None:
        program = Path(sys.executable).parent / "s5cmd"
        environment = {**os.environ, **self.store.environment}
        subprocess.run(
            [str(program), "--endpoint-url", self.store.endpoint, *arguments],
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )

    def delete_pushed(self) -> None:
        """Give the room back."""
        for name in ("push-obstore", "push-boto3", "push-s5cmd"):
            self.s3.delete_object(Bucket=self.store.bucket, Key=f"raw/{name}")


def rates(runs: dict[str, Runs], size: int) -> dict[str, float]:
    return {name: size / stats.median(found.wall_s) for name, found in runs.items()}


def peak_of(code: str) -> int:
    """Peak resident bytes of a Python process that runs this, less those of one that only imports what it does."""
    # Not ru_maxrss: a child inherits that of the process that started it.
    report = (
        "\nfrom pathlib import Path\n"
        "print(int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) * 1024)"
    )
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", text + report], check=True, capture_output=True, text=True
            ).stdout.split()[-1]
        )
        for text in (code, code.split("\n#", 1)[0])
    ]
    return peaks[0] - peaks[1]


class Bench:
    """A store with one model in it, and a folder to work in."""

    def __init__(self, stack: contextlib.ExitStack, size: int) -> None:
        self.root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wirespeed-transfer-")))
        self.store = stack.enter_context(dev_store(self.root / "s3"))
        os.environ.update(self.store.environment)
        self.folder = self.root / "model"
        self.folder.mkdir()
        self.model = self.folder / "model.safetensors"
        make_model(self.model, size)
        self.size = self.model.stat().st_size
        self.digest = digest_of(self.model)
        self.raw = Raw(self.store, self.root, self.model)
        self.repository = Repository(open_store(self.store.url), cache=Cache(self.root / "cache"))
        self.wrong = 0

    def check(self, path: Path) -> None:
        """Every byte; then the file goes."""
        self.wrong += digest_of(path) != self.digest
        path.unlink()

    def pull(self, results: dict[str, Any], rounds: int) -> None:
        """To a file on disk."""
        self.raw.s3.upload_file(str(self.model), self.store.bucket, "raw/whole", Config=self.raw.transfer)
        self.repository.push(self.folder, "m")

        def check() -> None:
            for name in ("obstore", "boto3", "s5cmd"):
                self.check(self.root / name)
            self.check(self.root / "out" / "model.safetensors")
            shutil.rmtree(self.root / "out")

        arms: dict[str, Callable[[], object]] = {
            "wirespeed": lambda: self.repository.pull("m", to=self.root / "out"),
            "obstore": self.raw.pull_obstore, "boto3": self.raw.pull_boto3, "s5cmd": self.raw.pull_s5cmd,
        }  # fmt: skip
        self._note(results, run_interleaved(arms, rounds, after_round=check))

    def push(self, results: dict[str, Any], rounds: int) -> None:
        """Into repositories of their own: nothing is found again."""
        counter = iter(range(1000))
        names: list[str] = []

        def push() -> None:
            names.append(f"push-{next(counter)}")
            store = open_store(f"s3://{self.store.bucket}/{names[-1]}")
            Repository(store, cache=Cache(self.root / "none")).push(self.folder, "m")

        def clear() -> None:
            self.raw.delete_pushed()
            for name in names:
                gone = open_store(f"s3://{self.store.bucket}/{name}")
                gone.delete(stat.key for stat in gone.list_objects("objects"))
            names.clear()

        arms: dict[str, Callable[[], object]] = {
            "wirespeed": push, "obstore": self.raw.push_obstore, "boto3": self.raw.push_boto3,
            "s5cmd": self.raw.push_s5cmd,
        }  # fmt: skip
        self._note(results, run_interleaved(arms, max(2, rounds - 2), after_round=clear))

    def load(self, results: dict[str, Any], rounds: int) -> None:
        """From a warm cache into torch."""
        import safetensors.torch
        import torch

        from wirespeed.repo.tensors import load

        self.repository.push(self.folder, "m")
        cached = (Path(self.repository.pull("m").folder) / "model.safetensors").resolve()
        sums: dict[str, int] = {}

        def touch(name: str, tensors: dict[str, torch.Tensor]) -> None:
            sums[name] = sum(int(t.view(torch.int64).sum()) for t in tensors.values())

        arms: dict[str, Callable[[], object]] = {
            "wirespeed": lambda: touch("wirespeed", load("m", repo=self.repository, way="cache")),
            "safetensors": lambda: touch("safetensors", safetensors.torch.load_file(str(cached))),
        }
        self._note(results, run_interleaved(arms, rounds * 2))
        self.wrong += sums["wirespeed"] != sums["safetensors"]

    def memory(self, results: dict[str, Any], _rounds: int) -> None:
        """At the peak, beyond what the program and the tensors take."""
        self.repository.push(self.folder, "m")
        start = (
            "import wirespeed.repo.tensors as t\nfrom pathlib import Path\nfrom wirespeed.repo import Repository\n"
            f"r = Repository.open({self.store.url!r}, cache=Path({str(self.root / 'other')!r}))"
        )
        results["pull_peak_bytes"] = peak_of(f"{start}\n#\nr.pull('m', to={str(self.root / 'peak')!r})")
        results["load_peak_bytes"] = peak_of(f"{start}\n#\nx = t.load('m', repo=r, way='memory')") - self.size

    def _note(self, results: dict[str, Any], runs: dict[str, Runs]) -> None:
        found = results["bytes_per_s"] = rates(runs, self.size)
        results["runs"] = {name: run.summary() for name, run in runs.items()}
        print({name: f"{rate / 1e6:.0f} MB/s" for name, rate in found.items()}, file=sys.stderr)


PARTS = ("pull", "push", "load", "memory")


def digest_of(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").digest()


def bars_of(results: dict[str, Any]) -> list[Bar]:
    bars = []
    for part, limit in (("pull", 0.9), ("push", 0.8), ("load", 0.8)):
        if part in results:
            found = results[part]["bytes_per_s"]
            fastest = max(rate for name, rate in found.items() if name != "wirespeed")
            bars.append(Bar(f"repo_transfer/{part}_to_fastest_other", found["wirespeed"] / fastest, limit))
    if "memory" in results:
        found = results["memory"]
        bars += [
            Bar("repo_transfer/pull_memory_MB", found["pull_peak_bytes"] / 1e6, 256, at_least=False),
            Bar("repo_transfer/load_memory_beyond_tensors_MB", found["load_peak_bytes"] / 1e6, 256, at_least=False),
        ]
    return [*bars, Bar("repo_transfer/wrong", sum(found["wrong"] for found in results.values()), 0, at_least=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="of each arm, beside one that is not counted")
    parser.add_argument("--check", action="store_true", help="print one line per bar, and exit 1 if one is short")
    parser.add_argument("--quick", action="store_true", help="256 MiB, two rounds; not kept")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where results go")
    given = parser.parse_args()
    size = (256 if given.quick else 1024) * 1024**2
    target = given.out if given.out is not None else RESULTS / "repo_transfer.json"
    results: dict[str, Any] = {}
    if not given.quick and target.exists():
        results = json.loads(target.read_text())["results"]
    for part in given.part or PARTS:
        begin = time.perf_counter()
        found: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            bench = Bench(stack, size)
            found["is_in_memory"] = is_in_memory(bench.root.stat().st_dev)
            getattr(bench, part)(found, 2 if given.quick else given.rounds)
            found["wrong"] = bench.wrong
        found["created"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        results[part] = found
        finish("repo_transfer", bars_of(results), results, is_quick=given.quick, out=given.out)
        print(f"{part} took {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    return finish("repo_transfer", bars_of(results), results, check=given.check, is_quick=given.quick, out=given.out)


if __name__ == "__main__":
    sys.exit(main())
