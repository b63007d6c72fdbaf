"""A part of a file of a version, in order and verified, wherever its bytes lie: what servers send."""

from __future__ import annotations

from collections.abc import Iterator

from wirespeed.errors import DataError
from wirespeed.repo.fetch import Source
from wirespeed.repo.manifest import FileEntry
from wirespeed.repo.repository import Repository


def read_span(repository: Repository, source: Source, file: FileEntry, *, begin: int, end: int) -> Iterator[memoryview]:
    """Verified bytes of a part of a file, in order: from the cached file where it is whole, else chunk by chunk."""
    manifest = source.manifest
    path = repository.cache.find(manifest, file)
    if path is not None:
        with path.open("rb") as stream:
            stream.seek(begin)
            left = end - begin
            while left > 0:
                block = stream.read(min(left, 1 << 20))
                if not block:
                    raise DataError(f"{path} became shorter while it was read")
                left -= len(block)
                yield memoryview(block)
        return
    offset = 0
    for index in file.chunks:
        length = manifest.chunks[index].length
        if offset + length > begin and offset < end:
            content = source.read(index)
            yield content[max(0, begin - offset) : min(length, end - offset)]
        offset += length
