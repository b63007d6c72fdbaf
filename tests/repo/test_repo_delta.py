from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from repo_tools import bf16, weights

from wirespeed.errors import DataError
from wirespeed.repo import delta

WIDTHS = st.sampled_from([1, 2, 4, 8])


@pytest.fixture(scope="module", params=["numpy", "compiled"], autouse=True)
def loops(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything here holds with either kind of loops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "_loops", None)
        patch.setattr(delta, "_left_bytes", 1 << 60)
        if request.param == "compiled":
            pytest.importorskip("numba")
            assert delta.load_loops()
        yield request.param


@given(width=WIDTHS, num=st.integers(1, 2000), share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_delta_gives_back_every_bit(width: int, num: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, num * width, dtype=np.uint8)
    new = old.copy().view(f"<u{width}")
    changed = rng.random(num) < share
    new[changed] = rng.integers(0, 2 ** (8 * width), changed.sum(), dtype=np.uint64).astype(new.dtype)
    found = delta.encode_delta(old.data, new.view(np.uint8).data, width=width)
    if found is not None:
        back = delta.decode(found.payload, encoding=found.encoding, width=width, length=num * width, base=old.data)
        assert bytes(back) == new.tobytes()
        assert len(found.payload) < num * width


@given(width=WIDTHS, num=st.integers(1, 2000), seed=st.integers(0, 2**32 - 1), spread=st.integers(1, 256))
def test_compression_alone_gives_back_every_bit(width: int, num: int, seed: int, spread: int) -> None:
    content = np.random.default_rng(seed).integers(0, spread, num * width, dtype=np.uint8)
    found = delta.encode_alone(content.data, width=width)
    if found is not None:
        back = delta.decode(found.payload, encoding=found.encoding, width=width, length=num * width, base=None)
        assert bytes(back) == content.tobytes()


@pytest.mark.parametrize("gap", [254, 255, 256, 509, 510, 511, 100_000])
def test_distances_around_multiples_of_255_are_right(gap: int) -> None:
    old = np.zeros(gap + 10, np.uint16)
    new = old.copy()
    new[[0, gap]] = 65535, 1
    found = delta.encode_delta(old.view(np.uint8).data, new.view(np.uint8).data, width=2)
    assert found is not None
    back = delta.decode(
        found.payload, encoding=found.encoding, width=2, length=new.nbytes, base=old.view(np.uint8).data
    )
    assert bytes(back) == new.tobytes()


def test_elements_across_blocks_are_right() -> None:
    num = 2 * delta.BLOCK + 3
    old = weights(num).view(np.uint32)
    new = old + np.arange(num, dtype=np.uint32) % 5
    found = delta.encode_delta(old.view(np.uint8).data, new.view(np.uint8).data, width=4)
    assert found is not None
    assert found.encoding == "diff"
    back = delta.decode(found.payload, encoding="diff", width=4, length=4 * num, base=old.view(np.uint8).data)
    assert bytes(back) == new.tobytes()


def test_an_optimizer_step_in_bf16_takes_a_hundredth() -> None:
    old, new = bf16(weights(2**20)), bf16(weights(2**20, steps=1))
    assert 0.005 < (old != new).mean() < 0.02
    found = delta.encode_delta(old.view(np.uint8).data, new.view(np.uint8).data, width=2)
    assert found is not None
    assert found.encoding == "sparse"
    # 1.2 % changed: entropy of positions 0.0945 bit/element and of signs 0.012 of 16 bits are 0.67 %.
    assert len(found.payload) / new.nbytes < 0.009


def test_identical_content_takes_next_to_nothing() -> None:
    content = weights(100_000).tobytes()
    found = delta.encode_delta(content, content, width=4)
    assert found is not None
    assert len(found.payload) < 64


def test_noise_against_noise_is_not_worth_it() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 256, 100_000, dtype=np.uint8).data for _ in range(2))
    assert delta.encode_delta(a, b, width=2) is None
    assert delta.encode_alone(a, width=2) is None


def test_different_lengths_have_no_delta() -> None:
    assert delta.encode_delta(bytes(8), bytes(16), width=2) is None


