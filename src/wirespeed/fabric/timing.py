"""How long a collective takes on a topology: phases laid on links, steps through transports, measured curves first.

``prepare`` finds, for groups of ranks that communicate at the same time, what the slowest link gives each phase of each
algorithm; the model it returns then costs a size in microseconds. Where the fabric holds a measured curve of the
collective it replaces the closed form: scaled by the model's own ratio of steps and of bytes at the binding link to the
layout that was measured (ranks rack by rack on the first hosts), and out of range unless both ratios are one. Assumes
that the library keeps the order of ranks that the placement states. Arithmetic on elements, and other traffic than the
groups named, are left out; ``share`` of the links stands for the latter.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.bounds import Bound, cut_bound
from wirespeed.fabric.calibrated import Calibrated, Measured, cores_of, find_curve, with_trend
from wirespeed.fabric.network import Floats, Ints, network_of
from wirespeed.fabric.patterns import Layout, Operation
from wirespeed.fabric.phases import Timed, time_phases
from wirespeed.fabric.placement import Groups, Placement, stack_groups
from wirespeed.fabric.relays import relay
from wirespeed.fabric.schedules import Algorithm, algorithms, merge, phases
from wirespeed.fabric.topology import Fabric
from wirespeed.spec.workload import Origin

CORES = "the hosts' cores"
"""What binds where the library's own work takes longer than the wire."""
CLOSED_FORM = 0.35
"""Mean error of one latency and bandwidth on the worse of two published NCCL sweeps; their worst point is at 0.65."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One collective of the slowest of its groups.

    ``latency_s``: what does not grow with bytes. ``lower_bound_s``: no algorithm is faster. ``binding``: the link that
    limits it, "latency", or the cores (``CORES``). ``wire_bytes``: the most that one host sends. ``uncertainty``:
    relative; a measured curve's residual inside its range, else what is known of such models in general. ``busy_s``:
    how long the link that takes the longest carries bytes.
    """

    seconds: float
    latency_s: float
    lower_bound_s: float
    binding: str
    algorithm: Algorithm
    origin: Origin
    is_in_range: bool
    uncertainty: float
    wire_bytes: float
    effective_bit_per_s: float
    busy_s: float = 0.0


class CollectiveModel:
    """The cost of one collective over given groups, for any size. Made by ``prepare``."""

    def __init__(
        self,
        operation: Operation,
        bound: Bound,
        timed: Sequence[tuple[Algorithm, Timed]],
        calibrated: Calibrated | None,
    ) -> None:
        self.operation = operation
        self.bound = bound
        self.calibrated = calibrated
        self._timed = tuple(timed)

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """What it chooses from."""
        return tuple(name for name, _ in self._timed)

    def seconds(self, sizes_bytes: Floats | Ints) -> Floats:
        """Times for sizes (S,) -> (S,); never falling with size."""
        sizes = np.asarray(sizes_bytes, dtype=np.float64)
        if not self._timed:
            return np.zeros(sizes.shape)
        if self.calibrated is not None:
            found = self.calibrated.seconds(sizes)
        else:
            found = np.min([timed.seconds(sizes) for _, timed in self._timed], axis=0)
        result: Floats = np.maximum(found, sizes * self.bound.s_per_byte)
        return result

    def cost(self, size_bytes: float) -> Cost:
        """The cost of one size. Raises UsageError for a negative one."""
        if not 0 <= size_bytes < math.inf:
            raise UsageError(f"got a collective of {size_bytes} bytes", expected="a size of 0 or more")
        if not self._timed:
            return Cost(
                seconds=0.0, latency_s=0.0, lower_bound_s=0.0, binding="nothing", algorithm="direct", origin="measured",
                is_in_range=True, uncertainty=0.0, wire_bytes=0.0, effective_bit_per_s=math.inf,
            )  # fmt: skip
        size = np.array([float(size_bytes)])
        times = [float(timed.seconds(size)[0]) for _, timed in self._timed]
        best = int(np.argmin(times))
        algorithm, timed = self._timed[best]
        bound_s = self.bound.s_per_byte * size_bytes
        seconds, origin, is_in_range, uncertainty = times[best], timed.origin, False, CLOSED_FORM
        latency_s = timed.latency_s
        if self.calibrated is not None:
            seconds = float(self.calibrated.seconds(size)[0])
            origin = self.calibrated.origin
            is_in_range = self.calibrated.is_in_range(size_bytes)
            uncertainty = self.calibrated.uncertainty(size_bytes)
            latency_s = min(self.calibrated.latency_s, seconds)
        seconds = max(seconds, bound_s)
        latency_s = min(latency_s, seconds - bound_s)
        binding = "latency" if latency_s > seconds / 2 else timed.binding
        if self.calibrated is not None and self.calibrated.is_cpu_bound(size_bytes):
            binding = CORES
        return Cost(
            seconds=seconds,
            latency_s=latency_s,
            lower_bound_s=bound_s,
            binding=binding,
            algorithm=algorithm,
            origin=origin,
            is_in_range=is_in_range,
            uncertainty=uncertainty,
            wire_bytes=timed.host_bytes * size_bytes,
            effective_bit_per_s=timed.effective_bit_per_s,
            busy_s=min(timed.busy_s_per_byte * size_bytes, seconds),
        )


