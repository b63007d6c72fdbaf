"""Results in the order of the inputs, whatever the order they come in: into the journal, and along with it to Parquet.

The output appears as a whole, by a rename, once every input has its row: a reader never sees half a job. It is written
as results come; where that fails, or the job goes on from a journal that is damaged, it is made of the journal at the
end, and what is wrong is told then. Writing goes through one thread, so that the network does not wait for the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from wirespeed.errors import DataError, MissingCapability
from wirespeed.infer.columns import Row, make_batch, schema_of, zero_row
from wirespeed.infer.inputs import Item
from wirespeed.infer.journal import JobIdentity, Journal
from wirespeed.infer.output import Output
from wirespeed.serve.config import TensorSpec

JOURNAL_SUFFIX = ".partial"


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
        self._output: Output | None = None
        """What is written along. None: at the end, from the journal."""
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
        """Load what the first block and the output would wait for, and begin the output with what the journal holds.

        pyarrow takes half a second to get going.
        """
        batch = make_batch([Row("", None, ""), zero_row(self._outputs)], self._outputs, self.schema)
        pq.write_table(pa.Table.from_batches([batch]), io.BytesIO())
        with contextlib.suppress(OSError, pa.ArrowException, DataError):
            self._output = self._made_of_journal()

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
        self._journal.append(memoryview(batch.serialize()), num_rows=len(rows), num_errors=num_errors)
        if self._output is not None:
            try:
                self._output.add(batch)
            except (OSError, pa.ArrowException):
                self._drop_output()  # the journal may still have room

    def finish(self) -> None:
        """Complete the output, and delete the journal. Raises MissingCapability, leaving the journal."""
        try:
            if self._output is None or self._output.num_rows != self.num_written:
                self._drop_output()
                self._output = self._made_of_journal()
            self._output.finish()
        except (OSError, pa.ArrowException) as fault:
            raise MissingCapability(
                f"cannot write {self.out}: {fault}",
                hint=f"all {self.num_written} results are safe: free some space and run the same command again",
            ) from fault
        finally:
            self._drop_output()
        self._journal.remove()

    def close(self) -> None:
        """Let go of the journal; it stays for the next run."""
        self._drop_output()
        self._journal.close()

    def _made_of_journal(self) -> Output:
        output = Output(self.out, self.schema)
        try:
            for content in self._journal.batches():
                output.add(pa.ipc.read_record_batch(pa.py_buffer(content), self.schema))
        except BaseException:
            output.discard()
            raise
        return output

    def _drop_output(self) -> None:
        output, self._output = self._output, None
        if output is not None:
            output.discard()
