"""Byte planes as they are stored: each as it pays, a repeated byte, zstd-1, or as it is.

A plane is a kind (1 byte), the size of what follows (8), and that. A low plane of mantissas is noise, and is not even
tried; a high one has a skewed histogram and next to no repetitions. Sizes are checked before memory is taken; whether
the bytes are right is for whoever holds their digest to say.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

_SAMPLE = 1 << 14
_RAW, _CONSTANT, _ZSTD = 0, 1, 2
_local = threading.local()

Array = npt.NDArray[Any]


def join(planes: Iterable[Array]) -> bytes:
    """Planes, one behind the other, as they are stored."""
    parts: list[bytes | memoryview] = []
    for plane in planes:
        kind, content = _small(plane)
        parts += [bytes([kind]) + len(content).to_bytes(8, "little"), content]
    return b"".join(parts)


def _small(plane: Array) -> tuple[int, bytes | memoryview]:
    if not plane.size:
        return _RAW, b""
    bits = _entropy_bits(plane)
    if bits == 0 and not np.any(plane != plane[0]):
        return _CONSTANT, plane[:1].tobytes()
    if bits > 7.8:
        return _RAW, plane.data
    small: bytes = _compressor().compress(plane.data)
    return (_ZSTD, small) if len(small) < 0.98 * plane.size else (_RAW, plane.data)


def _entropy_bits(plane: Array) -> float:
    """Of a sample, in bits per byte: zstd is not even tried on noise, which most low planes are."""
    sample = plane if plane.size <= _SAMPLE else plane[: plane.size // _SAMPLE * _SAMPLE : plane.size // _SAMPLE]
    shares = np.bincount(sample, minlength=256) / sample.size
    shares = shares[shares > 0]
    # A small sample of noise looks less than random (Miller-Madow correction).
    if shares.size == 1:
        return 0.0
    return float(-(shares * np.log2(shares)).sum() + (shares.size - 1) / (2 * sample.size * np.log(2)))


def read_plane(payload: memoryview, plane: Array) -> tuple[bool, memoryview]:
    """Fill ``plane``: whether it is known to be all zero, and what follows it. Raises ValueError."""
    if len(payload) < 9:
        raise ValueError("it is cut short")
    kind, size = payload[0], int.from_bytes(payload[1:9], "little")
    content, rest = payload[9 : 9 + size], payload[9 + size :]
    if len(content) != size:
        raise ValueError("it is cut short")
    if kind == _CONSTANT and size == 1:
        plane.fill(content[0])
    elif kind == _RAW and size == plane.size:
        plane[:] = np.frombuffer(content, np.uint8)
    elif kind == _ZSTD:
        decompress_into(content, plane.data)
    else:
        raise ValueError(f"it has a plane of kind {kind} with {size} bytes")
    return kind == _CONSTANT and content[0] == 0, rest


def _compressor() -> Any:
    import zstandard

    if not hasattr(_local, "compressor"):
        # Planes have a skewed histogram and next to no repetitions: hardly looking for matches is quicker by a third,
        # and smaller by a twentieth, than zstd -1 as it comes (measured).
        parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, chain_log=6)
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return _local.compressor


def decompress(content: memoryview | bytes, length: int) -> bytearray:
    """``length`` bytes of zstd. Raises ValueError for anything else."""
    plain = bytearray(length)
    decompress_into(content, memoryview(plain))
    return plain


def decompress_into(content: memoryview | bytes, plain: memoryview) -> None:
    """As ``decompress``, into memory of the caller's, all of which it has to fill."""
    import zstandard

    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        # The frame's own word on its size would decide how much memory is taken: it has to be what we expect.
        if zstandard.frame_content_size(content) != len(plain):
            raise ValueError(f"it does not unpack to {len(plain)} bytes")
        with _local.decompressor.stream_reader(content) as reader:
            done = 0
            while done < len(plain) and (num := reader.readinto(plain[done:])):
                done += num
    except zstandard.ZstdError as fault:
        raise ValueError(str(fault)) from fault
    if done != len(plain):
        raise ValueError("it is cut short")
