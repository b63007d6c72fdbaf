"""Updates in 8 bits: the same bits for every reader, small, and made up for by the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from repo_tools import bf16, safetensors_bytes

from wirespeed.errors import DataError, UsageError
from wirespeed.repo import delta
from wirespeed.repo.cache import Cache
from wirespeed.repo.quantize import BLOCK, DTYPES, Dtype, quantize
from wirespeed.repo.repository import Repository

Array = np.ndarray[Any, Any]
STEP = 1e-3


def stored(values: Array, dtype: str) -> Array:
    return {
        "F32": lambda: values.astype(np.float32),
        "F16": lambda: values.astype(np.float16),
        "BF16": lambda: bf16(values),
    }[dtype]()


def floats(content: memoryview | bytes, dtype: str) -> Array:
    if dtype == "BF16":
        return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(content, np.float32 if dtype == "F32" else np.float16).astype(np.float32)


def pair(num: int, dtype: str, *, seed: int = 0, step: float = STEP) -> tuple[memoryview, memoryview]:
    """Weights, and weights after an update in which all of them moved."""
    rng = np.random.default_rng(seed)
    old = rng.normal(0, 0.02, num)
    new = old + rng.normal(0, step, num)
    first, second = (stored(values.astype(np.float32), dtype).view(np.uint8).data for values in (old, new))
    return first, second


@given(num=st.integers(1, 3 * BLOCK + 5), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32 - 1))
def test_every_reader_gets_the_bits_that_were_published(num: int, dtype: str, seed: int) -> None:
    old, new = pair(num, dtype, seed=seed)
    made = quantize(old, new, dtype=cast("Dtype", dtype))
    if made is None:
        return
    content, payload = made
    width = len(new) // num
    assert delta.decode(payload, encoding="int8", width=width, length=len(new), base=old) == content
    # Half a step of the block's scale, and the rounding of the type itself.
    wanted, got, before = floats(new, dtype), floats(content, dtype), floats(old, dtype)
    grain = {"F32": 2**-23, "F16": 2**-10, "BF16": 2**-7}[dtype]
    for start in range(0, num, BLOCK):
        here = slice(start, start + BLOCK)
        scale = np.abs(wanted[here] - before[here]).max() / 127
        allowed = 0.5 * scale * 1.001 + grain * np.abs(wanted[here]).max()
        assert np.abs(got[here] - wanted[here]).max() <= allowed


@pytest.mark.parametrize(("dtype", "share"), [("F32", 0.26), ("F16", 0.51), ("BF16", 0.51)])
def test_an_update_in_which_every_weight_moved_takes_a_byte_each(dtype: str, share: float) -> None:
    # Steps of a tenth of a weight: below that the exact differences of 16-bit weights are small, too.
    old, new = pair(1_000_000, dtype, step=STEP if dtype == "F32" else 0.01)
    made = quantize(old, new, dtype=cast("Dtype", dtype))
    assert made is not None
    assert len(made[1]) <= share * len(new)
    exact = delta.encode_delta(old, new, width=len(new) // 1_000_000)
    assert exact is None or len(made[1]) < len(exact.payload)


def test_what_is_not_worth_it_or_not_finite_stays_exact() -> None:
    old, new = pair(10_000, "F32")
    few = np.frombuffer(old, np.float32).copy()
    few[:100] += 1
    assert quantize(old, few.view(np.uint8).data, dtype="F32") is None
    assert quantize(old, new[:-4], dtype="F32") is None
    for bad in (np.nan, np.inf):
        broken = np.frombuffer(new, np.float32).copy()
        broken[5000] = bad
        assert quantize(old, broken.view(np.uint8).data, dtype="F32") is None
        assert quantize(broken.view(np.uint8).data, new, dtype="F32") is None
    # Changes too small for a scale of their own: nothing is invented.
    tiny = np.full(1000, 1e-42, np.float32)
    made = quantize(np.zeros(1000, np.float32).data.cast("B"), tiny.data.cast("B"), dtype="F32")
    assert made is not None
    assert np.abs(floats(made[0], "F32")).max() <= 1e-42


@given(data=st.data())
def test_damaged_payloads_are_data_errors_or_wrong_bytes_but_never_more(data: st.DataObject) -> None:
    old, new = pair(700, "F32")
    made = quantize(old, new, dtype="F32")
    assert made is not None
    payload = bytearray(made[1])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = payload[: data.draw(st.integers(0, len(payload)))]
    try:
        back = delta.decode(bytes(cut), encoding="int8", width=4, length=len(new), base=old)
    except DataError:
        return
    assert len(back) == len(new)


def save(path: Path, values: Array, dtype: str) -> Path:
    path.mkdir(exist_ok=True)
    held = stored(values.astype(np.float32), dtype)
    tensors = {"layer.weight": (dtype, list(values.shape), held.tobytes()), "norm": ("F32", [4], bytes(16))}
    (path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return path


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_pushed_updates_are_small_verified_and_make_up_for_each_other(
    tmp_path: Path, folder_store: Any, dtype: str
) -> None:
    repository = Repository(folder_store, cache=Cache(tmp_path / "pusher"))
    rng = np.random.default_rng(0)
    old = rng.normal(0, 0.02, (1000, 1200))
    new = old + rng.normal(0, STEP, old.shape)
    repository.push(save(tmp_path / "m", old, dtype), "m")
    first = repository.push(save(tmp_path / "m", new, dtype), "m", parent="v1", is_quantized=True)
    assert first.delta_payload_bytes < {"F32": 0.26, "BF16": 0.51}[dtype] * first.delta_bytes
    again = repository.push(save(tmp_path / "m", new, dtype), "m", parent="v2", is_quantized=True)
    wanted = floats(stored(new.astype(np.float32), dtype).tobytes(), dtype)
    errors = []
    for number in (1, 2, 3):
        # Another host, with nothing in its cache: digests are checked on the way.
        elsewhere = Repository(folder_store, cache=Cache(tmp_path / f"reader-{number}"))
        pulled = elsewhere.pull(f"m@v{number}", to=tmp_path / f"out-{number}")
        assert pulled.number == number
        content = (tmp_path / f"out-{number}" / "model.safetensors").read_bytes()
        size = wanted.size * (4 if dtype == "F32" else 2)
        start = int.from_bytes(content[:8], "little") + 8
        errors.append(float(np.linalg.norm(floats(content[start : start + size], dtype) - wanted)))
    assert errors[1] < 0.02 * errors[0]
    assert errors[2] < 0.02 * errors[1] or errors[2] == 0
    assert again.delta_bytes == 0 or again.delta_payload_bytes <= 0.51 * again.delta_bytes


def test_without_a_parent_it_is_a_usage_error(tmp_path: Path, folder_store: Any) -> None:
    repository = Repository(folder_store, cache=Cache(tmp_path / "pusher"))
    save(tmp_path / "m", np.zeros((4, 4)), "F32")
    with pytest.raises(UsageError, match="--quantize without a parent"):
        repository.push(tmp_path / "m", "m", is_quantized=True)
    repository.push(tmp_path / "m", "m")
    command = [
        sys.executable,
        "-m",
        "wirespeed",
        "repo",
        "push",
        str(tmp_path / "m"),
        str(tmp_path / "store"),
        "-n",
        "m",
    ]
    ended = subprocess.run(
        [*command, "--parent", "v1", "--quantize", "--as-is"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "with --as-is" in ended.stderr
    subprocess.run([*command, "--parent", "v1", "--quantize"], check=True, timeout=60, capture_output=True)
