"""What RDMA failures mean: completion errors, queue pairs that do not connect, events of the NIC.

The same status means different things by its time: retries exceeded at once is a pair that never reached each other
(GID, MTU, firewall, rails), late it is a link that flapped or a peer that died. Where the log does not tell, the causes
of a failed start are looked for first.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any

from wirespeed.doctor.causes import Cause, make_cause
from wirespeed.doctor.check import Evidence
from wirespeed.doctor.log_scan import JobFacts
from wirespeed.doctor.nccl_failures import COMPLETION_WORDS, Failure
from wirespeed.doctor.nccl_formats import version_key

AT_ONCE_S = 60.0
AT_ONCE_LINES = 100
"""A failure within this of the set-up came before any work was done; the watchdogs' shortest default is longer."""


def evidence_of(failures: Iterable[Failure]) -> tuple[Evidence, ...]:
    """The lines themselves."""
    return tuple(
        Evidence(where=f.where, seen=f.text + (f" (and {f.count - 1} more)" if f.count > 1 else "")) for f in failures
    )


def is_at_once(failure: Failure) -> bool | None:
    """Whether it came right after the set-up; None where the log does not tell."""
    if failure.age_s is not None:
        return failure.age_s < AT_ONCE_S
    return None if failure.age_lines is None else failure.age_lines < AT_ONCE_LINES


def who(failure: Failure) -> str:
    """Rank and host for a sentence."""
    rank = "" if failure.rank is None else f"rank {failure.rank}"
    return " on ".join(part for part in (rank, failure.host) if part) or "a rank"


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
        kind="failure",
        weight=0.9,
        severity="critical",
        subject=failure.device or "gid",
        host=failure.host,
        fix=fix,
        commands=("show_gids", "unset NCCL_IB_GID_INDEX" if is_auto else "export NCCL_IB_GID_INDEX=3"),
        undo=tuple(f"export NCCL_IB_GID_INDEX={value}" for value in index[:1]),
        source="nccl#426, #769",
    )


def _gid_reason(failure: Failure, job: JobFacts) -> str:  # noqa: PLR0911 - one line per reason
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


def completion_cause(failure: Failure, job: JobFacts) -> Cause:
    """What a completion error means here."""
    code = failure.code if failure.code is not None else -1
    evidence = evidence_of([failure])
    words = COMPLETION_WORDS.get(code, "a completion error")
    common: dict[str, Any] = {
        "kind": "failure",
        "weight": 0.85,
        "severity": "critical",
        "subject": failure.device or "rdma",
        "host": failure.host,
    }
    if code == 4:
        return make_cause(
            "rdma.local-protection",
            f"{who(failure)}: the NIC may not read the GPU's memory (status 4, {words}): ACS or the GPUDirect module",
            (*evidence, *job.nccl.lines("via NET")),
            path="gpu",
            fix="on bare metal turn ACS off on the PCI bridges; in a VM use ATS; load the peermem module of this "
            "driver",
            commands=(
                "lspci -vvv | grep -i ACSCtl",
                "setpci -s <BDF> ECAP_ACS+0x6.w=0000",
                "export NCCL_NET_GDR_LEVEL=LOC   # a test: works without GPUDirect, slower",
            ),
            source="NCCL troubleshooting guide; HINT of 2.30",
            **common,
        )
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
                (*evidence, *job.nccl.lines("hcas")),
                fix="keep to one make with NCCL_IB_HCA, with the GID index that is right for it",
                commands=(f"export NCCL_IB_HCA={sorted(families)[0]}",),
                source="nccl#1526",
                **common,
            )
    if code == 12 and at_once:
        return make_cause(
            "rdma.never-connected",
            f"{who(failure)} never reached its peer {failure.peer or ''} over RDMA (status 12 at once)".replace(
                "  ", " "
            ),
            (*evidence, *job.nccl.lines("hcas")),
            fix="test the pair alone; then MTU, VLAN or partition, firewall for UDP 4791 (RoCE), and whether rails "
            "are joined",
            commands=(
                "ib_write_bw -d <hca> <peer>",
                "ibv_devinfo | grep -E 'active_mtu|state'",
                "export NCCL_CROSS_NIC=0   # where rails are not joined",
            ),
            source="nccl#1405, #1814",
            alternatives="GID, MTU, VLAN and firewall look alike here: ib_write_bw between the two tells whether "
            "NCCL matters",
            **common,
        )
    if code in (12, 13):
        return _late_loss(failure, job, words)
    return make_cause(
        "rdma.completion-error",
        f"{who(failure)}: RDMA operation failed with status {code} ({words})",
        evidence,
        fix="look at the peer's log and at both hosts' kernel logs at that time",
        commands=("dmesg -T | grep -i mlx5",),
        **common,
    )


def _late_loss(failure: Failure, job: JobFacts, words: str) -> Cause:
    flaps = [event for event in job.kernel if event.kind == "carrier"]
    evidence = (*evidence_of([failure]), *(Evidence(where=e.where, seen=e.text) for e in flaps[:2]))
    after = "" if failure.age_s is None else f" {failure.age_s / 60:.0f} minutes into the job"
    common: dict[str, Any] = {
        "kind": "failure",
        "weight": 0.8,
        "severity": "critical",
        "subject": failure.device or "rdma",
        "host": failure.host,
    }
    if flaps:
        return flap_cause(flaps[0].device, failure.host, evidence)
    if failure.code == 13:
        return make_cause(
            "rdma.receiver-not-ready",
            f"{who(failure)}: the peer stopped posting receives{after} ({words})",
            evidence,
            fix="the peer hangs or is starved of CPU: look at its log and processes",
            commands=("py-spy dump --pid <pid>",),
            **common,
        )
    roce = " On RoCE without PFC/ECN, loss under load looks the same." if job.nccl.is_roce else ""
    return make_cause(
        "rdma.peer-lost",
        f"{who(failure)} lost its peer{' ' + failure.peer if failure.peer else ''}{after}: {words}",
        evidence,
        fix="look at the peer first: dead process, host or NIC; then at link errors on both ends. "
        "NCCL_IB_TIMEOUT=22 is a "
        "test that buys time, not a repair",
        commands=("dmesg -T | grep -iE 'mlx5|link|xid'", "rdma statistic show | grep -E 'retry|seq_err|timeout'"),
        source="nccl#1405; NCCL environment documentation",
        alternatives="a flapping link, a dead peer and packet loss look alike from here; the peer's kernel log tells."
        + roce,
        **common,
    )


