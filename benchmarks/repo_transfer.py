"""Moving a checkpoint to and from SeaweedFS, and into torch, beside raw clients on the same bytes in the same rounds.

Pull: the product against one object of the same size read by ranges by obstore and boto3, and by s5cmd; each writes a
file. The product verifies every chunk by BLAKE3; raw clients verify nothing. Push: likewise, with SHA-256 and BLAKE3 on
the product's side. Load: from a warm cache into torch, against safetensors with its file in the page cache; both touch
every byte. Memory is the peak of a process of its own that pulls to disk, and one that loads through memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from _harness import Bar, Runs, arguments, finish, run_interleaved
from wirespeed.measure import stats
from wirespeed.repo.cache import Cache
from wirespeed.repo.devstore import DevStore, dev_store
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


def main() -> int:
    options = arguments(__doc__ or "")
    size = (256 if options.quick else 1024) * 1024**2
    rounds = 2 if options.quick else 5
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wirespeed-transfer-")))
        store = stack.enter_context(dev_store(root / "s3"))
        os.environ.update(store.environment)
        folder = root / "model"
        folder.mkdir()
        model = folder / "model.safetensors"
        make_model(model, size)
        expected = model.read_bytes()
        raw = Raw(store, root, model)
        raw.s3.upload_file(str(model), store.bucket, "raw/whole", Config=raw.transfer)
        repository = Repository(open_store(store.url), cache=Cache(root / "cache"))
        repository.push(folder, "m")
        wrong = 0

        def check(path: Path) -> None:
            nonlocal wrong
            wrong += path.read_bytes() != expected
            path.unlink()

        def pull() -> None:
            repository.pull("m", to=root / "out")

        def check_pulls() -> None:
            for name in ("obstore", "boto3", "s5cmd"):
                check(root / name)
            check(root / "out" / "model.safetensors")
            shutil.rmtree(root / "out")

        arms: dict[str, Callable[[], object]] = {
            "wirespeed": pull, "obstore": raw.pull_obstore, "boto3": raw.pull_boto3, "s5cmd": raw.pull_s5cmd,
        }  # fmt: skip
        pulls = run_interleaved(arms, rounds, after_round=check_pulls)
        results["pull_bytes_per_s"] = rates(pulls, size)
        results["pull"] = {name: found.summary() for name, found in pulls.items()}
        print({k: f"{v / 1e6:.0f} MB/s" for k, v in results["pull_bytes_per_s"].items()}, file=sys.stderr)

        counter = iter(range(1000))
        names: list[str] = []

        def push() -> None:
            # A repository of its own each time: nothing is found again.
            names.append(f"push-{next(counter)}")
            Repository(open_store(f"s3://{store.bucket}/{names[-1]}"), cache=Cache(root / "none")).push(folder, "m")

        def clear() -> None:
            raw.delete_pushed()
            for name in names:
                gone = open_store(f"s3://{store.bucket}/{name}")
                gone.delete(stat.key for stat in gone.list_objects("objects"))
            names.clear()

        pushes = run_interleaved(
            {"wirespeed": push, "obstore": raw.push_obstore, "boto3": raw.push_boto3, "s5cmd": raw.push_s5cmd},
            max(2, rounds - 2), after_round=clear,
        )  # fmt: skip
        results["push_bytes_per_s"] = rates(pushes, size)
        results["push"] = {name: found.summary() for name, found in pushes.items()}
        print({k: f"{v / 1e6:.0f} MB/s" for k, v in results["push_bytes_per_s"].items()}, file=sys.stderr)

        import safetensors.torch
        import torch

        from wirespeed.repo.tensors import load

        cached = Path(repository.pull("m").folder) / "model.safetensors"
        sums: dict[str, int] = {}

        def touch(name: str, tensors: dict[str, torch.Tensor]) -> None:
            sums[name] = sum(int(t.view(torch.int64).sum()) for t in tensors.values())

        loads = run_interleaved(
            {
                "wirespeed": lambda: touch("wirespeed", load("m", repo=repository, way="cache")),
                "safetensors": lambda: touch("safetensors", safetensors.torch.load_file(str(cached.resolve()))),
            },
            rounds * 2,
        )
        wrong += sums["wirespeed"] != sums["safetensors"]
        results["load_bytes_per_s"] = rates(loads, size)
        results["load"] = {name: found.summary() for name, found in loads.items()}
        print({k: f"{v / 1e6:.0f} MB/s" for k, v in results["load_bytes_per_s"].items()}, file=sys.stderr)

        start = (
            "import wirespeed.repo.tensors as t\nfrom pathlib import Path\nfrom wirespeed.repo import Repository\n"
            f"r = Repository.open({store.url!r}, cache=Path({str(root / 'other')!r}))"
        )
        results["pull_peak_bytes"] = peak_of(f"{start}\n#\nr.pull('m', to={str(root / 'peak')!r})")
        results["load_peak_bytes"] = peak_of(f"{start}\n#\nx = t.load('m', repo=r, way='memory')") - size
        results["wrong"] = wrong
    pull_best, push_best = (
        max(v for k, v in results[f"{what}_bytes_per_s"].items() if k != "wirespeed") for what in ("pull", "push")
    )
    bars = [
        Bar("repo_transfer/pull_to_fastest_raw", results["pull_bytes_per_s"]["wirespeed"] / pull_best, 0.9),
        Bar("repo_transfer/push_to_fastest_raw", results["push_bytes_per_s"]["wirespeed"] / push_best, 0.8),
        Bar(
            "repo_transfer/load_to_safetensors",
            results["load_bytes_per_s"]["wirespeed"] / results["load_bytes_per_s"]["safetensors"],
            0.8,
        ),
        Bar("repo_transfer/pull_memory_MB", results["pull_peak_bytes"] / 1e6, 256, at_least=False),
        Bar("repo_transfer/load_memory_beyond_tensors_MB", results["load_peak_bytes"] / 1e6, 256, at_least=False),
        Bar("repo_transfer/wrong", wrong, 0, at_least=False),
    ]
    return finish("repo_transfer", bars, results, check=options.check, is_quick=options.quick, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
