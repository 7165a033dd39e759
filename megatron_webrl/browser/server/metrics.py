"""Prometheus metrics of a browser server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_webrl.browser.browser_pool import BrowserPool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "webrl_browsers"
_SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0, 120.0)


class ServerMetrics:
    """Counters, histograms and gauges of one browser server, in a registry of their own."""

    def __init__(self, sessions: int, active_leases: Callable[[], int], pool: BrowserPool) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        ProcessCollector(registry=registry)
        self.refused_leases = counter("leases_refused", "Leases refused because every session was leased")
        self.granted_leases = counter("leases_granted", "Leases granted")
        self.expired_leases = counter("leases_expired", "Leases that expired unused")
        self.episodes = counter("episodes", "Resets that returned an observation", "source")
        self.steps = counter("steps", "Actions that returned an observation")
        self.errors = counter("errors", "Operations that failed", "outcome")
        self.operation_seconds = Histogram(
            f"{PREFIX}_operation_seconds", "Time to an observation", ["operation"], buckets=_SECONDS, registry=registry
        )
        Gauge(f"{PREFIX}_sessions", "Maximum number of leases", registry=registry).set(sessions)
        Gauge(f"{PREFIX}_leases_active", "Active leases", registry=registry).set_function(active_leases)
        registry.register(_PoolCollector(pool))

    def render(self) -> bytes:
        """The metrics in Prometheus' text format, of CONTENT_TYPE."""
        return generate_latest(self._registry)


class _PoolCollector(Collector):
    """Counters and gauges of the browser pool and its egress proxy."""

    def __init__(self, pool: BrowserPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        for name, count in asdict(self._pool.counters).items():
            yield CounterMetricFamily(f"{PREFIX}_pool_{name}", name.replace("_", " "), value=count)
        for name, value in self._pool.gauges().items():
            yield GaugeMetricFamily(f"{PREFIX}_pool_{name}", name.replace("_", " "), value=value)
        totals = self._pool.egress_proxy.totals
        for name, text, count in (
            ("requests_replayed", "Page requests that recordings answered", totals.replayed),
            ("connections", "Connections to servers that were attempted", totals.connections),
        ):
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=count)
        text = "Page requests that were refused"
        refused = CounterMetricFamily(f"{PREFIX}_requests_refused", text, labels=["reason"])
        for reason, count in dict(totals.refused).items():
            refused.add_metric([reason], count)
        yield refused
