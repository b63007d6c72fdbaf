"""MogFace's arithmetic: anchors, boxes, padding; and, where its network is installed, a model of random weights."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirespeed.errors import DataError
from wirespeed.serve.backends.base import Batch, load_backend
from wirespeed.serve.backends.mogface import SIDES, STRIDES, anchors, boxes_of, prepare_image
from wirespeed.serve.config import read_config

needs_network = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("modelscope", "torch", "PIL")),
    reason="needs the network of modelscope: pip install 'wirespeed[mogface]'",
)


def test_an_anchor_without_offsets_is_a_square_around_its_place() -> None:
    centres, sides, levels = anchors(64, 96)
    assert len(centres) == sum(-(-64 // s) * -(-96 // s) for s in STRIDES)
    boxes = boxes_of(centres, sides, np.zeros((len(centres), 4), np.float32))
    assert np.allclose(boxes[:, 2] - boxes[:, 0] + 1, sides, atol=1e-3)
    assert np.allclose((boxes[:, :2] + boxes[:, 2:]) / 2, centres, atol=1e-3)
    first = np.flatnonzero(levels == 1)[1]  # the second place of the second level
    assert centres[first].tolist() == [1.5 * STRIDES[1], 0.5 * STRIDES[1]]
    assert sides[first] == np.float32(SIDES[1])


@given(st.integers(1, 400), st.integers(1, 400), st.integers(32, 300))
def test_images_are_scaled_down_only_and_padded_at_the_right_and_below(width: int, height: int, most: int) -> None:
    Image = pytest.importorskip("PIL.Image")
    pixels, scale = prepare_image(Image.new("RGB", (width, height), (255, 0, 0)), max_side=most)
    assert pixels.shape[1] % 32 == pixels.shape[2] % 32 == 0
    assert scale == min(1.0, most / max(width, height))
    red = (255 - 123.675) / 58.395 / 255
    assert pixels[0, 0, 0] == pytest.approx(red, rel=1e-5)
    held = int((np.abs(pixels[0] - red) < 1e-5).sum())
    assert held == max(1, round(width * scale)) * max(1, round(height * scale))


def write(folder: Path, parameters: str, file: str = "") -> Any:
    folder.mkdir(exist_ok=True)
    named = f'file = "{file}"\n' if file else ""
    (folder / "model.toml").write_text(
        f'schema = 1\nbackend = "mogface"\n{named}[batching]\nmax_rows = 4\n[parameters]\n{parameters}\n'
    )
    return read_config(folder)


def jpeg(width: int, height: int, seed: int) -> bytes:
    Image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 255, (6, 8, 3), np.uint8).astype(np.uint8))
    held = io.BytesIO()
    small.resize((width, height)).save(held, "JPEG", quality=95)
    return held.getvalue()


@needs_network
@pytest.mark.slow
def test_a_batch_gives_what_each_image_gives_alone(tmp_path: Path) -> None:
    backend = load_backend("mogface")
    # Random weights score everything about one half: a threshold just there makes "faces" to compare.
    loaded = backend.load(write(tmp_path / "faces", "random_weights = true\nmin_score = 0.4\nmax_faces = 5"))
    assert [spec.name for spec in loaded.output] == ["num_faces", "boxes", "scores", "features"]
    images = np.array([jpeg(96, 64, 1), jpeg(90, 60, 2), jpeg(64, 128, 3)], object)  # the first two are padded alike
    together = backend.infer({"image": images}, Batch())
    assert together["num_faces"].tolist() == [5, 5, 5]
    assert np.allclose(np.linalg.norm(together["features"], axis=1), 1, atol=1e-5)
    for row in range(3):
        alone = backend.infer({"image": images[row : row + 1]}, Batch())
        for name in ("scores", "features"):
            assert np.allclose(alone[name][0], together[name][row], atol=1e-4)
    boxes = together["boxes"]
    assert (boxes >= 0).all()
    assert (boxes[1, :, 2] <= 89).all()
    assert (boxes[1, :, 3] <= 59).all()
    with pytest.raises(DataError, match="no image"):
        backend.infer({"image": np.array([b"nothing"], object)}, Batch())
    backend.close()


@needs_network
@pytest.mark.slow
def test_only_a_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    import torch

    from wirespeed.serve.backends.mogface import load_network

    weights = load_network().state_dict()
    folder = tmp_path / "faces"
    config = write(folder, "max_faces = 2", "mogface.pth")
    with pytest.raises(DataError, match="cannot read the checkpoint"):
        load_backend("mogface").load(config)
    missing = dict(list(weights.items())[:-1])
    torch.save(missing, folder / "mogface.pth")
    with pytest.raises(DataError, match="is not MogFace's"):
        load_backend("mogface").load(config)
    torch.save({"state_dict": weights}, folder / "mogface.pth")
    load_backend("mogface").load(config)
    with pytest.raises(DataError, match="names no checkpoint"):
        load_backend("mogface").load(write(folder, "max_faces = 2"))
