"""`wirespeed repo warm`, `peer` and `tracker`: one version on many hosts in about the time of one copy."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wirespeed import units
from wirespeed.cli.render import make_table, print_json, say, show, stderr_console
from wirespeed.cli.repo_options import JsonOption, RepoOption, SignatureOption, WantedArgument, open_repository
from wirespeed.errors import DataError, PeerFailure, UsageError

if TYPE_CHECKING:
    from wirespeed import wire
    from wirespeed.repo.swarm.messages import Progress

PEER_PORT = 7710
TRACKER_PORT = 7711

HostsOption = Annotated[
    str | None,
    typer.Option("--hosts", "-H", help="node[01-64] or HOST:PORT, separated by commas.", metavar="HOSTS"),
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Listen beyond loopback without token or TLS, on a network you trust.")
]
CertificateOption = Annotated[Path | None, typer.Option("--certificate", help="This host's TLS certificate, PEM.")]
KeyOption = Annotated[Path | None, typer.Option("--key", help="Its key, PEM.")]
AuthorityOption = Annotated[Path | None, typer.Option("--authority", help="Who signed the others' certificates (TLS).")]


def _security(
    certificate: Path | None, key: Path | None, authority: Path | None, *, is_insecure: bool = False
) -> wire.Security:
    from wirespeed import wire

    return wire.Security(
        token=os.environ.get("WIRESPEED_TOKEN") or None,
        certificate=certificate,
        key=key,
        authority=authority,
        is_insecure=is_insecure,
    )


def _addresses(text: str, port: int) -> list[str]:
    from wirespeed.launch.hostlist import expand_hostlist

    # A port belongs to one host; everything else is a host list as Slurm writes it.
    return [host if ":" in host else f"{host}:{port}" for host in expand_hostlist(text)]


def warm(
    wanted: WantedArgument,
    *,
    hosts: HostsOption = None,
    tracker: Annotated[
        str | None, typer.Option("--tracker", help="Without --hosts: all the peers that it knows.", metavar="HOST:PORT")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="Peers that have the version already.", metavar="HOSTS")
    ] = None,
    fabric: Annotated[
        Path | None, typer.Option("--fabric", help="fabric.toml: the racks of the hosts, by their names.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Of peers that are named without one.")] = PEER_PORT,
    deadline: Annotated[str, typer.Option("--deadline", help="How long it may take.")] = "1 h",
    certificate: CertificateOption = None,
    key: KeyOption = None,
    authority: AuthorityOption = None,
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """Have a version on many hosts: in the caches of their peers, verified, before anybody asks for it.

    The hosts pass it on in a chain, rack by rack, so that it takes about the time of one copy and crosses each uplink
    once; only the first host reads from the store. Exit code 4 where a host does not have it in the end.

    Examples:

      wirespeed repo warm llama@prod --hosts node[01-64]

      wirespeed repo warm llama@v7 --tracker head:7711 --deadline 5m

      wirespeed repo warm llama --hosts a:7710,b:7710 --fabric fabric.toml --json
    """
    from wirespeed import wire
    from wirespeed.repo.names import parse_wanted
    from wirespeed.repo.swarm.warm import known_peers
    from wirespeed.repo.swarm.warm import warm as run_warm

    asked = parse_wanted(wanted)
    security = _security(certificate, key, authority)
    if hosts is not None:
        addresses = _addresses(hosts, port)
    elif tracker is not None:
        addresses = [member.address for member in wire.run(known_peers(tracker, security=security)).members]
        if not addresses:
            raise UsageError(f"the tracker {tracker} knows no peer", hint="start them with --tracker, or name --hosts")
    else:
        raise UsageError("got neither --hosts nor --tracker", expected="one of them")
    repository = open_repository(repo)
    version = repository.version(asked)
    try:
        manifest = repository.manifest_bytes(version)
    except (PeerFailure, DataError):
        manifest = b""  # the hosts ask each other, and the store
    racks = None if fabric is None else _racks(fabric, addresses)
    with _report(len(addresses)) as report:
        warmed = wire.run(
            run_warm(
                version, addresses, alias=asked.alias, manifest=manifest,
                seeds=[] if seeds is None else _addresses(seeds, port), racks=racks, security=security,
                deadline_s=units.parse_duration(deadline), report=report,
            )
        )  # fmt: skip
    if as_json:
        print_json(warmed)
        return 4 if warmed.failed else 0
    rows = [
        [
            host.host, host.rack, host.progress.state, units.format_size(host.progress.held_bytes),
            units.format_size(host.progress.store_bytes), units.format_duration(host.progress.seconds),
            host.progress.problem or "; ".join(host.progress.passed_over),
        ]
        for host in warmed.hosts
    ]  # fmt: skip
    show(make_table(["host", "rack<", "state<", "has", "from the store", "time", "note<"], rows))
    num_whole = len(warmed.hosts) - len(warmed.failed)
    say(
        f"{warmed.version}: {units.format_size(warmed.num_bytes)} on {num_whole} of {len(warmed.hosts)} hosts "
        f"in {units.format_duration(warmed.seconds)}"
    )
    return 4 if warmed.failed else 0


def _racks(fabric: Path, addresses: list[str]) -> dict[str, str]:
    from wirespeed.fabric.files import read_fabric

    rack_of = {host.name: host.rack for host in read_fabric(fabric).hosts}
    return {at: rack_of[name] for at in addresses if (name := at.rpartition(":")[0]) in rack_of}


@contextmanager
def _report(num_hosts: int) -> Iterator[Callable[[Mapping[str, Progress]], None]]:
    """A bar over all hosts on a terminal; elsewhere a line when the tenth of the bytes changes."""
    if sys.stderr.isatty():
        from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        with Bar(
            "{task.description}", BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
            TimeRemainingColumn(), console=stderr_console(), transient=True,
        ) as bar:  # fmt: skip
            task = bar.add_task("warm", total=None)

            def draw(found: Mapping[str, Progress]) -> None:
                held, total, whole = _sums(found)
                bar.update(task, description=f"{whole}/{num_hosts} hosts", completed=held, total=total or None)

            yield draw
        return
    said = -1

    def write(found: Mapping[str, Progress]) -> None:
        nonlocal said
        held, total, whole = _sums(found)
        tenth = 10 * held // total if total else 0
        if tenth != said:
            said = tenth
            say(f"{units.format_size(held)} of {units.format_size(total)} on {num_hosts} hosts, {whole} are done")

    yield write


def _sums(found: Mapping[str, Progress]) -> tuple[int, int, int]:
    held = sum(progress.held_bytes for progress in found.values())
    total = sum(progress.total_bytes for progress in found.values())
    return held, total, sum(progress.state == "whole" for progress in found.values())


def peer(
    *,
    listen: Annotated[
        str, typer.Option("--listen", "-l", help="Where others reach it; beyond loopback WIRESPEED_TOKEN is needed.")
    ] = f"127.0.0.1:{PEER_PORT}",
    advertise: Annotated[
        str | None, typer.Option("--advertise", help="What to tell trackers, if not the same.", metavar="HOST:PORT")
    ] = None,
    rack: Annotated[str, typer.Option("--rack", envvar="WIRESPEED_RACK", help="The switch this host is at.")] = "",
    rate: Annotated[
        str | None, typer.Option("--rate", help="At most so fast, in each direction.", metavar="RATE")
    ] = None,
    tracker: Annotated[
        list[str] | None, typer.Option("--tracker", help="May be repeated; may be dead.", metavar="HOST:PORT")
    ] = None,
    follow: Annotated[
        list[str] | None,
        typer.Option("--follow", help="Fetch what NAME@ALIAS points at whenever it moves.", metavar="NAME@ALIAS"),
    ] = None,
    every: Annotated[str, typer.Option("--every", help="How often to look where it points.")] = "10 s",
    certificate: CertificateOption = None,
    key: KeyOption = None,
    authority: AuthorityOption = None,
    insecure: InsecureOption = False,
    require_signature: SignatureOption = None,
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """Run this host's peer until SIGTERM: it fetches versions on order and serves them to its neighbours.

    It fills and serves the cache (WIRESPEED_CACHE) of the user that runs it. Without a repository it takes from peers
    only. Programs on this host find it by WIRESPEED_PEER.

    Examples:

      WIRESPEED_TOKEN=$(cat token) wirespeed repo peer --listen 0.0.0.0:7710 -r s3://bucket/models --rack r1

      wirespeed repo peer --listen 10.0.0.5:7710 --tracker head:7711 --follow llama@prod --rate 10gbit
    """
    from wirespeed.repo.cache import Cache
    from wirespeed.repo.names import parse_wanted
    from wirespeed.repo.signing import trusted_from
    from wirespeed.repo.swarm.follow import follow as run_follow
    from wirespeed.repo.swarm.peer import Peer

    is_named = repo is not None or bool(os.environ.get("WIRESPEED_REPO"))
    repository = open_repository(repo, signatures=require_signature) if is_named else None
    followed = [parse_wanted(text) for text in follow or []]
    if followed and repository is None:
        raise UsageError("got --follow without a repository", hint="name it with --repo, or set WIRESPEED_REPO")
    security = _security(certificate, key, authority, is_insecure=insecure)
    every_s = units.parse_duration(every)
    if every_s <= 0:
        raise UsageError(f"got --every {every!r}", expected="a time above zero")

    _stand_back()

    async def serve(stop: asyncio.Event) -> None:
        daemon = Peer(
            Cache() if repository is None else repository.cache, repository=repository, rack=rack, security=security,
            rate_bit_per_s=None if rate is None else units.parse_rate(rate), trackers=tuple(tracker or ()),
            advertise=advertise, on_news=say,
        )  # fmt: skip
        if require_signature:
            daemon.trusted = trusted_from(require_signature)
        await daemon.start(listen)
        tasks = [asyncio.create_task(run_follow(daemon, wanted, poll_s=every_s)) for wanted in followed]
        try:
            _say_open("peer", daemon.address, as_json=as_json)
            await stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            await daemon.close()

    _run_until_stopped(serve)
    return 0


def tracker(
    *,
    listen: Annotated[
        str, typer.Option("--listen", "-l", help="Where peers reach it; beyond loopback WIRESPEED_TOKEN is needed.")
    ] = f"127.0.0.1:{TRACKER_PORT}",
    certificate: CertificateOption = None,
    key: KeyOption = None,
    authority: AuthorityOption = None,
    insecure: InsecureOption = False,
    as_json: JsonOption = False,
) -> int:
    """Run a tracker until SIGTERM: it knows which peers are there and which versions they have.

    It keeps nothing on disk and may be restarted at any time: peers tell it again within a second.

    Example:

      WIRESPEED_TOKEN=$(cat token) wirespeed repo tracker --listen 0.0.0.0:7711
    """
    from wirespeed.repo.swarm.tracker import Tracker

    security = _security(certificate, key, authority, is_insecure=insecure)

    async def serve(stop: asyncio.Event) -> None:
        server = Tracker(security=security)
        await server.start(listen)
        try:
            _say_open("tracker", server.address, as_json=as_json)
            await stop.wait()
        finally:
            await server.close()

    _run_until_stopped(serve)
    return 0


def _stand_back() -> None:
    """Interrupt nobody: fewer switches between peer and programs, and between its own threads.

    SCHED_BATCH was measured to make 12 % fewer switches: four peers on two cores, the same bytes.
    """
    # What was imported lives as long as the peer: looking at it again and again took 2 % of its time.
    gc.collect()
    gc.freeze()
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _say_open(kind: str, address: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"schema": 1, "kind": kind, "address": address, "pid": os.getpid()})
    else:
        show(f"{kind} at {address}")
        sys.stdout.flush()


def _run_until_stopped(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    from wirespeed import wire

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, stop.set)
        await serve(stop)

    wire.run(main())
