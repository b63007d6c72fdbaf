"""Models that follow an alias of the repository: when it moves, the new version is placed, compared and made live.

Only what changed is fetched (``repo``'s deltas and chunks). The new workers come up beside the old ones, their answers
to the reference batch are compared (``drift``), and then requests go to them: none is dropped, and none is answered by
a mixture. What cannot be loaded, or drifts too far, stays out until the alias moves again, and what was live stays.

The bound on staleness: at most ``every_s`` after the alias moved the store is asked, and then it takes what fetching
and loading take. While the store does not answer, how long ago it last did is in the metrics; past ``max_stale_s`` the
models are not ready any more, though requests that come are answered.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from wirespeed.errors import UsageError, WirespeedError
from wirespeed.serve.repository import ModelRepository
from wirespeed.serve.shelf import Followed, Shelf
from wirespeed.units import format_duration

ASK_S = 30.0
"""How long the store may take to say where an alias points."""


class Follower:
    """See the module. ``run`` until it is cancelled."""

    def __init__(
        self,
        models: ModelRepository,
        shelf: Shelf,
        *,
        every_s: float,
        max_stale_s: float = math.inf,
        on_news: Callable[[str], None] = lambda _: None,
    ) -> None:
        if not every_s > 0:
            raise UsageError(f"got --follow {every_s:g} s", expected="more than 0")
        if not max_stale_s > every_s:
            raise UsageError(
                f"got a staleness bound of {format_duration(max_stale_s)}",
                expected=f"more than --follow, {format_duration(every_s)}",
            )
        if not shelf.followed:
            raise UsageError(
                "got --follow and nothing that can change",
                expected="repo:NAME@ALIAS, or repo:NAME for its newest version",
            )
        self._models = models
        self._shelf = shelf
        self._every_s = every_s
        self._max_stale_s = max_stale_s
        self._on_news = on_news
        self._told: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        now_s = time.monotonic()
        self._seen_s = {followed.text: now_s for followed in shelf.followed}
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wirespeed-follow")

    async def run(self) -> None:
        """Look, and bring up to date, for ever."""
        try:
            while True:
                await asyncio.sleep(self._every_s * random.uniform(0.9, 1.0))  # noqa: S311 - spreads servers
                for followed in self._shelf.followed:
                    await self.look(followed)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def look(self, followed: Followed) -> bool:
        """Look once; whether something new went live. Says what went wrong, once; raises nothing that it expects."""
        loop = asyncio.get_running_loop()
        text = followed.text
        try:
            asked = loop.run_in_executor(self._threads, self._shelf.newest, followed)
            label = await asyncio.wait_for(asked, ASK_S)
            self._seen_s[text] = time.monotonic()
            is_live = label not in (followed.label, self._refused.get(text)) and await self._bring(followed, label)
            self._told.pop(text, None)
        except (WirespeedError, TimeoutError) as fault:
            is_live = False
            self._say_once(text, f"cannot follow {text} for the moment: {fault or 'the store does not answer'}")
        self._mark_stale(followed)
        return is_live

    def staleness_s(self, model: str) -> float | None:
        """How long ago the store last said that this is the version to serve; None for what is not followed."""
        for followed in self._shelf.followed:
            if model in followed.names:
                return time.monotonic() - self._seen_s[followed.text]
        return None

    async def _bring(self, followed: Followed, label: str) -> bool:
        before, names_before = followed.label, followed.names
        loop = asyncio.get_running_loop()
        begin_s = time.monotonic()

        def bring() -> tuple[list[str], list[str]]:
            return self._shelf.bring(followed, label, on_news=self._on_news)

        names, gone = await loop.run_in_executor(self._threads, bring)
        try:
            for name in names:
                await self._models.load(name)
        except WirespeedError as fault:
            self._refused[followed.text] = label
            self._on_news(f"{label} is not served: {fault}")
            await self._go_back(followed, before, names_before)
            return False
        for name in gone:
            await self._models.unload(name)
        self._name_origins(followed)
        took = format_duration(time.monotonic() - begin_s)
        self._on_news(f"{followed.text} is {label} now, live after {took}; it was {before}")
        return True

    async def _go_back(self, followed: Followed, label: str, names: tuple[str, ...]) -> None:
        """The version before: it is in the cache. Of several models those that were replaced are loaded again."""
        loop = asyncio.get_running_loop()

        def bring() -> tuple[list[str], list[str]]:
            return self._shelf.bring(followed, label, on_news=lambda _: None)

        _, gone = await loop.run_in_executor(self._threads, bring)
        for name in names:
            folder = str((self._shelf.folder / name).resolve())
            held = self._models.models.get(name)
            if held is None or held.config.folder != folder:
                await self._models.load(name)
        for name in gone:
            if name in self._models.models:
                await self._models.unload(name)
        self._name_origins(followed)

    def _name_origins(self, followed: Followed) -> None:
        for name in followed.names:
            if name in self._models.models:
                self._models.models[name].origin = followed.label

    def _mark_stale(self, followed: Followed) -> None:
        age_s = time.monotonic() - self._seen_s[followed.text]
        is_stale = age_s > self._max_stale_s
        for name in followed.names:
            model = self._models.models.get(name)
            if model is None or model.is_stale == is_stale:
                continue
            model.is_stale = is_stale
            if is_stale:
                self._on_news(
                    f"model {name!r} is not ready: the store has not said for {format_duration(age_s)} which version "
                    f"{followed.text} is, {format_duration(self._max_stale_s)} is allowed"
                )

    def _say_once(self, text: str, told: str) -> None:
        if self._told.get(text) != told:
            self._told[text] = told
            self._on_news(told)
