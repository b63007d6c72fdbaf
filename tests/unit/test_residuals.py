"""Error feedback belongs to parameters, not to buckets."""

import pytest
import torch

from wirespeed.errors import DataError
from wirespeed.train.residuals import Residuals

CPU = torch.device("cpu")


def test_a_residual_follows_its_parameter_into_another_bucket():
    residuals = Residuals()
    residuals.for_bucket(("a", "b", "c"), (2, 3, 1), CPU).copy_(torch.tensor([1.0, 2, 3, 4, 5, 6]))
    first = residuals.for_bucket(("c", "b"), (1, 3), CPU)
    second = residuals.for_bucket(("a",), (2,), CPU)
    assert first.tolist() == [6, 3, 4, 5]
    assert second.tolist() == [1, 2]


def test_the_same_bucket_gets_the_same_tensor_again():
    residuals = Residuals()
    first = residuals.for_bucket(("a",), (4,), CPU)
    assert residuals.for_bucket(("a",), (4,), CPU) is first


def test_memory_of_buckets_that_are_gone_is_not_counted():
    residuals = Residuals()
    residuals.for_bucket(("a", "b"), (8, 8), CPU)
    residuals.for_bucket(("a",), (8,), CPU)
    residuals.for_bucket(("b",), (8,), CPU)
    assert residuals.num_bytes == 2 * 8 * 4


def test_state_goes_through_a_checkpoint_bit_by_bit():
    residuals = Residuals()
    residuals.for_bucket(("a", "b"), (2, 1), CPU).copy_(torch.tensor([0.1, -0.2, 0.3]))
    resumed = Residuals()
    resumed.load_state_dict(residuals.state_dict())
    assert torch.equal(resumed.for_bucket(("b", "a"), (1, 2), CPU), torch.tensor([0.3, 0.1, -0.2]))


def test_a_state_of_another_shape_is_refused_by_name():
    residuals = Residuals()
    residuals.load_state_dict({"a": torch.zeros(3)})
    with pytest.raises(DataError, match=r"'a' has 3 elements"):
        residuals.for_bucket(("a",), (4,), CPU)


def test_a_state_that_is_not_finite_is_refused():
    with pytest.raises(DataError, match="not finite"):
        Residuals().load_state_dict({"a": torch.tensor([float("nan")])})
