"""hivemind and torchft as arms: peers that let ranks train apart and average their parameters from time to time.

    torchft-local-sgd@PERIOD         torchft.local_sgd.LocalSGD: a lighthouse on rank 0, a replica group per rank
    hivemind@PERIOD                  hivemind.DecentralizedAverager: a DHT node per rank, groups of all ranks
    hivemind-fp16@PERIOD             the same, sent as scaled fp16

Gradients stay where they are: DDP's hook hands every bucket back. Both need ``pip install hivemind torchft``.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

TIMEOUT_S = 300.0
MATCHMAKING_S, REQUEST_S = 0.5, 0.25
"""hivemind's defaults of 5 and 3 s are for peers all over the world; here a group is whole at once."""


def is_averaging(peer: str) -> bool:
    """Whether the peer averages parameters, and no gradients."""
    return peer.startswith(("torchft-", "hivemind"))


def keep_gradient(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook of ranks that train apart."""
    kept: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    kept.set_result(bucket.buffer())
    return kept


keep_gradient.__annotations__.clear()  # DDP refuses those that are text


class TorchftAveraging:
    """LocalSGD of torchft, each rank a replica group of one."""

    def __init__(self, module: nn.Module, period: int) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer

        rank, num_ranks, own = dist.get_rank(), dist.get_world_size(), own_address()
        self._lighthouse = None
        port: list[Any] = [None]
        if rank == 0:
            self._lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=num_ranks, join_timeout_ms=60_000)
            port = [int(self._lighthouse.address().rpartition(":")[2])]
        dist.broadcast_object_list(port, 0)
        timeout = timedelta(seconds=TIMEOUT_S)
        self._store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=lambda _: None,
            state_dict=dict,
            min_replica_size=num_ranks,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=self._store.port,
            lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{port[0]}",
            replica_id=f"rank{rank}_",
            hostname=own,
            init_sync=False,  # the script gives all ranks the same first parameters
        )
        self._module = module
        self._period = period
        self._local_sgd: Any = None

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step; the first one hands the optimizer over, whose hooks do the rest."""
        if self._local_sgd is None:
            from torchft.local_sgd import LocalSGD

            self._local_sgd = LocalSGD(self._manager, self._module, optimizer, sync_every=self._period)
            self._local_sgd.__enter__()

    def close(self) -> None:
        """End its servers. All ranks together: rank 0 has what the others lean on."""
        if self._local_sgd is not None:
            self._local_sgd.__exit__(None, None, None)
        dist.barrier()
        self._manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


class HivemindAveraging:
    """Parameters averaged by hivemind's decentralized averager after every PERIOD steps."""

    def __init__(self, module: nn.Module, period: int, *, is_half: bool) -> None:
        import hivemind
        from hivemind.compression import NoCompression, ScaledFloat16Compression

        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        first: list[Any] = [None]
        own = f"/ip4/{own_address()}/tcp/0"
        if rank == 0:
            self._dht = hivemind.DHT(host_maddrs=[own], start=True)
            first = [[str(address) for address in self._dht.get_visible_maddrs()]]
        dist.broadcast_object_list(first, 0)
        if rank != 0:
            self._dht = hivemind.DHT(host_maddrs=[own], initial_peers=first[0], start=True)
        self._parameters = list(module.parameters())
        self._averager = hivemind.DecentralizedAverager(
            [parameter.detach().clone() for parameter in self._parameters],
            self._dht,
            start=True,
            prefix="parameters",
            target_group_size=num_ranks,
            min_group_size=num_ranks,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=REQUEST_S,
            compression=ScaledFloat16Compression() if is_half else NoCompression(),
            allow_state_sharing=False,
        )
        self._period = period
        self._num_steps = 0
        dist.barrier()

    def stepped(self, _: torch.optim.Optimizer) -> None:
        """After a step; every PERIOD of them parameters are averaged."""
        self._num_steps += 1
        if self._num_steps % self._period:
            return
        with torch.no_grad():
            with self._averager.get_tensors() as held:
                for mine, parameter in zip(held, self._parameters, strict=True):
                    mine.copy_(parameter)
            if self._averager.step(timeout=TIMEOUT_S) is None:
                raise RuntimeError("hivemind's averaging failed: no group of all ranks")
            with self._averager.get_tensors() as held:
                for mine, parameter in zip(held, self._parameters, strict=True):
                    parameter.copy_(mine)

    def close(self) -> None:
        """End its processes."""
        dist.barrier()
        self._averager.shutdown()
        self._dht.shutdown()


def make_averaging(peer: str, module: nn.Module) -> TorchftAveraging | HivemindAveraging:
    """A peer at work on a model; all ranks call it together, once the process group is there."""
    name, _, period = peer.partition("@")
    if name == "torchft-local-sgd":
        return TorchftAveraging(module, int(period))
    if name in {"hivemind", "hivemind-fp16"}:
        return HivemindAveraging(module, int(period), is_half=name.endswith("-fp16"))
    raise SystemExit(f"unknown peer {peer!r}")


def missing_packages() -> list[str]:
    """Those of the two that cannot be imported here."""
    from importlib.util import find_spec

    return [name for name in ("hivemind", "torchft") if find_spec(name) is None]


def own_address() -> str:
    """This host's address on the way to rank 0. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])
