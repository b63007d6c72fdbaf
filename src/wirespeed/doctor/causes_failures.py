"""Why a job stopped or hung: the earliest primary failure over all ranks, and what it means in its surroundings.

A completion error says only that the peer did not answer. When it comes at once the two never reached each other (GID,
MTU, firewall, rails); after a long run a link flapped or the peer died, and the peer's own log or kernel says which.
What a program did on its own (out of memory, an exception, a kill) goes before network failures that are not earlier.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator

import msgspec

from wirespeed.doctor.causes import Cause, make_cause, names
from wirespeed.doctor.causes_transport import is_virtual
from wirespeed.doctor.check import Evidence
from wirespeed.doctor.failure_words import WORDS, FailureText
from wirespeed.doctor.kernel_log import is_hardware_xid
from wirespeed.doctor.log_scan import JobFacts
from wirespeed.doctor.nccl_failures import COMPLETION_WORDS, Failure
from wirespeed.doctor.nccl_formats import version_key

AT_ONCE_S = 60.0
AT_ONCE_LINES = 100
"""A failure within this of the set-up came before any work was done; the watchdogs' shortest default is longer."""
PROGRAM = frozenset(("gpu_memory", "program", "gpu", "crash", "host_memory", "shared_memory", "cuda"))
LATE_WORDS = frozenset(("killed", "cancelled"))
"""What launchers do to the rest after one rank failed: a cause only where nothing else is."""


def failure_causes(job: JobFacts) -> Iterator[Cause]:
    """All causes of this kind, the earliest primary failure with the highest weight."""
    primary = sorted((f for f in job.failures if f.is_primary), key=_order(job))
    for place, failure in enumerate(primary[:8]):
        cause = _cause_of(failure, job)
        if cause is not None:
            yield _weighted(cause, 0.95 - 0.04 * place)
    yield from _kernel_causes(job, has_failure=bool(primary or job.failures or job.timeouts))
    yield from _desync(job, has_primary=bool(primary))
    yield from _init_hang(job, has_primary=bool(primary))
    if not primary:
        yield from _only_secondary(job)


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


def evidence_of(failures: Iterable[Failure]) -> tuple[Evidence, ...]:
    """The lines themselves."""
    return tuple(Evidence(where=f.where, seen=f.text + (f" (and {f.count - 1} more)" if f.count > 1 else ""))
                 for f in failures)  # fmt: skip


def is_at_once(failure: Failure) -> bool | None:
    """Whether it came right after the set-up; None where the log does not tell."""
    if failure.age_s is not None:
        return failure.age_s < AT_ONCE_S
    return None if failure.age_lines is None else failure.age_lines < AT_ONCE_LINES


def _who(failure: Failure) -> str:
    rank = "" if failure.rank is None else f"rank {failure.rank}"
    return " on ".join(part for part in (rank, failure.host) if part) or "a rank"


def _cause_of(failure: Failure, job: JobFacts) -> Cause | None:
    if failure.kind == "completion":
        return _completion(failure, job)
    if failure.kind == "modify_qp":
        return _modify_qp(failure, job)
    if failure.kind == "async_event":
        return _async_event(failure, job)
    if failure.kind == "connect":
        return _connect(failure, job)
    words = WORDS.get(failure.kind)
    return None if words is None else _from_words(failure, words, job)


def _from_words(failure: Failure, words: FailureText, job: JobFacts) -> Cause:
    extra: tuple[Evidence, ...] = ()
    title = words.title.format(who=_who(failure), detail=failure.detail)
    if failure.kind == "no_interface":
        extra = job.nccl.lines("setting NCCL_SOCKET_IFNAME")
        values = tuple(job.nccl.settings.get("NCCL_SOCKET_IFNAME", {}))
        if values:
            title += f": NCCL_SOCKET_IFNAME={values[0]} names none that exists on this host"
    if failure.kind in ("message_truncated", "version_mismatch") and len(job.nccl.versions) > 1:
        title += f" ({' and '.join(job.nccl.versions[:3])})"
        extra = job.nccl.lines("version")
    return make_cause(
        words.id, title, (*evidence_of([failure]), *extra), kind="failure", weight=0.9, severity="critical",
        subject=failure.host or "job", host=failure.host, path=words.path, fix=words.fix, commands=words.commands,
        caution=words.caution, source=words.source,
    )  # fmt: skip


