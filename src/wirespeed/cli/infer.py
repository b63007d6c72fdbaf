"""``wirespeed infer``: a data set through a model, on this host or over many nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wirespeed import units
from wirespeed.cli.cluster_options import (
    ClusterOption,
    CpusOption,
    GpusOption,
    PlacementOption,
    RackLabelOption,
    WorkersOption,
    wanted_of,
)
from wirespeed.cli.render import make_table, print_json, say, show, stderr_console
from wirespeed.errors import MissingCapability, UsageError

if TYPE_CHECKING:
    from wirespeed.infer.crew import Crew
    from wirespeed.infer.job import Job, Progress, Summary

_TELL_EVERY_S = 5.0


def infer(
    *,
    inputs: Annotated[
        list[str],
        typer.Argument(help="Files, folders, globs, tar archives (WebDataset), @LIST.", metavar="INPUT..."),
    ],
    model: Annotated[str, typer.Option(help="A model's folder, or with --nodes its name there.")] = "",
    out: Annotated[Path, typer.Option(help="The Parquet file to write.")] = Path("results.parquet"),
    nodes: Annotated[
        str | None,
        typer.Option("--nodes", "--workers", help="HOST:PORT,... of `wirespeed serve FOLDER --node ADDRESS`."),
    ] = None,
    cluster: ClusterOption = None,
    cluster_workers: WorkersOption = 0,
    placement: PlacementOption = "spread",
    rack_label: RackLabelOption = "rack",
    worker_cpus: CpusOption = 1.0,
    worker_gpus: GpusOption = 0.0,
    repo: Annotated[
        str | None,
        typer.Option(
            "--repo", "-r", envvar="WIRESPEED_REPO", help="The store of repo:NAME, with --cluster.", metavar="URL"
        ),
    ] = None,
    features: Annotated[str, typer.Option(help="How features travel and are written: fp32, fp16 or int8.")] = "fp32",
    restart: Annotated[bool, typer.Option("--restart", help="Forget what an unfinished run has done.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output where it exists.")] = False,
    timeout: Annotated[str, typer.Option(help="How long a node may take before its inputs go elsewhere.")] = "2m",
    patience: Annotated[str, typer.Option(help="How long to wait when no node is left.")] = "60 s",
    memory: Annotated[str, typer.Option(help="How much may be read ahead.")] = "256 MiB",
    readers: Annotated[int, typer.Option(help="Threads that read inputs; more for slow or remote disks.", min=1)] = 2,
    authority: Annotated[Path | None, typer.Option(help="Who signed the nodes' certificates (TLS).")] = None,
    certificate: Annotated[Path | None, typer.Option(help="This side's certificate, PEM (mutual TLS).")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Run a model over a data set: one row per input, in order, in a Parquet file.

    Encoded images travel, nodes decode and compute while the next ones are on their way. A run that was ended goes on
    where it was with the same command. Inputs that fail become rows with an error; the exit code is 1 then.

    Examples:

      wirespeed infer photos/ --model models/faces --out faces.parquet

      wirespeed infer 'shards/*.tar' --model faces --nodes h1:7000,h2:7000 --features fp16

      wirespeed infer @list.txt --model models/embed --out e.parquet --json

      wirespeed infer photos/ --cluster auto --model /models/faces --placement pack
    """
    from wirespeed.infer.inputs import expand

    if sys.platform != "linux":
        raise MissingCapability("infer needs Linux")
    _need_arrow()
    from wirespeed.infer.crew import LocalCrew, RemoteCrew
    from wirespeed.infer.job import Job, JobOptions
    from wirespeed.infer.reading import ReadBounds
    from wirespeed.serve.cluster import Cluster
    from wirespeed.serve.features import ENCODINGS
    from wirespeed.serve.node_addresses import parse_nodes
    from wirespeed.wire.loops import run
    from wirespeed.wire.security import Security

    if features not in ENCODINGS:
        raise UsageError(f"got --features {features!r}", expected=", ".join(ENCODINGS))
    options = JobOptions(
        encoding=features,
        restart=restart,
        overwrite=overwrite,
        timeout_s=units.parse_duration(timeout),
        patience_s=units.parse_duration(patience),
        reading=ReadBounds(budget_bytes=units.parse_size(memory), num_threads=readers),
    )
    security = Security(
        token=os.environ.get("WIRESPEED_TOKEN") or None, authority=authority, certificate=certificate, key=key
    )

    wanted = wanted_of(
        cluster, [model] if model else (), workers=cluster_workers, placement=placement, rack_label=rack_label,
        cpus=worker_cpus, gpus=worker_gpus, repo=repo,
    )  # fmt: skip
    if wanted is not None and nodes is not None:
        raise UsageError("got --cluster and --nodes", expected="one of them")

    def make_crew() -> Crew:
        if wanted is not None:
            return RemoteCrew(
                (), model="", encoding=features, security=security, cluster=Cluster(wanted, on_news=say), on_news=say
            )
        if nodes is None:
            return LocalCrew(Path(model), encoding=features, on_news=say)
        return RemoteCrew(parse_nodes(nodes), model=model, encoding=features, security=security, on_news=say)

    if nodes is None and wanted is None and not (model and (Path(model) / "model.toml").is_file()):
        raise UsageError(
            f"got --model {model!r}",
            expected="a folder with a model.toml",
            hint="or name nodes that have the model: --nodes HOST:PORT,..., or a Ray cluster: --cluster ADDRESS",
        )
    found = expand(inputs)
    if found.num_repeated:
        say(f"{found.num_repeated} inputs are named twice; each is run once")

    async def main() -> Summary:
        with _telling() as tell:
            return await _until_signal(Job(found.items, make_crew(), out, options, on_progress=tell))

    summary = run(main())
    if as_json:
        print_json({"schema": 1, "kind": "infer", "rate_per_s": summary.rate_per_s, **_fields(summary)})
    else:
        _show(summary)
    if summary.num_errors:
        say(f"{summary.num_errors} of {summary.num_inputs} inputs have no result: see column error of {out}")
        raise typer.Exit(1)


