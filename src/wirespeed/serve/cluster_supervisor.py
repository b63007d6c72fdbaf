"""The process that talks to Ray for ``cluster``: places actors, tells where they listen, ends them.

Reads one ``Wanted`` from stdin, then nothing until stdin ends, which means: stop. Writes ``Told``, a line each. Actors
belong to this process: where it dies, however it dies, Ray ends them, and their nodes with them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from wirespeed.errors import MissingCapability, PeerFailure, UsageError, WirespeedError
from wirespeed.serve.cluster import Told, Wanted
from wirespeed.wire.sockets import split_address

LOOK_S = 0.5
CONNECT_S = 5.0
PLACE_S = 60.0
DRAIN_S = 30.0
_NAMESPACE = "wirespeed"
_GUARD = """
import signal, subprocess, sys, threading
node = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: node.terminate())
threading.Thread(target=lambda: (sys.stdin.buffer.read(), node.kill()), daemon=True).start()
sys.exit(node.wait())
"""
"""Between the actor and the node: the actor's end, however it comes, closes this one's input, and ends the node.

Not PR_SET_PDEATHSIG: that follows the thread which started the process, and Ray's threads come and go.
"""


class NodeRunner:
    """What runs on a host of the cluster: one ``wirespeed serve --node``. An actor of Ray; ends when the node ends."""

    def __init__(self, command: Sequence[str], token: str, start_s: float) -> None:
        import ray

        # As the host is known to the cluster, which need not be what its name or its first interface says.
        own = ray.get_runtime_context().get_node_id()
        host = next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own)
        door = f"[{host}]:0" if ":" in host else f"{host}:0"
        environment = {**os.environ, **({"WIRESPEED_TOKEN": token} if token else {})}
        arguments = [sys.executable, "-c", _GUARD, sys.executable, "-m", "wirespeed", "serve", *command]
        arguments += ["--grpc", "none", "--http", "none", "--node", door, "--json"]
        if not token:
            arguments.append("--insecure")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(arguments, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
        self._said: list[str] = []
        self._is_stopping = False
        lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        self.problem = ""
        self.address = ""
        try:
            self.address = str(msgspec.json.decode(_document(lines, start_s))["node"])
        except (queue.Empty, msgspec.MsgspecError, KeyError, TypeError):
            self._process.kill()
            self._process.wait()
            time.sleep(0.2)  # for its last words
            self.problem = " | ".join(self._said) or f"it said nothing within {start_s:g} s"
            return
        threading.Thread(target=self._watch, daemon=True).start()

    def where(self) -> tuple[str, str, str]:
        """Its address, or why it has none, and the host's number in the cluster."""
        import ray

        return self.address, self.problem, str(ray.get_runtime_context().get_node_id())

    def stop(self) -> None:
        """Let it drain, and wait for that."""
        self._is_stopping = True
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(DRAIN_S)

    def _watch(self) -> None:
        self._process.wait()
        if not self._is_stopping:
            os._exit(1)  # Ray starts the actor again, here or on another host

    def _read(self, lines: queue.Queue[bytes]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            lines.put(line)
        lines.put(b"")

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said = [*self._said[-4:], line.decode(errors="replace").strip()]


def _document(lines: queue.Queue[bytes], timeout_s: float) -> bytes:
    """The lines of one indented JSON document. Raises queue.Empty where it does not come in time."""
    end_s = time.monotonic() + timeout_s
    content = b""
    while not content.endswith(b"\n}\n"):
        line = lines.get(timeout=max(0.0, end_s - time.monotonic()))
        if not line:
            break
        content += line
    return content


def tell(told: Told) -> None:
    """One line."""
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


def choose(hosts: Sequence[tuple[str, str]], *, workers: int, placement: str) -> tuple[int, str, list[str | None]]:
    """How many workers, Ray's strategy for them, and the rack that each has to be in (None: any).

    ``hosts``: id and rack of each, a rack of "" where it has no label. Raises MissingCapability where no rack is large
    enough to pack one worker per host into.
    """
    if not hosts:
        raise MissingCapability("the cluster has no host that is alive and large enough for a worker")
    racks: dict[str, int] = {}
    for _, rack in hosts:
        racks[rack] = racks.get(rack, 0) + 1
    named = {rack: count for rack, count in racks.items() if rack}
    if placement == "pack":
        if not named:
            return workers or len(hosts), "PACK", [None] * (workers or len(hosts))
        rack, count = max(named.items(), key=lambda item: (item[1], item[0]))
        num_workers = workers or count
        return num_workers, "PACK", [rack] * num_workers
    num_workers = workers or len(hosts)
    # One each per host as long as there are hosts; over racks in turn, as far as they have hosts.
    strategy = "STRICT_SPREAD" if num_workers <= len(hosts) else "SPREAD"
    if len(named) < 2 or sum(named.values()) < len(hosts) or num_workers > len(hosts):
        return num_workers, strategy, [None] * num_workers
    left = dict(sorted(named.items(), key=lambda item: -item[1]))
    turns: list[str | None] = []
    while len(turns) < num_workers:
        for rack, count in left.items():
            if count and len(turns) < num_workers:
                left[rack] = count - 1
                turns.append(rack)
    return num_workers, strategy, turns


def _fits(resources: Mapping[str, float], wanted: Wanted) -> bool:
    """Whether a host is large enough for one worker."""
    return resources.get("CPU", 0.0) >= max(wanted.cpus, 0.01) and resources.get("GPU", 0.0) >= wanted.gpus


class Supervisor:
    """Places the workers of one service and tells of them."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._actors: list[Any] = []
        self._asked: dict[Any, int] = {}
        self._addresses: dict[int, str] = {}
        self._lost: set[int] = set()
        self._group: Any = None
        self._racks: dict[str, str] = {}

    def place(self) -> None:
        """Have Ray make the placement group and start the actors."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted = self._wanted
        # A head often has no CPUs to give: it is not a host for workers then.
        alive = [node for node in ray.nodes() if node["Alive"] and _fits(node["Resources"], wanted)]
        hosts = [(node["NodeID"], str(node.get("Labels", {}).get(wanted.rack_label, ""))) for node in alive]
        self._racks = dict(hosts)
        num_workers, strategy, racks = choose(hosts, workers=wanted.workers, placement=wanted.placement)
        bundle = {"CPU": wanted.cpus, **({"GPU": wanted.gpus} if wanted.gpus else {})}
        selectors = [{} if rack is None else {wanted.rack_label: rack} for rack in racks]
        more: dict[str, Any] = {"bundle_label_selector": selectors} if any(selectors) else {}
        self._group = placement_group([dict(bundle) for _ in range(num_workers)], strategy=strategy, **more)
        if not self._group.wait(PLACE_S):
            where = f"one rack ({racks[0]})" if wanted.placement == "pack" and racks[0] else f"{len(hosts)} hosts"
            raise MissingCapability(
                f"the cluster has no room for {num_workers} workers of {wanted.cpus:g} CPUs and {wanted.gpus:g} GPUs "
                f"on {where} within {PLACE_S:g} s",
                hint="ask for fewer or smaller workers, or see `ray status`",
            )
        maker = ray.remote(NodeRunner)
        for number in range(num_workers):
            self._actors.append(
                maker.options(
                    num_cpus=wanted.cpus, num_gpus=wanted.gpus or None, max_restarts=-1, max_task_retries=-1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
                    max_concurrency=2,
                ).remote(wanted.command, wanted.token, wanted.start_s)
            )  # fmt: skip
        within = f", racks {', '.join(sorted({rack for rack in racks if rack}))}" if more else ""
        tell(Told(event="placed", text=f"placing {num_workers} workers: {wanted.placement} ({strategy}{within})"))

    def look(self) -> None:
        """Ask every worker where it is; one that is being started again answers when it is up."""
        import ray

        asked = set(self._asked.values())
        for number, actor in enumerate(self._actors):
            if number not in asked:
                self._asked[actor.where.remote()] = number
        ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=LOOK_S)
        for ref in ready:
            number = self._asked.pop(ref)
            try:
                address, problem, host_id = ray.get(ref)
            except ray.exceptions.RayError as fault:
                self._down(number, str(fault).strip().splitlines()[0])
                continue
            if problem and not self._addresses:
                raise UsageError(f"worker {number} cannot serve: {problem}", hint="are the models on that host?")
            if problem:
                self._down(number, problem)
                ray.kill(self._actors[number], no_restart=False)
            else:
                self._up(number, address, host_id)

    def stop(self) -> None:
        """Drain and end the workers."""
        import ray

        with contextlib.suppress(Exception):
            ray.wait([actor.stop.remote() for actor in self._actors], num_returns=len(self._actors), timeout=DRAIN_S)
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)

    def _up(self, number: int, address: str, host_id: str) -> None:
        self._lost.discard(number)
        if self._addresses.get(number) != address:
            self._addresses[number] = address
            host = address.rpartition(":")[0].strip("[]")
            tell(Told(event="up", worker=number, address=address, host=host, rack=self._racks.get(host_id, "")))

    def _down(self, number: int, why: str) -> None:
        if number not in self._lost:
            self._lost.add(number)
            tell(Told(event="down", worker=number, text=why))


