"""What a log says that NCCL chose, as data. Hosts are as the log names them; an empty name where it does not."""

from __future__ import annotations

import msgspec

from wirespeed.doctor.check import Evidence
from wirespeed.doctor.nccl_formats import Hca, Via


class ViaCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often channels of a host left by one path (one line of the log each)."""

    host: str
    via: Via
    count: int


class GdrFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Whether GPUDirect RDMA is on for one NIC, or for one GPU and NIC. Distances are codes of the version."""

    host: str
    hca: str
    is_enabled: bool
    index: int | None = None
    gpu: str = ""
    distance: int | None = None
    limit: int | None = None
    reason: str = ""


class CommFacts(msgspec.Struct, kw_only=True):
    """One communicator: which ranks began and which ended its set-up. Ranks are those within it."""

    name: str
    num_ranks: int
    started: set[int] = msgspec.field(default_factory=set)
    completed: set[int] = msgspec.field(default_factory=set)
    hosts: dict[int, str] = msgspec.field(default_factory=dict)

    @property
    def is_hung(self) -> bool:
        """Ranks began its set-up and not one of them ended it, or only some did."""
        return bool(self.started) and self.started > self.completed


class NcclFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All that one or more logs of one job say about NCCL's set-up. Empty where nothing was said."""

    num_lines: int = 0
    versions: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    num_processes: int = 0
    networks: dict[str, tuple[str, ...]] = {}
    """``Using network``: name to hosts."""
    bootstrap: dict[str, tuple[tuple[str, str], ...]] = {}
    hcas: dict[str, tuple[Hca, ...]] = {}
    relaxed_ordering: dict[str, bool] = {}
    sockets: dict[str, tuple[tuple[str, str], ...]] = {}
    hosts_without_ib: tuple[str, ...] = ()
    hosts_without_verbs: tuple[str, ...] = ()
    vias: tuple[ViaCount, ...] = ()
    num_channels: int = 0
    gdr_hcas: tuple[GdrFacts, ...] = ()
    gdr_gpus: tuple[GdrFacts, ...] = ()
    num_gdr_on: int = 0
    num_gdr_off: int = 0
    """Hosts with a rank that ended its set-up with ``GDR 1`` or with ``GDR 0`` (since 2.24)."""
    dmabuf_hosts: tuple[str, ...] = ()
    comms: tuple[CommFacts, ...] = ()
    settings: dict[str, dict[str, tuple[str, ...]]] = {}
    """Environment: name to value to hosts."""
    algorithms: tuple[tuple[str, str, str, int], ...] = ()
    ring_orders: dict[int, str] = {}
    num_trees: int = 0
    interfaces_without_speed: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    port_rates: dict[str, dict[str, float]] = {}
    """Host to RDMA device to bits per second, as NCCL found its port (since 2.18)."""
    evidence: dict[str, tuple[Evidence, ...]] = {}

    @property
    def version(self) -> str | None:
        """The version that most processes stated."""
        return self.versions[0] if self.versions else None

    def num_via(self, kind: str, *, network: str | None = None, has_gdr: bool | None = None) -> int:
        """Channel lines of a kind: NET, P2P or SHM."""
        return sum(
            held.count
            for held in self.vias
            if held.via.kind == kind
            and (network is None or held.via.network.startswith(network))
            and (has_gdr is None or held.via.has_gdr is has_gdr)
        )

    @property
    def uses_rdma(self) -> bool:
        """Channels between hosts go through verbs (NET/IB and plugins of that name), as channels or set-up say."""
        if self.num_via("NET"):
            return self.num_via("NET", network="IB") > self.num_via("NET", network="Socket")
        return any(name.startswith("IB") for name in self.networks)

    @property
    def uses_sockets(self) -> bool:
        """Channels between hosts go through TCP."""
        if self.num_via("NET"):
            return self.num_via("NET", network="Socket") + self.num_via("NET", network="FastSocket") > 0
        return any("Socket" in name for name in self.networks)

    @property
    def is_roce(self) -> bool:
        """Most of the RDMA ports in use are Ethernet."""
        layers = [hca.layer for hcas in self.hcas.values() for hca in hcas]
        return layers.count("RoCE") > len(layers) / 2

    def lines(self, *kinds: str) -> tuple[Evidence, ...]:
        """Evidence of kinds, in the order of the kinds."""
        return tuple(held for kind in kinds for held in self.evidence.get(kind, ()))
