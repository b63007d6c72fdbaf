"""Faces in photographs: MogFace (ResNet-101), its network from the package ``modelscope``, a checkpoint by path.

Takes one encoded image per row and gives ``num_faces``, ``boxes`` (x1, y1, x2, y2 in pixels of the image as it came)
and ``scores`` (0 to 1) of the ``max_faces`` best, zeros behind them; and ``features``: 512 numbers of the best face, of
length 1, or zeros where there is none. They are the mean, over the face's box, of the 512 channels that the network's
heads look at, on the level that found the face: what the detector saw, not trained to tell persons apart.

Images of one padded size go through the network together; what an image is padded to depends on it alone, so a result
does not depend on what shares its batch, but for the last bits of a sum. The network's folder is imported by itself:
the package around it wants much that is not needed here.

The checkpoint is read as weights only, and every weight has to be there and nothing else (ModelScope's own loader takes
what fits). Pixels are scaled as its pipeline does, since the weights were made for that; boxes are scaled back and
scores are not (there they are divided by the image's scale, and exceed 1 for large images).

[parameters] of model.toml: min_score (0.82), max_overlap (0.4), max_faces (16), max_side (1500 pixels; larger images
are made smaller), max_pixels (50 million), random_weights (false; with seed: a network that finds nothing, for tests
and for measuring speed without a checkpoint).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wirespeed.errors import DataError, MissingCapability
from wirespeed.serve.backends.base import Batch, Loaded
from wirespeed.serve.backends.face_boxes import Floats, Places, keep_best
from wirespeed.serve.backends.images import MAX_PIXELS, decode_image
from wirespeed.serve.config import ModelConfig, TensorSpec

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from wirespeed.serve.backends.base import Arrays

DIMENSIONS = 512
STRIDES = (4, 8, 16, 32, 64, 128)
SIDES = tuple(0.68 * 4 * stride for stride in STRIDES)
"""Of the square anchors of each level, one per place."""
PAD_TO = 32
"""The network's first levels halve a side so often."""
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.120003, 57.375)
"""Of red, green and blue. ModelScope's pipeline divides by 255 besides."""
MAX_CANDIDATES = 5000
_PACKAGE = "_wirespeed_mogface"
_HINT = "pip install 'wirespeed[mogface]'"


