"""Namespaces by system call: make them, hold them by descriptor, step into them and back.

A namespace lives as long as a process or a descriptor holds it, so a lab has no name anywhere outside its
keeper process: when that ends, however it ends, the kernel removes everything. The calling process must have
one thread (the kernel refuses to move a threaded process into a user or mount namespace).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wirespeed.errors import MissingCapability
from wirespeed.system import System

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 0x80000
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces of the given kinds."""
    _call("unshare", flags)


def setns(descriptor: int) -> None:
    """Move this process into the namespace behind a descriptor."""
    _call("setns", descriptor, 0)


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    """mount(2) without data."""
    _call("mount", source.encode(), target.encode(), None if kind is None else kind.encode(), flags, None)


def sethostname(name: str) -> None:
    """Name this process's UTS namespace."""
    _call("sethostname", name.encode(), len(name))


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    _call("prctl", option, value, 0, 0, 0)


def open_own(kind: str) -> int:
    """A descriptor (close-on-exec) of this process's namespace ``net``, ``mnt``, ``uts`` or ``user``."""
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def inside(descriptor: int, home: int) -> Iterator[None]:
    """Be in one namespace for a while; ``home`` is the way back.

    Sockets made here stay bound to that namespace.
    """
    setns(descriptor)
    try:
        yield
    finally:
        setns(home)


def become_lab_root(system: System | None = None) -> bool:
    """Get the rights to make namespaces. True when a user namespace had to be entered for them.

    Raises MissingCapability, which says what forbids it, where neither way is open.
    """
    system = System() if system is None else system
    uid, gid = os.geteuid(), os.getegid()
    if has_sys_admin(system):
        return False
    try:
        unshare(CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
    except OSError as error:
        raise MissingCapability(
            f"a lab needs root or unprivileged user namespaces, and this user (uid {uid}) has neither: {error}",
            hint=_user_namespace_hint(system),
        ) from None
    # Other processes of the same user may look into this one again (entering a user namespace forbade that).
    prctl(PR_SET_DUMPABLE, 1)
    return True


def has_sys_admin(system: System) -> bool:
    """Whether this process holds CAP_SYS_ADMIN and CAP_NET_ADMIN (root in a container often does not)."""
    status = system.read_text("/proc/self/status")
    if status is None:
        return os.geteuid() == 0
    effective = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return bool(effective >> 21 & 1) and bool(effective >> 12 & 1)


def _user_namespace_hint(system: System) -> str:
    if system.read_int("/proc/sys/user/max_user_namespaces") == 0:
        return "run as root, or: sysctl user.max_user_namespaces=10000"
    if system.read_int("/proc/sys/kernel/unprivileged_userns_clone") == 0:
        return "run as root, or: sysctl kernel.unprivileged_userns_clone=1"
    if system.read_int("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1:
        return "run as root, or: sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    return "run as root; in a container add the capability SYS_ADMIN (docker run --privileged)"


def _write(path: str, text: str) -> None:
    # os.write and not a buffered file: the kernel's refusal then comes from this call and is not lost at
    # close.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def write_sysctl(path: str, value: str) -> bool:
    """Set a sysctl of the current namespace; False where the kernel has no such file or forbids it."""
    try:
        _write(path, value)
    except OSError:
        return False
    return True


def make_private_mounts(hosts_path: Path) -> None:
    """Enter a mount namespace of our own in which /etc/hosts is ``hosts_path``.

    Later mounts of the system still show.
    """
    unshare(CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_SLAVE)
    try:
        mount(str(hosts_path), "/etc/hosts", None, MS_BIND)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise MissingCapability(
                "/etc/hosts does not exist", hint="create it: lab names are mounted over it"
            ) from None
        raise


def show_own_devices(scratch: Path) -> bool:
    """Make /sys/class/net show this network namespace's devices.

    False where the kernel forbids it (some rootless).

    Only the two folders about devices are replaced: a whole new /sys would hide the cgroups mounted below it.
    """
    try:
        mount("sysfs", str(scratch), "sysfs", 0)
        for folder in ("class/net", "devices/virtual/net"):
            mount(str(scratch / folder), f"/sys/{folder}", None, MS_BIND)
    except OSError:
        return False
    return True
