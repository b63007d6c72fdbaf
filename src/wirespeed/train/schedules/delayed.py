"""delayed: the optimizer is given the average of the step before, while this step's gradients are on their way.

A bucket that is ready is copied and its exchange begins; what its hook gives back is the average that began one step
earlier and had the whole step to arrive. So communication hides behind the rest of backward, the optimizer and the next
forward, and shows only where it is longer than a step. The first step is given zeros. The price is two more copies of
the gradients and a gradient that is one step old: the loss may differ, and large learning rates may become unstable.

Two synchronising backwards with one optimizer step after them would each be given the average of the one before, so
accumulate inside ``no_sync()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wirespeed.errors import DataError
from wirespeed.train.exchanger import Exchanger, finished, new_future
from wirespeed.train.schedules.base import GradientBucket


@dataclass
class _Flight:
    """One bucket between two steps. ``arriving`` holds the average once ``future`` (None: at once) is complete."""

    sizes: tuple[int, ...]
    arriving: Tensor
    spare: Tensor
    future: torch.futures.Future[Tensor] | None = None


class DelayedGradients:
    """See ``Schedule``."""

    sends_gradients = True
    num_steps_apart = 0
    has_trained_apart = False

    def __init__(self, exchanger: Exchanger) -> None:
        self._exchanger = exchanger
        self._flights: dict[tuple[str, ...], _Flight] = {}
        self._landed: dict[str, Tensor] = {}
        """Averages by parameter that no bucket of the present division has taken up yet."""
        self._num_unused = 0
        """Synchronising backwards since the optimizer last stepped."""

    def exchange(self, bucket: GradientBucket) -> torch.futures.Future[Tensor]:
        """The average that began one step ago; this step's exchange begins."""
        if bucket.is_last:
            self._backward_ends()
        values = bucket.values
        flight = self._flights.get(bucket.names)
        if flight is None:
            flight = self._take_up(bucket)
        before, arrived = flight.arriving, flight.future
        flight.spare.copy_(values)
        flight.arriving, flight.spare = flight.spare, before
        sent = flight.arriving
        if arrived is None:
            flight.future = self._begin(sent, bucket)
            values.copy_(before)
            return finished(values)
        result = new_future(values)
        begun: torch.futures.Future[Tensor] | None = None
        if self._exchanger.is_plain:
            # Nothing is shared with the exchange before, and the order of collectives is that of the hooks.
            flight.future = self._begin(sent, bucket)
        else:
            # The codec's buffers and residuals are those of the exchange before: begin when it has ended. Lanes end
            # exchanges in bucket order and call back before the next, so the order stays the same on all ranks.
            begun = flight.future = new_future(values)

        def arrive(done: torch.futures.Future[Tensor]) -> None:
            # In the thread that ended the exchange: a result that is never set would stop backward for ever.
            try:
                done.value()
                values.copy_(before)
                if begun is not None:
                    self._begin(sent, bucket).then(lambda _: begun.set_result(sent))
            except Exception as fault:
                self._exchanger.fail(fault)
                if begun is not None:
                    begun.set_result(sent)
            result.set_result(values)

        arrived.then(arrive)
        return result

    def is_due(self) -> bool:
        """Never: what is under way arrives by itself."""
        return False

    def step_taken(self) -> None:
        """The average was applied."""
        self._num_unused = 0

    def synchronize(self) -> None:
        """Wait for what is under way. Parameters are equal; the last step's gradients are given to the next one."""
        for flight in self._flights.values():
            self._wait(flight)

    def close(self) -> None:
        """Drop what is under way, once it has arrived."""
        self.synchronize()
        self._flights.clear()
        self._landed.clear()

    def state_dict(self) -> dict[str, Any]:
        """The averages that the next step is given, by parameter."""
        averages = {name: value.detach().clone() for name, value in self._landed.items()}
        for names, flight in self._flights.items():
            self._wait(flight)
            parts = torch.split(flight.arriving, list(flight.sizes))
            averages |= {name: part.detach().clone() for name, part in zip(names, parts, strict=True)}
        return {"averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the next step these averages."""
        self.close()
        self._landed = {name: value.detach().clone().flatten() for name, value in state["averages"].items()}

    def _begin(self, sent: Tensor, bucket: GradientBucket) -> torch.futures.Future[Tensor]:
        return self._exchanger.average(sent, bucket=bucket.index, names=bucket.names, shapes=bucket.shapes)

    def _take_up(self, bucket: GradientBucket) -> _Flight:
        """A flight for a bucket that was not seen before: with what its parameters' averages are, zeros at first."""
        wanted = set(bucket.names)
        for names in [names for names in self._flights if not wanted.isdisjoint(names)]:
            old = self._flights.pop(names)
            self._wait(old)
            self._landed |= dict(zip(names, torch.split(old.arriving, list(old.sizes)), strict=True))
        arriving = torch.zeros_like(bucket.values)
        sizes = tuple(torch.Size(shape).numel() for shape in bucket.shapes)
        for name, part in zip(bucket.names, torch.split(arriving, list(sizes)), strict=True):
            held = self._landed.pop(name, None)
            if held is not None:
                if held.numel() != part.numel():
                    raise DataError(
                        f"the average of {name!r} has {held.numel()} elements", expected=f"{part.numel()} elements"
                    )
                part.copy_(held)
        flight = self._flights[bucket.names] = _Flight(sizes, arriving, torch.zeros_like(arriving))
        return flight

    def _wait(self, flight: _Flight) -> None:
        if flight.future is None:
            return
        try:
            flight.future.wait()
        except Exception as fault:
            self._exchanger.fail(fault)
        flight.future = None

    def _backward_ends(self) -> None:
        self._num_unused += 1
        if self._num_unused == 2:
            self._exchanger.warn_once(
                "delayed",
                "two backward passes without an optimizer step between them: under 'delayed' each is given the "
                "gradients of the one before; accumulate inside ddp.no_sync()",
            )
