"""How a call ends, and the error it raises."""

from __future__ import annotations

from enum import IntEnum

from wirespeed.errors import PeerFailure


class Status(IntEnum):
    """The outcome of a call, as it travels in a frame's code."""

    OK = 0
    INVALID = 1
    """The request is wrong; the same request fails again."""
    UNKNOWN_METHOD = 2
    DEADLINE = 3
    CANCELLED = 4
    EXHAUSTED = 5
    """A bound was reached (streams, queue, memory); later or elsewhere it may pass."""
    UNAVAILABLE = 6
    """The peer is draining, or the connection was lost before it answered."""
    INTERNAL = 7
    """The handler failed."""
    REFUSED = 8
    """The token or certificate was not accepted."""

    @property
    def is_retriable(self) -> bool:
        """Whether another peer, or the same one later, may well answer.

        Says nothing about the call being idempotent.
        """
        return self in (Status.EXHAUSTED, Status.UNAVAILABLE)


class CallFailed(PeerFailure):
    """A call over the wire that has no answer. ``status`` says why; handlers raise it to answer with an error."""

    def __init__(
        self, problem: str, *, status: Status = Status.UNAVAILABLE, expected: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(problem, expected=expected, hint=hint)
        self.status = status

    @property
    def is_retriable(self) -> bool:
        """See Status.is_retriable."""
        return self.status.is_retriable
