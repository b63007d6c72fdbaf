"""What becomes of an input that has no answer yet: it goes out again, or gets an error row. Pure policy.

An input is given up when it failed in the model, when nobody answered for it three times, or when it was alone on three
nodes in turn while each was lost: then it is what kills them. A node that was lost by silence tells of the way to it,
and one that had other inputs too tells of none of them, so neither counts against an input.

How it can be wrong: an input is blamed for three nodes that were ended by something else while they ran it alone.
"""

from __future__ import annotations

from typing import NamedTuple

from wirespeed import wire
from wirespeed.errors import DataError
from wirespeed.infer.schedule import Chunk
from wirespeed.serve.status import Reason, RequestFailed

MAX_DEATHS = 3
MAX_FAILURES = 3
_NO_ANSWER = (Reason.UNAVAILABLE, Reason.DEADLINE, Reason.CANCELLED)


class Verdict(NamedTuple):
    """For the input at ``place``. ``error`` None: send it again; ``is_suspect``: with a node to itself."""

    place: int
    error: str | None = None
    is_suspect: bool = False


class Failures:
    """Counts what went wrong for each input until it is settled (``forget``)."""

    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}
        self._failures: dict[int, int] = {}

    def forget(self, index: int) -> None:
        """The input has its row."""
        self._deaths.pop(index, None)
        self._failures.pop(index, None)

    def of_input(self, index: int, reason: Reason, text: str, *, num_nodes: int) -> Verdict:
        """One input has no answer, while its node, one of ``num_nodes``, is well."""
        if reason is Reason.EXHAUSTED:
            return Verdict(index)  # it never ran
        if reason not in _NO_ANSWER:
            return Verdict(index, text)
        count = self._failures[index] = self._failures.get(index, 0) + 1
        # UNAVAILABLE: the model's worker died under it, and once more when it was alone.
        if count < (min(2, num_nodes) if reason is Reason.UNAVAILABLE else MAX_FAILURES):
            return Verdict(index)
        return Verdict(index, text if count == 1 else f"no answer in {count} tries: {text}")

    def of_chunk(self, chunk: Chunk, fault: BaseException, *, was_silent: bool, num_nodes: int) -> list[Verdict]:
        """A chunk's call ended without an answer. ``was_silent``: its node was lost without a sign that it ended."""
        reason = _reason_of(fault)
        if reason is not None:
            return [self.of_input(index, reason, str(fault), num_nodes=num_nodes) for index in chunk.indices]
        assert isinstance(fault, wire.CallFailed)
        is_suspect = fault.status is wire.Status.UNAVAILABLE and not was_silent
        if not (is_suspect and chunk.is_solitary):
            return [Verdict(index, is_suspect=is_suspect) for index in chunk.indices]
        return [self._of_solitary(index, fault) for index in chunk.indices]

    def _of_solitary(self, index: int, fault: BaseException) -> Verdict:
        count = self._deaths[index] = self._deaths.get(index, 0) + 1
        if count < MAX_DEATHS:
            return Verdict(index, is_suspect=True)
        return Verdict(index, f"{count} nodes were lost while they ran it alone: {fault}")


def is_full(fault: BaseException) -> bool:
    """Whether a node said that it takes no more for now."""
    if isinstance(fault, wire.CallFailed):
        return fault.status is wire.Status.EXHAUSTED
    return isinstance(fault, RequestFailed) and fault.reason is Reason.EXHAUSTED


def _reason_of(fault: BaseException) -> Reason | None:
    """Why each input of a call failed; None: the node was lost or full, which tells of no input."""
    if isinstance(fault, wire.CallFailed):
        if fault.status is wire.Status.DEADLINE:
            return Reason.DEADLINE
        if fault.is_retriable or fault.status is wire.Status.CANCELLED:
            return None
    # The node refused the call as wrong, it cannot be sent at all, or the answer is none.
    if isinstance(fault, RequestFailed):
        return fault.reason
    return Reason.UNAVAILABLE if isinstance(fault, DataError) else Reason.FAILED
