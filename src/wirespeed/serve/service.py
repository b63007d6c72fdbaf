"""A server as a process: runs until a signal asks it to end, then drains."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from wirespeed.serve.server import InferenceServer, ServeOptions
from wirespeed.serve.shelf import Shelf
from wirespeed.wire.loops import new_event_loop


def run_service(
    shelf: Shelf | None,
    options: ServeOptions,
    *,
    when_open: Callable[[InferenceServer], None],
    on_news: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT. A second signal ends it without waiting for requests."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(shelf, options, when_open, on_news))


async def _serve(
    shelf: Shelf | None,
    options: ServeOptions,
    when_open: Callable[[InferenceServer], None],
    on_news: Callable[[str], None],
) -> None:
    loop = asyncio.get_running_loop()
    asked, again = asyncio.Event(), asyncio.Event()

    def leave() -> None:
        (again if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    server = InferenceServer(None if shelf is None else shelf.folder, options, shelf=shelf, on_news=on_news)
    starting = loop.create_task(server.start())
    leaving = loop.create_task(asked.wait())
    await asyncio.wait((starting, leaving), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return
    leaving.cancel()
    starting.result()
    when_open(server)
    await asked.wait()
    on_news(f"draining: finishing {sum(m.num_queued + m.num_running for m in server.models.models.values())} requests")
    closing = loop.create_task(server.close())
    hurry = loop.create_task(again.wait())
    await asyncio.wait((closing, hurry), return_when=asyncio.FIRST_COMPLETED)
    if closing.done():
        hurry.cancel()
        closing.result()
        return
    closing.cancel()
    await asyncio.wait((closing,))
    await server.close(drain_s=0)
