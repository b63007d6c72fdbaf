"""Whether an upstream is worth staying with: it is watched while pieces come from it.

- It says nothing: asked how far it is, it does not answer either. Left after about two seconds.
- It answers, but gives nothing, and says that it starves as well: it will change its own upstream. Given more time,
  so that behind a dead host one peer reconnects and not all of those behind it.
- It gains at less than half the rate of its own upstream, twice in a row, and is well behind it: slow, left for that.
- Its own upstream has everything (a seed, the store), so that rates say nothing: two pieces are asked of that one, as a
  trial, at 2, 4, 8 ... seconds. They are needed anyway. Left where that was more than twice as fast, two times.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from wirespeed import wire
from wirespeed.errors import PeerFailure, UsageError
from wirespeed.repo.swarm.chain import TRIAL_GAIN, is_slow
from wirespeed.repo.swarm.messages import Ask, Pieces, Progress, pack
from wirespeed.units import KIB, format_size

if TYPE_CHECKING:
    from wirespeed.repo.swarm.download import Download

CONNECT_S = 2.0
LOOK_S = 0.25
COMPARE_S = 0.75
"""Rates are compared over no less than this."""
STALL_S = 0.8
"""Nothing for so long, while something was asked for: the upstream is asked what is wrong."""
SIGN_OF_LIFE_BYTES = 8 * KIB
ANSWER_S = 1.0
PATIENCE_S = 8.0
"""For an upstream that lives and starves itself."""
TRIAL_S = 2.0
NUM_TRIAL_ASKS = 2


class Stream:
    """One connection that pieces come over. ``over`` resolves with why it was left, or "" when all has come."""

    def __init__(self, address: str, connection: wire.Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.address = address
        self.connection = connection
        self.flying: dict[object, tuple[Ask, ...]] = {}
        self.flying_bytes = 0
        self.arrived_bytes = 0
        self.over: asyncio.Future[str] = loop.create_future()

    def leave(self, reason: str) -> None:
        """Stop taking from it."""
        if not self.over.done():
            self.over.set_result(reason)


class _Sample:
    """How far both were at one time."""

    def __init__(self, address: str, upstream: Progress, above: Progress) -> None:
        self.address = address
        self.upstream_bytes = upstream.held_bytes
        self.above_bytes = above.held_bytes


async def watch(download: Download, stream: Stream) -> None:
    """Leave the stream when its upstream is not worth staying with. Runs until it is cancelled."""
    loop = asyncio.get_running_loop()
    comparison = _Comparison(download, stream)
    compare_at_s = loop.time() + COMPARE_S
    download.arrived_s = loop.time()
    seen_bytes = 0
    while not stream.over.done():
        await asyncio.sleep(LOOK_S)
        if loop.time() > download.deadline_s:
            stream.leave("the deadline is over")
            return
        # On a thin link a piece takes long: bytes of it are a sign of life as well. So is waiting for our own rate.
        if stream.connection.received_bytes - seen_bytes > SIGN_OF_LIFE_BYTES or download.is_waiting_for_rate:
            seen_bytes = stream.connection.received_bytes
            download.arrived_s = loop.time()
        if stream.flying and download.idle_s > STALL_S:
            await _look_into_stall(download, stream)
        elif loop.time() >= compare_at_s:
            compare_at_s = loop.time() + COMPARE_S
            await comparison.look()


class _Comparison:
    """An upstream beside its own upstream, look by look."""

    def __init__(self, download: Download, stream: Stream) -> None:
        self._download = download
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._before: _Sample | None = None
        self._num_slow = 0
        self._num_trials_won = 0
        self._trial_after_s = TRIAL_S
        self._trial_at_s = self._loop.time() + TRIAL_S
        self._rate_from = (self._loop.time(), stream.arrived_bytes)

    async def look(self) -> None:
        """Ask both how far they are; leave the upstream where it holds this host up."""
        download, stream = self._download, self._stream
        now_s = self._loop.time()
        rate_bytes_per_s = (stream.arrived_bytes - self._rate_from[1]) / max(1e-6, now_s - self._rate_from[0])
        self._rate_from = (now_s, stream.arrived_bytes)
        before, self._before = self._before, None
        digest = download.plan.digest
        upstream = await download.neighbours.progress(stream.address, digest, timeout_s=ANSWER_S)
        if upstream is None or upstream.state != "running" or upstream.upstream not in download.plan.upstreams:
            return
        above = await download.neighbours.progress(upstream.upstream, digest, timeout_s=ANSWER_S)
        if above is None:
            return
        if above.state == "whole":
            await self._try_out(upstream.upstream, rate_bytes_per_s)
            return
        now = self._before = _Sample(upstream.upstream, upstream, above)
        if before is None or before.address != now.address:
            return
        slow = is_slow(
            gained_bytes=now.upstream_bytes - before.upstream_bytes,
            upstream_gained_bytes=now.above_bytes - before.above_bytes,
            lag_bytes=now.above_bytes - now.upstream_bytes,
        )
        self._num_slow = self._num_slow + 1 if slow else 0
        if self._num_slow == 2:
            stream.leave(f"it is slower than {now.address}, from which it takes")

    async def _try_out(self, address: str, rate_bytes_per_s: float) -> None:
        board = self._download.board
        is_nearly_over = board.total_bytes - board.held_bytes < TRIAL_S * rate_bytes_per_s
        # A trial takes from the link that the chain begins with: not for what another upstream could no longer save.
        if self._loop.time() < self._trial_at_s or is_nearly_over:
            return
        tried_bytes_per_s = await _trial(self._download, address)
        if tried_bytes_per_s <= TRIAL_GAIN * rate_bytes_per_s:
            self._num_trials_won = 0
            self._trial_after_s *= 2
            self._trial_at_s = self._loop.time() + self._trial_after_s
            return
        # It may have been luck: it is tried once more, soon.
        self._num_trials_won += 1
        self._trial_at_s = self._loop.time()
        if self._num_trials_won == 2:
            self._stream.leave(
                f"{format_size(rate_bytes_per_s)}/s came from it; {address}, from which it takes, gives "
                f"{format_size(tried_bytes_per_s)}/s"
            )


async def _look_into_stall(download: Download, stream: Stream) -> None:
    digest = download.plan.digest
    asked_s = asyncio.get_running_loop().time()
    upstream = await download.neighbours.progress(stream.address, digest, timeout_s=ANSWER_S)
    if download.arrived_s > asked_s:
        return
    waited = f"{download.idle_s:.1f} s"
    if upstream is None:
        stream.leave(f"nothing came for {waited}, and it does not answer")
    elif upstream.state in ("unknown", "partial", "failed"):
        stream.leave(upstream.problem or "it is not fetching this version")
    elif download.idle_s > PATIENCE_S or (
        download.idle_s > 3 * STALL_S and (upstream.state == "whole" or upstream.idle_s < STALL_S)
    ):
        stream.leave(f"nothing came for {waited}")


async def _trial(download: Download, address: str) -> float:
    """Bytes per second of two pieces from another upstream; 0.0 where there are none to ask for, or it fails."""
    loop = asyncio.get_running_loop()
    taken = [asks for asks in (download.take_back() for _ in range(NUM_TRIAL_ASKS)) if asks is not None]
    if len(taken) < NUM_TRIAL_ASKS:
        for asks in reversed(taken):
            download.put_back(asks)
        return 0.0
    tried_bytes = 0
    left = list(taken)
    connection: wire.Connection | None = None
    try:
        connection = await wire.connect(address, timeout_s=CONNECT_S, security=download.neighbours.security)
        begin_s = loop.time()
        futures = [
            connection.call_soon("pieces", pack(Pieces(download.plan.digest, asks)), timeout_s=5.0) for asks in taken
        ]
        for asks, future in zip(taken, futures, strict=True):
            reply = await future
            num_bytes = sum(ask.length for ask in asks)
            if len(reply.payload) != num_bytes:
                return 0.0
            tried_bytes += num_bytes
            left.remove(asks)
            download.came_from_trial(asks, reply, address)
        return tried_bytes / max(1e-6, loop.time() - begin_s)
    except (PeerFailure, UsageError):
        return 0.0
    finally:
        for asks in reversed(left):
            download.put_back(asks)
        if connection is not None:
            connection.abort()
