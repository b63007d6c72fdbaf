"""What one side of a connection allows: sizes, numbers and times. Each side states its own when they meet."""

from __future__ import annotations

import msgspec

from wirespeed.errors import UsageError
from wirespeed.units import GIB, KIB, MIB, format_size
from wirespeed.wire.frames import MAX_TOTAL_BYTES

MESSAGE_OVERHEAD_BYTES = 256
"""What a message costs beside its bytes, so that empty messages are bounded too."""
SMALL_BYTES = 32 * KIB
"""Up to here a message is sent as one piece at once; above, chunk by chunk, in turn with others."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one side. Raises UsageError where they contradict each other.

    ``credit_bytes`` is how much a peer may have sent that is not yet consumed, per connection; ``memory_bytes`` how
    much all connections of a server hold together: beyond it the server stops reading until some is free.
    """

    max_message_bytes: int = 96 * MIB
    credit_bytes: int = 128 * MIB
    memory_bytes: int = 2 * GIB
    max_streams: int = 4096
    """Requests under way at once on one connection."""
    max_connections: int = 16384
    chunk_bytes: int = MIB
    segment_bytes: int = 64 * MIB
    """Memory, each way, for messages between processes of one host; taken as it is used. 0: they use the socket."""
    handshake_s: float = 5.0
    keepalive_s: float = 2.0
    """A side that has heard nothing for so long asks; after three times as long it takes the peer for lost."""
    stall_s: float = 30.0
    """A message that makes no progress for so long ends its connection."""
    default_timeout_s: float = 30.0
    """The deadline of a call that names none."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not value > 0 and not (name == "segment_bytes" and value == 0):
                raise UsageError(f"got {name} of {value}", expected="a number above zero")
        if self.max_message_bytes > MAX_TOTAL_BYTES:
            raise UsageError(
                f"got max_message_bytes of {self.max_message_bytes}", expected=f"at most {MAX_TOTAL_BYTES}"
            )
        # The receiver returns credit once a quarter of it is owed, so three quarters are the most a message can count
        # on.
        if (self.max_message_bytes + MESSAGE_OVERHEAD_BYTES) * 4 > self.credit_bytes * 3 + 4 * MESSAGE_OVERHEAD_BYTES:
            raise UsageError(
                f"got max_message_bytes of {format_size(self.max_message_bytes)} and credit_bytes of "
                f"{format_size(self.credit_bytes)}",
                expected="a message of at most three quarters of the credit",
            )
        if self.memory_bytes < self.max_message_bytes:
            raise UsageError(
                f"got memory_bytes of {format_size(self.memory_bytes)}",
                expected=f"at least max_message_bytes, {format_size(self.max_message_bytes)}",
            )
        if self.chunk_bytes < 4 * KIB:
            raise UsageError(f"got chunk_bytes of {self.chunk_bytes}", expected="at least 4 KiB")
