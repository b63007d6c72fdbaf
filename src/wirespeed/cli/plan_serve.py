"""`wirespeed plan infer` and `wirespeed plan distribute`: serving, batch jobs and fan-out, before running them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from wirespeed.errors import UsageError
from wirespeed.units import format_duration, format_percent, format_rate, format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from wirespeed.fabric.topology import Fabric

_FABRIC = typer.Option("--fabric", "-f", help="fabric.toml, or one line of words.", metavar="FABRIC")
_JSON = typer.Option("--json", help="One JSON document on stdout.")


def register(app: typer.Typer) -> None:
    """Add the commands to `wirespeed plan`."""
    app.command("infer")(infer)
    app.command("distribute")(distribute)


def infer(
    *,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A transformer of the catalogue.")] = None,
    fabric: Annotated[str, _FABRIC],
    device: Annotated[str, typer.Option("--device", "-d", help="Accelerator, such as h100.")] = "a100",
    batch: Annotated[int, typer.Option("--batch", help="Sequences, or requests, together.")] = 8,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of a prompt.")] = 1024,
    answer: Annotated[int, typer.Option("--answer", help="Tokens of an answer.")] = 256,
    dtype: Annotated[str, typer.Option("--dtype", help="Of weights and arithmetic.")] = "bf16",
    items: Annotated[int | None, typer.Option("--items", help="A batch job: how many items to scatter.")] = None,
    item_bytes: Annotated[str, typer.Option("--item-bytes", help="Of one item or request.")] = "100 KB",
    result_bytes: Annotated[str, typer.Option("--result-bytes", help="Of one result.")] = "2 KB",
    item_time: Annotated[str, typer.Option("--item-time", help="Compute of one item on a host.")] = "2 ms",
    batch_time: Annotated[str, typer.Option("--batch-time", help="Fixed time of one batch on a host.")] = "0 ms",
    rate: Annotated[float | None, typer.Option("--rate", help="Requests per second that arrive.")] = None,
    clients: Annotated[int | None, typer.Option("--clients", help="Clients that wait for each answer.")] = None,
    max_wait: Annotated[str, typer.Option("--max-wait", help="How long a short batch waits.")] = "0 ms",
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Predict inference: a language model over several devices, a scattered batch job, or a queue with batching.

    With --model every split over tensor and pipeline parallel that fits is shown: time to first token, time per token,
    tokens per second. With --items a job is scattered from the first host, computed and gathered, as collectives do it
    and overlapped in chunks. With --rate or --clients requests queue for all hosts with dynamic batching.

    Examples:

      wirespeed plan infer --model llama3-70b --fabric "star hosts=2 nic=400g-ib nics=8 island=nvlink4" -d h100

      wirespeed plan infer --items 1000 --item-bytes "100 KB" --item-time "2 ms" --fabric "star hosts=5 nic=1g"

      wirespeed plan infer --rate 3000 --batch 32 --batch-time "5 ms" --item-time "0.1 ms" -f "star hosts=4 nic=10g"
    """
    from wirespeed.fabric.words import load_fabric

    network = load_fabric(fabric)
    kinds = [model is not None, items is not None, rate is not None or clients is not None]
    if sum(kinds) != 1:
        raise UsageError(
            "got none or several of --model, --items and --rate/--clients", expected="one kind of inference"
        )
    if model is not None:
        _serve_model(network, model, device, batch, prompt, answer, dtype, as_json=as_json)
    elif items is not None:
        sizes = parse_size(item_bytes), parse_size(result_bytes)
        _scatter(network, items, sizes, parse_duration(item_time), parse_duration(batch_time), as_json=as_json)
    else:
        times = parse_duration(batch_time), parse_duration(item_time), parse_duration(max_wait)
        sizes = parse_size(item_bytes), parse_size(result_bytes)
        _queue(network, batch, times, sizes, rate, clients, as_json=as_json)


def _serve_model(
    network: Fabric,
    model: str,
    device: str,
    batch: int,
    prompt: int,
    answer: int,
    dtype: str,
    *,
    as_json: bool,
) -> None:
    from wirespeed.cli.render import make_table, print_json, say, show
    from wirespeed.plan.serving import search_serving

    found = search_serving(model, network, device=device, batch=batch, prompt=prompt, answer=answer, dtype=dtype)
    if as_json:
        print_json({"schema": 1, "kind": "serving_plan", **msgspec.to_builtins(found)})
        return
    rows = [
        [
            "*" if one is found.chosen else "",
            f"tp{one.serving.tensor} pp{one.serving.pipeline}",
            str(one.replicas),
            format_duration(one.prediction.first_token_s),
            format_duration(one.prediction.token_s),
            f"{one.tokens_per_s:,.0f}",
            str(one.prediction.max_batch),
            format_size(one.prediction.memory_bytes),
            one.prediction.binding,
            one.prediction.binding_link or "-",
        ]
        for one in found.options
    ]
    headings = ["", "split<", "replicas", "first token", "per token", "tokens/s, all", "most sequences", "memory"]
    show(make_table([*headings, "binding<", "busiest link<"], rows))
    print(found.reason)
    say("outside the calibrated range: device times come from a roofline (± 15 %); measure one replica before buying")


