"""The job's Parquet file, written while the job runs, so that little is left to do when its last result comes.

It has another name until it is whole: a reader never sees half a job. What is there before that is worth nothing on its
own: after a kill the file is made anew from the journal. Row groups grow with the file, from GROUP_BYTES on, up to
MAX_GROUP_BYTES: at any time about a fifth of it, at most, waits for its group to be full.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from wirespeed.infer.columns import ERROR, KEY

GROUP_BYTES = 256 * 1024
MAX_GROUP_BYTES = 64 * 1024**2
MAX_GROUP_ROWS = 16384
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_GROWTH = 4
"""A group is as large as this fraction of what is written: 1/4 makes about 25 groups up to the largest one."""


class Output:
    """``add`` blocks in order, then ``finish``; or ``discard``. Raises OSError and pa.ArrowException as they come."""

    def __init__(self, out: Path, schema: pa.Schema) -> None:
        self.num_rows = 0
        """Rows that were added."""
        self._out = out
        self._schema = schema
        self._path = out.with_name(f".{out.name}.writing")
        self._held: list[pa.RecordBatch] = []
        self._held_rows = self._held_bytes = self._written_bytes = 0
        self._writer: pq.ParquetWriter | None = None
        # Whoever has the journal's lock is the only one here: what lies there is of a run that was killed.
        self._stream = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644), "wb")
        # Feature vectors do not compress; names do.
        compression = {name: "zstd" if name in (KEY, ERROR) else "none" for name in leaves(schema)}
        try:
            self._writer = pq.ParquetWriter(
                self._stream, schema, compression=compression, use_dictionary=[ERROR], write_statistics=[KEY]
            )
        except BaseException:
            self.discard()
            raise

    def add(self, batch: pa.RecordBatch) -> None:
        """The next rows. They are kept until there is a group of them."""
        self._held.append(batch)
        self.num_rows += batch.num_rows
        self._held_rows += batch.num_rows
        self._held_bytes += batch.nbytes
        worth_bytes = min(MAX_GROUP_BYTES, max(GROUP_BYTES, self._written_bytes // _GROWTH))
        if self._held_bytes >= worth_bytes or self._held_rows >= MAX_GROUP_ROWS:
            self._write_group()

    def finish(self) -> None:
        """Write the rest, and give the file its name; it is on the disk then."""
        assert self._writer is not None
        self._write_group()
        self._writer.close()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self._path, self._out)

    def discard(self) -> None:
        """Let go of the file, and delete it unless it is finished."""
        self._held.clear()
        if self._writer is not None:
            with contextlib.suppress(OSError, pa.ArrowException):  # a full disk has been told of already
                self._writer.close()
        with contextlib.suppress(OSError):
            self._stream.close()
        self._path.unlink(missing_ok=True)

    def _write_group(self) -> None:
        if not self._held:
            return
        assert self._writer is not None
        held, num_bytes, num_rows = self._held, self._held_bytes, self._held_rows
        self._held, self._held_rows, self._held_bytes = [], 0, 0
        self._writer.write_table(pa.Table.from_batches(held, self._schema), row_group_size=num_rows)
        self._written_bytes += num_bytes
        self._stream.flush()
        _begin_write_back(self._stream.fileno())


def _begin_write_back(descriptor: int) -> None:
    """Let the kernel write to the disk what the file has so far: the fsync at the end would wait for all of it."""
    with contextlib.suppress(AttributeError, OSError):  # it only saves time
        start = end = ctypes.c_int64(0)  # all of it
        ctypes.CDLL(None).sync_file_range(descriptor, start, end, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def leaves(schema: pa.Schema) -> list[str]:
    """The Parquet names of all columns: of a nested one, the path to its values."""
    found = []
    for field in schema:
        path, kind = field.name, field.type
        while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        found.append(path)
    return found