def _is_link_local(text: str) -> bool:
    return "fe80:" in text.lower()


def _gid_cause(failure: Failure, job: JobFacts, why: str) -> Cause:
    index = tuple(job.nccl.settings.get("NCCL_IB_GID_INDEX", {}))
    is_auto = version_key(job.nccl.version) >= (2, 21)
    fix = (
        "unset NCCL_IB_GID_INDEX: since NCCL 2.21 it is chosen right by itself"
        if is_auto
        else "set NCCL_IB_GID_INDEX to the RoCE v2 entry with the IPv4 address (often 3), the same on all hosts"
    )
    return make_cause(
        "rdma.gid-index",
        f"RoCE peers never reached each other: {why}",
        (*evidence_of([failure]), *job.nccl.lines("setting NCCL_IB_GID_INDEX", "hcas")),
        kind="failure", weight=0.9, severity="critical", subject=failure.device or "gid", host=failure.host, fix=fix,
        commands=("show_gids", "unset NCCL_IB_GID_INDEX" if is_auto else "export NCCL_IB_GID_INDEX=3"),
        undo=tuple(f"export NCCL_IB_GID_INDEX={value}" for value in index[:1]), source="nccl#426, #769",
    )  # fmt: skip


def _gid_reason(failure: Failure, job: JobFacts) -> str:
    """Why a GID is likely at fault; empty where nothing says so."""
    nccl = job.nccl
    index = nccl.settings.get("NCCL_IB_GID_INDEX", {})
    if nccl.hcas and not nccl.is_roce:
        return ""  # on InfiniBand fe80 is the usual prefix
    if _is_link_local(failure.detail) or _is_link_local(failure.peer):
        return "a GID is link-local (fe80), which is RoCE v1 or leads nowhere"
    if "local GID index" in failure.detail and nccl.is_roce and index:
        return f"NCCL_IB_GID_INDEX={next(iter(index))} does not name the same kind of address on all hosts"
    if not nccl.is_roce:
        return ""
    if len(index) > 1:
        return f"NCCL_IB_GID_INDEX differs between hosts ({', '.join(sorted(index))})"
    if index and next(iter(index)) in ("0", "1"):
        return f"NCCL_IB_GID_INDEX={next(iter(index))} is usually RoCE v1 or link-local"
    if index and version_key(nccl.version) >= (2, 21):
        return f"NCCL_IB_GID_INDEX={next(iter(index))} is fixed, and the index of an address may differ between hosts"
    if not index and (0, 0) < version_key(nccl.version) < (2, 21):
        return "NCCL before 2.21 takes GID index 0, which is RoCE v1 or link-local"
    return ""


