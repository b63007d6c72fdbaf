"""The error tree. Every error that wirespeed raises on purpose is one of these.

    WirespeedError
      UsageError         exit 2   what was asked for cannot be done as asked
      DataError          exit 2   a file or a message is wrong
      MissingCapability  exit 3   the host lacks something: a permission, a kernel feature, a package
      PeerFailure        exit 4   a peer or a link failed, or did not answer in time
      WorkloadFailure    exit 1   the user's own program failed, hung or did not do what was needed
      InternalError      exit 70  our bug

A message says what was seen, what was allowed, and what to do.
"""

from __future__ import annotations


class WirespeedError(Exception):
    """Base of the tree. ``exit_code`` is what the command line ends with."""

    exit_code = 70

    def __init__(self, problem: str, *, expected: str | None = None, hint: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.expected = expected
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.problem]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.hint is not None:
            parts.append(f"hint: {self.hint}")
        return "; ".join(parts)


class UsageError(WirespeedError):
    """What was asked for cannot be done as asked: a bad argument, value or combination."""

    exit_code = 2


class DataError(WirespeedError):
    """A file or a message is wrong: corrupt, of an unknown schema, or out of bounds."""

    exit_code = 2


class MissingCapability(WirespeedError):  # noqa: N818 - the name says what it is; all others end in Error or Failure
    """The host lacks something. The message names it and how to get it."""

    exit_code = 3


class PeerFailure(WirespeedError):  # noqa: N818
    """A peer or a link failed, or did not answer within its deadline."""

    exit_code = 4


class WorkloadFailure(WirespeedError):  # noqa: N818
    """The user's own program failed, hung, or did not do what the command needs of it."""

    exit_code = 1


class InternalError(WirespeedError):
    """A bug of wirespeed's own."""

    exit_code = 70
