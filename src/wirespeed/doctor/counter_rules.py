"""Which counters should not grow under load, by how much, what it means and what to do.

Keys are those of ``counters.read_counters``: ``group.subject.name``. Counters of mlx5 are named as its driver does;
others are read where they have the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

from wirespeed.doctor.check import Path, Severity


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A counter that should not grow (by more than ``per_s``). ``pattern``'s first group is the subject."""

    id: str
    pattern: str
    severity: Severity
    title: str
    """``{subject}``, ``{name}`` and ``{grown}`` are filled in."""
    remedy: str
    source: str
    path: Path = "any"
    per_s: float = 0.0


_NVSENTINEL = "NVIDIA/NVSentinel nic-health-monitor thresholds"
_MLX5 = "kernel Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst"
RULES = (
    Rule(
        id="counters.link-down",
        pattern=r"(?:nic|rdma)\.(.+)\.(carrier_down_count|link_downed|link_down_events_phy)",
        severity="critical",
        title="{subject} lost its link {grown} times while watched.",
        remedy="replace cable or optics; swap with a good one first",
        source=_NVSENTINEL,
    ),
    Rule(
        id="counters.physical-errors",
        pattern=r"(?:nic|rdma)\.(.+)\.(rx_crc_errors|rx_crc_errors_phy|rx_pcs_symbol_err_phy|symbol_error)",
        severity="critical",
        per_s=10,
        title="{subject} receives damaged packets ({name} grew by {grown}).",
        remedy="clean or replace optics and cable",
        source=_NVSENTINEL + " (10 per s)",
    ),
    Rule(
        id="counters.module-hot",
        pattern=r"nic\.(.+)\.(module_high_temp)",
        severity="warning",
        title="The optical module of {subject} is too hot.",
        remedy="check airflow and the module",
        source=_MLX5,
    ),
    Rule(
        id="counters.buffer-overrun",
        pattern=r"rdma\.(.+)\.(excessive_buffer_overrun_errors|local_link_integrity_errors)",
        severity="critical",
        path="rdma",
        title="{name} of {subject} grew by {grown}.",
        remedy="replace the cable; check the switch port's errors with perfquery",
        source=_NVSENTINEL,
    ),
    Rule(
        id="counters.receiver-not-ready",
        pattern=r"rdma\.(.+)\.(rnr_nak_retry_err)",
        severity="critical",
        path="rdma",
        title="{subject}: receivers were not ready so often that sends were given up.",
        remedy="look for a rank that is stuck on the receiving hosts",
        source=_NVSENTINEL,
    ),
    Rule(
        id="counters.link-recovery",
        pattern=r"rdma\.(.+)\.(link_error_recovery)",
        severity="warning",
        per_s=5 / 60,
        path="rdma",
        title="The link of {subject} recovered from errors {grown} times.",
        remedy="replace cable or optics",
        source=_NVSENTINEL + " (5 per minute)",
    ),
    Rule(
        id="counters.rdma-receive-errors",
        pattern=r"rdma\.(.+)\.(port_rcv_errors)",
        severity="warning",
        per_s=10,
        path="rdma",
        title="{subject} received {grown} packets with errors.",
        remedy="check cable and the switch port",
        source=_NVSENTINEL,
    ),
    Rule(
        id="counters.rdma-ack-timeouts",
        pattern=r"rdma\.(.+)\.(local_ack_timeout_err)",
        severity="warning",
        per_s=1,
        path="rdma",
        title="{subject} waited in vain for acknowledgements {grown} times: packets are lost on the way.",
        remedy="RoCE: check PFC and ECN on switch and host; InfiniBand: the path's ports",
        source=_NVSENTINEL + " (1 per s)",
    ),
    Rule(
        id="counters.rdma-out-of-sequence",
        pattern=r"rdma\.(.+)\.(packet_seq_err|implied_nak_seq_err|out_of_sequence)",
        severity="warning",
        per_s=10,
        path="rdma",
        title="{subject} saw gaps in sequences {grown} times: packets are lost on the way.",
        remedy="RoCE: check PFC and ECN; look for rx_discards_phy on hosts and drops on switch ports",
        source="NCCL user guide; nccl#378",
    ),
    Rule(
        id="counters.rdma-discards",
        pattern=r"rdma\.(.+)\.(port_xmit_discards)",
        severity="warning",
        per_s=100,
        path="rdma",
        title="{subject} threw {grown} packets away that it could not send.",
        remedy="look for congestion behind its switch port",
        source=_NVSENTINEL + " (100 per s)",
    ),
    Rule(
        id="counters.roce-slow-restart",
        pattern=r"rdma\.(.+)\.(roce_slow_restart)",
        severity="warning",
        per_s=10,
        path="rdma",
        title="RoCE on {subject} fell back to its lowest rate {grown} times.",
        remedy="check ECN marking thresholds on the switch",
        source=_NVSENTINEL + " (10 per s)",
    ),
    Rule(
        id="counters.ring-too-small",
        pattern=r"nic\.(.+)\.(rx_out_of_buffer|rx_no_buffer_count|rx_missed_errors|rx_fifo_errors)",
        severity="warning",
        title="{subject} dropped {grown} packets: no free receive buffer ({name}).",
        remedy="raise the receive ring (`ethtool -G {subject} rx ...`, resets the link), spread interrupts, more "
        "queues",
        source=_MLX5,
        path="tcp",
    ),
    Rule(
        id="counters.port-discards",
        pattern=r"nic\.(.+)\.(rx_discards_phy)",
        severity="warning",
        title="{subject} discarded {grown} packets at its port: the bus or the host is slower than the link.",
        remedy="check pci.links, IOMMU and memory; pause frames or PFC stop the sender in time",
        source=_MLX5,
    ),
    Rule(
        id="counters.peer-mtu-larger",
        pattern=r"nic\.(.+)\.(rx_oversize_pkts_phy|rx_out_of_range_len_phy)",
        severity="warning",
        title="{subject} refused {grown} packets that are too long: a peer has a larger MTU.",
        remedy="one MTU on all hosts",
        source=_MLX5,
    ),
    Rule(
        id="counters.told-to-pause",
        pattern=r"nic\.(.+)\.(rx_(?:prio\d_)?pause(?:_ctrl_phy)?)",
        severity="notice",
        title="The network told {subject} to pause {grown} times: some receiver is slow.",
        remedy="find the host whose tx pause counters or outbound_pci_stalled_wr grow",
        source=_MLX5,
    ),
    Rule(
        id="counters.asks-to-pause",
        pattern=r"nic\.(.+)\.(tx_(?:prio\d_)?pause(?:_ctrl_phy)?)",
        severity="warning",
        title="{subject} told the network to pause {grown} times: this host is the slow receiver.",
        remedy="check pci.links, IOMMU, interrupts and the receive ring of this host",
        source=_MLX5,
    ),
    Rule(
        id="counters.backlog-drops",
        pattern=r"softnet\.(\d+)\.(dropped)",
        severity="warning",
        path="tcp",
        title="Processor {subject} dropped {grown} packets: its backlog was full.",
        remedy="raise net.core.netdev_max_backlog, or spread interrupts over more processors",
        source="kernel net/core/net-procfs.c, softnet_stat",
    ),
    Rule(
        id="counters.squeezed",
        pattern=r"softnet\.(\d+)\.(squeezed)",
        severity="notice",
        per_s=100,
        path="tcp",
        title="Processor {subject} ran out of its packet budget {grown} times.",
        remedy="spread interrupts over more processors; raise net.core.netdev_budget",
        source="softnet_stat; 100 per s: own recommendation",
    ),
    Rule(
        id="counters.listen-overflows",
        pattern=r"tcp\.(TcpExt)\.(ListenOverflows)",
        severity="warning",
        title="{grown} connections were turned away: a program's listen queue was full.",
        remedy="raise net.core.somaxconn, and the program's backlog",
        source="kernel ip-sysctl.rst",
    ),
)
