"""The event loop of the data plane: uvloop where it is installed, else asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new loop. Both kinds behave alike; uvloop moves about twice as many bytes per second of CPU."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """As ``asyncio.run``, on ``new_event_loop``."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
