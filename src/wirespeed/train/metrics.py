"""A session's figures for Prometheus: steps, where their time went, bytes sent and held back. Needs prometheus_client.

Counters are read when Prometheus asks; training pays one addition per step and nothing between. Every rank of a host
needs a port of its own, so ``serve_metrics`` adds the local rank to the port it is given. The page is served without a
password and shows the host's name and the strategy: it listens on loopback unless told otherwise.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from wirespeed.errors import MissingCapability, UsageError
from wirespeed.measure.environment import host_name

if TYPE_CHECKING:
    from wirespeed.train.session import Session

PARTS = ("data", "forward", "backward", "exposed", "optimizer", "other")
DEFAULT_PORT = 9464


class SessionMetrics:
    """A collector of one session: register it with a registry of prometheus_client. ``close`` lets go of the session.

    ``wirespeed_steps_total``; ``wirespeed_step_seconds_total{part}`` with the parts of a step;
    ``wirespeed_sent_bytes_total{counted="stated"|"interface"}``; ``wirespeed_residual_bytes``;
    ``wirespeed_session_info{strategy, ...}``. A step is counted when the next one ends: until then it may still grow.
    """

    def __init__(self, session: Session) -> None:
        _import_client()
        self._session: Session | None = session
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._num_steps = 0
        self._num_read = 0
        self._labels = {"rank": str(session.rank), "host": host_name()}
        session.on_step(self._step_done)

    def close(self) -> None:
        """Stop reporting."""
        with self._lock:
            self._session = None

    def _step_done(self, session: Session) -> None:
        num_read, steps = session.clock.parsed_since(self._num_read)
        with self._lock:
            self._num_read = num_read
            self._num_steps += len(steps)
            for step in steps:
                for part in PARTS:
                    self._seconds[part] += getattr(step, f"{part}_s")

    def describe(self) -> list[Any]:
        """No metric is promised before the first collection: registering must not read the session."""
        return []

    def collect(self) -> Iterator[Any]:
        """What Prometheus is told."""
        core = _import_client().core
        with self._lock:
            session, num_steps, seconds = self._session, self._num_steps, dict(self._seconds)
        if session is None:
            return
        labels, values = list(self._labels), list(self._labels.values())
        steps = core.CounterMetricFamily("wirespeed_steps", "Optimizer steps.", labels=labels)
        steps.add_metric(values, num_steps)
        yield steps
        parts = core.CounterMetricFamily(
            "wirespeed_step_seconds", "Time of the steps, by what it was spent on.", labels=[*labels, "part"]
        )
        for part in PARTS:
            parts.add_metric([*values, part], seconds[part])
        yield parts
        sent = core.CounterMetricFamily(
            "wirespeed_sent_bytes", "Gradient bytes that this rank sent.", labels=[*labels, "counted"]
        )
        wire = session.wire
        if wire:
            first, last = wire[0], wire[-1]
            sent.add_metric([*values, "stated"], last[0])
            if last[1] >= 0:
                sent.add_metric([*values, "interface"], last[1] - first[1])
        yield sent
        held = core.GaugeMetricFamily("wirespeed_residual_bytes", "Memory of error feedback.", labels=labels)
        held.add_metric(values, session.residual_bytes)
        yield held
        about = core.GaugeMetricFamily(
            "wirespeed_session_info", "What runs: always 1.", labels=[*labels, "strategy", "fidelity", "num_ranks"]
        )
        strategy = session.strategy
        about.add_metric([*values, strategy.name, strategy.fidelity, str(session.num_ranks)], 1)
        yield about


def serve_metrics(session: Session, *, port: int | None = None, address: str = "127.0.0.1") -> Callable[[], None]:
    """Serve the session's metrics over HTTP from a thread; gives a function that ends it.

    ``port`` counts for the first rank of a host, each other one adds its local rank; None is 9464; 0 takes any free one
    (for tests). Raises MissingCapability where prometheus_client is missing or the port is taken.
    """
    client = _import_client()
    base = DEFAULT_PORT if port is None else port
    if not 0 <= base <= 65535:
        raise UsageError(f"got port {base}", expected="0 to 65535")
    chosen = base if base == 0 else base + int(os.environ.get("LOCAL_RANK", "0"))
    metrics = SessionMetrics(session)
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, thread = client.start_http_server(chosen, addr=address, registry=registry)
    except OSError as fault:
        metrics.close()
        raise MissingCapability(
            f"cannot serve metrics on {address}:{chosen}: {fault.strerror}",
            hint="name another port; every rank of a host needs one of its own",
        ) from fault

    def end() -> None:
        metrics.close()
        server.shutdown()
        server.server_close()
        thread.join(10.0)

    end.port = server.server_port  # type: ignore[attr-defined]
    return end


def _import_client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError:
        raise MissingCapability("prometheus_client is not installed", hint="pip install 'wirespeed[metrics]'") from None
    return prometheus_client
