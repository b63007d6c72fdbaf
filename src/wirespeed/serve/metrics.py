"""/metrics: the counters of every model, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from wirespeed.serve.repository import ModelRepository
from wirespeed.serve.statistics import LATENCY_BOUNDS_S

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Collector:
    def __init__(self, models: ModelRepository, staleness_s: Callable[[str], float | None]) -> None:
        self._models = models
        self._staleness_s = staleness_s

    def collect(self) -> Iterator[Metric]:
        counters = {
            "requests": CounterMetricFamily("wirespeed_requests", "Requests that ended", labels=["model", "outcome"]),
            "rows": CounterMetricFamily("wirespeed_rows", "Rows that were answered", labels=["model"]),
            "batches": CounterMetricFamily("wirespeed_batches", "Batches that ran", labels=["model"]),
            "compute": CounterMetricFamily("wirespeed_compute_seconds", "Time that batches ran", labels=["model"]),
            "restarts": CounterMetricFamily("wirespeed_worker_deaths", "Workers that died", labels=["model"]),
        }
        gauges = {
            "queued": GaugeMetricFamily("wirespeed_queued_requests", "Requests that wait", labels=["model"]),
            "running": GaugeMetricFamily("wirespeed_running_requests", "Requests that run", labels=["model"]),
            "instances": GaugeMetricFamily("wirespeed_instances", "Instances that are up", labels=["model"]),
            "origin": GaugeMetricFamily(
                "wirespeed_model_origin", "1 for the version that is live", labels=["model", "origin"]
            ),
            "drift": GaugeMetricFamily(
                "wirespeed_update_drift",
                "How much the last update changed the answers to the reference batch",
                labels=["model"],
            ),
            "staleness": GaugeMetricFamily(
                "wirespeed_model_staleness_seconds",
                "Since the store last named the version that should be live",
                labels=["model"],
            ),
        }
        latency = HistogramMetricFamily(
            "wirespeed_request_seconds", "From arrival to answer, of answered requests", labels=["model"]
        )
        for name, model in self._models.models.items():
            s = model.statistics
            counters["requests"].add_metric([name, "ok"], s.num_success)
            for reason, count in s.failures.items():
                counters["requests"].add_metric([name, reason.value.lower()], count)
            counters["rows"].add_metric([name], s.num_rows)
            counters["batches"].add_metric([name], s.num_executions)
            counters["compute"].add_metric([name], sum(ns for _, ns in s.batches.values()) / 1e9)
            counters["restarts"].add_metric([name], s.num_restarts)
            gauges["queued"].add_metric([name], model.num_queued)
            gauges["running"].add_metric([name], model.num_running)
            gauges["instances"].add_metric([name], model.num_instances)
            if model.origin:
                gauges["origin"].add_metric([name, model.origin], 1)
            if model.drift is not None:
                gauges["drift"].add_metric([name], model.drift.worst)
            age_s = self._staleness_s(name)
            if age_s is not None:
                gauges["staleness"].add_metric([name], age_s)
            total = 0
            buckets = []
            for bound, count in zip([*map(str, LATENCY_BOUNDS_S), "+Inf"], s.latency_counts, strict=True):
                total += count
                buckets.append((bound, total))
            latency.add_metric([name], buckets, s.success_ns / 1e9)
        yield from counters.values()
        yield from gauges.values()
        yield latency


def render(models: ModelRepository, *, staleness_s: Callable[[str], float | None] = lambda _: None) -> bytes:
    """The text that Prometheus reads. ``staleness_s``: of each model that follows an alias."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(models, staleness_s))
    return generate_latest(registry)
