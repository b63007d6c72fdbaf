"""Laws of every codec, whatever the data: nothing is lost, ranks agree, bytes are as stated."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from codec_group import Group, bytes_of, gradients  # noqa: E402
from wirespeed.spec.payloads import BLOCK_FORMATS, INT8_BLOCK, TOPK_CHUNK  # noqa: E402
from wirespeed.spec.strategy import Strategy  # noqa: E402
from wirespeed.train.codecs import has_numba, warm_up  # noqa: E402

pytestmark = pytest.mark.torch

NAMES = st.sampled_from(
    ["dense", "half", "int8", "int4", "sign", "topk@0.01%", "topk@1%", "topk@7%", "topk@50%", "lowrank@4"]
)
WITH_FEEDBACK = st.sampled_from(["int8", "int4", "sign", "topk@0.01%", "topk@1%", "topk@7%", "topk@50%"])
RANKS = st.integers(1, 8)
ELEMENTS = st.one_of(
    st.integers(1, 40),
    st.integers(INT8_BLOCK - 1, INT8_BLOCK + 1),
    st.integers(2 * INT8_BLOCK, 8 * INT8_BLOCK),
    st.integers(TOPK_CHUNK - 1, TOPK_CHUNK + 1),
)
KINDS = st.sampled_from(["gauss", "heavy", "sparse", "zeros", "equal", "denormal", "huge", "layers"])
SEEDS = st.integers(0, 2**31)
KERNELS = "numba" if has_numba() else "torch"  # test_codecs holds both to equal bytes
relaxed = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up(kernels=KERNELS)


@relaxed
@given(name=WITH_FEEDBACK, num_ranks=RANKS, num_elements=ELEMENTS, kind=KINDS, seed=SEEDS, num_steps=st.integers(1, 4))
def test_results_and_residuals_add_up_to_all_gradients(
    name: str, num_ranks: int, num_elements: int, kind: str, seed: int, num_steps: int
):
    group = Group(name, num_elements, num_ranks, KERNELS)
    given_, sent = torch.zeros(num_elements).double(), torch.zeros(num_elements).double()
    largest = 0.0
    for step in range(num_steps):
        grads = gradients(kind, num_elements, num_ranks, seed + step)
        given_ += torch.stack(grads).double().sum(0)
        largest += sum(float(g.abs().max()) for g in grads)
        group.step(grads)
        sent += grads[0].double() * num_ranks
    # fp32 rounds by 2^-24 of the values at hand, which are at most `largest`; per step N + 6 operations touch an entry.
    tolerance = largest * 2.0**-24 * num_steps * (num_ranks + 6)
    if 0 < largest < 1e-30:
        tolerance = num_steps * (num_ranks + 6) * 2.0**-149  # denormals are spaced by 2^-149
    assert (sent + group.held_back() - given_).abs().max() <= tolerance


@relaxed
@given(name=NAMES, num_ranks=st.integers(2, 8), num_elements=ELEMENTS, kind=KINDS, seed=SEEDS)
def test_all_ranks_end_with_equal_bytes(name: str, num_ranks: int, num_elements: int, kind: str, seed: int):
    group = Group(name, num_elements, num_ranks, KERNELS)
    for step in range(2):
        grads = gradients(kind, num_elements, num_ranks, seed + step)
        group.step(grads)
        assert len({bytes_of(grad) for grad in grads}) == 1


@relaxed
@given(name=NAMES, num_ranks=RANKS, num_elements=ELEMENTS, seed=SEEDS)
def test_messages_have_the_stated_bytes(name: str, num_ranks: int, num_elements: int, seed: int):
    group = Group(name, num_elements, num_ranks, KERNELS)
    log = group.step(gradients("gauss", num_elements, num_ranks, seed))
    stated = [(t.collective, t.size_bytes) for t in Strategy.parse(name).transfers(num_elements, num_ranks)]
    assert [(by_rank[0].collective, by_rank[0].size_bytes) for by_rank in log] == stated
    assert all(len({(m.collective, m.size_bytes) for m in by_rank}) == 1 for by_rank in log)


@relaxed
@given(
    codec=st.sampled_from(["int8", "int4"]), num_ranks=st.integers(2, 8), num_elements=ELEMENTS, kind=KINDS, seed=SEEDS
)
def test_rounding_is_off_by_at_most_two_halves_of_a_step(
    codec: str, num_ranks: int, num_elements: int, kind: str, seed: int
):
    block_size, levels = BLOCK_FORMATS[codec][0], {"int8": 127, "int4": 7}[codec]
    grads = gradients(kind, num_elements, num_ranks, seed)
    exact = torch.stack(grads).double().sum(0)
    sizes = torch.stack([g.abs() for g in grads]).double()
    Group(codec, num_elements, num_ranks, KERNELS).step(grads)
    for first in range(0, num_elements, block_size):
        block = slice(first, first + block_size)
        # Each sender is off by half a step of its scale, the owner by half a step of the sum's, whose terms are rounded
        # themselves. Below 2^-100 all is held back. 0.1 %: fp32.
        senders = sizes[:, block].amax(1).sum() / (2 * levels)
        owner = (sizes[:, block].sum(0).amax() + senders) / (2 * levels)
        bound = 1.001 * (senders + owner) + (num_ranks + 1) * 2.0**-100
        assert (grads[0].double()[block] * num_ranks - exact[block]).abs().max() <= bound


@relaxed
@given(num_elements=ELEMENTS, kind=st.sampled_from(["gauss", "heavy", "layers", "sparse"]), seed=SEEDS)
def test_a_higher_ratio_never_holds_back_more(num_elements: int, kind: str, seed: int):
    energies = []
    for name in ("topk@0.01%", "topk@1%", "topk@7%", "topk@50%"):
        group = Group(name, num_elements, 2, KERNELS)
        group.step(gradients(kind, num_elements, 2, seed))
        energies.append(float(group.residuals[0].double().square().sum()))
    assert energies == sorted(energies, reverse=True)


@relaxed
@given(num_ranks=st.integers(2, 4), num_elements=st.integers(1, 3000), seed=SEEDS)
def test_what_int8_rounds_away_is_made_good_in_later_steps(num_ranks: int, num_elements: int, seed: int):
    group = Group("int8", num_elements, num_ranks, KERNELS)
    constant = gradients("gauss", num_elements, num_ranks, seed)
    exact = torch.stack(constant).double().mean(0)
    mean = torch.zeros(num_elements).double()
    for _ in range(40):
        grads = [grad.clone() for grad in constant]
        group.step(grads)
        mean += grads[0].double() / 40
    # Held back is at most half a step per sender and half a step of the sum; the mean misses a 40th of that.
    sizes = torch.stack(constant).abs().double()
    one_step = 1.1 * (sizes.amax(1).sum() + sizes.sum(0).amax()) / 254 / num_ranks
    assert (mean - exact).abs().max() <= one_step / 40