def _completion(failure: Failure, job: JobFacts) -> Cause:
    code = failure.code if failure.code is not None else -1
    evidence = evidence_of([failure])
    words = COMPLETION_WORDS.get(code, "a completion error")
    common = {"kind": "failure", "weight": 0.85, "severity": "critical", "subject": failure.device or "rdma",
              "host": failure.host}  # fmt: skip
    if code == 4:
        return make_cause(
            "rdma.local-protection",
            f"{_who(failure)}: the NIC may not read the GPU's memory (status 4, {words}): ACS or the GPUDirect module",
            (*evidence, *job.nccl.lines("via NET")), path="gpu",
            fix="on bare metal turn ACS off on the PCI bridges; in a VM use ATS; load the peermem module of this driver",
            commands=("lspci -vvv | grep -i ACSCtl", "setpci -s <BDF> ECAP_ACS+0x6.w=0000",
                      "export NCCL_NET_GDR_LEVEL=LOC   # a test: works without GPUDirect, slower"),
            source="NCCL troubleshooting guide; HINT of 2.30", **common,
        )  # fmt: skip
    at_once = is_at_once(failure)
    if code == 12 and at_once is not False:
        reason = _gid_reason(failure, job)
        if reason:
            return _gid_cause(failure, job, reason)
        families = {hca.family for hcas in job.nccl.hcas.values() for hca in hcas}
        if len(families) > 1:
            return make_cause(
                "nccl.mixed-hcas",
                f"RDMA ports of different makes do not reach each other: {', '.join(sorted(families))}",
                (*evidence, *job.nccl.lines("hcas")), fix="keep to one make with NCCL_IB_HCA, with the GID index that is "
                "right for it", commands=(f"export NCCL_IB_HCA={sorted(families)[0]}",), source="nccl#1526", **common,
            )  # fmt: skip
    if code == 12 and at_once:
        return make_cause(
            "rdma.never-connected",
            f"{_who(failure)} never reached its peer {failure.peer or ''} over RDMA (status 12 at once)".replace("  ", " "),
            (*evidence, *job.nccl.lines("hcas")),
            fix="test the pair alone; then MTU, VLAN or partition, firewall for UDP 4791 (RoCE), and whether rails are joined",
            commands=("ib_write_bw -d <hca> <peer>", "ibv_devinfo | grep -E 'active_mtu|state'",
                      "export NCCL_CROSS_NIC=0   # where rails are not joined"), source="nccl#1405, #1814",
            alternatives="GID, MTU, VLAN and firewall look alike here: ib_write_bw between the two tells whether NCCL matters",
            **common,
        )  # fmt: skip
    if code in (12, 13):
        return _late_loss(failure, job, words)
    return make_cause(
        "rdma.completion-error", f"{_who(failure)}: RDMA operation failed with status {code} ({words})", evidence,
        fix="look at the peer's log and at both hosts' kernel logs at that time", commands=("dmesg -T | grep -i mlx5",),
        **common,
    )  # fmt: skip


def _late_loss(failure: Failure, job: JobFacts, words: str) -> Cause:
    flaps = [event for event in job.kernel if event.kind == "carrier"]
    evidence = (*evidence_of([failure]), *(Evidence(where=e.where, seen=e.text) for e in flaps[:2]))
    after = "" if failure.age_s is None else f" {failure.age_s / 60:.0f} minutes into the job"
    common = {"kind": "failure", "weight": 0.8, "severity": "critical", "subject": failure.device or "rdma",
              "host": failure.host}  # fmt: skip
    if flaps:
        return _flap(flaps[0].device, failure.host, evidence)
    if failure.code == 13:
        return make_cause(
            "rdma.receiver-not-ready", f"{_who(failure)}: the peer stopped posting receives{after} ({words})", evidence,
            fix="the peer hangs or is starved of CPU: look at its log and processes", commands=("py-spy dump --pid <pid>",),
            **common,
        )  # fmt: skip
    roce = " On RoCE without PFC/ECN, loss under load looks the same." if job.nccl.is_roce else ""
    return make_cause(
        "rdma.peer-lost", f"{_who(failure)} lost its peer {failure.peer or ''}{after}: {words}".replace("  ", " "),
        evidence,
        fix="look at the peer first: dead process, host or NIC; then at link errors on both ends. NCCL_IB_TIMEOUT=22 is a "
        "test that buys time, not a repair",
        commands=("dmesg -T | grep -iE 'mlx5|link|xid'", "rdma statistic show | grep -E 'retry|seq_err|timeout'"),
        source="nccl#1405; NCCL environment documentation",
        alternatives="a flapping link, a dead peer and packet loss look alike from here; the peer's kernel log tells." + roce,
        **common,
    )  # fmt: skip


