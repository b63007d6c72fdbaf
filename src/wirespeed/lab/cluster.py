"""``Lab``: a cluster on this machine, from the side of those who use it.

A lab made with ``Lab(spec)`` ends with the program that made it, however that ends; one made with
``keep=True`` (the command ``lab up``) lives until ``down``. Every process started here dies when the thread
that started it does (the kernel's parent-death signal); the keeper ends whatever it leaves behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.lab import control, journal, layout, processes
from wirespeed.lab.layout import LabHost, LabSpec
from wirespeed.lab.run import RunResult, run_ranks
from wirespeed.lab.start import kill, start_keeper
from wirespeed.system import CommandResult

_ASK_S = 30.0
_DOWN_S = 15.0
_DRAIN_S = 2.0
_ENTER = str(Path(__file__).with_name("enter.py"))


class Lab:
    """A cluster of network namespaces: ``with Lab(LabSpec.parse("4x1gbit")) as lab: lab.run([...])``.

    ``keep=True`` lets it outlive this program. Methods may be called from several threads.
    """

    def __init__(self, spec: LabSpec, *, keep: bool = False) -> None:
        self.spec = spec
        self.name = "" if spec.name is None else spec.name
        self.hosts: tuple[LabHost, ...] = layout.lay_out(spec)
        self.keep = keep
        self._folder: Path | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._keeper_handle: int | None = None
        self._connection: Any = None
        self._token = ""
        self._num_tokens = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Lab:
        if self._connection is None:
            self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper is None:
            self.close()  # attached: it was here before us
        else:
            self.down()

    @property
    def is_up(self) -> bool:
        """Whether this object is connected to a lab (which may have ended since)."""
        return self._connection is not None

    def up(self) -> None:
        """Make the lab.

        Raises UsageError (name in use), MissingCapability (rights, kernel, disk); leaves nothing then.
        """
        if self._connection is not None:
            raise UsageError(f"lab {self.name} is already up")
        remove_stale()
        name, folder, lock = journal.claim(self.spec.name)
        try:
            order = control.Order(
                folder=str(folder),
                name=name,
                token=f"{name}-{os.urandom(6).hex()}",
                lock=lock,
                owner_pid=None if self.keep else os.getpid(),
                spec=self.spec,
            )
            self._keeper = start_keeper(msgspec.json.encode(order), folder, lock)
        finally:
            os.close(lock)
            if self._keeper is None:
                journal.remove_dead(folder)
        try:
            self._join(folder)
        except BaseException:
            kill(self._keeper)
            self._keeper = None
            journal.remove_dead(folder)
            raise

    @classmethod
    def attach(cls, name: str | None = None) -> Lab:
        """A lab that is up. ``name`` None stands for the only one made by ``lab up``."""
        labs = journal.list_labs()
        if name is None:
            alive = [lab.name for lab in labs if lab.is_alive and not _is_private(lab)]
            if len(alive) != 1:
                problem = "no lab is up" if not alive else f"{len(alive)} labs are up: {', '.join(alive)}"
                raise UsageError(problem, hint="wirespeed lab up ..." if not alive else "name one of them")
            name = alive[0]
        layout.check_name(name)
        found = next((lab for lab in labs if lab.name == name), None)
        if found is None:
            raise UsageError(f"no lab is named {name!r}", hint="wirespeed lab status lists those that are up")
        if not found.is_alive:
            if found.problem is not None:
                raise DataError(found.problem, hint="wirespeed lab down --stale removes what dead labs left")
            raise PeerFailure(f"lab {name} has ended without cleaning up", hint="wirespeed lab down --stale")
        lab = cls(LabSpec(hosts=1, rate_bit_per_s=layout.MAX_RATE_BIT_PER_S), keep=True)
        lab._join(found.path)
        return lab

    def _join(self, folder: Path) -> None:
        try:
            connection = control.connect(folder, _ASK_S)
        except OSError as error:
            raise PeerFailure(f"the keeper of lab {folder.name} does not answer: {error.strerror}") from None
        try:
            reply, _ = control.ask(connection, control.Request(op="hello"))
            assert reply.spec is not None
            self._keeper_handle = os.pidfd_open(reply.keeper_pid)
        except BaseException:
            connection.close()
            raise
        self._connection, self._folder, self._token = connection, folder, reply.token
        self.spec, self.name = reply.spec, reply.name
        self.hosts = layout.lay_out(reply.spec)

    def _ask(self, request: control.Request) -> tuple[control.Reply, list[int]]:
        with self._lock:
            if self._connection is None:
                raise UsageError("this lab is not up", hint="use `with Lab(spec) as lab`, or call up() first")
            return control.ask(self._connection, request)

    def close(self) -> None:
        """Let go of the lab without ending it. What was started through this object is ended."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._keeper_handle is not None:
                os.close(self._keeper_handle)
                self._keeper_handle = None

    def down(self) -> None:
        """End every process in the lab and remove the lab. Calling it again does nothing."""
        if self._connection is None or self._keeper_handle is None or self._folder is None:
            return
        try:
            with contextlib.suppress(PeerFailure):  # it is on its way out, or does not answer: killed below
                self._ask(control.Request(op="down"))
            if not processes.wait_gone(self._keeper_handle, _DOWN_S):
                import signal

                signal.pidfd_send_signal(self._keeper_handle, signal.SIGKILL)
                processes.wait_gone(self._keeper_handle, _DOWN_S)
            if self._keeper is not None:
                self._keeper.wait()
                self._keeper = None
            journal.remove_dead(self._folder)
        finally:
            self.close()

    def status(self) -> control.Status:
        """The lab as the kernel has it now."""
        reply, _ = self._ask(control.Request(op="status"))
        assert reply.status is not None
        return reply.status

    def fault(
        self,
        host: str,
        kind: control.FaultKind,
        *,
        rate_bit_per_s: float | None = None,
        other: str | None = None,
    ) -> None:
        """Break or mend a host's link.

        ``down``, ``up``, ``rate``, ``partition`` (from ``other``), or ``heal``, which undoes all that was
        done to it. A rack's shaped uplink (``rack0``) knows ``rate`` and ``heal``.
        """
        self._ask(control.Request(op="fault", host=host, kind=kind, rate_bit_per_s=rate_bit_per_s, other=other))

    def free_port(self, host: str = "h0") -> int:
        """A TCP port that is free in a host at this moment."""
        return self._ask(control.Request(op="port", host=host))[0].port

    def new_token(self) -> str:
        """A token for a group of processes; ``end_token`` ends all that carry it."""
        with self._lock:
            self._num_tokens += 1
            return f"{self._token}{self._num_tokens}."

    def end_token(self, token: str) -> None:
        """End every process that carries a token, wherever it went."""
        self._ask(control.Request(op="end", token=token))

    def popen(
        self,
        host: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        sched_batch: bool = False,
        session: bool = True,
        token: str | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command in a host and return at once; its process id is the command's own.

        ``env`` is laid over this program's environment. ``session`` gives it a session of its own (no
        terminal signals).
        """
        if not command:
            raise UsageError("got no command to run", hint="put it after --")
        _, descriptors = self._ask(control.Request(op="enter", host=host))
        try:
            mnt, net, uts = descriptors[:3]
            user = descriptors[3] if len(descriptors) > 3 else -1
            return subprocess.Popen(
                [
                    sys.executable, "-I", "-S", _ENTER, *map(str, (user, mnt, net, uts)),
                    str(int(sched_batch)), str(int(session)), str(os.getpid()),
                    os.getcwd() if cwd is None else str(cwd), *command,
                ],
                env=self._environment(host, self.new_token() if token is None else token, env),
                pass_fds=descriptors, stdin=stdin, stdout=stdout, stderr=stderr,
            )  # fmt: skip
        finally:
            processes.close_quietly(*descriptors)

    def _environment(self, host: str, token: str, env: Mapping[str, str] | None) -> dict[str, str]:
        interface = next(found.interface for found in self.hosts if found.name == host)
        return {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "GLOO_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "PYTHONUNBUFFERED": "1",
            "WIRESPEED_HOST": host,
            "WIRESPEED_LAB": self.name,
            **({} if env is None else env),
            processes.TOKEN: token,
        }

    def exec(
        self,
        host: str,
        command: Sequence[str],
        *,
        timeout_s: float | None = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> CommandResult:
        """Run one command in a host to its end and collect its output.

        ``returncode`` is None at the deadline.
        """
        token = self.new_token()
        process = self.popen(
            host, command, env=env, cwd=cwd, token=token, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        late = False
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            late = True
            self.end_token(token)
            try:
                out, err = process.communicate(timeout=_DRAIN_S)
            except subprocess.TimeoutExpired as held:  # by a process that shed its token
                out, err = held.stdout or b"", held.stderr or b""
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return CommandResult(
            returncode=None if late else process.returncode,
            stdout=out.decode(errors="replace"),
            stderr=err.decode(errors="replace"),
        )

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        sched_batch: bool = True,
        timeout_s: float | None = None,
        on_line: Callable[[int, str, str], None] | None = None,
        should_stop: Callable[[], str | None] | None = None,
        cwd: str | Path | None = None,
        order: Sequence[str] | None = None,
    ) -> RunResult:
        """Start one process per rank under the SPMD variables, wait for all, stop all when one fails.

        Rank r is on host r // ranks_per_host of ``order``: names of some or all hosts, None for all as they
        are listed. ``on_line(rank, "stdout" or "stderr", line)`` gets each line of
        output; the default prints ``[rank] line``. ``timeout_s`` None waits as long as the program runs.
        ``should_stop`` is asked a few times a second; a text from it ends the run with that reason.
        Raises PeerFailure when the lab itself ends during the run.
        """
        return run_ranks(
            self, command, ranks_per_host=ranks_per_host, env=env, sched_batch=sched_batch, timeout_s=timeout_s,
            on_line=on_line, should_stop=should_stop, cwd=cwd, order=order,
        )  # fmt: skip

    @property
    def keeper_handle(self) -> int:
        """A pidfd of the lab's keeper: readable when the lab has ended."""
        if self._keeper_handle is None:
            raise UsageError("this lab is not up", hint="use `with Lab(spec) as lab`, or call up() first")
        return self._keeper_handle


def _is_private(lab: journal.LabFolder) -> bool:
    """Whether a lab belongs to a program that will end it: never the one meant when no name is given."""
    return lab.journal is not None and lab.journal.owner_pid is not None


def stale_labs() -> tuple[str, ...]:
    """Names of labs whose keeper has ended without removing its folder."""
    return tuple(lab.name for lab in journal.list_labs() if not lab.is_alive)


def remove_stale() -> tuple[str, ...]:
    """Remove what dead labs left: processes that carry their token, and their folders.

    Living labs are not touched.
    """
    removed = []
    for lab in journal.list_labs():
        if lab.is_alive:
            continue
        if lab.journal is not None:
            processes.end(processes.has_token(lab.journal.token + "."))
        if journal.remove_dead(lab.path):
            removed.append(lab.name)
    return tuple(removed)
