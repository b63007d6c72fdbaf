"""Settings that old or wrong advice leaves behind, and files in /etc/sysctl.d that contradict each other or the kernel.

Each rule compares one parameter with a condition under which it hurts or does nothing, and says what is true instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wirespeed.doctor.check import Evidence, Finding, Outcome, Remedy, Setting, Severity, check
from wirespeed.doctor.inventory import HostView

_IP_SYSCTL = "kernel Documentation/networking/ip-sysctl.rst"
_DEFAULT_RMEM_MAX = 212992
_FOLDERS = ("/usr/lib/sysctl.d", "/lib/sysctl.d", "/run/sysctl.d", "/etc/sysctl.d")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One parameter that should not stand as it stands. ``mended`` None: nothing to set, only to know."""

    id: str
    key: str
    is_bad: Callable[[int], bool]
    severity: Severity
    title: str
    expected: str
    mended: str | None
    source: str = _IP_SYSCTL


RULES = (
    Rule(
        id="tcp.no-window-scaling",
        key="net.ipv4.tcp_window_scaling",
        is_bad=lambda v: v == 0,
        severity="critical",
        title="TCP windows are held at 64 KiB: a connection carries 64 KiB per round trip at most.",
        expected="1, the default",
        mended="1",
    ),
    Rule(
        id="tcp.no-sack",
        key="net.ipv4.tcp_sack",
        is_bad=lambda v: v == 0,
        severity="warning",
        title="Selective acknowledgement is off: one lost packet makes TCP send much again.",
        expected="1, the default",
        mended="1",
    ),
    Rule(
        id="tcp.no-timestamps",
        key="net.ipv4.tcp_timestamps",
        is_bad=lambda v: v == 0,
        severity="warning",
        title="TCP timestamps are off: round trips are measured worse and sequence numbers wrap unprotected at high "
        "rates.",
        expected="1, the default",
        mended="1",
    ),
    Rule(
        id="tcp.no-autotuning",
        key="net.ipv4.tcp_moderate_rcvbuf",
        is_bad=lambda v: v == 0,
        severity="warning",
        title="Receive buffers do not grow by themselves: every connection stays at the default size.",
        expected="1, the default",
        mended="1",
    ),
    Rule(
        id="tcp.tw-recycle",
        key="net.ipv4.tcp_tw_recycle",
        is_bad=lambda v: v != 0,
        severity="critical",
        title="tcp_tw_recycle drops connections of hosts behind one address; Linux 4.12 removed it.",
        expected="0",
        mended="0",
    ),
    Rule(
        id="tcp.tw-reuse",
        key="net.ipv4.tcp_tw_reuse",
        is_bad=lambda v: v == 1,
        severity="notice",
        title="tcp_tw_reuse=1 touches outgoing connections only and does nothing for throughput.",
        expected="2, the default (loopback only)",
        mended="2",
    ),
    Rule(
        id="tcp.fin-timeout",
        key="net.ipv4.tcp_fin_timeout",
        is_bad=lambda v: v < 60,
        severity="notice",
        title="A lower tcp_fin_timeout does not clear TIME_WAIT (fixed at 60 s): it is about orphaned FIN_WAIT_2.",
        expected="60, the default",
        mended="60",
    ),
    Rule(
        id="tcp.tw-buckets",
        key="net.ipv4.tcp_max_tw_buckets",
        is_bad=lambda v: v < 4096,
        severity="notice",
        title="tcp_max_tw_buckets was lowered, which the kernel's documentation says one must not do.",
        expected="the default, which follows memory",
        mended=None,
    ),
    Rule(
        id="tcp.low-latency",
        key="net.ipv4.tcp_low_latency",
        is_bad=lambda v: v != 0,
        severity="notice",
        title="tcp_low_latency has had no effect since Linux 4.14.",
        expected="0, the default",
        mended="0",
    ),
    Rule(
        id="tcp.fack",
        key="net.ipv4.tcp_fack",
        is_bad=lambda v: v != 0,
        severity="notice",
        title="tcp_fack has had no effect since Linux 4.15.",
        expected="0, the default",
        mended="0",
    ),
)


@check("tcp.advice", "settings of old or wrong advice")
def obsolete(view: HostView) -> Iterator[Outcome]:
    """Each rule, then those that need more than one number."""
    for rule in RULES:
        value = view.sysctl_int(rule.key)
        if value is None:
            # Several of these keys are gone from new kernels: then there is nothing to mend, and nothing unknown.
            reading = view.system.read(f"/proc/sys/{rule.key.replace('.', '/')}")
            if reading.problem is not None and reading.problem != "absent":
                yield view.sysctl_unknown(rule.key)
            continue
        if rule.is_bad(value):
            settings = () if rule.mended is None else (Setting(key=rule.key, value=rule.mended),)
            text = "leave it at its default" if rule.mended is None else f"set {rule.key} to {rule.mended}"
            yield Finding(
                id=rule.id,
                subject=rule.key,
                severity="notice" if view.has_active_rdma and rule.severity == "warning" else rule.severity,
                title=rule.title,
                evidence=(Evidence(where=_file(rule.key), seen=str(value), expected=rule.expected),),
                remedy=Remedy(text=text, settings=settings),
                source=rule.source,
                path="tcp",
            )
    yield from _window_share(view)
    yield from _capped(view)
    yield from _memory_in_bytes(view)


def _file(key: str) -> str:
    return f"/proc/sys/{key.replace('.', '/')}"


