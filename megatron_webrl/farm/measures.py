"""What a node and a router tell Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_webrl.browser.fleet import Fleet
from megatron_webrl.farm.wire import RouterState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NODE, ROUTER = "webrl_browsers", "webrl_router"
_SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0, 120.0)


class Measures:
    """Counters and histograms of one node, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.refused_leases = Counter(f"{NODE}_leases_refused", "Leases refused for want of a place", registry=registry)
        self.granted = Counter(f"{NODE}_leases_granted", "Leases given", registry=registry)
        self.expired = Counter(f"{NODE}_leases_expired", "Leases neither used nor renewed", registry=registry)
        self.episodes = Counter(f"{NODE}_episodes", "Resets that brought an observation", ["source"], registry=registry)
        self.steps = Counter(f"{NODE}_steps", "Actions that brought an observation", registry=registry)
        self.errors = Counter(f"{NODE}_errors", "Operations that failed", ["outcome"], registry=registry)
        self.seconds = Histogram(
            f"{NODE}_operation_seconds", "Time to an observation", ["operation"], buckets=_SECONDS, registry=registry
        )

    def watch(self, sessions: int, held: Callable[[], int], fleet: Fleet) -> None:
        """Tell of what others count."""
        Gauge(f"{NODE}_sessions", "Sessions that may be leased at a time", registry=self._registry).set(sessions)
        Gauge(f"{NODE}_leases_held", "Leases held", registry=self._registry).set_function(held)
        self._registry.register(_Fleet(fleet))

    def text(self) -> bytes:
        """All of it in Prometheus' text format, of CONTENT_TYPE."""
        return generate_latest(self._registry)


class RouterMeasures:
    """Counters of a router, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.placed = Counter(f"{ROUTER}_leases_placed", "Leases placed on nodes", registry=registry)
        self.refused = Counter(f"{ROUTER}_leases_refused", "Leases refused for want of a place", registry=registry)
        self.sent_on = Counter(f"{ROUTER}_requests_sent_on", "Requests sent on to nodes", registry=registry)

    def watch(self, state: Callable[[], RouterState]) -> None:
        """Tell of what the router knows."""
        gauges: tuple[tuple[str, str, Callable[[], int]], ...] = (
            ("nodes", "Live nodes", lambda: sum(node.alive for node in state().nodes)),
            ("sessions", "Sessions of live nodes", lambda: state().sessions),
            ("sessions_free", "Those that nobody holds", lambda: state().free),
        )
        for name, text, number in gauges:
            Gauge(f"{ROUTER}_{name}", text, registry=self._registry).set_function(number)

    def text(self) -> bytes:
        """All of it in Prometheus' text format, of CONTENT_TYPE."""
        return generate_latest(self._registry)


class _Fleet(Collector):
    """What a fleet knows of its browsers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        for name, count in asdict(self._fleet.counts).items():
            yield CounterMetricFamily(f"{NODE}_fleet_{name}", name.replace("_", " "), value=count)
        for name, value in self._fleet.gauges().items():
            yield GaugeMetricFamily(f"{NODE}_fleet_{name}", name.replace("_", " "), value=value)
        refused = CounterMetricFamily(
            f"{NODE}_requests_refused", "Requests of pages that policy refused", labels=["reason"]
        )
        for reason, count in dict(self._fleet.gateway.refused).items():
            refused.add_metric([reason], count)
        yield refused