def modify_qp_cause(failure: Failure, job: JobFacts) -> Cause:
    """Why a queue pair could not be connected."""
    reason = _gid_reason(failure, job)
    local, remote = _ipv4_of(failure.detail), _ipv4_of(failure.peer)
    if failure.code == 110 or "timed out" in failure.detail:
        if local is not None and remote is not None and local != remote and not _same_net(local, remote):
            return make_cause(
                "rdma.cross-rail",
                f"{who(failure)} tried to reach {remote} from {local}: two rails that no route joins",
                evidence_of([failure]),
                kind="failure",
                weight=0.88,
                severity="critical",
                subject=failure.device or "rail",
                host=failure.host,
                fix="keep each NIC to its own rail, or join the rails by routes",
                commands=("export NCCL_CROSS_NIC=0",),
                undo=("unset NCCL_CROSS_NIC",),
                source="HINT in NCCL's ibvwrap.cc",
            )
        if not reason:
            return make_cause(
                "rdma.address-unresolved",
                f"{who(failure)} cannot resolve its RDMA peer {remote or failure.peer}".rstrip(),
                evidence_of([failure]),
                kind="failure",
                weight=0.8,
                severity="critical",
                host=failure.host,
                subject=failure.device or "rdma",
                fix="ping the peer's address from this NIC; check ARP, VLAN, routes; where rails are apart "
                "NCCL_CROSS_NIC=0",
                commands=("ping -I <interface> <peer>", "export NCCL_CROSS_NIC=0"),
                alternatives="a wrong GID index looks the same: show_gids on both hosts tells",
            )
    return _gid_cause(failure, job, reason or "the GID index is not valid, or not of the same kind, on both hosts")


def _ipv4_of(text: str) -> ipaddress.IPv4Address | None:
    at = text.rfind("::ffff:")
    if at < 0:
        return None
    word = text[at + 7 :].split(",", maxsplit=1)[0].split(maxsplit=1)[0] if text[at + 7 :].strip() else ""
    try:
        return ipaddress.IPv4Address(word)
    except ValueError:
        return ipaddress.IPv6Address(f"::ffff:{word}").ipv4_mapped if _is_hex_pair(word) else None


def _is_hex_pair(word: str) -> bool:
    parts = word.split(":")
    return len(parts) == 2 and all(0 < len(part) <= 4 and all(c in "0123456789abcdef" for c in part) for part in parts)


def _same_net(one: ipaddress.IPv4Address, other: ipaddress.IPv4Address) -> bool:
    return int(one) >> 8 == int(other) >> 8


def async_event_cause(failure: Failure, job: JobFacts) -> Cause:
    """What the NIC reported."""
    words = failure.detail.lower()
    if "local access violation" in words:
        is_new = version_key(job.nccl.version) >= (2, 20)
        return make_cause(
            "rdma.mtu-mismatch" if is_new else "rdma.local-protection",
            f"{who(failure)}: local access violation; "
            + (
                "since NCCL 2.20 this is what peers of different MTU end with"
                if is_new
                else "ACS or the GPUDirect module"
            ),
            (*evidence_of([failure]), *job.nccl.lines("version")),
            kind="failure",
            weight=0.88,
            severity="critical",
            subject=failure.device or "rdma",
            host=failure.host,
            fix="set the same MTU on every host and switch port of this network",
            commands=(
                "ibv_devinfo | grep -E 'hca_id|active_mtu'   # on every host",
                "ip link set <interface> mtu <same everywhere>",
            ),
            caution="changing the MTU resets the link",
            source="nccl#1524",
            alternatives="with equal MTU everywhere: ACS or a GPUDirect module of another driver version",
        )
    if "port" in words:
        return flap_cause(failure.device, failure.host, evidence_of([failure]))
    return make_cause(
        "rdma.async-event",
        f"{who(failure)}: the NIC reported {failure.detail}",
        evidence_of([failure]),
        kind="failure",
        weight=0.8,
        severity="critical",
        subject=failure.device or "rdma",
        host=failure.host,
        fix="look at the NIC in the kernel log, and at its firmware",
        commands=("dmesg -T | grep -i mlx5",),
    )


def flap_cause(device: str, host: str, evidence: tuple[Evidence, ...]) -> Cause:
    """A link that went down and came back."""
    return make_cause(
        "nic.link-flap",
        f"the link of {device or 'a NIC'} on {host or 'a host'} went down while the job ran",
        evidence,
        kind="failure",
        weight=0.92,
        severity="critical",
        subject=device or "nic",
        host=host,
        path="any",
        fix="exchange cable or optic, then look at the switch port; keep the host out of jobs until then",
        commands=("mlxlink -d <device> -m -c", "ethtool -S <interface> | grep -E 'link_down|symbol|corrected'"),
        source="nccl#905; lit-llama#380",
    )
