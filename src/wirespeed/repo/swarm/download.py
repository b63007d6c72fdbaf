"""Chunks from the best upstream: a peer before this one in the chain, or the store.

Many pieces are asked for ahead, so that the upstream sends each the moment it has it. An upstream that dies, goes
silent, gives up or sends a wrong chunk is left at once, a slow one after ``watch`` found it so; the next one is asked
only for what is still missing. Where no upstream is left, the store is read, and where that fails too, all are tried
again until the deadline. What arrives goes to the ``intake``. Runs on the event loop; the store is read on one of
``threads``.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from wirespeed import wire
from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.repo.swarm.asks import group
from wirespeed.repo.swarm.board import NO_PAYLOAD, Board, Buffer
from wirespeed.repo.swarm.intake import Decode, Intake, Use
from wirespeed.repo.swarm.messages import PAYLOAD, Ask, Pieces, Plan, pack
from wirespeed.repo.swarm.neighbours import Neighbours
from wirespeed.repo.swarm.pace import Pace
from wirespeed.repo.swarm.watch import CONNECT_S, Stream, watch
from wirespeed.units import MIB

WINDOW_BYTES = 24 * MIB
"""Asked for and not yet here: three chunks, so that the one whose last piece waits for its hash stops nothing."""
UNWRITTEN_BYTES = 64 * MIB
"""Here and not yet on disk: a slow disk stops the asking."""
CALL_S = 120.0
REST_S = 5.0
"""So long an upstream that was left is not tried again while there is another."""
STORE = "store"

FromStore = Callable[[Sequence[int], Use, threading.Event], None]


class Download:
    """Everything that one peer fetches of one version."""

    def __init__(
        self,
        board: Board,
        plan: Plan,
        *,
        neighbours: Neighbours,
        executor: Executor,
        threads: Executor,
        pace: Pace,
        from_store: FromStore | None,
        on_news: Callable[[str], None],
        decode: Decode | None = None,
    ) -> None:
        self.board = board
        self.plan = plan
        self.neighbours = neighbours
        self.upstream = ""
        self.peer_bytes = 0
        self.num_damaged = 0
        self.passed_over: list[str] = []
        self.arrived_s = asyncio.get_running_loop().time()
        self._threads = threads
        self._pace = pace
        self._from_store_fn = from_store
        self._by_difference: frozenset[int] = frozenset()
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._asks: deque[tuple[Ask, ...]] = deque()
        self._left: set[int] = set()
        self._intake = Intake(self, board, executor=executor, decode=decode)
        self._stream: Stream | None = None
        self._blamed: set[str] = set()
        self._rests_until_s: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._fault: BaseException | None = None
        self._stop_store: threading.Event | None = None
        self.is_waiting_for_rate = False
        self.deadline_s = self._loop.time() + plan.deadline_s

    @property
    def idle_s(self) -> float:
        """Since something came."""
        return self._loop.time() - self.arrived_s

    async def run(self, indices: Sequence[int], use: Use, by_difference: frozenset[int] = frozenset()) -> None:
        """Have these chunks, and hand each to ``use``, from other threads. Raises its error, PeerFailure, DataError.

        ``by_difference``: those whose base is here, so that the stored difference is enough.
        """
        self._intake.use = use
        self._left = set(indices)
        self._by_difference = by_difference
        self._asks = deque(group(self.board.manifest, indices, by_difference))
        self.arrived_s = self._loop.time()
        while self._left:
            if self._fault is not None:
                raise self._fault
            address = self._choose()
            if address == STORE:
                await self._take_from_store()
            elif address:
                await self._take_from(address)
            if self._loop.time() > self.deadline_s:
                said = "; ".join(f"{who}: {why}" for who, why in self._reasons.items())
                raise PeerFailure(
                    f"{self.plan.version.label} did not arrive within {self.plan.deadline_s:g} s",
                    expected="an upstream or a store that has it",
                    hint=said or "raise the deadline",
                )
            if not address:
                await asyncio.sleep(0.1)

    def stop(self) -> None:
        """End it: ``run`` raises PeerFailure soon."""
        self._fault = PeerFailure("the download was ended")
        if self._stop_store is not None:
            self._stop_store.set()
        if self._stream is not None:
            self._stream.leave("")

    def _choose(self) -> str:
        """The nearest upstream that is worth trying, else the store, else nothing for the moment."""
        now_s = self._loop.time()
        ready = [address for address in self.plan.upstreams if address not in self._blamed]
        candidates = [*ready, *([STORE] if self._from_store_fn is not None else [])]
        if self._from_store_fn is None and not ready:
            candidates = list(self.plan.upstreams)  # better one that was wrong once than none
        for address in candidates:
            if self._rests_until_s.get(address, 0.0) <= now_s:
                return address
        return ""

    def _pass_over(self, address: str, reason: str) -> None:
        self._rests_until_s[address] = self._loop.time() + REST_S
        self._reasons[address] = reason
        self.passed_over.append(f"{address}: {reason}")
        self._on_news(f"{self.plan.version.label}: passed over {address}: {reason}")

    # --- the store

    async def _take_from_store(self) -> None:
        assert self._from_store_fn is not None
        self.upstream = STORE
        stop = self._stop_store = threading.Event()

        def use(index: int, content: memoryview) -> None:
            self._loop.call_soon_threadsafe(self._came_whole, index, content)
            self._intake.use(index, content)
            self._loop.call_soon_threadsafe(self._is_written, index)

        wanted = [index for index in self.board.places if index in self._left]
        try:
            await self._loop.run_in_executor(self._threads, self._from_store_fn, wanted, use, stop)
            await asyncio.sleep(0)  # what the threads have told the loop
        except (PeerFailure, DataError) as fault:
            if not self.plan.upstreams or self._fault is not None:
                raise
            self._pass_over(STORE, str(fault))
            left = [index for index in self.board.places if index in self._left]
            self._asks = deque(group(self.board.manifest, left, self._by_difference))
        finally:
            stop.set()

    def _came_whole(self, index: int, content: memoryview) -> None:
        self.arrived_s = self._loop.time()
        self.board.right(index, content)

    def _is_written(self, index: int) -> None:
        self._left.discard(index)
        self.board.written(index)

    # --- a peer

    async def _take_from(self, address: str) -> None:
        self.upstream = address
        try:
            connection = await wire.connect(address, timeout_s=CONNECT_S, security=self.neighbours.security)
        except (PeerFailure, UsageError) as fault:
            self._pass_over(address, str(fault))
            return
        stream = self._stream = Stream(address, connection, self._loop)
        watcher = asyncio.create_task(watch(self, stream))
        try:
            self.pump()
            reason = await stream.over
        finally:
            watcher.cancel()
            # At once: no late byte may land in memory that another upstream is about to fill.
            connection.abort()
            self._stream = None
            for asks in reversed(stream.flying.values()):
                self._asks.appendleft(asks)
            stream.flying.clear()
        if reason:
            self._pass_over(address, reason)

    def pump(self) -> None:
        """Ask for more, as far as the window, the disk and the rate allow."""
        stream = self._stream
        while (
            stream is not None
            and self._asks
            and not stream.over.done()
            and stream.flying_bytes < WINDOW_BYTES
            and self._intake.unwritten_bytes < UNWRITTEN_BYTES
            and not self.is_waiting_for_rate
        ):
            self.ask(stream, self._asks.popleft())

    def ask(self, stream: Stream, asks: tuple[Ask, ...]) -> None:
        """Ask this upstream, when the rate allows."""
        num_bytes = sum(ask.length for ask in asks)
        delay_s = self._pace.delay_s(num_bytes)
        stream.flying_bytes += num_bytes
        if delay_s > 0:
            self.is_waiting_for_rate = True
            stream.flying[object()] = asks
            key = next(reversed(stream.flying))
            self._loop.call_later(delay_s, self._ask_later, stream, key)
        else:
            self._ask_now(stream, asks, num_bytes)

    def _ask_later(self, stream: Stream, key: object) -> None:
        self.is_waiting_for_rate = False
        asks = stream.flying.pop(key, None)
        if asks is not None and not stream.over.done():
            self._ask_now(stream, asks, sum(ask.length for ask in asks))
        elif asks is not None:
            stream.flying[key] = asks  # whoever ends the stream takes it back
        self.pump()

    def _ask_now(self, stream: Stream, asks: tuple[Ask, ...], num_bytes: int) -> None:
        into: memoryview | None = None
        if len(asks) == 1 and asks[0].offset != PAYLOAD:
            content = self.board.buffer(asks[0].index).content
            into = content[asks[0].offset : asks[0].offset + asks[0].length]
        message = pack(Pieces(self.plan.digest, asks))
        try:
            future = stream.connection.call_soon("pieces", message, timeout_s=CALL_S, into=into)
        except (PeerFailure, UsageError) as fault:
            stream.flying[object()] = asks
            stream.leave(str(fault))
            return
        stream.flying[future] = asks
        future.add_done_callback(functools.partial(self._arrived, stream, asks, num_bytes))

    def _arrived(
        self, stream: Stream, asks: tuple[Ask, ...], num_bytes: int, future: asyncio.Future[wire.Reply]
    ) -> None:
        fault = None if future.cancelled() else future.exception()
        if future not in stream.flying or future.cancelled():
            return  # taken back when the stream ended
        if isinstance(fault, wire.CallFailed) and fault.status == NO_PAYLOAD and asks[0].offset == PAYLOAD:
            del stream.flying[future]
            stream.flying_bytes -= num_bytes
            self._asks.extendleft(reversed(group(self.board.manifest, [ask.index for ask in asks])))
            self.pump()
            return
        if fault is not None:
            stream.leave(str(fault))
            return
        del stream.flying[future]
        stream.flying_bytes -= num_bytes
        reply = future.result()
        if len(reply.payload) != num_bytes:
            self._asks.appendleft(asks)
            stream.leave(f"it gave {len(reply.payload)} bytes instead of {num_bytes}")
            return
        stream.arrived_bytes += num_bytes
        self.peer_bytes += num_bytes
        self.arrived_s = self._loop.time()
        self._intake.take(asks, memoryview(reply.payload), (stream.address, reply.meta), is_placed=True)
        self.pump()

    # --- see intake.Owner

    def when_written(self, index: int) -> None:
        """The chunk is verified and on disk."""
        self._is_written(index)
        if not self._left and self._stream is not None:
            self._stream.leave("")

    def when_wrong(self, index: int, buffer: Buffer) -> None:
        """A whole chunk that is wrong. Whoever sent all of it is at fault; of several nobody is known to be."""
        self.num_damaged += 1
        self._asks.extendleft(reversed(group(self.board.manifest, [index])))
        if len(buffer.sources) != 1:
            return
        address = next(iter(buffer.sources))[0]
        self._blamed.add(address)
        reason = f"chunk {index} came wrong from it"
        if self._stream is not None and self._stream.address == address:
            self._stream.leave(reason)
        else:
            self._pass_over(address, reason)

    def when_useless(self, index: int, address: str, problem: str) -> None:
        """Nobody is blamed: the chunk comes whole."""
        self.num_damaged += 1
        self._on_news(f"{self.plan.version.label}: a difference from {address} was of no use: {problem}")
        self._asks.extendleft(reversed(group(self.board.manifest, [index])))

    def when_broken(self, fault: BaseException) -> None:
        """``run`` raises it."""
        self._fault = fault
        if self._stream is not None:
            self._stream.leave("")

    # --- for watch

    def take_back(self) -> tuple[Ask, ...] | None:
        """The last asks of all, for a trial of another upstream."""
        return self._asks.pop() if len(self._asks) > 8 else None

    def put_back(self, asks: tuple[Ask, ...]) -> None:
        """They were not answered."""
        self._asks.append(asks)

    def came_from_trial(self, asks: tuple[Ask, ...], reply: wire.Reply, address: str) -> None:
        """They were."""
        self.peer_bytes += sum(ask.length for ask in asks)
        self._intake.take(asks, memoryview(reply.payload), (address, reply.meta), is_placed=False)
