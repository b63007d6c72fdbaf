"""The bytes of one stream: who waits, who passes, and that nothing of it is lost."""

from __future__ import annotations

import asyncio

from wirespeed.serve.stream_window import StreamWindow


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_wait_until_answers_are_written() -> None:
    async def main() -> None:
        window = StreamWindow(100)
        await window.enter(60)
        second = asyncio.ensure_future(window.enter(50))
        await settle()
        assert not second.done()
        window.turn(60, 70)  # the answer is larger than its request
        await settle()
        assert not second.done()
        window.leave(70)
        await settle()
        assert second.done()
        assert window.held_bytes == 50

    asyncio.run(main())


def test_a_message_larger_than_the_window_passes_alone() -> None:
    async def main() -> None:
        window = StreamWindow(100)
        await window.enter(1000)
        second = asyncio.ensure_future(window.enter(1))
        await settle()
        assert not second.done()
        window.turn(1000, 0)  # it failed
        await asyncio.wait_for(second, 60)
        assert window.held_bytes == 1

    asyncio.run(main())
