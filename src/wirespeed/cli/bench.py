"""`wirespeed bench`: what the network really gives, link by link and collective by collective."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wirespeed import units
from wirespeed.cli.bench_codecs import bench_codecs
from wirespeed.cli.bench_replay import bench_replay
from wirespeed.cli.render import make_table, print_json, say, show
from wirespeed.errors import UsageError, WirespeedError
from wirespeed.measure.stats import STABLE_SPREAD, is_stable, median, spread
from wirespeed.records import CollectivesRecord, LinkSample, LinksRecord, read, write
from wirespeed.spec.payloads import bus_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wirespeed.launch import Ranks

app = typer.Typer(
    help="Measure links and collectives, on every rank with rank 0 printing and writing; and codecs, on one machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

app.command("codecs")(bench_codecs)
app.command("replay")(bench_replay)

MAX_ROWS = 60
_OUT = typer.Option("--out", "-o", help="Write the record here, for `wirespeed fabric calibrate`.", metavar="FILE")
_JSON = typer.Option("--json", help="Print the record as one JSON document.")


@app.command("links")
def links(
    *,
    streams: Annotated[str, typer.Option("--streams", help="Connections at once; several counts by commas.")] = "1,4",
    duration: Annotated[str, typer.Option("--duration", help="How long each transfer is measured.")] = "500 ms",
    windows: Annotated[int, typer.Option("--windows", help="Samples that each transfer is cut into.")] = 5,
    both: Annotated[bool, typer.Option("--both", help="Also measure both directions at the same time.")] = False,
    send_buffer: Annotated[str | None, typer.Option("--send-buffer", help="SO_SNDBUF, such as 4MiB.")] = None,
    receive_buffer: Annotated[str | None, typer.Option("--receive-buffer", help="SO_RCVBUF, such as 4MiB.")] = None,
    congestion: Annotated[str | None, typer.Option("--congestion", help="Congestion control, such as cubic.")] = None,
    nagle: Annotated[bool, typer.Option("--nagle", help="Leave TCP_NODELAY off.")] = False,
    port: Annotated[int | None, typer.Option("--port", help="Rank 0's control port; default MASTER_PORT.")] = None,
    timeout: Annotated[str, typer.Option("--timeout", help="Longest wait for a host beyond its work.")] = "15 s",
    join_timeout: Annotated[str, typer.Option("--join-timeout", help="Longest wait for all ranks.")] = "60 s",
    out: Annotated[Path | None, _OUT] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Bandwidth and round trips between all pairs of hosts over TCP, in rounds of disjoint pairs.

    Goodput is payload, counted where it arrives. One process per host takes part. Bind to an interface with
    GLOO_SOCKET_IFNAME; ranks that do not share WIRESPEED_TOKEN, where it is set, are turned away.

    Examples:

      wirespeed lab run --spec 4x1gbit -- wirespeed bench links

      srun --ntasks-per-node=1 wirespeed bench links --streams 1,8 --out links.json

      torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint node0:29500 --no-python wirespeed bench links
    """
    from wirespeed import launch
    from wirespeed.measure.links import measure_links
    from wirespeed.measure.messages import SocketOptions

    options = SocketOptions(
        send_buffer_bytes=None if send_buffer is None else units.parse_size(send_buffer),
        receive_buffer_bytes=None if receive_buffer is None else units.parse_size(receive_buffer),
        no_delay=not nagle,
        congestion=congestion,
    )
    ranks = launch.ranks()
    record = measure_links(
        ranks,
        streams=_integers(streams, "--streams"),
        duration_s=units.parse_duration(duration),
        windows=windows,
        bidirectional=both,
        options=options,
        port=port,
        timeout_s=units.parse_duration(timeout),
        join_timeout_s=units.parse_duration(join_timeout),
        progress=say if ranks.rank == 0 else None,
    )
    if record is None:
        return 0
    if out is not None:
        say(f"wrote {write(out, record)}")
    if as_json:
        print_json(record)
    else:
        _show_links(record)
    return 0


