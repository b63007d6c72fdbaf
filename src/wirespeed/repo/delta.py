"""Small forms of a chunk, bit-exact: against a base chunk of equal length, or alone.

Training moves most weights by less than a rounding step, so that of bf16 weights only a few in a hundred change, all
over the tensor: chunk deduplication finds nothing, elements do. Elements are taken as integers of their width; what is
coded is the difference modulo 2^bits, zigzag (0, -1, 1, -2 ... become 0, 1, 2, 3 ...), because an optimizer's step
moves the integer by little, whereas XOR turns a carry into many bits.

``sparse``: distances between changed elements as bytes (255 carries on), then the differences of those, as planes.
``diff``: the differences of all elements as byte planes. ``planes``: the elements themselves as byte planes.
Each plane is stored as it pays: a repeated byte, zstd-1, or as it is (a low plane of mantissas is noise).

Nothing here verifies: callers hold what comes out against the chunk's digest, so that a wrong base is never silent.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from wirespeed.errors import DataError
from wirespeed.repo.manifest import DELTAS, Encoding

SPARSE_LIMIT = 0.30
"""Above this share of changed elements a plane of all differences is as small, and quicker (measured)."""
WORTH = 0.92
"""An encoding that saves less than this is not worth its time."""
BLOCK = 1 << 17
"""Elements worked on at a time. Alone, a quarter of that is as fast; beside a second thread each call into numpy is a
chance to wait for the interpreter's lock (measured on two cores: fp32 encodes 1.4 times and decodes 1.5 times as fast
as with 1 << 15)."""
COMPARE_BLOCK = 1 << 17
_SAMPLE = 1 << 14
_RAW, _CONSTANT, _ZSTD = 0, 1, 2
_local = threading.local()

Array = npt.NDArray[Any]


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk in a small form."""

    encoding: Encoding
    payload: bytes


def encode_delta(base: memoryview | bytes, new: memoryview | bytes, *, width: int) -> Encoded | None:
    """The smaller of ``sparse`` and ``diff``; None where neither is worth it or the lengths differ."""
    if len(base) != len(new) or len(new) % width or not len(new):
        return None
    old_n, new_n = _elements(base, width), _elements(new, width)
    positions = _changed(old_n, new_n)
    if positions is not None:
        found = Encoded(encoding="sparse", payload=_sparse(old_n, new_n, positions))
    else:
        found = Encoded(encoding="diff", payload=_join(_planes(new_n, minus=old_n)))
    return found if len(found.payload) < WORTH * len(new) else None


def encode_alone(new: memoryview | bytes, *, width: int) -> Encoded | None:
    """Byte planes for elements of 2 bytes and more, zstd for others; None where that is not worth it."""
    if not len(new) or len(new) % width:
        return None
    if width == 1:
        import zstandard

        found = Encoded(encoding="zstd", payload=zstandard.ZstdCompressor(level=1).compress(new))
    else:
        found = Encoded(encoding="planes", payload=_join(_planes(_elements(new, width))))
    return found if len(found.payload) < WORTH * len(new) else None


def decode(
    payload: memoryview | bytes, *, encoding: Encoding, width: int, length: int, base: memoryview | bytes | None
) -> memoryview:
    """The chunk's ``length`` bytes, in memory of the caller's. Raises DataError where the payload makes no sense."""
    if (encoding in DELTAS) != (base is not None) or (base is not None and len(base) != length):
        raise DataError(f"a chunk of encoding {encoding!r} came with a wrong base")
    num = length // width
    try:
        match encoding:
            case "raw":
                decoded = np.frombuffer(payload, np.uint8)
            case "zstd":
                decoded = np.frombuffer(_decompress(payload, length), np.uint8)
            case "planes":
                decoded = _unplanes(payload, num, width)
            case "diff":
                assert base is not None
                decoded = _unplanes(payload, num, width, plus=_elements(base, width))
            case "sparse":
                assert base is not None
                decoded = _unsparse(payload, _elements(base, width), width)
    except (ValueError, IndexError, OverflowError) as fault:
        raise DataError(f"a chunk of encoding {encoding!r} is damaged: {fault}") from fault
    flat: memoryview = decoded.view(np.uint8).reshape(-1).data
    if len(flat) != length:
        raise DataError(f"a chunk of encoding {encoding!r} has {len(flat)} bytes", expected=f"{length}")
    return flat


