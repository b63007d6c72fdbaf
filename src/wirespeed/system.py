"""The only door to /proc, /sys and subprocesses.

A ``System`` takes a root, so that tests read recorded trees; an absent or unreadable file is ``None`` ("unknown"),
never a default. Every subprocess has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wirespeed.errors import MissingCapability

Problem = Literal["absent", "denied", "unreadable"]
"""Why a file has no content: there is none, a permission is missing, or the kernel refuses to read it."""

# Variables of other processes that are looked at; everything else of theirs, secrets above all, is dropped at once.
SEEN_VARIABLES = (
    "NCCL_", "GLOO_", "TP_SOCKET_", "UCX_", "FI_", "MASTER_", "TORCH_NCCL_", "TORCHELASTIC_RUN_ID",
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "SLURM_PROCID", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A file's text without the last newline, or why there is none. Exactly one of the two is None."""

    text: str | None
    problem: Problem | None = None


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """What a subprocess ended with. ``returncode`` is None when the deadline ended it."""

    returncode: int | None
    stdout: str
    stderr: str


def replace_whole(target: Path, content: bytes) -> None:
    """Replace a file as one step and wait until it is on disk; folders are made. Raises OSError, leaving nothing.

    A process that is killed on the way leaves nothing either, where the file system has files without a name; elsewhere
    a hidden file beside the target.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    try:
        handle, is_named = _create(temporary)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(handle)
            if not is_named:
                # Only with a folder given is the link of /proc followed to the file (os.link of CPython).
                os.link(f"/proc/self/fd/{handle}", temporary, src_dir_fd=handle)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _create(path: Path) -> tuple[int, bool]:
    """A new file to write to that is, or can be, called ``path``; and whether it has that name yet."""
    if sys.platform == "linux" and os.path.isdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of a file system without them, or of a folder that is then told below
            handle = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            os.fchmod(handle, 0o644)
            return handle, False
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    os.fchmod(handle, 0o644)
    return handle, True


def free_port(address: str = "127.0.0.1", *, also_above: int = 0) -> int:
    """A TCP port of this host that nobody uses, for a program that has to be told one before it is started.

    It lies below those that the kernel gives to outgoing connections, wherever there is room. One of those can be taken
    by any connection before the program binds it; and a client that knocks before anybody listens can be given the very
    port that it knocks at, and is then connected to itself. ``also_above``: so far above it another such port is free.
    Raises MissingCapability where none is found.
    """
    outgoing = System().read_text("/proc/sys/net/ipv4/ip_local_port_range")
    end = (int(outgoing.split()[0]) if outgoing else 32_768) - also_above
    if end < 12_000:
        end = 61_000 - also_above  # nearly all are for outgoing connections: no place is better than another
    for _ in range(1000):
        port = 10_000 + secrets.randbelow(end - 10_000)
        try:
            for wanted in {port, port + also_above}:
                with socket.socket() as probe:
                    probe.bind((address, wanted))
        except OSError:
            continue
        return port
    raise MissingCapability(f"found no free TCP port on {address or 'this host'}", hint="`ss -tan` lists those in use")


class System:
    """Reads of the host below ``root`` (a recorded tree in tests), and commands run on it."""

    def __init__(self, root: str | Path = "/") -> None:
        self.root = Path(root)

    def path(self, name: str) -> Path:
        """``name`` (absolute, such as ``/proc/net/dev``) below the root."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> Reading:
        """The file's text, or why it cannot be had."""
        try:
            return Reading(text=self.path(name).read_text(encoding="utf-8", errors="replace").rstrip("\n"))
        except PermissionError:
            return Reading(text=None, problem="denied")
        except (FileNotFoundError, NotADirectoryError):
            return Reading(text=None, problem="absent")
        except OSError:
            return Reading(text=None, problem="unreadable")

    def read_text(self, name: str) -> str | None:
        """The file's text without the last newline, or None where it is absent or cannot be read."""
        return self.read(name).text

    def read_bytes(self, name: str) -> bytes | None:
        """The file's bytes, or None where it is absent or cannot be read."""
        try:
            return self.path(name).read_bytes()
        except OSError:
            return None

    def exists(self, name: str) -> bool:
        """Whether there is such a file, folder or device. False also where a folder above it may not be searched."""
        try:
            return self.path(name).exists()
        except OSError:
            return False

    def real_path(self, name: str) -> str | None:
        """Where a symbolic link below the root ends, as an absolute name below the root; None where that is nowhere."""
        try:
            root, target = self.root.resolve(), self.path(name).resolve(strict=True)
        except (OSError, RuntimeError):
            return None
        return f"/{target.relative_to(root)}" if target == root or root in target.parents else None

    def environ(self) -> Mapping[str, str]:
        """This process's environment."""
        return os.environ

    def process_environ(self, pid: int) -> Mapping[str, str] | None:
        """What another process was started with, of ``SEEN_VARIABLES`` only; None where that may not be seen."""
        content = self.read_bytes(f"/proc/{pid}/environ")
        if content is None:
            return None
        pairs = (entry.partition("=")[::2] for entry in content.decode(errors="replace").split("\0"))
        return {name: value for name, value in pairs if name.startswith(SEEN_VARIABLES)}

    def process_sockets(self, pid: int) -> frozenset[int] | None:
        """Inode numbers of a process's sockets; None where they may not be seen or it is gone."""
        found: set[int] = set()
        try:
            with os.scandir(self.path(f"/proc/{pid}/fd")) as entries:
                names = [entry.path for entry in entries]
        except OSError:
            return None
        for name in names:
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(name)
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
        return frozenset(found)

    def tcp_diagnostics(self, family: int) -> bytes | None:
        """The kernel's answer on established TCP sockets (INET_DIAG with TCP_INFO and memory); None if refused."""
        try:
            return _inet_diag(family)
        except (OSError, AttributeError):
            return None

    def read_int(self, name: str) -> int | None:
        """The file's content as an integer (decimal, or hexadecimal after 0x), or None."""
        text = self.read_text(name)
        if text is None:
            return None
        digits = text.strip()
        try:
            # Not base 0: it refuses the leading zeros that some files have.
            return int(digits, 16 if digits.lower().startswith(("0x", "-0x")) else 10)
        except ValueError:
            return None

    def list_dir(self, name: str) -> tuple[str, ...]:
        """Sorted names in a folder; empty where there is none."""
        try:
            return tuple(sorted(entry.name for entry in self.path(name).iterdir()))
        except OSError:
            return ()

    def write_setting(self, name: str, text: str) -> None:
        """Write a kernel parameter below /proc or /sys in one call. Raises MissingCapability where it is refused."""
        try:
            # Not a buffered file: it reports a refusal only when it is closed, if at all.
            handle = os.open(self.path(name), os.O_WRONLY)
            try:
                os.write(handle, f"{text}\n".encode())
            finally:
                os.close(handle)
        except OSError as fault:
            hint = "run as root" if isinstance(fault, PermissionError) else None
            raise MissingCapability(f"cannot set {name} to {text!r}: {fault.strerror}", hint=hint) from fault

    def replace_file(self, name: str, content: bytes) -> None:
        """Replace a file as one step and wait until it is on disk; folders are made. Raises MissingCapability."""
        target = self.path(name)
        try:
            replace_whole(target, content)
        except OSError as fault:
            hint = "run as root" if isinstance(fault, PermissionError) else None
            raise MissingCapability(f"cannot write {target}: {fault.strerror}", hint=hint) from fault

    def remove_file(self, name: str) -> None:
        """Remove a file; fine where there is none. Raises MissingCapability where that is refused."""
        try:
            self.path(name).unlink(missing_ok=True)
        except OSError as fault:
            hint = "run as root" if isinstance(fault, PermissionError) else None
            raise MissingCapability(f"cannot remove {self.path(name)}: {fault.strerror}", hint=hint) from fault

    def run(self, command: Sequence[str], *, timeout_s: float = 10.0, stdin: bytes | None = None) -> CommandResult:
        """Run a command to its end. Raises MissingCapability where the program is not installed or may not be run.

        At the deadline, and when this call is interrupted, the command ends with all that it started. It speaks English
        (``LC_ALL=C``), since what it says is parsed.
        """
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except FileNotFoundError:
            raise MissingCapability(f"program {command[0]!r} is not installed") from None
        except OSError as fault:
            raise MissingCapability(f"program {command[0]!r} cannot be run: {fault.strerror}") from fault
        with process:
            try:
                stdout, stderr = process.communicate(input=stdin, timeout=timeout_s)
            except subprocess.TimeoutExpired as late:
                _end_group(process)
                return CommandResult(returncode=None, stdout=_as_text(late.stdout), stderr=_as_text(late.stderr))
            except BaseException:
                _end_group(process)
                raise
        return CommandResult(returncode=process.returncode, stdout=_as_text(stdout), stderr=_as_text(stderr))


_ESTABLISHED = 1 << 1
# INET_DIAG_INFO, _CONG, _TOS, _TCLASS, _SKMEMINFO: bit of (kind - 1)
_EXTENSIONS = (1 << 1) | (1 << 3) | (1 << 4) | (1 << 5) | (1 << 6)


def _inet_diag(family: int) -> bytes:
    request = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, _EXTENSIONS, 0, _ESTABLISHED)
    header = struct.pack(
        "=IHHII", 16 + len(request), 20, 0x301, 1, 0
    )  # SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP
    answer = bytearray()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as link:  # NETLINK_SOCK_DIAG
        link.settimeout(2.0)
        link.sendto(header + request, (0, 0))
        while True:
            part = link.recv(1 << 18)
            answer += part
            at = 0
            while at + 16 <= len(part):
                length, kind = struct.unpack_from("=IH", part, at)
                if kind in (2, 3) or length < 16:  # NLMSG_ERROR, NLMSG_DONE
                    return bytes(answer)
                at += (length + 3) & ~3


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _as_text(output: bytes | None) -> str:
    # As Python reads text: lines end in \n, whatever the program wrote.
    return "" if output is None else output.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
