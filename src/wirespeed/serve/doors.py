"""What every front door stands on: the models, the clients' shared memory, who may enter, and whether we are open."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Callable
from typing import Any

from wirespeed.errors import WirespeedError
from wirespeed.serve.repository import ModelRepository
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.shared_memory import SharedMemory
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Tensor


class Desk:
    """Shared by the doors of one server."""

    def __init__(
        self, models: ModelRepository, memory: SharedMemory, *, server_name: str = "wirespeed", token: str | None = None
    ) -> None:
        self.models = models
        self.memory = memory
        self.server_name = server_name
        self.is_draining = False
        self.staleness_s: Callable[[str], float | None] = lambda _: None
        """Of a model that follows an alias: since the store last named its version."""
        self._token = token

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken and every loaded model has a running instance."""
        return not self.is_draining and all(model.is_ready for model in self.models.models.values())

    @property
    def asks_token(self) -> bool:
        """Whether ``check_entry`` has anything to check."""
        return self._token is not None

    def check_entry(self, authorization: str | None) -> None:
        """Raise RequestFailed (UNAUTHENTICATED) where a token is asked for and ``authorization`` does not bear it."""
        if self._token is None:
            return
        expected = f"Bearer {self._token}".encode()
        if authorization is None or not hmac.compare_digest(authorization.encode(), expected):
            raise RequestFailed(
                "this server asks for a token", reason=Reason.UNAUTHENTICATED, hint='send "authorization: Bearer TOKEN"'
            )

    async def infer(self, model: str, version: str, request: InferRequest) -> list[Tensor]:
        """Run a request to its end. Cancelling the caller cancels the request."""
        if self.is_draining:
            raise RequestFailed("the server is shutting down and takes no new requests", reason=Reason.UNAVAILABLE)
        return await self.models.get(model, version).infer(request)


def deadline_of(remaining_s: float | None) -> float:
    """A point on the event loop's clock from the seconds that a caller gives; inf where it gives none."""
    return math.inf if remaining_s is None else asyncio.get_running_loop().time() + remaining_s


def as_failure(fault: BaseException) -> RequestFailed:
    """Any fault as one that the doors can translate; a bug of ours keeps its type in the text."""
    if isinstance(fault, RequestFailed):
        return fault
    if isinstance(fault, WirespeedError):
        return RequestFailed(str(fault), reason=Reason.FAILED)
    return RequestFailed(f"a bug of the server: {type(fault).__name__}: {fault}", reason=Reason.FAILED)


def only_model(desk: Desk) -> str:
    """The name of the one model there is. Raises RequestFailed (INVALID) where there are none or several."""
    names: list[Any] = list(desk.models.models)
    if len(names) != 1:
        raise RequestFailed(
            f"got no model's name, and {len(names)} models are loaded",
            reason=Reason.INVALID,
            expected=f"one of {', '.join(names)}",
        )
    return str(names[0])