def main() -> int:
    """See the module."""
    wanted = msgspec.json.decode(sys.stdin.buffer.readline(), type=Wanted)
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        _connect(wanted)
        supervisor = Supervisor(wanted)
        try:
            supervisor.place()
            while not ended.is_set():
                supervisor.look()
                ended.wait(LOOK_S)
        finally:
            supervisor.stop()
    except WirespeedError as fault:
        tell(Told(event="failed", kind=type(fault).__name__, text=fault.problem, hint=fault.hint or ""))
        return fault.exit_code
    return 0


def _connect(wanted: Wanted) -> None:
    try:
        import ray
    except ImportError as fault:
        raise MissingCapability("Ray is not installed here", hint="pip install 'wirespeed[cluster]'") from fault
    if wanted.address != "auto" and "://" not in wanted.address:
        host, port = split_address(wanted.address)
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError as fault:  # Ray itself would try for minutes
            raise PeerFailure(
                f"no Ray cluster at {wanted.address}: {fault.strerror or fault}", hint="is its head up (`ray status`)?"
            ) from fault
    try:
        ray.init(address=wanted.address, namespace=_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as fault:
        raise PeerFailure(
            f"no Ray cluster at {wanted.address}: {str(fault).strip().splitlines()[0]}",
            hint="is its head up (`ray status`), and RAY_AUTH_TOKEN the cluster's?",
        ) from fault


if __name__ == "__main__":
    sys.exit(main())
