"""Low-rank's own promises: what it projects, what it holds back, and what it remembers."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from codec_group import Group, bytes_of  # noqa: E402
from wirespeed.errors import UsageError  # noqa: E402
from wirespeed.spec.payloads import lowrank_matrix  # noqa: E402
from wirespeed.spec.strategy import Strategy  # noqa: E402
from wirespeed.train.codecs import has_numba  # noqa: E402
from wirespeed.train.codecs.lowrank import balanced_turns  # noqa: E402

pytestmark = pytest.mark.torch
needs_numba = pytest.mark.skipif(not has_numba(), reason="numba is not installed")

SHAPES = ((64, 48), (64,), (40, 3, 5, 5), (6, 6), (32, 64), (32,))
NUM_ELEMENTS = sum(math.prod(shape) for shape in SHAPES)
NUM_RANKS = 3
VECTORS = [slice(3072, 3136), slice(6136, 6172), slice(8220, 8252)]
"""Where (64,), (6, 6) and (32,) lie: 64 * 48 = 3072; 3136 + 40 * 75 = 6136; 6172 + 32 * 64 = 8220."""


def group_of(name: str = "lowrank@4", kernels: str = "auto") -> Group:
    return Group(name, NUM_ELEMENTS, NUM_RANKS, kernels, shapes=SHAPES)


def noise(seed: int, num_ranks: int = NUM_RANKS) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return list(torch.randn(num_ranks, NUM_ELEMENTS, generator=source).unbind(0))


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((64, 48), (64, 48)),
        ((40, 3, 5, 5), (40, 75)),
        ((64,), None),
        ((), None),
        ((16, 16), (16, 16)),  # 2 * 4 * 32 = 256 = 16 * 16: just half
        ((15, 16), None),  # 2 * 4 * 31 = 248 > 240
    ],
)
def test_a_matrix_is_one_that_two_factors_of_rank_4_halve(shape, matrix):
    assert lowrank_matrix(shape, 4) == matrix


def test_vectors_and_small_matrices_are_averaged_as_they_are():
    grads = noise(0)
    exact = torch.stack(grads).sum(0) / NUM_RANKS
    group_of().step(grads)
    for vector in VECTORS:
        assert torch.equal(grads[1][vector], exact[vector])


def test_the_messages_of_two_steps_have_the_stated_mean():
    group = group_of()
    sizes = [group.step(noise(step))[0][0].size_bytes for step in range(4)]
    # Vectors 4 * (64 + 36 + 32) = 528. The matrices' turns: rows, rows, columns; then columns, columns, rows.
    assert sizes == [528 + 16 * (64 + 40 + 64), 528 + 16 * (48 + 75 + 32)] * 2
    (stated,) = Strategy.parse("lowrank@4").transfers(NUM_ELEMENTS, NUM_RANKS, SHAPES)
    assert stated.size_bytes == sum(sizes) // 4


def more_at_first(matrices: list[tuple[int, int]]) -> int:
    """Rows and columns that the first of two steps sends more than the second."""
    turns = balanced_turns(matrices)
    return sum(m - n if sends_rows else n - m for (m, n), sends_rows in zip(matrices, turns, strict=True))


def test_the_matrices_of_a_transformer_take_such_turns_that_every_step_sends_as_much():
    block = [(1536, 512), (512, 512), (2048, 512), (512, 2048)]
    assert more_at_first([(256, 512), *block, *block, (256, 512)]) == 0


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), max_size=40))
def test_two_steps_never_differ_by_more_than_one_matrix_does(matrices):
    assert abs(more_at_first(matrices)) <= max((abs(m - n) for m, n in matrices), default=0)


def test_a_gradient_of_low_rank_arrives_whole_after_two_steps():
    source = torch.Generator().manual_seed(1)
    matrix = torch.randn(50, 3, generator=source) @ torch.randn(3, 60, generator=source)
    group = Group("lowrank@4", 3000, 2, shapes=((50, 60),))
    sent = torch.zeros(50, 60)
    for _ in range(2):
        grads = [matrix.flatten().clone() for _ in range(2)]
        group.step(grads)
        sent += grads[0].view(50, 60)
    # The first step's factor is random; the second's spans all columns of the matrix, and the residual with it.
    assert (sent - 2 * matrix).abs().max() < 1e-5 * matrix.abs().max()
    assert group.held_back().abs().max() < 1e-5 * matrix.abs().max()


@pytest.mark.parametrize("name", ["lowrank@1", "lowrank@4"])
def test_what_is_sent_and_what_is_held_back_add_up_to_all_gradients(name: str):
    group = group_of(name)
    given, sent = torch.zeros(NUM_ELEMENTS).double(), torch.zeros(NUM_ELEMENTS).double()
    for step in range(6):
        grads = noise(step)
        given += torch.stack(grads).double().sum(0)
        group.step(grads)
        sent += grads[0].double() * NUM_RANKS
        # A product of unit columns with entries up to 5 has sums of at most 75 terms: some 1e-6 of rounding each step.
        assert (sent + group.held_back() - given).abs().max() < 2e-5


def test_what_is_held_back_is_made_good_in_later_steps():
    group = group_of()
    constant = noise(7)
    exact = torch.stack(constant).double().mean(0)
    errors = {}
    mean = torch.zeros(NUM_ELEMENTS).double()
    for step in range(1, 161):
        grads = [grad.clone() for grad in constant]
        group.step(grads)
        mean += grads[0].double()
        errors[step] = float((mean / step - exact).norm() / exact.norm())
    assert errors[1] > 0.8  # one step of rank 4 of noise is far from it
    assert errors[160] < 0.15
    assert errors[160] < 0.6 * errors[80]  # falls as 1 / steps: what is held back stays bounded


@needs_numba
@pytest.mark.parametrize("name", ["lowrank@1", "lowrank@4", "lowrank@6", "lowrank@8", "lowrank@9"])
def test_compiled_loops_and_torch_agree_to_rounding(name: str):
    shapes = ((64, 48), (1300, 30), (30, 1300), (37, 41))  # blocks of 512 columns and fours of rows leave a rest
    groups = [Group(name, 82589, NUM_RANKS, kernels, shapes=shapes) for kernels in ("numba", "torch")]
    for step in range(4):
        source = torch.Generator().manual_seed(step)
        grads = torch.randn(NUM_RANKS, 82589, generator=source)
        both = [list(grads.clone().unbind(0)) for _ in groups]
        for group, held in zip(groups, both, strict=True):
            group.step(held)
        # Entries up to about 10 of sums of 1300 terms: fp32 rounds at some 1e-6 of them.
        assert torch.allclose(both[0][0], both[1][0], rtol=0, atol=1e-4)
        for left, right in zip(groups[0].residuals, groups[1].residuals, strict=True):
            assert torch.allclose(left, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("numba", marks=needs_numba)])
@pytest.mark.parametrize("name", ["lowrank@4", "lowrank@9"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("num_before", [0, 1])
def test_what_is_not_finite_reaches_all_ranks_and_no_residual(bad: float, num_before: int, name: str, kernels):
    group = group_of(name, kernels)
    for step in range(num_before):
        group.step(noise(step))
    before = [residual.clone() for residual in group.residuals]
    grads = noise(10)
    grads[1][40 * 48 + 5] = bad  # in the first matrix, behind rows and columns that are finite
    group.step(grads)
    assert len({bytes_of(grad) for grad in grads}) == 1
    assert not torch.isfinite(grads[0][:3072]).all()
    assert torch.isfinite(grads[0][3072:]).all()
    assert torch.allclose(group.residuals[1][:3072], before[1][:3072], rtol=0, atol=1e-5)  # entries are about 1
    grads = noise(11)
    group.step(grads)
    assert torch.isfinite(grads[0]).all()
    assert all(torch.isfinite(residual).all() for residual in group.residuals)


def test_a_gradient_of_zeros_stays_zero_and_keeps_the_factors_orthonormal():
    group = group_of()
    for _ in range(3):
        grads = [torch.zeros(NUM_ELEMENTS) for _ in range(NUM_RANKS)]
        group.step(grads)
        assert not grads[0].any()
    for _, _, factor in group.buffers[0].parts:
        if factor is not None:
            tall = factor.known if factor.side == 1 else factor.known.t()
            assert torch.allclose(tall.t() @ tall, torch.eye(4), atol=1e-6)


def test_state_and_residual_restore_the_run_bit_for_bit():
    whole, resumed = group_of(), group_of()
    for step in range(3):
        whole.step(noise(step))
    resumed.residuals = [residual.clone() for residual in whole.residuals]
    resumed.buffers = [
        resumed.codec.make_buffers(NUM_ELEMENTS, NUM_RANKS, torch.device("cpu"), shapes=SHAPES, state_s=state.clone())
        for state in whole.states
    ]
    for step in range(3, 6):
        left, right = noise(step), noise(step)
        whole.step(left)
        resumed.step(right)
        assert [bytes_of(grad) for grad in left] == [bytes_of(grad) for grad in right]


def test_shapes_that_do_not_make_up_the_bucket_are_refused():
    with pytest.raises(UsageError, match="got shapes of 20 elements for a bucket of 21"):
        Group("lowrank@4", 21, 2, shapes=((4, 5),))


@pytest.mark.parametrize("text", ["lowrank@0", "lowrank@257", "lowrank@2%", "lowrank@x"])
def test_a_matrix_rank_is_a_whole_number_from_1_to_256(text: str):
    with pytest.raises(UsageError, match="matrix rank"):
        Strategy.parse(text)


def test_a_matrix_rank_below_32_is_lossy():
    assert [Strategy.parse(f"lowrank@{rank}").fidelity for rank in (1, 31, 32, 64)] == ["lossy"] * 2 + [
        "compressed"
    ] * 2
