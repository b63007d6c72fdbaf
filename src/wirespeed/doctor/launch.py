"""Settings of NCCL, gloo and torchrun: this environment, running ranks, /etc/nccl.conf and ~/.nccl.conf.

NCCL itself reads: the environment first, then ~/.nccl.conf (or NCCL_CONF_FILE), then /etc/nccl.conf. A setting is judged
by what this host has; whether it took effect only NCCL's log tells. Environments of other users' processes need root.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Severity, Unknown, check
from wirespeed.doctor.inventory import HostView

_ENV_DOCS = "NCCL user guide, environment variables"
_PER_RANK = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "CUDA_VISIBLE_DEVICES")
_EXCLUDED = ("docker", "lo", "virbr")  # what NCCL leaves out by itself
_MAX_PROCESSES = 20_000


@dataclass(frozen=True, kw_only=True)
class Given:
    """One variable: its value and where it stands."""

    value: str
    where: str


def settings(view: HostView) -> dict[str, Given]:
    """What a rank started from here would see, the strongest source first."""
    held: dict[str, Given] = {}
    for name, value in sorted(view.system.environ().items()):
        if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_", "TP_SOCKET_", "MASTER_")):
            held[name] = Given(value=value, where=f"environment {name}")
    home = view.system.environ().get("HOME", "/root")
    own = held["NCCL_CONF_FILE"].value if "NCCL_CONF_FILE" in held else f"{home}/.nccl.conf"
    for path in (own, "/etc/nccl.conf"):
        for line in (view.system.read_text(path) or "").splitlines():
            match = re.match(r"\s*([A-Z][A-Z0-9_]*)\s*=\s*(.*?)\s*$", line)
            if match is not None:
                held.setdefault(match[1], Given(value=match[2], where=path))
    for ranks in running_ranks(view).values():
        for pid, environ in ranks.items():
            for name, value in environ.items():
                if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_")):
                    held.setdefault(name, Given(value=value, where=f"/proc/{pid}/environ"))
    return held


def running_ranks(view: HostView) -> dict[str, dict[int, Mapping[str, str]]]:
    """Job (master address and port) -> process -> its variables, of processes that a launcher started here."""
    return view.keep("running_ranks", lambda: _running_ranks(view))


def _running_ranks(view: HostView) -> dict[str, dict[int, Mapping[str, str]]]:
    jobs: dict[str, dict[int, Mapping[str, str]]] = {}
    pids = [int(name) for name in view.system.list_dir("/proc") if name.isdigit()]
    for pid in sorted(pids)[:_MAX_PROCESSES]:
        environ = view.system.process_environ(pid)
        if environ and any(name in environ for name in _PER_RANK if name != "CUDA_VISIBLE_DEVICES"):
            job = f"{environ.get('MASTER_ADDR', '?')}:{environ.get('MASTER_PORT', environ.get('SLURM_JOB_ID', '?'))}"
            jobs.setdefault(job, {})[pid] = environ
    return jobs


def matching(selector: str, names: list[str], *, is_exact_by_default: bool = False) -> list[str]:
    """Which of ``names`` a selector of NCCL_SOCKET_IFNAME or NCCL_IB_HCA takes: ``^`` excludes, ``=`` is exact.

    Else a prefix counts. A port (``mlx5_0:1``) is compared where the selector names one.
    """
    is_excluding = selector.startswith("^")
    rest = selector.removeprefix("^") if is_excluding else selector
    is_exact = rest.startswith("=") or is_exact_by_default
    wanted = [part.strip() for part in rest.removeprefix("=").split(",") if part.strip()]

    def is_named(name: str) -> bool:
        for part in wanted:
            own = name if ":" in part else name.split(":")[0]
            if own == part or (not is_exact and own.startswith(part)):
                return True
        return False

    return [name for name in names if is_named(name) != is_excluding]


@check("launch.interfaces", "interfaces and RDMA devices that NCCL and gloo are told to use")
def interfaces(view: HostView) -> Iterator[Outcome]:
    """Names that do not exist here, and selections that take the loopback or a container bridge."""
    held = settings(view)
    names = ["lo", *(nic.name for nic in view.nics)]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        given = held.get(variable)
        if given is None:
            continue
        yield Fact(key=f"launch.{variable}", value=given.value)
        is_nccl = variable.startswith("NCCL")
        taken = matching(given.value, names, is_exact_by_default=not is_nccl)
        if not taken:
            yield _finding(
                "launch.no-such-interface", variable, "critical",
                f"{variable}={given.value} names no interface of this host: the job cannot start here.",
                given, f"one of {', '.join(names)}", "name one that every host has, or unset it", "marin#6940; " + _ENV_DOCS,
            )  # fmt: skip
        elif given.value.startswith("^") and "lo" in taken:
            excluded = [name for name in taken if name.startswith(_EXCLUDED)]
            yield _finding(
                "launch.excludes-too-little", variable, "warning",
                f"{variable}={given.value} replaces NCCL's own exclusions: it may take {', '.join(excluded)}.",
                given, "^docker,lo,virbr, or a name", "use ^docker,lo,virbr or name the interface", f"{_ENV_DOCS}; horovod#584",
            )  # fmt: skip
        elif all(name.startswith(_EXCLUDED) for name in taken):
            yield _finding(
                "launch.unroutable-interface", variable, "critical",
                f"{variable}={given.value} takes {', '.join(taken)}, which other hosts cannot reach.",
                given, "an interface of the cluster's network", "name that interface", f"{_ENV_DOCS}; horovod#584",
            )  # fmt: skip
    given = held.get("NCCL_IB_HCA")
    if given is not None and view.rdma_ports:
        yield Fact(key="launch.NCCL_IB_HCA", value=given.value)
        ports = [port.name for port in view.rdma_ports if port.is_active]
        if not matching(given.value, ports):
            yield _finding(
                "launch.no-such-hca", "NCCL_IB_HCA", "critical",
                f"NCCL_IB_HCA={given.value} names no active RDMA port of this host: NCCL falls back to TCP.",
                given, f"some of {', '.join(ports)}", "correct it or unset it", f"{_ENV_DOCS}; nccl#1526",
            )  # fmt: skip


def _finding(
    id_: str, subject: str, severity: Severity, title: str, given: Given, expected: str, remedy: str, source: str
) -> Finding:
    return Finding(
        id=id_,
        subject=subject,
        severity=severity,
        title=title,
        evidence=(Evidence(where=given.where, seen=f"{subject}={given.value}", expected=expected),),
        remedy=Remedy(text=remedy, commands=(f"unset {subject}",) if given.where.startswith("environment") else ()),
        source=source,
        path="any",
    )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A value of one variable that should not be. ``is_bad`` gets the value and the host."""

    variable: str
    id: str
    severity: Severity
    title: str
    expected: str
    remedy: str
    is_bad: Callable[[str, HostView], bool]
    source: str = _ENV_DOCS


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _outside(low: int, high: int) -> Callable[[str, HostView], bool]:
    def is_bad(text: str, _: HostView) -> bool:
        value = _number(text)
        return value is None or not low <= value <= high

    return is_bad


