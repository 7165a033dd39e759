"""Simulated latency of local pages, and settings."""

from __future__ import annotations

import statistics
import threading
import time
import urllib.request

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import LatencyConfig, TasksConfig, tasks_config
from megatron_webrl.tasks import latency
from megatron_webrl.tasks.latency import EpisodeDelays, ResponseDelays, response_delay
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.server import LocalServer, PageResponse
from megatron_webrl.tasks.sites.site_task_source import SiteTaskSource
from megatron_webrl.types import Task
from tests.tasks.site_client import Client

TASK = Task("sites/shop-find-price/1", "sites", "shop-find-price", 1, 20)


def test_delays_have_the_median_and_a_heavy_tail_and_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "MAX_DELAY_SECONDS", 5.0)
    settings = LatencyConfig(median_seconds=0.4, sigma=1.0)
    delays = [response_delay(settings, "shop-find-price/1/0", request) for request in range(4000)]
    assert delays == [response_delay(settings, "shop-find-price/1/0", request) for request in range(4000)]
    assert delays[:9] != [response_delay(settings, "shop-find-price/1/1", request) for request in range(9)]
    assert 0.37 < statistics.median(delays) < 0.43
    assert 1.6 < statistics.quantiles(delays, n=100)[94] < 2.6  # exp(1.645) times the median: 2.07
    assert max(delays) == pytest.approx(5.0)


def test_a_zero_median_means_no_delay_and_a_zero_sigma_a_constant_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "MAX_DELAY_SECONDS", 3.0)
    assert response_delay(LatencyConfig(median_seconds=0.0, sigma=0.0), "x", 0) == 0
    assert response_delay(LatencyConfig(median_seconds=2.0, sigma=0.0), "x", 0) == pytest.approx(2.0)
    assert response_delay(LatencyConfig(median_seconds=1e-9, sigma=1e9), "x", 0) <= 3.0


def test_the_server_waits_as_long_as_the_delay_says() -> None:
    settings = LatencyConfig(median_seconds=0.05, sigma=0.5)
    with SiteTaskSource(["shop-find-price"], TasksConfig(max_steps=20, latency=settings)) as source:
        client = Client(source.addresses["shop.localhost"], source.start_episode(TASK))
        for request in range(1, 5):  # the first page was number 0
            started = time.monotonic()
            client.go("/")
            assert time.monotonic() - started >= response_delay(settings, "shop-find-price/1/0", request)
        again = source.start_episode(TASK)
        assert again._delays.episode == "shop-find-price/1/1"


def test_episodes_of_a_task_are_answered_after_other_times() -> None:
    settings = LatencyConfig(median_seconds=0.5)
    delays = EpisodeDelays(settings)
    first, second, other = delays.start("a/1"), delays.start("a/1"), delays.start("b/1")
    assert [each.episode for each in (first, second, other)] == ["a/1/0", "a/1/1", "b/1/0"]
    assert [first.next(), first.next()] == [response_delay(settings, "a/1/0", request) for request in (0, 1)]
    assert second.next() == ResponseDelays(settings, "a/1/1").next() != other.next()


def test_closing_does_not_wait_for_slow_answers() -> None:
    asked, started = threading.Event(), time.monotonic()

    def respond(request: object) -> PageResponse:
        asked.set()
        return PageResponse(200, delay=60.0)

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


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the sites have no 'shop-find-prize' among its 30 .*near: shop-find-price"):
        make_source(tasks_config(source="sites", environments=["shop-find-prize"]))
    with pytest.raises(ConfigError, match="environments is empty"):
        make_source(tasks_config(source="sites", environments=[]))


def test_the_configured_source_serves_the_sites_of_its_environments() -> None:
    source = make_source(tasks_config(source="sites", environments=["forms-vote", "wiki-watch"], max_steps=7))
    try:
        assert source.origins == {"http://forms.localhost", "http://wiki.localhost"}
        assert len(set(source.addresses.values())) == 1
        assert source.training_task(0, 0).max_steps == 7
    finally:
        source.close()
