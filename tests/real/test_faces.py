"""Real faces: the photograph that matplotlib ships, its crops, scalings and mosaics, here and over nodes, bit for bit."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from infer_models import Node

PHOTO = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
TOML = """
schema = 1
backend = "mtcnn"
[batching]
max_rows = {max_rows}
[parameters]
min_face = 40
max_faces = 8
"""


def write_model(folder: Path, *, max_rows: int) -> Path:
    (folder / "faces").mkdir(parents=True)
    (folder / "faces" / "model.toml").write_text(TOML.format(max_rows=max_rows))
    return folder / "faces"


def jpeg(image: Image.Image) -> bytes:
    held = io.BytesIO()
    image.save(held, "JPEG", quality=95)
    return held.getvalue()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Variants of the photograph; the number of faces is the last part of a name."""
    folder = tmp_path_factory.mktemp("photos")
    with Image.open(PHOTO) as opened:
        photo = opened.convert("RGB")
    width, height = photo.size
    half = photo.resize((width // 2, height // 2))
    mosaic = Image.new("RGB", (2 * half.width, 2 * half.height))
    for place in range(4):
        mosaic.paste(half, (place % 2 * half.width, place // 2 * half.height))
    variants = {
        "a-whole-1": photo,
        "b-head-1": photo.crop((width // 8, 0, 7 * width // 8, height // 2)),
        "c-half-1": half,
        "d-mosaic-4": mosaic,
        "e-chest-0": photo.crop((0, 2 * height // 3, width, height)),
        "f-grey-0": Image.new("RGB", (200, 150), (128, 128, 128)),
    }
    for name, image in variants.items():
        (folder / f"{name}.jpg").write_bytes(jpeg(image))
    (folder / "g-broken.jpg").write_bytes((folder / "a-whole-1.jpg").read_bytes()[:2000])
    return folder


def infer(*arguments: object) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "wirespeed", "infer", *map(str, arguments), "--json"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr  # one input is broken
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_faces_are_found_and_are_the_same_here_and_over_nodes(tmp_path: Path, photos: Path) -> None:
    model = write_model(tmp_path / "models", max_rows=4)
    infer(photos, "--model", model, "--out", tmp_path / "here.parquet")
    here = pq.read_table(tmp_path / "here.parquet")
    names = [Path(key).stem for key in here["key"].to_pylist()]
    assert here["num_faces"].to_pylist() == [None if name == "g-broken" else int(name[-1]) for name in names]
    assert "no image that can be decoded" in here["error"].to_pylist()[-1]
    with Image.open(PHOTO) as opened:
        width, height = opened.size
    x1, y1, x2, y2 = here["boxes"].to_pylist()[0][0]
    assert width * 0.25 < x1 < x2 < width * 0.8
    assert height * 0.05 < y1 < y2 < height * 0.6
    left_eye, right_eye, nose, *mouth = here["landmarks"].to_pylist()[0][0]
    assert x1 < left_eye[0] < nose[0] < right_eye[0] < x2
    assert max(left_eye[1], right_eye[1]) < nose[1] < min(corner[1] for corner in mouth) < y2
    features = np.array(here["features"].to_pylist()[0], np.float32)
    assert np.linalg.norm(features) == pytest.approx(1, abs=1e-5)

    nodes = [Node(tmp_path / "models") for _ in range(3)]
    try:
        addresses = [node.wait_open().address for node in nodes]
        for count in (1, 2, 3):
            out = tmp_path / f"over-{count}.parquet"
            told = infer(photos, "--nodes", ",".join(addresses[:count]), "--out", out)
            assert told["num_inputs"] == len(names)
            assert pq.read_table(out).equals(here), f"over {count} nodes"
    finally:
        for node in nodes:
            node.close()

    alone = write_model(tmp_path / "alone", max_rows=1)
    infer(photos, "--model", alone, "--out", tmp_path / "alone.parquet")
    assert pq.read_table(tmp_path / "alone.parquet").equals(here)  # whatever shares a batch
