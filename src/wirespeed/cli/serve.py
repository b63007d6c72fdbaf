"""``wirespeed serve`` and ``wirespeed load``: models behind gRPC and REST, and requests to measure them with."""

from __future__ import annotations

import math
import os
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
from wirespeed.cli.render import print_json, say

if TYPE_CHECKING:
    from wirespeed.measure.load import LoadReport
    from wirespeed.serve.server import InferenceServer


def serve(
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="A folder of model folders, each with a model.toml; repo:NAME[@V] for a version of the repository.",
            metavar="FOLDER|repo:NAME@V...",
            show_default=False,
        ),
    ] = None,
    grpc: Annotated[str, typer.Option(help="Address of the gRPC door; port 0: any; none: closed.")] = "127.0.0.1:8001",
    http: Annotated[str, typer.Option(help="Address of the REST door; port 0: any; none: closed.")] = "127.0.0.1:8000",
    node: Annotated[
        str,
        typer.Option("--node", "--worker", help="Address of the data-plane door, for dispatchers; none: closed."),
    ] = "none",
    nodes: Annotated[
        str | None, typer.Option(help="HOST:PORT,... of nodes that have the models, instead of FOLDER.")
    ] = None,
    cluster: ClusterOption = None,
    cluster_workers: WorkersOption = 0,
    placement: PlacementOption = "spread",
    rack_label: RackLabelOption = "rack",
    worker_cpus: CpusOption = 1.0,
    worker_gpus: GpusOption = 0.0,
    max_message: Annotated[str, typer.Option(help="Largest request and answer.")] = "256 MiB",
    drain: Annotated[str, typer.Option(help="How long requests may finish after SIGTERM.")] = "30 s",
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    authority: Annotated[
        Path | None, typer.Option(help="Clients must show a certificate that this one signed.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without token or TLS.")] = False,
    reuse_port: Annotated[
        bool, typer.Option("--reuse-port", help="Several servers on one port (SO_REUSEPORT).")
    ] = False,
    allow_client_shm: Annotated[
        bool, typer.Option("--allow-client-shm", help="Clients on this host may pass tensors in /dev/shm.")
    ] = False,
    compat_server_name: Annotated[str, typer.Option(help="The name that server metadata gives.")] = "wirespeed",
    repo: Annotated[
        str | None,
        typer.Option("--repo", "-r", envvar="WIRESPEED_REPO", help="The store of repo:NAME.", metavar="URL"),
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(help="Look this often where repo:NAME@ALIAS points, and serve that.", metavar="DURATION"),
    ] = None,
    max_staleness: Annotated[
        str | None,
        typer.Option(help="With --follow: not ready once the store was silent for so long.", metavar="DURATION"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout once the doors are open.")
    ] = False,
) -> None:
    """Serve models over gRPC (Open Inference Protocol v2) and REST until SIGTERM or Ctrl-C.

    With --node the models are a node's: `wirespeed infer --nodes` on another host spreads a data set over many nodes,
    and `wirespeed serve --nodes` requests. With --cluster Ray starts such nodes on its hosts, and starts them again
    where they end; requests go to them directly, and still do while Ray's head is away.

    repo:NAME@v3 and repo:NAME@alias serve a version of the repository. What `wirespeed repo warm` brought to this host
    is served from its cache: for a number, or with WIRESPEED_OFFLINE=1, the store is not asked at all.

    With --follow 10s an alias that moves is followed: the new version is fetched (what changed of it), loaded beside
    the old one, compared with it on the model's reference batch, and then takes over without a request dropped.

    A token in WIRESPEED_TOKEN is asked of every client ("authorization: Bearer TOKEN"); it, or client certificates, are
    needed on an address beyond loopback.

    Examples:

      wirespeed serve models/

      wirespeed serve repo:org/faces@prod --repo s3://bucket/models --follow 10s

      WIRESPEED_TOKEN=$(cat token) wirespeed serve models/ --grpc 0.0.0.0:8001 --http none

      WIRESPEED_TOKEN=$(cat token) wirespeed serve models/ --node 0.0.0.0:7000 --grpc none --http none

      wirespeed serve --nodes h1:7000,h2:7000

      wirespeed serve repo:org/faces@prod --repo s3://bucket/models --cluster head:6379 --placement pack

      curl localhost:8000/v2/models/NAME
    """
    from wirespeed.errors import UsageError
    from wirespeed.serve.node_addresses import parse_nodes
    from wirespeed.serve.server import ServeOptions
    from wirespeed.serve.service import run_service
    from wirespeed.serve.shelf import open_shelf
    from wirespeed.wire.security import Security
    from wirespeed.wire.sockets import raise_file_limit

    wanted = wanted_of(
        cluster, models or (), workers=cluster_workers, placement=placement, rack_label=rack_label, cpus=worker_cpus,
        gpus=worker_gpus, repo=repo,
    )  # fmt: skip
    if wanted is not None and (nodes is not None or node != "none"):
        raise UsageError("got --cluster and --nodes or --node", expected="one of them")
    if max_staleness is not None and follow is None:
        raise UsageError("got --max-staleness without --follow", expected="both")
    if follow is not None and wanted is not None:
        raise UsageError("got --follow and --cluster", expected="--follow on each host, with --node")
    if bool(models) == (nodes is not None):
        expected = "FOLDER, repo:NAME@V, or --nodes"
        raise UsageError("got models and --nodes" if models else "got no models", expected=expected)
    options = ServeOptions(
        grpc_address=None if grpc == "none" else grpc,
        http_address=None if http == "none" else http,
        node_address=None if node == "none" else node,
        nodes=parse_nodes(nodes) if nodes else (),
        cluster=wanted,
        security=Security(
            token=os.environ.get("WIRESPEED_TOKEN") or None,
            certificate=certificate,
            key=key,
            authority=authority,
            is_insecure=insecure,
        ),
        max_message_bytes=units.parse_size(max_message),
        drain_s=units.parse_duration(drain),
        server_name=compat_server_name,
        reuse_port=reuse_port,
        is_client_memory_allowed=allow_client_shm,
        follow_s=None if follow is None else units.parse_duration(follow),
        max_stale_s=math.inf if max_staleness is None else units.parse_duration(max_staleness),
    )

    def when_open(server: InferenceServer) -> None:
        names = sorted(server.models.models)
        open_doors = {"gRPC": server.grpc_address, "REST": server.http_address, "node": server.node_address}
        told = ", ".join(f"{door} {address or 'closed'}" for door, address in open_doors.items())
        say(f"serving {', '.join(names)}: {told}")
        if as_json:
            doors = {"grpc": server.grpc_address, "http": server.http_address, "node": server.node_address}
            print_json({"schema": 1, "kind": "serving", **doors, "models": names})

    raise_file_limit()  # a connection each
    if not models or wanted is not None:
        run_service(None, options, when_open=when_open, on_news=say)
        return
    with open_shelf(models, repo=repo, on_news=say) as shelf:
        run_service(shelf, options, when_open=when_open, on_news=say)


