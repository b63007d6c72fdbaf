"""What compiled loops share: how they are compiled, and the bits of numbers.

numba's cache is keyed by the time and size of the file that holds a function, and would not see a change in another:
touch the files with the loops when something here changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


def jit(function: Callable[..., Any], *, fastmath: Collection[str] = ()) -> Any:
    """Compile on first call; kept in numba's cache where a folder for it can be written.

    ``fastmath``: LLVM's flags that the loop can bear; none keeps IEEE arithmetic.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba's "no locator available": install, home and cache folder are all read-only
        return numba.njit(**options)(function)


def intrinsic_of(function: Callable[..., Any]) -> Any:
    """A function that writes its own LLVM operations."""
    return intrinsic(function)


SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INF = np.uint32(0x7F800000)
NAN = np.float32(np.nan)
ZERO = np.float32(0)
ROUND = np.float32(1.5 * 2**23)
"""Added and taken away again, it rounds |x| < 2^22 to the nearest integer, half to even."""


@intrinsic_of
def bits_of(context: Any, value: Any) -> Any:
    """The bits of an fp32."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), build


@intrinsic_of
def float_of(context: Any, bits: Any) -> Any:
    """The fp32 of these bits."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), build
