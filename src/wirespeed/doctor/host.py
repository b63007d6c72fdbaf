"""The host itself: processor clocks, NUMA, clock synchronisation, shared memory of containers, kernel messages.

Kernel messages need root on most systems (kernel.dmesg_restrict).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Setting, Severity, Unknown, check
from wirespeed.doctor.inventory import HostView
from wirespeed.units import format_size

_SHM = "/dev/shm"  # noqa: S108 - only looked at
_ENOUGH_SHARED_BYTES = 1024**3
_FLAPS_PER_DAY = 5  # azurehpc-health-checks: "lost carrier" in 24 h
_DAY_S = 86400


@check("host.identity", "kernel and kind of machine")
def identity(view: HostView) -> Iterator[Outcome]:
    """Facts that should agree between hosts."""
    if view.system.read_text("/proc/sys/kernel/hostname") is None:
        yield view.file_unknown("/proc/sys/kernel/hostname", "the host's name")
    kernel = view.system.read_text("/proc/sys/kernel/osrelease")
    if kernel is None:
        yield view.file_unknown("/proc/sys/kernel/osrelease", "the kernel's version")
    else:
        yield Fact(key="host.kernel", value=kernel)
    model = re.search(r"^model name\s*:\s*(.+)$", view.system.read_text("/proc/cpuinfo") or "", re.MULTILINE)
    if model is not None:
        yield Fact(key="host.cpu", value=model[1])
    if view.num_cpus is not None:
        yield Fact(key="host.cpus", value=str(view.num_cpus))
    yield Fact(key="host.gpus", value=str(len(view.gpus)))
    memory = re.search(r"^MemTotal:\s+(\d+) kB", view.system.read_text("/proc/meminfo") or "", re.MULTILINE)
    if memory is not None:
        yield Fact(key="host.memory", value=f"{round(int(memory[1]) / 2**20)} GiB")


def _hypervisor_decides(view: HostView) -> str | None:
    is_hidden = not view.system.list_dir("/sys/devices/system/cpu/cpu0/cpufreq")
    return "the hypervisor decides" if view.is_virtual and is_hidden else None


@check("host.cpu-clock", "processor frequency governor", applies=_hypervisor_decides)
def governor(view: HostView) -> Iterator[Outcome]:
    """Anything but "performance" answers bursts late. Where the kernel has no cpufreq, the hypervisor decides."""
    found: Counter[str] = Counter()
    for name in view.system.list_dir("/sys/devices/system/cpu"):
        if re.fullmatch(r"cpu\d+", name):
            text = view.system.read_text(f"/sys/devices/system/cpu/{name}/cpufreq/scaling_governor")
            if text is not None:
                found[text] += 1
    if not found:
        yield Unknown(what="frequency governor", why="this kernel shows no cpufreq", hint="`cpupower frequency-info`")
        return
    yield Fact(key="host.governor", value=", ".join(sorted(found)))
    slow = {name: count for name, count in found.items() if name != "performance"}
    # intel_pstate and amd-pstate in active mode call their balanced mode "powersave" and still raise the clock in time.
    driver = view.system.read_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver") or "unknown"
    if slow:
        is_active_mode = driver in ("intel_pstate", "amd-pstate-epp")
        yield Finding(
            id="host.cpu-governor",
            subject="cpufreq",
            severity="notice" if is_active_mode or not _is_cluster_host(view) else "warning",
            title=f"{sum(slow.values())} processors run under governor {', '.join(sorted(slow))}: packets wait for "
            "the clock to rise.",
            evidence=(
                Evidence(
                    where="/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
                    seen=", ".join(sorted(slow)),
                    expected="performance",
                ),
                Evidence(where="/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", seen=driver),
            ),
            remedy=Remedy(
                text="set performance on hosts that train",
                commands=("cpupower frequency-set -g performance",),
                undo=(f"cpupower frequency-set -g {sorted(slow)[0]}",),
            ),
            source="kernel Documentation/admin-guide/pm/cpufreq.rst; tuned throughput-performance",
        )


def _is_cluster_host(view: HostView) -> bool:
    """A host with GPUs, RDMA or a fast interface: not a laptop."""
    return bool(view.gpus or view.rdma_ports) or any((nic.speed_bit_per_s or 0) >= 10e9 for nic in view.physical_nics)


@check("host.numa", "automatic NUMA balancing")
def numa(view: HostView) -> Iterator[Outcome]:
    """Page migration competes with training on hosts of several nodes."""
    yield Fact(key="host.numa-nodes", value=str(len(view.numa_nodes)) if view.numa_nodes else "unknown")
    key = "kernel.numa_balancing"
    value = view.sysctl_int(key)
    if len(view.numa_nodes) < 2 or value is None:
        return
    yield Fact(key=key, value=str(value))
    if value != 0 and view.gpus:
        yield Finding(
            id="host.numa-balancing",
            subject=key,
            severity="notice",
            title="The kernel moves pages between NUMA nodes by itself: pinned ranks pay for it in page faults.",
            evidence=(
                Evidence(where="/proc/sys/kernel/numa_balancing", seen=str(value), expected="0 where ranks are bound"),
            ),
            remedy=Remedy(text=f"set {key} to 0", settings=(Setting(key=key, value="0"),)),
            source="tuned network-latency (numa_balancing 0)",
        )


@check("host.clock", "whether the clock is kept in step", deadline_s=4.0)
def clock(view: HostView) -> Iterator[Outcome]:
    """Logs of several hosts are put in order by their clocks, and traces too."""
    if view.system.exists("/run/systemd/timesync/synchronized"):
        yield Fact(key="host.clock", value="in step (systemd-timesyncd)")
        return
    said = view.command("chronyc", "-n", "tracking")
    if not isinstance(said, Unknown):
        leap = re.search(r"Leap status\s*:\s*(.+)", said.stdout)
        offset = re.search(r"System time\s*:\s*([\d.]+) seconds", said.stdout)
        is_good = leap is not None and leap[1].strip() == "Normal" and (offset is None or float(offset[1]) < 0.01)
        yield Fact(key="host.clock", value="in step (chrony)" if is_good else "not in step (chrony)")
        if not is_good:
            yield _clock_finding(
                "`chronyc tracking`", " ".join(m.group(0) for m in (leap, offset) if m is not None) or "no answer"
            )
        return
    said = view.command("timedatectl", "show", "-p", "NTPSynchronized", "--value")
    if isinstance(said, Unknown) or said.stdout.strip() not in ("yes", "no"):
        why = said.why if isinstance(said, Unknown) else "the answer is neither yes nor no"
        yield Unknown(what="clock synchronisation", why=why, hint="chronyc tracking, or ntpq -p")
        return
    if said.stdout.strip() == "yes":
        yield Fact(key="host.clock", value="in step (timedatectl)")
    elif view.is_virtual:
        # The hypervisor may keep the guest's clock (kvm-clock, ptp_kvm), which timedatectl does not see.
        yield Unknown(
            what="clock synchronisation",
            why="timedatectl says no; a hypervisor may keep the clock all the same",
            hint="compare `date +%s.%N` between hosts",
        )
    else:
        yield _clock_finding("`timedatectl show`", "NTPSynchronized=no")


def _clock_finding(where: str, seen: str) -> Finding:
    return Finding(
        id="host.clock-adrift",
        subject="clock",
        severity="notice",
        title="The clock is not kept in step: logs and traces of several hosts cannot be put in order.",
        evidence=(Evidence(where=where, seen=seen, expected="synchronised, within 10 ms"),),
        remedy=Remedy(
            text="start chrony or systemd-timesyncd",
            commands=("systemctl enable --now chronyd",),
            undo=("systemctl disable --now chronyd",),
        ),
        source="chronyc(1)",
    )


@check("host.shared-memory", "shared memory (/dev/shm), which NCCL and data loaders use")
def shared_memory(view: HostView) -> Iterator[Outcome]:
    """Docker gives 64 MiB: with several GPUs NCCL fails, and data loaders die with a bus error."""
    mounts = view.system.read_text("/proc/self/mounts")
    if mounts is None:
        yield view.file_unknown("/proc/self/mounts", "the size of /dev/shm")
        return
    line = re.search(r"^\S+ /dev/shm tmpfs (\S+)", mounts, re.MULTILINE)
    if line is None:
        return
    size = re.search(r"\bsize=(\d+)([kmg]?)", line[1])
    if size is None:
        yield Fact(key="host.dev-shm", value="half of memory")
        return
    num_bytes = int(size[1]) * {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}[size[2]]
    yield Fact(key="host.dev-shm", value=format_size(num_bytes))
    if num_bytes < _ENOUGH_SHARED_BYTES and view.gpus:
        yield Finding(
            id="host.small-dev-shm",
            subject=_SHM,
            severity="critical",
            title=f"{_SHM} holds {format_size(num_bytes)}: NCCL between local GPUs fails, data loaders die with a "
            "bus error.",
            evidence=(
                Evidence(where="/proc/self/mounts", seen=f"{_SHM} size={size[1]}{size[2]}", expected="1 GiB or more"),
            ),
            remedy=Remedy(
                text="docker run --ipc=host or --shm-size=16g; Kubernetes: an emptyDir of medium Memory at /dev/shm"
            ),
            source="NCCL user guide, troubleshooting (shared memory)",
            path="gpu",
        )


_TIME = re.compile(r"^\[\s*(\d+)\.\d+\]")


@check("host.kernel-log", "kernel messages on links, PCI Express and adapters", deadline_s=6.0)
def kernel_log(view: HostView) -> Iterator[Outcome]:
    """Flaps within 24 hours, bandwidth limited by a slot, hot modules, machine checks of the bus."""
    said = view.command("dmesg", timeout_s=4.0)
    if isinstance(said, Unknown):
        yield Unknown(what="kernel messages", why=said.why, hint="run as root")
        return
    uptime = re.match(r"(\d+)", view.system.read_text("/proc/uptime") or "")
    now_s = None if uptime is None else int(uptime[1])
    flaps: Counter[str] = Counter()
    first_of: dict[str, str] = {}
    for line in said.stdout.splitlines():
        stamp = _TIME.match(line)
        is_recent = now_s is None or stamp is None or now_s - int(stamp[1]) <= _DAY_S
        down = re.search(r"(\S+?): (?:NIC )?Link (?:is )?[Dd]own|(\S+?): lost carrier", line)
        if down is not None and is_recent:
            flaps[down[1] or down[2]] += 1
        for kind, pattern in _MESSAGES.items():
            if kind not in first_of and re.search(pattern, line):
                first_of[kind] = line.strip()[:240]
    for name, count in sorted(flaps.items()):
        if count >= _FLAPS_PER_DAY:
            yield Finding(
                id="nic.flapping",
                subject=name,
                severity="critical",
                title=f"{name} lost its link {count} times within a day.",
                evidence=(
                    Evidence(where="`dmesg`", seen=f"{count} x link down", expected=f"fewer than {_FLAPS_PER_DAY}"),
                ),
                remedy=Remedy(text="replace cable or optics; swap with a good one first to see which part it is"),
                source="azurehpc-health-checks NHC2005 (5 per 24 h and device)",
            )
    for kind, line in first_of.items():
        title, severity, remedy = _MEANING[kind]
        yield Finding(
            id=f"host.log-{kind}",
            subject="kernel log",
            severity=severity,
            title=title,
            evidence=(Evidence(where="`dmesg`", seen=line),),
            remedy=Remedy(text=remedy),
            source="Imbue cluster-health, leptonai/gpud (kernel messages)",
        )


_MESSAGES = {
    "pcie-limited": r"available PCIe bandwidth, limited by",
    "slot-power": r"Detected insufficient power on the PCIe slot",
    "module-hot": r"(?i)high temperature|module.*over.?heat",
    "bus-error": r"(?i)AER:.*(?:Uncorrected|Fatal)|PCIe Bus Error: severity=Uncorrected",
}
_MEANING: dict[str, tuple[str, Severity, str]] = {
    "pcie-limited": (
        "The kernel says that a slot limits an adapter's bandwidth.",
        "warning",
        "reseat the card or use a wider slot; see pci.links",
    ),
    "slot-power": (
        "An adapter gets too little power from its slot.",
        "warning",
        "check the BIOS's slot power limit and the auxiliary cable",
    ),
    "module-hot": ("An optical module is too hot: it will drop the link.", "warning", "check airflow and the module"),
    "bus-error": (
        "PCI Express reported uncorrected errors.",
        "critical",
        "reseat the card; replace it if they come back",
    ),
}

CHECKS = (identity, governor, numa, clock, shared_memory, kernel_log)
