"""``/metrics`` in Prometheus' text format.

Everything about models is read from views of the service at the moment of the scrape; only what the edge itself sees
(answered requests) is counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import get_args

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from quart import Blueprint, request
from quart.wrappers import Response

from superfluidd import __version__
from superfluidd.control.protocol import ModelState, ModelView
from superfluidd.daemon.service import Service
from superfluidd.types import QosClass

_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("lanes_active", "lanes_busy", "Lanes that are running a request."),
    ("lanes_total", "lanes", "Lanes."),
    ("pool_cells_used", "cells_used", "KV cells filled, by the engine's count."),
    ("pool_cells_promised", "cells_promised", "KV cells promised to running requests."),
    ("pool_cells_total", "cells", "KV cells."),
    ("decode_tokens_per_second", "decode_rate", "Decode rate of the last second of decoding."),
    ("prefill_tokens_per_second", "prefill_rate", "Prefill rate of the last second of prefill."),
    ("pool_cells_kept", "cells_kept", "KV cells of preempted requests and of the prefix cache."),
    ("prefixes", "prefixes", "Prefixes kept, in the pool and in host memory."),
    ("host_cache_bytes", "host_bytes", "Host memory that saved KV takes."),
    ("host_cache_limit_bytes", "host_limit_bytes", "Host memory that saved KV may take."),
    ("parked_bytes", "parked_bytes", "Disk space that parked KV takes."),
    ("parked_limit_bytes", "parked_limit_bytes", "Disk space that parked KV may take."),
    ("pins", "pins", "Prefixes that are pinned."),
    ("pinned_tokens", "pinned_tokens", "Tokens of prefixes that are pinned."),
    ("prefill_budget_tokens", "prefill_budget", "Prompt tokens the latest tick was allowed to feed."),
    ("decode_grant_tokens", "decode_grant", "Tokens the latest tick was allowed to decode."),
    ("engine_threads", "threads", "Compute threads in use."),
    ("engine_stalled", "stalled", "1 while the engine has been silent for longer than any honest step."),
)
"""Metric, attribute of ModelView, help."""

_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("ticks", "ticks", "Ticks the engine has run."),
    ("worker_respawns", "respawns", "Times a worker process was replaced."),
    ("requests_submitted", "submitted", "Requests ever queued."),
    ("pauses", "pauses", "Times a running request lost its lane."),
    ("prefill_tokens", "prefill_tokens", "Prompt tokens fed to the engine."),
    (
        "cached_prompt_tokens",
        "cached_tokens",
        "Prompt tokens that did not have to be fed for their KV was there.",
    ),
    ("prefix_hits", "prefix_hits", "Requests that were seeded from a prefix."),
    ("prefix_evictions", "evictions", "Prefixes that had to leave the pool."),
    ("host_exports", "exports", "Prefixes saved in host memory."),
    ("host_imports", "imports", "Prefixes brought back from host memory."),
    ("parks", "parks", "Prefixes written to disk."),
    ("recalls", "recalls", "Prefixes brought back from disk."),
    ("pins_yielded", "pins_yielded", "Times a pinned prefix had to leave the pool or lost its pin to a newer one."),
    ("pins_expired", "pins_expired", "Pins whose time was over."),
    ("engine_tokens", "engine_tokens", "Tokens computed, by the engine's own count: fed, generated and given up."),
    ("abandoned_prefill_tokens", "abandoned_prefill_tokens", "Tokens of prefill steps given up in their middle."),
    ("decode_tokens", "decode_tokens", "Tokens generated."),
    ("decode_rounds", "decode_rounds", "Decode rounds run."),
    ("prefill_seconds", "prefill_seconds", "Time the engine spent on prefill, seconds."),
    ("decode_seconds", "decode_seconds", "Time the engine spent on decode rounds, seconds."),
)

_CLASS_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("preemptions", "preemptions", "Lanes lost to a more urgent request, by class of the loser."),
    ("starvation_grants", "starvation_grants", "Lanes given ahead of a better class to a request that had waited."),
)
"""Metric, attribute of ModelView with counts by class, help."""

_HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    ("queue_wait_seconds", "queue_wait", "From joining a queue to getting a lane."),
    ("ttft_seconds", "ttft", "From arrival to the first token, waiting included."),
    ("inter_token_seconds", "gap", "Between tokens of one request; a preemption is a gap, too."),
)
"""Metric, attribute of Latency, help."""

_STATES: tuple[str, ...] = get_args(ModelState)


class ServiceCollector(Collector):
    """Reads the service when asked; registering it reads nothing."""

    def __init__(self, service: Service, answered: Counter[tuple[str, str]]) -> None:
        self._service = service
        self._answered = answered

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: the registry would collect otherwise, maybe before a model is there."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics of this moment."""
        views = [model.view() for model in self._service.models.values()]
        for name, attribute, text in _GAUGES:
            yield _family(GaugeMetricFamily(f"superfluid_{name}", text, labels=["model"]), views, attribute)
        for name, attribute, text in _COUNTERS:
            yield _family(CounterMetricFamily(f"superfluid_{name}", text, labels=["model"]), views, attribute)
        for name, attribute, text in _CLASS_COUNTERS:
            family = CounterMetricFamily(f"superfluid_{name}", text, labels=["model", "class"])
            for view in views:
                for qos, count in getattr(view, attribute).items():
                    family.add_metric([view.name, qos], count)
            yield family
        for name, attribute, text in _HISTOGRAMS:
            yield self._histogram(name, attribute, text)
        yield self._queue_depth(views)
        yield self._finished(views)
        yield self._states(views)
        draining = GaugeMetricFamily("superfluid_draining", "1 while no new work is taken.")
        draining.add_metric([], float(self._service.draining))
        yield draining
        yield from self._pressure()
        requests = CounterMetricFamily("superfluid_http_requests", "Requests answered.", labels=["route", "status"])
        for (route, status), count in sorted(self._answered.items()):
            requests.add_metric([route, status], count)
        yield requests
        yield InfoMetricFamily("superfluid_build", "The daemon.", {"version": __version__})

    def _pressure(self) -> Iterator[Metric]:
        watcher = self._service.watcher
        rung = GaugeMetricFamily("superfluid_os_pressure_rung", "Rung of the memory ladder, 0 (normal) to 5.")
        rung.add_metric([], float(watcher.rung))
        level = GaugeMetricFamily("superfluid_os_pressure_level", "-1 unknown, 0 normal, 1 warning, 2 critical.")
        level.add_metric([], float(watcher.level(trio.current_time())))
        events = CounterMetricFamily(
            "superfluid_os_pressure_events",
            "Events of memory pressure, by whether they were confirmed.",
            labels=["confirmed"],
        )
        events.add_metric(["yes"], watcher.events)
        events.add_metric(["no"], watcher.false_alarms)
        yield from (rung, level, events)

    def _histogram(self, name: str, attribute: str, text: str) -> Metric:
        family = HistogramMetricFamily(f"superfluid_{name}", text, labels=["model", "class"])
        for model in self._service.models.values():
            for qos, histogram in getattr(model.latency, attribute).items():
                family.add_metric([model.name, qos.label], histogram.cumulative(), histogram.total)
        return family

    def _queue_depth(self, views: list[ModelView]) -> Metric:
        family = GaugeMetricFamily(
            "superfluid_queue_depth", "Requests that wait for a lane.", labels=["model", "class"]
        )
        waiting = Counter((entry.model, entry.qos) for entry in self._service.queue())
        for view in views:
            for member in QosClass:
                family.add_metric([view.name, member.label], waiting[view.name, member.label])
        return family

    def _finished(self, views: list[ModelView]) -> Metric:
        family = CounterMetricFamily("superfluid_requests_finished", "Requests ended.", labels=["model", "reason"])
        for view in views:
            for reason, count in view.finished.items():
                family.add_metric([view.name, reason], count)
        return family

    def _states(self, views: list[ModelView]) -> Metric:
        family = GaugeMetricFamily(
            "superfluid_model_state", "1 for the state a model is in.", labels=["model", "state"]
        )
        for view in views:
            for state in _STATES:
                family.add_metric([view.name, state], float(view.state == state))
        return family


def blueprint(service: Service) -> Blueprint:
    """The route, and the count of every answer of the app it is registered with."""
    routes = Blueprint("metrics", __name__)
    answered: Counter[tuple[str, str]] = Counter()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServiceCollector(service, answered))

    @routes.after_app_request
    async def count(response: Response) -> Response:
        # The rule, not the path: a scanner must not be able to make a new series with each request.
        route = request.url_rule.rule if request.url_rule is not None else "unknown"
        answered[route, str(response.status_code)] += 1
        return response

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)

    return routes


def _family(
    family: GaugeMetricFamily | CounterMetricFamily, views: list[ModelView], attribute: str
) -> GaugeMetricFamily | CounterMetricFamily:
    for view in views:
        family.add_metric([view.name], float(getattr(view, attribute)))
    return family
