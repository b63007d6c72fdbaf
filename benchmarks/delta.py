"""Deltas of an Adam-like step, per chunk of 8 MiB: bytes, speed, and the hash of every result.

Weights are N(0, 0.02) in fp32; a step adds N(0, 1) x lr x 0.3 (the reference's model of Adam); bf16 is rounded from it.
Speed is that of encoding, and of applying with the verification of the result by BLAKE3 as a reader does it, over two
threads, in bytes of weights per second; beside them zstd -1 and memcpy on the same bytes in the same rounds. The
compiled loops are loaded before, as in a process that has coded a gigabyte; what was compiled or not is in the results.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3

from _harness import Bar, arguments, finish, run_interleaved
from wirespeed.repo import delta
from wirespeed.repo.chunks import PIECE_BYTES

THREADS = 2
REFERENCE_FP32 = {1e-6: 0.370, 1e-5: 0.478}
"""XOR + byte planes + zstd-1 of fp32, best of the reference, by learning rate, one step apart."""


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def xor_planes(old: memoryview, new: memoryview, width: int) -> int:
    """Bytes that the reference's fp32 codec takes for the same chunk, made here and now."""
    mixed = np.frombuffer(old, np.uint8) ^ np.frombuffer(new, np.uint8)
    planes = np.ascontiguousarray(mixed.reshape(-1, width).T)
    return min(
        len(zstandard.ZstdCompressor(level=1).compress(planes.tobytes())),
        sum(len(zstandard.ZstdCompressor(level=1).compress(p.tobytes())) for p in planes),
    )


def chunks(array: np.ndarray) -> list[memoryview]:
    flat = array.view(np.uint8).data
    return [flat[at : at + PIECE_BYTES] for at in range(0, len(flat), PIECE_BYTES)]


def case(name: str, old: np.ndarray, new: np.ndarray, rounds: int, pool: ThreadPoolExecutor) -> dict[str, Any]:
    width = old.itemsize
    olds, news = chunks(old), chunks(new)
    digests = [blake3(chunk).digest() for chunk in news]
    encoded: list[Any] = []
    state: dict[str, Any] = {"wrong": 0}

    def encode() -> None:
        encoded[:] = pool.map(lambda pair: delta.encode_delta(*pair, width=width), zip(olds, news, strict=True))

    def apply_one(item: tuple[Any, memoryview, bytes]) -> bool:
        found, base, digest = item
        content = delta.decode(found.payload, encoding=found.encoding, width=width, length=len(base), base=base)
        return blake3(content).digest() == digest

    def apply() -> None:
        state["wrong"] += sum(not right for right in pool.map(apply_one, zip(encoded, olds, digests, strict=True)))

    def zstd() -> None:
        list(pool.map(lambda chunk: zstandard.ZstdCompressor(level=1).compress(chunk), news))

    def copy() -> None:
        list(pool.map(bytearray, news))

    runs = run_interleaved({"encode": encode, "apply": apply, "zstd -1": zstd, "memcpy": copy}, rounds)
    size = sum(map(len, news))
    # The best round: the machine is shared, and what the codec can do is asked.
    rates = {arm: size / min(found.wall_s) for arm, found in runs.items()}
    result = {
        "bytes": size,
        "changed": float((old != new).mean()),
        "share": sum(len(found.payload) for found in encoded) / size,
        "encodings": sorted({found.encoding for found in encoded}),
        "wrong": state["wrong"],
        "rates_bytes_per_s": rates,
        "runs": {arm: found.summary() for arm, found in runs.items()},
    }
    print(
        f"{name}: {result['changed']:.2%} changed, {result['share']:.3%} of the bytes "
        f"({', '.join(result['encodings'])}), "
        f"encode {rates['encode'] / 1e9:.2f} GB/s, apply and verify {rates['apply'] / 1e9:.2f}, "
        f"zstd -1 {rates['zstd -1'] / 1e9:.2f}, memcpy {rates['memcpy'] / 1e9:.2f}; {result['wrong']} wrong",
        file=sys.stderr,
    )
    return result


def main() -> int:
    options = arguments(__doc__ or "")
    elements = 2**23 if options.quick else 2**25
    rounds = 3 if options.quick else 7
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(elements) * 0.02).astype(np.float32)
    noise = rng.standard_normal(elements).astype(np.float32)
    results: dict[str, Any] = {"is_compiled": delta.load_loops()}
    xor: dict[float, float] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for label, target in (("bf16 1 %", 0.01), ("bf16 3.7 %", 0.037)):
            lr = _rate_for(weights, noise, target)
            results[label] = case(label, bf16(weights), bf16(weights + noise * np.float32(lr * 0.3)), rounds, pool)
        for lr in REFERENCE_FP32:
            half = weights[: elements // 2]
            new = half + noise[: elements // 2] * np.float32(lr * 0.3)
            results[f"fp32 lr {lr:g}"] = case(f"fp32 lr {lr:g}", half, new, rounds, pool)
            pairs = list(zip(chunks(half), chunks(new), strict=True))[:2]
            xor[lr] = sum(xor_planes(*pair, width=4) for pair in pairs) / sum(len(p[1]) for p in pairs)
        frozen = bf16(weights[: 2**22])
        results["frozen"] = case("frozen", frozen, frozen.copy(), rounds, pool)
    bars = [
        Bar("delta/bf16_1_percent/share", results["bf16 1 %"]["share"], 0.012, at_least=False),
        Bar("delta/bf16_3.7_percent/share", results["bf16 3.7 %"]["share"], 0.030, at_least=False),
        Bar("delta/frozen/share", results["frozen"]["share"], 1e-4, at_least=False),
        Bar("delta/wrong", sum(r["wrong"] for r in results.values() if isinstance(r, dict)), 0, at_least=False),
    ]
    for lr, reference in REFERENCE_FP32.items():
        share = results[f"fp32 lr {lr:g}"]["share"]
        bars.append(Bar(f"delta/fp32_lr_{lr:g}/share_of_reference", share / reference, 1.05, at_least=False))
        bars.append(Bar(f"delta/fp32_lr_{lr:g}/share_of_xor_planes_here", share / xor[lr], 1.05, at_least=False))
    for label in ("bf16 1 %", "bf16 3.7 %", "fp32 lr 1e-06"):
        for arm in ("encode", "apply"):
            name = label.replace(" ", "_").replace("%", "percent")
            bars.append(Bar(f"delta/{name}/{arm}_GB_per_s", results[label]["rates_bytes_per_s"][arm] / 1e9, 1.0))
    results["xor_planes_here"] = {f"{lr:g}": share for lr, share in xor.items()}
    return finish("delta", bars, results, check=options.check, is_quick=options.quick, out=options.out)


def _rate_for(weights: np.ndarray, noise: np.ndarray, target: float) -> float:
    """The learning rate at which this share of bf16 weights changes."""
    low, high = 1e-8, 1e-4
    part, push = weights[: 2**20], noise[: 2**20]
    before = bf16(part)
    for _ in range(30):
        middle = (low * high) ** 0.5
        changed = (before != bf16(part + push * np.float32(middle * 0.3))).mean()
        low, high = (middle, high) if changed < target else (low, middle)
    return high


if __name__ == "__main__":
    sys.exit(main())
