"""``wirespeed lab``: a cluster of network namespaces on this machine, from the command line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, cast

import typer

from wirespeed import units
from wirespeed.cli.signals import terminable
from wirespeed.errors import UsageError, WirespeedError

if TYPE_CHECKING:
    from wirespeed.lab.cluster import Lab
    from wirespeed.lab.control import FaultKind, Status

app = typer.Typer(help="A cluster on this machine: hosts, racks and links of a chosen rate.", no_args_is_help=True)

_COMMAND = {"ignore_unknown_options": True, "allow_interspersed_args": False}
NameOption = Annotated[str | None, typer.Option("--name", "-n", help="The lab; not needed when one is up.")]
Command = Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")]


@app.command()
def up(
    spec: Annotated[
        str | None, typer.Argument(help="All in one word, such as 4x1gbit or 8x200mbit/2racks:100mbit+1ms.")
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="Number of hosts.")] = None,
    rate: Annotated[str | None, typer.Option(help='Each host\'s link, both ways: "1gbit".')] = None,
    racks: Annotated[int, typer.Option(help="Number of racks the hosts are spread over.")] = 1,
    uplink: Annotated[str | None, typer.Option(help="Each rack's link to the spine; default: not shaped.")] = None,
    delay: Annotated[str, typer.Option(help='Added once on each way from host to host: "1ms".')] = "0s",
    loss: Annotated[str, typer.Option(help='Chance that a frame is lost: "0.1%".')] = "0",
    first_dscp: Annotated[
        int | None, typer.Option("--first-dscp", help="Frames with this DSCP leave every link before others: 26.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="The lab's name; default: a unique one.")] = None,
) -> None:
    """Make a lab that stays until `lab down`."""
    from wirespeed.lab import Lab, LabSpec

    if spec is not None:
        if hosts is not None or rate is not None or first_dscp is not None:
            raise UsageError("got a spec and --hosts, --rate or --first-dscp", expected="one of the two")
        wanted = LabSpec.parse(spec)
        if name is not None:
            import msgspec

            wanted = msgspec.structs.replace(wanted, name=name)
    elif hosts is None or rate is None:
        raise UsageError(
            "got no --hosts or no --rate", expected="both, such as: wirespeed lab up --hosts 4 --rate 1gbit"
        )
    else:
        wanted = LabSpec(
            hosts=hosts,
            rate_bit_per_s=units.parse_rate(rate),
            racks=racks,
            uplink_bit_per_s=None if uplink is None else units.parse_rate(uplink),
            delay_s=units.parse_duration(delay),
            loss=units.parse_ratio(loss),
            first_dscp=first_dscp,
            name=name,
        )
    with terminable():
        lab = Lab(wanted, keep=True)
        lab.up()
    _print_status(lab.status())
    lab.close()
    print(f"Next: wirespeed lab run -n {lab.name} -- CMD; wirespeed lab down {lab.name}", file=sys.stderr)


@app.command(context_settings=_COMMAND)
def run(
    command: Command,
    name: NameOption = None,
    spec: Annotated[str | None, typer.Option("--spec", help="Make this lab for the run: 4x1gbit.")] = None,
    ranks_per_host: Annotated[int, typer.Option(help="Processes on each host.")] = 1,
    timeout: Annotated[str | None, typer.Option(help='End the run after this long (exit 124): "10m".')] = None,
    batch: Annotated[
        bool, typer.Option("--batch/--no-batch", help="Scheduling class SCHED_BATCH: small collectives 3x as fast.")
    ] = True,
) -> None:
    """Run one process per rank under RANK, WORLD_SIZE and so on; exit with the code of the first that fails."""
    with terminable(), _lab_for(name, spec) as lab:
        result = lab.run(
            command,
            ranks_per_host=ranks_per_host,
            sched_batch=batch,
            timeout_s=None if timeout is None else units.parse_duration(timeout),
        )
    if result.reason is not None:
        print(f"wirespeed lab: {result.reason}", file=sys.stderr)
    raise typer.Exit(result.returncode)


def _lab_for(name: str | None, spec: str | None) -> Lab:
    from wirespeed.lab import Lab, LabSpec

    if spec is None:
        return Lab.attach(name)
    if name is not None:
        raise UsageError("got --name and --spec", expected="a lab that is up, or one to make for this run")
    return Lab(LabSpec.parse(spec))


@app.command(name="exec", context_settings=_COMMAND)
def execute(
    host: Annotated[str, typer.Argument(help="The host: h0, h1 ...; or rack0 ... for its uplink.")],
    command: Command,
    name: NameOption = None,
) -> None:
    """Run a command in one host, on this terminal; exit with its code."""
    from wirespeed.lab import Lab

    with terminable(), Lab.attach(name) as lab:
        if command[0] == "--":  # click takes it off only where it comes before every argument
            command = command[1:]
        process = lab.popen(host, command, stdin=None, session=False)
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the terminal has sent it to the command too
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
    raise typer.Exit(code if code >= 0 else 128 - code)


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="Only this lab.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show labs, their hosts and the rates that the kernel reads back."""
    import msgspec

    from wirespeed.lab import Lab, stale_labs
    from wirespeed.lab.journal import list_labs

    names = [lab.name for lab in list_labs() if lab.is_alive] if name is None else [name]
    found = []
    for each in names:
        with Lab.attach(each) as lab:
            found.append(lab.status())
    stale = stale_labs()
    if as_json:
        document = {"labs": found, "stale": stale}
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    for one in found:
        _print_status(one)
    if not found:
        print("no lab is up", file=sys.stderr)
    if stale:
        print(f"left by labs that died: {', '.join(stale)}; wirespeed lab down --stale removes it", file=sys.stderr)


