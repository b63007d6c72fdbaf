"""async: every rank trains at its own speed, and what its parameters have moved is averaged in the background.

Let ``base`` be what all ranks have agreed on. A rank's parameters are ``base`` as it last saw it, plus what it has
moved since. Rounds run in a thread of their own: each averages what the ranks have finished, moves ``base`` by that on
all of them alike, and each rank takes the new base in at its next step. A rank whose step has not ended contributes
nothing to a round and holds up nobody, until it has missed ``staleness`` rounds in a row: then the others wait for it.
So what a rank contributes was computed at most that many rounds ago, and a rank also waits while its own oldest step
that has not been averaged is more than ``staleness`` steps old (when the network is slower than that).

A round begins when half of the ranks have finished a step, or one has ``staleness / 2`` that were not sent. Ranks tell
each other through the process group's store, so that none has to wait inside a collective for a round to begin.

After ``synchronize`` parameters are equal byte by byte. It can be wrong to end without it: a rank that leaves stops
the rounds of those that still train. Optimizer state stays with its rank. Costs four copies of the parameters.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from wirespeed.errors import PeerFailure, UsageError
from wirespeed.train.exchanger import Exchanger, finished
from wirespeed.train.lanes import as_peer_failure
from wirespeed.train.schedules.base import GradientBucket
from wirespeed.train.schedules.fragments import Fragment, averaged_buffers, flatten, make_fragments, write_flat

POLL_S = 0.002
"""How often the store is asked whether a round has begun: 0.1 ms of work each time."""
CLOSE_S = 10.0


class Asynchronous:
    """See ``Schedule``."""

    sends_gradients = False

    def __init__(self, ddp: DistributedDataParallel, exchanger: Exchanger) -> None:
        strategy = exchanger.strategy
        assert strategy.staleness is not None
        self._ddp = ddp
        self._exchanger = exchanger
        self._staleness = strategy.staleness
        self._synced_buffers = bool(ddp.broadcast_buffers)
        self._fragments: list[Fragment] = []
        """``base`` belongs to the rounds' thread, ``values`` is theirs during a round."""
        self._seen: list[Tensor] = []
        """``base`` as the parameters hold it, per fragment."""
        self._sent: list[Tensor] = []
        """What was last handed to the rounds and has not come back; zeros otherwise."""
        self._changed = threading.Condition()
        """Guards all below, and ``base`` while it moves."""
        self._num_apart = 0
        self._num_local = 0
        """Steps that were not handed to the rounds yet."""
        self._num_sent = 0
        self._is_posted = False
        """Whether ``sent`` waits for a round."""
        self._has_moved = False
        """Whether ``base`` is another than was last taken in."""
        self._has_returned = False
        """Whether ``base`` holds ``sent`` by now."""
        self._is_ending = False
        """Whether this rank waits for all others to have handed in all they have."""
        self._is_level = False
        """Whether nothing is under way: all ranks have ``synchronize``'s last round, and this one has not moved on."""
        self._gone: Exception | None = None
        """What ended the rounds meanwhile: told when they are needed again."""
        self._is_stopping = False
        self._asks_since_s: float | None = None
        """Since when the rounds' thread has waited for an answer of the store."""
        self._thread: threading.Thread | None = None
        self._has_trained = False

    @property
    def num_steps_apart(self) -> int:
        """Own steps since ``synchronize``."""
        return self._num_apart

    @property
    def has_trained_apart(self) -> bool:
        """Whether any step was taken."""
        return self._has_trained

    def exchange(self, bucket: GradientBucket) -> torch.futures.Future[Tensor]:
        """This rank's own gradients."""
        if self._exchanger.num_ranks > 1 and self._thread is None:
            self._begin()
        return finished(bucket.values)

    def is_due(self) -> bool:
        """Never: a step that the loss scaler skips has moved nothing."""
        return False

    def step_taken(self) -> None:
        """Take in what has been averaged, and hand over what was moved. Waits only as the module says."""
        if self._thread is None:
            return
        self._raise_gone()
        self._has_trained = True
        self._num_apart += 1
        with self._changed:
            self._num_local += 1
            self._take_in()
            self._post()
            while self._num_local + self._num_sent > self._staleness:
                self._wait()
                self._take_in()
                self._post()
        self._exchanger.raise_failure()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average all that any rank has moved: parameters are then equal. Waits for the slowest rank to get here."""
        if self._thread is None:
            return
        self._raise_gone()
        with self._changed:
            self._take_in()
            while self._num_sent:
                self._wait()
                self._take_in()
            self._post()
            self._is_posted = self._is_ending = True
            self._changed.notify_all()
            while self._is_ending:
                self._wait()
            for fragment, seen, sent in zip(self._fragments, self._seen, self._sent, strict=True):
                fragment.values.copy_(fragment.base)
                fragment.write()
                seen.copy_(fragment.base)
                sent.zero_()
            self._num_apart = self._num_sent = 0
            self._has_moved = self._has_returned = False
        buffers = averaged_buffers(self._ddp.module)
        if buffers:
            averaged = self._exchanger.all_reduce(flatten(buffers)).wait()
            self._exchanger.raise_failure()
            write_flat(buffers, averaged)

    def close(self) -> None:
        """Stop the rounds and let DDP broadcast buffers again. Parameters stay as they are."""
        thread = self._thread
        if thread is not None:
            with self._changed:
                self._is_stopping = True
                self._changed.notify_all()
            thread.join(CLOSE_S)
            self._thread = None
        self._ddp.broadcast_buffers = self._synced_buffers

    def state_dict(self) -> dict[str, Any]:
        """Nothing beside the model, which all ranks hold alike. Raises UsageError where they do not."""
        if self._num_apart:
            raise UsageError(
                f"got a request for the state {self._num_apart} steps after ranks last held equal parameters",
                expected="equal parameters, because what is under way belongs to no rank",
                hint="call session.synchronize() on all ranks first",
            )
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin from the model as it then is."""
        self.close()
        self._is_stopping = False
        self._num_apart = self._num_local = self._num_sent = 0
        self._is_posted = self._has_moved = self._has_returned = self._is_level = False
        self._gone = None

    # ---------------------------------------------------------------- in the training thread

    @torch.no_grad()
    def _begin(self) -> None:
        self._ddp.broadcast_buffers = False
        self._fragments = make_fragments(self._ddp.module, self._exchanger.strategy, keeps_base=True)
        for fragment in self._fragments:
            fragment.read()
            fragment.base.copy_(fragment.values)
        self._seen = [fragment.base.clone() for fragment in self._fragments]
        self._sent = [torch.zeros_like(fragment.base) for fragment in self._fragments]
        self._thread = threading.Thread(target=self._work, name="wirespeed-rounds", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def _take_in(self) -> None:
        """Move the parameters by what ``base`` has moved, less what of it was this rank's own."""
        if not self._has_moved:
            return
        self._has_moved = False
        for fragment, seen, sent in zip(self._fragments, self._seen, self._sent, strict=True):
            seen.sub_(fragment.base)
            if self._has_returned:
                seen.add_(sent)
                sent.zero_()
            flat = torch.split(seen, [p.numel() for p in fragment.parameters])
            for parameter, part in zip(fragment.parameters, flat, strict=True):
                parameter.sub_(part.view(parameter.shape))
            seen.copy_(fragment.base)
        if self._has_returned:
            self._has_returned = False
            self._num_sent = 0

    @torch.no_grad()
    def _post(self) -> None:
        """Hand over what was moved, unless something is on its way."""
        if self._num_sent or not self._num_local:
            return
        for fragment, seen, sent in zip(self._fragments, self._seen, self._sent, strict=True):
            flat = torch.split(sent, [p.numel() for p in fragment.parameters])
            for parameter, part in zip(fragment.parameters, flat, strict=True):
                part.view(parameter.shape).copy_(parameter)
            sent.sub_(seen)
        self._num_sent, self._num_local = self._num_local, 0
        self._is_posted = True
        self._changed.notify_all()

    def _raise_gone(self) -> None:
        """Before anything is under way again."""
        with self._changed:
            self._is_level, gone = False, self._gone
        if gone is not None:
            self._exchanger.fail(gone)
            self._exchanger.raise_failure()

    def _wait(self) -> None:
        """Until something has changed.

        Each collective of a round ends by the process group's own time-out; the store, which has none, by ours.
        """
        self._exchanger.raise_failure()
        self._changed.wait(0.5)
        asks_since_s, timeout_s = self._asks_since_s, self._exchanger.timeout_s
        if asks_since_s is not None and time.monotonic() - asks_since_s > timeout_s:
            self._exchanger.fail(
                PeerFailure(
                    f"the store of the process group has not answered for {timeout_s:g} s",
                    hint="it is rank 0's, or the launcher's on the first host: a rank died there, hangs, or its link "
                    "went down",
                )
            )
        self._exchanger.raise_failure()

    # ---------------------------------------------------------------- in the rounds' thread

    def _work(self) -> None:
        num_missed, num_ending = 0, 0
        try:
            self._asks_since_s = time.monotonic()
            store = own_store()
            self._asks_since_s = None
            prefix = self._agree_on_prefix()
            for number in itertools.count():
                if not self._wait_for_round(store, f"{prefix}/{number}", num_missed, num_ending):
                    return
                if number > 0 and self._exchanger.rank == 0:  # all have seen that the one before began: they were in it
                    self._asks_since_s = time.monotonic()
                    store.delete_key(f"{prefix}/{number - 1}/ready")
                    store.delete_key(f"{prefix}/{number - 1}/begun")
                    self._asks_since_s = None
                has_part, num_ending = self._round()
                num_missed = 0 if has_part else num_missed + 1
                if num_ending == self._exchanger.num_ranks:
                    self._leave_together(store, f"{prefix}/{number}/done")
                    num_ending = 0
        except Exception as fault:
            told = _told(as_peer_failure(fault))
            with self._changed:
                if self._is_level:  # the others may have ended, as they may
                    self._gone = told
                else:
                    self._exchanger.fail(told)
                self._changed.notify_all()

    def _agree_on_prefix(self) -> str:
        """Where in the store these rounds are: a place that nobody used before.

        The store may outlive the process group, and hold what others left: torchrun's does when it starts all ranks
        again.
        """
        group, device = self._exchanger.own_group, self._exchanger.device
        assert group is not None
        number = torch.tensor([int.from_bytes(os.urandom(7))], dtype=torch.int64, device=device)
        dist.broadcast(number, src=dist.get_global_rank(group, 0), group=group)
        return f"wirespeed/async/{int(number):x}"

    def _wait_for_round(self, store: Any, prefix: str, num_missed: int, num_ending: int) -> bool:
        """Wait until the round has begun, or begin it. False when there is to be none."""
        num_training = self._exchanger.num_ranks - num_ending
        is_announced, has_begun = False, False
        while True:
            with self._changed:
                if self._is_stopping:
                    return False
                is_ready, is_idle = self._is_posted, self._is_ending and not self._is_posted
                is_old = self._num_local + self._num_sent >= max(1, self._staleness // 2)
            self._asks_since_s = time.monotonic()
            if not has_begun:
                if is_ready and not is_announced:
                    is_announced = True
                    is_old = is_old or 2 * store.add(f"{prefix}/ready", 1) >= num_training
                if is_ready and is_old:
                    store.set(f"{prefix}/begun", "")
                has_begun = store.check([f"{prefix}/begun"])
            if has_begun and (is_ready or is_idle or num_missed < self._staleness):
                self._asks_since_s = None
                return True
            self._asks_since_s = None
            with self._changed:
                if self._is_posted == is_ready and not self._is_stopping:
                    self._changed.wait(POLL_S)

    @torch.no_grad()
    def _round(self) -> tuple[bool, int]:
        """Average once. Gives whether this rank had something, and how many ranks train no more."""
        exchanger = self._exchanger
        with self._changed:
            has_part, self._is_posted = self._is_posted, False
            ending = torch.tensor([int(self._is_ending)], dtype=torch.int32, device=exchanger.device)
        dist.all_reduce(ending, group=exchanger.own_group)
        futures = []
        for fragment, sent in zip(self._fragments, self._sent, strict=True):
            if has_part:
                fragment.values.copy_(sent)
            else:
                fragment.values.zero_()
            futures.append(
                exchanger.average(fragment.values, bucket=fragment.index, names=fragment.names, shapes=fragment.shapes)
            )
        for future in futures:
            future.wait()
        exchanger.raise_failure()
        with self._changed:
            for fragment in self._fragments:
                fragment.base.add_(fragment.values)
            self._has_moved = True
            self._has_returned = self._has_returned or has_part
            self._changed.notify_all()
        return has_part, int(ending)

    def _leave_together(self, store: Any, key: str) -> None:
        """Let ``synchronize`` end once every rank has the last round.

        A process that ends makes gloo fail all that others still read, from whomever. This rank's own parameters are
        whole by now. So a store that is gone is no failure here (its rank has seen that all are done), and a rank that
        does not come is missed by the next collective.
        """
        deadline_s = time.monotonic() + self._exchanger.timeout_s
        with contextlib.suppress(RuntimeError):
            self._asks_since_s = time.monotonic()
            num_done = store.add(key, 1)
            while num_done < self._exchanger.num_ranks and time.monotonic() < deadline_s and not self._is_stopping:
                self._asks_since_s = None
                time.sleep(POLL_S)
                self._asks_since_s = time.monotonic()
                num_done = store.add(key, 0)
        self._asks_since_s = None
        with self._changed:
            self._is_ending, self._is_level = False, True
            self._changed.notify_all()


def own_store() -> Any:
    """A connection of this thread's own to the process group's store: a wait in another thread would hold up ours."""
    inside: Any = distributed_c10d
    store = inside._get_default_store()
    while hasattr(store, "underlying_store"):  # prefixes, which ours are apart from by their names
        store = store.underlying_store
    return store.clone() if hasattr(store, "clone") else store


def _told(fault: Exception) -> Exception:
    """With what is special about leaving under this schedule."""
    if not isinstance(fault, PeerFailure):
        return fault
    return PeerFailure(
        fault.problem,
        hint="a rank died, its link went down, or it ended before the others: under async every rank calls "
        "session.synchronize() before it ends",
    )