def _modify_qp(failure: Failure, job: JobFacts) -> Cause:
    reason = _gid_reason(failure, job)
    local, remote = _ipv4_of(failure.detail), _ipv4_of(failure.peer)
    if failure.code == 110 or "timed out" in failure.detail:
        if local is not None and remote is not None and local != remote and not _same_net(local, remote):
            return make_cause(
                "rdma.cross-rail",
                f"{_who(failure)} tried to reach {remote} from {local}: two rails that no route joins",
                evidence_of([failure]), kind="failure", weight=0.88, severity="critical", subject=failure.device or "rail",
                host=failure.host, fix="keep each NIC to its own rail, or join the rails by routes",
                commands=("export NCCL_CROSS_NIC=0",), undo=("unset NCCL_CROSS_NIC",), source="HINT in NCCL's ibvwrap.cc",
            )  # fmt: skip
        if not reason:
            return make_cause(
                "rdma.address-unresolved",
                f"{_who(failure)} cannot resolve its RDMA peer {remote or failure.peer}".rstrip(),
                evidence_of([failure]), kind="failure", weight=0.8, severity="critical", host=failure.host,
                subject=failure.device or "rdma",
                fix="ping the peer's address from this NIC; check ARP, VLAN, routes; where rails are apart NCCL_CROSS_NIC=0",
                commands=("ping -I <interface> <peer>", "export NCCL_CROSS_NIC=0"),
                alternatives="a wrong GID index looks the same: show_gids on both hosts tells",
            )  # fmt: skip
    return _gid_cause(failure, job, reason or "the GID index is not valid, or not of the same kind, on both hosts")


def _ipv4_of(text: str) -> ipaddress.IPv4Address | None:
    at = text.rfind("::ffff:")
    if at < 0:
        return None
    word = text[at + 7 :].split(",")[0].split()[0] if text[at + 7 :].strip() else ""
    try:
        return ipaddress.IPv4Address(word)
    except ValueError:
        found = ipaddress.IPv6Address(f"::ffff:{word}").ipv4_mapped if _is_hex_pair(word) else None
        return found


def _is_hex_pair(word: str) -> bool:
    parts = word.split(":")
    return len(parts) == 2 and all(0 < len(part) <= 4 and all(c in "0123456789abcdef" for c in part) for part in parts)


def _same_net(one: ipaddress.IPv4Address, other: ipaddress.IPv4Address) -> bool:
    return int(one) >> 8 == int(other) >> 8


def _async_event(failure: Failure, job: JobFacts) -> Cause:
    words = failure.detail.lower()
    if "local access violation" in words:
        is_new = version_key(job.nccl.version) >= (2, 20)
        return make_cause(
            "rdma.mtu-mismatch" if is_new else "rdma.local-protection",
            f"{_who(failure)}: local access violation; "
            + ("since NCCL 2.20 this is what peers of different MTU end with" if is_new else "ACS or the GPUDirect module"),
            (*evidence_of([failure]), *job.nccl.lines("version")), kind="failure", weight=0.88, severity="critical",
            subject=failure.device or "rdma", host=failure.host,
            fix="set the same MTU on every host and switch port of this network",
            commands=("ibv_devinfo | grep -E 'hca_id|active_mtu'   # on every host",
                      "ip link set <interface> mtu <same everywhere>"),
            caution="changing the MTU resets the link", source="nccl#1524",
            alternatives="with equal MTU everywhere: ACS or a GPUDirect module of another driver version",
        )  # fmt: skip
    if "port" in words:
        return _flap(failure.device, failure.host, evidence_of([failure]))
    return make_cause(
        "rdma.async-event", f"{_who(failure)}: the NIC reported {failure.detail}", evidence_of([failure]), kind="failure",
        weight=0.8, severity="critical", subject=failure.device or "rdma", host=failure.host,
        fix="look at the NIC in the kernel log, and at its firmware", commands=("dmesg -T | grep -i mlx5",),
    )  # fmt: skip


