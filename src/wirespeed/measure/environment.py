"""Where a measurement was made: host, kernel, CPU, versions, NICs, command line and commit.

Only these fields are kept, and values on the command line that look like secrets are replaced by ``***`` first. That is
a guess by name and shape: a secret that looks like an ordinary word passes, so pass secrets by file or environment.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from wirespeed.errors import MissingCapability
from wirespeed.records import Environment
from wirespeed.system import System
from wirespeed.units import format_rate

_PACKAGES = ("wirespeed", "torch", "numpy", "numba")
_SECRET_NAME = re.compile(
    r"(?i)(?:^|[-_])(?:token|secret|password|passwd|pwd|api[-_]?key|access[-_]?key|credential)s?$"
)
_SECRET_VALUE = re.compile(
    r"(?:hf|ghp|gho|ghs|glpat|github_pat|xox[abprs]|sk|pk|wandb)[-_][A-Za-z0-9_-]{10,}"  # prefixes of known issuers
    r"|AKIA[0-9A-Z]{12,}|ey[JK][A-Za-z0-9_-]{10,}\.[A-Za-z0-9_.-]+"  # AWS key ids, JSON web tokens
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")
_OPAQUE = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_+=-]{32,}")
HIDDEN = "***"


def host_name() -> str:
    """WIRESPEED_HOST where a launcher or a lab sets it, else what the kernel says."""
    return os.environ.get("WIRESPEED_HOST") or socket.gethostname()


def capture(system: System | None = None, *, arguments: Sequence[str] | None = None) -> Environment:
    """The environment of this process. What cannot be found out is None or absent."""
    system = System() if system is None else system
    return Environment(
        host=host_name(),
        kernel=platform.release(),
        cpu=cpu_model(system),
        num_cpus=len(os.sched_getaffinity(0)),
        versions=versions(),
        command=command_line(sys.argv if arguments is None else arguments),
        git_commit=git_commit(system),
        nics=nics(system),
    )


def cpu_model(system: System) -> str | None:
    """The processor's name, or None where /proc/cpuinfo does not say."""
    text = system.read_text("/proc/cpuinfo")
    match = None if text is None else re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    return None if match is None else match.group(1).strip()


def versions() -> dict[str, str]:
    """Python and the packages that bear on timings, without importing them."""
    held = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            held[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return held


def command_line(arguments: Sequence[str]) -> str:
    """The command as typed in a shell, the program by its name only, and without secrets."""
    shown: list[str] = []
    is_secret_next = False
    for place, argument in enumerate(arguments):
        if place == 0:
            shown.append(Path(argument).name)
            continue
        if is_secret_next and not argument.startswith("-"):
            shown.append(HIDDEN)
            is_secret_next = False
            continue
        name, equals, value = argument.partition("=")
        is_secret = _SECRET_NAME.search(name) is not None
        is_secret_next = is_secret and not equals and name.startswith("-")
        if is_secret and equals:
            shown.append(f"{name}={HIDDEN}")
        elif equals:
            shown.append(f"{name}={_without_secrets(value)}")
        else:
            shown.append(_without_secrets(argument))
    return " ".join(argument if argument.endswith(HIDDEN) else shlex.quote(argument) for argument in shown)


def _without_secrets(text: str) -> str:
    if _OPAQUE.fullmatch(text):
        return HIDDEN
    return _SECRET_VALUE.sub(HIDDEN, _URL_PASSWORD.sub(HIDDEN, text))


def git_commit(system: System) -> str | None:
    """The commit of the working folder, ``-dirty`` where tracked files differ; None outside a repository."""
    try:
        done = system.run(["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"], timeout_s=5)
    except MissingCapability:
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


def nics(system: System) -> dict[str, str]:
    """Interface -> ``speed/driver``, such as ``25 Gbit/s/mlx5_core``; a virtual one's kind, as its speed is made up."""
    held = {}
    for name in system.list_dir("/sys/class/net"):
        base = f"/sys/class/net/{name}"
        if name != "lo":
            driver = _driver(system, base)
            held[name] = _virtual(system, base) if driver is None else f"{_speed(system, base)}/{driver}"
    return held


def nic_rate_bit_per_s(system: System | None = None, *, interface: str | None = None) -> float | None:
    """Line rate of the interface that carries data: GLOO_SOCKET_IFNAME's, else the only one with a driver.

    None where there is no such one or it does not say; the speed that a virtual interface claims is made up.
    """
    system = System() if system is None else system
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] if interface is None else interface
    physical = [n for n in system.list_dir("/sys/class/net") if _driver(system, f"/sys/class/net/{n}") is not None]
    chosen = [n for n in physical if not name or n == name]
    if len(chosen) != 1:
        return None
    mbit_per_s = system.read_int(f"/sys/class/net/{chosen[0]}/speed")
    return None if mbit_per_s is None or mbit_per_s <= 0 else mbit_per_s * 1e6


def _driver(system: System, base: str) -> str | None:
    link = system.path(f"{base}/device/driver")
    return link.readlink().name if link.is_symlink() else None


def _speed(system: System, base: str) -> str:
    mbit_per_s = system.read_int(f"{base}/speed")
    return "unknown" if mbit_per_s is None or mbit_per_s <= 0 else format_rate(mbit_per_s * 1e6)


def _virtual(system: System, base: str) -> str:
    kind = re.search(r"^DEVTYPE=(\w+)$", system.read_text(f"{base}/uevent") or "", re.MULTILINE)
    if kind is not None:
        return kind.group(1)
    own, peer = system.read_int(f"{base}/ifindex"), system.read_int(f"{base}/iflink")
    # A veth end names its peer's index; a vlan or macvlan would have said so in DEVTYPE.
    return "veth" if own is not None and peer is not None and own != peer else "virtual"