@given(data=st.data(), encoding=st.sampled_from(["sparse", "diff", "planes", "zstd"]))
def test_damaged_payloads_are_data_errors_or_wrong_bytes_but_never_more(data: st.DataObject, encoding: str) -> None:
    old = np.arange(500, dtype=np.uint16)
    new = old.copy()
    new[:: 7 if encoding == "sparse" else 1] += 3
    base = old.view(np.uint8).data
    if encoding in ("sparse", "diff"):
        found = delta.encode_delta(base, new.view(np.uint8).data, width=2)
    else:
        found = delta.encode_alone(
            new.view(np.uint8).data if encoding == "planes" else bytes(1000), width=2 if encoding == "planes" else 1
        )
    assert found is not None
    assert found.encoding == encoding
    payload = bytearray(found.payload)
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(payload)))
    is_delta = encoding in ("sparse", "diff")
    for content in (bytes(payload), bytes(found.payload[:cut])):
        try:
            back = delta.decode(
                content,
                encoding=found.encoding,
                width=2 if encoding != "zstd" else 1,
                length=1000,
                base=base if is_delta else None,
            )
        except DataError:
            continue
        assert len(back) == 1000


@pytest.mark.parametrize("num_changed", [0, 1, 7, 30_000])
@pytest.mark.parametrize("size", [1, 8, 1001, delta.COMPARE_BLOCK, 2 * delta.COMPARE_BLOCK + 5])
def test_changed_elements_are_found_wherever_they_lie(size: int, num_changed: int) -> None:
    random = np.random.default_rng(size + num_changed)
    old = random.integers(0, 2**16, size, dtype=np.uint16)
    new = old.copy()
    new[random.integers(0, size, min(num_changed, size // 4))] ^= 0x8001
    new[-1:] ^= num_changed > 0  # the last element of the last block
    expected = np.flatnonzero(old != new).tolist()
    found = delta._changed(old, new)
    changes = delta._changes(delta._frozen(old), delta._frozen(new))
    if len(expected) > delta.SPARSE_LIMIT * size:
        assert found is None
        assert changes is None
    else:
        assert found is not None
        assert found.tolist() == expected
        assert changes is not None
        wide = np.diff(expected, prepend=-1) - 1
        assert changes[0].tolist() == [byte for gap in wide for byte in [255] * (gap // 255) + [gap % 255]]
        assert len(changes[1]) == len(expected)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("loops", ["compiled"], indirect=True)
def test_both_kinds_of_loops_write_the_same_bytes(
    width: int, share: float, loops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(width)
    num = 2 * delta.COMPARE_BLOCK + 8
    old = random.integers(0, 2 ** (8 * width - 1), num, dtype=np.uint64).astype(f"<u{width}")
    new = old + (random.random(num) < share) * random.integers(1, 200, num).astype(old.dtype)
    contents = old.view(np.uint8).data, new.astype(old.dtype).view(np.uint8).data
    compiled = delta.encode_delta(*contents, width=width)
    compiled_alone = delta.encode_alone(contents[1], width=width)
    monkeypatch.setattr(delta, "_loops", None)
    assert compiled is not None
    assert compiled == delta.encode_delta(*contents, width=width)
    assert compiled_alone == delta.encode_alone(contents[1], width=width)


@pytest.mark.parametrize("loops", ["numpy"], indirect=True)
def test_compiled_loops_are_loaded_once_they_pay(loops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(delta, "_loops", None)
    monkeypatch.setattr(delta, "_left_bytes", 1000)
    delta.encode_delta(bytes(992), bytes(992), width=2)
    assert delta._loops is None
    delta.encode_delta(bytes(8), bytes(8), width=2)
    assert delta._loops is not None


def test_memory_that_is_not_aligned_is_coded_all_the_same() -> None:
    old = np.arange(4001, dtype=np.uint8)[1:].data
    new = (np.arange(4001, dtype=np.uint8)[1:] + np.uint8(1)).data
    found = delta.encode_delta(old, new, width=4)
    assert found is not None
    assert bytes(delta.decode(found.payload, encoding=found.encoding, width=4, length=4000, base=old)) == bytes(new)
