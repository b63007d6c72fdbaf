"""Why a job stopped or hung: the earliest primary failure over all ranks, and what it means in its surroundings.

A completion error says only that the peer did not answer. When it comes at once the two never reached each other (GID,
MTU, firewall, rails); after a long run a link flapped or the peer died, and the peer's own log or kernel says which.
What a program did on its own (out of memory, an exception, a kill) goes before network failures that are not earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from wirespeed.doctor.causes import Cause, make_cause, names
from wirespeed.doctor.causes_rdma import (
    async_event_cause,
    completion_cause,
    evidence_of,
    flap_cause,
    modify_qp_cause,
    who,
)
from wirespeed.doctor.causes_transport import is_virtual
from wirespeed.doctor.check import Evidence
from wirespeed.doctor.failure_words import WORDS, FailureText
from wirespeed.doctor.job_failures import WORDS as JOB_WORDS
from wirespeed.doctor.kernel_log import is_hardware_xid
from wirespeed.doctor.log_scan import JobFacts
from wirespeed.doctor.nccl_failures import Failure

PROGRAM = frozenset((
    "gpu_memory", "program", "gpu", "crash", "host_memory", "shared_memory", "cuda", "collective_mismatch",
    "barrier_missed", "disk_full", "open_files", "library", "driver", "no_gpu", "device_ordinal", "fabric_manager",
))  # fmt: skip
_FOLLOW_UPS = frozenset(("closed", "gloo", "completion", "ras_dead", "connect", "stuck", "store", "unexplained"))
LATE_WORDS = frozenset(("killed", "cancelled"))
"""What launchers do to the rest after one rank failed: a cause only where nothing else is."""


def failure_causes(job: JobFacts) -> Iterator[Cause]:
    """All causes of this kind, the earliest primary failure with the highest weight."""
    primary = sorted((f for f in job.failures if f.is_primary and not _is_warning(f)), key=_order(job))
    for failure in job.failures:
        cause = _cause_of(failure, job) if _is_warning(failure) else None
        if cause is not None:
            yield cause
    for place, failure in enumerate(primary[:8]):
        cause = _cause_of(failure, job)
        if cause is not None:
            yield _weighted(cause, 0.95 - 0.04 * place)
    yield from _kernel_causes(job, has_failure=bool(primary or job.failures or job.timeouts))
    yield from _desync(job, has_primary=bool(primary))
    yield from _init_hang(job, has_primary=bool(primary))
    if not primary:
        yield from _only_secondary(job)


def _words_of(kind: str) -> FailureText | None:
    return WORDS.get(kind) or JOB_WORDS.get(kind)


def _is_warning(failure: Failure) -> bool:
    """Whether it names why a job is slow or at risk, and nothing stopped by it."""
    words = _words_of(failure.kind)
    return words is not None and words.kind != "failure"


def _weighted(cause: Cause, weight: float) -> Cause:
    return msgspec.structs.replace(cause, weight=weight)


def _order(job: JobFacts) -> Callable[[Failure], tuple[float, float]]:
    """Earliest first; where not all have a time, what a program did on its own goes before what the network said."""
    are_timed = all(f.time_s is not None for f in job.failures if f.is_primary)

    def key(failure: Failure) -> tuple[float, float]:
        rank = 2.0 if failure.kind in LATE_WORDS else 0.0 if failure.kind in PROGRAM else 1.0
        time_s = 0.0 if failure.time_s is None else failure.time_s
        return (time_s if rank < 2 else float("inf"), rank) if are_timed else (rank, time_s)

    return key


def _cause_of(failure: Failure, job: JobFacts) -> Cause | None:
    if failure.kind == "completion":
        return completion_cause(failure, job)
    if failure.kind == "modify_qp":
        return modify_qp_cause(failure, job)
    if failure.kind == "async_event":
        return async_event_cause(failure, job)
    if failure.kind == "connect":
        return _connect(failure, job)
    words = _words_of(failure.kind)
    return None if words is None else _from_words(failure, words, job)


def _from_words(failure: Failure, words: FailureText, job: JobFacts) -> Cause:
    extra: tuple[Evidence, ...] = ()
    title = words.title.format(who=who(failure), detail=failure.detail)
    if failure.kind == "no_interface":
        extra = job.nccl.lines("setting NCCL_SOCKET_IFNAME")
        values = tuple(job.nccl.settings.get("NCCL_SOCKET_IFNAME", {}))
        if values:
            title += f": NCCL_SOCKET_IFNAME={values[0]} names none that exists on this host"
    if failure.kind in ("message_truncated", "version_mismatch") and len(job.nccl.versions) > 1:
        title += f" ({' and '.join(job.nccl.versions[:3])})"
        extra = job.nccl.lines("version")
    return make_cause(
        words.id,
        title,
        (*evidence_of([failure]), *extra),
        kind=words.kind,
        weight=0.9 if words.kind == "failure" else 0.82,
        severity=words.severity,
        subject=failure.host or "job",
        host=failure.host,
        path=words.path,
        fix=words.fix,
        commands=words.commands,
        caution=words.caution,
        source=words.source,
    )


def _connect(failure: Failure, job: JobFacts) -> Cause:
    wrong = sorted(
        {
            name
            for held in (job.nccl.bootstrap, job.nccl.sockets)
            for pairs in held.values()
            for name, address in pairs
            if is_virtual(name)
            and (
                not failure.peer
                or address.rpartition(".")[0] == failure.peer.rpartition(".")[0]
                or failure.peer.startswith("127.")
            )
        }
    )
    if wrong or failure.peer.startswith(("172.17.", "127.")):
        return make_cause(
            "nccl.wrong-interface",
            f"{who(failure)} was told to connect to {failure.peer or 'an address'} of "
            f"{names(wrong) if wrong else 'a bridge'}, "
            "which leads to no other host",
            (*evidence_of([failure]), *job.nccl.lines(*(f"bootstrap {name}" for name in wrong), "sockets")),
            kind="failure",
            weight=0.92,
            severity="critical",
            subject=wrong[0] if wrong else "interface",
            path="tcp",
            host=failure.host,
            fix="name the interface that joins the hosts; an exclusion must name all: ^docker,lo,virbr",
            commands=("ip -br addr", "export NCCL_SOCKET_IFNAME=<interface>"),
            source="horovod#584",
        )
    idle = failure.age_s is not None and failure.age_s > 600
    return make_cause(
        "tcp.blocked",
        f"{who(failure)} cannot connect to {failure.peer or 'its peer'}: {failure.detail}"
        + ("; a firewall that forgets idle connections does this late in a job" if idle else ""),
        evidence_of([failure]),
        kind="failure",
        weight=0.85,
        severity="critical",
        subject="firewall",
        path="tcp",
        host=failure.host,
        fix="open all TCP ports between the hosts (NCCL and gloo choose them freely), or bind them with a port range",
        commands=(
            "iptables -S; nft list ruleset",
            "nc -vz <peer> <port>",
            "sysctl -w net.ipv4.ip_local_port_range='50000 51000'   # then open these",
        ),
        source="nccl#1105, #706; nccl-tests#162",
        alternatives="a peer that is down or has another address looks the same: ping it",
    )


def _kernel_causes(job: JobFacts, *, has_failure: bool) -> Iterator[Cause]:
    for event in job.kernel:
        evidence = (Evidence(where=event.where, seen=event.text),)
        words = WORDS.get(f"kernel_{event.kind}")
        if event.kind == "carrier":
            if event.count > 1 or has_failure:
                # Once is a flap only where something failed too: links also come up at boot.
                flap = flap_cause(event.device, "", evidence)
                yield _weighted(flap, 0.9 if event.count > 1 and has_failure else 0.7)
        elif words is not None and (event.kind != "xid" or is_hardware_xid(event)):
            detail = (
                event.device
                if event.code is None
                else f"{'SXid' if event.kind == 'sxid' else 'Xid'} {event.code} "
                f"({event.detail or 'see NVIDIA documentation'})"
            )
            yield make_cause(
                words.id,
                words.title.format(who=event.device or "this host", detail=detail),
                evidence,
                kind="failure" if words.is_fatal and has_failure else "capability",
                weight=0.97 if words.is_fatal and has_failure else 0.6,
                severity=words.severity,
                subject=event.device or "host",
                path=words.path,
                fix=words.fix,
                commands=words.commands,
                source=words.source,
            )


def _desync(job: JobFacts, *, has_primary: bool) -> Iterator[Cause]:
    weight = 0.6 if has_primary else 0.93
    desync = job.desync
    if desync is not None:
        ranks = ", ".join(map(str, desync.ranks[:8]))
        yield make_cause(
            "job.desync",
            f"rank {ranks} of group {desync.group or 'default'} parts from the others at collective {desync.sequence} "
            f"({desync.operation}): {desync.detail}",
            (Evidence(where=desync.where, seen=f"collective {desync.sequence} {desync.operation}: {desync.detail}"),),
            kind="failure",
            weight=weight,
            severity="critical",
            subject=f"rank {ranks}",
            path="any",
            fix="look at what these ranks do at that point (branches on rank or data, uneven batches, an exception)",
            commands=("py-spy dump --pid <pid of the rank>",),
            source="torch flight recorder",
        )
    if job.laggards:
        first = min(job.laggards, key=lambda p: p.enqueued)
        ranks = ", ".join(str(p.rank) for p in sorted(job.laggards, key=lambda p: p.enqueued)[:8])
        evidence = [
            Evidence(where=p.where, seen=f"rank {p.rank}: last enqueued work {p.enqueued}, completed {p.completed}")
            for p in job.laggards[:3]
        ]
        evidence += [Evidence(where=t.where, seen=t.text) for t in job.timeouts[:2]]
        yield make_cause(
            "job.desync",
            f"rank {ranks} did not arrive: it enqueued {first.enqueued} collectives, others more",
            evidence,
            kind="failure",
            weight=weight,
            severity="critical",
            subject=f"rank {ranks}",
            path="any",
            fix="the network waits for the program here: look at that rank (data loader, checkpoint, evaluation, "
            "exception)",
            commands=("py-spy dump --pid <pid of the rank>", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000   # flight recorder"),
        )
        return
    by_sequence: dict[int, dict[tuple[str, int | None], list[int]]] = {}
    for timeout in job.timeouts:
        kinds = by_sequence.setdefault(timeout.sequence, {})
        kinds.setdefault((timeout.operation, timeout.num_elements), []).append(
            -1 if timeout.rank is None else timeout.rank
        )
    for sequence, kinds in by_sequence.items():
        if len(kinds) > 1 and "GATHER" not in str(list(kinds)):
            yield make_cause(
                "job.desync",
                f"ranks wait in different collectives at number {sequence}: "
                + " and ".join(f"{operation} of {elements} elements" for operation, elements in list(kinds)[:3]),
                [Evidence(where=t.where, seen=t.text) for t in job.timeouts if t.sequence == sequence],
                kind="failure",
                weight=weight,
                severity="critical",
                subject=f"collective {sequence}",
                path="any",
                fix="the program's ranks took different branches: not a network failure",
                commands=(),
            )
            return


def _init_hang(job: JobFacts, *, has_primary: bool) -> Iterator[Cause]:
    hung = [comm for comm in job.nccl.comms if comm.is_hung]
    if not hung or has_primary:
        return
    comm = max(hung, key=lambda c: c.num_ranks)
    never = sorted(set(range(comm.num_ranks)) - comm.started)
    stuck = sorted(comm.started - comm.completed)
    if never and len(comm.started) > 0:
        title = (
            f"set-up hangs: {len(never)} of {comm.num_ranks} ranks never began it "
            f"(rank {', '.join(map(str, never[:8]))})"
        )
        fix = "these ranks died or wait elsewhere before NCCL starts; or their log is not among these files"
    else:
        title = f"set-up hangs: rank {', '.join(map(str, stuck[:8]))} began it and did not end it"
        fix = "these ranks cannot reach the others: interface, firewall, or a host that differs"
    yield make_cause(
        "nccl.init-hang",
        title,
        job.nccl.lines("comm", "sockets"),
        kind="failure",
        weight=0.75,
        severity="critical",
        subject="init",
        path="tcp",
        fix=fix,
        commands=(
            "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET",
            "ip -br addr",
            "export NCCL_SOCKET_IFNAME=<interface>",
        ),
        alternatives="a log that was cut during the set-up looks the same",
    )


def _unexplained(failures: Sequence[Failure]) -> Cause:
    return make_cause(
        "nccl.error-unexplained",
        f"{names(dict.fromkeys(who(f) for f in failures), limit=3)}: NCCL failed ({failures[0].detail}), and why is "
        "not in these files",
        evidence_of(failures[:4]),
        kind="failure",
        weight=0.45,
        severity="critical",
        subject="nccl",
        path="any",
        fix="run it again with NCCL's own log, and give the logs of all ranks: the first warning there names the cause",
        commands=("export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH", "wirespeed doctor logs *.log"),
        source="torch.distributed: DistBackendError",
    )


def _only_secondary(job: JobFacts) -> Iterator[Cause]:
    secondary = [f for f in job.failures if not f.is_primary and f.kind in _FOLLOW_UPS]
    if secondary and all(f.kind == "unexplained" for f in secondary) and not job.laggards and job.desync is None:
        yield _unexplained(secondary)
    elif secondary and not job.laggards and job.desync is None:
        peers = sorted({f.peer for f in secondary if f.peer})
        yield make_cause(
            "job.peer-gone",
            f"{names(dict.fromkeys(who(f) for f in secondary), limit=3)} lost a peer"
            + (f" ({names(peers, limit=3)})" if peers else "")
            + "; why it went is not in these files",
            evidence_of(secondary[:4]),
            kind="failure",
            weight=0.5,
            severity="critical",
            subject="peer",
            path="any",
            fix="give the log of that peer too: the first failure is there",
            commands=("wirespeed doctor logs *.log",),
            alternatives="a firewall that drops idle connections ends them the same way, with no failure on any rank",
        )
    elif job.timeouts and not job.laggards and job.desync is None and not secondary:
        yield make_cause(
            "job.collective-timeout",
            f"{len(job.timeouts)} rank(s) waited in vain in {job.timeouts[0].operation} number "
            f"{job.timeouts[0].sequence}, "
            "and no rank says why",
            [Evidence(where=t.where, seen=t.text) for t in job.timeouts[:4]],
            kind="failure",
            weight=0.5,
            severity="critical",
            subject="collective",
            path="any",
            fix="give the logs of all ranks, or their flight-recorder dumps: the rank that did not arrive is the cause",
            commands=("export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",),
        )
