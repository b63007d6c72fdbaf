"""Logs as NCCL 2.4 to 2.30 writes them, made up for tests and benchmarks: own hosts, documentation addresses.

``JobLog(version=..., ...).lines()`` is a healthy job's set-up in the formats of that version (references: NCCL's source
at the tags, as listed in the formats table of the diagnosis notes). Cases add the lines of one failure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

VERSIONS = (
    "2.4.8", "2.5.6", "2.6.4", "2.7.8", "2.8.4", "2.9.9", "2.10.3", "2.11.4", "2.12.12", "2.13.4", "2.14.3", "2.15.5",
    "2.16.5", "2.17.1", "2.18.3", "2.19.3", "2.20.5", "2.21.5", "2.22.3", "2.23.4", "2.24.3", "2.25.1", "2.26.2",
    "2.27.3", "2.28.7", "2.29.2", "2.30.1",
)  # fmt: skip
LAUNCHERS = ("plain", "mpirun", "srun", "kubernetes", "torchrun", "pdsh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobLog:
    """One job: ``hosts`` of ``gpus`` each, its transport and launcher."""

    version: str = "2.21.5"
    hosts: int = 2
    gpus: int = 4
    layer: str = "IB"
    """IB, RoCE or Socket."""
    has_gdr: bool = True
    launcher: str = "plain"
    hca: str = "mlx5_"
    interface: str = "eno1"
    settings: tuple[tuple[str, str], ...] = ()
    channels: int = 4
    host_name: str = "ripe"
    shows_net: bool = True
    """NET and GRAPH subsystems are printed."""

    @property
    def key(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.gpus

    def host(self, rank: int) -> str:
        return f"{self.host_name}-{rank // self.gpus:02d}"

    def address(self, host: int) -> str:
        return f"192.0.2.{host + 10}"

    def fabric_address(self, host: int) -> str:
        return f"198.51.100.{host + 10}"

    def wrap(self, rank: int, text: str) -> str:
        """What the launcher puts before a line."""
        match self.launcher:
            case "mpirun":
                return f"[1,{rank}]<stdout>:{text}"
            case "srun":
                return f"{rank:>3}: {text}"
            case "kubernetes":
                return f"2026-03-07T10:{rank % 60:02d}:31.104511873Z stdout F {text}"
            case "torchrun":
                return f"[default{rank % self.gpus}]:{text}"
            case "pdsh":
                return f"{self.host(rank)}: {text}"
        return text

    def info(self, rank: int, message: str) -> str:
        """An INFO line of a rank."""
        return self.wrap(rank, f"{self.process(rank)} NCCL INFO {message}")

    def process(self, rank: int) -> str:
        return f"{self.host(rank)}:{4100 + rank % self.gpus}:{4300 + rank} [{rank % self.gpus}]"

    def warn(
        self, rank: int, message: str, *, at: str = "transport/net_ib.cc:1295", clock: str = "10:20:31"
    ) -> list[str]:
        """A WARN line of a rank, after its empty line."""
        stamp = f"[2026-03-07 {clock}] " if self.key >= (2, 27) else ""
        function = " (ncclIbTest)" if self.key >= (2, 30) else ""
        return ["", self.wrap(rank, f"{stamp}{self.process(rank)} {at}{function} NCCL WARN {message}")]

    def hca_list(self, host: int) -> str:
        names = [f"[{i}]{self.hca}{i}:1/{self.layer}" for i in range(self.gpus)]
        if self.key >= (2, 30):
            names = [f"[{i}]{self.hca}{i}:1:{i}/{self.layer}" for i in range(self.gpus)]
        relaxed = " [RO]" if self.key >= (2, 12) else ""
        oob = f"; OOB {self.interface}:{self.address(host)}<0>"
        return " ".join(names) + relaxed + oob

    def bracket(self, rank: int) -> str:
        """What stands in the brackets of a channel line: bus id up to 2.17, device since."""
        gpu = rank % self.gpus
        return f"[{(gpu + 1) * 0x1A000:x}]" if self.key < (2, 18) else f"[{gpu}]"

    def via_net(self, rank: int) -> str:
        gpu = rank % self.gpus
        if self.layer == "Socket":
            return "NET/Socket/0"
        return f"NET/IB/{gpu}" + ("/GDRDMA" if self.has_gdr else "") + ("(PCI)" if self.key >= (2, 26) else "")

    def via_local(self) -> str:
        return "P2P/IPC" if self.key < (2, 19) else "P2P/CUMEM"

    def channel(self, number: int, rank: int) -> str:
        """The line of a rank to its right neighbour."""
        after = (rank + 1) % self.num_ranks
        is_net = rank // self.gpus != after // self.gpus
        ends = f"{rank}{self.bracket(rank)} -> {after}{self.bracket(after)}"
        via = self.via_net(rank) if is_net else self.via_local()
        sends = " [send]" if is_net else ""
        if self.key < (2, 5):
            return f"Ring {number:02d} : {rank} -> {after}{sends} via {via}"
        if self.key < (2, 7):
            return f"Ring {number:02d} : {ends}{sends} via {via}"
        if self.key < (2, 12):
            return f"Channel {number:02d} : {ends}{sends} via {via}"
        return f"Channel {number:02d}/0 : {ends}{sends} via {via}"

    def rank_setup(self, rank: int) -> Iterator[str]:
        """Set-up messages of one rank, without prefix."""
        host, gpu = rank // self.gpus, rank % self.gpus
        where = f"{self.interface}:{self.address(host)}<0>"
        if self.key < (2, 8):
            yield f"Bootstrap : Using [0]{where}"
        elif self.key < (2, 24):
            yield f"Bootstrap : Using {where}"
        else:
            yield f"Bootstrap: Using {where}"
        if self.key < (2, 20):
            yield "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation"
        elif self.key >= (2, 23):
            yield "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin."
        for name, value in self.settings:
            yield f"{name} set by environment to {value}."
        if self.layer == "Socket":
            yield f"NET/Socket : Using [0]{where}"
            yield "Using network Socket"
        else:
            yield f"NET/IB : Using {self.hca_list(host)}"
            if self.shows_net:
                yield from self._gdr_lines(gpu)
            if self.key >= (2, 28):
                yield "Initialized NET plugin IB"
                yield "Assigned NET plugin IB to comm"
            if self.key >= (2, 5):
                yield "Using network IB"
        yield from self._comm_lines(rank)

    def _gdr_lines(self, gpu: int) -> Iterator[str]:
        word = "Enabled" if self.has_gdr else "Disabled"
        reason = "" if self.has_gdr else " (no module)"
        if self.key >= (2, 14):
            yield f"NET/IB : GPU Direct RDMA {word} for HCA {gpu} '{self.hca}{gpu}'"
        elif self.key >= (2, 7):
            yield f"NET/IB : GPU Direct RDMA {word} for HCA {gpu} '{self.hca}{gpu}'{reason}"
        elif not self.has_gdr:
            yield (
                f"NET/IB : GPU Direct RDMA Disabled for GPU {gpu}[{gpu}] / HCA {gpu} '{self.hca}{gpu}' "
                "(no module or not supported by GPU)"
            )
        if self.has_gdr and self.key >= (2, 7):
            near = 4 if self.key >= (2, 12) else 3
            bus = f"{(gpu + 1) * 0x1A000:x}" if self.key < (2, 24) else f"{gpu}"
            sign = "<="
            yield f"GPU Direct RDMA Enabled for GPU {bus} / HCA {gpu} (distance {near} {sign} {near}), read 0 mode Default"

    def _comm_lines(self, rank: int) -> Iterator[str]:
        gpu = rank % self.gpus
        comm = f"comm 0x55d0{rank:04x}00 rank {rank} nranks {self.num_ranks} cudaDev {gpu}"
        if self.key >= (2, 18):
            comm += f" nvmlDev {gpu} busId {(gpu + 1) * 0x1A000:x} commId 0x7f3a11c2"
            yield f"ncclCommInitRank {comm} - Init START"
        if rank == 0:
            for number in range(self.channels):
                order = " ".join(str(r) for r in range(self.num_ranks))
                yield f"Channel {number:02d}/{self.channels:02d} :  {order}"
        yield f"Trees [0] {rank + 1}/-1/-1->{rank}->{rank - 1} [1] {rank + 1}/-1/-1->{rank}->{rank - 1}"
        for number in range(self.channels):
            yield self.channel(number, rank)
        if self.key >= (2, 24):
            yield f"Connected all rings, use ring PXN 0 GDR {int(self.has_gdr and self.layer != 'Socket')}"
        elif self.key >= (2, 8):
            yield "Connected all rings"
            yield "Connected all trees"
        yield f"{self.channels} coll channels, 0 collnet channels, 0 nvls channels, {self.channels} p2p channels"
        name = "ncclCommInitRank " if self.key >= (2, 18) else ""
        yield f"{name}{comm} - Init COMPLETE"

    def lines(self) -> list[str]:
        """The whole set-up, ranks in turn as they are in one file."""
        found = [self.wrap(0, f"NCCL version {self.version}+cuda12.4")]
        for rank in range(self.num_ranks):
            found += [self.info(rank, message) for message in self.rank_setup(rank)]
        return found

    def steps(self, count: int) -> list[str]:
        """What the job itself prints."""
        return [
            f"2026-03-07 10:{(step // 60) % 60:02d}:{step % 60:02d},120 [INFO] train.py:88 step {step} "
            f"loss {6.2 - step * 1e-4:.4f} lr 3.0e-04 grad_norm 0.71 tokens/s 18{step % 977:03d} mem 61.3GB"
            for step in range(count)
        ]


def text_of(*parts: list[str]) -> str:
    """Lines as the text of a file."""
    return "\n".join(line for part in parts for line in part) + "\n"