@app.command()
def fault(
    host: Annotated[str, typer.Argument(help="The host: h0, h1 ...; or rack0 ... for its uplink.")],
    kind: Annotated[str, typer.Argument(help="down, up, rate RATE, partition OTHER or heal.")],
    value: Annotated[str | None, typer.Argument(help="The rate, or the other host.")] = None,
    name: NameOption = None,
) -> None:
    """Break or mend a host's link: pull the cable, slow it, cut it off from another host."""
    from wirespeed.lab import Lab

    if kind not in ("down", "up", "rate", "partition", "heal"):
        raise UsageError(f"got fault {kind!r}", expected="down, up, rate RATE, partition OTHER or heal")
    if (value is None) == (kind in ("rate", "partition")):
        raise UsageError(f"got fault {kind!r} and {value!r}", expected="a value with rate and partition only")
    with Lab.attach(name) as lab:
        lab.fault(
            host,
            cast("FaultKind", kind),
            rate_bit_per_s=units.parse_rate(value) if kind == "rate" and value is not None else None,
            other=value if kind == "partition" else None,
        )


@app.command()
def down(
    name: Annotated[str | None, typer.Argument(help="The lab; not needed when one is up.")] = None,
    stale: Annotated[bool, typer.Option("--stale", help="Remove only what labs left that died.")] = False,
) -> None:
    """End a lab and everything that runs in it."""
    from wirespeed.lab import Lab, remove_stale

    if stale:
        if name is not None:
            raise UsageError("got a name and --stale", expected="one of the two")
        removed = remove_stale()
        print(f"removed {', '.join(removed)}" if removed else "nothing to remove", file=sys.stderr)
        return
    try:
        Lab.attach(name).down()
    except WirespeedError:
        # A dead lab asked for by name: its leftovers are what the user wants gone.
        if name is None or name not in remove_stale():
            raise


def _print_status(one: Status) -> None:
    from rich.console import Console
    from rich.table import Table

    spec = one.spec
    title = f"lab {one.name}: {spec.hosts} hosts at {units.format_rate(spec.rate_bit_per_s)}"
    if spec.racks > 1:
        uplink = "not shaped" if spec.uplink_bit_per_s is None else units.format_rate(spec.uplink_bit_per_s)
        title += f", {spec.racks} racks, uplinks {uplink}"
    if one.delay_by != "none":
        by = "netem" if one.delay_by == "netem" else "a line in user space"
        title += f", delay {units.format_duration(spec.delay_s)} and loss {units.format_percent(spec.loss)} by {by}"
    has_classes = spec.first_dscp is not None
    if has_classes:
        title += f", DSCP {spec.first_dscp} first"
    table = Table(title=title, title_justify="left")
    first = ("sent first", "sent after") if has_classes else ()
    for column in ("host", "rack", "address", "link", "sends", "receives", *first, "processes"):
        table.add_column(column)
    for host in one.hosts:
        link = "up" if host.is_up else "down"
        if host.partitioned_from:
            link += f", cut off from {', '.join(host.partitioned_from)}"
        rates = [
            "?" if rate is None else units.format_rate(rate) for rate in (host.sends_bit_per_s, host.receives_bit_per_s)
        ]
        sent = [] if host.sent_by_class is None else [units.format_size(num) for num in host.sent_by_class]
        table.add_row(host.name, str(host.rack), host.address, link, *rates, *sent, str(len(host.processes)))
    console = Console()
    console.print(table)
    for note in one.notes:
        console.print(f"note: {note}")
