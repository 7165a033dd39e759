"""Prometheus metrics of browser server and router."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.server.protocol import RouterState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SERVER_PREFIX, ROUTER_PREFIX = "webrl_browsers", "webrl_router"
_SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0, 120.0)


class ServerMetrics:
    """Counters and histograms of one browser server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.refused_leases = Counter(
            f"{SERVER_PREFIX}_leases_refused", "Leases refused because every session was leased", registry=registry
        )
        self.granted_leases = Counter(f"{SERVER_PREFIX}_leases_granted", "Leases granted", registry=registry)
        self.expired_leases = Counter(
            f"{SERVER_PREFIX}_leases_expired", "Leases that expired unused", registry=registry
        )
        self.episodes = Counter(
            f"{SERVER_PREFIX}_episodes", "Resets that returned an observation", ["source"], registry=registry
        )
        self.steps = Counter(f"{SERVER_PREFIX}_steps", "Actions that returned an observation", registry=registry)
        self.errors = Counter(f"{SERVER_PREFIX}_errors", "Operations that failed", ["outcome"], registry=registry)
        self.operation_seconds = Histogram(
            f"{SERVER_PREFIX}_operation_seconds", "Time to an observation", ["operation"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip

    def register_gauges(self, sessions: int, active_leases: Callable[[], int], pool: BrowserPool) -> None:
        """Add the gauges of leases and of the browser pool."""
        Gauge(f"{SERVER_PREFIX}_sessions", "Maximum number of leases", registry=self._registry).set(sessions)
        Gauge(f"{SERVER_PREFIX}_leases_active", "Active leases", registry=self._registry).set_function(active_leases)
        self._registry.register(_PoolCollector(pool))

    def render(self) -> bytes:
        """The metrics in Prometheus' text format, of CONTENT_TYPE."""
        return generate_latest(self._registry)


class RouterMetrics:
    """Counters of a router, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.placed_leases = Counter(f"{ROUTER_PREFIX}_leases_placed", "Leases placed on servers", registry=registry)
        self.refused_leases = Counter(
            f"{ROUTER_PREFIX}_leases_refused", "Leases refused because every session was leased", registry=registry
        )
        self.redirected_requests = Counter(
            f"{ROUTER_PREFIX}_requests_redirected", "Requests redirected to servers", registry=registry
        )

    def register_gauges(self, state: Callable[[], RouterState]) -> None:
        """Add the gauges of the router's state."""
        gauges: tuple[tuple[str, str, Callable[[], int]], ...] = (
            ("servers", "Live servers", lambda: sum(server.alive for server in state().servers)),
            ("sessions", "Sessions of live servers", lambda: state().sessions),
            ("sessions_free", "Free sessions of live servers", lambda: state().free),
        )
        for name, text, number in gauges:
            Gauge(f"{ROUTER_PREFIX}_{name}", text, registry=self._registry).set_function(number)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format, of CONTENT_TYPE."""
        return generate_latest(self._registry)


class _PoolCollector(Collector):
    """Counters and gauges of the browser pool and its egress proxy."""

    def __init__(self, pool: BrowserPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        for name, count in asdict(self._pool.counters).items():
            yield CounterMetricFamily(f"{SERVER_PREFIX}_pool_{name}", name.replace("_", " "), value=count)
        for name, value in self._pool.gauges().items():
            yield GaugeMetricFamily(f"{SERVER_PREFIX}_pool_{name}", name.replace("_", " "), value=value)
        totals = self._pool.egress_proxy.totals
        yield CounterMetricFamily(
            f"{SERVER_PREFIX}_requests_replayed", "Page requests that recordings answered", value=totals.replayed
        )
        yield CounterMetricFamily(
            f"{SERVER_PREFIX}_connections", "Connections to servers that the egress proxy attempted",
            value=totals.connections,
        )  # fmt: skip
        refused = CounterMetricFamily(
            f"{SERVER_PREFIX}_requests_refused", "Page requests that were refused", labels=["reason"]
        )
        for reason, count in dict(totals.refused).items():
            refused.add_metric([reason], count)
        yield refused
