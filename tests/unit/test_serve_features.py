"""Features in fewer bytes: what they apply to, and what they lose."""

from __future__ import annotations

import numpy as np
import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.serve.config import TensorSpec
from wirespeed.serve.features import encode_features, encoded_specs, feature_outputs
from wirespeed.serve.tensors import from_array, to_array

BOXES = TensorSpec(name="boxes", datatype="FP32", shape=(-1, 4))
FEATURES = TensorSpec(name="features", datatype="FP32", shape=(512,))


def test_only_outputs_that_are_called_features_or_the_only_floats_are_encoded() -> None:
    assert feature_outputs((BOXES, FEATURES), "int8") == ("features",)
    assert feature_outputs((TensorSpec(name="y", datatype="FP32", shape=(8,)),), "fp16") == ("y",)
    assert feature_outputs((BOXES, FEATURES), "fp32") == ()
    with pytest.raises(UsageError, match="cannot tell which output"):
        feature_outputs((BOXES, TensorSpec(name="y", datatype="FP32", shape=(8,))), "fp16")
    with pytest.raises(UsageError, match="fp8"):
        feature_outputs((FEATURES,), "fp8")


def test_what_comes_out_is_described_before_it_does() -> None:
    assert [(s.name, s.datatype, s.shape) for s in encoded_specs((BOXES, FEATURES), "int8")] == [
        ("boxes", "FP32", (-1, 4)),
        ("features", "INT8", (512,)),
        ("features_scale", "FP32", ()),
    ]
    assert [s.datatype for s in encoded_specs((FEATURES,), "fp16")] == ["FP16"]


def test_int8_is_off_by_at_most_half_a_step_and_keeps_zero_rows() -> None:
    rng = np.random.default_rng(5)
    features = rng.standard_normal((6, 512)).astype(np.float32) * np.array(
        [[1e-6], [1], [1e6], [0], [3], [7]], np.float32
    )
    coded, scales = encode_features([from_array("features", features)], ("features",), "int8")
    back = to_array(coded).astype(np.float32) * to_array(scales)[:, None]
    step = np.abs(features).max(axis=1) / 127
    assert (np.abs(back - features).max(axis=1) <= step * 0.5001).all()
    assert not back[3].any()
    assert (coded.datatype, scales.datatype, scales.shape) == ("INT8", "FP32", (6,))


def test_int8_of_something_that_is_no_number_is_an_error() -> None:
    with pytest.raises(DataError, match="no numbers"):
        encode_features([from_array("features", np.array([[1, np.nan]], np.float32))], ("features",), "int8")


def test_fp16_leaves_other_outputs_alone() -> None:
    boxes = from_array("boxes", np.array([[1000.3, 2, 3, 4]], np.float32))
    found = encode_features([boxes, from_array("features", np.array([[0.1]], np.float32))], ("features",), "fp16")
    assert found[0] is boxes
    assert to_array(found[1]).tolist() == [[np.float16(0.1)]]