def _scatter(
    network: Fabric, items: int, sizes: tuple[int, int], item_s: float, fixed_s: float, *, as_json: bool
) -> None:
    from wirespeed.cli.render import make_table, print_json, show
    from wirespeed.plan.serving import scatter_options

    found = scatter_options(network, items, sizes[0], sizes[1], item_s, fixed_s)
    if as_json:
        document: dict[str, Any] = {"schema": 1, "kind": "scatter_plan"}
        print_json({**document, "options": {name: msgspec.to_builtins(one) for name, one in found.items()}})
        return
    rows = [
        [
            name,
            format_duration(one.total_s),
            f"{one.throughput_per_s:,.0f}",
            str(one.chunk_items),
            format_duration(one.lower_bound_s),
            one.binding,
            ", ".join(f"{part} {format_duration(seconds)}" for part, seconds in one.parts_s.items()),
        ]
        for name, one in found.items()
    ]
    show(make_table(["how<", "total", "items/s", "chunk", "lower bound", "binding<", "root's clock<"], rows))
    best = min(found, key=lambda name: found[name].total_s)
    first = next(iter(found.values())).total_s
    print(f"use {best}: {format_percent(1 - found[best].total_s / first)} less than {next(iter(found))}")


def _queue(
    network: Fabric,
    batch: int,
    times: tuple[float, float, float],
    sizes: tuple[int, int],
    rate: float | None,
    clients: int | None,
    *,
    as_json: bool,
) -> None:
    from wirespeed.cli.render import make_table, print_json, show
    from wirespeed.plan.serving import queue_options

    found = queue_options(network, batch, times, sizes, rate, clients)
    if as_json:
        document: dict[str, Any] = {"schema": 1, "kind": "queue_plan"}
        print_json({**document, "options": {str(size): msgspec.to_builtins(one) for size, one in found.items()}})
        return
    rows = [
        [
            str(size),
            f"{one.throughput_per_s:,.0f}",
            f"{one.capacity_per_s:,.0f}",
            format_percent(one.utilization),
            f"{one.mean_batch:.1f}",
            "grows" if one.p50_s is None else format_duration(one.p50_s),
            "grows" if one.p99_s is None else format_duration(one.p99_s),
        ]
        for size, one in found.items()
    ]
    show(make_table(["largest batch", "requests/s", "capacity", "busy", "mean batch", "p50", "p99"], rows))
    stable = {size: one for size, one in found.items() if one.p99_s is not None}
    if not stable:
        most = max(one.capacity_per_s for one in found.values())
        print(f"no batch serves this rate: the most is {most:,.0f} requests/s; add hosts or make the model faster")
        return
    best = min(stable, key=lambda size: stable[size].p99_s or 0.0)
    print(f"a largest batch of {best} gives the lowest p99, {format_duration(stable[best].p99_s or 0.0)}")


def distribute(
    *,
    size: Annotated[str | None, typer.Option("--size", help="Of the artifact, such as 140GB.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Weights of a model in 16 bits instead.")] = None,
    fabric: Annotated[str, _FABRIC],
    store: Annotated[str | None, typer.Option("--store", help="Rate of the store; default one host's NICs.")] = None,
    disk: Annotated[
        str | None, typer.Option("--disk", help="Rate at which a host can write; default no limit.")
    ] = None,
    chunk: Annotated[
        str, typer.Option("--chunk", help="Bytes that are passed on as soon as they are there.")
    ] = "16 MiB",
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Predict how long an artifact takes to every host, by every scheme, and which link limits it.

    Examples:

      wirespeed plan distribute --size 140GB -f "tree hosts=64 rack=8 nic=100g oversubscription=4" --store 160Gbit/s

      wirespeed plan distribute --model llama3-70b --fabric fabric.toml --json
    """
    from wirespeed.cli.render import make_table, print_json, show
    from wirespeed.fabric.words import load_fabric
    from wirespeed.plan.serving import artifact_bytes, distribution_hosts
    from wirespeed.sim.distribution import WORDS, predict_all
    from wirespeed.units import parse_rate

    network = load_fabric(fabric)
    num_bytes = artifact_bytes(size, model)
    hosts = distribution_hosts(
        network,
        store_bit_per_s=None if store is None else parse_rate(store),
        disk_bit_per_s=None if disk is None else parse_rate(disk),
    )
    found = predict_all(num_bytes, hosts, chunk_bytes=parse_size(chunk))
    if as_json:
        print_json(
            {
                "schema": 1,
                "kind": "distribution_plan",
                "size_bytes": num_bytes,
                "schemes": [msgspec.to_builtins(one) for one in found],
            }
        )
        return
    bound_s = found[0].lower_bound_s
    rows = [
        [
            one.scheme,
            format_duration(one.total_s),
            f"{one.total_s / bound_s:.2f} x",
            one.binding,
            format_size(one.store_bytes),
            format_size(one.uplink_bytes),
            WORDS[one.scheme],
        ]
        for one in found
    ]
    show(make_table(["scheme<", "last host", "of the bound", "binding<", "from the store", "per uplink", "how<"], rows))
    rate = format_rate(8 * num_bytes / found[0].total_s)
    print(
        f"use {found[0].scheme}: {format_size(num_bytes)} on {len(hosts.nic_bytes_per_s)} hosts in "
        f"{format_duration(found[0].total_s)} ({rate} each); nothing is below {format_duration(bound_s)}"
    )