def _elements(content: memoryview | bytes, width: int) -> Array:
    return np.frombuffer(content, dtype=f"<u{width}")


def _changed(old_n: Array, new_n: Array) -> Array | None:
    """Where elements differ, ascending; None where they are too many to be listed."""
    found: list[Array] = []
    num = 0
    for start in range(0, new_n.size, COMPARE_BLOCK):
        block = slice(start, start + COMPARE_BLOCK)
        flags = old_n[block] != new_n[block]
        # Counting is quick, listing is not: what changed too much is given up after its first block.
        num_here = int(np.count_nonzero(flags))
        num += num_here
        if num > SPARSE_LIMIT * new_n.size or (start == 0 and num_here > 2 * SPARSE_LIMIT * COMPARE_BLOCK):
            return None
        found.append(_where(flags) + start)
    return np.concatenate(found)


def _where(flags: Array) -> Array:
    """The positions of true flags."""
    if flags.size % 8:
        return np.flatnonzero(flags)
    # Eight at a time, then the flags of those eights that have one: where few are true, in two thirds of the time.
    eights = np.flatnonzero(flags.view(np.uint64) != 0)
    inside = np.flatnonzero(flags.view(np.bool_).reshape(-1, 8)[eights])
    found: Array = (eights << 3)[inside >> 3] + (inside & 7)
    return found


def _scratch(dtype: np.dtype[Any]) -> tuple[Array, Array]:
    # Fresh arrays of a chunk's size cost more in page faults than the arithmetic (measured: a factor of five).
    name = f"scratch_{dtype.itemsize}"
    if not hasattr(_local, name):
        setattr(_local, name, (np.empty(BLOCK, dtype), np.empty(BLOCK, dtype)))
    pair: tuple[Array, Array] = getattr(_local, name)
    return pair


def _zigzag(code: Array, spare: Array) -> None:
    """In place."""
    signed = code.view(f"<i{code.itemsize}")
    np.right_shift(signed, 8 * code.itemsize - 1, out=spare.view(signed.dtype))
    np.left_shift(code, 1, out=code)
    np.bitwise_xor(code, spare, out=code)


def _unzigzag(code: Array, spare: Array) -> None:
    """In place."""
    np.bitwise_and(code, 1, out=spare)
    np.negative(spare, out=spare)
    np.right_shift(code, 1, out=code)
    np.bitwise_xor(code, spare, out=code)


