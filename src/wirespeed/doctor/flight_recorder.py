"""Read torch's flight recorder, pickle or JSON, and find the rank that did not arrive or did something else.

One file per rank; its number is in the name (``nccl_trace_rank_3``), as torch writes them. The pickle is never run
(see plain_pickle). Ranks are compared within one process group, collective by collective, on what is still in the ring
buffers; a rank whose dump is missing may well be the culprit, and is named.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from wirespeed.doctor.plain_pickle import loads
from wirespeed.errors import DataError

MAX_BYTES = 256 * 1024**2
MAX_ENTRIES = 100_000
_RANK = re.compile(r"(?:rank[_-]?|_)(\d+)(?:\.\w+)*$")


class TraceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of one rank. ``sizes`` is the text of its input sizes."""

    group: str
    sequence: int
    name: str
    state: str
    sizes: str
    dtypes: str
    is_p2p: bool = False


class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The dump of one rank."""

    source: str
    rank: int | None
    entries: tuple[TraceEntry, ...]
    group_ranks: dict[str, tuple[int, ...]]


class Desync(msgspec.Struct, frozen=True, kw_only=True):
    """Where ranks of a group part. ``kind``: not_arrived, missing_dump, type, size or dtype."""

    kind: str
    group: str
    sequence: int
    operation: str
    ranks: tuple[int, ...]
    """The ranks that are behind, or that differ from most."""
    detail: str
    where: str


def is_document(document: Mapping[str, Any]) -> bool:
    """Whether a JSON document is a dump."""
    return "entries" in document and ("pg_config" in document or "pg_status" in document)


def read_trace(content: bytes, source: str) -> RankTrace:
    """A dump of one rank. Raises DataError where it is not one."""
    if content[:1] == b"\x80":
        held = loads(content, source=source)
    else:
        try:
            held = msgspec.json.decode(content)
        except (msgspec.MsgspecError, RecursionError) as fault:
            raise DataError(f"{source} is not a flight-recorder dump: {fault}") from fault
    if not isinstance(held, dict) or not isinstance(held.get("entries", []), list):
        raise DataError(f"{source} is not a flight-recorder dump", expected="a dictionary with entries")
    entries = [_entry(one) for one in held.get("entries", [])[:MAX_ENTRIES] if isinstance(one, dict)]
    found = _RANK.search(Path(source).name)
    own = held.get("rank")
    rank = own if isinstance(own, int) else None if found is None else int(found[1])
    return RankTrace(source=source, rank=rank, entries=tuple(entries), group_ranks=_group_ranks(held.get("pg_config")))


def _entry(one: Mapping[str, Any]) -> TraceEntry:
    group = one.get("process_group", "")
    is_p2p = bool(one.get("is_p2p", False))
    sequence = one.get("p2p_seq_id" if is_p2p else "collective_seq_id", one.get("seq_id", 0))
    return TraceEntry(
        group=str(group[0]) if isinstance(group, list | tuple) and group else str(group)[:100],
        sequence=sequence if isinstance(sequence, int) else 0,
        name=str(one.get("profiling_name", ""))[:100],
        state=str(one.get("state", ""))[:40],
        sizes=_sizes_text(one.get("input_sizes")),
        dtypes=_list_text(one.get("input_dtypes")),
        is_p2p=is_p2p,
    )


def _list_text(values: Any) -> str:
    # Cut before it is printed: a file may hold one list a million times.
    return ", ".join(str(v)[:20] for v in values[:8]) if isinstance(values, list | tuple) else ""


def _sizes_text(sizes: Any) -> str:
    return "; ".join(_list_text(one) for one in sizes[:8]) if isinstance(sizes, list | tuple) else ""


def _group_ranks(config: Any) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, tuple[int, ...]] = {}
    if isinstance(config, dict):
        for name, held in list(config.items())[:1_000]:
            text = held.get("ranks", "") if isinstance(held, dict) else ""
            numbers = re.findall(r"\d+", text[:1_000_000] if isinstance(text, str) else _list_text(text))
            ranks[str(name)] = tuple(int(number) for number in numbers[:100_000])
    return ranks


def find_desync(traces: Iterable[RankTrace]) -> Desync | None:
    """The first place where the ranks part, over all groups; None where nothing parts or fewer than two are known."""
    held = [trace for trace in traces if trace.rank is not None]
    if len(held) < 2:
        return None
    by_group: dict[str, dict[int, dict[int, TraceEntry]]] = defaultdict(dict)
    for trace in held:
        assert trace.rank is not None
        for entry in trace.entries:
            if not entry.is_p2p:
                by_group[entry.group].setdefault(trace.rank, {})[entry.sequence] = entry
    found = [desync for group, ranks in by_group.items() if (desync := _compare(group, ranks, held)) is not None]
    return min(found, key=lambda d: (_KINDS.index(d.kind), d.sequence)) if found else None


_KINDS = ("type", "size", "dtype", "not_arrived", "missing_dump")


def _compare(group: str, ranks: dict[int, dict[int, TraceEntry]], traces: list[RankTrace]) -> Desync | None:
    source = traces[0].source
    if len(ranks) < 2:
        return None
    common = sorted(set.intersection(*(set(entries) for entries in ranks.values())))
    for sequence in common:
        for kind, field in (("type", "name"), ("size", "sizes"), ("dtype", "dtypes")):
            values: dict[str, list[int]] = defaultdict(list)
            for rank, entries in ranks.items():
                values[getattr(entries[sequence], field)].append(rank)
            is_ragged = kind == "size" and _may_differ(next(iter(ranks.values()))[sequence].name)
            if len(values) > 1 and not is_ragged:
                usual = max(values, key=lambda value: len(values[value]))
                odd = sorted(rank for value, members in values.items() if value != usual for rank in members)
                other = next(value for value in values if value != usual)
                return Desync(
                    kind=kind,
                    group=group,
                    sequence=sequence,
                    operation=next(iter(ranks.values()))[sequence].name,
                    ranks=tuple(odd),
                    detail=f"{other or 'nothing'!s} where the others have {usual or 'nothing'!s}",
                    where=source,
                )
    return _not_arrived(group, ranks, traces)


def _may_differ(name: str) -> bool:
    """Collectives whose input may legitimately differ between ranks."""
    return any(word in name.lower() for word in ("all_to_all", "alltoall", "gather", "scatter", "coalesced", "barrier"))


def _not_arrived(group: str, ranks: dict[int, dict[int, TraceEntry]], traces: list[RankTrace]) -> Desync | None:
    last = {rank: max(entries) for rank, entries in ranks.items()}
    furthest = max(last.values())
    waiting = [rank for rank, entries in ranks.items() if entries[last[rank]].state != "completed"]
    if not waiting:
        return None
    behind = sorted(rank for rank, sequence in last.items() if sequence < furthest)
    leader = next(rank for rank, sequence in last.items() if sequence == furthest)
    source = next(trace.source for trace in traces if trace.rank == leader)
    if behind:
        lowest = min(last[rank] for rank in behind)
        first = ranks[leader].get(lowest + 1, ranks[leader][furthest])
        return Desync(
            kind="not_arrived",
            group=group,
            sequence=first.sequence,
            operation=first.name,
            ranks=tuple(behind),
            detail=f"last entered collective {lowest}, the others {furthest}",
            where=source,
        )
    members = next((trace.group_ranks[group] for trace in traces if group in trace.group_ranks), ())
    missing = sorted(set(members) - set(ranks))
    if not missing or len(missing) * 2 > len(members):
        return None
    return Desync(
        kind="missing_dump",
        group=group,
        sequence=furthest,
        operation=ranks[leader][furthest].name,
        ranks=tuple(missing),
        detail="wrote no dump while the others wait",
        where=source,
    )
