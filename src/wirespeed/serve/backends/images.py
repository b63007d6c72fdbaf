"""Encoded images as pixels, with a bound on what they may become."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from wirespeed.errors import DataError, MissingCapability

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 50_000_000


def decode_image(content: bytes, *, max_pixels: int = MAX_PIXELS) -> Image:
    """An RGB image. Raises DataError for what is none or too large, MissingCapability without pillow."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as fault:
        raise MissingCapability("images are decoded with pillow", hint="pip install 'wirespeed[faces]'") from fault
    try:
        image = Image.open(io.BytesIO(content))
        if image.width * image.height > max_pixels:
            raise DataError(f"got an image of {image.width} x {image.height}", expected=f"at most {max_pixels} pixels")
        return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as fault:
        raise DataError(f"got no image that can be decoded: {fault}", expected="JPEG, PNG or the like") from fault
