"""A module walked on the meta device."""

from __future__ import annotations

import pytest

from wirespeed.errors import UsageError

torch = pytest.importorskip("torch")

from wirespeed.plan.modules import from_module  # noqa: E402

pytestmark = pytest.mark.torch


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.head = torch.nn.Linear(8 * 4 * 4, 10)
        self.unused = torch.nn.Linear(5, 5)

    def forward(self, x):
        return self.head(self.conv(x).flatten(1))


def test_parameters_and_work_are_counted_layer_by_layer():
    model = from_module(Small, lambda: [torch.zeros(1, 3, 4, 4)])
    layers = {layer.name: layer for layer in model.layers}
    assert layers["conv"].num_elements == 8 * 3 * 9 + 8
    assert layers["conv"].flops == 2 * (8 * 4 * 4) * 3 * 9
    assert layers["conv"].activations == 8 * 4 * 4
    assert layers["head"].flops == 2 * 8 * 4 * 4 * 10
    assert layers["unused"].flops == 0


def test_layers_stand_in_the_order_in_which_forward_runs_them():
    class Backwards(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(4, 2)
            self.first = torch.nn.Linear(3, 4)

        def forward(self, x):
            return self.last(self.first(x))

    model = from_module(Backwards, lambda: [torch.zeros(1, 3)])
    assert [layer.name for layer in model.layers] == ["first", "last"]


def test_a_tied_parameter_has_one_gradient():
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(7, 4)
            self.out = torch.nn.Linear(4, 7, bias=False)
            self.out.weight = self.table.weight

        def forward(self, x):
            return self.out(self.table(x))

    assert from_module(Tied).num_parameters == 28


def test_work_done_by_a_function_is_given_to_the_owner_of_the_parameters():
    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(6, 5))

        def forward(self, x):
            return x @ self.weight

    assert from_module(Product, lambda: [torch.zeros(1, 6)]).flops == 2 * 6 * 5


def test_a_huge_module_takes_no_memory():
    model = from_module(lambda: torch.nn.Linear(200_000, 200_000))
    assert model.num_parameters == 200_000 * 200_001


def test_what_cannot_be_walked_is_refused():
    with pytest.raises(UsageError, match="without parameters"):
        from_module(torch.nn.ReLU)
    with pytest.raises(UsageError, match="does not run on the meta device"):
        from_module(Small, lambda: [torch.zeros(1, 2, 4, 4)])


def test_a_walked_model_makes_a_workload_that_can_be_planned():
    from wirespeed.plan.compute import workload_of
    from wirespeed.plan.devices import find_device

    model = from_module(Small, lambda: [torch.zeros(1, 3, 4, 4)])
    workload = workload_of(model, find_device("v100"), batch=8, num_ranks=2)
    assert workload.num_elements == model.num_parameters
    assert workload.gradients[-1].ready_s <= workload.backward_s