_models: OrderedDict[tuple[object, ...], tuple[Fabric, Placement, CollectiveModel]] = OrderedDict()
_MAX_MODELS = 64


def prepare(
    fabric: Fabric,
    operation: Operation,
    placement: Placement,
    *,
    groups: Sequence[Ints] | Ints | None = None,
    algorithm: str = "auto",
    backend: str = "any",
    dtype: str = "float32",
    share: float = 1.0,
    is_cold: bool = False,
) -> CollectiveModel:
    """A model of a collective over groups that run it at the same time (None: one group of all ranks).

    ``backend``: gloo and nccl use the algorithms that they have, "any" the best of all; it also names whose measured
    curves count (any: whichever the fabric holds). ``algorithm``: one by name, or auto. ``share``: part of every link
    that other traffic leaves. ``is_cold``: connections were idle, so that TCP starts slowly.
    The models of the last fabrics and placements are kept: ask with the same objects, and asking again is cheap.
    Raises UsageError for what cannot be asked, DataError where the fabric tells neither rates nor a curve.
    """
    parts = () if groups is None else (groups,) if isinstance(groups, np.ndarray) else groups
    marks = tuple((np.shape(part), np.asarray(part, dtype=np.int64).tobytes()) for part in parts)
    key = (id(fabric), id(placement), operation, marks, algorithm, backend, dtype, share, is_cold)
    held = _models.get(key)
    # Fabric and placement are kept beside the model, so that their ids cannot come to mean others.
    if held is None or held[0] is not fabric or held[1] is not placement:
        ask = _Ask(operation, algorithm, backend, dtype, share, is_cold)
        held = _models[key] = (fabric, placement, _model(fabric, placement, groups, ask))
        while len(_models) > _MAX_MODELS:
            _models.popitem(last=False)
    _models.move_to_end(key)
    return held[2]


@dataclass(frozen=True)
class _Ask:
    operation: Operation
    algorithm: str
    backend: str
    dtype: str
    share: float
    is_cold: bool


def _model(fabric: Fabric, placement: Placement, groups: Sequence[Ints] | Ints | None, ask: _Ask) -> CollectiveModel:
    operation, algorithm, backend, share, is_cold = ask.operation, ask.algorithm, ask.backend, ask.share, ask.is_cold
    if not 0 < share <= 1:
        raise UsageError(f"got a share of {share} of the links", expected="above 0, at most 1")
    held = stack_groups(placement, groups)
    offered = algorithms(operation, backend)
    network = network_of(fabric)
    num_ranks = held[0].ranks.shape[1]
    if num_ranks < 2:
        return CollectiveModel(operation, Bound(0.0, "nothing"), (), None)
    if backend == "nccl":
        held = [Groups(_hosts_together(placement, part.ranks), part.index) for part in held]
    bound = cut_bound(network, operation, [placement.host[part.ranks] for part in held])
    measured = (
        None
        if share < 1 or algorithm != "auto"
        else find_curve(fabric, operation, placement, held, backend=backend, dtype=ask.dtype)
    )
    if measured is not None:
        native = algorithms(operation, measured.curve.backend if measured.curve.backend == "nccl" else "gloo")[0]
        wanted, reference = (
            _timed(on, operation, at, which, names=(native,), share=1.0, is_cold=is_cold)
            for on, at, which in (
                (fabric, placement, held), (measured.fabric, measured.placement, measured.groups)
            )
        )  # fmt: skip
        if wanted and reference:
            if measured.curve.num_ranks != num_ranks:
                measured = _following_the_trend(fabric, placement, held, ask, measured, reference[0][1], native)
            scaled = Calibrated.scaled(measured, wanted[0][1], reference[0][1], cores_of(fabric, placement, held))
            return CollectiveModel(operation, bound, wanted, scaled)
    names = _named(operation, algorithm, offered)
    timed = _timed(fabric, operation, placement, held, names=names, share=share, is_cold=is_cold)
    if not timed:
        raise UsageError(
            f"algorithm {algorithm!r} cannot be used for {operation} over groups of {num_ranks} ranks",
            expected="auto" if offered[0] == algorithm else f"auto or {offered[0]}",
        )
    unknown = next((found.unknown for _, found in timed if found.unknown), "")
    if unknown:
        raise DataError(
            f"the fabric {fabric.name!r} does not tell {unknown}, which {operation} over {num_ranks} ranks needs",
            expected="the rate of each host, and a round trip or a transport, or a measured curve",
            hint="run `wirespeed bench links` and `wirespeed fabric calibrate`, or name a preset NIC",
        )
    return CollectiveModel(operation, bound, timed, None)


