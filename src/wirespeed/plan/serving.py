"""Inference and distribution on a fabric: its hosts, NICs and racks turned into what the simulator asks for.

A model is split over tensor and pipeline parallel in every way that fits; replicas fill the fabric. Batch jobs scatter
from the first host. Queues share all hosts. Artifacts leave a store that hangs on the spine.
"""

from __future__ import annotations

import msgspec

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.placement import place
from wirespeed.fabric.topology import Fabric
from wirespeed.plan.axes import FabricAxes
from wirespeed.plan.catalogue import find_model
from wirespeed.plan.devices import find_device
from wirespeed.sim.distribution import Hosts
from wirespeed.sim.inference import Serving, ServingPrediction, predict_serving
from wirespeed.sim.layout import Layout, divisors
from wirespeed.sim.queueing import QueuePrediction, Service, predict_queue
from wirespeed.sim.scatter import ScatterJob, ScatterPrediction, predict_scatter
from wirespeed.units import format_duration, parse_size

INCAST_SHARE = 0.9
"""Of the root's rate when all workers send to it at once over TCP: buffers overflow now and then."""


class ServingOption(msgspec.Struct, frozen=True, kw_only=True):
    """One split, and how many replicas of it the fabric holds."""

    serving: Serving
    prediction: ServingPrediction
    replicas: int
    tokens_per_s: float


class ServingSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Splits from the most tokens per second of the whole fabric."""

    options: tuple[ServingOption, ...]
    chosen: ServingOption
    reason: str


def search_serving(
    model: str,
    fabric: Fabric,
    *,
    device: str,
    batch: int,
    prompt: int,
    answer: int,
    dtype: str = "bf16",
) -> ServingSearch:
    """Every split of ``model`` that fits. Raises UsageError where none does, with the reason of the last one."""
    shape = find_model(model).transformer
    if shape is None or shape.vocab == 0:
        raise UsageError(
            f"got model {model!r}", expected="a language model", hint="use --items for batch jobs of others"
        )
    held = find_device(device)
    num_devices = sum(host.num_devices for host in fabric.hosts)
    per_host = fabric.hosts[0].num_devices
    options = []
    trouble: UsageError | None = None
    for tensor in (size for size in divisors(num_devices) if per_host % size == 0 or size % per_host == 0):
        for pipeline in (size for size in divisors(num_devices // tensor) if shape.num_layers % size == 0):
            serving = Serving(
                tensor=tensor,
                pipeline=pipeline,
                batch=batch,
                prompt=prompt,
                answer=answer,
                dtype=dtype,
                cache_dtype=dtype,
            )
            layout = Layout(tensor=tensor, pipeline=pipeline, dtype=dtype)
            try:
                placed = place(fabric) if layout.num_ranks == num_devices else _first(fabric, layout.num_ranks)
                found = predict_serving(shape, held, serving, FabricAxes(fabric, placed, layout))
            except UsageError as fault:
                trouble = fault
                continue
            replicas = num_devices // layout.num_ranks
            options.append(
                ServingOption(
                    serving=serving,
                    prediction=found,
                    replicas=replicas,
                    tokens_per_s=replicas * found.tokens_per_s,
                )
            )
    if not options:
        assert trouble is not None
        raise trouble
    options.sort(key=lambda one: (-float(f"{one.tokens_per_s:.3g}"), one.prediction.token_s))
    chosen = options[0]
    fastest = min(options, key=lambda one: one.prediction.token_s)
    reason = (
        f"use tp{chosen.serving.tensor} pp{chosen.serving.pipeline}: {chosen.tokens_per_s:,.0f} tokens/s on "
        f"{num_devices} devices, {format_duration(chosen.prediction.token_s)} per token"
    )
    if fastest is not chosen:
        reason += (
            f"; tp{fastest.serving.tensor} pp{fastest.serving.pipeline} answers soonest, "
            f"{format_duration(fastest.prediction.token_s)} per token, at {fastest.tokens_per_s:,.0f} tokens/s"
        )
    return ServingSearch(options=tuple(options), chosen=chosen, reason=reason)


def _first(fabric: Fabric, num_ranks: int):  # type: ignore[no-untyped-def]
    """Placement of one replica: whole hosts, or a part of the first one."""
    from wirespeed.fabric.placement import Placement

    whole = place(fabric)
    return Placement(host=whole.host[:num_ranks].copy(), device=whole.device[:num_ranks].copy())


def scatter_options(  # noqa: PLR0917 - what the command was given
    fabric: Fabric, num_items: int, in_bytes: float, out_bytes: float, item_s: float, fixed_s: float
) -> dict[str, ScatterPrediction]:
    """A job from the first host, which computes nothing, to all others: as collectives do it, and in chunks."""
    rates = _nic_rates(fabric)
    if len(rates) < 2:
        raise UsageError("got a fabric of one host", expected="a root and at least one worker")
    job = ScatterJob(num_items=num_items, in_bytes=in_bytes, out_bytes=out_bytes, item_s=item_s, fixed_s=fixed_s)
    latency_s = _latency_s(fabric)
    share = INCAST_SHARE if len(rates) > 2 else 1.0
    return {
        "scatter, compute, gather": predict_scatter(
            job,
            root_bytes_per_s=rates[0],
            worker_bytes_per_s=rates[1:],
            latency_s=latency_s,
            gather_share=share,
            is_overlapped=False,
        ),
        "overlapped in chunks": predict_scatter(
            job,
            root_bytes_per_s=rates[0],
            worker_bytes_per_s=rates[1:],
            latency_s=latency_s,
            gather_share=share,
        ),
    }


def queue_options(  # noqa: PLR0917 - what the command was given
    fabric: Fabric,
    max_batch: int,
    times_s: tuple[float, float, float],
    sizes_bytes: tuple[int, int],
    arrivals_per_s: float | None,
    clients: int | None,
) -> dict[int, QueuePrediction]:
    """Queues with growing largest batches up to ``max_batch``. ``times_s``: of a batch, of an item, of the wait."""
    if max_batch < 1:
        raise UsageError(f"got a batch of {max_batch}", expected="1 or more")
    rates = _nic_rates(fabric)
    network_s = sum(sizes_bytes) / min(rates) + 2 * _latency_s(fabric)
    sizes = sorted({2**power for power in range(max_batch.bit_length()) if 2**power <= max_batch} | {max_batch})
    return {
        size: predict_queue(
            Service(
                fixed_s=times_s[0],
                per_item_s=times_s[1],
                max_batch=size,
                max_wait_s=times_s[2] if size > 1 else 0.0,
                replicas=len(rates),
                network_s=network_s,
            ),
            arrivals_per_s=arrivals_per_s,
            clients=clients,
        )
        for size in sizes
    }


def artifact_bytes(size: str | None, model: str | None) -> float:
    """Bytes of an artifact given by its size, or by a model whose weights have 16 bits."""
    if (size is None) == (model is None):
        raise UsageError("got both or neither of a size and a model", expected="one of them")
    if size is not None:
        return float(parse_size(size))
    assert model is not None
    return 2.0 * find_model(model).num_parameters


def distribution_hosts(
    fabric: Fabric, *, store_bit_per_s: float | None = None, disk_bit_per_s: float | None = None
) -> Hosts:
    """The fabric's hosts as ``sim.distribution`` takes them; a store without a rate has that of the fastest host."""
    rates = _nic_rates(fabric)
    uplinks = {uplink.rack: uplink.rate_bit_per_s.value / 8 for uplink in fabric.uplinks}
    racks = {host.rack for host in fabric.hosts}
    for switch in fabric.switches:
        if switch.name in racks and switch.parent is not None and switch.rate_bit_per_s is not None:
            uplinks[switch.name] = switch.rate_bit_per_s.value * switch.num_links / 8
    return Hosts(
        nic_bytes_per_s=rates,
        rack_of=tuple(host.rack for host in fabric.hosts),
        uplink_bytes_per_s=uplinks,
        store_bytes_per_s=max(rates) if store_bit_per_s is None else store_bit_per_s / 8,
        latency_s=_latency_s(fabric),
        disk_bytes_per_s=float("inf") if disk_bit_per_s is None else disk_bit_per_s / 8,
    )


def _nic_rates(fabric: Fabric) -> tuple[float, ...]:
    """Bytes per second of each host, all its NICs together."""
    found = []
    for host in fabric.hosts:
        if host.rate_bit_per_s is None:
            raise DataError(
                f"the fabric does not tell the rate of host {host.name!r}",
                expected="rate in [[hosts]]",
                hint="run `wirespeed bench links`, then `wirespeed fabric calibrate`",
            )
        found.append(host.rate_bit_per_s.value * host.num_nics / 8)
    return tuple(found)


def _latency_s(fabric: Fabric) -> float:
    if fabric.rtt_s is not None:
        return fabric.rtt_s.value / 2
    return max((transport.latency_s.value for transport in fabric.transports), default=0.0)
