"""Time torch.distributed collectives, and check the results of the very runs that are timed.

Every run fills its buffers with small whole numbers that depend on rank and run, meets the other ranks, is timed, and
is then checked element by element outside the timed region; the time of a run is that of its slowest rank. Ranks leave
the meeting a few tens of microseconds apart, which small sizes include. Sizes ascend over all collectives: a deadline
costs the largest sizes first, and the record's notes say what was left out. What was measured while a virtual machine's
neighbours took some of its CPU is measured once more at the end, and the quieter of the two counts; so is what moves
fewer bytes per second than a smaller size did, of which the faster counts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean, median
from typing import get_args

import psutil
import torch
import torch.distributed as dist

from wirespeed.errors import MissingCapability, PeerFailure, UsageError
from wirespeed.measure.checked import EXACT_FP16, CheckedCollective
from wirespeed.measure.environment import capture, host_name
from wirespeed.measure.exchange import all_gather_single
from wirespeed.measure.steal import DISTURBING_SHARE, StealMeter
from wirespeed.records import Collective, CollectiveSample, CollectivesRecord
from wirespeed.system import System
from wirespeed.units import KIB, format_duration, format_size

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
SIZES_BYTES = tuple(KIB * 4**i for i in range(10))
"""1 KiB to 256 MiB, by fours."""
DTYPES = ("float32", "float16")
MIN_RUNS = 3
CASE_BUDGET_S = 2.0
"""Timed seconds per collective and size: large sizes get fewer runs, never under three."""
SETTLING_MEETINGS = 30
"""Before the first case: what runs first on new connections and threads read up to ten times too slow."""
AGAIN_SHARE = 0.5
"""Of the deadline, beyond it, for what was disturbed."""
FALLING = 0.95
"""Of the rate of a smaller size: a larger one below it is measured once more."""
_IDENTITY_BYTES = 1024
_NETWORK_FAULT = re.compile(r"(?i)connect|peer|timed? ?out|socket|broken pipe|network|store|unreachable|nccl")


def measure_collectives(
    *,
    collectives: Sequence[Collective] = COLLECTIVES,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    dtypes: Sequence[str] = DTYPES,
    repeats: int = 20,
    warmup: int = 2,
    deadline_s: float = 120.0,
    min_sizes: int = 0,
    timeout_s: float = 60.0,
    backend: str | None = None,
    compute_threads: int = 0,
    progress: Callable[[str], None] | None = None,
) -> CollectivesRecord | None:
    """Measure on the default process group, or on one made from the environment (RANK, WORLD_SIZE, MASTER_ADDR, ...).

    Returns the record on rank 0 and None elsewhere. ``dtypes``: element types that all_reduce sums; reduce_scatter sums
    the first, and the other collectives move bytes. ``deadline_s`` bounds the whole measurement: sizes that would pass
    it are skipped and noted, but for the ``min_sizes`` smallest. ``timeout_s`` bounds each wait for a peer in a group
    made here. ``backend`` None means nccl where every rank of the host has a GPU of its own, else gloo.
    ``compute_threads`` of each rank multiply matrices meanwhile: a collective that has to wait for a core at every hop
    takes longer beside backward than alone. Raises PeerFailure when a peer does not answer.
    """
    _check_arguments(collectives, sizes_bytes, dtypes, repeats, warmup)
    with _mapped_faults(), _process_group(backend, timeout_s) as settings:
        group = _Group()
        notes = [*settings, *group.notes]
        if group.backend == "gloo" and "reduce_scatter" in collectives:
            notes.append("reduce_scatter is reduce_scatter_tensor, for which gloo does a whole all_reduce")
        with _intra_op_threads(max(1, math.floor(group.cpus_per_rank))), _computing(compute_threads):
            samples = _sweep(
                group, _kinds(collectives, dtypes), sizes_bytes, repeats, warmup, deadline_s, min_sizes, progress, notes
            )
        if group.rank != 0:
            return None
        return CollectivesRecord(
            environment=capture(),
            backend=group.backend,
            num_ranks=group.num_ranks,
            ranks_per_host=group.ranks_per_host,
            cpus_per_rank=group.cpus_per_rank,
            samples=tuple(samples),
            compute_threads=compute_threads,
            ranks_per_machine=group.ranks_per_machine,
            notes=tuple(notes),
        )


def _kinds(collectives: Sequence[Collective], dtypes: Sequence[str]) -> list[tuple[Collective, str]]:
    sums: dict[Collective, Sequence[str]] = {"all_reduce": dtypes, "reduce_scatter": dtypes[:1]}
    return [(collective, dtype) for collective in collectives for dtype in sums.get(collective, ("uint8",))]


def _check_arguments(
    collectives: Sequence[str], sizes_bytes: Sequence[int], dtypes: Sequence[str], repeats: int, warmup: int
) -> None:
    unknown = [name for name in collectives if name not in COLLECTIVES]
    if unknown or not collectives:
        raise UsageError(f"got collectives {list(collectives)}", expected=f"some of {', '.join(COLLECTIVES)}")
    if not dtypes or not set(dtypes) <= set(DTYPES):
        raise UsageError(f"got element types {list(dtypes)}", expected=f"some of {', '.join(DTYPES)}")
    if not sizes_bytes or min(sizes_bytes) < 1:
        raise UsageError(f"got sizes {list(sizes_bytes)}", expected="at least one, each 1 byte or more")
    if repeats < MIN_RUNS or warmup < 1:
        raise UsageError(f"got {repeats} runs after {warmup}", expected=f"{MIN_RUNS} or more after at least one")


@contextlib.contextmanager
def _mapped_faults() -> Iterator[None]:
    """The one seam where torch's errors become wirespeed's."""
    try:
        yield
    except RuntimeError as fault:
        text = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
        if "allocate memory" in text or "out of memory" in text:
            raise MissingCapability(f"out of memory: {text}", hint="leave out the largest sizes") from fault
        if isinstance(fault, dist.DistError) or _NETWORK_FAULT.search(text):
            raise PeerFailure(f"a collective failed: {text}", hint="see which rank ended first") from fault
        raise


@contextlib.contextmanager
def _process_group(backend: str | None, timeout_s: float) -> Iterator[list[str]]:
    """The default group where there is one, else a group made here and taken down again. Yields notes."""
    if dist.is_initialized():
        yield []
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UsageError(
            f"the environment lacks {', '.join(missing)}",
            expected="a launcher: torchrun, srun, mpirun or `wirespeed lab run`",
            hint="start the same command on every host with one of them",
        )
    if backend is None:
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= num_local else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with _batch_scheduling(wanted=backend == "gloo") as notes:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        try:
            yield notes
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def _batch_scheduling(*, wanted: bool) -> Iterator[list[str]]:
    """SCHED_BATCH: gloo's threads then preempt each other less (4 ranks on 2 cores: 1 KiB in 1.3 ms instead of 4.4).

    Threads started within inherit it, so it is set before the process group is made. Yields a note if it is refused.
    """
    before = os.sched_getscheduler(0)
    if not wanted or before != os.SCHED_OTHER:
        yield []
        return
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as fault:
        yield [f"scheduling policy SCHED_BATCH was refused: {fault.strerror}"]
        return
    try:
        yield []
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


@contextlib.contextmanager
def _intra_op_threads(count: int) -> Iterator[None]:
    """No more of torch's threads than this rank has cores: idle ones spin after a fill and would slow the transfer."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _computing(num_threads: int) -> Iterator[None]:
    """Threads that multiply matrices on the CPU until the end, each product short enough to share a core fairly."""
    ended = threading.Event()

    def multiply() -> None:
        left, right = torch.full((192, 192), 1e-3), torch.full((192, 192), 1e-3)
        product = torch.empty(192, 192)
        while not ended.is_set():
            torch.mm(left, right, out=product)

    threads = [threading.Thread(target=multiply, name=f"compute-{i}", daemon=True) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


class _Group:
    """The default process group: who is in it, and small agreements between its ranks."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.backend = dist.get_backend()
        is_cuda = self.backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        self._meeting = torch.zeros(1, device=self.device)
        self.notes: list[str] = []
        if os.sched_getscheduler(0) == os.SCHED_BATCH:
            self.notes.append("scheduling policy SCHED_BATCH")
        identities = self._gather_identities()
        per_host = Counter(host for host, _, _ in identities)
        self.ranks_per_host = max(per_host.values())
        if min(per_host.values()) != self.ranks_per_host:
            self.notes.append(f"ranks per host differ: {dict(per_host)}")
        cpus: dict[str, set[int]] = defaultdict(set)
        for _, machine, allowed in identities:
            cpus[machine].update(allowed)
        per_machine = Counter(machine for _, machine, _ in identities)
        # Hosts of a lab are one machine: their ranks share its cores, whatever each of them sees.
        self.cpus_per_rank = min(len(cpus[machine]) / per_machine[machine] for machine in per_machine)
        self.ranks_per_machine = max(per_machine.values())

    def _gather_identities(self) -> list[tuple[str, str, list[int]]]:
        machine = System().read_text("/proc/sys/kernel/random/boot_id") or host_name()
        cpus = sorted(os.sched_getaffinity(0))[: _IDENTITY_BYTES // 8]
        text = json.dumps([host_name()[:255], machine, cpus]).encode()
        own = torch.zeros(_IDENTITY_BYTES, dtype=torch.uint8)
        own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        every = torch.zeros(self.num_ranks * _IDENTITY_BYTES, dtype=torch.uint8, device=self.device)
        all_gather_single(every, own.to(self.device))
        rows = every.cpu().view(self.num_ranks, _IDENTITY_BYTES)
        return [tuple(json.loads(bytes(row.tolist()).rstrip(b"\0"))) for row in rows]

    def meet(self) -> None:
        """Wait until every rank is here. A one-element all_reduce: half the exit skew of gloo's own barrier."""
        dist.all_reduce(self._meeting)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the device; nothing to do on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agree(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        """The values reduced over all ranks: the same on each, so decisions made of them are the same too."""
        held = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(held, op=operation)
        reduced: list[float] = held.tolist()
        return reduced


def _sweep(  # noqa: PLR0917
    group: _Group,
    kinds: Sequence[tuple[Collective, str]],
    sizes_bytes: Sequence[int],
    repeats: int,
    warmup: int,
    deadline_s: float,
    min_sizes: int,
    progress: Callable[[str], None] | None,
    notes: list[str],
) -> list[CollectiveSample]:
    start_s = time.monotonic()
    share = psutil.virtual_memory().available / (4 * group.ranks_per_machine)  # send and receive, and room for others
    (memory_bytes,) = group.agree([share], dist.ReduceOp.MIN)
    for _ in range(SETTLING_MEETINGS):
        group.meet()
    past: dict[tuple[Collective, str], list[tuple[int, float]]] = defaultdict(list)
    timed: list[_Timed] = []
    for size_bytes in sorted(set(sizes_bytes)):
        for collective, dtype in kinds:
            label = f"{collective} {dtype} {format_size(size_bytes)}"
            (elapsed_s,) = group.agree([time.monotonic() - start_s], dist.ReduceOp.MAX)
            projected_s = _projected_s(past[collective, dtype], size_bytes) * (warmup + MIN_RUNS)
            if dtype == "float16" and group.num_ranks * 3 > EXACT_FP16:
                notes.append(f"{label} skipped: fp16 sums over {group.num_ranks} ranks are not exact")
                continue
            if size_bytes > memory_bytes:
                notes.append(f"{label} skipped: a quarter of the free memory per rank is {format_size(memory_bytes)}")
                continue
            if len(past[collective, dtype]) >= min_sizes and elapsed_s + projected_s > deadline_s:
                notes.append(
                    f"{label} skipped: would take about {format_duration(projected_s)}, past {deadline_s:g} s in all"
                )
                continue
            if progress is not None:
                progress(label)
            timed.append(_time_case(group, collective, dtype, size_bytes, repeats, warmup))
            past[collective, dtype].append((size_bytes, timed[-1].wall_s / timed[-1].num_runs))
    _time_again(group, timed, repeats, warmup, start_s + (1 + AGAIN_SHARE) * deadline_s, progress, notes)
    return [held.sample for held in timed]


def _time_again(  # noqa: PLR0917
    group: _Group,
    timed: list[_Timed],
    repeats: int,
    warmup: int,
    until_s: float,
    progress: Callable[[str], None] | None,
    notes: list[str],
) -> None:
    """Replace what was disturbed by quieter measurements, the most disturbed first, as far as the time goes.

    Then what moves fewer bytes per second than a smaller size did: what is so by nature is so again, and stays.
    """

    def again(place: int) -> _Timed | None:
        before, sample = timed[place], timed[place].sample
        (end_s,) = group.agree([time.monotonic() + before.wall_s - until_s], dist.ReduceOp.MAX)
        if end_s > 0:
            return None
        if progress is not None:
            progress(f"{sample.collective} {sample.dtype} {format_size(sample.size_bytes)}, again")
        return _time_case(group, sample.collective, sample.dtype, sample.size_bytes, repeats, warmup)

    disturbed = [place for place in range(len(timed)) if timed[place].steal_share > DISTURBING_SHARE]
    num_better = 0
    for place in sorted(disturbed, key=lambda place: -timed[place].steal_share):
        if (found := again(place)) is not None and found.steal_share < timed[place].steal_share:
            timed[place] = found
            num_better += 1
    if disturbed:
        notes.append(
            f"{len(disturbed)} of {len(timed)} cases ran while neighbours of this machine took more than "
            f"{DISTURBING_SHARE:.0%} of its CPU; {num_better} were replaced by quieter ones"
        )
    for place in falling([held.sample for held in timed]):
        found = again(place)
        if found is not None and median(found.sample.times_s) < median(timed[place].sample.times_s):
            timed[place] = found


def falling(samples: Sequence[CollectiveSample]) -> list[int]:
    """Places of samples that move fewer bytes per second than a smaller size of the same kind did."""
    best: dict[tuple[str, str], float] = {}
    found = []
    for place in sorted(range(len(samples)), key=lambda place: samples[place].size_bytes):
        sample = samples[place]
        kind, rate = (sample.collective, sample.dtype), sample.size_bytes / median(sample.times_s)
        if rate < FALLING * best.get(kind, 0.0):
            found.append(place)
        best[kind] = max(rate, best.get(kind, 0.0))
    return found


def _projected_s(past: Sequence[tuple[int, float]], size_bytes: int) -> float:
    """Seconds of one run, by the marginal rate of the last two sizes; nothing is known before there are two."""
    if len(past) < 2:
        return past[0][1] if past else 0.0
    (low, low_s), (high, high_s) = past[-2:]
    return high_s + max(0.0, high_s - low_s) / (high - low) * (size_bytes - high)


@dataclass(frozen=True)
class _Timed:
    """One measured case; what it took in all, and the largest share of any host's CPU that neighbours took."""

    sample: CollectiveSample
    num_runs: int
    wall_s: float
    steal_share: float


def _time_case(  # noqa: PLR0917
    group: _Group, collective: Collective, dtype: str, size_bytes: int, repeats: int, warmup: int
) -> _Timed:
    case = CheckedCollective(
        collective, dtype, size_bytes, rank=group.rank, num_ranks=group.num_ranks, device=group.device
    )
    start_s, meter = time.monotonic(), StealMeter()
    first_s = [_run(case, group, run).time_s for run in range(warmup)]
    (estimate_s,) = group.agree([first_s[-1]], dist.ReduceOp.MAX)
    count = max(MIN_RUNS, min(repeats, math.floor(CASE_BUDGET_S / max(estimate_s, 1e-9))))
    runs = [_run(case, group, warmup + run) for run in range(count)]
    times_s = group.agree([run.time_s for run in runs], dist.ReduceOp.MAX)
    # The kernel counts in ticks of some milliseconds: only the mean over runs is finer than that.
    spent = [fmean(parts) for parts in zip(*((run.own_s, run.packets_s, run.busy_s) for run in runs), strict=True)]
    own_s, packets_s, busy_s = group.agree(spent, dist.ReduceOp.SUM)
    cpu_s = max(own_s, min(own_s + packets_s, busy_s))
    (correct,) = group.agree([float(all(run.is_right for run in runs))], dist.ReduceOp.MIN)
    wall_s, steal_share = group.agree([time.monotonic() - start_s, meter.share()], dist.ReduceOp.MAX)
    sample = CollectiveSample(
        collective=case.collective,
        size_bytes=case.size_bytes,
        times_s=tuple(times_s),
        cpu_s=cpu_s / group.num_ranks,
        is_correct=correct == 1.0,
        dtype=case.dtype,
    )
    return _Timed(sample, warmup + count, wall_s, steal_share)


@dataclass(frozen=True)
class _Run:
    """One run of one rank. ``packets_s`` and ``busy_s`` are this rank's share of what its machine spent meanwhile.

    A collective costs the cores what its processes compute, and what the kernel does on packets beside them: at 1
    Gbit/s between four hosts of a lab that is more than all processes take together. Neither sum of these is it. Many
    kernels (without CONFIG_IRQ_TIME_ACCOUNTING) count packets that a process sends on the spot as its own time too, so
    ``own_s + packets_s`` counts those twice; ``busy_s`` counts what others compute. Both are too much, and the smaller
    is taken.
    """

    time_s: float
    own_s: float
    packets_s: float
    busy_s: float
    is_right: bool


def _run(case: CheckedCollective, group: _Group, run: int) -> _Run:
    case.fill(run)
    group.meet()
    before, own_start_s = psutil.cpu_times(), time.process_time()
    start_ns = time.monotonic_ns()
    case.issue()
    group.synchronize()
    end_ns = time.monotonic_ns()
    own_s, after = time.process_time() - own_start_s, psutil.cpu_times()
    packets_s = _seconds(after, _PACKETS) - _seconds(before, _PACKETS)
    busy_s = _seconds(after, _BUSY) - _seconds(before, _BUSY)
    return _Run(
        time_s=(end_ns - start_ns) / 1e9,
        own_s=own_s,
        packets_s=packets_s / group.ranks_per_machine,
        busy_s=busy_s / group.ranks_per_machine,
        is_right=case.is_right(run),
    )


_PACKETS = ("irq", "softirq")
_BUSY = ("user", "nice", "system", *_PACKETS)


def _seconds(times: object, names: Sequence[str]) -> float:
    """CPU seconds of this machine of these kinds; those that the system does not count are 0."""
    return sum(float(getattr(times, name, 0.0)) for name in names)
