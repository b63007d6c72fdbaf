"""`wirespeed fabric`: turn records into a fabric.toml, and show one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from wirespeed import units
from wirespeed.cli import fabric_shapes
from wirespeed.cli.render import make_table, print_json, say, show
from wirespeed.errors import DataError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from wirespeed.fabric.topology import Curve, Fabric, Figure

app = typer.Typer(
    help="The network as data: from measurements, from one line, from other tools. `plan` and `tune` predict from it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

app.command("new")(fabric_shapes.new)
app.command("import")(fabric_shapes.import_fabric)
app.command("nics")(fabric_shapes.nics)
app.command("cost")(fabric_shapes.cost)
app.command("extend")(fabric_shapes.extend_fabric)

BAD_RESIDUAL = 0.2
MAX_ROWS = 40
"""Hosts up to which each gets a row unasked."""
_JSON = typer.Option("--json", help="One JSON document on stdout.")


@app.command("calibrate")
def calibrate(
    records: Annotated[
        list[Path], typer.Argument(help="Records of `wirespeed bench`, in any order.", metavar="RECORD...")
    ],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the fabric goes.", metavar="FILE")],
    name: Annotated[str | None, typer.Option("--name", help="What to call it; default the file's name.")] = None,
    cpus_per_host: Annotated[
        float | None, typer.Option("--cpus-per-host", help="Cores a host can count on, where hosts share a machine.")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Fit size-dependent curves to records of links, collectives and codecs.

    A curve passes through the medians, never falls with size, and is never faster than the measured link: how far it
    had to leave the medians for that is shown as its residual. A large one means noise, so measure again.

    Examples:

      wirespeed fabric calibrate links.json collectives.json codecs.json -o fabric.toml

      wirespeed fabric calibrate run1/*.json run2/*.json -o fabric.toml --name cluster-a
    """
    from wirespeed.fabric.calibrate import calibrate as fit
    from wirespeed.fabric.files import write_fabric
    from wirespeed.records import CodecsRecord, CollectivesRecord, LinksRecord, read, read_kind

    links: list[LinksRecord] = []
    collectives: list[CollectivesRecord] = []
    codecs: list[CodecsRecord] = []
    for path in records:
        match read_kind(path):
            case "links":
                links.append(read(path, LinksRecord))
            case "collectives":
                collectives.append(read(path, CollectivesRecord))
            case "codecs":
                codecs.append(read(path, CodecsRecord))
            case other:
                raise DataError(f"{path} is a record of kind {other!r}", expected="links, collectives or codecs")
    if len(links) > 1:
        raise DataError(f"got {len(links)} records of links", expected="one", hint="name the best one only")
    fabric = fit(
        links[0] if links else None,
        collectives,
        codecs,
        name=out.stem if name is None else name,
        cpus_per_host=cpus_per_host,
    )
    say(f"wrote {write_fabric(out, fabric)}")
    _print(fabric, as_json=as_json)
    return 0


