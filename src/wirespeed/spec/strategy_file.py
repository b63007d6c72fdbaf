"""strategy.toml: the file that `tune` writes and `attach` reads. A newer file names the version that it needs."""

from __future__ import annotations

import msgspec

from wirespeed.errors import DataError, UsageError
from wirespeed.spec.strategy import Strategy

STRATEGY_SCHEMA = 1


class StrategyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``strategy.toml``: what `tune` writes and `attach` reads."""

    schema: int
    strategy: Strategy
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    note: str = ""


class _FileHead(msgspec.Struct):
    schema: int


def strategy_text(held: StrategyFile) -> str:
    """The text of a ``strategy.toml``, which ``read_strategy_text`` reads back. TOML has no null: None is left out."""
    return msgspec.toml.encode(_without_none(msgspec.to_builtins(held))).decode()


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return value


def read_strategy_text(text: str, *, source: str) -> Strategy:
    """The strategy in the text of a ``strategy.toml``. Raises DataError naming ``source``."""
    try:
        # The schema comes first: a newer file may hold what this version would call unknown.
        schema = msgspec.toml.decode(text, type=_FileHead).schema
        if schema > STRATEGY_SCHEMA:
            raise DataError(
                f"{source} has schema {schema}",
                expected=f"schema {STRATEGY_SCHEMA}",
                hint="upgrade wirespeed to read it",
            )
        held = msgspec.toml.decode(text, type=StrategyFile)
    except (msgspec.MsgspecError, UsageError) as fault:
        raise DataError(f"{source} is not a strategy file: {fault}", expected="what `wirespeed tune` writes") from fault
    return held.strategy
