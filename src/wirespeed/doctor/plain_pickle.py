"""Read a pickle of plain data without running it: dictionaries, lists, tuples, sets, text, bytes, numbers, None.

Opcodes are stepped through with ``pickletools``; one that would import or call anything is an error, so a file from
anywhere can be read. The one exception is a constructor that torch's own pickler writes around typed lists, which is
taken as the list itself. The number of values is bounded.
"""

from __future__ import annotations

import itertools
import pickletools
from typing import Any

from wirespeed.errors import DataError

MAX_OPCODES = 20_000_000
MAX_MEMO = 4_000_000

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set}
_NUMBERS = frozenset(("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"))
_TEXTS = frozenset((
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINSTRING", "BINSTRING", "STRING",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
))  # fmt: skip
_SKIPPED = frozenset(("PROTO", "FRAME"))
_PLAIN_BUILDERS = frozenset(
    f"torch.jit._pickle {name}" for name in ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist")
)
_MARK = object()


class _Builder:
    """Stands for a constructor that gives back its list."""


def loads(content: bytes, *, source: str = "input") -> Any:
    """The value. Raises DataError where the pickle is damaged or holds anything but plain data."""
    machine = _Machine(source)
    try:
        for opcode, argument, _ in itertools.islice(pickletools.genops(content), MAX_OPCODES):
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except DataError:
        raise
    except Exception as fault:
        # genops raises ValueError, struct and Unicode errors, and the stack IndexError, TypeError: all say "damaged".
        raise DataError(f"{source} is a damaged pickle: {fault}", expected="a whole file") from fault
    raise DataError(f"{source} is a pickle without an end", expected=f"a whole file of at most {MAX_OPCODES} opcodes")


class _Machine:
    """The stack and memo of a pickle of plain data."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        return self._stack.pop()

    def step(self, name: str, argument: Any) -> None:  # noqa: PLR0912 - one branch per kind of opcode
        stack = self._stack
        if name in _NUMBERS or name in _TEXTS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            if len(self._memo) >= MAX_MEMO:
                raise DataError(f"{self._source} remembers more than {MAX_MEMO} values")
            self._memo[len(self._memo) if name == "MEMOIZE" else int(argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[int(argument)])
        elif name == "GLOBAL" and argument in _PLAIN_BUILDERS:
            stack.append(_Builder())
        elif name == "REDUCE" and isinstance(stack[-2], _Builder):
            arguments = stack.pop()
            stack[-1] = arguments[0]
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            size = int(name[-1])
            stack[-size:] = [tuple(stack[-size:])]
        elif name == "POP":
            stack.pop()
        elif name not in _SKIPPED:
            self._collect(name)

    def _collect(self, name: str) -> None:
        """Opcodes that join what is on the stack."""
        stack = self._stack
        if name in ("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS", "ADDITEMS"):
            items = self._since_mark()
            if name == "TUPLE":
                stack.append(tuple(items))
            elif name == "LIST":
                stack.append(items)
            elif name == "DICT":
                stack.append(dict(zip(items[::2], items[1::2], strict=True)))
            elif name == "APPENDS":
                stack[-1].extend(items)
            elif name == "SETITEMS":
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            else:
                stack[-1].update(items)
        elif name == "APPEND":
            item = stack.pop()
            stack[-1].append(item)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        else:
            raise DataError(
                f"{self._source} is a pickle that would run code ({name})",
                expected="plain data",
                hint="dump it as JSON instead: torch._C._distributed_c10d._dump_nccl_trace_json",
            )

    def _since_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items
