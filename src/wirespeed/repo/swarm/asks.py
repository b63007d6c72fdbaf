"""What to ask an upstream for: chunks cut into pieces, or put together where they are small."""

from __future__ import annotations

from collections.abc import Sequence

from wirespeed.repo.manifest import Manifest
from wirespeed.repo.swarm.messages import MAX_ASKS, PAYLOAD, PIECE_BYTES, SMALL_CHUNK_BYTES, Ask


def group(
    manifest: Manifest, indices: Sequence[int], by_difference: frozenset[int] = frozenset()
) -> list[tuple[Ask, ...]]:
    """What to ask for, in order: large chunks piece by piece, small ones and differences several together."""
    asks: list[tuple[Ask, ...]] = []
    together: list[Ask] = []
    together_bytes = 0
    for index in indices:
        chunk = manifest.chunks[index]
        is_difference = index in by_difference
        if not is_difference and chunk.length > SMALL_CHUNK_BYTES:
            if together:
                asks.append(tuple(together))
                together, together_bytes = [], 0
            asks.extend(
                (Ask(index, offset, min(PIECE_BYTES, chunk.length - offset)),)
                for offset in range(0, chunk.length, PIECE_BYTES)
            )
            continue
        ask = Ask(index, PAYLOAD, chunk.stored_bytes) if is_difference else Ask(index, 0, chunk.length)
        # What is no difference must not wait for one that is not kept: they travel apart.
        is_full = together_bytes + ask.length > PIECE_BYTES or len(together) == MAX_ASKS
        if together and (is_full or (together[0].offset == PAYLOAD) != is_difference):
            asks.append(tuple(together))
            together, together_bytes = [], 0
        together.append(ask)
        together_bytes += ask.length
    if together:
        asks.append(tuple(together))
    return asks
