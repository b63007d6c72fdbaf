"""The three models of benchmarks/serving_vs_peers.py, as functions of a batch: the same code in every server.

Needs numpy only: it is imported by every peer's own interpreter.
"""

import time
import zlib

import numpy as np

MAX_ROWS, MAX_DELAY_S = 32, 0.002
FIXED_S, PER_ROW_S = 0.005, 0.0001
ITEMS = {"identity": ("float32", 4096, 4096), "features": ("uint8", 100_000, 512), "timed": ("float32", 16, 16)}
"""By model: the input's type, and how many numbers a row has, in and out (FP32)."""


def identity(x):
    """16 KiB in, the same out."""
    return x


def features(x):
    """100 KB in, 2 KB out: 512 numbers that follow from every byte of a row, cheaply."""
    sums = np.array([zlib.crc32(np.ascontiguousarray(row)) for row in x], np.uint32).astype(np.float32)
    return sums[:, None] + np.arange(512, dtype=np.float32)


def timed(x):
    """5 ms, and 0.1 ms per row."""
    time.sleep(FIXED_S + PER_ROW_S * len(x))
    return x


MODELS = {"identity": identity, "features": features, "timed": timed}


def from_bytes(name, rows):
    """A batch of rows that came as bytes."""
    return np.frombuffer(b"".join(rows), ITEMS[name][0]).reshape(len(rows), -1)
