"""`wirespeed plan collective`: how long one collective takes on a fabric, with the ranks on named hosts."""

from __future__ import annotations

from typing import Annotated

import typer

from wirespeed.units import format_duration, format_percent, format_rate, format_size, parse_size


def register(app: typer.Typer) -> None:
    """Add the command to `wirespeed plan`."""
    app.command("collective")(predict_one)


def predict_one(
    operation: Annotated[
        str,
        typer.Argument(
            help="all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, scatter, reduce, gather or send.",
            metavar="OPERATION",
        ),
    ],
    *,
    sizes: Annotated[str, typer.Option("--bytes", "-b", help="Sizes by commas, such as 1MiB,16MiB.")],
    fabric: Annotated[str, typer.Option("--fabric", "-f", help="fabric.toml, or one line of words.", metavar="FABRIC")],
    order: Annotated[
        str | None, typer.Option("--order", help="Hosts in the order of ranks, by commas; default rack by rack.")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", help="How many take part; default all.")] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option("--ranks-per-host", help="Default one per device, with --order one.")
    ] = None,
    algorithm: Annotated[str, typer.Option("--algorithm", help="auto, or one by name, such as ring.")] = "auto",
    backend: Annotated[str, typer.Option("--backend", help="Whose algorithms: gloo, nccl or any.")] = "any",
    dtype: Annotated[str, typer.Option("--dtype", help="Of the elements summed.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Predict one collective: its time, the link or the cores that bind it, and what no algorithm could beat.

    Sizes follow nccl-tests: the buffer of all_reduce and broadcast, the whole output of all_gather, the whole input of
    reduce_scatter, the whole send buffer of all_to_all, the root's of scatter. Measured curves of the fabric are used
    as they stand where the layout is the one measured, and are carried over where it is not; the last column says so.

    Examples:

      wirespeed plan collective all_reduce --bytes 16MiB --fabric "tree hosts=8 rack=4 nic=25g oversubscription=4"

      wirespeed plan collective all_reduce --bytes 16MiB --fabric fabric.toml --order h0,h4,h1,h5 --backend gloo
    """
    import msgspec

    from wirespeed.cli.render import make_table, print_json, show
    from wirespeed.fabric.words import load_fabric
    from wirespeed.plan.collective import predict_collective

    network = load_fabric(fabric)
    found = [
        predict_collective(
            network,
            operation,
            parse_size(size),
            order=None if order is None else [name.strip() for name in order.split(",")],
            num_ranks=ranks,
            ranks_per_host=ranks_per_host,
            algorithm=algorithm,
            backend=backend,
            dtype=dtype,
        )
        for size in sizes.split(",")
    ]
    if as_json:
        document = {"schema": 1, "kind": "collective", "fabric": network.name}
        print_json({**document, "predictions": msgspec.to_builtins(found)})
        return
    rows = [
        [
            format_size(one.size_bytes),
            format_duration(one.seconds),
            "-" if one.busbw_bit_per_s is None else format_rate(one.busbw_bit_per_s),
            format_duration(one.lower_bound_s),
            one.algorithm,
            one.binding,
            f"{one.origin}, {'in' if one.is_in_range else 'not in'} range, +-{format_percent(one.uncertainty)}",
        ]
        for one in found
    ]
    headings = ["size", "time", "busbw", "bound", "algorithm<", "binds<", "from<"]
    show(make_table(headings, rows, title=f"{operation} over {found[0].num_ranks} ranks on {network.name or 'fabric'}"))
