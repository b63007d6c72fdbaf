"""Strategies: their names, files, and the bytes and collectives that each codec states."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirespeed.errors import DataError, UsageError
from wirespeed.spec.payloads import (
    BLOCK_FORMATS,
    CODECS,
    INT8_BLOCK,
    TOPK_CHUNK,
    block_shard_bytes,
    block_shard_elements,
    bus_factor,
    topk_counts,
    topk_payload_bytes,
)
from wirespeed.spec.strategy import DEFAULT_BUCKET_BYTES, FIDELITIES, PERIODIC, SCHEDULES, TOPOLOGIES, Strategy
from wirespeed.spec.strategy_file import StrategyFile, read_strategy_text, strategy_text


@st.composite
def any_strategy(draw: st.DrawFn) -> Strategy:
    codec = draw(st.sampled_from(CODECS))
    ratio = draw(st.floats(min_value=1 / TOPK_CHUNK, max_value=0.5)) if codec == "topk" else None
    matrix_rank = draw(st.integers(1, 256)) if codec == "lowrank" else None
    bucket = draw(st.one_of(st.just(DEFAULT_BUCKET_BYTES), st.integers(min_value=1024, max_value=2**40)))
    topology = draw(st.sampled_from(TOPOLOGIES)) if codec != "lowrank" else "flat"
    schedule = draw(st.sampled_from(SCHEDULES))
    is_periodic = schedule in PERIODIC
    return Strategy(
        codec=codec,
        ratio=ratio,
        matrix_rank=matrix_rank,
        bucket_bytes=bucket,
        topology=topology,
        schedule=schedule,
        period=draw(st.integers(1, 100_000)) if is_periodic else None,
        warmup_steps=draw(st.integers(0, 10**6)) if is_periodic else 0,
    )


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (Strategy(), "dense"),
        (Strategy(codec="int8"), "int8"),
        (Strategy(codec="topk"), "topk@1%"),
        (Strategy(codec="topk", ratio=0.025), "topk@2.5%"),
        (Strategy(codec="half", bucket_bytes=4 * 1024**2), "half/4MiB"),
        (Strategy(codec="topk", ratio=0.1, bucket_bytes=1024**3), "topk@10%/1GiB"),
        (Strategy(bucket_bytes=1025), "dense/1025B"),
        (Strategy(schedule="delayed"), "dense/delayed"),
        (Strategy(schedule="local_sgd"), "dense/local_sgd@8"),
        (Strategy(codec="int8", schedule="diloco", period=500, warmup_steps=100), "int8/diloco@500+100"),
        (Strategy(codec="topk", bucket_bytes=2**20, schedule="delayed"), "topk@1%/1MiB/delayed"),
        (Strategy(codec="int8", topology="hierarchical"), "int8/hierarchical"),
        (Strategy(topology="hierarchical", bucket_bytes=2**20, schedule="delayed"), "dense/1MiB/hierarchical/delayed"),
    ],
)
def test_name_is_short(strategy: Strategy, name: str):
    assert strategy.name == name


@given(any_strategy())
def test_name_reads_back_as_the_same_strategy(strategy: Strategy):
    assert Strategy.parse(strategy.name) == strategy


@given(any_strategy(), any_strategy())
def test_names_are_unique(one: Strategy, other: Strategy):
    assert (one.name == other.name) == (one == other)


def test_ratios_that_differ_in_the_fourth_digit_have_names_that_differ():
    assert Strategy(codec="topk", ratio=0.012341).name != Strategy(codec="topk", ratio=0.012342).name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "int8@1%",
        "topk@0%",
        "topk@60%",
        "topk@0.001%",
        "dense/1B",
        "dense/",
        "topk@",
        "dense@",
        "/4MiB",
        "dense/local_sgd@0",
        "dense/async@0",
        "dense/async@65",
        "dense/async@4+1",
        "dense/local_sgd@",
        "dense/local_sgd@4+",
        "dense/local_sgd@x",
        "dense/delayed@2",
        "dense/every_step@2",
        "dense/local_sgd@100001",
        "dense/local_sgd@4/1MiB",
        "dense/1MiB/2MiB",
        "int8/delayed/diloco",
        "lowrank@4/hierarchical",
        "int8/hierarchical/4MiB",
        "int8/flat/hierarchical",
    ],
)
def test_strategy_that_cannot_be_is_refused(text: str):
    with pytest.raises(UsageError, match=r"^got "):
        Strategy.parse(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [("local_sgd", "dense/local_sgd@8"), ("diloco@64+10", "int8/diloco@64+10"), ("delayed", "dense/delayed"),
     ("dense/every_step", "dense"), ("async", "dense/async@4"), ("int8/async@2", "int8/async@2"), ("local_sgd@4", "dense/local_sgd@4")],
)  # fmt: skip
def test_a_schedule_alone_names_a_strategy(text: str, name: str):
    assert Strategy.parse(text).name == name


def test_every_schedule_but_every_step_is_lossy_and_shares_its_exchange_over_the_period():
    assert {s: Strategy(codec="int8", schedule=s).fidelity for s in SCHEDULES} == {
        "every_step": "compressed", "delayed": "lossy", "async": "lossy", "local_sgd": "lossy", "diloco": "lossy",
    }  # fmt: skip
    assert Strategy(schedule="local_sgd", period=12).steps_per_exchange == 12
    assert Strategy(schedule="delayed").steps_per_exchange == 1


def test_low_rank_repeats_itself_after_two_exchanges():
    assert Strategy.parse("int8").steps_per_cycle == 1
    assert Strategy.parse("lowrank@4").steps_per_cycle == 2
    assert Strategy.parse("lowrank@4/local_sgd@8").steps_per_cycle == 16
    assert Strategy.parse("topk@2%/8MiB/local_sgd@4").codec_name == "topk@2%"


@given(st.text(max_size=30))
def test_any_text_is_a_strategy_or_a_usage_error(text: str):
    try:
        strategy = Strategy.parse(text)
    except UsageError:
        return
    assert strategy.codec in CODECS


def test_fidelity_allows_itself_and_what_is_more_faithful():
    allowed = {fidelity: [c for c in CODECS if Strategy(codec=c).allows(fidelity)] for fidelity in FIDELITIES}
    assert allowed == {
        "exact": ["dense"],
        "half": ["dense", "half"],
        "compressed": ["dense", "half", "int8", "lowrank"],
        "lossy": ["dense", "half", "int8", "int4", "lowrank", "topk", "sign"],
    }


@pytest.mark.parametrize(
    ("collective", "factor"),
    # nccl-tests, doc/PERFORMANCE.md, at 4 ranks: 2 (n-1)/n for all_reduce, (n-1)/n for the others, 1 for broadcast.
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 1.0)],
)
def test_bus_factors_are_those_of_nccl_tests(collective, factor: float):
    assert bus_factor(collective, 4) == factor
    assert bus_factor(collective, 1) == 0.0


def test_wire_bytes_of_a_megaelement_among_four_ranks():
    num_elements = 2**20
    # dense: 4 bytes x 1.5. half: 2 bytes x 1.5. int8: a shard of 2^18 bytes and 256 scales of 4 bytes, to three ranks,
    # twice. topk 1 %: 64 chunks of 164 entries of 4 bytes and one scale of 4 bytes, to three ranks.
    assert Strategy(codec="dense").wire_bytes(num_elements, 4) == 6_291_456
    assert Strategy(codec="half").wire_bytes(num_elements, 4) == 3_145_728
    assert Strategy(codec="int8").wire_bytes(num_elements, 4) == 2 * 3 * (262_144 + 1_024) == 1_579_008
    assert Strategy(codec="topk").wire_bytes(num_elements, 4) == 3 * 64 * (164 * 4 + 4) == 126_720


def test_a_hierarchical_bucket_is_summed_inside_and_sent_once_per_host():
    strategy, n = Strategy.parse("int8/hierarchical"), 2**20
    # 8 ranks on 2 hosts: a rank's share is 2^18 elements, 2^17 of them owned by each of the two hosts, with 128 scales.
    record = 2**17 + 128 * 4
    assert [(t.collective, t.scope, t.size_bytes) for t in strategy.transfers(n, 8, ranks_per_host=4)] == [
        ("all_to_all", "host", 4 * n),
        ("all_to_all", "between", 2 * record),
        ("all_gather", "between", 2 * record),
        ("all_gather", "host", 4 * n),
    ]
    # Inside, three quarters of the bucket leave the rank twice; between, one record twice.
    assert strategy.wire_bytes(n, 8, ranks_per_host=4) == 2 * 3 * n + 2 * record
    assert strategy.nic_bytes(n, 8, ranks_per_host=4) == 4 * 2 * record
    # One rank per host: the flat exchange.
    assert strategy.transfers(n, 8) == Strategy.parse("int8").transfers(n, 8)
    # Flat, each of four ranks sends an eighth of the bucket to each of four ranks elsewhere, then the ring passes once.
    shard = 2**17 + 128 * 4
    assert Strategy.parse("int8").nic_bytes(n, 8, ranks_per_host=4) == 4 * 4 * shard + 7 * shard
    assert Strategy().nic_bytes(n, 8, ranks_per_host=4) == 7 * n
    assert Strategy().nic_bytes(n, 8, ranks_per_host=8) == 0


def test_int4_and_sign_send_an_eighth_and_a_thirtieth_of_dense():
    dense, int4, sign = (Strategy(codec=codec).wire_bytes(2**24, 8) for codec in ("dense", "int4", "sign"))
    assert int4 / dense == pytest.approx(4 / 32 + 1 / 256, rel=1e-9)
    assert sign / dense == pytest.approx(1 / 32 + 1 / 1024, rel=1e-9)


def test_int8_sends_a_quarter_of_dense_and_half_a_percent():
    dense, int8 = (Strategy(codec=codec).wire_bytes(2**24, 8) for codec in ("dense", "int8"))
    assert int8 / dense == pytest.approx(0.25 * (1 + 4 / INT8_BLOCK), rel=1e-9)


@given(any_strategy(), st.integers(min_value=0, max_value=10**7))
def test_one_rank_sends_nothing(strategy: Strategy, num_elements: int):
    assert strategy.transfers(num_elements, 1) == ()
    assert strategy.wire_bytes(num_elements, 1) == 0


@given(any_strategy(), st.integers(min_value=1, max_value=10**7), st.integers(2, 64), st.integers(0, 10**6))
def test_more_elements_never_take_fewer_bytes(strategy: Strategy, num_elements: int, num_ranks: int, more: int):
    if strategy.codec == "lowrank":  # its bytes follow the matrix's sides: 13 x 13 takes fewer than 10 x 10 and 4 more
        dense = Strategy(bucket_bytes=strategy.bucket_bytes)
        assert 0 < strategy.wire_bytes(num_elements, num_ranks) <= dense.wire_bytes(num_elements, num_ranks)
        return
    assert strategy.wire_bytes(num_elements + more, num_ranks) >= strategy.wire_bytes(num_elements, num_ranks) > 0


@given(
    st.sampled_from(list(BLOCK_FORMATS)),
    st.integers(min_value=1, max_value=10**8),
    st.integers(min_value=1, max_value=64),
)
def test_shards_hold_every_element_in_whole_blocks(codec, num_elements: int, num_ranks: int):
    block, bits = BLOCK_FORMATS[codec]
    shard = block_shard_elements(codec, num_elements, num_ranks)
    assert shard % block == 0
    assert shard * num_ranks >= num_elements
    # No rank's share is padded by a whole block more than its part needs.
    assert (shard - block) * num_ranks < num_elements
    assert block_shard_bytes(codec, num_elements, num_ranks) * 8 == shard * bits + shard // block * 32


@given(st.integers(min_value=1, max_value=10**8), st.floats(min_value=1 / TOPK_CHUNK, max_value=0.5))
def test_topk_sends_at_least_one_entry_of_each_chunk_and_never_more_than_there_are(num_elements: int, ratio: float):
    whole, per_chunk, per_rest = topk_counts(num_elements, ratio)
    rest = num_elements - whole * TOPK_CHUNK
    assert 0 <= rest < TOPK_CHUNK
    assert 1 <= per_chunk <= TOPK_CHUNK
    assert (per_rest == 0) if rest == 0 else (1 <= per_rest <= rest)
    chunks = whole + (rest > 0)
    assert topk_payload_bytes(num_elements, ratio) == 4 * (whole * per_chunk + per_rest) + 4 * chunks


@given(any_strategy(), st.one_of(st.none(), st.floats(min_value=0, max_value=1e6)))
def test_strategy_file_reads_back_as_the_same_strategy(strategy: Strategy, step_s: float | None):
    text = strategy_text(StrategyFile(schema=1, strategy=strategy, predicted_step_s=step_s, note='a "note"\n#'))
    assert read_strategy_text(text, source="strategy.toml") == strategy


def test_strategy_file_as_a_person_would_write_it():
    text = 'schema = 1\n[strategy]\ncodec = "topk"\nratio = 0.02\n'
    assert read_strategy_text(text, source="s.toml") == Strategy(codec="topk", ratio=0.02)


def test_strategy_file_of_a_newer_version_is_refused_with_the_way_out_whatever_it_holds():
    text = 'schema = 2\n[strategy]\ncodec = "mystery"\nshape = "new"\n'
    with pytest.raises(DataError, match=r"s\.toml has schema 2; expected schema 1; hint: upgrade"):
        read_strategy_text(text, source="s.toml")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "schema = 1",
        "not toml =",
        'schema = 1\n[strategy]\ncodec = "zip"',
        'schema = 1\n[strategy]\ncodec = "dense"\nratio = 0.1',
        'schema = 1\n[strategy]\ncodec = "dense"\nbukcet_bytes = 4096',
        'schema = "1"\n[strategy]\ncodec = "dense"',
    ],
)
def test_file_that_is_no_strategy_is_refused_by_name(text: str):
    with pytest.raises(DataError, match=r"s\.toml is not a strategy file"):
        read_strategy_text(text, source="s.toml")


def test_strategy_cannot_be_changed_after_its_checks():
    with pytest.raises(AttributeError):
        Strategy().codec = "int8"  # type: ignore[misc]
    assert msgspec.structs.replace(Strategy(), codec="int8").name == "int8"
