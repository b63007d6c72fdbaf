"""Where each codec's parts stand in its messages. Sizes come from ``spec.strategy``; offsets are fixed here alone.

int8, one record per shard:   ``[q: int8 x S][scale: fp32 x S / 1024]``
top-k, one record per rank:   ``[scale: fp32 x C][value: fp16 x K][index: uint16 x K]``

All numbers are little-endian as the host stores them; every part starts at a multiple of its own size within the
record, and records follow each other without gaps. All ranks must agree on elements, ranks and strategy: nothing in a
message states them.
"""

from __future__ import annotations

from dataclasses import dataclass

from wirespeed.spec.strategy import (
    BYTES_PER_ELEMENT,
    INT8_BLOCK,
    TOPK_CHUNK,
    int8_shard_bytes,
    int8_shard_elements,
    topk_counts,
    topk_payload_bytes,
)


@dataclass(frozen=True, kw_only=True)
class Int8Layout:
    """One bucket of ``num_elements`` among ``num_ranks``: rank j owns elements j * shard up to (j + 1) * shard."""

    num_elements: int
    num_ranks: int
    shard: int
    shard_bytes: int

    @classmethod
    def of(cls, num_elements: int, num_ranks: int) -> Int8Layout:
        """The layout that ``Strategy.transfers`` counts."""
        return cls(
            num_elements=num_elements,
            num_ranks=num_ranks,
            shard=int8_shard_elements(num_elements, num_ranks),
            shard_bytes=int8_shard_bytes(num_elements, num_ranks),
        )

    @property
    def blocks_per_shard(self) -> int:
        """Scales in a shard's record."""
        return self.shard // INT8_BLOCK

    def owned(self, rank: int) -> tuple[int, int]:
        """First element of the rank's shard, and how many of the bucket's elements lie in it (0 for pure padding)."""
        first = min(rank * self.shard, self.num_elements)
        return first, min(self.shard, self.num_elements - first)


@dataclass(frozen=True, kw_only=True)
class TopkLayout:
    """One bucket: ``whole`` chunks of TOPK_CHUNK, sending ``per_chunk`` entries each, and one of ``rest``, if any."""

    num_elements: int
    num_ranks: int
    whole: int
    rest: int
    per_chunk: int
    per_rest: int
    payload_bytes: int

    @classmethod
    def of(cls, num_elements: int, num_ranks: int, ratio: float) -> TopkLayout:
        """The layout that ``Strategy.transfers`` counts."""
        whole, per_chunk, per_rest = topk_counts(num_elements, ratio)
        return cls(
            num_elements=num_elements,
            num_ranks=num_ranks,
            whole=whole,
            rest=num_elements - whole * TOPK_CHUNK,
            per_chunk=per_chunk,
            per_rest=per_rest,
            payload_bytes=topk_payload_bytes(num_elements, ratio),
        )

    @property
    def num_chunks(self) -> int:
        """Chunks, the part chunk included."""
        return self.whole + (self.rest > 0)

    @property
    def num_entries(self) -> int:
        """Entries that one rank sends."""
        return self.whole * self.per_chunk + self.per_rest

    @property
    def values_at(self) -> int:
        """Byte at which the values of a record start."""
        return BYTES_PER_ELEMENT * self.num_chunks

    @property
    def indices_at(self) -> int:
        """Byte at which the indices of a record start."""
        return self.values_at + 2 * self.num_entries
