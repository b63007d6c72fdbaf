"""Settings of NCCL, gloo and torchrun: this environment, running ranks, /etc/nccl.conf and ~/.nccl.conf.

NCCL itself reads: the environment first, then ~/.nccl.conf (or NCCL_CONF_FILE), then /etc/nccl.conf. A setting is
judged by what this host has; whether it took effect only NCCL's log tells. Environments of other users' processes need
root.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Severity, Unknown, check
from wirespeed.doctor.inventory import HostView
from wirespeed.doctor.launch_rules import ENV_DOCS, RULES, number

_PER_RANK = (
    "RANK",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "CUDA_VISIBLE_DEVICES",
)
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
            own = name if ":" in part else name.split(":", maxsplit=1)[0]
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
                given, f"one of {', '.join(names)}", "name one that every host has, or unset it",
                f"marin#6940; {ENV_DOCS}",
            )  # fmt: skip
        elif given.value.startswith("^") and "lo" in taken:
            excluded = [name for name in taken if name.startswith(_EXCLUDED)]
            yield _finding(
                "launch.excludes-too-little", variable, "warning",
                f"{variable}={given.value} replaces NCCL's own exclusions: it may take {', '.join(excluded)}.",
                given, "^docker,lo,virbr, or a name", "use ^docker,lo,virbr or name the interface", f"{ENV_DOCS}; "
                                                                                                    "horovod#584",
            )  # fmt: skip
        elif all(name.startswith(_EXCLUDED) for name in taken):
            yield _finding(
                "launch.unroutable-interface", variable, "critical",
                f"{variable}={given.value} takes {', '.join(taken)}, which other hosts cannot reach.",
                given, "an interface of the cluster's network", "name that interface", f"{ENV_DOCS}; horovod#584",
            )  # fmt: skip
    given = held.get("NCCL_IB_HCA")
    if given is not None and view.rdma_ports:
        yield Fact(key="launch.NCCL_IB_HCA", value=given.value)
        ports = [port.name for port in view.rdma_ports if port.is_active]
        if not matching(given.value, ports):
            yield _finding(
                "launch.no-such-hca", "NCCL_IB_HCA", "critical",
                f"NCCL_IB_HCA={given.value} names no active RDMA port of this host: NCCL falls back to TCP.",
                given, f"some of {', '.join(ports)}", "correct it or unset it", f"{ENV_DOCS}; nccl#1526",
            )  # fmt: skip


def _finding(  # noqa: PLR0917 - a table's columns, in the order of a Finding's fields
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


@check("launch.settings", "values of NCCL settings")
def values(view: HostView) -> Iterator[Outcome]:
    """Each rule, then products of two."""
    held = settings(view)
    for name, given in held.items():
        if name.startswith(("NCCL_", "GLOO_")) and name not in (
            "NCCL_SOCKET_IFNAME",
            "NCCL_IB_HCA",
            "GLOO_SOCKET_IFNAME",
        ):
            yield Fact(key=f"launch.{name}", value=given.value)
    for rule in RULES:
        one = held.get(rule.variable)
        if one is not None and rule.is_bad(one.value, view):
            yield _finding(
                rule.id, rule.variable, rule.severity, rule.title, one, rule.expected, rule.remedy, rule.source
            )
    sockets, threads = held.get("NCCL_NSOCKS_PERTHREAD"), held.get("NCCL_SOCKET_NTHREADS")
    if sockets is not None:
        product = (number(sockets.value) or 0) * (1 if threads is None else number(threads.value) or 0)
        if product > 64:
            yield _finding(
                "launch.too-many-sockets", "NCCL_NSOCKS_PERTHREAD", "warning",
                f"{product} sockets per connection: NCCL allows 64 and ignores the rest.", sockets,
                "NCCL_NSOCKS_PERTHREAD x NCCL_SOCKET_NTHREADS at most 64", "lower one of the two", ENV_DOCS,
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
                Evidence(
                    where="NCCL_IB_QPS_PER_CONNECTION",
                    seen="unset" if queue_pairs is None else "1",
                    expected="2 or more",
                ),
            ),
            remedy=Remedy(text="export NCCL_IB_QPS_PER_CONNECTION=2 on every rank"),
            source=ENV_DOCS,
            path="rdma",
        )


@check("launch.ranks", "whether the ranks that run on this host have the same settings")
def ranks(view: HostView) -> Iterator[Outcome]:
    """Variables that differ between ranks of one job."""
    for job, processes in running_ranks(view).items():
        names = {
            name
            for environ in processes.values()
            for name in environ
            if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))
        }
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
                        Evidence(where=f"rank {', '.join(who[:8])}", seen=value)
                        for value, who in sorted(by_value.items())
                    ),
                    remedy=Remedy(
                        text="export it the same on all ranks: torchrun and srun pass the submitting shell's on"
                    ),
                    source="NCCL user guide: settings must agree between ranks",
                )
    if not view.is_root and not running_ranks(view):
        yield Unknown(
            what="settings of other users' running jobs", why="their environments may not be read", hint="run as root"
        )


@check("launch.scheduling", "how the kernel schedules ranks that compute and communicate on the same processors")
def scheduling(view: HostView) -> Iterator[Outcome]:
    """Ranks of gloo on a crowded host: each has several threads that take the processor from one another."""
    pids = [pid for processes in running_ranks(view).values() for pid in processes]
    num_cpus = view.num_cpus
    if not pids or view.gpus or num_cpus is None or 2 * len(pids) <= num_cpus:
        return
    policies: dict[int, str] = {}
    for pid in pids:
        # The name in parentheses may hold spaces; the policy is the 39th field behind it (proc(5)).
        fields = (view.system.read_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        if len(fields) > 38:
            policies[pid] = fields[38]
    usual = [pid for pid, policy in policies.items() if policy == "0"]
    if usual:
        yield Finding(
            id="launch.gloo-scheduling",
            subject=f"{len(usual)} ranks",
            severity="notice",
            title=f"{len(pids)} ranks share {num_cpus} processors in time slices: gloo's threads interrupt each other.",
            evidence=(Evidence(where=f"/proc/{usual[0]}/stat policy", seen="0 (other)", expected="3 (batch)"),),
            remedy=Remedy(
                text="call os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)) before init_process_group, "
                "or start ranks with chrt",
                commands=("chrt --batch 0 torchrun ...",),
            ),
            source="measured in this project's lab: all_reduce of 1 KiB over 4 ranks 4.4 to 1.3 ms",
        )


CHECKS = (interfaces, values, ranks, scheduling)
