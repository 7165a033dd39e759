"""Sites that are as slow as the web, and their settings."""

from __future__ import annotations

import statistics
import threading
import time
import urllib.request

import pytest

from megatron_webrl.config import ConfigError, LatencyConfig, TasksConfig
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.server import LocalServer, Reply
from megatron_webrl.tasks.sites.latency import delay
from megatron_webrl.tasks.sites.source import Sites
from megatron_webrl.types import Task
from tests.tasks.site_client import Client

TASK = Task("sites/shop-find-price/1", "sites", "shop-find-price", 1, 20)


def test_delays_have_the_median_and_a_heavy_tail_and_never_change() -> None:
    settings = LatencyConfig(median=0.4, sigma=1.0, limit=5.0)
    delays = [delay(settings, "shop", "shop-find-price/1/0", request) for request in range(4000)]
    assert delays == [delay(settings, "shop", "shop-find-price/1/0", request) for request in range(4000)]
    assert delays[:9] != [delay(settings, "shop", "shop-find-price/1/1", request) for request in range(9)]
    assert 0.37 < statistics.median(delays) < 0.43
    assert 1.6 < statistics.quantiles(delays, n=100)[94] < 2.6  # exp(1.645) times the median: 2.07
    assert max(delays) == pytest.approx(5.0)


def test_sites_may_have_medians_of_their_own_and_none_means_no_delay() -> None:
    settings = LatencyConfig(median=0.0, sigma=0.0, medians={"wiki": 2.0})
    assert delay(settings, "shop", "x", 0) == 0
    assert delay(settings, "wiki", "x", 0) == pytest.approx(2.0)
    assert delay(LatencyConfig(median=1e-9, sigma=1e9, limit=3.0), "shop", "x", 0) <= 3.0


def test_the_server_waits_as_long_as_the_delay_says() -> None:
    settings = LatencyConfig(median=0.05, sigma=0.5)
    with Sites(["shop-find-price"], 20, settings) as source:
        client = Client(source.addresses["shop.localhost"], source.begin(TASK))
        for request in range(1, 5):  # the first page was number 0
            started = time.monotonic()
            client.go("/")
            assert time.monotonic() - started >= delay(settings, "shop", "shop-find-price/1/0", request)
        again = source.begin(TASK)
        assert again._number == "shop-find-price/1/1"


def test_closing_does_not_wait_for_slow_answers() -> None:
    asked, started = threading.Event(), time.monotonic()

    def respond(request: object) -> Reply:
        asked.set()
        return Reply(200, delay=60.0)

    server = LocalServer(respond, "slow")
    client = threading.Thread(target=lambda: _get(server.address), daemon=True)
    client.start()
    assert asked.wait(10)
    server.close()
    client.join(10)
    assert not client.is_alive()
    assert time.monotonic() - started < 20


def _get(address: str) -> None:
    urllib.request.urlopen(f"http://{address}/", timeout=30).read()


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the sites have no 'shop-find-prize' among its 30 .*near: shop-find-price"):
        make_source(TasksConfig(source="sites", environments=["shop-find-prize"]))
    with pytest.raises(ConfigError, match="environments is empty"):
        make_source(TasksConfig(source="sites", environments=[]))
    for medians, words in (({"shpo": 1.0}, "no 'shpo' .*near: shop"), ({"shop": -1.0}, "medians.shop=-1.0 must be")):
        settings = TasksConfig(source="sites", environments=["forms-vote"], latency=LatencyConfig(medians=medians))
        with pytest.raises(ConfigError, match=words):
            make_source(settings)
    with pytest.raises(ConfigError, match=r"tasks.latency has no effect on tasks.source=miniwob"):
        make_source(TasksConfig(latency=LatencyConfig(median=1.0)))


def test_the_configured_source_serves_the_sites_of_its_environments() -> None:
    source = make_source(TasksConfig(source="sites", environments=["forms-vote", "wiki-watch"], max_steps=7))
    try:
        assert source.origins == {"http://forms.localhost", "http://wiki.localhost"}
        assert len(set(source.addresses.values())) == 1
        assert source.task(0, 0).max_steps == 7
    finally:
        source.close()
