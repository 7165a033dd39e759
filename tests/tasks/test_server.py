"""The HTTP server of pages, and the simulated response time of its answers."""

from __future__ import annotations

import statistics
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megatron_webrl.config.tasks import LatencyConfig, TasksConfig
from megatron_webrl.tasks import latency
from megatron_webrl.tasks.latency import response_delay
from megatron_webrl.tasks.server import FolderServer, LocalServer, PageResponse
from megatron_webrl.tasks.sites.site_task_source import SiteTaskSource
from tests.tasks.site_client import Client


def test_a_folder_is_served_without_anything_outside_it_until_the_server_is_closed(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "page.html").write_text("page")
    (tmp_path / "secret").write_text("secret")
    server = FolderServer(tmp_path / "inside")
    address = server.address
    with urllib.request.urlopen(f"http://{address}/page.html?query", timeout=5) as answer:
        assert (answer.read(), answer.headers["Content-Type"]) == (b"page", "text/html; charset=utf-8")
    for path in ("../secret", "%2e%2e/secret", "", "inside/page.html"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{address}/{path}", timeout=5)
    server.close()
    server.close()
    assert server.address == address
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/page.html", timeout=5)
    server = LocalServer(lambda request: PageResponse(200), "pages")
    server.close()
    with pytest.raises(RuntimeError, match="pages was closed"):
        _ = server.address


def test_closing_does_not_wait_for_slow_answers() -> None:
    asked, started = threading.Event(), time.monotonic()

    def respond(request: object) -> PageResponse:
        asked.set()
        return PageResponse(200, delay=60.0)

    server = LocalServer(respond, "slow")
    request = f"http://{server.address}/"
    client = threading.Thread(target=lambda: urllib.request.urlopen(request, timeout=30).read(), daemon=True)
    client.start()
    assert asked.wait(10)
    server.close()
    client.join(10)
    assert not client.is_alive()
    assert time.monotonic() - started < 20


def test_delays_have_the_median_and_a_heavy_tail_and_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "MAX_DELAY_SECONDS", 5.0)
    settings = LatencyConfig(median_seconds=0.4, sigma=1.0)
    delays = [response_delay(settings, "shop-find-price/1/0", request) for request in range(4000)]
    assert delays[:99] == [response_delay(settings, "shop-find-price/1/0", request) for request in range(99)]
    assert 0.37 < statistics.median(delays) < 0.43
    assert 1.6 < statistics.quantiles(delays, n=100)[94] < 2.6  # exp(1.645) times the median: 2.07
    assert max(delays) == pytest.approx(5.0)
    assert response_delay(LatencyConfig(median_seconds=2.0, sigma=0.0), "x", 0) == pytest.approx(2.0)
    assert response_delay(LatencyConfig(median_seconds=1e-9, sigma=1e9), "x", 0) <= 5.0


def test_the_server_waits_as_long_as_the_delay_says() -> None:
    settings = LatencyConfig(median_seconds=0.05, sigma=0.5)
    with SiteTaskSource(["shop-find-price"], TasksConfig(max_steps=20, latency=settings)) as source:
        task = source.make_task("shop-find-price", 1)
        client = Client(source.addresses["shop.localhost"], source.start_episode(task))
        for request in range(1, 5):  # the first page was number 0
            started = time.monotonic()
            client.go("/")
            assert time.monotonic() - started >= response_delay(settings, "shop-find-price/1/0", request)
