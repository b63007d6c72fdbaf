"""Request parameters that the protocol gives a meaning, the same at every door."""

from __future__ import annotations

from typing import Any

from wirespeed.serve.status import Reason, RequestFailed

_RESERVED = ("headers", "binary_data_output", "triton_enable_empty_final_response")
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


def take_priority(parameters: dict[str, Any]) -> int:
    """The request's priority, taken out: 0 where it has none; lower runs first."""
    value = parameters.pop("priority", 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong("priority", "an integer from 0")
    return value


def take_timeout_s(parameters: dict[str, Any]) -> float | None:
    """The request's own limit on its waiting and running, given in microseconds, taken out; None or 0 is none."""
    value = parameters.pop("timeout", 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong("timeout", "microseconds, an integer from 0")
    return value / 1e6 if value else None


def clean(parameters: dict[str, Any]) -> dict[str, Any]:
    """What is left for the model. Raises RequestFailed for reserved names and for what is not supported."""
    for name in _RESERVED:
        parameters.pop(name, None)
    for name in parameters:
        if name.startswith("triton_"):
            raise RequestFailed(
                f"parameter keys starting with 'triton_' are reserved, got {name!r}", reason=Reason.INVALID
            )
    if any(parameters.get(name) for name in _SEQUENCE):
        raise RequestFailed(
            "this server has no sequence batcher", reason=Reason.UNIMPLEMENTED, expected="no sequence_id"
        )
    for name in _SEQUENCE:
        parameters.pop(name, None)
    return parameters


def _wrong(name: str, expected: str) -> RequestFailed:
    return RequestFailed(f"parameter {name!r} has a wrong value or type", reason=Reason.INVALID, expected=expected)
