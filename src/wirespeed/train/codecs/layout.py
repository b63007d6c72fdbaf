"""Where each codec's parts stand in its messages. Sizes come from ``spec.payloads``; offsets are fixed here alone.

int8, one record per shard:   ``[q: int8 x S][scale: fp32 x S / 1024]``
int4, one record per shard:   ``[q: 4 bits x S][scale: fp32 x S / 256]``
sign, one record per shard:   ``[q: 1 bit x S][scale: fp32 x S / 1024]``
top-k, one record per rank:   ``[scale: fp32 x C][value: fp16 x K][index: uint16 x K]``

Within a block of int4 byte j holds element j (low four bits, two's complement) and element j + 128; within one of sign,
bit k of byte j says whether element 128 k + j is above zero.

All numbers are little-endian as the host stores them; every part starts at a multiple of its own size within the
record, and records follow each other without gaps. All ranks must agree on elements, ranks and strategy: nothing in a
message states them.
"""

from __future__ import annotations

from dataclasses import dataclass

from wirespeed.spec.payloads import (
    BLOCK_FORMATS,
    BYTES_PER_ELEMENT,
    TOPK_CHUNK,
    CodecName,
    block_shard_bytes,
    block_shard_elements,
    topk_counts,
    topk_payload_bytes,
)


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """One bucket of ``num_elements`` among ``num_ranks``: rank j owns elements j * shard up to (j + 1) * shard.

    ``value_bytes``: of a shard's elements, after which its scales follow.
    """

    codec: CodecName
    num_elements: int
    num_ranks: int
    block: int
    shard: int
    value_bytes: int
    shard_bytes: int

    @classmethod
    def of(cls, codec: CodecName, num_elements: int, num_ranks: int) -> BlockLayout:
        """The layout that ``Strategy.transfers`` counts."""
        block, bits = BLOCK_FORMATS[codec]
        shard = block_shard_elements(codec, num_elements, num_ranks)
        return cls(
            codec=codec,
            num_elements=num_elements,
            num_ranks=num_ranks,
            block=block,
            shard=shard,
            value_bytes=shard * bits // 8,
            shard_bytes=block_shard_bytes(codec, num_elements, num_ranks),
        )

    @property
    def blocks_per_shard(self) -> int:
        """Scales in a shard's record."""
        return self.shard // self.block

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
