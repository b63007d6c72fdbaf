"""Small forms of a chunk, bit-exact: against a base chunk of equal length, or alone.

Training moves most weights by less than a rounding step, so that of bf16 weights only a few in a hundred change, all
over the tensor: chunk deduplication finds nothing, elements do. Elements are taken as integers of their width; what is
coded is the difference modulo 2^bits, zigzag (0, -1, 1, -2 ... become 0, 1, 2, 3 ...), because an optimizer's step
moves the integer by little, whereas XOR turns a carry into many bits.

``sparse``: distances between changed elements as bytes (255 carries on), then the differences of those, as planes.
``diff``: the differences of all elements as byte planes. ``planes``: the elements themselves as byte planes. ``int8``
(see ``quantize``) is the one that was not exact when it was made; what it stands for is.

Nothing here verifies: callers hold what comes out against the chunk's digest, so that a wrong base is never silent.

The loops are numpy's, and once a process has coded ``LOAD_AFTER_BYTES`` those of ``delta_loops``, where numba is there:
the same bytes, at about twice the speed.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from wirespeed.errors import DataError
from wirespeed.repo import planes as planes_store
from wirespeed.repo import quantize
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
_GLANCE_LIMIT = int(2 * SPARSE_LIMIT * COMPARE_BLOCK)
"""What changed so much in its first block is taken to have changed too much."""
LOAD_AFTER_BYTES = 1 << 30
"""Loading the compiler takes about as long as coding so much with numpy takes longer."""
_KEPT_BYTES = 16 << 20
"""Of working memory that a thread keeps. Fresh pages cost more than the arithmetic (measured: a factor of five)."""
_local = threading.local()
_loading = threading.Lock()
_loops: Any = None
_left_bytes = LOAD_AFTER_BYTES

Array = npt.NDArray[Any]


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk in a small form."""

    encoding: Encoding
    payload: bytes


def load_loops() -> bool:
    """Use the compiled loops from now on; False where numba is not installed. For those who will code gigabytes."""
    global _loops, _left_bytes  # noqa: PLW0603 - one per process: it is what the compiler keeps, too
    with _loading:
        _left_bytes = 0
        if _loops is None:
            try:
                _loops = importlib.import_module("wirespeed.repo.delta_loops")
            except ImportError:
                return False
        return True


def _count(num_bytes: int) -> None:
    global _left_bytes  # noqa: PLW0603 - of what two threads take away at once some may be lost: no harm
    if _loops is None and _left_bytes > 0:
        _left_bytes -= num_bytes
        if _left_bytes <= 0 and not _loading.locked():
            load_loops()


def _loops_for(*arrays: Array) -> Any:
    """The compiled loops where they are loaded and take these; else None."""
    takes = _loops is not None and all(array.itemsize > 1 and array.flags.aligned for array in arrays)
    return _loops if takes else None


def encode_delta(base: memoryview | bytes, new: memoryview | bytes, *, width: int) -> Encoded | None:
    """The smaller of ``sparse`` and ``diff``; None where neither is worth it or the lengths differ."""
    if len(base) != len(new) or len(new) % width or not len(new):
        return None
    _count(len(new))
    old_n, new_n = _elements(base, width), _elements(new, width)
    changes = _changes(old_n, new_n)
    if changes is not None:
        found = Encoded(encoding="sparse", payload=_sparse(*changes))
    else:
        found = Encoded(encoding="diff", payload=planes_store.join(_planes(new_n, minus=old_n)))
    return found if len(found.payload) < WORTH * len(new) else None


def encode_alone(new: memoryview | bytes, *, width: int) -> Encoded | None:
    """Byte planes for elements of 2 bytes and more, zstd for others; None where that is not worth it."""
    if not len(new) or len(new) % width:
        return None
    _count(len(new))
    if width == 1:
        import zstandard

        found = Encoded(encoding="zstd", payload=zstandard.ZstdCompressor(level=1).compress(new))
    else:
        found = Encoded(encoding="planes", payload=planes_store.join(_planes(_elements(new, width))))
    return found if len(found.payload) < WORTH * len(new) else None


def decode(
    payload: memoryview | bytes, *, encoding: Encoding, width: int, length: int, base: memoryview | bytes | None
) -> memoryview:
    """The chunk's ``length`` bytes, in memory of the caller's. Raises DataError where the payload makes no sense."""
    if (encoding in DELTAS) != (base is not None) or (base is not None and len(base) != length):
        raise DataError(f"a chunk of encoding {encoding!r} came with a wrong base")
    num = length // width
    _count(length)
    try:
        match encoding:
            case "raw":
                decoded = np.frombuffer(payload, np.uint8)
            case "zstd":
                decoded = np.frombuffer(planes_store.decompress(payload, length), np.uint8)
            case "planes":
                decoded = _unplanes(payload, num, width)
            case "diff":
                assert base is not None
                decoded = _unplanes(payload, num, width, plus=_elements(base, width))
            case "sparse":
                assert base is not None
                decoded = _unsparse(payload, _elements(base, width), width)
            case "int8":
                assert base is not None
                decoded = quantize.dequantize(payload, base, width=width)
    except (ValueError, IndexError, OverflowError) as fault:
        raise DataError(f"a chunk of encoding {encoding!r} is damaged: {fault}") from fault
    flat: memoryview = decoded.view(np.uint8).reshape(-1).data
    if len(flat) != length:
        raise DataError(f"a chunk of encoding {encoding!r} has {len(flat)} bytes", expected=f"{length}")
    return flat


