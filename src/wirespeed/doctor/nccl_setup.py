"""What NCCL's set-up lines say, gathered over processes: each handler reads one kind of line.

Everything is kept as sets and first occurrences, so the same line a thousand times changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from wirespeed.doctor import nccl_formats as formats
from wirespeed.doctor.check import Evidence
from wirespeed.doctor.log_lines import shown
from wirespeed.doctor.log_prefix import Process
from wirespeed.doctor.nccl_facts import CommFacts, GdrFacts

MAX_PROCESSES = 20_000
MAX_EVIDENCE = 4
"""Lines kept of one kind."""


class Place(NamedTuple):
    """A line and where it stands."""

    source: str
    number: int
    line: bytes


Handler = Callable[[Process, bytes, Place], bool]


class SetupReader:
    """Takes set-up lines, gives facts."""

    def __init__(self) -> None:
        self.ranks: dict[Process, int] = {}
        self.setup_end: dict[str, int] = {}
        """By file: the line after which no set-up was seen."""
        self._evidence: dict[str, list[Evidence]] = defaultdict(list)
        self._versions: Counter[str] = Counter()
        self._networks: dict[str, set[str]] = defaultdict(set)
        self._bootstrap: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self._hcas: dict[str, tuple[formats.Hca, ...]] = {}
        self._has_relaxed_ordering: dict[str, bool] = {}
        self._sockets: dict[str, tuple[tuple[str, str], ...]] = {}
        self._no_ib: set[str] = set()
        self._no_verbs: set[str] = set()
        self._gdr_hcas: dict[tuple[str, str], GdrFacts] = {}
        self._gdr_gpus: dict[tuple[str, str, str], GdrFacts] = {}
        self._gdr_hosts: dict[bool, set[str]] = {True: set(), False: set()}
        self._dmabuf: set[str] = set()
        self._comms: dict[str, CommFacts] = {}
        self._settings: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._algorithms: Counter[tuple[str, str, str]] = Counter()
        self._orders: dict[int, str] = {}
        self._trees: dict[Process, str] = {}
        self._no_speed: set[str] = set()
        self._providers: set[str] = set()
        self._port_rates: dict[str, dict[str, float]] = defaultdict(dict)
        self._handlers = self._make_handlers()

    def take(self, process: Process, message: bytes, place: Place) -> bool:
        """One message; False where it is of no kind that is known."""
        handler = self._handlers.get(message[:4])
        return handler is not None and handler(process, message, place)

    def take_version(self, message: bytes, place: Place) -> None:
        """``version 2.18.3+cuda12.1``."""
        found = formats.VERSION.search(message)
        if found is not None and len(self._versions) < 100:
            self._versions[found[1].decode(errors="replace")] += 1
            self.first("version", place)

    def _make_handlers(self) -> dict[bytes, Handler]:
        return {
            b"Boot": self._on_bootstrap,
            b"NET/": self._on_net,
            b"Usin": self._on_using,
            b"Assi": self._on_assigned,
            b"GPU ": self._on_gpu,
            b"Conn": self._on_connected,
            b"DMA-": self._on_dmabuf,
            b"comm": self._on_comm,
            b"nccl": self._on_comm,
            b"Init": self._on_comm,
            b"NCCL": self._on_setting,
            b"Chan": self._on_order,
            b"Tree": self._on_trees,
            b"Coul": self._on_could_not,
            b"Fail": self._on_could_not,
            b"AllR": self._on_algorithm,
            b"AllG": self._on_algorithm,
            b"Redu": self._on_algorithm,
            b"Broa": self._on_algorithm,
        }

    def _on_bootstrap(self, process: Process, message: bytes, place: Place) -> bool:
        found = formats.BOOTSTRAP.match(message)
        if found is None:
            return False
        self._bootstrap[process.host].add((found[1].decode(errors="replace"), found[2].decode(errors="replace")))
        self.first(f"bootstrap {found[1].decode(errors='replace')}", place)
        return True

    def _on_net(self, process: Process, message: bytes, place: Place) -> bool:
        if (found := formats.IB_USING.search(message)) is not None:
            hcas = formats.parse_hcas(found[2])
            # A line that was cut, or that another ran into, lists fewer: then the other ranks' lines tell.
            is_whole = found[3] is not None and [hca.number for hca in hcas] == list(range(len(hcas)))
            if not hcas or not is_whole or len(hcas) < len(self._hcas.get(process.host, ())):
                return bool(hcas)
            self._hcas[process.host] = hcas
            self._has_relaxed_ordering[process.host] = b"[RO]" in found[2]
            self.first("hcas", place)
            self.first(f"hcas {process.host}", place)
        elif (found := formats.SOCKET_USING.search(message)) is not None:
            self._sockets[process.host] = formats.parse_interfaces(found[1])
            self.first("sockets", place)
        elif formats.NO_IB.search(message) is not None:
            self._no_ib.add(process.host)
            self.first("no ib", place)
        elif (found := formats.GDR_HCA.search(message)) is not None:
            enabled, index, name, reason = found.groups()
            self._gdr_hcas[process.host, name.decode(errors="replace")] = GdrFacts(
                host=process.host,
                hca=name.decode(errors="replace"),
                index=int(index),
                is_enabled=enabled == b"Enabled",
                reason=(reason or b"").decode(errors="replace"),
            )
            self.first("gdr hca " + enabled.decode(errors="replace"), place)
        elif (found := formats.PORT_SPEED.search(message)) is not None:
            ports = self._port_rates[process.host] if len(self._port_rates) < MAX_PROCESSES else {}
            if len(ports) < 64:
                ports[found[2].decode(errors="replace")] = int(found[5]) * 1e6
            self.first(f"port speed {process.host} {found[2].decode(errors='replace')}", place)
        elif (found := formats.EFA.search(message)) is not None:
            self._providers.add(found[1].decode(errors="replace"))
        else:
            return formats.NO_PLUGIN.search(message) is not None
        return True

    def _on_using(self, process: Process, message: bytes, place: Place) -> bool:
        found = formats.NETWORK.match(message)
        return found is not None and self._on_network(found[1], process, place)

    def _on_assigned(self, process: Process, message: bytes, place: Place) -> bool:
        found = formats.PLUGIN_ASSIGNED.match(message)
        return found is not None and self._on_network(found[1], process, place)

    def _on_network(self, name: bytes, process: Process, place: Place) -> bool:
        text = name.decode(errors="replace").strip()
        self._networks[text].add(process.host)
        self.first(f"network {text}", place)
        return True

    def _on_gpu(self, process: Process, message: bytes, place: Place) -> bool:
        found = formats.GDR_GPU.match(message)
        if found is None:
            return False
        enabled, gpu, hca, distance, sign, limit = found.groups()
        self._gdr_gpus[process.host, gpu.decode(errors="replace"), hca.decode(errors="replace")] = GdrFacts(
            host=process.host,
            hca=hca.decode(errors="replace"),
            gpu=gpu.decode(errors="replace"),
            is_enabled=enabled == b"Enabled",
            distance=int(distance),
            limit=int(limit),
            reason=f"distance {int(distance)} {sign.decode(errors='replace')} {int(limit)}",
        )
        self.first("gdr gpu " + enabled.decode(errors="replace"), place)
        return True

    def _on_connected(self, process: Process, message: bytes, place: Place) -> bool:
        found = formats.GDR_SUMMARY.match(message)
        if found is not None:
            self._gdr_hosts[found[1] == b"1"].add(process.host)
            self.first(f"gdr summary {found[1].decode(errors='replace')}", place)
        self.setup_end[place.source] = place.number
        return message.startswith(b"Connected all")

    def _on_dmabuf(self, process: Process, message: bytes, place: Place) -> bool:
        if formats.DMABUF.match(message) is None:
            return False
        self._dmabuf.add(process.host)
        return True

    def _on_comm(self, process: Process, message: bytes, place: Place) -> bool:
        found = formats.COMM.search(message)
        if found is None:
            return False
        _, rank, num_ranks = found.groups()
        named = formats.COMM_ID.search(message)
        # Without commId (before 2.18) the pointer tells communicators of one process apart, not across processes.
        key = f"n{int(num_ranks)}" if named is None else named[1].decode(errors="replace")
        comm = self._comms.get(key)
        if comm is None:
            if len(self._comms) >= 5_000:
                return True
            comm = self._comms[key] = CommFacts(name=key, num_ranks=int(num_ranks))
        if b"Init START" in message:
            comm.started.add(int(rank))
        elif b"Init COMPLETE" in message:
            comm.completed.add(int(rank))
            self.setup_end[place.source] = place.number
        comm.hosts[int(rank)] = process.host
        if len(self.ranks) > MAX_PROCESSES:
            return True
        if process not in self.ranks or int(num_ranks) == max(c.num_ranks for c in self._comms.values()):
            self.ranks[process] = int(rank)
        self.first("comm", place)
        return True

    def _on_setting(self, process: Process, message: bytes, place: Place) -> bool:
        found = formats.SET_BY.match(message)
        if found is None:
            return False
        name, value = found[1].decode(errors="replace"), found[2].decode(errors="replace")[:200]
        values = self._settings[name]
        if len(self._settings) < 500 and len(values) < 100:
            values[value].add(process.host)
        self.first(f"setting {name}", place)
        return True

    def _on_order(self, process: Process, message: bytes, place: Place) -> bool:
        found = formats.ORDER.match(message)
        if found is None:
            return False
        if len(self._orders) < 256:
            self._orders.setdefault(int(found[1]), found[3].decode(errors="replace").strip())
        return True

    def _on_trees(self, process: Process, message: bytes, place: Place) -> bool:
        found = formats.TREES.match(message)
        if found is not None and len(self._trees) < 1024:
            self._trees.setdefault(process, found[1].decode(errors="replace").strip()[:200])
        return found is not None

    def _on_could_not(self, process: Process, message: bytes, place: Place) -> bool:
        if (found := formats.NO_SPEED.match(message)) is not None:
            self._no_speed.add(found[1].decode(errors="replace"))
            self.first("no speed", place)
        elif formats.NO_VERBS.match(message) is not None:
            self._no_verbs.add(process.host)
            self.first("no verbs", place)
        else:
            return False
        return True

    def _on_algorithm(self, process: Process, message: bytes, place: Place) -> bool:
        found = formats.ALGORITHM.match(message)
        if found is None:
            return False
        collective, _, algorithm, protocol = found.groups()
        if len(self._algorithms) < 1_000:
            self._algorithms[
                collective.decode(errors="replace"),
                algorithm.decode(errors="replace"),
                protocol.decode(errors="replace"),
            ] += 1
        return True

    def first(self, kind: str, place: Place) -> None:
        """Keep the first few lines of a kind as evidence."""
        held = self._evidence[kind] if len(self._evidence) < 5_000 else self._evidence.get(kind, [])
        if len(held) < MAX_EVIDENCE:
            held.append(Evidence(where=f"{place.source}:{place.number}", seen=shown(place.line)))

    def facts(self) -> dict[str, Any]:
        """Fields of NcclFacts."""
        return {
            "versions": tuple(version for version, _ in self._versions.most_common()),
            "networks": {name: tuple(sorted(hosts)) for name, hosts in self._networks.items()},
            "bootstrap": {host: tuple(sorted(pairs)) for host, pairs in self._bootstrap.items()},
            "hcas": dict(self._hcas),
            "relaxed_ordering": dict(self._has_relaxed_ordering),
            "sockets": dict(self._sockets),
            "hosts_without_ib": tuple(sorted(self._no_ib)),
            "hosts_without_verbs": tuple(sorted(self._no_verbs)),
            "gdr_hcas": tuple(self._gdr_hcas.values()),
            "gdr_gpus": tuple(self._gdr_gpus.values()),
            "num_gdr_on": len(self._gdr_hosts[True]),
            "num_gdr_off": len(self._gdr_hosts[False]),
            "dmabuf_hosts": tuple(sorted(self._dmabuf)),
            "comms": tuple(self._comms.values()),
            "settings": {
                name: {value: tuple(sorted(hosts)) for value, hosts in values.items()}
                for name, values in self._settings.items()
            },
            "algorithms": tuple((*key, count) for key, count in self._algorithms.most_common()),
            "ring_orders": dict(sorted(self._orders.items())),
            "num_trees": len(self._trees),
            "interfaces_without_speed": tuple(sorted(self._no_speed)),
            "providers": tuple(sorted(self._providers)),
            "port_rates": {host: dict(ports) for host, ports in self._port_rates.items()},
            "evidence": {kind: tuple(held) for kind, held in self._evidence.items()},
        }
