"""How an inference request ends when it does not end well: one word for all doors, which each translates."""

from __future__ import annotations

from enum import Enum

from wirespeed.errors import WirespeedError


class Reason(Enum):
    """Why a request has no answer. The value is the name of the gRPC status that says so."""

    INVALID = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNAVAILABLE = "UNAVAILABLE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    FAILED = "INTERNAL"
    UNAUTHENTICATED = "UNAUTHENTICATED"

    @property
    def http_status(self) -> int:
        """The HTTP status that says it."""
        return _HTTP[self]


_HTTP = {
    Reason.INVALID: 400,
    Reason.NOT_FOUND: 404,
    Reason.ALREADY_EXISTS: 409,
    Reason.EXHAUSTED: 429,
    Reason.DEADLINE: 504,
    Reason.CANCELLED: 499,
    Reason.UNAVAILABLE: 503,
    Reason.UNIMPLEMENTED: 501,
    Reason.FAILED: 500,
    Reason.UNAUTHENTICATED: 401,
}


_ASKED_WRONGLY = frozenset((Reason.INVALID, Reason.NOT_FOUND, Reason.ALREADY_EXISTS, Reason.UNIMPLEMENTED))


class RequestFailed(WirespeedError):  # noqa: N818 - the name says what it is
    """A request that has no answer, and why.

    A command ends with 2 for what was asked wrongly, with 1 where a model failed, with 4 otherwise.
    """

    def __init__(self, problem: str, *, reason: Reason, expected: str | None = None, hint: str | None = None) -> None:
        super().__init__(problem, expected=expected, hint=hint)
        self.reason = reason
        self.exit_code = 2 if reason in _ASKED_WRONGLY else 1 if reason is Reason.FAILED else 4
