"""The costs of a step on a fabric: joins the fabric's curves to what the simulator asks for.

Assumes that the time of the smallest measured message is latency, which uses no wire and which two collectives can
spend together. Dense is DDP's own path: it divides the bucket in place, which is taken to cost a memcpy where the
fabric holds that curve and nothing where it does not. Any other codec's speed is never guessed: where the fabric holds
no curve of it, DataError says how to measure it.

Between hosts, the ranks of one host send their shares at the same time through its NICs: a hierarchical transfer costs
what one rank per host would take for all of them together.
"""

from __future__ import annotations

from wirespeed.fabric.collectives import codec_stage_cost, collective_cost, slowdown_beside_compute
from wirespeed.fabric.topology import Fabric
from wirespeed.sim.costs import StageCost, TransferCost
from wirespeed.spec.strategy import Strategy, Transfer

_FREE_STAGE = StageCost(seconds=0.0)


class FabricCosts:
    """``sim.StepCosts`` of a calibrated fabric for ranks laid out in one way; remembers what it was asked."""

    def __init__(
        self, fabric: Fabric, num_ranks: int, *, ranks_per_host: int = 1, backend: str = "gloo", kind: str | None = None
    ) -> None:
        self.fabric = fabric
        self.num_ranks = num_ranks
        self.ranks_per_host = ranks_per_host
        self.backend = backend
        self.kind = fabric.hosts[0].kind if kind is None else kind
        self._transfers: dict[Transfer, TransferCost] = {}
        self._stages: dict[tuple[str, str, int], StageCost] = {}

    def transfer(self, transfer: Transfer) -> TransferCost:
        """Cost of one collective; raises DataError where the fabric has neither a curve nor a rate and a round trip."""
        held = self._transfers.get(transfer)
        if held is None:
            held = self._transfers[transfer] = self._transfer(transfer)
        return held

    def stage(self, strategy: Strategy, stage: str, size_bytes: int) -> StageCost:
        """Cost of a codec stage; raises DataError where it was never measured."""
        codec = strategy.name.partition("/")[0]
        if codec == "dense":
            if stage != "encode" or not any(c.codec == "memcpy" and c.kind == self.kind for c in self.fabric.codecs):
                return _FREE_STAGE
            codec, stage = "memcpy", "copy"
        key = (codec, stage, size_bytes)
        held = self._stages.get(key)
        if held is None:
            cost = codec_stage_cost(self.fabric, codec, stage, size_bytes, self.num_ranks, kind=self.kind)
            residual = max(
                (c.curve.residual for c in self.fabric.codecs if (c.codec, c.stage) == (codec, stage)), default=0.0
            )
            held = StageCost(seconds=cost.seconds, is_in_range=cost.is_in_range, residual=residual)
            self._stages[key] = held
        return held

    def _transfer(self, transfer: Transfer) -> TransferCost:
        num_ranks = transfer.num_members(self.num_ranks, self.ranks_per_host)
        ranks_per_host = {"all": self.ranks_per_host, "host": num_ranks, "between": 1}[transfer.scope]
        size_bytes = transfer.size_bytes * (self.ranks_per_host if transfer.scope == "between" else 1)
        cost, smallest = (
            collective_cost(
                self.fabric,
                transfer.collective,
                size,
                num_ranks,
                ranks_per_host=ranks_per_host,
                backend=self.backend,
                dtype=transfer.dtype,
            )
            for size in (size_bytes, 1)
        )
        residuals = [
            c.curve.residual
            for c in self.fabric.collectives
            if (c.collective, c.backend, c.ranks_per_host) == (transfer.collective, self.backend, ranks_per_host)
            and not c.beside_compute
        ]
        return TransferCost(
            seconds=cost.seconds,
            latency_s=max(0.0, min(smallest.seconds, cost.seconds - cost.lower_bound_s)),
            lower_bound_s=cost.lower_bound_s,
            cpu=cost.cpu,
            slowdown=slowdown_beside_compute(
                self.fabric,
                transfer.collective,
                size_bytes,
                num_ranks,
                ranks_per_host=ranks_per_host,
                backend=self.backend,
                dtype=transfer.dtype,
            ),
            is_in_range=cost.is_in_range,
            residual=max(residuals, default=0.0),
        )
