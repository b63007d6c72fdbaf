"""What peers, trackers and ``warm`` say to each other, over the data plane; msgpack, checked when it is read."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from wirespeed.errors import DataError
from wirespeed.repo.manifest import DIGEST_BYTES
from wirespeed.repo.versions import Version
from wirespeed.units import KIB, MIB

PIECE_BYTES = MIB
"""What one call carries at most. A hop of a chain costs the time of one: 8 ms at 1 Gbit/s."""
SMALL_CHUNK_BYTES = 64 * KIB
"""Whole chunks up to this size travel several to a call."""
PAYLOAD = -1
MAX_ASKS = 256
PART_BYTES = 16 * MIB
"""Of a manifest, per call."""
PLAN_MANIFEST_BYTES = MIB
"""A manifest up to this size comes with the order."""

State = Literal["unknown", "partial", "running", "whole", "failed"]
_T = TypeVar("_T")


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a chunk (an index in the manifest): ``length`` bytes from ``offset`` of its decoded bytes.

    ``offset`` PAYLOAD: the bytes that are stored of a chunk that is a difference, for whoever has its base.
    """

    index: int
    offset: int
    length: int


class Pieces(msgspec.Struct, frozen=True, array_like=True):
    """One piece, or several whole small chunks, of the version with this manifest."""

    digest: bytes
    asks: tuple[Ask, ...]


class ManifestPart(msgspec.Struct, frozen=True, array_like=True):
    """A manifest's bytes from ``offset`` on; the reply's meta says how many there are in all."""

    digest: bytes
    offset: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer is told to have, and from whom. ``upstreams``: addresses, the one to take from first."""

    version: Version
    upstreams: tuple[str, ...] = ()
    position: int = 0
    """In the chain. The first reads from the store; all others only where no upstream is left."""
    deadline_s: float = 3600.0
    alias: str | None = None
    """By which the version was asked for: remembered, so that it can be resolved while the store is down."""
    manifest: bytes = b""
    """As it is stored, where whoever orders has it and it is small: a host need not wait for the one before it to
    have it. Held against the digest like any other."""

    @property
    def digest(self) -> bytes:
        """Of the manifest."""
        return bytes.fromhex(self.version.manifest_digest)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a peer is with a version. Bytes are those of distinct chunks."""

    state: State
    held_bytes: int = 0
    total_bytes: int = 0
    upstream: str = ""
    """An address, ``store``, or empty."""
    idle_s: float = 0.0
    """Since a running download last got something."""
    peer_bytes: int = 0
    store_bytes: int = 0
    served_bytes: int = 0
    num_damaged: int = 0
    passed_over: tuple[str, ...] = ()
    """Upstreams that were left, with the reason."""
    problem: str = ""
    seconds: float = 0.0
    """From the order to the end, on this peer's clock."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A peer as a whole."""

    host: str
    rack: str
    has_store: bool
    versions: tuple[tuple[str, Progress], ...] = ()
    cpu_s: float = 0.0
    """Of the process since it began: what fan-out costs is measured with it."""
    received_bytes: int = 0
    served_bytes: int = 0


class Announce(msgspec.Struct, frozen=True, kw_only=True):
    """A peer tells a tracker where it is and what it has. Said about once a second; forgotten when it is not."""

    address: str
    rack: str = ""
    versions: tuple[tuple[bytes, int, int, int], ...] = ()
    """(manifest digest, bytes held, bytes in all, position in the chain)."""


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A peer is about to fetch a version by itself, and asks who is ahead of it."""

    address: str
    digest: bytes
    rack: str = ""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A peer as others see it, for one version."""

    address: str
    rack: str = ""
    held_bytes: int = 0
    is_whole: bool = False
    position: int = 0


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """Peers of one version, in chain order."""

    members: tuple[Member, ...] = ()


def pack(message: msgspec.Struct) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(message)


def unpack(content: bytes | memoryview, kind: type[_T]) -> _T:
    """What was said. Raises DataError."""
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError) as fault:
        raise DataError(f"got a message that is no {kind.__name__}: {fault}") from fault


def check_digest(digest: bytes) -> bytes:
    """The digest itself. Raises DataError where it is none: it becomes a file's name."""
    if len(digest) != DIGEST_BYTES:
        raise DataError(f"got a digest of {len(digest)} bytes", expected=f"{DIGEST_BYTES}")
    return digest
