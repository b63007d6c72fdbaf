"""`wirespeed fabric new`, `import`, `nics` and `cost`: fabrics that nobody measured yet, and quick questions to one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wirespeed import units
from wirespeed.cli.render import make_table, print_json, say, show
from wirespeed.errors import DataError, UsageError

if TYPE_CHECKING:
    from wirespeed.fabric.topology import Fabric

_JSON = typer.Option("--json", help="One JSON document on stdout.")
_OUT = typer.Option("--out", "-o", help="Where the fabric.toml goes.", metavar="FILE")
SOURCES = ("slurm", "nccl", "nvidia-smi", "kubernetes")
MAX_IMPORT_BYTES = 64 * units.MIB


def new(
    line: Annotated[str, typer.Argument(help="The fabric in one line.", metavar="LINE")],
    *,
    out: Annotated[Path, _OUT],
) -> int:
    """Write the fabric of one line as a fabric.toml, to be edited.

    Shapes: star, tree, fat-tree, leaf-spine, rail, dragonfly; then key=value: hosts, nic (1g .. 400g, 25g-roce ..
    400g-roce, 100g-ib .. 800g-ib; mixed: 8x400g-ib+56x100g), nics, devices, island (nvlink2 .. nvlink5, pcie3 ..
    pcie5), oversubscription, rate, latency, streams, window, price, spread. A wrong key names all keys of its shape.

    Examples:

      wirespeed fabric new "fat-tree hosts=64 nic=400g-ib oversubscription=2" -o fabric.toml

      wirespeed fabric new "tree nic=8x400g-ib+56x100g rack=16 oversubscription=4" -o mixed.toml
    """
    from wirespeed.fabric.files import write_fabric
    from wirespeed.fabric.words import parse_words

    say(f"wrote {write_fabric(out, parse_words(line))}")
    return 0


def import_fabric(
    source: Annotated[str, typer.Argument(help="slurm, nccl, nvidia-smi or kubernetes.", metavar="SOURCE")],
    path: Annotated[Path, typer.Argument(help="What the other tool wrote.", metavar="FILE")],
    *,
    out: Annotated[Path, _OUT],
    host: Annotated[
        str | None, typer.Option("--host", help="The hosts, such as: nic=400g-ib nics=8 island=nvlink4.")
    ] = None,
    uplink: Annotated[
        str | None, typer.Option("--uplink", help="Rate of every switch's uplink; else never binds.")
    ] = None,
    level: Annotated[
        list[str] | None, typer.Option("--level", help="Node labels, from the node's switch upwards (kubernetes).")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="The network around such hosts, in one line (nccl, nvidia-smi).")
    ] = None,
) -> int:
    """Make a fabric from what another tool knows.

    slurm: topology.conf. kubernetes: `kubectl get nodes -o json`. Both tell which host is at which switch, and no
    rates: name the hosts with --host and the uplinks with --uplink, or measure them. nccl: a file of
    NCCL_TOPO_DUMP_FILE. nvidia-smi: what `nvidia-smi topo -m` prints. Both tell a host's inside: --shape says how many
    of them, and the network.

    Examples:

      wirespeed fabric import slurm /etc/slurm/topology.conf --host "nic=200g-ib" --uplink 1600Gbit/s -o fabric.toml

      wirespeed fabric import nccl topo.xml --shape "rail hosts=64 nic=400g-ib" -o fabric.toml

      wirespeed fabric import kubernetes nodes.json --host "nic=100g-roce" -o fabric.toml
    """
    from wirespeed.fabric.files import write_fabric

    if source not in SOURCES:
        raise UsageError(f"got the source {source!r}", expected=", ".join(SOURCES))
    text = _read(path)
    fabric = _inside(source, text, path, shape) if source in ("nccl", "nvidia-smi") else _outside(
        source, text, path, host=host, uplink=uplink, levels=level or []
    )  # fmt: skip
    say(f"wrote {write_fabric(out, fabric)}")
    return 0


def _inside(source: str, text: str, path: Path, shape: str | None) -> Fabric:
    from wirespeed.fabric.imports.nccl_xml import read_nccl_xml
    from wirespeed.fabric.imports.nvidia_smi import read_nvidia_smi
    from wirespeed.fabric.words import parse_words

    found = (read_nccl_xml if source == "nccl" else read_nvidia_smi)(text, source=str(path))
    island = "nothing" if found.island is None else found.island.name
    say(f"found {found.num_devices} devices on {island}, {found.num_nics} NICs")
    if found.nic_line_bit_per_s is not None:
        say(f"the NICs' line rate is {units.format_rate(found.nic_line_bit_per_s)}; goodput is less")
    for note in found.notes:
        say(f"note: {note}")
    if shape is None:
        raise UsageError(
            f"{path} tells the inside of a host and not the network", expected="--shape",
            hint='for example --shape "rail hosts=64 nic=400g-ib"',
        )  # fmt: skip
    return parse_words(shape, inside=found)


def _outside(source: str, text: str, path: Path, *, host: str | None, uplink: str | None, levels: list[str]) -> Fabric:
    from wirespeed.fabric.imports.kubernetes import read_nodes
    from wirespeed.fabric.imports.slurm import read_topology_conf
    from wirespeed.fabric.topology import Figure
    from wirespeed.fabric.words import parse_host
    from wirespeed.launch.hostlist import expand_hostlist

    kind = None if host is None else parse_host(host)
    rate = None if uplink is None else Figure(value=units.parse_rate(uplink), origin="declared")
    if kind is None:
        say("note: no --host, so the rates of the hosts stay unknown")
    if source == "slurm":
        return read_topology_conf(text, expand_hostlist, kind=kind, uplink=rate, source=str(path))
    return read_nodes(text, levels=levels, kind=kind, uplink=rate, source=str(path))


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_IMPORT_BYTES:
            raise DataError(f"{path} is over {units.format_size(MAX_IMPORT_BYTES)}", expected="a smaller file")
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as fault:
        raise DataError(f"cannot read {path}: {fault}") from fault


def extend_fabric(
    fabric: Annotated[Path, typer.Argument(help="A fabric.toml that was calibrated.", metavar="FABRIC")],
    *,
    out: Annotated[Path, _OUT],
    hosts: Annotated[int, typer.Option("--hosts", "-n", min=1, help="How many hosts.")],
    rate: Annotated[str | None, typer.Option("--rate", "-r", help="Of each NIC; default as measured.")] = None,
    racks: Annotated[int, typer.Option("--racks", min=1, help="How many racks share them.")] = 1,
    uplink: Annotated[str | None, typer.Option("--uplink", help="Of each rack; default does not bind.")] = None,
    measured_line: Annotated[
        str | None,
        typer.Option("--measured-line", help="Line rate of the measured hosts; then the others are line rates too."),
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option("--also", help="Another fabric.toml, measured at another rate.", metavar="FABRIC"),
    ] = None,
) -> int:
    """Carry what was measured on a few hosts to more hosts, other rates or several racks, before they are bought.

    The curves of collectives and codecs and their cost to the cores are kept; rates and uplinks are declared. `plan`
    carries the curves over and marks what it says as assumed. Without --measured-line rates are goodput: what a TCP
    stream delivers.

    Examples:

      wirespeed fabric extend four-hosts.toml --hosts 32 --racks 4 --uplink 100gbit -o planned.toml

      wirespeed fabric extend lab.toml --hosts 8 --rate 1gbit --measured-line 250mbit -o faster.toml
    """
    from wirespeed.fabric.extension import extend
    from wirespeed.fabric.files import read_fabric, write_fabric

    def parse(text: str | None) -> float | None:
        return None if text is None else units.parse_rate(text)

    held = extend(
        read_fabric(fabric),
        num_hosts=hosts,
        rate_bit_per_s=parse(rate),
        measured_line_bit_per_s=parse(measured_line),
        num_racks=racks,
        uplink_bit_per_s=parse(uplink),
        name=out.stem,
        others=[read_fabric(path) for path in also or ()],
    )
    say(f"wrote {write_fabric(out, held)}")
    return 0


def nics(
    *,
    size: Annotated[str, typer.Option("--size", help="Of the message.")] = "128 MB",
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """The NICs that one-line fabrics know: what each carries, its latency, the time of a message, and the sources.

    Examples:

      wirespeed fabric nics

      wirespeed fabric nics --size 4KiB --json
    """
    from wirespeed.fabric.presets import CURRENCY, NICS, transfer_table

    size_bytes = units.parse_size(size)
    rows = transfer_table(size_bytes, tuple(NICS))
    if as_json:
        entries: list[dict[str, Any]] = [
            {
                "nic": r.nic, "bit_per_s": 8 * r.bytes_per_s, "latency_s": r.latency_s, "seconds": r.seconds,
                "origin": NICS[r.nic].rate.origin, "source": r.source, "price": NICS[r.nic].price,
            }
            for r in rows
        ]  # fmt: skip
        print_json(
            {"schema": 1, "kind": "nics", "size_bytes": units.parse_size(size), "currency": CURRENCY, "nics": entries}
        )
        return 0
    show(
        make_table(
            ["NIC", "carries", "latency", f"time of {size}", f"{CURRENCY} (assumed)", "origin<", "source<"],
            [
                [
                    r.nic, f"{r.bytes_per_s / 1e9:.3g} GB/s", units.format_duration(r.latency_s),
                    units.format_duration(r.seconds), f"{NICS[r.nic].price:g}", NICS[r.nic].rate.origin, r.source,
                ]
                for r in rows
            ],
        )
    )  # fmt: skip
    return 0


def cost(
    operation: Annotated[str, typer.Argument(help="all_reduce, all_to_all, broadcast, scatter, ...")],
    sizes: Annotated[list[str], typer.Argument(help="Sizes, such as 1MiB 128MiB.", metavar="SIZE...")],
    *,
    fabric: Annotated[str, typer.Option("--fabric", "-f", help="A fabric.toml, or one line.", metavar="FABRIC")],
    ranks: Annotated[int | None, typer.Option("--ranks", help="Default: every device.")] = None,
    order: Annotated[str, typer.Option("--order", help="racks, listed, round_robin or shuffled.")] = "racks",
    algorithm: Annotated[str, typer.Option("--algorithm", help="auto, ring, tree, ...")] = "auto",
    backend: Annotated[str, typer.Option("--backend", help="gloo, nccl or any.")] = "any",
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """How long one collective takes on a fabric, which link binds it, and what no algorithm could beat.

    Examples:

      wirespeed fabric cost all_reduce 1MiB 128MiB --fabric "fat-tree hosts=64 nic=400g-ib oversubscription=2"

      wirespeed fabric cost all_reduce 128MiB --fabric fabric.toml --order shuffled --backend gloo
    """
    from typing import cast, get_args

    from wirespeed.fabric.patterns import Operation
    from wirespeed.fabric.placement import Order, place
    from wirespeed.fabric.timing import prepare
    from wirespeed.fabric.words import load_fabric

    if order not in get_args(Order):
        raise UsageError(f"got the order {order!r}", expected=", ".join(get_args(Order)))
    held = load_fabric(fabric)
    placement = place(held, ranks, order=cast(Order, order))
    model = prepare(held, cast(Operation, operation), placement, algorithm=algorithm, backend=backend)
    found = [(units.parse_size(size), model.cost(units.parse_size(size))) for size in sizes]
    if as_json:
        import msgspec

        costs = [{"size_bytes": size, **msgspec.to_builtins(one)} for size, one in found]
        document: dict[str, object] = {"schema": 1, "kind": "collective_cost", "operation": operation}
        print_json({**document, "num_ranks": placement.num_ranks, "costs": costs})
        return 0
    rows = [
        [
            units.format_size(size), units.format_duration(one.seconds), units.format_duration(one.lower_bound_s),
            one.algorithm, one.binding, units.format_rate(8 * size / one.seconds) if one.seconds else "-",
            f"{one.origin}{'' if one.is_in_range else ', not calibrated'}, ± {units.format_percent(one.uncertainty)}",
        ]
        for size, one in found
    ]  # fmt: skip
    title = f"{operation} over {placement.num_ranks} ranks of {held.name}"
    show(
        make_table(["size", "time", "no less than", "algorithm<", "binding<", "algbw", "how sure<"], rows, title=title)
    )
    return 0
