"""The checks on many hosts over the system's ssh: one connection each, nothing installed there, nothing left behind.

The packed file goes through ssh's stdin into a file that its shell removes whatever happens. ssh is the user's own,
with its configuration, keys and known hosts; it never asks for a password (BatchMode). A host that does not answer is
reported and does not hold up the others.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from wirespeed.doctor.examine import Examination, Question
from wirespeed.doctor.packed import MARK, argument, pack
from wirespeed.doctor.reports import HostFailure, examination_from_json
from wirespeed.errors import DataError, MissingCapability, PeerFailure
from wirespeed.system import CommandResult, System

MAX_REPORT_CHARS = 16 * 1024**2
MAX_PARALLEL = 32
MAX_PEERS = 128
CONNECT_S = 10
# A login shell may be csh or fish, so all goes through sh. exit 71 and 72: no place for the file, no Python.
_SCRIPT = (
    'umask 077; f=$(mktemp "${TMPDIR:-/tmp}/wirespeed.XXXXXX") || exit 71; trap \'rm -f "$f"\' EXIT; '
    "trap 'exit 73' HUP INT TERM; cat >\"$f\" || exit 71; "
    "for p in python3 /usr/bin/python3 /usr/libexec/platform-python /opt/conda/bin/python3; do "
    'if command -v "$p" >/dev/null 2>&1; then SUDO "$p" -I "$f" OPTIONS; exit $?; fi; done; exit 72'
)
_REASONS = {
    71: "has no place for a file in /tmp",
    72: "has no python3",
    127: "has no sh, mktemp or sudo",
    255: "cannot be reached",
}


def script(packed_options: str, *, use_sudo: bool = False) -> str:
    """What the remote sh runs."""
    return _SCRIPT.replace("SUDO ", "sudo -n " if use_sudo else "").replace("OPTIONS", shlex.quote(packed_options))


def ssh_command(host: str, ssh: Sequence[str], remote_script: str) -> list[str]:
    """The command line; a host that looks like an option is no host."""
    return [
        *ssh,
        "-T",
        "-o",
        "BatchMode=yes",
        "-o",
        f"ConnectTimeout={CONNECT_S}",
        "--",
        host,
        f"sh -c {shlex.quote(remote_script)}",
    ]


def examine_hosts(
    hosts: Sequence[str],
    question: Question,
    *,
    system: System,
    ssh: Sequence[str] = ("ssh",),
    use_sudo: bool = False,
    timeout_s: float = 60.0,
    on_end: Callable[[str], None] = lambda host: None,
) -> tuple[dict[str, Examination], tuple[HostFailure, ...]]:
    """Examine every host; answers by host, and those that gave none.

    ``timeout_s`` is per host, beyond the time for which counters are watched. Every host is told the others' addresses.
    """
    names = tuple(dict.fromkeys(hosts))
    packed = pack()
    resolved = addresses(names)
    answers: dict[str, Examination] = {}
    failures: list[HostFailure] = []

    def ask(host: str) -> Examination | HostFailure:
        peers = tuple(address for name, address in resolved.items() if name != host)[:MAX_PEERS]
        asked = replace(question, peers=peers, address=resolved.get(host))
        text = script(argument(asked), use_sudo=use_sudo)
        try:
            done = system.run(
                ssh_command(host, ssh, text), timeout_s=timeout_s + (question.during_s or 0.0), stdin=packed
            )
            return read_answer(host, done, timeout_s)
        except (PeerFailure, DataError) as fault:
            return HostFailure(host=host, why=str(fault))
        finally:
            on_end(host)

    with ThreadPoolExecutor(max_workers=min(MAX_PARALLEL, len(names))) as pool:
        for host, answer in zip(names, pool.map(ask, names), strict=True):
            if isinstance(answer, HostFailure):
                failures.append(answer)
            else:
                answers[host] = answer
    return answers, tuple(failures)


def read_answer(host: str, done: CommandResult, timeout_s: float) -> Examination:
    """The examination in what ssh printed. Raises PeerFailure or DataError, naming the host."""
    if done.returncode is None:
        raise PeerFailure(f"{host} did not answer within {timeout_s:g} s", hint="raise --timeout")
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        said = [text for text in done.stderr.strip().splitlines() if text.strip()]
        reason = _REASONS.get(done.returncode, f"ended with {done.returncode}")
        raise PeerFailure(f"{host} {reason}" + (f": {said[-1][:300]}" if said else ""))
    if len(line) > MAX_REPORT_CHARS:
        raise DataError(f"{host} sent a report of {len(line)} characters", expected=f"at most {MAX_REPORT_CHARS}")
    return examination_from_json(line[len(MARK) :], source=host)


def addresses(hosts: Sequence[str]) -> dict[str, str]:
    """IPv4 addresses of the names that this host can resolve (user@ is left out)."""
    found = {}
    for host in hosts:
        try:
            found[host] = str(
                socket.getaddrinfo(host.rpartition("@")[2], None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
            )
        except OSError:
            continue
    return found


def require_ssh(system: System, ssh: Sequence[str]) -> None:
    """Raises MissingCapability where the ssh program is not there."""
    try:
        system.run([*ssh, "-V"], timeout_s=5.0)
    except MissingCapability as fault:
        raise MissingCapability(
            f"{fault.problem}", hint="install openssh-client, or name another with --ssh"
        ) from fault
