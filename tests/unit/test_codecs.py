"""The codecs' promises, on chosen cases: sizes, faithfulness, what is not finite, and equal bytes of both kernels."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from codec_group import CPU, Group, bytes_of, gradients  # noqa: E402
from wirespeed.errors import UsageError  # noqa: E402
from wirespeed.spec.payloads import (  # noqa: E402
    INT4_BLOCK,
    INT8_BLOCK,
    SIGN_BLOCK,
    TOPK_CHUNK,
    block_shard_elements,
    topk_counts,
)
from wirespeed.spec.strategy import Strategy  # noqa: E402
from wirespeed.train.codecs import has_numba, kernels_for, make_codec, warm_up  # noqa: E402
from wirespeed.train.codecs.kernels import half_limit  # noqa: E402

pytestmark = pytest.mark.torch

needs_numba = pytest.mark.skipif(not has_numba(), reason="numba is not installed")
NAMES = [
    "dense",
    "half",
    "int8",
    "int4",
    "sign",
    "topk@1%",
    "topk@0.1%",
    "topk@10%",
    "topk@50%",
    "lowrank@4",
    "lowrank@1",
]
SIZES = [1, 5, 1023, 1024, 1025, 16384, 16385]
KERNELS = ["torch", pytest.param("numba", marks=needs_numba)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_message_has_the_size_that_the_strategy_states(name: str, num_ranks: int, kernels):
    for num_elements in SIZES:
        group = Group(name, num_elements, num_ranks, kernels)
        log = group.step(gradients("gauss", num_elements, num_ranks, seed=1))
        sent = [(by_rank[0].collective, {m.size_bytes for m in by_rank}) for by_rank in log]
        stated = [(t.collective, {t.size_bytes}) for t in group.strategy.transfers(num_elements, num_ranks)]
        assert sent == stated
        assert len(group.codec.stages) == len(stated) + 1


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_sends_nothing_and_flushes_its_residual(name: str):
    group = Group(name, 100, 1)
    grad = torch.arange(100.0)
    if group.codec.has_residual:
        group.residuals[0].fill_(0.5)
    assert group.step([grad]) == []
    expected = torch.arange(100.0) + (0.5 if group.codec.has_residual else 0.0)
    assert torch.equal(grad, expected)
    assert not group.held_back().any()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_bucket_sends_nothing(name: str):
    assert Group(name, 0, 4).step([torch.empty(0) for _ in range(4)]) == []


def test_dense_divides_before_the_sum_as_ddp_does():
    grads = [torch.tensor([1.0, 3e38]), torch.tensor([2.0, 3e38]), torch.tensor([4.0, 3e38])]
    third = torch.tensor(1 / 3)
    expected = grads[0] * third + grads[1] * third + grads[2] * third
    Group("dense", 2, 3).step(grads)
    assert torch.equal(grads[0], expected)
    assert torch.isfinite(grads[0]).all()  # the plain sum of the second entries is inf


@needs_numba
@pytest.mark.parametrize("name", [name for name in NAMES[1:] if "lowrank" not in name])  # see test_codecs_lowrank
@pytest.mark.parametrize("kind", ["gauss", "heavy", "sparse", "zeros", "equal", "denormal", "huge", "layers"])
def test_both_kernels_give_equal_bytes(name: str, kind: str):
    for num_ranks, num_elements in [(2, 1), (3, 5), (5, 1025), (3, 18001)]:
        groups = [Group(name, num_elements, num_ranks, kernels) for kernels in ("numba", "torch")]
        for step in range(2):
            both = [gradients(kind, num_elements, num_ranks, seed=step) for _ in groups]
            logs = [group.step(grads) for group, grads in zip(groups, both, strict=True)]
            sent = [[bytes_of(m.send) for by_rank in log for m in by_rank] for log in logs]
            assert sent[0] == sent[1]
            assert [bytes_of(g) for g in both[0]] == [bytes_of(g) for g in both[1]]
            for left, right in zip(groups[0].residuals, groups[1].residuals, strict=True):
                assert (left is None and right is None) or bytes_of(left) == bytes_of(right)


@needs_numba
@pytest.mark.parametrize("name", ["int8", "int4", "sign", "topk@1%"])
def test_both_kernels_give_equal_bytes_where_something_is_not_finite(name: str):
    groups = [Group(name, 18001, 3, kernels) for kernels in ("numba", "torch")]
    for bad in (math.nan, math.inf, -math.inf):
        both = [gradients("gauss", 18001, 3, seed=3) for _ in groups]
        for grads in both:
            grads[1][[0, 10000, 18000]] = bad
        logs = [group.step(grads) for group, grads in zip(groups, both, strict=True)]
        sent = [[bytes_of(m.send) for by_rank in log for m in by_rank] for log in logs]
        assert sent[0] == sent[1]
        assert [torch.isnan(g).tolist() for g in both[0]] == [torch.isnan(g).tolist() for g in both[1]]


@needs_numba
def test_compiled_fp16_rounds_every_value_as_the_hardware_does():
    import numpy as np

    from wirespeed.train.codecs import kernels_compiled

    halves = torch.arange(0, 0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).float()  # all finite, +
    between = (halves[:-1] + halves[1:]) / 2
    edge = torch.tensor([65504.0, 65519.996, 65520.0, 65536.0, 1e30, 2.0**-25, 2.0**-26, 1e-30])
    nudged = [torch.nextafter(between, torch.tensor(side)) for side in (0.0, math.inf)]
    values = torch.cat([halves, between, *nudged, edge])
    values = torch.cat([values, -values])
    sent = np.empty(len(values), np.uint16)
    kernels_compiled.half_encode(values.numpy(), sent, np.float32(1), np.float32(math.inf))
    expected = values.half()
    expected[(expected == 0) & (values > 0)] = 2.0**-24  # what is not zero is not sent as zero
    expected[(expected == 0) & (values < 0)] = -(2.0**-24)
    assert sent.tobytes() == bytes_of(expected)
    decoded = torch.empty_like(values)
    kernels_compiled.half_decode(sent, decoded.numpy(), np.array([1, 1], np.float32), 0)
    assert torch.equal(decoded, expected.float())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "unit"),
    [("half", 1), ("int8", INT8_BLOCK), ("int4", INT4_BLOCK), ("sign", SIGN_BLOCK), ("topk@1%", TOPK_CHUNK)],
)
def test_what_is_not_finite_on_one_rank_is_nan_on_all_and_leaves_no_trace(name: str, unit: int, bad: float, kernels):
    num_elements, place = 33000, 20000
    group = Group(name, num_elements, 3, kernels)
    group.step(gradients("gauss", num_elements, 3, seed=1))
    before = None if group.residuals[1] is None else group.residuals[1].clone()
    grads = gradients("gauss", num_elements, 3, seed=2)
    grads[1][place] = bad
    group.step(grads)
    first = place // unit * unit
    for grad in grads:
        assert torch.isnan(grad[first : first + unit]).all()
        assert torch.isfinite(grad[:first]).all()
        assert torch.isfinite(grad[first + unit :]).all()
    assert torch.isfinite(group.held_back()).all()
    if before is not None:
        assert torch.equal(group.residuals[1][first : first + unit], before[first : first + unit])
    grads = gradients("gauss", num_elements, 3, seed=3)
    group.step(grads)
    assert torch.isfinite(grads[0]).all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_half_neither_overflows_nor_loses_small_gradients(kernels):
    for size in (1e-30, 1e-9, 1.0, 1e6):
        group = Group("half", 5000, 8, kernels)
        for step in range(5):
            grads = gradients("gauss", 5000, 8, seed=step)
            exact = torch.stack(grads).double().mean(0)
            for grad in grads:
                grad.mul_(size)
            group.step(grads)
            assert grads[0].abs().max() < 4.5 * size  # what cannot be told yet is zero, never blown up
        # 5 steps are enough: one finds 2^31 down, or 2^8 up. Then 8 terms and 7 sums round by 2^-12 of at most 4.5.
        assert (grads[0].double() / size - exact).abs().max() < 15 * 2.0**-12 * 4.5


@pytest.mark.parametrize("kernels", KERNELS)
def test_half_finds_gradients_again_that_shrank_at_once_by_a_trillion(kernels):
    group = Group("half", 2000, 4, kernels)
    group.step(gradients("gauss", 2000, 4, seed=1))
    for seed in (2, 3):
        grads = [g * 1e-12 for g in gradients("gauss", 2000, 4, seed=seed)]
        exact = torch.stack(grads).double().mean(0)
        group.step(grads)
    assert (grads[0].double() - exact).abs().max() < 1e-2 * 1e-12


@pytest.mark.parametrize("kernels", KERNELS)
def test_half_keeps_its_scale_while_all_gradients_are_zero(kernels):
    group = Group("half", 2000, 4, kernels)
    for kind in ("gauss", "gauss", "zeros", "zeros", "zeros"):
        grads = gradients(kind, 2000, 4, seed=4)
        group.step(grads)
    assert not grads[0].any()
    grads = gradients("gauss", 2000, 4, seed=5)
    exact = torch.stack(grads).double().mean(0)
    group.step(grads)
    assert (grads[0].double() - exact).abs().max() < 7 * 2.0**-12 * 4.5


@pytest.mark.parametrize("kernels", KERNELS)
def test_half_saturates_a_burst_and_recovers(kernels):
    group = Group("half", 2000, 4, kernels)
    for step in range(2):
        group.step(gradients("gauss", 2000, 4, seed=step))
    for step in range(3):
        burst = [g * 1e6 for g in gradients("gauss", 2000, 4, seed=10 + step)]
        exact = torch.stack(burst).double().mean(0)
        group.step(burst)
        assert torch.isfinite(burst[0]).all()
    assert (burst[0].double() - exact).abs().max() < 1e-2 * 1e6


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 64, 1000])
def test_half_limit_keeps_every_partial_sum_finite(num_ranks: int):
    limit = torch.tensor(half_limit(num_ranks))
    assert limit.half().float() == limit
    total = torch.tensor(0.0).half()
    for _ in range(num_ranks):
        total = total + limit.half()
    assert torch.isfinite(total)
    assert total > 65504 / 2.7  # and little range is given away: (1 + 2^-11)^999 is 1.63


@pytest.mark.parametrize("kernels", KERNELS)
def test_half_scale_is_equal_on_all_ranks(kernels):
    group = Group("half", 3000, 3, kernels)
    for step, size in enumerate([1.0, 1e-6, 1e4, 1e-3]):
        group.step([g * size * (1 + rank) for rank, g in enumerate(gradients("heavy", 3000, 3, seed=step))])
        assert len({bytes_of(b.state_2) for b in group.buffers}) == 1


@pytest.mark.parametrize("kernels", KERNELS)
def test_int8_is_off_by_at_most_half_a_step_of_the_block_scale(kernels):
    grads = gradients("layers", 5000, 2, seed=5)
    group = Group("int8", 5000, 2, kernels)
    exchange = iter(group.codec.exchange(grads[0], group.residuals[0], group.buffers[0], rank=0, num_ranks=2))
    next(exchange)
    for first in range(0, 5000, INT8_BLOCK):
        largest = grads[0][first : first + INT8_BLOCK].abs().max()
        # scale / 2, and three fp32 roundings of values up to 127 scales
        assert group.residuals[0][first : first + INT8_BLOCK].abs().max() <= largest / 254 * (1 + 127 * 2.0**-22)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["topk@1%", "topk@0.1%", "topk@10%", "topk@50%"])
@pytest.mark.parametrize("kind", ["gauss", "heavy", "layers", "sparse"])
def test_topk_sends_exactly_the_largest_of_every_chunk(name: str, kind: str, kernels):
    num_elements = 2 * TOPK_CHUNK + 3000
    grad = gradients(kind, num_elements, 2, seed=6)[0]
    group = Group(name, num_elements, 2, kernels)
    group.step([grad.clone(), torch.zeros(num_elements)])
    whole, per_chunk, per_rest = topk_counts(num_elements, group.strategy.ratio)
    assert whole == 2
    kept = group.residuals[0]
    for first, k in [(0, per_chunk), (TOPK_CHUNK, per_chunk), (2 * TOPK_CHUNK, per_rest)]:
        chunk, left = grad[first : first + TOPK_CHUNK], kept[first : first + TOPK_CHUNK]
        order = chunk.abs().argsort(descending=True, stable=True)
        assert torch.equal(left[order[k:]], chunk[order[k:]])
        assert (left[order[:k]].abs() <= chunk[order[:k]].abs() * 2.0**-11).all()


@pytest.mark.parametrize("kind", ["gauss", "heavy"])
def test_topk_by_chunks_captures_nearly_the_energy_of_a_global_selection(kind: str):
    num_elements = 20 * TOPK_CHUNK
    grad = gradients(kind, num_elements, 2, seed=7)[0]
    group = Group("topk@1%", num_elements, 2)
    group.step([grad.clone(), torch.zeros(num_elements)])
    captured = grad.square().sum() - group.residuals[0].square().sum()
    best = grad.abs().topk(20 * 164).values.square().sum()
    assert captured > 0.95 * best


def test_buffers_may_be_used_again_for_other_data():
    used, fresh = Group("topk@1%", 30000, 2), Group("topk@1%", 30000, 2)
    used.step(gradients("heavy", 30000, 2, seed=8))
    for residual in used.residuals:
        residual.zero_()
    both = [gradients("sparse", 30000, 2, seed=9) for _ in range(2)]
    used.step(both[0])
    fresh.step(both[1])
    assert torch.equal(both[0][0], both[1][0])


@needs_numba
def test_a_damaged_index_makes_the_chunk_nan_and_writes_nowhere_else():
    codec = make_codec(Strategy(codec="topk"), kernels="numba")
    num_elements = TOPK_CHUNK + 100
    buffers = codec.make_buffers(num_elements, 2, CPU)
    grad = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    exchange = iter(codec.exchange(grad, torch.zeros(num_elements), buffers, rank=0, num_ranks=2))
    message = next(exchange)
    message.receive.view(2, -1).copy_(message.send)
    message.receive[-1] = 0xFF  # the high byte of the part chunk's last index
    assert next(exchange, None) is None
    assert torch.isnan(grad[TOPK_CHUNK:]).all()
    assert torch.isfinite(grad[:TOPK_CHUNK]).all()


def test_numba_kernels_are_refused_off_the_cpu():
    with pytest.raises(UsageError, match="for device meta"):
        kernels_for("numba", torch.device("meta"))


def test_auto_takes_torch_off_the_cpu():
    assert kernels_for("auto", torch.device("meta")).name == "torch"


@pytest.mark.parametrize("kernels", KERNELS)
def test_warm_up_leaves_nothing_behind(kernels):
    assert warm_up(kernels=kernels) is None


def test_shards_are_padded_to_whole_blocks_and_owned_in_order():
    from wirespeed.train.codecs.layout import BlockLayout

    layout = BlockLayout.of("int8", 2500, 4)
    assert block_shard_elements("int8", 2500, 4) == 1024  # 625 per rank, one block
    assert [layout.owned(rank) for rank in range(4)] == [(0, 1024), (1024, 1024), (2048, 452), (2500, 0)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_int4_packs_two_entries_to_a_byte_and_sign_eight(kernels):
    grads = [torch.zeros(1300), torch.zeros(1300)]
    grads[0][0], grads[0][128], grads[0][1], grads[0][256] = 7.0, -7.0, 3.0, 14.0
    int4 = Group("int4", 1300, 2, kernels)
    sent = int4.step([g.clone() for g in grads])[0][0].send
    # Entry 0 is 7 and entry 128, in the high half of the same byte, is -7: 0x97. Entry 1 is 3. The next block begins with
    # 14 = 7 x 2. The scales follow the 768 elements of the shard (3 blocks for 650), 4 bits each: 1, and 2.
    assert sent[:2].tolist() == [0x97, 0x03]
    assert sent[128].item() == 0x07
    assert sent[384:396].view(torch.float32).tolist() == [1.0, 2.0, 0.0]
    sign = Group("sign", 1300, 2, kernels)
    grads = [torch.full((1300,), -2.0), torch.zeros(1300)]
    grads[0][0], grads[0][128], grads[0][129] = 2.0, 2.0, 2.0
    sent = sign.step(grads)[0][0].send
    # Bit k of byte j is entry 128 k + j: entries 0 and 128 are bits 0 and 1 of byte 0, entry 129 is bit 1 of byte 1.
    assert sent[:3].tolist() == [0b11, 0b10, 0]
    assert sent[128:132].view(torch.float32).tolist() == [2.0]
    # The other shard holds 276 of 1024 entries: the mean is over those.
    assert sent[132 + 128 : 132 + 132].view(torch.float32).tolist() == pytest.approx([2.0], rel=1e-6)
