"""One browser server with real Chromium: leases, episodes, errors, access, and generated requests."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import aiohttp
import hypothesis
import psutil
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, strategies
from schemathesis import APIOperation, Case, GenerationMode

from megatron_webrl.browser.server import browser_server as browser_server_module
from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.browser_server import BrowserServer, RequestRefused
from megatron_webrl.config.schema import Config
from megatron_webrl.types import Observation
from tests.browser.server.conftest import LIMIT, Http, Server, browser_server, until_async
from tests.browser.server.servers import browser_of

OF_ANY_PATH = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)  # the framework's answers to what it does not have


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with browser_server(WEBRL_BROWSERS_TOKEN="") as running:
        yield running


@pytest.fixture
async def http(server: Server, client: aiohttp.ClientSession) -> Http:
    http = Http(client, server.url)
    await http.until_free(3)
    return http


async def test_an_episode_from_lease_to_release(http: Http) -> None:
    lease = await http.lease(owner="<b>bold</b>")
    path = f"/v1/leases/{lease}"
    early = await http("POST", f"{path}/step", json={"kind": "wait"})
    assert (early.status, early.json["error"]) == (409, "there is no episode; reset begins one")
    for part in ("screenshot", "demonstration"):
        assert (await http("GET", f"{path}/{part}")).status == 409
    seen = await http.reset(lease, "click-test")
    assert (seen.status, seen.headers["Content-Type"]) == (200, "application/json")
    assert seen.json["instruction"] == "Click the button."
    assert "screenshot" not in seen.json
    action = (await http("GET", f"{path}/demonstration")).json
    acted = await http("POST", f"{path}/step", json=action, headers={"Accept": protocol.OBSERVATION_MEDIA_TYPE})
    assert acted.headers["Content-Type"] == protocol.OBSERVATION_MEDIA_TYPE
    observation = protocol.decode_observation(acted.body)
    assert isinstance(observation, Observation)
    assert (observation.done, (observation.reward or 0) > 0.5) == (True, True)
    image = await http("GET", f"{path}/screenshot")
    assert (image.headers["Content-Type"], image.body) == ("image/png", observation.screenshot)
    known = (await http("GET", path)).json
    assert (known["state"], known["task"]["id"], known["steps"]) == ("waiting", "miniwob/click-test/1", 1)
    assert known["url"].endswith("/click-test.html")
    assert 0 < known["seconds_left"] <= 60
    metrics = (await http("GET", "/metrics")).body.decode()
    assert "webrl_browsers_leases_active 1.0" in metrics
    assert 'webrl_browsers_operation_seconds_count{operation="reset"}' in metrics
    assert 'webrl_browsers_episodes_total{source="miniwob"}' in metrics
    page = (await http("GET", "/")).body.decode()
    for text in ("waiting for the client", "miniwob/click-test", "&lt;b&gt;bold"):
        assert text in page
    assert lease not in page
    assert "http://" not in page.replace(http.url, "")  # nothing comes from elsewhere
    seen = await http.reset(lease, "shop-find-price", source="sites")
    task = (await http("GET", path)).json["task"]
    again = await http("POST", f"{path}/reset", json={"task": task})
    assert again.json["instruction"] == seen.json["instruction"]
    assert again.json["url"] == seen.json["url"]
    assert again.json["url"].startswith("http://shop.localhost/")
    assert (await http("GET", "/v1/state")).json["leases"] == [lease]
    assert (await http("DELETE", path)).status == 204
    gone = await http("GET", path)
    assert gone.status == protocol.STATUS_LEASE_EXPIRED
    assert gone.json == {"error": "the lease has been released", "outcome": None}


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
async def test_simultaneous_lease_requests_get_a_lease_or_busy(http: Http, count: int) -> None:
    started = time.monotonic()
    patient = aiohttp.ClientTimeout(total=300)
    answers = await asyncio.gather(
        *(http("POST", "/v1/leases", json={"seconds": 300}, timeout=patient) for _ in range(count))
    )
    print(f"{count} lease requests at a time: {time.monotonic() - started:.2f} s")  # noqa: T201
    assert Counter(answer.status for answer in answers) == {201: 3, protocol.STATUS_BUSY: count - 3}
    for answer in answers:
        if answer.status == 201:
            assert (await http("DELETE", f"/v1/leases/{answer.json['id']}")).status == 204
            await http("DELETE", f"/v1/leases/{await http.lease()}")
        else:
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json["error"] == "all 3 sessions of this server are leased"


async def test_a_lease_expires_unless_it_is_renewed_or_at_work(http: Http) -> None:
    busy = await http.lease(seconds=1)
    await http.reset(busy, "click-test")
    step = asyncio.create_task(http("POST", f"/v1/leases/{busy}/step", json={"kind": "wait", "time": 1.8}))
    renewed, left = await http.lease(seconds=1.2), await http.lease(seconds=1.2)

    async def over() -> bool:
        assert (await http("POST", f"/v1/leases/{renewed}/renew")).status == 200
        return step.done() and left not in (await http("GET", "/v1/state")).json["leases"]

    await until_async(over, "the step has ended, and the unused lease expired")
    assert (await step).status == 200
    for lease in (renewed, busy):
        assert (await http("DELETE", f"/v1/leases/{lease}")).status == 204
    answer = await http("POST", f"/v1/leases/{left}/step", json={"kind": "wait"})
    assert answer.status == protocol.STATUS_LEASE_EXPIRED
    assert "neither used nor renewed for 1.2 s" in answer.json["error"]


async def test_a_client_that_ends_during_a_step_blocks_its_lease_no_longer_than_the_lifetime(http: Http) -> None:
    lease = await http.lease(seconds=1)
    await http.reset(lease, "click-test")
    acting = await http.begin_waiting(lease)
    acting.cancel()  # its connection closes, as that of a killed process
    started = time.monotonic()
    await http.until_free(3)
    assert time.monotonic() - started < 4.5  # the step alone would have taken 5 s
    assert (await http("GET", f"/v1/leases/{lease}")).status == protocol.STATUS_LEASE_EXPIRED


async def test_the_latest_ends_of_leases_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_server_module, "MAX_ENDED_LEASES", 2)
    absent: Any = None
    server = BrowserServer(Config(), absent, absent, 1, "")
    ended = []
    for _ in range(3):
        ended.append(server.create_lease(protocol.LeaseRequest()).id)
        await server.release_lease(ended[-1])
    reasons = []
    for lease in ended:
        with pytest.raises(RequestRefused) as refused:
            server.find_lease(lease)
        reasons.append(str(refused.value))
    assert reasons == ["this server knows no such lease", *["the lease has been released"] * 2]


async def test_concurrent_operations_conflict_and_a_release_cancels_the_first(http: Http) -> None:
    lease = await http.lease()
    await http.reset(lease, "click-test")
    acting = await http.begin_waiting(lease)
    second = await http.reset(lease, "click-test")
    assert (second.status, "another operation" in second.json["error"]) == (409, True)
    assert (await http("DELETE", f"/v1/leases/{lease}")).status == 204
    assert (await acting).status == 410


async def test_an_invalid_request_is_named_and_changes_nothing(http: Http) -> None:
    lease, miniwob = await http.lease(), {"source": "miniwob"}
    await http.reset(lease, "click-test")
    for path, body, error in (
        ("step", {"kind": "clik"}, "kind: Input should be"),
        ("step", {"kind": "left_click"}, "left_click: "),
        ("step", {"kind": "left_click", "coordinate": [1, 2000]}, "coordinate.1: Input should be less than"),
        ("reset", {}, "task, source, url: give one of them, not none"),
        ("reset", {**miniwob, "url": "http://x.y"}, "task, source, url: give one of them, not source and"),
        ("reset", {"source": "minniwob", "environment": "x"}, "source: 'minniwob' is not known here; near: miniwob"),
        ("reset", {**miniwob, "environment": "../x"}, "environment: '../x' is not known here"),
        ("reset", {**miniwob, "environment": "click-test", "seed": -1}, "seed: -1 is not within"),
        ("reset", {"task": {"id": "x", **miniwob}}, "task.environment: Field required"),
        ("reset", {"url": "http://example.com"}, "url: this server opens no web pages; start it with"),
        ("reset", {"source": "web"}, "source: give url instead"),
    ):
        answer = await http("POST", f"/v1/leases/{lease}/{path}", json=body)
        assert (answer.status, answer.json["error"][: len(error)]) == (400, error)
        assert (await http("POST", f"/v1/leases/{lease}/step", json={"kind": "wait", "time": 0})).status == 200
    for method, path, data, status in (
        ("POST", "/v1/leases", b"{", 400),
        *(("POST", "/v1/leases", b'{"seconds": %s}' % seconds, 400) for seconds in (b"4000", b"0", b"-1", b'"nan"')),
        ("POST", "/v1/leases", b'{"owner": "two\\nlines"}', 400),
        ("GET", "/v1/nothing", None, 404),
        ("PUT", "/v1/leases", None, 405),
        ("GET", "/v1/leases/unknown", None, protocol.STATUS_LEASE_EXPIRED),
    ):
        answer = await http(method, path, data=data, headers={"Content-Type": "application/json"})
        assert (answer.status, set(answer.json)) == (status, {"error", "outcome"})
    await http("DELETE", f"/v1/leases/{lease}")


async def test_a_killed_browser_fails_with_its_outcome_and_the_lease_continues(server: Server, http: Http) -> None:
    lease = await http.lease()
    await http.reset(lease, "click-test")
    acting = await http.begin_waiting(lease)
    os.kill(browser_of(psutil.Process(server.process.pid)).pid, signal.SIGKILL)
    failed = await acting
    assert (failed.status, failed.json["outcome"]) == (protocol.STATUS_BROWSER_FAILED, "browser_crashed")
    known = (await http("GET", f"/v1/leases/{lease}")).json
    assert (known["state"], known["outcome"]) == ("crashed", "browser_crashed")
    after = await http("POST", f"/v1/leases/{lease}/step", json={"kind": "wait"})
    assert (after.status, "ended with browser_crashed" in after.json["error"]) == (409, True)
    assert (await http.reset(lease, "click-test")).status == 200
    await http("DELETE", f"/v1/leases/{lease}")


@pytest.mark.slow
async def test_health_follows_the_browser(server: Server, http: Http) -> None:
    assert (await http("GET", "/healthz")).status == 200
    browser = browser_of(psutil.Process(server.process.pid))
    browser.suspend()
    try:
        sick = await http("GET", "/healthz")
    finally:
        browser.resume()
    assert (sick.status, "answered within" in sick.body.decode()) == (503, True)
    assert (await http("GET", "/healthz")).status == 200


async def test_without_a_token_only_loopback_hosts_and_own_pages_are_accepted(server: Server, http: Http) -> None:
    place = server.url.removeprefix("http://")
    port = place.rpartition(":")[2]
    for host in (place, f"localhost:{port}", f"[::1]:{port}", "127.0.0.1"):
        assert (await http("GET", "/v1/state", headers={"Host": host})).status == 200, host
    for host in (f"rebound.example:{port}", "localhost.example", "127.0.0.1.example", "10.0.0.1", ""):
        for path in ("/v1/state", "/", "/metrics"):
            assert (await http("GET", path, headers={"Host": host})).status == 403, host
    for origin in ("http://evil.example", "http://[", "null"):
        foreign = await http("POST", "/v1/leases", json={}, headers={"Origin": origin})
        assert (foreign.status, "other origins" in foreign.json["error"]) == (403, True), origin
    assert (await http("POST", "/v1/leases", data=b"{}", headers={"Content-Type": "text/plain"})).status == 400
    assert (await http("GET", "/v1/state", headers={"Origin": server.url})).status == 200


async def test_large_bodies_are_refused_with_any_encoding(http: Http) -> None:
    async def in_pieces():  # type: ignore[no-untyped-def]
        yield b'{"owner": "x"}'

    for data, status, error in ((b"x" * 70_000, 413, "larger than 65536 bytes"), (in_pieces(), 411, "Content-Length")):
        answer = await http("POST", "/v1/leases", data=data, headers={"Content-Type": "application/json"})
        assert (answer.status, error in answer.json["error"]) == (status, True)


class Requests:
    """Requests that schemathesis generates from the OpenAPI document, half of them with a live lease."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/v1/leases"
        self.statuses: dict[str, Counter[int]] = defaultdict(Counter)  # of responses, by operation
        self.lease = "none"
        document = requests.get(f"{url}/openapi.json", timeout=LIMIT).json()
        self.operations = [each.ok() for each in schemathesis.openapi.from_dict(document).get_all_operations()]

    def send(self, operation: APIOperation, count: int, seed: int) -> None:
        cases = strategies.one_of(*(operation.as_strategy(mode) for mode in GenerationMode))

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @hypothesis.given(cases, strategies.booleans())
        def send(case: Case, live: bool) -> None:
            if live:
                self.make_live(case)
            response = case.call(base_url=self.url.removesuffix("/v1/leases"), timeout=LIMIT)
            status = response.status_code
            self.statuses[operation.label][status] += 1
            declared = str(status) in operation.responses.status_codes or status in OF_ANY_PATH
            assert declared, f"{operation.label}: {status} {response.content[:300]!r}; {case.as_curl_command()[:500]}"
            if operation.label == "POST /v1/leases" and status == HTTPStatus.CREATED:
                self.release(response.json()["id"])

        send()

    def make_live(self, case: Case) -> None:
        """Name a lease and a task that exist, where the case has such a field."""
        task = {"source": "miniwob", "environment": "click-test"}
        if "lease" in (case.path_parameters or {}):
            if not requests.get(f"{self.url}/{self.lease}", timeout=LIMIT).ok:
                answer = requests.post(self.url, json={"seconds": 600}, timeout=LIMIT)
                self.lease = answer.json()["id"] if answer.ok else "none"
                requests.post(f"{self.url}/{self.lease}/reset", json=task, timeout=LIMIT)
            case.path_parameters = {**case.path_parameters, "lease": self.lease}
        if isinstance(case.body, dict) and case.path.endswith("/reset"):
            case.body = task | {"seed": case.body.get("seed", 0)}

    def release(self, lease: str) -> None:
        requests.delete(f"{self.url}/{lease}", timeout=LIMIT)


@pytest.mark.parametrize("count", [40, pytest.param(5000, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])])
def test_generated_requests_get_declared_responses(server: Server, count: int) -> None:
    sent, seed = Requests(server.url), 0
    while sum(map(Counter.total, sent.statuses.values())) < count:  # some operations have few cases in a round
        for operation in sent.operations:
            sent.send(operation, -(-count // len(sent.operations)), seed)
            seed += 1
    sent.release(sent.lease)
    assert server.process.poll() is None
    assert {200, 400} <= sent.statuses["POST /v1/leases/{lease}/reset"].keys()