def _is_set(text: str, _: HostView) -> bool:
    return text not in ("", "0")


def _has_rdma(text: str, view: HostView) -> bool:
    return text not in ("", "0") and view.has_active_rdma


def _any(_text: str, _: HostView) -> bool:
    return True


RULES = (
    Rule(variable="NCCL_IB_DISABLE", id="launch.ib-disabled", severity="critical", is_bad=_has_rdma,
         title="NCCL_IB_DISABLE=1 on a host with active RDMA: every byte goes by TCP, 4 to 5 times slower.",
         expected="unset", remedy="unset it; if NCCL then fails, that is the fault to mend", source="sglang PR #1427"),
    Rule(variable="NCCL_NET", id="launch.net-socket", severity="critical",
         is_bad=lambda text, view: text.lower() == "socket" and view.has_active_rdma,
         title="NCCL_NET=Socket on a host with active RDMA: every byte goes by TCP.", expected="IB or unset", remedy="unset it"),
    Rule(variable="NCCL_P2P_DISABLE", id="launch.p2p-disabled", severity="warning", is_bad=_is_set,
         title="NCCL_P2P_DISABLE=1: GPUs of one host talk through host memory instead of NVLink or PCI Express.",
         expected="unset", remedy="unset it; it is a means of diagnosis"),
    Rule(variable="NCCL_SHM_DISABLE", id="launch.shm-disabled", severity="warning", is_bad=_is_set,
         title="NCCL_SHM_DISABLE=1: ranks of one host talk through the network.", expected="unset",
         remedy="unset it; give the container a larger /dev/shm instead"),
    Rule(variable="NCCL_IB_GID_INDEX", id="launch.gid-index", severity="warning",
         is_bad=lambda text, view: text != "-1" and any(port.is_roce for port in view.rdma_ports),
         title="NCCL_IB_GID_INDEX is fixed: harmful since NCCL 2.21 where the index differs between hosts.",
         expected="unset with NCCL 2.21 and later", remedy="unset it; with older NCCL: the index of the RoCE v2 IPv4 address",
         source=f"{_ENV_DOCS}; nccl#426, #769"),
    Rule(variable="NCCL_NET_GDR_LEVEL", id="launch.gdr-level", severity="notice",
         is_bad=lambda text, _: text.upper() in ("SYS", "5", "LOC", "0"),
         title="NCCL_NET_GDR_LEVEL is forced: SYS can be slower than host memory, LOC switches GPUDirect off.",
         expected="unset (PXB)", remedy="unset it, and mend the distance between GPU and NIC"),
    Rule(variable="NCCL_IB_RETRY_CNT", id="launch.retry-count", severity="critical", is_bad=_outside(0, 7),
         title="NCCL_IB_RETRY_CNT is outside what the hardware field holds: connections may fail or lose their retries.",
         expected="0 to 7", remedy="set 7", source="InfiniBand specification (3-bit field); nccl#1453"),
    Rule(variable="NCCL_IB_TIMEOUT", id="launch.ib-timeout", severity="warning", is_bad=_outside(18, 31),
         title="NCCL_IB_TIMEOUT is low or invalid: a short disturbance ends the job with status 12.",
         expected="18 to 31 (20 by default since 2.23)", remedy="unset it"),
    Rule(variable="NCCL_CHUNK_SIZE", id="launch.chunk-size", severity="critical",
         is_bad=lambda text, _: (_number(text) or 0) >= 1 << 20,
         title="NCCL_CHUNK_SIZE of 1 MiB and more is reported to corrupt data silently.", expected="unset", remedy="unset it",
         source="nccl#2409, #2408"),
    Rule(variable="NCCL_MIN_NCHANNELS", id="launch.deprecated", severity="notice", is_bad=_any,
         title="NCCL_MIN_NCHANNELS is deprecated.", expected="NCCL_MIN_CTAS", remedy="use NCCL_MIN_CTAS or unset it"),
    Rule(variable="NCCL_IB_CUDA_SUPPORT", id="launch.removed", severity="notice", is_bad=_any,
         title="NCCL_IB_CUDA_SUPPORT was removed in NCCL 2.4 and does nothing.", expected="unset", remedy="unset it"),
    Rule(variable="NCCL_DEBUG", id="launch.debug-trace", severity="notice", is_bad=lambda text, _: text.upper() == "TRACE",
         title="NCCL_DEBUG=TRACE writes a line per call and slows training.", expected="WARN or INFO", remedy="set WARN"),
    Rule(variable="NCCL_ALGO", id="launch.pinned-algorithm", severity="notice", is_bad=_any,
         title="NCCL_ALGO is pinned: NCCL no longer chooses by size.", expected="unset", remedy="unset it in production"),
    Rule(variable="NCCL_PROTO", id="launch.pinned-protocol", severity="notice", is_bad=_any,
         title="NCCL_PROTO is pinned: NCCL no longer chooses by size.", expected="unset", remedy="unset it in production"),
)  # fmt: skip


