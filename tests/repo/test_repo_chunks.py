from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from repo_tools import safetensors_bytes

from wirespeed.errors import DataError
from wirespeed.repo.chunks import MIN_CUT_BYTES, PIECE_BYTES, Layout, cut_stream, layout_of

NOISE = np.random.default_rng(3).integers(0, 256, 24 * 2**20, dtype=np.uint8).tobytes()


def cut(content: bytes) -> list[bytes]:
    view = memoryview(content)
    return [
        content[p.offset : p.offset + p.length] for p in cut_stream(lambda at, num: view[at : at + num], len(content))
    ]


def lay_out(tmp_path: Path, content: bytes) -> Layout:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    handle = os.open(path, os.O_RDONLY)
    try:
        return layout_of(str(path), handle=handle, size_bytes=len(content))
    finally:
        os.close(handle)


def test_cuts_cover_the_file_and_keep_their_bounds() -> None:
    pieces = cut(NOISE)
    assert b"".join(pieces) == NOISE
    assert all(MIN_CUT_BYTES < len(p) <= PIECE_BYTES for p in pieces[:-1])
    assert 5 < len(pieces) < 24


def test_an_inserted_byte_moves_only_the_cuts_near_it() -> None:
    before = set(cut(NOISE))
    at = len(NOISE) // 2
    after = cut(NOISE[:at] + b"x" + NOISE[at:])
    assert sum(piece not in before for piece in after) <= 2


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, MIN_CUT_BYTES, MIN_CUT_BYTES + 1])
def test_small_files_are_one_piece(size: int) -> None:
    assert cut(NOISE[:size]) == ([NOISE[:size]] if size else [])


def test_zeros_are_cut_at_the_upper_bound() -> None:
    assert [len(p) for p in cut(bytes(2 * PIECE_BYTES + 5))] == [PIECE_BYTES, PIECE_BYTES, 5]


@given(sizes=st.lists(st.integers(0, 300_000), min_size=1, max_size=12))
def test_pieces_of_tensors_cover_the_file(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    content = safetensors_bytes({f"t{i}": ("U8", (n,), bytes(n)) for i, n in enumerate(sizes)})
    layout = lay_out(tmp_path_factory.mktemp("l"), content)
    assert layout.pieces is not None
    at = 0
    for piece in layout.pieces:
        assert piece.offset == at
        assert 0 < piece.length <= PIECE_BYTES
        at += piece.length
    assert at == len(content)
    assert [t.name for t in layout.tensors if t.num_bytes] == [f"t{i}" for i, n in enumerate(sizes) if n]


def test_a_large_tensor_has_pieces_of_its_own_and_tiny_ones_share(tmp_path: Path) -> None:
    tensors = {
        "a": ("F32", (10,), bytes(40)),
        "b": ("F32", (10,), bytes(40)),
        "w": ("BF16", (5 * 2**20,), bytes(10 * 2**20)),
    }
    pieces = lay_out(tmp_path, safetensors_bytes(tensors)).pieces
    assert pieces is not None
    assert [(p.key, p.length, p.width) for p in pieces[1:]] == [
        (("a", 0), 80, 4), (("w", 0), 8 * 2**20, 2), (("w", 8 * 2**20), 2 * 2**20, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    content = safetensors_bytes({"t": ("F32", (100,), bytes(400))})
    with pytest.raises(DataError):
        lay_out(tmp_path, content[:keep])


@pytest.mark.parametrize(
    "head",
    [
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}}',
        b"[]",
        b"not json",
    ],
)
def test_heads_that_lie_are_refused(tmp_path: Path, head: bytes) -> None:
    with pytest.raises(DataError):
        lay_out(tmp_path, len(head).to_bytes(8, "little") + head + bytes(16))


def test_bytes_after_the_last_tensor_are_kept(tmp_path: Path) -> None:
    content = safetensors_bytes({"t": ("F32", (100,), bytes(400))}) + b"trailing"
    pieces = lay_out(tmp_path, content).pieces
    assert pieces is not None
    assert pieces[-1].length == len(b"trailing")