def _following_the_trend(  # noqa: PLR0917
    fabric: Fabric,
    placement: Placement,
    held: list[Groups],
    ask: _Ask,
    measured: Measured,
    reference: Timed,
    native: Algorithm,
) -> Measured:
    """The curve as it would be with the groups' number of ranks, where a second number of ranks was measured too."""
    other = find_curve(
        fabric, ask.operation, placement, held, backend=ask.backend, dtype=ask.dtype, beside=measured.curve
    )
    if other is None:
        return measured
    at = _timed(
        other.fabric, ask.operation, other.placement, other.groups, names=(native,), share=1.0, is_cold=ask.is_cold
    )
    if not at:
        return measured
    return with_trend(measured, reference, other, at[0][1], held[0].ranks.shape[1])


def cost(
    fabric: Fabric,
    operation: Operation,
    size_bytes: float,
    placement: Placement,
    *,
    groups: Sequence[Ints] | Ints | None = None,
    algorithm: str = "auto",
    backend: str = "any",
    dtype: str = "float32",
    share: float = 1.0,
    is_cold: bool = False,
) -> Cost:
    """``prepare(...).cost(size_bytes)``."""
    model = prepare(
        fabric, operation, placement, groups=groups, algorithm=algorithm, backend=backend, dtype=dtype, share=share,
        is_cold=is_cold,
    )  # fmt: skip
    return model.cost(size_bytes)


def _named(operation: Operation, algorithm: str, offered: tuple[Algorithm, ...]) -> tuple[Algorithm, ...]:
    if algorithm == "auto":
        return offered
    known = algorithms(operation, "any")
    for name in known:
        if name == algorithm:
            return (name,)
    raise UsageError(f"got algorithm {algorithm!r} for {operation}", expected=f"auto, {', '.join(known)}")


def _hosts_together(placement: Placement, ranks: Ints) -> Ints:
    """The ranks (G, p) host by host, hosts in the order in which they first appear: what NCCL's search arrives at."""
    host = placement.host[ranks]
    changes = (host[:, 1:] != host[:, :-1]).sum(axis=1)
    ordered = np.sort(host, axis=1)
    scattered = np.flatnonzero(changes != (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1))
    if not scattered.size:
        return ranks
    together = ranks.copy()
    for row in scattered:
        _, first, place_of = np.unique(host[row], return_index=True, return_inverse=True)
        together[row] = ranks[row][np.argsort(first[place_of], kind="stable")]
    return together


def _timed(
    fabric: Fabric, operation: Operation, placement: Placement, groups: Sequence[Groups], *,
    names: Sequence[Algorithm], share: float, is_cold: bool,
) -> list[tuple[Algorithm, Timed]]:  # fmt: skip
    """Each algorithm that these groups can use, timed. Groups of other sizes run their phases beside each other."""
    layouts = _layouts(fabric, placement, groups)
    found: list[tuple[Algorithm, Timed]] = []
    for name in names:
        if name == "relay":
            together = relay(network_of(fabric), placement, layouts) if layouts else []
        else:
            lists = [phases(operation, name, layout) for layout in layouts]
            if any(held is None for held in lists):
                continue
            together = merge([held for held in lists if held])
        if together:
            timed = time_phases(fabric, operation, placement, together, share=share, is_cold=is_cold)
            found.append((name, timed))
    return found


def _layouts(fabric: Fabric, placement: Placement, groups: Sequence[Groups]) -> list[Layout]:
    network = network_of(fabric)
    layouts = []
    for part in groups:
        if part.ranks.shape[1] > 1:
            host = placement.host[part.ranks]
            layouts.append(Layout(part.ranks, host, int(network.num_nics[host].min()), network.host_switch[host]))
    return layouts