def _sparse(old_n: Array, new_n: Array, positions: Array) -> bytes:
    gaps = np.diff(positions, prepend=-1) - 1
    long = np.flatnonzero(gaps >= 255)
    short = (gaps % 255).astype(np.uint8)
    if long.size:
        short = np.insert(short, np.repeat(long, gaps[long] // 255), 255)
    head = len(positions).to_bytes(8, "little") + len(short).to_bytes(8, "little")
    return head + _join([short, *_planes(new_n[positions], minus=old_n[positions])])


def _unsparse(payload: memoryview | bytes, old_n: Array, width: int) -> Array:
    num, num_gaps = (int.from_bytes(payload[at : at + 8], "little") for at in (0, 8))
    if num > old_n.size or num_gaps > num + old_n.size // 255 + 1:
        raise ValueError(f"{num} changes in {old_n.size} elements")
    short, rest = _read_plane(memoryview(payload)[16:], num_gaps)
    # A byte below 255 ends a distance: the element that changed lies one further than all before it add up to.
    ends = short < 255
    if np.count_nonzero(ends) != num:
        raise ValueError("its distances are cut short")
    positions = np.cumsum(short + ends, dtype=np.int64)[ends] - 1
    if num and positions[-1] >= old_n.size:
        raise ValueError("a change lies outside")
    changed = _unplanes(rest, num, width, plus=old_n[positions])
    new_n = old_n.copy()
    new_n[positions] = changed
    return new_n


def _planes(elements: Array, *, minus: Array | None = None) -> list[Array]:
    """Byte planes, lowest first, of the elements or of their zigzag differences."""
    width = elements.itemsize
    planes = [np.empty(elements.size, np.uint8) for _ in range(width)]
    code, spare = _scratch(elements.dtype)
    for start in range(0, elements.size, BLOCK):
        block = slice(start, min(start + BLOCK, elements.size))
        c, s = code[: block.stop - start], spare[: block.stop - start]
        if minus is None:
            c[:] = elements[block]
        else:
            np.subtract(elements[block], minus[block], out=c)
            _zigzag(c, s)
        np.copyto(planes[0][block], c, casting="unsafe")
        for k in range(1, width):
            # Shifted and narrowed: a strided read of the bytes is slower (measured).
            np.right_shift(c, 8 * k, out=s)
            np.copyto(planes[k][block], s, casting="unsafe")
    return planes


def _unplanes(payload: memoryview | bytes, num: int, width: int, *, plus: Array | None = None) -> Array:
    """Elements from planes; with ``plus``, those are zigzag differences to it."""
    rest = memoryview(payload)
    planes = []
    for _ in range(width):
        plane, rest = _read_plane(rest, num)
        planes.append(plane)
    if len(rest):
        raise ValueError(f"{len(rest)} bytes too many")
    elements: Array = np.empty(num, dtype=f"<u{width}")
    code, spare = _scratch(elements.dtype)
    used = [k for k in range(1, width) if not _is_zero(planes[k])]
    for start in range(0, num, BLOCK):
        block = slice(start, min(start + BLOCK, num))
        c, s = code[: block.stop - start], spare[: block.stop - start]
        np.copyto(c, planes[0][block])
        for k in used:
            np.left_shift(planes[k][block], 8 * k, out=s, dtype=elements.dtype, casting="unsafe")
            np.bitwise_or(c, s, out=c)
        if plus is None:
            elements[block] = c
        else:
            _unzigzag(c, s)
            np.add(c, plus[block], out=elements[block])
    return elements


def _is_zero(plane: Array) -> bool:
    return plane.strides == (0,) and plane.size > 0 and plane[0] == 0


def _join(planes: list[Array]) -> bytes:
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


def _read_plane(payload: memoryview, num: int) -> tuple[Array, memoryview]:
    if len(payload) < 9:
        raise ValueError("it is cut short")
    kind, size = payload[0], int.from_bytes(payload[1:9], "little")
    content, rest = payload[9 : 9 + size], payload[9 + size :]
    if len(content) != size:
        raise ValueError("it is cut short")
    if kind == _CONSTANT and size == 1:
        return np.broadcast_to(np.frombuffer(content, np.uint8), (num,)), rest
    if kind == _RAW and size == num:
        return np.frombuffer(content, np.uint8), rest
    if kind == _ZSTD:
        return np.frombuffer(_decompress(content, num), np.uint8), rest
    raise ValueError(f"it has a plane of kind {kind} with {size} bytes")


def _compressor() -> Any:
    import zstandard

    if not hasattr(_local, "compressor"):
        # Planes have a skewed histogram and next to no repetitions: hardly looking for matches is quicker by a third,
        # and smaller by a twentieth, than zstd -1 as it comes (measured).
        parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, chain_log=6)
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return _local.compressor


def _decompress(content: memoryview | bytes, length: int) -> bytes:
    import zstandard

    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        # The frame's own word on its size would decide how much memory is taken: it has to be what we expect.
        if zstandard.frame_content_size(content) != length:
            raise ValueError(f"it does not unpack to {length} bytes")
        plain: bytes = _local.decompressor.decompress(content)
    except zstandard.ZstdError as fault:
        raise ValueError(str(fault)) from fault
    return plain