def _flap(device: str, host: str, evidence: tuple[Evidence, ...]) -> Cause:
    return make_cause(
        "nic.link-flap",
        f"the link of {device or 'a NIC'} on {host or 'a host'} went down while the job ran",
        evidence, kind="failure", weight=0.92, severity="critical", subject=device or "nic", host=host, path="any",
        fix="exchange cable or optic, then look at the switch port; keep the host out of jobs until then",
        commands=("mlxlink -d <device> -m -c", "ethtool -S <interface> | grep -E 'link_down|symbol|corrected'"),
        source="nccl#905; lit-llama#380",
    )  # fmt: skip


def _connect(failure: Failure, job: JobFacts) -> Cause:
    wrong = sorted({
        name for held in (job.nccl.bootstrap, job.nccl.sockets) for pairs in held.values() for name, address in pairs
        if is_virtual(name) and (not failure.peer or address.rpartition(".")[0] == failure.peer.rpartition(".")[0]
                                 or failure.peer.startswith("127."))
    })  # fmt: skip
    if wrong or failure.peer.startswith(("172.17.", "127.")):
        return make_cause(
            "nccl.wrong-interface",
            f"{_who(failure)} was told to connect to {failure.peer or 'an address'} of {names(wrong) if wrong else 'a bridge'}, "
            "which leads to no other host",
            (*evidence_of([failure]), *job.nccl.lines(*(f"bootstrap {name}" for name in wrong), "sockets")),
            kind="failure", weight=0.92, severity="critical", subject=wrong[0] if wrong else "interface", path="tcp",
            host=failure.host, fix="name the interface that joins the hosts; an exclusion must name all: ^docker,lo,virbr",
            commands=("ip -br addr", "export NCCL_SOCKET_IFNAME=<interface>"), source="horovod#584",
        )  # fmt: skip
    idle = failure.age_s is not None and failure.age_s > 600
    return make_cause(
        "tcp.blocked",
        f"{_who(failure)} cannot connect to {failure.peer or 'its peer'}: {failure.detail}"
        + ("; a firewall that forgets idle connections does this late in a job" if idle else ""),
        evidence_of([failure]), kind="failure", weight=0.85, severity="critical", subject="firewall", path="tcp",
        host=failure.host,
        fix="open all TCP ports between the hosts (NCCL and gloo choose them freely), or bind them with a port range",
        commands=("iptables -S; nft list ruleset", "nc -vz <peer> <port>",
                  "sysctl -w net.ipv4.ip_local_port_range='50000 51000'   # then open these"),
        source="nccl#1105, #706; nccl-tests#162",
        alternatives="a peer that is down or has another address looks the same: ping it",
    )  # fmt: skip


def _kernel_causes(job: JobFacts, *, has_failure: bool) -> Iterator[Cause]:
    for event in job.kernel:
        evidence = (Evidence(where=event.where, seen=event.text),)
        words = WORDS.get(f"kernel_{event.kind}")
        if event.kind == "carrier":
            if event.count > 1 or has_failure:
                # Once is a flap only where something failed too: links also come up at boot.
                flap = _flap(event.device, "", evidence)
                yield _weighted(flap, 0.9 if event.count > 1 and has_failure else 0.7)
        elif words is not None and (event.kind != "xid" or is_hardware_xid(event)):
            detail = (
                event.device
                if event.code is None
                else f"Xid {event.code} ({event.detail or 'see NVIDIA documentation'})"
            )
            yield make_cause(
                words.id, words.title.format(who=event.device or "this host", detail=detail), evidence,
                kind="failure" if words.is_fatal and has_failure else "capability",
                weight=0.97 if words.is_fatal and has_failure else 0.6, severity=words.severity,
                subject=event.device or "host", path=words.path, fix=words.fix, commands=words.commands,
                source=words.source,
            )  # fmt: skip


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
            kind="failure", weight=weight, severity="critical", subject=f"rank {ranks}", path="any",
            fix="look at what these ranks do at that point (branches on rank or data, uneven batches, an exception)",
            commands=("py-spy dump --pid <pid of the rank>",), source="torch flight recorder",
        )  # fmt: skip
    if job.laggards:
        first = min(job.laggards, key=lambda p: p.enqueued)
        ranks = ", ".join(str(p.rank) for p in sorted(job.laggards, key=lambda p: p.enqueued)[:8])
        evidence = [Evidence(where=p.where, seen=f"rank {p.rank}: last enqueued work {p.enqueued}, completed {p.completed}")
                    for p in job.laggards[:3]]  # fmt: skip
        evidence += [Evidence(where=t.where, seen=t.text) for t in job.timeouts[:2]]
        yield make_cause(
            "job.desync", f"rank {ranks} did not arrive: it enqueued {first.enqueued} collectives, others more", evidence,
            kind="failure", weight=weight, severity="critical", subject=f"rank {ranks}", path="any",
            fix="the network waits for the program here: look at that rank (data loader, checkpoint, evaluation, exception)",
            commands=("py-spy dump --pid <pid of the rank>", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000   # flight recorder"),
        )  # fmt: skip
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
                kind="failure", weight=weight, severity="critical", subject=f"collective {sequence}", path="any",
                fix="the program's ranks took different branches: not a network failure", commands=(),
            )  # fmt: skip
            return


