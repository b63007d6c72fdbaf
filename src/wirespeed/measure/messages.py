"""What the hosts of a links measurement say to each other: a closed set of messages, each a line of JSON."""

from __future__ import annotations

import msgspec


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    pass


class Challenge(_Message, frozen=True, kw_only=True, tag="challenge"):
    """Rank 0 greets with something new to sign."""

    nonce: str


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """A rank says who it is; ``proof`` is the challenge signed with the token."""

    rank: int
    local_rank: int
    host: str
    proof: str


class SocketOptions(_Message, frozen=True, kw_only=True, tag="options"):
    """What to set on the sockets that carry data. None leaves the kernel's default (and its autotuning)."""

    send_buffer_bytes: int | None = None
    receive_buffer_bytes: int | None = None
    no_delay: bool = True
    congestion: str | None = None


class Listening(_Message, frozen=True, kw_only=True, tag="listening"):
    """Where a host takes data connections, and its socket options as read back."""

    address: str
    port: int
    options: dict[str, str]


class Task(_Message, frozen=True, kw_only=True, tag="task"):
    """One side's part in one phase. The driving side connects; the other accepts whoever knows ``nonce``."""

    does_ping: bool
    is_driving: bool
    is_bidirectional: bool = False
    peer: str
    address: str
    port: int
    nonce: str
    streams: int = 1
    num_pings: int = 0
    warmup_s: float
    duration_s: float
    windows: int
    timeout_s: float


class Ready(_Message, frozen=True, kw_only=True, tag="ready"):
    """The side's connections stand."""


class Go(_Message, frozen=True, kw_only=True, tag="go"):
    """All sides are ready: start."""


class Done(_Message, frozen=True, kw_only=True, tag="done"):
    """The side's part is over, with what it measured."""

    num_bytes: int = 0
    bit_per_s: tuple[float, ...] = ()
    rtts_s: tuple[float, float, float] | None = None
    """Least, median, 99th percentile."""


class Fault(_Message, frozen=True, kw_only=True, tag="fault"):
    """Something failed on the sender's host; from rank 0: why it stops."""

    text: str


class Finish(_Message, frozen=True, kw_only=True, tag="finish"):
    """Nothing more to do."""


Message = Challenge | Hello | SocketOptions | Listening | Task | Ready | Go | Done | Fault | Finish
