"""Strategy: how gradients are sent, and when. The one place where bytes, collectives and fidelity are stated.

`sim` costs a strategy from these facts and `train/codecs` implements it from the same ones; a test counts the bytes
that really cross an interface and holds them against ``wire_bytes``.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from wirespeed.errors import UsageError
from wirespeed.records import Collective
from wirespeed.spec.payloads import (
    BYTES_PER_ELEMENT,
    CODECS,
    TOPK_CHUNK,
    CodecName,
    Shapes,
    block_shard_bytes,
    bus_factor,
    hierarchical_shard_elements,
    lowrank_payload_bytes,
    topk_payload_bytes,
)
from wirespeed.units import MIB, exact_percent, exact_size, parse_ratio, parse_size

Topology = Literal["flat", "hierarchical"]
Scope = Literal["all", "host", "between"]
Schedule = Literal["every_step", "delayed", "async", "local_sgd", "diloco"]
Fidelity = Literal["exact", "half", "compressed", "lossy"]

TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
PERIODIC: tuple[Schedule, ...] = ("local_sgd", "diloco")
"""Schedules that exchange parameters once per period, and no gradients in between."""
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)
"""From most to least faithful. ``compressed``: error feedback, quality measured equal. ``lossy``: it may differ."""

DEFAULT_BUCKET_BYTES = 25 * MIB
TOPK_RATIO = 0.01
LOWRANK_RANK = 32
MAX_LOWRANK_RANK = 256
FAITHFUL_LOWRANK_RANK = 32
"""From this matrix rank on low-rank counts as ``compressed``; docs/design/0005-low-rank.md has what is measured."""
LOCAL_SGD_PERIOD = 8
DILOCO_PERIOD = 32
MAX_PERIOD = 100_000
STALENESS = 4
"""Rounds that a rank may miss under ``async``: a host up to five times slower than the others holds up nobody."""
MAX_STALENESS = 64
OUTER_LEARNING_RATE = 0.7
OUTER_MOMENTUM = 0.9
"""DiLoCo's outer optimizer is SGD with Nesterov momentum; both figures are those of its paper (arXiv 2311.08105)."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of a bucket's exchange, with its size in the convention of ``records``."""

    collective: Collective
    size_bytes: int
    dtype: str = "uint8"
    """What the backend is given. Sums of fp16 cost more than sums of as many bytes of fp32; moved bytes are bytes."""
    scope: Scope = "all"
    """Among whom: all ranks, the ranks of one host, or the ranks of equal number on all hosts (as many groups at once
    as a host has ranks)."""

    def num_members(self, num_ranks: int, ranks_per_host: int) -> int:
        """Ranks in its group."""
        return {"all": num_ranks, "host": ranks_per_host, "between": num_ranks // ranks_per_host}[self.scope]


class Strategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Codec x topology x schedule x bucket size.

    ``ratio`` is the share of entries that top-k sends, ``matrix_rank`` the columns of low-rank's factors; each is None
    for every other codec. ``hierarchical``: gradients are summed inside each host first, so that a rank's codec sends
    but its share of a bucket between hosts, and gathered inside again. ``bucket_bytes`` is counted in fp32 gradient, as
    DDP's ``bucket_cap_mb`` counts it. ``period``: optimizer steps from one exchange to the next under ``local_sgd`` and
    ``diloco``, None for every other schedule. ``warmup_steps`` of these two exchange their gradients at every step
    before the first period begins. ``staleness``: under ``async`` no rank waits for one that has missed at most so many
    rounds of averaging, nor for the average of steps at most so many steps old; None for every other schedule.
    """

    codec: CodecName = "dense"
    topology: Topology = "flat"
    schedule: Schedule = "every_step"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ratio: float | None = None
    matrix_rank: int | None = None
    period: int | None = None
    warmup_steps: int = 0
    staleness: int | None = None

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1024:
            raise UsageError(f"got a bucket of {self.bucket_bytes} bytes", expected="at least 1 KiB")
        if self.codec == "topk":
            if self.ratio is None:
                msgspec.structs.force_setattr(self, "ratio", TOPK_RATIO)
            elif not 1 / TOPK_CHUNK <= self.ratio <= 0.5:
                raise UsageError(
                    f"got top-k ratio {self.ratio:g}",
                    expected=f"{1 / TOPK_CHUNK:.2g} (one entry per chunk of {TOPK_CHUNK}) to 0.5",
                )
        elif self.ratio is not None:
            raise UsageError(f"got a ratio for codec {self.codec!r}", expected="a ratio only for topk")
        if self.codec == "lowrank":
            if self.matrix_rank is None:
                msgspec.structs.force_setattr(self, "matrix_rank", LOWRANK_RANK)
            elif not 1 <= self.matrix_rank <= MAX_LOWRANK_RANK:
                raise UsageError(f"got matrix rank {self.matrix_rank}", expected=f"1 to {MAX_LOWRANK_RANK}")
        elif self.matrix_rank is not None:
            raise UsageError(f"got a matrix rank for codec {self.codec!r}", expected="a matrix rank only for lowrank")
        self._check_when_and_where()

    def _check_when_and_where(self) -> None:
        if self.topology == "hierarchical" and self.codec == "lowrank":
            raise UsageError(
                "got topology 'hierarchical' for lowrank",
                expected="whole matrices, which a rank's share of a bucket does not hold",
                hint="lowrank goes with topology flat; int8, topk and half go with either",
            )
        if self.schedule == "async":
            if self.staleness is None:
                msgspec.structs.force_setattr(self, "staleness", STALENESS)
            elif not 1 <= self.staleness <= MAX_STALENESS:
                raise UsageError(f"got a staleness of {self.staleness}", expected=f"1 to {MAX_STALENESS} steps")
        elif self.staleness is not None:
            raise UsageError(f"got a staleness for schedule {self.schedule!r}", expected="a staleness only for async")
        if self.schedule in PERIODIC:
            if self.period is None:
                default = LOCAL_SGD_PERIOD if self.schedule == "local_sgd" else DILOCO_PERIOD
                msgspec.structs.force_setattr(self, "period", default)
            elif not 1 <= self.period <= MAX_PERIOD:
                raise UsageError(f"got a period of {self.period}", expected=f"1 to {MAX_PERIOD} steps")
            if self.warmup_steps < 0:
                raise UsageError(f"got {self.warmup_steps} warm-up steps", expected="0 or more")
        elif self.period is not None or self.warmup_steps != 0:
            raise UsageError(
                f"got a period or warm-up steps for schedule {self.schedule!r}",
                expected=f"either only for {' and '.join(PERIODIC)}",
            )

    @property
    def name(self) -> str:
        """Short and unique, such as ``int8``, ``topk@1%``, ``half/4MiB`` or ``int8/diloco@64``; ``parse`` reads it."""
        text: str = self.codec
        if self.matrix_rank is not None:
            text += f"@{self.matrix_rank}"
        if self.ratio is not None:
            text += "@" + exact_percent(self.ratio)
        if self.bucket_bytes != DEFAULT_BUCKET_BYTES:
            text += "/" + exact_size(self.bucket_bytes)
        if self.topology != "flat":
            text += "/" + self.topology
        if self.schedule != "every_step":
            text += "/" + self.schedule
        if self.period is not None:
            text += f"@{self.period}"
        if self.staleness is not None:
            text += f"@{self.staleness}"
        if self.warmup_steps:
            text += f"+{self.warmup_steps}"
        return text

    @property
    def codec_name(self) -> str:
        """The codec with its parameter alone, such as ``topk@1%``: what a speed was measured of."""
        return self.name.partition("/")[0]

    @property
    def steps_per_exchange(self) -> int:
        """Optimizer steps that share one exchange: the period, else 1. What crosses per step is divided by it."""
        return 1 if self.period is None else self.period

    @property
    def steps_per_cycle(self) -> int:
        """Steps after which what is sent repeats: low-rank sends one factor and then the other, of unlike sizes.

        A step's time, as one figure, is the mean over a whole cycle.
        """
        return self.steps_per_exchange * (2 if self.codec == "lowrank" else 1)

    @property
    def fidelity(self) -> Fidelity:
        """What happens to the gradient on the way: every schedule but ``every_step`` makes it ``lossy``."""
        if self.schedule != "every_step":
            return "lossy"
        if self.matrix_rank is not None and self.matrix_rank < FAITHFUL_LOWRANK_RANK:
            return "lossy"
        return _FIDELITY[self.codec]

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read ``CODEC[@PARAMETER][/BUCKET][/TOPOLOGY][/SCHEDULE[@PERIOD[+WARMUP]]]``, or ``async[@STALENESS]``.

        Such as ``topk@2%/8MiB`` or ``int8/hierarchical/local_sgd@16+100``.
        A schedule alone stands for itself with dense, and ``diloco`` with int8, which is what it was made for.
        """
        head, *parts = text.strip().split("/")
        if head.partition("@")[0] in SCHEDULES[1:]:
            head, parts = ("int8" if head.startswith("diloco") else "dense"), [head, *parts]
        codec, at, parameter = head.partition("@")
        if codec not in CODECS or len(parts) > 3:
            raise UsageError(
                f"got strategy {text!r}",
                expected="CODEC[@RATIO or @RANK][/BUCKET][/TOPOLOGY][/SCHEDULE[@PERIOD[+WARMUP]]] with CODEC one of "
                f"{', '.join(CODECS)}, TOPOLOGY one of {', '.join(TOPOLOGIES)}, SCHEDULE one of {', '.join(SCHEDULES)}",
            )
        is_rank = codec == "lowrank" and bool(at)
        if is_rank and not parameter.isdecimal():
            raise UsageError(f"got matrix rank {parameter!r} in {text!r}", expected="a whole number, as in lowrank@4")
        schedule: Schedule = "every_step"
        period, warmup_steps = None, 0
        if parts and parts[-1].partition("@")[0] in SCHEDULES:
            schedule, period, warmup_steps = _parse_schedule(parts.pop(), text)
        staleness = None
        if schedule == "async":
            staleness, period = period, None
        topology = next((topology for topology in TOPOLOGIES if parts[-1:] == [topology]), None)
        if topology is not None:
            parts.pop()
        if len(parts) > 1:
            raise UsageError(
                f"got {parts[1]!r} in strategy {text!r}",
                expected=f"one of {', '.join(TOPOLOGIES)}, then one of {', '.join(SCHEDULES)}",
            )
        return cls(
            codec=codec,
            ratio=parse_ratio(parameter) if at and not is_rank else None,
            matrix_rank=int(parameter) if is_rank else None,
            bucket_bytes=parse_size(parts[0]) if parts else DEFAULT_BUCKET_BYTES,
            topology="flat" if topology is None else topology,
            schedule=schedule,
            period=period,
            warmup_steps=warmup_steps,
            staleness=staleness,
        )

    def allows(self, fidelity: Fidelity) -> bool:
        """Whether this strategy is at least as faithful as ``fidelity``."""
        return FIDELITIES.index(self.fidelity) <= FIDELITIES.index(fidelity)

    def transfers(
        self, num_elements: int, num_ranks: int, shapes: Shapes | None = None, *, ranks_per_host: int = 1
    ) -> tuple[Transfer, ...]:
        """The collectives that one exchange of a bucket of ``num_elements`` needs among ``num_ranks``, in order.

        ``shapes`` of its tensors matter to low-rank alone, whose messages alternate between two sizes: the mean of both
        is given. None is taken for one square matrix.
        """
        if num_ranks < 2 or num_elements == 0:
            return ()
        if self.topology == "flat" or ranks_per_host == 1:
            return self._flat_transfers(num_elements, num_ranks, shapes)
        shard = hierarchical_shard_elements(num_elements, ranks_per_host)
        within = BYTES_PER_ELEMENT * shard * ranks_per_host
        num_hosts = num_ranks // ranks_per_host
        between = self._flat_transfers(shard, num_hosts, None) if num_hosts > 1 else ()
        return (
            Transfer(collective="all_to_all", size_bytes=within, scope="host"),
            *(msgspec.structs.replace(transfer, scope="between") for transfer in between),
            Transfer(collective="all_gather", size_bytes=within, scope="host"),
        )

    def _flat_transfers(self, num_elements: int, num_ranks: int, shapes: Shapes | None) -> tuple[Transfer, ...]:
        match self.codec:
            case "dense":
                return (
                    Transfer(collective="all_reduce", size_bytes=BYTES_PER_ELEMENT * num_elements, dtype="float32"),
                )
            case "half":
                return (Transfer(collective="all_reduce", size_bytes=2 * num_elements, dtype="float16"),)
            case "int8" | "int4" | "sign":
                size = num_ranks * block_shard_bytes(self.codec, num_elements, num_ranks)
                return (
                    Transfer(collective="all_to_all", size_bytes=size),
                    Transfer(collective="all_gather", size_bytes=size),
                )
            case "topk":
                assert self.ratio is not None
                size = num_ranks * topk_payload_bytes(num_elements, self.ratio)
                return (Transfer(collective="all_gather", size_bytes=size),)
            case "lowrank":
                assert self.matrix_rank is not None
                size = lowrank_payload_bytes(num_elements, self.matrix_rank, shapes)
                return (Transfer(collective="all_reduce", size_bytes=size, dtype="float32"),)

    def wire_bytes(
        self, num_elements: int, num_ranks: int, shapes: Shapes | None = None, *, ranks_per_host: int = 1
    ) -> int:
        """Payload bytes that one rank sends in one exchange of a bucket. Headers come on top."""
        transfers = self.transfers(num_elements, num_ranks, shapes, ranks_per_host=ranks_per_host)
        return round(
            sum(t.size_bytes * bus_factor(t.collective, t.num_members(num_ranks, ranks_per_host)) for t in transfers)
        )

    def nic_bytes(
        self, num_elements: int, num_ranks: int, shapes: Shapes | None = None, *, ranks_per_host: int = 1
    ) -> int:
        """Payload bytes that one host sends to others in one exchange of a bucket, through all its NICs together.

        Among all ranks an all_to_all sends each of a host's ranks' parts to each rank elsewhere; every other collective
        is a ring in rank order, which leaves a host once. Between hosts, each of a host's ranks sends its own.
        """
        num_bytes = 0.0
        for transfer in self.transfers(num_elements, num_ranks, shapes, ranks_per_host=ranks_per_host):
            if num_ranks <= ranks_per_host or transfer.scope == "host":
                continue
            if transfer.scope == "between":
                members = num_ranks // ranks_per_host
                num_bytes += ranks_per_host * transfer.size_bytes * bus_factor(transfer.collective, members)
            elif transfer.collective == "all_to_all":
                num_bytes += ranks_per_host * transfer.size_bytes * (num_ranks - ranks_per_host) / num_ranks
            else:
                num_bytes += transfer.size_bytes * bus_factor(transfer.collective, num_ranks)
        return round(num_bytes)


def _parse_schedule(part: str, text: str) -> tuple[Schedule, int | None, int]:
    """``(schedule, period, warm-up steps)`` of ``SCHEDULE[@PERIOD[+WARMUP]]``."""
    name, at, numbers = part.partition("@")
    schedule = next(schedule for schedule in SCHEDULES if schedule == name)
    if not at:
        return schedule, None, 0
    period, plus, warmup = numbers.partition("+")
    if not period.isdecimal() or (plus and not warmup.isdecimal()):
        raise UsageError(
            f"got {numbers!r} in strategy {text!r}", expected="PERIOD or PERIOD+WARMUP in steps, as in local_sgd@16+100"
        )
    return schedule, int(period), int(warmup or 0)


_FIDELITY: dict[CodecName, Fidelity] = {
    "dense": "exact",
    "half": "half",
    "int8": "compressed",
    "int4": "lossy",
    "lowrank": "compressed",
    "topk": "lossy",
    "sign": "lossy",
}
