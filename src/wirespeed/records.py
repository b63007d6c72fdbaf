"""Versioned result records and their JSON: what was really measured, with the environment it was measured in.

A record is a frozen struct with ``kind`` and ``schema``. Reading checks both, so that a file of a newer version is an
error that says so and never a half-understood result. Writing goes through a temporary file in the same folder and a
rename: a full disk or a kill leaves the old file or the new one. Secrets never enter a record: of the environment only
the fields below are kept, and the command line is kept as typed.

Sizes follow nccl-tests: for all_reduce and broadcast the buffer, for all_gather the whole output, for reduce_scatter
the whole input, for all_to_all the whole send buffer of one rank, for scatter that of the root.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import msgspec

from wirespeed.errors import DataError, MissingCapability, WirespeedError
from wirespeed.system import replace_whole

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter"]

MAX_RECORD_BYTES = 512 * 1024**2


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a record was made. None means unknown."""

    host: str
    kernel: str
    cpu: str | None
    num_cpus: int
    versions: dict[str, str]
    command: str
    git_commit: str | None = None
    nics: dict[str, str] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of every record. ``schema`` counts up when a reader of the old form would be wrong."""

    SCHEMA: ClassVar[int] = 1

    environment: Environment
    schema: int = 1
    created: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


class LinkSample(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of one pair of hosts. Round trips are None in a sample with several streams."""

    source: str
    target: str
    streams: int
    num_bytes: int
    bit_per_s: tuple[float, ...]
    rtt_min_s: float | None = None
    rtt_median_s: float | None = None
    rtt_p99_s: float | None = None
    is_bidirectional: bool = False
    """Taken while the other direction was busy too."""


class LinksRecord(Record, frozen=True, kw_only=True, tag="links"):
    """All-pairs bandwidth (goodput, payload bits per second) and round-trip latency over TCP."""

    hosts: tuple[str, ...]
    samples: tuple[LinkSample, ...]
    socket_options: dict[str, str]


class CollectiveSample(msgspec.Struct, frozen=True, kw_only=True):
    """Timed runs of one collective at one size. ``times_s``: per run, the slowest rank.

    ``cpu_s`` is the CPU time of one rank per run, on average: its own, and its share of the kernel's work on packets on
    that machine. ``dtype`` is that of the elements summed ("uint8" where bytes are only
    moved): gloo sums fp16 slower than fp32.
    """

    collective: Collective
    size_bytes: int
    times_s: tuple[float, ...]
    cpu_s: float
    is_correct: bool
    dtype: str = "float32"


class CollectivesRecord(Record, frozen=True, kw_only=True, tag="collectives"):
    """A collective benchmark, results checked in the timed runs."""

    backend: str
    num_ranks: int
    ranks_per_host: int
    cpus_per_rank: float
    samples: tuple[CollectiveSample, ...]
    compute_threads: int = 0
    """Threads of each rank that computed meanwhile, as backward does."""
    ranks_per_machine: int | None = None
    """More than ``ranks_per_host`` where hosts share a machine's cores, as those of a lab do; None: not told."""
    notes: tuple[str, ...] = ()
    """What was skipped, and settings that bear on the times."""


class CodecSample(msgspec.Struct, frozen=True, kw_only=True):
    """Timed runs of one local stage of a codec's exchange. ``size_bytes`` is the fp32 gradient bucket, 4 n bytes."""

    codec: str
    stage: str
    size_bytes: int
    times_s: tuple[float, ...]


class CodecsRecord(Record, frozen=True, kw_only=True, tag="codecs"):
    """Speed of every codec's local stages on one kind of device, beside memcpy (codec "memcpy", stage "copy").

    ``num_ranks`` is the group size whose messages were decoded; ``concurrent`` how many ranks ran at the same time on
    this machine's ``num_cpus``, so that contention is part of the figure where ranks share cores.
    """

    device: str
    kernels: str
    num_ranks: int
    concurrent: int
    samples: tuple[CodecSample, ...]


RecordT = TypeVar("RecordT", bound=Record)


def to_json(record: Record) -> bytes:
    """The record as indented JSON, ``kind`` first."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def write(path: str | Path, record: Record) -> Path:
    """Write atomically; folders are made. Raises MissingCapability where the disk is full or not writable."""
    return write_bytes(path, to_json(record))


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Replace ``path`` with ``content`` as one step: readers see the old file or the new one, never a part.

    A symbolic link stays, and what it leads to is replaced. A device or a pipe (``/dev/stdout``) is written to.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return Path(path)
        if target.is_symlink():
            target = target.resolve()
        replace_whole(target, content)
    except OSError as fault:
        raise MissingCapability(
            f"cannot write {target}: {fault.strerror or fault}",
            hint="free some space, or name another place with --out",
        ) from fault
    return Path(path)


class _Head(msgspec.Struct):
    kind: str
    schema: int


def read_kind(path: str | Path) -> str:
    """The kind of the record in a file. Raises DataError where it is none."""
    content = _content(path)
    try:
        return msgspec.json.decode(content, type=_Head).kind
    except msgspec.MsgspecError as fault:
        raise DataError(f"{path} is not a wirespeed record: {fault}", expected="JSON with kind and schema") from fault


def read(path: str | Path, kind: type[RecordT]) -> RecordT:
    """Read a record of the given kind. Raises DataError naming the file and what is wrong with it."""
    return from_json(_content(path), kind, source=str(path))


def _content(path: str | Path) -> bytes:
    source = Path(path)
    try:
        if source.stat().st_size > MAX_RECORD_BYTES:
            raise DataError(f"{source} is over {MAX_RECORD_BYTES} bytes", expected="a wirespeed record")
        return source.read_bytes()
    except OSError as fault:
        raise DataError(f"cannot read {source}: {fault.strerror or fault}") from fault


def from_json(content: bytes, kind: type[RecordT], *, source: str = "input") -> RecordT:
    """Decode and check a record. ``source`` names the origin in errors."""
    wanted = str(kind.__struct_config__.tag)
    try:
        head = msgspec.json.decode(content, type=_Head)
    except (msgspec.MsgspecError, RecursionError) as fault:
        raise DataError(f"{source} is not a wirespeed record: {fault}", expected=f"JSON of kind {wanted!r}") from fault
    if head.kind != wanted:
        raise DataError(f"{source} is a record of kind {head.kind!r}", expected=f"kind {wanted!r}")
    if head.schema > kind.SCHEMA:
        raise DataError(
            f"{source} has schema {head.schema} of {wanted!r}",
            expected=f"schema {kind.SCHEMA} or lower",
            hint="it was written by a newer wirespeed: upgrade to read it",
        )
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, WirespeedError) as fault:
        raise DataError(
            f"{source} is damaged: {fault}", expected=f"a {wanted!r} record of schema {kind.SCHEMA}"
        ) from fault