@app.command("collectives")
def collectives(
    *,
    only: Annotated[
        str | None,
        typer.Option("--only", help="Some of all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, scatter."),
    ] = None,
    sizes: Annotated[
        str, typer.Option("--sizes", help="FIRST..LAST in steps of 4, or sizes by commas.")
    ] = "1KiB..256MiB",
    dtypes: Annotated[str, typer.Option("--dtypes", help="Element types that all_reduce sums.")] = "float32,float16",
    beside_compute: Annotated[
        int, typer.Option("--beside-compute", min=0, max=256, help="Threads per rank that compute meanwhile.")
    ] = 0,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed runs at most; large sizes get fewer.")] = 20,
    warmup: Annotated[int, typer.Option("--warmup", help="Runs before the timed ones.")] = 2,
    deadline: Annotated[
        str, typer.Option("--deadline", help="Time for all; sizes that would pass it are skipped.")
    ] = "2 min",
    timeout: Annotated[str, typer.Option("--timeout", help="Longest wait for a peer.")] = "60 s",
    backend: Annotated[
        str | None, typer.Option("--backend", help="gloo or nccl; default nccl with a GPU per rank.")
    ] = None,
    links_file: Annotated[
        Path | None, typer.Option("--links", help="Record of `bench links`, for the wire rate.", metavar="FILE")
    ] = None,
    out: Annotated[Path | None, _OUT] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Time collectives over torch.distributed, with every result checked in the run that is timed.

    Sizes are nccl-tests': the buffer for all_reduce and broadcast, the whole output of all_gather, the whole input of
    reduce_scatter, the whole send buffer of all_to_all, the root's of scatter. busbw is what each link carries if the
    algorithm is a ring; it stands beside the wire rate: of --links, else of the lab, else of the NIC.

    Exit code 1 where a result was wrong.

    Examples:

      wirespeed lab run --spec 4x1gbit -- wirespeed bench collectives --sizes 1KiB..16MiB

      srun wirespeed bench collectives --only all_reduce --links links.json --out collectives.json

      torchrun --nnodes 2 --nproc-per-node 8 --no-python wirespeed bench collectives --deadline 10min
    """
    from wirespeed import launch

    wanted = _sizes(sizes)
    links_record = None if links_file is None else read(links_file, LinksRecord)
    ranks = launch.ranks()
    _fill_environment(ranks)
    from wirespeed.measure.collectives import COLLECTIVES, measure_collectives

    names = COLLECTIVES if only is None else tuple(name.strip() for name in only.split(","))
    record = measure_collectives(
        collectives=names,  # type: ignore[arg-type]  # checked there, with the list of those that exist
        sizes_bytes=wanted,
        dtypes=[name.strip() for name in dtypes.split(",")],
        repeats=repeats,
        warmup=warmup,
        deadline_s=units.parse_duration(deadline),
        timeout_s=units.parse_duration(timeout),
        backend=backend,
        compute_threads=beside_compute,
        progress=say if ranks.rank == 0 else None,
    )
    if record is None:
        return 0
    if out is not None:
        say(f"wrote {write(out, record)}")
    if as_json:
        print_json(record)
    else:
        wire = _known_wire_rate() if links_record is None else _slowest_host(links_record, links_file)
        _show_collectives(record, wire)
    return 0 if all(sample.is_correct for sample in record.samples) else 1


def _show_links(record: LinksRecord) -> None:
    by_way: dict[tuple[str, str], list[LinkSample]] = defaultdict(list)
    for sample in record.samples:
        by_way[sample.source, sample.target].append(sample)
    kinds = sorted({(sample.is_bidirectional, sample.streams) for sample in record.samples})
    headings = ["from", "to<", *(_kind_name(*kind) for kind in kinds), "spread", "rtt min", "median", "p99", "verdict<"]
    # The slowest links first: on a large cluster they are what one looks for.
    ways = sorted(by_way, key=lambda way: max(median(s.bit_per_s) for s in by_way[way]))
    shown = ways[:MAX_ROWS] if len(ways) > MAX_ROWS else list(by_way)
    rows = []
    for way in shown:
        samples = {(sample.is_bidirectional, sample.streams): sample for sample in by_way[way]}
        widest = max(spread(sample.bit_per_s) for sample in samples.values())
        rtts = next(
            ([s.rtt_min_s, s.rtt_median_s, s.rtt_p99_s] for s in samples.values() if s.rtt_median_s is not None),
            [None] * 3,
        )
        rows.append(
            [
                *way,
                *(units.format_rate(median(samples[kind].bit_per_s)) for kind in kinds),
                units.format_percent(widest),
                *("-" if rtt is None else units.format_duration(rtt) for rtt in rtts),
                _verdict(all(is_stable(sample.bit_per_s) for sample in samples.values())),
            ]
        )
    show(make_table(headings, rows, title=f"Goodput between {len(record.hosts)} hosts over TCP"))
    if len(shown) < len(ways):
        say(f"the {len(shown)} slowest of {len(ways)} directions; the record holds all")
    show("sockets: " + ", ".join(f"{name} {value}" for name, value in record.socket_options.items()))
    is_steady = _show_verdict([sample.bit_per_s for sample in record.samples])
    if not is_steady and record.socket_options.get("TCP_CONGESTION", "").startswith("bbr"):
        show("hint: bbr swings where a queue is short and round trips are tiny; try --congestion cubic --duration 1s")


def _kind_name(is_bidirectional: bool, streams: int) -> str:
    name = "1 stream" if streams == 1 else f"{streams} streams"
    return f"{name}, both ways" if is_bidirectional else name


def _show_collectives(record: CollectivesRecord, wire: tuple[float, str] | None) -> None:
    rows = []
    for sample in record.samples:
        time_s = median(sample.times_s)
        algbw = 8 * sample.size_bytes / time_s
        busbw = algbw * bus_factor(sample.collective, record.num_ranks)
        rows.append(
            [
                sample.collective,
                sample.dtype,
                units.format_size(sample.size_bytes),
                str(len(sample.times_s)),
                units.format_duration(time_s),
                units.format_rate(algbw),
                units.format_rate(busbw),
                "unknown" if wire is None else units.format_percent(busbw / wire[0]),
                units.format_percent(spread(sample.times_s)),
                "right" if sample.is_correct else "WRONG",
                _verdict(is_stable(sample.times_s)),
            ]
        )
    headings = [
        "collective",
        "type<",
        "size",
        "runs",
        "time",
        "algbw",
        "busbw",
        "of wire",
        "spread",
        "result<",
        "verdict<",
    ]
    layout = f"{record.num_ranks} ranks, {record.ranks_per_host} per host, {record.cpus_per_rank:g} CPUs each"
    show(make_table(headings, rows, title=f"{record.backend}, {layout}"))
    if wire is None:
        show("wire rate: unknown (give a record of `wirespeed bench links` with --links)")
    else:
        show(f"wire rate: {units.format_rate(wire[0])} ({wire[1]})")
    for note in record.notes:
        show(f"note: {note}")
    wrong = [sample for sample in record.samples if not sample.is_correct]
    if wrong:
        show(f"WRONG results in {len(wrong)} of {len(record.samples)} cases: do not train on these hosts")
    _show_verdict([sample.times_s for sample in record.samples])


def _verdict(is_good: bool) -> str:
    return "stable" if is_good else "not stable"


def _show_verdict(cases: Sequence[Sequence[float]]) -> bool:
    bad = sum(not is_stable(values) for values in cases)
    limit = units.format_percent(STABLE_SPREAD)
    if bad == 0:
        show(f"verdict: stable (spread, the median deviation over the median, at most {limit} everywhere)")
    else:
        show(f"verdict: not stable in {bad} of {len(cases)} cases (spread above {limit}): repeat on quiet hosts")
    return bad == 0


def _slowest_host(record: LinksRecord, path: Path | None) -> tuple[float, str] | None:
    from wirespeed.fabric.calibrate import host_rates_bit_per_s

    rates = host_rates_bit_per_s(record)
    return (min(rates.values()), f"{path}, the slowest host") if rates else None


def _known_wire_rate() -> tuple[float, str] | None:
    """The lab's shaped rate, less headers, else the NIC's speed."""
    from wirespeed.measure.environment import nic_rate_bit_per_s

    lab_name = os.environ.get("WIRESPEED_LAB")
    if lab_name:
        from wirespeed.lab import Lab
        from wirespeed.lab.layout import HEADER_EFFICIENCY

        with contextlib.suppress(WirespeedError), Lab.attach(lab_name) as lab:
            return lab.spec.rate_bit_per_s * HEADER_EFFICIENCY, "the lab's rate, less headers"
    rate_bit_per_s = nic_rate_bit_per_s()
    return None if rate_bit_per_s is None else (rate_bit_per_s, "the NIC's speed, with headers")


def _fill_environment(ranks: Ranks) -> None:
    """What torch.distributed reads, for launchers that say it in other words."""
    from wirespeed.launch import torch_environment

    for name, value in torch_environment(ranks).items():
        os.environ.setdefault(name, value)


def _integers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"got {option} {text!r}", expected="whole numbers separated by commas") from None


def _sizes(text: str) -> tuple[int, ...]:
    """``1KiB..256MiB`` by fours (the last size included), or a list."""
    first, dots, last = text.partition("..")
    if not dots:
        return tuple(units.parse_size(part) for part in text.split(","))
    size_bytes, end_bytes = units.parse_size(first), units.parse_size(last)
    if not 1 <= size_bytes <= end_bytes:
        raise UsageError(f"got --sizes {text!r}", expected="FIRST..LAST with 1 B <= FIRST <= LAST")
    sizes = []
    while size_bytes <= end_bytes:
        sizes.append(size_bytes)
        size_bytes *= 4
    return tuple(sizes)
