"""The process that is a lab: it makes the namespaces, holds and changes them, and takes them with it.

Everything of a lab hangs on this process: when it ends, even by kill -9, the kernel removes namespaces, links
and bridges. It ends on request, on SIGTERM, and (for a lab made inside a program) when the owner ends. When a
client's connection closes, or the client ends, what that client started in the lab is ended. It has one
thread and blocks only for a bounded time.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from wirespeed.errors import InternalError, MissingCapability, UsageError, WirespeedError
from wirespeed.lab import control, delay, journal, layout, namespaces, processes
from wirespeed.lab.faults import Faults
from wirespeed.lab.wiring import Wiring


class _Client:
    """One connection, the process behind it, and the token of what it starts."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection = connection
        self.token = token
        pid = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
        self.handle = os.pidfd_open(pid)

    def close(self) -> None:
        self.connection.close()
        processes.close_quietly(self.handle)


class Keeper:
    """The keeper's state and its loop."""

    def __init__(self, order: control.Order) -> None:
        self.order = order
        self.folder = Path(order.folder)
        self.rootless = False
        self.clients: dict[int, _Client] = {}
        self.num_clients = 0
        self.user: int | None = None
        self.line_pid: int | None = None
        self.is_ending = False

    def make(self) -> None:
        """Make the lab; the journal is written before anything else exists."""
        self.rootless = namespaces.become_lab_root()
        if self.rootless:
            self.user = namespaces.open_own("user")
        self._write_journal()
        try:
            self._write_hosts()
            namespaces.unshare(namespaces.CLONE_NEWNET | namespaces.CLONE_NEWUTS)
            namespaces.make_private_mounts(self.folder / "hosts")
        except OSError as error:
            raise MissingCapability(
                f"the kernel refused a network or mount namespace: {error}",
                hint="run as root, not in a sandbox",
            ) from None
        self.wiring = Wiring(self.order.spec)
        self.wiring.build(self.folder / "sys")
        self.faults = Faults(self.wiring)
        if self.wiring.uses_line:
            spec = self.order.spec
            self.line_pid = delay.start(self.wiring.line_pairs(), delay_s=spec.delay_s, loss=spec.loss)
        self.server = control.listen(self.folder)

    def _write_journal(self) -> None:
        order = self.order
        journal.write(
            self.folder,
            journal.Journal(
                name=order.name,
                token=order.token,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                keeper_pid=os.getpid(),
                rootless=self.rootless,
                owner_pid=order.owner_pid,
                spec=order.spec,
            ),
        )

    def _write_hosts(self) -> None:
        try:
            system_text = Path("/etc/hosts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            system_text = ""
        try:
            (self.folder / "sys").mkdir()
            (self.folder / "hosts").write_text(
                layout.hosts_file(layout.lay_out(self.order.spec), system_text), encoding="utf-8"
            )
        except OSError as error:
            raise journal.cannot_write(self.folder, error) from None

    def serve(self) -> None:
        """Answer until told to end, or until the owner ends."""
        poller = select.poll()
        poller.register(self.server, select.POLLIN)
        wakeup, alarm = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(alarm)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "is_ending", True))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poller.register(wakeup, select.POLLIN)
        owner = self._open_owner()
        if owner is not None:
            poller.register(owner, select.POLLIN)
        while not self.is_ending:
            for descriptor, _ in poller.poll():
                if descriptor == owner:
                    self.is_ending = True
                elif descriptor == wakeup:
                    os.read(wakeup, 4096)
                    self._look_after_line()
                elif descriptor == self.server.fileno():
                    self._accept(poller)
                elif descriptor in self.clients:
                    self._hear(self.clients[descriptor], descriptor, poller)

    def _open_owner(self) -> int | None:
        if self.order.owner_pid is None:
            return None
        try:
            return os.pidfd_open(self.order.owner_pid)
        except ProcessLookupError:
            self.is_ending = True
            return None

    def _look_after_line(self) -> None:
        if self.line_pid is None:
            return
        pid, _ = os.waitpid(self.line_pid, os.WNOHANG)
        if pid == self.line_pid:
            self.line_pid = None
            self.wiring.notes.append("the delay line has ended: no traffic passes; take the lab down")

    def _accept(self, poller: select.poll) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self.server.accept()
            connection.setblocking(False)
            self.num_clients += 1
            client = _Client(connection, f"{self.order.token}.{self.num_clients}.")
            for descriptor in (connection.fileno(), client.handle):
                self.clients[descriptor] = client
                poller.register(descriptor, select.POLLIN)

    def _hear(self, client: _Client, descriptor: int, poller: select.poll) -> None:
        data = b""
        if descriptor != client.handle:
            with contextlib.suppress(OSError):
                data = client.connection.recv(control.MAX_MESSAGE_BYTES)
        if not data:  # the client closed, or ended
            for key in (client.connection.fileno(), client.handle):
                poller.unregister(key)
                del self.clients[key]
            processes.end(processes.has_token(client.token), grace_s=0.5)
            client.close()
            return
        descriptors: list[int] = []
        try:
            reply, descriptors = self._answer(msgspec.json.decode(data, type=control.Request), client)
        except WirespeedError as error:
            reply = control.Reply(problem=control.Problem.of(error))
        except Exception as error:
            reply = control.Reply(problem=control.Problem.of(InternalError(f"keeper: {error!r}")))
        with contextlib.suppress(OSError):
            control.send(client.connection, reply, descriptors)

    def _answer(self, request: control.Request, client: _Client) -> tuple[control.Reply, list[int]]:
        descriptors: list[int] = []
        reply = control.Reply()
        match request.op:
            case "hello":
                reply = control.Reply(
                    name=self.order.name, token=client.token, spec=self.order.spec, keeper_pid=os.getpid()
                )
            case "enter":
                link = self.faults.link(request.host)
                descriptors = [link.mnt, link.net, link.uts] + ([] if self.user is None else [self.user])
            case "port":
                reply = control.Reply(port=self.wiring.free_port(request.host))
            case "fault":
                self.faults.apply(request.host, request.kind, request.rate_bit_per_s, request.other)
            case "status":
                reply = control.Reply(status=self._status())
            case "end":
                if not request.token.startswith(client.token):
                    raise UsageError("got a token of another client", expected="one given to this client")
                processes.end(processes.has_token(request.token))
            case "down":
                self.end_processes()
                self.is_ending = True
        return reply, descriptors

    def _status(self) -> control.Status:
        wiring = self.wiring
        found: dict[int, list[int]] = {}
        inodes = {os.fstat(link.net).st_ino: name for name, link in wiring.links.items()}
        for pid in processes.find(processes.is_in_network(frozenset(inodes))):
            with contextlib.suppress(OSError):
                found.setdefault(os.stat(f"/proc/{pid}/ns/net").st_ino, []).append(pid)
        rates, by_class = wiring.read_rates(), wiring.read_classes()
        return control.Status(
            name=self.order.name,
            spec=self.order.spec,
            keeper_pid=os.getpid(),
            rootless=self.rootless,
            delay_by="netem" if wiring.uses_netem else "line" if wiring.uses_line else "none",
            hosts=tuple(
                self.faults.host_status(name, rates[name], tuple(sorted(found.get(inode, ()))), by_class.get(name))
                for inode, name in inodes.items()
            ),
            notes=tuple(wiring.notes),
        )

    def end_processes(self) -> None:
        """End every process in the lab's hosts, and those that carry its token elsewhere."""
        in_network = processes.is_in_network(self.wiring.network_inodes())
        has_token = processes.has_token(self.order.token + ".")
        processes.end(lambda pid: in_network(pid) or has_token(pid), grace_s=1.0)

    def close(self) -> None:
        """End what runs in the lab and remove its folder. The rest goes when this process ends."""
        if hasattr(self, "wiring"):
            self.end_processes()
        if self.line_pid is not None:
            os.kill(self.line_pid, signal.SIGKILL)
        journal.remove_folder(self.folder)