async def _until_signal(job: Job) -> Summary:
    """Run a job; SIGTERM ends it as Ctrl-C does, with what is done kept."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(job.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        say("stopped; the same command goes on from here")
        raise KeyboardInterrupt from None
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _need_arrow() -> None:
    import importlib.util

    if importlib.util.find_spec("pyarrow") is None:
        raise MissingCapability("infer writes Parquet with pyarrow", hint="pip install 'wirespeed[serve]'")


@contextlib.contextmanager
def _telling() -> Iterator[Callable[[Progress], None]]:
    """Progress on stderr: a bar on a terminal, a line every few seconds elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines().tell
        return
    from rich import progress as bars

    with bars.Progress(
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[rate]}"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[more]}"),
        console=stderr_console(),
        transient=True,
    ) as bar:
        task = bar.add_task("infer", total=None, rate="", more="")

        def tell(progress: Progress) -> None:
            rate, more = _words(progress)
            bar.update(task, completed=progress.num_done, total=progress.num_inputs, rate=rate, more=more)

        yield tell


class _Lines:
    """A line now and then, and one at the end."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()

    def tell(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < _TELL_EVERY_S and progress.num_done < progress.num_inputs:
            return
        self._told_s = now_s
        rate, more = _words(progress)
        eta = "" if progress.eta_s is None else f", {units.format_duration(progress.eta_s)} left"
        say(f"{progress.num_done} of {progress.num_inputs}, {rate}{eta}, {more}")


def _words(progress: Progress) -> tuple[str, str]:
    errors = f", {progress.num_errors} errors" if progress.num_errors else ""
    where = "1 node" if progress.num_nodes == 1 else f"{progress.num_nodes} nodes"
    return f"{progress.rate_per_s:,.1f}/s", where + errors


def _fields(summary: Summary) -> dict[str, object]:
    import msgspec

    return dict(msgspec.structs.asdict(summary))


def _show(summary: Summary) -> None:
    rows = [[name, str(count), f"{count / summary.seconds:,.1f}/s"] for name, count in summary.per_node.items()]
    show(make_table(["node", "inputs", "rate"], rows))
    again = f", {summary.num_again} sent again" if summary.num_again else ""
    copies = f", {summary.num_copies} copied to idle nodes" if summary.num_copies else ""
    resumed = f" ({summary.num_resumed} from before)" if summary.num_resumed else ""
    say(
        f"{summary.num_inputs} inputs{resumed} in {units.format_duration(summary.seconds)}, "
        f"{summary.rate_per_s:,.1f}/s{again}{copies}: {summary.out}"
    )
