"""``wirespeed bench codecs``: how fast gradients are encoded and decoded here, and on which links that pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, cast, get_args

import typer

from wirespeed import records
from wirespeed.cli import render
from wirespeed.errors import UsageError
from wirespeed.records import CodecsRecord
from wirespeed.spec.payloads import BYTES_PER_ELEMENT
from wirespeed.spec.strategy import Strategy
from wirespeed.units import format_rate, format_size, parse_duration, parse_size

KernelChoice = Literal["auto", "numba", "torch"]
_STAGES = ("encode", "reduce", "decode")
_NOTHING = "-"


def bench_codecs(
    strategies: Annotated[
        str, typer.Option("--strategies", "-s", metavar="NAMES", help="Codecs, separated by commas.")
    ] = "dense,half,int8,topk@1%",
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="SIZES", help="Buckets of fp32 gradient, separated by commas.")
    ] = "256KiB,1MiB,4MiB,25MiB",
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=2, help="Group size whose messages are decoded.")] = 4,
    concurrent: Annotated[
        int, typer.Option("--concurrent", min=1, help="How many ranks of this machine run this command meanwhile.")
    ] = 1,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of each stage, at most.")] = 9,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads for torch; compiled kernels use one.")] = 1,
    kernels: Annotated[
        str, typer.Option("--kernels", help="auto, numba (compiled, CPU) or torch (every device; slower here).")
    ] = "auto",
    time: Annotated[str, typer.Option("--time", metavar="DURATION", help="How long to measure, about.")] = "60s",
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as one JSON document.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Also write the record.", show_default=False),
    ] = None,
) -> None:
    """Time every codec's local stages on this CPU, beside a copy of the same bucket.

    Speeds are GB/s of fp32 gradient. "pays below" is the link rate up to which sending the bytes saved against dense
    takes longer than the codec, with nothing overlapped: on a faster link the codec alone costs more than it saves.
    Where ranks share a machine's cores, run it on all of them at once and say so with --concurrent.

    Examples:

      wirespeed bench codecs

      wirespeed bench codecs --strategies int8,topk@0.1%,topk@5% --sizes 25MiB --ranks 16

      wirespeed bench codecs --out codecs.json

      wirespeed lab run --spec 4x1gbit -- wirespeed bench codecs --ranks 4 --concurrent 4 --out codecs.json
    """
    import torch

    from wirespeed.train.speed import measure_codecs

    choice = _kernels(kernels)
    wanted = [Strategy.parse(name) for name in strategies.split(",")]
    sizes_bytes = [parse_size(size) for size in sizes.split(",")]
    duration_s = parse_duration(time)
    render.say("building the kernels, then measuring")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        record = measure_codecs(
            wanted, sizes_bytes, num_ranks=ranks, concurrent=concurrent, repeats=repeats, deadline_s=duration_s,
            kernels=choice,
        )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    if out is not None:
        render.say(f"wrote {records.write(out, record)}")
    if as_json:
        render.print_json(record)
        return
    headings = ("bucket", "codec<", *_STAGES, "whole", "of memcpy", "on the wire", "pays below")
    title = f"GB/s of fp32 gradient, {ranks} ranks, {record.kernels} kernels"
    render.show(render.make_table(headings, _rows(record, wanted), title=title))


def _kernels(text: str) -> KernelChoice:
    for choice in get_args(KernelChoice):
        if choice == text:
            return cast(KernelChoice, choice)
    raise UsageError(f"got kernels {text!r}", expected=", ".join(get_args(KernelChoice)))


def _rows(record: CodecsRecord, strategies: Sequence[Strategy]) -> Iterator[tuple[str, ...]]:
    by_name = {strategy.name.partition("/")[0]: strategy for strategy in strategies}
    seconds = {(s.size_bytes, s.codec, s.stage): median(s.times_s) for s in record.samples}
    for size in sorted({s.size_bytes for s in record.samples}):
        copy_s = seconds[size, "memcpy", "copy"]
        yield format_size(size), "memcpy", *[_NOTHING] * 3, _speed(size, copy_s), "1", _NOTHING, _NOTHING
        for name, strategy in by_name.items():
            stages_s = {stage: seconds[size, name, stage] for stage in _STAGES if (size, name, stage) in seconds}
            whole_s = sum(stages_s.values())
            num_elements = size // BYTES_PER_ELEMENT
            wire_bytes = strategy.wire_bytes(num_elements, record.num_ranks)
            saved_bytes = Strategy().wire_bytes(num_elements, record.num_ranks) - wire_bytes
            yield (
                "",
                name,
                *[_speed(size, stages_s[stage]) if stage in stages_s else _NOTHING for stage in _STAGES],
                _speed(size, whole_s),
                f"{copy_s / whole_s:.2f}",
                format_size(wire_bytes),
                _pays_below(strategy, saved_bytes, whole_s),
            )


def _speed(size_bytes: int, seconds: float) -> str:
    speed = size_bytes / seconds / 1e9
    return f"{speed:.3g}" if speed < 100 else ">100"


def _pays_below(strategy: Strategy, saved_bytes: int, codec_s: float) -> str:
    if strategy.codec == "dense":
        return _NOTHING
    return format_rate(8 * saved_bytes / codec_s) if saved_bytes > 0 else "never"