def _elements(content: memoryview | bytes, width: int) -> Array:
    elements = np.frombuffer(content, dtype=f"<u{width}")
    elements.flags.writeable = False  # one kind of array, so that loops are compiled once
    return elements


def _changes(old_n: Array, new_n: Array) -> tuple[Array, Array] | None:
    """Distances between changed elements as bytes, and their zigzag differences; None where they are too many."""
    if new_n.nbytes % 8 == 0 and new_n.itemsize > 1:
        old_words, new_words = old_n.view("<u8"), new_n.view("<u8")
        loops = _loops_for(old_words, new_words)
        if loops is not None:
            limit = int(SPARSE_LIMIT * new_n.size)
            limits = (limit, COMPARE_BLOCK, _GLANCE_LIMIT)
            gaps, code = np.empty(limit + new_n.size // 255 + 1, np.uint8), np.empty(limit, new_n.dtype)
            num, num_gaps = loops.scan(old_n, new_n, old_words, new_words, limits, gaps, code)
            return None if num < 0 else (gaps[:num_gaps], code[:num])
    positions = _changed(old_n, new_n)
    if positions is None:
        return None
    wide = np.diff(positions, prepend=-1) - 1
    long = np.flatnonzero(wide >= 255)
    short = (wide % 255).astype(np.uint8)
    if long.size:
        short = np.insert(short, np.repeat(long, wide[long] // 255), 255)
    code = new_n[positions] - old_n[positions]
    _zigzag(code, np.empty_like(code))
    return short, code


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
        if num > SPARSE_LIMIT * new_n.size or (start == 0 and num_here > _GLANCE_LIMIT):
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
    name = f"scratch_{dtype.itemsize}"
    if not hasattr(_local, name):
        setattr(_local, name, (np.empty(BLOCK, dtype), np.empty(BLOCK, dtype)))
    pair: tuple[Array, Array] = getattr(_local, name)
    return pair


def _plane_memory(width: int, num: int) -> Array:
    """``width`` planes of ``num`` bytes, until this thread asks again."""
    held: Array | None = getattr(_local, "planes", None)
    if held is None or held.size < width * num:
        held = np.empty(width * num, np.uint8)
        if held.size <= _KEPT_BYTES:
            _local.planes = held
    return held[: width * num].reshape(width, num)


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


def _sparse(gaps: Array, code: Array) -> bytes:
    head = code.size.to_bytes(8, "little") + gaps.size.to_bytes(8, "little")
    return head + planes_store.join([gaps, *_planes(code)])


def _unsparse(payload: memoryview | bytes, old_n: Array, width: int) -> Array:
    num, num_gaps = (int.from_bytes(payload[at : at + 8], "little") for at in (0, 8))
    if num > old_n.size or num_gaps > num + old_n.size // 255 + 1:
        raise ValueError(f"{num} changes in {old_n.size} elements")
    gaps = np.empty(num_gaps, np.uint8)
    _, rest = planes_store.read_plane(memoryview(payload)[16:], gaps)
    code = _unplanes(rest, num, width)
    new_n = old_n.copy()
    loops = _loops_for(new_n, code)
    if loops is not None:
        num_patched = loops.patch(new_n, gaps, code)
        if num_patched == -1:
            raise ValueError("a change lies outside")
        if num_patched != num:
            raise ValueError("its distances are cut short")
        return new_n
    # A byte below 255 ends a distance: the element that changed lies one further than all before it add up to.
    ends = gaps < 255
    if np.count_nonzero(ends) != num:
        raise ValueError("its distances are cut short")
    positions = np.cumsum(gaps + ends, dtype=np.int64)[ends] - 1
    if num and positions[-1] >= old_n.size:
        raise ValueError("a change lies outside")
    _unzigzag(code, np.empty_like(code))
    new_n[positions] = code + old_n[positions]
    return new_n


def _planes(elements: Array, *, minus: Array | None = None) -> Array:
    """Byte planes, lowest first, of the elements or of their zigzag differences. Valid until the thread's next ones."""
    width = elements.itemsize
    planes = _plane_memory(width, elements.size)
    loops = _loops_for(elements, elements if minus is None else minus)
    if loops is not None:
        new_n = _frozen(elements)
        loops.split(new_n, new_n if minus is None else minus, minus is not None, planes)
        return planes
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
    planes = _plane_memory(width, num)
    used = []
    for k in range(width):
        is_zero, rest = planes_store.read_plane(rest, planes[k])
        if not is_zero:
            used.append(k)
    if len(rest):
        raise ValueError(f"{len(rest)} bytes too many")
    elements: Array = np.empty(num, dtype=f"<u{width}")
    loops = _loops_for(elements, elements if plus is None else plus)
    if loops is not None:
        num_used = used[-1] + 1 if used else 1
        loops.merge(planes, num_used, _frozen(elements) if plus is None else plus, plus is not None, elements)
        return elements
    code, spare = _scratch(elements.dtype)
    for start in range(0, num, BLOCK):
        block = slice(start, min(start + BLOCK, num))
        c, s = code[: block.stop - start], spare[: block.stop - start]
        np.copyto(c, planes[0][block])
        for k in used:
            if k:
                np.left_shift(planes[k][block], 8 * k, out=s, dtype=elements.dtype, casting="unsafe")
                np.bitwise_or(c, s, out=c)
        if plus is None:
            elements[block] = c
        else:
            _unzigzag(c, s)
            np.add(c, plus[block], out=elements[block])
    return elements


def _frozen(elements: Array) -> Array:
    """A view that cannot be written: what loops are compiled for."""
    view = elements.view()
    view.flags.writeable = False
    return view
