"""Results in the order of the inputs, whatever the order they come in; first into the journal, at the end into Parquet.

The output appears as a whole, by a rename, once every input has its row: a reader never sees half a job. Writing goes
through one thread, so that the network does not wait for the disk.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from wirespeed.errors import MissingCapability
from wirespeed.infer.columns import ERROR, KEY, Row, make_batch, schema_of, zero_row
from wirespeed.infer.inputs import Item
from wirespeed.infer.journal import JobIdentity, Journal
from wirespeed.serve.config import TensorSpec

JOURNAL_SUFFIX = ".partial"
_GROUP_ROWS = 16384
_GROUP_BYTES = 64 * 1024**2


def identity_of(
    items: Iterable[Item], *, model: str, version: str, encoding: str, outputs: Sequence[TensorSpec]
) -> JobIdentity:
    """What the job is, for its journal. Inputs count by their keys, not by their content."""
    digest = hashlib.blake2b(digest_size=16)
    count = 0
    for item in items:
        digest.update(item.key.encode("utf-8", "surrogateescape") + b"\0")
        count += 1
    return JobIdentity(
        model=model,
        version=version,
        encoding=encoding,
        num_inputs=count,
        inputs=digest.hexdigest(),
        columns=str(schema_of(outputs)),
    )


class Results:
    """The results of one job. ``open``, ``put``, ``take`` in the event loop, the rest in the writing thread."""

    def __init__(self, out: Path, outputs: Sequence[TensorSpec]) -> None:
        self.out = out
        self.schema = schema_of(outputs)
        self._outputs = tuple(outputs)
        self._journal = Journal(out.with_name(out.name + JOURNAL_SUFFIX))
        self._waiting: dict[int, Row] = {}
        self._rows: list[Row] = []
        self._next = 0

    @property
    def num_taken_up(self) -> int:
        """Results without a gap from the first one, written or about to be."""
        return self._next

    @property
    def num_written(self) -> int:
        """Results in the journal."""
        return self._journal.next_place

    @property
    def num_errors_written(self) -> int:
        """Error rows in the journal."""
        return self._journal.num_errors

    @property
    def num_rows_held(self) -> int:
        """Results in order that are not yet handed to ``write``."""
        return len(self._rows)

    def open(self, identity: JobIdentity, *, restart: bool = False) -> int:
        """Begin, or go on: the place of the first input that has no result. Raises as Journal.open."""
        self._journal.open(identity, restart=restart)
        self._next = self._journal.next_place
        return self._next

    def warm_up(self) -> None:
        """Load what the first block and the output would wait for: pyarrow takes half a second to get going."""
        batch = make_batch([Row("", None, ""), zero_row(self._outputs)], self._outputs, self.schema)
        pq.write_table(pa.Table.from_batches([batch]), io.BytesIO())

    def put(self, place: int, row: Row) -> None:
        """A result. Each place is given once."""
        self._waiting[place] = row
        while (held := self._waiting.pop(self._next, None)) is not None:
            self._rows.append(held)
            self._next += 1

    def take(self) -> tuple[int, list[Row]]:
        """The results in order that are not yet written, and the place of the first of them, for ``write``."""
        rows, self._rows = self._rows, []
        return self._next - len(rows), rows

    def write(self, place: int, rows: Sequence[Row]) -> None:
        """Append rows to the journal. Raises MissingCapability where the disk is full.

        Rows behind some that could not be written are not written either: the journal has no gaps.
        """
        if not rows or place != self._journal.next_place:
            return
        batch = make_batch(rows, self._outputs, self.schema)
        num_errors = sum(row.error is not None for row in rows)
        self._journal.append(batch.serialize().to_pybytes(), num_rows=len(rows), num_errors=num_errors)

    def finish(self) -> None:
        """Make the output of the journal, and delete that. Raises MissingCapability, leaving the journal."""
        temporary = ""
        try:
            handle, temporary = tempfile.mkstemp(dir=self.out.parent, prefix=f".{self.out.name}.")
            with os.fdopen(handle, "wb") as stream:
                self._write_parquet(stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, self.out)
            temporary = ""
        except (OSError, pa.ArrowException) as fault:
            raise MissingCapability(
                f"cannot write {self.out}: {fault}",
                hint=f"all {self.num_written} results are safe: free some space and run the same command again",
            ) from fault
        finally:
            if temporary:
                Path(temporary).unlink(missing_ok=True)
        self._journal.remove()

    def close(self) -> None:
        """Let go of the journal; it stays for the next run."""
        self._journal.close()

    def _write_parquet(self, stream: object) -> None:
        # Feature vectors do not compress; names do.
        compression = {name: "zstd" if name in (KEY, ERROR) else "none" for name in _leaves(self.schema)}
        with pq.ParquetWriter(
            stream, self.schema, compression=compression, use_dictionary=[ERROR], write_statistics=[KEY]
        ) as writer:
            held: list[pa.RecordBatch] = []
            for content in self._journal.batches():
                held.append(pa.ipc.read_record_batch(pa.py_buffer(content), self.schema))
                rows = sum(batch.num_rows for batch in held)
                if rows >= _GROUP_ROWS or sum(batch.nbytes for batch in held) >= _GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(held, self.schema))
                    held = []
            if held:
                writer.write_table(pa.Table.from_batches(held, self.schema))


def _leaves(schema: pa.Schema) -> list[str]:
    """The Parquet names of all columns: of a nested one, the path to its values."""
    found = []
    for field in schema:
        path, kind = field.name, field.type
        while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        found.append(path)
    return found