def _window_share(view: HostView) -> Iterator[Outcome]:
    key = "net.ipv4.tcp_adv_win_scale"
    value = view.sysctl_int(key)
    if value is not None and view.kernel is not None and view.kernel >= (6, 6) and value != 1:
        yield Finding(
            id="tcp.adv-win-scale",
            subject=key,
            severity="notice",
            path="tcp",
            source=f"{_IP_SYSCTL} (obsolete since 6.6)",
            title="tcp_adv_win_scale has had no effect since Linux 6.6.",
            evidence=(Evidence(where=_file(key), seen=str(value), expected="1, the default"),),
            remedy=Remedy(text=f"set {key} to 1", settings=(Setting(key=key, value="1"),)),
        )


def _capped(view: HostView) -> Iterator[Outcome]:
    for core, triple in (("net.core.rmem_max", "net.ipv4.tcp_rmem"), ("net.core.wmem_max", "net.ipv4.tcp_wmem")):
        most, numbers = view.sysctl_int(core), (view.sysctl(triple) or "").split()
        if most is None or len(numbers) != 3 or not numbers[2].isdigit():
            continue
        if most > _DEFAULT_RMEM_MAX and most > 2 * int(numbers[2]):
            yield Finding(
                id="tcp.core-maximum",
                subject=core,
                severity="notice",
                title=f"{core} was raised, but TCP's own buffers follow {triple}: the raise helps only SO_RCVBUF / "
                "SO_SNDBUF.",
                evidence=(
                    Evidence(where=_file(core), seen=str(most)),
                    Evidence(where=_file(triple), seen=" ".join(numbers), expected="a last number that fits the link"),
                ),
                remedy=Remedy(text=f"raise the last number of {triple} if the check tcp.buffers asks for it"),
                source=f"{_IP_SYSCTL} (tcp_rmem: not overridden by net.core.rmem_max)",
                path="tcp",
            )


def _memory_in_bytes(view: HostView) -> Iterator[Outcome]:
    key = "net.ipv4.tcp_mem"
    numbers = (view.sysctl(key) or "").split()
    total = re.search(r"^MemTotal:\s+(\d+) kB", view.system.read_text("/proc/meminfo") or "", re.MULTILINE)
    if len(numbers) != 3 or not numbers[2].isdigit() or total is None:
        return
    pages = int(total[1]) // 4
    if int(numbers[2]) > pages:
        yield Finding(
            id="tcp.mem-in-bytes",
            subject=key,
            severity="notice",
            title="tcp_mem counts pages, and allows TCP more than this host's whole memory: it was probably set in "
            "bytes.",
            evidence=(Evidence(where=_file(key), seen=" ".join(numbers), expected=f"at most {pages} pages"),),
            remedy=Remedy(text="remove the setting: the kernel chooses it from memory at boot"),
            source=f"{_IP_SYSCTL} (tcp_mem)",
            path="tcp",
        )


def read_sysctl_files(view: HostView) -> dict[str, list[tuple[str, str]]]:
    """Key -> (file, value) in the order in which ``sysctl --system`` applies them: by file name, then sysctl.conf.

    A file in /etc/sysctl.d hides one of the same name in /run and /usr/lib.
    """
    by_name: dict[str, str] = {}
    for folder in _FOLDERS:
        for name in view.system.list_dir(folder):
            if name.endswith(".conf"):
                by_name[name] = f"{folder}/{name}"
    held: dict[str, list[tuple[str, str]]] = {}
    for path in [*(by_name[name] for name in sorted(by_name)), "/etc/sysctl.conf"]:
        for line in (view.system.read_text(path) or "").splitlines():
            match = re.match(r"\s*-?\s*([\w./*-]+)\s*=\s*(.*?)\s*$", line)
            if match is not None and "*" not in match[1]:
                key = match[1] if "." in match[1].split("/")[0] or "/" not in match[1] else match[1].replace("/", ".")
                held.setdefault(key, []).append((path, " ".join(match[2].split())))
    return held


@check("tcp.files", "sysctl files against each other and against the running kernel")
def files(view: HostView) -> Iterator[Outcome]:
    """A file that is overruled or was never applied is found at the next reboot, at the worst time."""
    for key, said in sorted(read_sysctl_files(view).items()):
        if not key.startswith("net."):
            continue
        path, wanted = said[-1]
        running = view.sysctl(key)
        values = {value for _, value in said}
        # /etc/sysctl.conf is linked into sysctl.d as 99-sysctl.conf on some systems: then the files are one.
        if len(values) > 1:
            yield Finding(
                id="host.sysctl-files-disagree",
                subject=key,
                severity="notice",
                title=f"{len(said)} files set {key}, to different values; the last one counts.",
                evidence=tuple(Evidence(where=file, seen=value) for file, value in said),
                remedy=Remedy(text=f"keep one of them; now {path} counts"),
                source="sysctl.d(5)",
                path="tcp",
            )
        if running is not None and running != wanted:
            yield Finding(
                id="host.sysctl-not-applied",
                subject=key,
                severity="notice",
                title=f"The running value of {key} is not what the files say: it will change at the next reboot.",
                evidence=(
                    Evidence(where=_file(key), seen=running),
                    Evidence(where=path, seen=wanted, expected=running),
                ),
                remedy=Remedy(
                    text="decide which is right; `sysctl --system` applies the files", commands=("sysctl --system",)
                ),
                source="sysctl.d(5)",
                path="tcp",
            )


CHECKS = (obsolete, files)