def probe() -> None:
    """Try what a lab needs, with one host, in namespaces that end with this process."""
    namespaces.become_lab_root()
    try:
        namespaces.unshare(namespaces.CLONE_NEWNET | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWNS)
    except OSError as error:
        raise MissingCapability(f"the kernel refused a network or mount namespace: {error}") from None
    namespaces.mount("none", "/", None, namespaces.MS_REC | namespaces.MS_SLAVE)
    Wiring(layout.LabSpec(hosts=1, rate_bit_per_s=1e9)).build(Path("/proc/self/no-such-folder"))


def main() -> int:
    """Read an order (JSON; empty: probe) on stdin, answer on stdout with a Reply, then keep the lab."""
    os.setsid()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # three namespaces and two sockets per host
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    text = sys.stdin.buffer.read()
    keeper: Keeper | None = None
    try:
        if not text:
            probe()
        else:
            keeper = Keeper(msgspec.json.decode(text, type=control.Order))
            keeper.make()
        reply = control.Reply(keeper_pid=os.getpid())
    except WirespeedError as error:
        reply = control.Reply(problem=control.Problem.of(error))
    except Exception as error:
        reply = control.Reply(problem=control.Problem.of(InternalError(f"keeper: {error!r}")))
    if keeper is not None and reply.problem is not None:
        keeper.close()
    os.write(1, msgspec.json.encode(reply))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    if keeper is None or reply.problem is not None:
        return 0
    try:
        keeper.serve()
    finally:
        keeper.close()
    return 0


if __name__ == "__main__":
    # os._exit and not sys.exit: pyroute2's event loop has no business to finish here.
    sys.stdout.flush()
    os._exit(main())