def load(
    *,
    url: Annotated[str, typer.Argument(help="grpc://HOST:PORT/MODEL, http://... or predict://...", metavar="URL")],
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", help="Closed loop: so many callers.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second, as a Poisson process.")] = None,
    duration: Annotated[str, typer.Option(help="How long is counted.")] = "10 s",
    warmup: Annotated[str, typer.Option(help="How long before that.")] = "1 s",
    timeout: Annotated[str, typer.Option(help="The deadline of each request.")] = "30 s",
    shape: Annotated[
        list[str] | None, typer.Option(help="NAME:SIZE,SIZE for inputs whose shape is open; may be repeated.")
    ] = None,
    connections: Annotated[int, typer.Option(help="Connections of the gRPC doors.")] = 2,
    authority: Annotated[Path | None, typer.Option(help="Who signed the server's certificate (TLS).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Send requests to a model and say how fast they are answered; every answer is checked.

    Closed loop answers "how much can it do", open loop "how long do users wait at this rate": there, latency counts
    from when a request was due, so a server that stalls is not spared. Exit code 1 where a request failed.

    Examples:

    wirespeed load grpc://127.0.0.1:8001/simple -c 8

    wirespeed load http://127.0.0.1:8000/resnet --shape images:4,3,224,224 --rate 50 --duration 1m

    wirespeed load predict://127.0.0.1:8001/identity -c 32 --json
    """
    from wirespeed.errors import UsageError
    from wirespeed.measure.load import closed_loop, open_loop
    from wirespeed.serve.load_targets import open_target
    from wirespeed.wire.loops import run
    from wirespeed.wire.security import Security

    if concurrency is not None and rate is not None:
        raise UsageError("got --concurrency and --rate", expected="one of the two")
    shapes = dict(_shape(text) for text in shape or [])
    duration_s, warmup_s, timeout_s = map(units.parse_duration, (duration, warmup, timeout))
    security = Security(token=os.environ.get("WIRESPEED_TOKEN") or None, authority=authority)

    async def drive() -> LoadReport:
        async with open_target(
            url, shapes=shapes, num_connections=connections, security=security, timeout_s=timeout_s
        ) as target:
            if rate is not None:
                return await open_loop(
                    target, rate_per_s=rate, duration_s=duration_s, warmup_s=warmup_s, timeout_s=timeout_s
                )
            return await closed_loop(
                target, concurrency=concurrency or 1, duration_s=duration_s, warmup_s=warmup_s, timeout_s=timeout_s
            )

    report = run(drive())
    if as_json:
        print_json(report)
    else:
        _show(report)
    if report.num_failed or not report.num_ok:
        raise typer.Exit(1)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    from wirespeed.errors import UsageError

    name, colon, sizes = text.rpartition(":")
    if not colon or not all(size.isdigit() for size in sizes.split(",")):
        raise UsageError(f"got --shape {text!r}", expected="NAME:SIZE,SIZE,...")
    return name, tuple(int(size) for size in sizes.split(","))


def _show(report: LoadReport) -> None:
    from wirespeed.cli.render import make_table, show

    how = f"{report.concurrency} callers" if report.offered_per_s is None else f"{report.offered_per_s:g}/s offered"
    times = [report.latency_p50_s, report.latency_p90_s, report.latency_p99_s, report.latency_max_s]
    cells = ["-" if value is None else units.format_duration(value) for value in times]
    row = [how, f"{report.requests_per_s:,.1f}/s", *cells, str(report.num_ok), str(report.num_failed)]
    show(make_table(["load<", "answered", "p50", "p90", "p99", "max", "ok", "failed"], [row]))
    for text, count in sorted(report.failures.items(), key=lambda held: -held[1]):
        say(f"{count} failed: {text}")
