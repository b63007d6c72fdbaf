"""The models of one server: a folder of model folders, what is loaded of it, and the change of a version.

Loading a model that is already loaded starts the new instances first, then sends new requests to them, then lets the
old ones finish what they have: no request is dropped, and memory holds both for that while. A model with a reference
batch is compared with what is live before that (``drift``).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from wirespeed import wire
from wirespeed.errors import DataError, MissingCapability, PeerFailure, UsageError
from wirespeed.serve.config import FILE_NAME, ModelConfig, read_config
from wirespeed.serve.drift import measure_drift
from wirespeed.serve.model import Model
from wirespeed.serve.staged import StagedModel, in_order
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.units import format_percent

DRAIN_S = 30.0


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the folder or in memory. ``state``: READY, LOADING, UNAVAILABLE or "" (never loaded)."""

    name: str
    version: str
    state: str
    reason: str = ""


class ModelRepository:
    """See the module. ``folder`` None: only what is given to ``add``."""

    def __init__(
        self,
        folder: Path | None,
        *,
        security: wire.Security | None = None,
        on_news: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder = folder
        self._security = wire.Security() if security is None else security
        self._on_news = on_news
        self._models: dict[str, Model] = {}
        self._states: dict[str, Listed] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def models(self) -> dict[str, Model]:
        """What is loaded."""
        return self._models

    def get(self, name: str, version: str = "") -> Model:
        """The loaded model. Raises RequestFailed: NOT_FOUND, or UNAVAILABLE where it is known but not loaded."""
        model = self._models.get(name)
        if model is None:
            state = self._states.get(name)
            if state is not None and state.state == "UNAVAILABLE":
                raise RequestFailed(
                    f"Request for unknown model: {name!r} is not ready: {state.reason}", reason=Reason.UNAVAILABLE
                )
            raise RequestFailed(
                f"Request for unknown model: {name!r} is not found",
                reason=Reason.NOT_FOUND,
                expected=", ".join(self._models) or None,
            )
        if version and version != model.config.version:
            raise RequestFailed(
                f"Request for unknown model: {name!r} version {version} is not found",
                reason=Reason.NOT_FOUND,
                expected=f"version {model.config.version}",
            )
        return model

    def names(self) -> list[str]:
        """The models in the folder, sorted. Raises DataError where it cannot be read."""
        if self.folder is None:
            return []
        try:
            return sorted(path.parent.name for path in self.folder.glob(f"*/{FILE_NAME}"))
        except OSError as fault:
            raise DataError(f"failed to poll from model repository {self.folder}: {fault.strerror}") from fault

    def index(self) -> list[Listed]:
        """Every model of the folder or in memory, with its state."""
        found = {name: Listed(name=name, version="", state="") for name in self.names()}
        found.update(self._states)
        return [found[name] for name in sorted(found)]

    async def load_all(self) -> None:
        """Load every model of the folder. Raises where one fails; others stay loaded."""
        if self.folder is not None and not self.folder.is_dir():
            raise UsageError(f"got model folder {self.folder}", expected="a folder of model folders")
        names = self.names()
        if not names:
            raise UsageError(
                f"{self.folder} holds no models",
                expected=f"folders with a {FILE_NAME}",
                hint="see docs/guides/serve.md",
            )
        at_once = asyncio.Semaphore(len(os.sched_getaffinity(0)))

        configs: dict[str, ModelConfig] = {}
        faults: list[BaseException] = []
        for name in names:
            try:
                configs[name] = self._read(name)
            except RequestFailed as fault:
                faults.append(fault)

        async def add(name: str) -> None:
            async with at_once:
                await self.add(configs[name])

        # Models in stages come after what they are made of.
        staged = {name: config for name, config in configs.items() if config.stages}
        for together in ([name for name in configs if name not in staged], *([name] for name in in_order(staged))):
            results = await asyncio.gather(*map(add, together), return_exceptions=True)
            faults += [fault for fault in results if fault is not None]
        if faults:
            raise faults[0]

    async def load(self, name: str, *, overrides: dict[str, Any] | None = None) -> None:
        """Load or load again. Raises RequestFailed: NOT_FOUND, or FAILED with the cause."""
        if self.folder is None or name not in self.names():
            raise RequestFailed(f"failed to load {name!r}: no such model in the repository", reason=Reason.NOT_FOUND)
        await self.add(self._read(name, overrides=overrides))

    def _read(self, name: str, *, overrides: dict[str, Any] | None = None) -> ModelConfig:
        assert self.folder is not None
        try:
            config = read_config(self.folder / name, overrides=overrides)
        except (DataError, UsageError) as fault:
            raise RequestFailed(f"failed to load {name!r}: {fault}", reason=Reason.INVALID) from fault
        if config.name != name:
            raise RequestFailed(
                f"failed to load {name!r}: its model.toml names it {config.name!r}", reason=Reason.INVALID
            )
        return config

    async def add(self, config: ModelConfig) -> Model:
        """Load a model from its configuration, in place of the one of its name."""
        name = config.name
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._models:
                self._states[name] = Listed(name=name, version=config.version, state="LOADING")
            model = self._make(config)
            try:
                await model.load()
            except (DataError, PeerFailure, MissingCapability, UsageError) as fault:
                if name not in self._models:
                    self._states[name] = Listed(
                        name=name, version=config.version, state="UNAVAILABLE", reason=str(fault)
                    )
                raise RequestFailed(f"failed to load {name!r}: {fault}", reason=Reason.FAILED) from fault
            before = self._models.get(name)
            if before is not None:
                try:
                    await self._compare(before, model)
                except RequestFailed:
                    await model.close()
                    raise
            self._models[name] = model
            self._states[name] = Listed(name=name, version=config.version, state="READY")
            if before is not None:
                self._retire(before)
            return model

    async def _compare(self, live: Model, coming: Model) -> None:
        """Report how the answers change. Raises RequestFailed where they change more than the model allows."""
        name, limit = coming.config.name, coming.config.reference.max_drift
        try:
            drift = await measure_drift(live, coming)
        except DataError as fault:
            raise RequestFailed(f"failed to load {name!r}: {fault}", reason=Reason.FAILED) from fault
        except RequestFailed as fault:
            raise RequestFailed(
                f"failed to load {name!r}: its reference batch: {fault}", reason=Reason.FAILED
            ) from fault
        if drift is None:
            return
        coming.drift = drift
        if drift.worst > limit:
            raise RequestFailed(
                f"failed to load {name!r}: {drift}, of which {format_percent(limit)} is allowed; what was live stays",
                reason=Reason.FAILED,
            )
        self._on_news(f"update of {name!r}: {drift}")

    async def unload(self, name: str) -> None:
        """Unload; what is queued and running is finished first, in the background. Raises RequestFailed: NOT_FOUND."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            model = self._models.pop(name, None)
            if model is None:
                raise RequestFailed(f"failed to unload {name!r}: it is not loaded", reason=Reason.NOT_FOUND)
            self._states[name] = Listed(name=name, version=model.config.version, state="UNAVAILABLE", reason="unloaded")
            self._retire(model)

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Unload everything."""
        models, self._models = list(self._models.values()), {}
        await asyncio.gather(*(model.close(drain_s=drain_s) for model in models), *self._retiring)

    def _make(self, config: ModelConfig) -> Model:
        if config.backend == "stages":
            return StagedModel(config, self, security=self._security, on_news=self._on_news)
        return Model(config, on_news=self._on_news)

    def _retire(self, model: Model) -> None:
        task = asyncio.get_running_loop().create_task(model.close(drain_s=DRAIN_S))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


def parse_overrides(config_json: str) -> dict[str, Any]:
    """What a client's ``config`` parameter of a load changes.

    Raises RequestFailed for what cannot be changed that way.
    """
    try:
        given = json.loads(config_json)
    except ValueError as fault:
        raise RequestFailed(
            f"failed to load: the config parameter is not JSON: {fault}", reason=Reason.INVALID
        ) from fault
    overrides: dict[str, Any] = {}
    for key, value in given.items() if isinstance(given, dict) else []:
        if key == "max_batch_size":
            overrides.setdefault("batching", {})["max_rows"] = value
        elif key in ("batching", "queue", "instances", "parameters", "reference") and isinstance(value, dict):
            overrides.setdefault(key, {}).update(value)
        elif key not in ("name", "backend", "platform"):
            raise RequestFailed(
                f"failed to load: the config parameter changes {key!r}",
                reason=Reason.INVALID,
                expected="max_batch_size, batching, queue, instances, parameters or reference",
            )
    return overrides