class MogfaceBackend:
    """See the module."""

    def __init__(self) -> None:
        self._network: Any = None
        self._seen: list[torch.Tensor] = []
        """Per level, what the heads looked at in the last forward pass: [image, 512, y, x]."""
        self._min_score = 0.82
        self._max_overlap = 0.4
        self._max_faces = 16
        self._max_side = 1500
        self._max_pixels = MAX_PIXELS

    def load(self, config: ModelConfig) -> Loaded:
        """Make the network and read its checkpoint."""
        import torch

        given = config.parameters
        self._min_score = float(given.get("min_score", 0.82))
        self._max_overlap = float(given.get("max_overlap", 0.4))
        self._max_faces = int(given.get("max_faces", 16))
        self._max_side = int(given.get("max_side", 1500))
        self._max_pixels = int(given.get("max_pixels", MAX_PIXELS))
        if not 0 < self._min_score < 1 or not 0 <= self._max_overlap <= 1:
            raise DataError(
                f"got min_score of {self._min_score:g} and max_overlap of {self._max_overlap:g}",
                expected="shares: above 0 and below 1, 0 to 1",
            )
        if self._max_faces < 1 or self._max_side < PAD_TO:
            raise DataError(
                f"got max_faces of {self._max_faces} and max_side of {self._max_side}",
                expected=f"1 or more, {PAD_TO} or more",
            )
        if config.instances.threads:
            torch.set_num_threads(config.instances.threads)
        is_random = bool(given.get("random_weights", False))
        if not config.file and not is_random:
            raise DataError(
                f"model {config.name!r} names no checkpoint",
                expected='file = "mogface.pth" in model.toml, or random_weights = true in its [parameters]',
            )
        torch.manual_seed(int(given.get("seed", 0)))
        self._network = load_network()
        if not is_random:
            self._read(Path(config.folder) / config.file)
        self._network.eval()
        self._network.pred_net.conv_SSH.register_forward_hook(lambda _module, _given, made: self._seen.append(made))
        most = self._max_faces
        return Loaded(
            input=(TensorSpec(name="image", datatype="BYTES", shape=()),),
            output=(
                TensorSpec(name="num_faces", datatype="INT32", shape=()),
                TensorSpec(name="boxes", datatype="FP32", shape=(most, 4)),
                TensorSpec(name="scores", datatype="FP32", shape=(most,)),
                TensorSpec(name="features", datatype="FP32", shape=(DIMENSIONS,)),
            ),
            platform="mogface",
        )

    def infer(self, inputs: Arrays, batch: Batch) -> Arrays:
        """See Backend.infer."""
        images = [decode_image(content, max_pixels=self._max_pixels) for content in inputs["image"].reshape(-1)]
        rows, most = len(images), self._max_faces
        found: dict[str, Any] = {
            "num_faces": np.zeros(rows, np.int32),
            "boxes": np.zeros((rows, most, 4), np.float32),
            "scores": np.zeros((rows, most), np.float32),
            "features": np.zeros((rows, DIMENSIONS), np.float32),
        }
        by_shape: dict[tuple[int, ...], list[tuple[int, Floats, float]]] = {}
        for row, image in enumerate(images):
            pixels, scale = prepare_image(image, max_side=self._max_side)
            by_shape.setdefault(pixels.shape, []).append((row, pixels, scale))
        for held in by_shape.values():
            scores, by = self._forward(np.stack([pixels for _, pixels, _ in held]))
            for place, (row, pixels, scale) in enumerate(held):
                boxes, best, levels = self._choose(scores[place], by[place], pixels.shape[1], pixels.shape[2])
                count = min(most, len(boxes))
                size = images[row].size
                found["num_faces"][row] = count
                found["boxes"][row, :count] = np.clip(boxes[:count] / scale, 0, np.array([*size, *size]) - 1)
                found["scores"][row, :count] = best[:count]
                if count:
                    found["features"][row] = self._describe(place, boxes[0], int(levels[0]))
            self._seen.clear()
        return found

    def close(self) -> None:
        """See Backend.close."""
        self._network = None
        self._seen.clear()

    def _read(self, path: Path) -> None:
        import torch

        try:
            weights = torch.load(str(path), map_location="cpu", weights_only=True)
        except Exception as fault:
            raise DataError(f"cannot read the checkpoint {path}: {str(fault).splitlines()[0]}") from fault
        weights = weights.get("state_dict", weights) if isinstance(weights, dict) else weights
        try:
            self._network.load_state_dict(weights, strict=True)
        except (RuntimeError, TypeError, AttributeError) as fault:
            lines = str(fault).splitlines()
            raise DataError(
                f"the checkpoint {path} is not MogFace's: {lines[min(1, len(lines) - 1)].strip()[:200]}",
                expected="all weights of the ResNet-101 model, and no others",
            ) from fault

    def _forward(self, pixels: Floats) -> tuple[Floats, Floats]:
        """Scores [image, place] and box offsets [image, place, 4] of all levels, the finest first."""
        import torch

        self._seen.clear()
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the network calls functions by their old names
            scores, by = self._network(torch.from_numpy(pixels))
        return scores[:, :, 0].numpy(), by.numpy()

    def _choose(self, scores: Floats, by: Floats, height: int, width: int) -> tuple[Floats, Floats, Places]:
        """Boxes, scores and levels of the faces of one image, best first."""
        centres, sides, levels = anchors(height, width)
        sure = np.flatnonzero(scores > self._min_score)
        sure = sure[np.argsort(-scores[sure], kind="stable")][:MAX_CANDIDATES]
        boxes = boxes_of(centres[sure], sides[sure], by[sure])
        kept = keep_best(boxes, scores[sure], self._max_overlap)
        return boxes[kept], scores[sure][kept], levels[sure][kept]

    def _describe(self, place: int, box: Floats, level: int) -> Floats:
        seen = self._seen[level][place]
        left, top = (max(0, int(side // STRIDES[level])) for side in box[:2])
        right, bottom = (int(side // STRIDES[level]) + 1 for side in box[2:])
        left, top = min(left, seen.shape[2] - 1), min(top, seen.shape[1] - 1)
        part = seen[:, top : max(bottom, top + 1), left : max(right, left + 1)]
        feature: Floats = part.mean(dim=(1, 2)).numpy().astype(np.float32)
        length = np.float32(np.sqrt(np.sum(feature * feature, dtype=np.float64)))
        return feature / length if length > 0 else feature


def load_network() -> Any:
    """MogFace's module, with random weights. Raises MissingCapability without the packages that it is made of."""
    if importlib.util.find_spec("torch") is None:
        raise MissingCapability("backend 'mogface' runs on torch", hint=_HINT)
    spec = importlib.util.find_spec("modelscope")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    if folder is None or not (folder := folder / "models/cv/face_detection/mogface/models").is_dir():
        raise MissingCapability("backend 'mogface' needs the network of the package modelscope", hint=_HINT)
    if _PACKAGE not in sys.modules:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(folder)]
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.mogface").MogFace()


def prepare_image(image: Image, *, max_side: int) -> tuple[Floats, float]:
    """Pixels as the network takes them, [colour, y, x] with sides of multiples of 32, and by what it was scaled."""
    from PIL import Image

    scale = min(1.0, max_side / max(image.size))
    if scale < 1.0:
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        image = image.resize(size, Image.Resampling.BILINEAR)
    pixels: Floats = np.asarray(image, np.float32) - np.array(MEAN, np.float32)
    pixels /= np.array(DEVIATION, np.float32)
    pixels /= 255
    height, width = (-(-side // PAD_TO) * PAD_TO for side in pixels.shape[:2])
    padded = np.zeros((3, height, width), np.float32)
    padded[:, : pixels.shape[0], : pixels.shape[1]] = pixels.transpose(2, 0, 1)
    return padded, scale


def anchors(height: int, width: int) -> tuple[Floats, Floats, Places]:
    """Centres (x, y), sides and levels of the anchors of an image, in the order of the network's outputs."""
    centres, sides, levels = [], [], []
    for level, stride in enumerate(STRIDES):
        rows, columns = (_halved(side, stride) for side in (height, width))
        y, x = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
        centres.append((np.stack((x.reshape(-1), y.reshape(-1)), axis=1) + 0.5) * stride)
        sides.append(np.full(rows * columns, SIDES[level]))
        levels.append(np.full(rows * columns, level))
    return (
        np.concatenate(centres).astype(np.float32),
        np.concatenate(sides).astype(np.float32),
        np.concatenate(levels),
    )


def _halved(side: int, stride: int) -> int:
    """What strided convolutions leave of a side: half, rounded up, each time."""
    while stride > 1:
        side, stride = (side + 1) // 2, stride // 2
    return side


def boxes_of(centres: Floats, sides: Floats, by: Floats) -> Floats:
    """x1, y1, x2, y2 (included): centres moved by shares of the anchor's side, sides times exp."""
    middle = centres + by[:, :2] * sides[:, None]
    size = sides[:, None] * np.exp(by[:, 2:])
    corner = middle - (size - 1) / 2
    return np.concatenate((corner, corner + size - 1), axis=1).astype(np.float32)