def _init_hang(job: JobFacts, *, has_primary: bool) -> Iterator[Cause]:
    hung = [comm for comm in job.nccl.comms if comm.is_hung]
    if not hung or has_primary:
        return
    comm = max(hung, key=lambda c: c.num_ranks)
    never = sorted(set(range(comm.num_ranks)) - comm.started)
    stuck = sorted(comm.started - comm.completed)
    if never and len(comm.started) > 0:
        title = (f"set-up hangs: {len(never)} of {comm.num_ranks} ranks never began it "
                 f"(rank {', '.join(map(str, never[:8]))})")  # fmt: skip
        fix = "these ranks died or wait elsewhere before NCCL starts; or their log is not among these files"
    else:
        title = f"set-up hangs: rank {', '.join(map(str, stuck[:8]))} began it and did not end it"
        fix = "these ranks cannot reach the others: interface, firewall, or a host that differs"
    yield make_cause(
        "nccl.init-hang", title, job.nccl.lines("comm", "sockets"), kind="failure", weight=0.75, severity="critical",
        subject="init", path="tcp", fix=fix,
        commands=("export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET", "ip -br addr",
                  "export NCCL_SOCKET_IFNAME=<interface>"),
        alternatives="a log that was cut during the set-up looks the same",
    )  # fmt: skip


def _only_secondary(job: JobFacts) -> Iterator[Cause]:
    secondary = [
        f
        for f in job.failures
        if not f.is_primary and f.kind in ("closed", "gloo", "completion", "ras_dead", "connect")
    ]
    if secondary and not job.laggards and job.desync is None:
        peers = sorted({f.peer for f in secondary if f.peer})
        yield make_cause(
            "job.peer-gone",
            f"{names(dict.fromkeys(_who(f) for f in secondary), limit=3)} lost a peer"
            + (f" ({names(peers, limit=3)})" if peers else "") + "; why it went is not in these files",
            evidence_of(secondary[:4]), kind="failure", weight=0.5, severity="critical", subject="peer", path="any",
            fix="give the log of that peer too: the first failure is there",
            commands=("wirespeed doctor logs *.log",),
            alternatives="a firewall that drops idle connections ends them the same way, with no failure on any rank",
        )  # fmt: skip
    elif job.timeouts and not job.laggards and job.desync is None and not secondary:
        yield make_cause(
            "job.collective-timeout",
            f"{len(job.timeouts)} rank(s) waited in vain in {job.timeouts[0].operation} number {job.timeouts[0].sequence}, "
            "and no rank says why",
            [Evidence(where=t.where, seen=t.text) for t in job.timeouts[:4]], kind="failure", weight=0.5,
            severity="critical", subject="collective", path="any",
            fix="give the logs of all ranks, or their flight-recorder dumps: the rank that did not arrive is the cause",
            commands=("export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",),
        )  # fmt: skip
