"""Sets of processors as the kernel writes them: lists such as ``0-3,8`` and masks such as ``ff,00000003``."""

from __future__ import annotations

import re


def parse_list(text: str) -> tuple[int, ...]:
    """Numbers of a kernel list such as ``0-3,8``. What is no list gives nothing."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is not None:
            numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(numbers)


def parse_mask(text: str) -> tuple[int, ...]:
    """Numbers of a kernel bit mask such as ``ff,00000003``."""
    digits = text.strip().replace(",", "")
    if re.fullmatch(r"[0-9a-fA-F]+", digits) is None:
        return ()
    mask = int(digits, 16)
    return tuple(bit for bit in range(mask.bit_length()) if mask >> bit & 1)
