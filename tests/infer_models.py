"""What tests of nodes and batch jobs share: a model that follows from its input's bytes, nodes as processes, a check of results."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

CODE = """
import hashlib, os, signal, time
import numpy as np


class Model:
    def __init__(self, config):
        self.row_s = config.parameters.get("row_s", 0.0)
        self.hurry = config.parameters["hurry"]

    def infer(self, inputs):
        images = inputs["image"]
        if b"kills the node" in images:
            os.kill(os.getppid(), signal.SIGKILL)
        if b"kills the worker" in images:
            os._exit(3)
        if b"bad" in images:
            raise ValueError("no image")
        end_s = time.monotonic() + self.row_s * len(images)
        while (left_s := end_s - time.monotonic()) > 0 and not os.path.exists(self.hurry):
            time.sleep(min(left_s, 0.02))
        digests = np.stack([np.frombuffer(hashlib.sha256(image).digest(), np.uint8) for image in images])
        return {"features": digests.astype(np.float32), "size": np.array([len(image) for image in images], np.int32)}
"""
TOML = """
schema = 1
backend = "python"
version = "{version}"
[batching]
max_rows = 8
[[input]]
name = "image"
datatype = "BYTES"
shape = []
[[output]]
name = "features"
datatype = "FP32"
shape = [32]
[[output]]
name = "size"
datatype = "INT32"
shape = []
[parameters]
row_s = {row_s}
hurry = "{hurry}"
"""


def make_model(folder: Path, *, row_s: float = 0.0, version: str = "1") -> Path:
    """A folder of models with one, ``digest``; gives the model's own folder.

    Every row takes ``row_s`` until ``hurry(folder)`` is called: so a job lasts until a test has seen what it waits for,
    however slow the machine is, and not longer.
    """
    model = folder / "digest"
    model.mkdir(parents=True)
    (model / "model.py").write_text(CODE)
    (model / "model.toml").write_text(TOML.format(row_s=row_s, version=version, hurry=_hurry(folder)))
    return model


def hurry(folder: Path) -> None:
    """From now on the rows of the models below take no time."""
    _hurry(folder).touch()


def _hurry(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.hurry").resolve()


def wait_for(test: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Poll until true; fail at the deadline."""
    end_s = time.monotonic() + timeout_s
    while not test():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def make_images(folder: Path, count: int, *, special: dict[int, bytes] | None = None) -> list[Path]:
    """Files of a few hundred to a few thousand bytes, by number; ``special`` ones hold what they are given."""
    folder.mkdir()
    rng = np.random.default_rng(3)
    paths = []
    for place in range(count):
        path = folder / f"{place:05}.jpg"
        path.write_bytes((special or {}).get(place) or rng.bytes(int(rng.integers(100, 4000))))
        paths.append(path)
    return paths


class Node:
    """`wirespeed serve --node` as a process."""

    def __init__(self, models: Path, *, address: str = "127.0.0.1:0", env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "wirespeed", "serve", str(models), "--grpc", "none", "--http", "none",
                "--node", address, "--json",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.address = ""

    def wait_open(self) -> Node:
        """Until it is reached."""
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline()
            assert line, "the node ended"
            text += line
        self.address = json.loads(text)["node"]
        return self

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=60)


def expected_features(content: bytes) -> list[float]:
    """What the model gives for an input."""
    return [float(byte) for byte in hashlib.sha256(content).digest()]


def check_results(out: Path, paths: Sequence[Path], *, errors: dict[int, str] | None = None) -> None:
    """One row per input, in order, each with its own result; ``errors``: places and a part of their text."""
    errors = errors or {}
    table = pq.read_table(out)
    assert table["key"].to_pylist() == [str(path) for path in paths]
    told = table["error"].to_pylist()
    assert {place for place, text in enumerate(told) if text is not None} == set(errors)
    for place, part in errors.items():
        assert part in told[place]
    features, sizes = table["features"].to_pylist(), table["size"].to_pylist()
    for place, path in enumerate(paths):
        if place in errors:
            assert features[place] is None
            assert sizes[place] is None
        else:
            content = path.read_bytes()
            assert features[place] == expected_features(content)
            assert sizes[place] == len(content)