@app.command("show")
def show_fabric(
    fabric: Annotated[
        str, typer.Argument(help="A fabric.toml, or one line that describes a fabric.", metavar="FABRIC")
    ],
    *,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with a drawing.", metavar="FILE")] = None,
    all_hosts: Annotated[bool, typer.Option("--all", help="A row for every host, however many.")] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Draw a fabric, and show its hosts, links and curves and where each number comes from.

    Examples:

      wirespeed fabric show fabric.toml

      wirespeed fabric show "fat-tree hosts=64 nic=400g-ib oversubscription=2"

      wirespeed fabric show "rail hosts=128 nics=8 nic=400g-roce island=nvlink4" --html fabric.html
    """
    from wirespeed.fabric.words import load_fabric

    held = load_fabric(fabric)
    if html is not None:
        from wirespeed.fabric.picture import fabric_page
        from wirespeed.records import write_bytes

        say(f"wrote {write_bytes(html, fabric_page(held, _facts(held)).encode())}")
    if as_json:
        print_json(held)
        return 0
    show(_tree(held))
    for name, value in _facts(held):
        show(Text(f"{name}: {value}"))
    _print(held, as_json=False, all_hosts=all_hosts)
    return 0


def _tree(fabric: Fabric) -> RenderableType:
    from rich.tree import Tree

    from wirespeed.fabric.drawing import Branch, draw

    def label(branch: Branch) -> Text:
        return Text.assemble((branch.title, "bold"), f"  {branch.detail}" if branch.detail else "")

    def grow(tree: Tree, branch: Branch) -> None:
        for child in branch.children:
            grow(tree.add(label(child)), child)

    root = draw(fabric)
    tree = Tree(label(root))
    grow(tree, root)
    return tree


def _facts(fabric: Fabric) -> list[tuple[str, str]]:
    """What a drawing cannot show: counts, bisection, prices, and the source of each assumed or declared figure."""
    facts = [("hosts", f"{len(fabric.hosts)}, devices: {sum(host.num_devices for host in fabric.hosts)}")]
    prices = [host.price for host in fabric.hosts]
    known = [price for price in prices if price is not None]
    if known and len(known) == len(prices):
        facts.append(("price", f"{sum(known):,.0f} {fabric.currency} (assumed unless you gave it)"))
    figures = {host.rate_bit_per_s for host in fabric.hosts if host.rate_bit_per_s is not None}
    facts += [
        ("NIC", f"{units.format_rate(figure.value)} {figure.origin}{_source(figure.source)}")
        for figure in sorted(figures, key=lambda f: (-f.value, f.source))
    ]
    for transport in fabric.transports:
        latency = transport.latency_s
        text = f"latency {units.format_duration(latency.value)} {latency.origin}{_source(latency.source)}"
        facts.append((f"transport {transport.name}", text))
        if transport.flow_bit_per_s is not None:
            flow = transport.flow_bit_per_s
            text = f"{units.format_rate(flow.value)} per stream, {transport.streams} of them{_source(flow.source)}"
            facts.append((f"transport {transport.name}", text))
    for island in fabric.islands:
        rate = island.rate_bit_per_s
        text = f"{units.format_rate(rate.value)} {rate.origin}{_source(rate.source)}"
        facts.append((f"island {island.name}", text))
    return facts


def _source(text: str) -> str:
    return f": {text}" if text else ""


def _print(fabric: Fabric, *, as_json: bool, all_hosts: bool = True) -> None:
    if as_json:
        print_json(fabric)
        return
    if all_hosts or len(fabric.hosts) <= MAX_ROWS:
        _print_hosts(fabric)
    else:
        show(f"{len(fabric.hosts)} hosts: --all lists them")
    _print_rest(fabric)


def _print_hosts(fabric: Fabric) -> None:
    show(
        make_table(
            ["host", "rack<", "kind<", "cpus", "goodput", "origin<"],
            [
                [
                    host.name,
                    host.rack,
                    host.kind,
                    "unknown" if host.cpus is None else f"{host.cpus:g}",
                    *_figure(host.rate_bit_per_s, units.format_rate),
                ]
                for host in fabric.hosts
            ],
            title=f"Fabric {fabric.name}",
        )
    )


def _print_rest(fabric: Fabric) -> None:
    rtt, origin = _figure(fabric.rtt_s, units.format_duration)
    if fabric.rtt_s is not None:
        show(f"round trip: {rtt} ({origin})")
    elif not fabric.transports:
        show("round trip: unknown")
    if fabric.uplinks:
        rows = [[u.rack, *_figure(u.rate_bit_per_s, units.format_rate)] for u in fabric.uplinks]
        show(make_table(["uplink of rack", "goodput", "origin<"], rows))
    if fabric.collectives:
        show(_collectives_table(fabric))
    if fabric.codecs:
        rows = [[c.codec, c.stage, c.kind, str(c.num_ranks), *_curve_cells(c.curve), c.origin] for c in fabric.codecs]
        show(make_table(["codec", "stage<", "kind<", "ranks", *_CURVE_HEADINGS, "rate at largest", "origin<"], rows))
    for label, curve in [
        *((f"{c.collective} {c.dtype} over {c.num_ranks} ranks", c.curve) for c in fabric.collectives),
        *((f"{c.codec} {c.stage}", c.curve) for c in fabric.codecs),
    ]:
        if curve.residual > BAD_RESIDUAL:
            show(f"noisy: {label} leaves its medians by {units.format_percent(curve.residual)}; measure it again")


_CURVE_HEADINGS = ["sizes<", "at smallest", "at largest", "residual"]


def _collectives_table(fabric: Fabric) -> Table:
    from wirespeed.fabric.collectives import busbw_bit_per_s

    rows = []
    for c in fabric.collectives:
        cells = _curve_cells(c.curve)
        busbw = busbw_bit_per_s(c.collective, c.curve.sizes_bytes[-1], c.num_ranks, c.curve.times_s[-1])
        layout = f"{c.num_ranks} ({c.ranks_per_host} per host)"
        cores = "compute" if c.beside_compute else "idle"
        rows.append([c.collective, c.dtype, c.backend, layout, cores, *cells[:-1], units.format_rate(busbw), c.origin])
    headings = ["collective", "type<", "backend<", "ranks", "cores<", *_CURVE_HEADINGS, "busbw at largest", "origin<"]
    return make_table(headings, rows)


def _curve_cells(curve: Curve) -> list[str]:
    first, last = curve.sizes_bytes[0], curve.sizes_bytes[-1]
    return [
        f"{units.format_size(first)} to {units.format_size(last)}",
        units.format_duration(curve.times_s[0]),
        units.format_duration(curve.times_s[-1]),
        units.format_percent(curve.residual),
        units.format_rate(8 * last / curve.times_s[-1]),
    ]


def _figure(figure: Figure | None, write: object) -> tuple[str, str]:
    if figure is None:
        return "unknown", "-"
    assert callable(write)
    return write(figure.value), figure.origin
