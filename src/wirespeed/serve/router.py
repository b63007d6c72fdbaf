"""Requests to the least loaded of several nodes, and once more elsewhere when one is lost under them.

A node's load is what it said with its last heartbeat, less what of that was ours, plus what of ours is under way now;
divided by its instances and times its recent time per row, that is how long a new request would wait. A request that a
lost node held is sent to another one once, where its model is idempotent; one that a node did not take (it was full, or
draining) is sent elsewhere in any case, since it was never run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from wirespeed import wire
from wirespeed.errors import PeerFailure, UsageError
from wirespeed.serve.heartbeat import Beat
from wirespeed.serve.node_link import LinkTimes, NodeLink, NodeState
from wirespeed.serve.node_messages import Described
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Tensor
from wirespeed.wire.sockets import split_address

_UNKNOWN_ROW_S = 1e-3
_MAX_TRIES = 8


def expected_wait_s(num_ours: int, ours_at_beat: int, beat: Beat | None) -> float:
    """How long a new request would wait on a node: the rows before it, over its instances, by its time per row.

    ``ours_at_beat``: how many of the beat's rows were this dispatcher's own.
    """
    if beat is None:
        return num_ours * _UNKNOWN_ROW_S
    others = max(0, beat.queued + beat.in_flight - ours_at_beat)
    row_s = beat.compute_s_per_row if beat.compute_s_per_row > 0 else _UNKNOWN_ROW_S
    return (others + num_ours) * row_s / max(1, beat.instances)


class Router:
    """See the module. ``open``, then ``close``. ``on_news`` gets a line for every node that is lost or found again.

    ``can_grow``: it may begin without a node, and get them by ``add``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        security: wire.Security,
        times: LinkTimes | None = None,
        can_grow: bool = False,
        on_news: Callable[[str], None] = lambda _: None,
        on_change: Callable[[NodeLink], None] = lambda _: None,
    ) -> None:
        if (not addresses and not can_grow) or len(set(addresses)) != len(addresses):
            raise UsageError(f"got nodes {', '.join(addresses) or 'none'}", expected="one address or more, each once")
        for address in addresses:
            split_address(address)
        self._security = security
        self._times = times
        self._dropping: set[asyncio.Task[None]] = set()
        self._on_news = on_news
        self._on_change = on_change
        self._ours_at_beat: dict[NodeLink, tuple[int, int]] = {}
        self._changed = asyncio.Event()
        self.num_retried = 0
        self.links = [self._link(address) for address in addresses]

    def add(self, address: str) -> None:
        """One more node; it counts once it is reached."""
        if all(link.address != address for link in self.links):
            link = self._link(address)
            self.links.append(link)
            link.start()

    def drop(self, address: str) -> None:
        """This node is no more: what is under way on it fails at once, and nobody tries to reach it again."""
        for link in [link for link in self.links if link.address == address]:
            self.links.remove(link)
            self._ours_at_beat.pop(link, None)
            task = asyncio.get_running_loop().create_task(link.close())
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    def _link(self, address: str) -> NodeLink:
        return NodeLink(address, security=self._security, times=self._times, on_change=self._link_changed)

    async def open(self, *, timeout_s: float = 10.0, at_least: int = 1, settle_s: float = 0.3) -> None:
        """Reach the nodes: until all are up, or ``at_least`` of them are and the others had ``settle_s`` more.

        Links go on trying to reach the others. Raises PeerFailure, with every node's own reason, where fewer are up
        after ``timeout_s``.
        """
        for link in self.links:
            if not link.is_started:
                link.start()
        loop = asyncio.get_running_loop()
        end_s, is_enough = loop.time() + timeout_s, False
        while any(link.state in (NodeState.JOINING, NodeState.LOST) for link in self.links):
            if not is_enough and len(self.usable()) >= at_least:
                is_enough, end_s = True, min(end_s, loop.time() + settle_s)
            left_s = end_s - loop.time()
            if left_s <= 0:
                break
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                break
        if len(self.usable()) < at_least:
            reasons = "; ".join(link.reason or link.state.value for link in self.links)
            await self.close()
            raise PeerFailure(
                f"none of {len(self.links)} nodes answers: {reasons}",
                hint="start them with `wirespeed serve FOLDER --node ADDRESS`, with the same WIRESPEED_TOKEN",
            )

    async def close(self) -> None:
        """Let go of every node."""
        await asyncio.gather(*(link.close() for link in self.links), *self._dropping)

    def usable(self) -> list[NodeLink]:
        """Nodes that take calls; suspects only where no other is left."""
        up = [link for link in self.links if link.is_usable and link.state is NodeState.UP]
        return up or [link for link in self.links if link.is_usable]

    def described(self, model: str) -> Described | None:
        """The model as one of the usable nodes has it."""
        return next((link.models[model] for link in self.usable() if model in link.models), None)

    def pick(self, model: str, *, without: Sequence[NodeLink] = ()) -> NodeLink | None:
        """The node that would run a request of this model soonest; None where no node has it."""
        best: NodeLink | None = None
        best_key: tuple[float, int] = (math.inf, 0)
        for link in self.usable():
            if model not in link.models or link in without:
                continue
            key = (expected_wait_s(link.num_under_way, self._own_share(link), link.beat), link.num_under_way)
            if key < best_key:
                best, best_key = link, key
        return best

    async def infer(  # noqa: PLR0912 - one place for all ways in which a node can fail to answer
        self, model: str, version: str, request: InferRequest, *, timeout_s: float
    ) -> list[Tensor]:
        """Run a request on some node. Raises RequestFailed with the node's reason, or UNAVAILABLE."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        tried: list[NodeLink] = []
        num_lost = 0
        problem = "no node is up"
        for _ in range(_MAX_TRIES):
            link = self.pick(model, without=tried)
            if link is None:
                break
            left_s = end_s - loop.time()
            if left_s <= 0:
                raise RequestFailed(f"no answer within {timeout_s:g} s; {problem}", reason=Reason.DEADLINE)
            is_idempotent = link.models[model].config.idempotent
            tried.append(link)
            try:
                return await link.infer(model, version, request, timeout_s=left_s)
            except wire.CallFailed as fault:
                problem = str(fault)
                if fault.status is wire.Status.DEADLINE:
                    raise RequestFailed(problem, reason=Reason.DEADLINE) from fault
                if not fault.is_retriable:
                    raise RequestFailed(problem, reason=Reason.FAILED) from fault
                if fault.status is wire.Status.UNAVAILABLE:
                    num_lost += 1
                    if num_lost > 1 or not is_idempotent:
                        break
            except RequestFailed as fault:
                if fault.reason not in (Reason.EXHAUSTED, Reason.UNAVAILABLE):
                    raise
                problem = str(fault)
                if fault.reason is Reason.UNAVAILABLE:
                    num_lost += 1
                    if num_lost > 1 or not is_idempotent:
                        raise
            self.num_retried += 1
        if not tried and not any(model in link.models for link in self.links):
            raise RequestFailed(f"Request for unknown model: {model!r} is not found", reason=Reason.NOT_FOUND)
        raise RequestFailed(f"no node ran the request: {problem}", reason=Reason.UNAVAILABLE)

    def _own_share(self, link: NodeLink) -> int:
        # What was under way of ours when the beat was made; told by the first look after the beat came.
        number = 0 if link.beat is None else link.beat.number
        held = self._ours_at_beat.get(link)
        if held is None or held[0] != number:
            held = (number, link.num_under_way)
            self._ours_at_beat[link] = held
        return held[1]

    def _link_changed(self, link: NodeLink, reason: str) -> None:
        self._changed.set()
        if link.state is NodeState.LOST:
            if link.num_joins:
                self._on_news(f"node {link.address} is out: {reason}")
        elif link.state is NodeState.UP and link.num_joins > 1:
            self._on_news(f"node {link.address} is back")
        elif link.state is NodeState.DRAINING:
            self._on_news(f"node {link.address} takes nothing new: {reason}")
        self._on_change(link)