@check("launch.settings", "values of NCCL settings")
def values(view: HostView) -> Iterator[Outcome]:
    """Each rule, then products of two."""
    held = settings(view)
    for name, given in held.items():
        if name.startswith(("NCCL_", "GLOO_")) and name not in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME"):
            yield Fact(key=f"launch.{name}", value=given.value)
    for rule in RULES:
        one = held.get(rule.variable)
        if one is not None and rule.is_bad(one.value, view):
            yield _finding(rule.id, rule.variable, rule.severity, rule.title, one, rule.expected, rule.remedy, rule.source)
    sockets, threads = held.get("NCCL_NSOCKS_PERTHREAD"), held.get("NCCL_SOCKET_NTHREADS")
    if sockets is not None:
        product = (_number(sockets.value) or 0) * (1 if threads is None else _number(threads.value) or 0)
        if product > 64:
            yield _finding(
                "launch.too-many-sockets", "NCCL_NSOCKS_PERTHREAD", "warning",
                f"{product} sockets per connection: NCCL allows 64 and ignores the rest.", sockets,
                "NCCL_NSOCKS_PERTHREAD x NCCL_SOCKET_NTHREADS at most 64", "lower one of the two", _ENV_DOCS,
            )  # fmt: skip
    bonds = [port.device for port in view.rdma_ports if "bond" in port.device and port.is_active]
    queue_pairs = held.get("NCCL_IB_QPS_PER_CONNECTION")
    if bonds and (queue_pairs is None or queue_pairs.value == "1"):
        yield Finding(
            id="launch.bond-one-queue-pair",
            subject=", ".join(bonds),
            severity="notice",
            title=f"{', '.join(bonds)} is a bond, and one queue pair per connection uses one of its two links.",
            evidence=(
                Evidence(where="NCCL_IB_QPS_PER_CONNECTION", seen="unset" if queue_pairs is None else "1", expected="2 or more"),
            ),
            remedy=Remedy(text="export NCCL_IB_QPS_PER_CONNECTION=2 on every rank"),
            source=_ENV_DOCS,
            path="rdma",
        )


@check("launch.ranks", "whether the ranks that run on this host have the same settings")
def ranks(view: HostView) -> Iterator[Outcome]:
    """Variables that differ between ranks of one job."""
    for job, processes in running_ranks(view).items():
        names = {name for environ in processes.values() for name in environ if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))}
        for name in sorted(names):
            by_value: dict[str, list[str]] = {}
            for environ in processes.values():
                rank = next((environ[key] for key in _PER_RANK if key in environ), "?")
                by_value.setdefault(environ.get(name, "(unset)"), []).append(rank)
            if len(by_value) > 1:
                yield Finding(
                    id="launch.ranks-differ",
                    subject=name,
                    severity="warning",
                    title=f"{name} differs between ranks of the job at {job}.",
                    evidence=tuple(
                        Evidence(where=f"rank {', '.join(who[:8])}", seen=value) for value, who in sorted(by_value.items())
                    ),
                    remedy=Remedy(text="export it the same on all ranks: torchrun and srun pass the submitting shell's on"),
                    source="NCCL user guide: settings must agree between ranks",
                )
    if not view.is_root and not running_ranks(view):
        yield Unknown(what="settings of other users' running jobs", why="their environments may not be read", hint="run as root")


CHECKS = (interfaces, values, ranks)
