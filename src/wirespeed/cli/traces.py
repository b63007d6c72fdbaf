"""`wirespeed profile --trace`: where the time of a job went that does not use wirespeed, from its profiler's traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wirespeed import units
from wirespeed.cli.render import make_table, print_json, say, show
from wirespeed.errors import DataError, UsageError
from wirespeed.records import write

if TYPE_CHECKING:
    from wirespeed.measure.timeline import Timeline
    from wirespeed.spec.traces import CollectiveActivity, TracesRecord

MAX_ROWS = 40


def profile_traces(
    files: Sequence[str],
    *,
    nic_rate: str | None,
    nics_per_host: int,
    ranks_per_host: int,
    step_name: str | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Read the traces, show the table, write the record. Folders stand for the traces in them."""
    from wirespeed.measure.nsys import DEFAULT_STEPS
    from wirespeed.measure.traces import analyse, read_trace

    paths = _expand(files)
    timelines: list[Timeline] = []
    for path in paths:
        say(f"reading {path}")
        timelines += read_trace(path, steps=DEFAULT_STEPS if step_name is None else step_name)
    record = analyse(
        timelines,
        ranks_per_host=ranks_per_host,
        nics_per_host=nics_per_host,
        nic_bit_per_s=None if nic_rate is None else units.parse_rate(nic_rate),
    )
    if out is not None:
        say(f"wrote {write(out, record)}")
    if as_json:
        print_json(record)
    else:
        show_traces(record)
    return 0


def _expand(files: Sequence[str]) -> list[Path]:
    paths: list[Path] = []
    for name in files:
        path = Path(name)
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.name.endswith((".json", ".json.gz", ".sqlite")))
            if not found:
                raise DataError(f"no traces in {path}", expected="files that end in .json, .json.gz or .sqlite")
            paths += found
        elif path.exists():
            paths.append(path)
        else:
            raise UsageError(f"no file {name!r}", expected="a trace of torch.profiler, or an SQLite export of nsys")
    return list(dict.fromkeys(paths))


def show_traces(record: TracesRecord) -> None:
    """The tables of a record, and what to take away from them."""
    rows = [
        [
            "-" if rank.rank is None else str(rank.rank),
            rank.device,
            f"{rank.num_steps}",
            units.format_duration(rank.window_s if rank.step_s is None else rank.step_s),
            units.format_percent(rank.compute_s / rank.window_s) if rank.window_s > 0 else "-",
            units.format_percent(rank.communication_s / rank.window_s) if rank.window_s > 0 else "-",
            "-" if rank.hidden_share is None else units.format_percent(rank.hidden_share),
            units.format_percent(rank.exposed_share),
            units.format_percent(rank.idle_s / rank.window_s) if rank.window_s > 0 else "-",
            "-" if rank.waiting_s is None else units.format_percent(rank.waiting_s / rank.window_s),
        ]
        for rank in record.ranks[:MAX_ROWS]
    ]
    headings = ["rank", "device<", "steps", "step", "compute", "comm.", "hidden", "exposed", "idle", "waiting"]
    show(make_table(headings, rows, title=", ".join(record.files[:4]) + (" ..." if len(record.files) > 4 else "")))
    if len(record.ranks) > MAX_ROWS:
        show(f"and {len(record.ranks) - MAX_ROWS} more: see --json")
    if record.collectives:
        show(make_table(_COLLECTIVES, [_collective_row(c) for c in record.collectives]))
    if record.nics:
        rows = [
            [
                nic.nic,
                nic.source,
                units.format_rate(nic.sent_bit_per_s),
                units.format_rate(nic.received_bit_per_s),
                units.format_rate(nic.peak_bit_per_s),
                units.format_rate(nic.sent_outside_bit_per_s),
                "-" if nic.saturation is None else units.format_percent(nic.saturation),
            ]
            for nic in record.nics
        ]
        show(make_table(["NIC", "trace<", "sent", "received", "peak", "sent outside", "of line rate"], rows))
    for finding in record.findings:
        show(finding)
    for note in record.notes:
        say(f"note: {note}")


_COLLECTIVES = ["collective", "ranks", "count", "time", "size", "transfer", "busbw", "NIC carries", "of line rate"]


def _collective_row(held: CollectiveActivity) -> list[str]:
    return [
        held.collective,
        "-" if held.num_ranks is None else str(held.num_ranks),
        str(held.count),
        units.format_duration(held.seconds),
        "-" if held.median_bytes is None else units.format_size(held.median_bytes),
        units.format_duration(held.transfer_s),
        "-" if held.busbw_bit_per_s is None else units.format_rate(held.busbw_bit_per_s),
        "-" if held.nic_bit_per_s is None else units.format_rate(held.nic_bit_per_s),
        "-" if held.saturation is None else units.format_percent(held.saturation),
    ]
