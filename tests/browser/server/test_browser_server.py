"""One browser server with real Chromium: leases, episodes, errors."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import aiohttp
import psutil
import pytest

from megatron_webrl.browser.server import protocol
from megatron_webrl.tasks import scripted_policies
from megatron_webrl.tasks.miniwob import all_environments
from megatron_webrl.types import Observation
from tests.browser.server.conftest import ROOT, Http, Server, browser_server, until_async
from tests.browser.server.servers import browser_of
from tests.waiting import until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with browser_server() as running:
        yield running


@pytest.fixture
async def http(server: Server, client: aiohttp.ClientSession) -> Http:
    """The server, without leases."""
    http = Http(client, server.url)

    async def free() -> bool:
        return (await http("GET", "/v1/state")).json["free"] == 3

    await until_async(free, "all places free")
    return http


async def test_an_episode_from_lease_to_release(http: Http) -> None:
    lease = await http.lease(owner="a test")
    try:
        seen = await http.reset(lease, "click-test")
        assert (seen.status, seen.headers["Content-Type"]) == (200, "application/json")
        assert seen.json["instruction"] == "Click the button."
        assert "screenshot" not in seen.json
        action = (await http("GET", f"/v1/leases/{lease}/demonstration")).json
        assert action["kind"] == "left_click"
        acted = await http(
            "POST", f"/v1/leases/{lease}/step", json=action, headers={"Accept": protocol.OBSERVATION_MEDIA_TYPE}
        )
        assert acted.headers["Content-Type"] == protocol.OBSERVATION_MEDIA_TYPE
        observation = protocol.decode_observation(acted.body)
        assert isinstance(observation, Observation)
        assert observation.done
        assert observation.reward is not None
        assert observation.reward > 0.5
        image = await http("GET", f"/v1/leases/{lease}/screenshot")
        assert image.headers["Content-Type"] == "image/png"
        assert image.body == observation.screenshot
        known = (await http("GET", f"/v1/leases/{lease}")).json
        assert known["state"] == "waiting"
        assert known["owner"] == "a test"
        assert known["task"]["id"] == "miniwob/click-test/1"
        assert known["url"].endswith("/click-test.html")
        assert known["steps"] == 1
        assert 0 < known["seconds_left"] <= 60
    finally:
        assert (await http("DELETE", f"/v1/leases/{lease}")).status == 204
    gone = await http("GET", f"/v1/leases/{lease}")
    assert gone.status == protocol.STATUS_LEASE_EXPIRED
    assert gone.json == {"error": "the lease has been released", "outcome": None}


async def test_a_complete_task_of_another_source_opens_and_a_second_reset_takes_a_new_context(http: Http) -> None:
    lease = await http.lease()
    seen = await http.reset(lease, "shop-find-price", source="sites")
    assert seen.json["url"].startswith("http://shop.localhost/")
    task = (await http("GET", f"/v1/leases/{lease}")).json["task"]
    again = await http("POST", f"/v1/leases/{lease}/reset", json={"task": task})
    assert again.json["instruction"] == seen.json["instruction"]
    assert again.json["url"] == seen.json["url"]
    assert (await http("GET", "/v1/state")).json["leases"] == [lease]
    await http("DELETE", f"/v1/leases/{lease}")


async def test_a_lease_beyond_capacity_is_refused_with_retry_after(http: Http) -> None:
    leases = [await http.lease() for _ in range(3)]
    refused = await http("POST", "/v1/leases", json={})
    assert refused.status == protocol.STATUS_BUSY
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.json["error"] == "all 3 sessions of this server are leased"
    await http("DELETE", f"/v1/leases/{leases[0]}")
    leases[0] = await http.lease()
    for lease in leases:
        await http("DELETE", f"/v1/leases/{lease}")


async def test_a_thousand_simultaneous_lease_requests_get_a_lease_or_busy(http: Http) -> None:
    started = time.monotonic()
    patient = aiohttp.ClientTimeout(total=300)
    answers = await asyncio.gather(
        *(http("POST", "/v1/leases", json={"seconds": 300}, timeout=patient) for _ in range(1000))
    )
    print(f"1000 lease requests at a time: {time.monotonic() - started:.2f} s")  # noqa: T201
    assert Counter(answer.status for answer in answers) == {201: 3, protocol.STATUS_BUSY: 997}
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers if answer.status == protocol.STATUS_BUSY)
    for answer in answers:
        if answer.status == 201:
            assert (await http("DELETE", f"/v1/leases/{answer.json['id']}")).status == 204


async def test_an_unused_lease_expires_and_a_used_one_does_not(http: Http) -> None:
    kept, left = await http.lease(seconds=1.5), await http.lease(seconds=1.5)

    async def over() -> bool:
        await http("POST", f"/v1/leases/{kept}/renew")
        return (await http("GET", "/v1/state")).json["leases"] == [kept]

    await until_async(over, "the unused lease expired")
    answer = await http("POST", f"/v1/leases/{left}/step", json={"kind": "wait"})
    assert answer.status == protocol.STATUS_LEASE_EXPIRED
    assert "neither used nor renewed for 1.5 s" in answer.json["error"]
    assert (await http("GET", f"/v1/leases/{kept}")).status == 200
    await http("DELETE", f"/v1/leases/{kept}")


async def test_an_operation_longer_than_the_lifetime_keeps_its_lease(http: Http) -> None:
    lease = await http.lease(seconds=1)
    await http.reset(lease, "click-test")
    answer = await http("POST", f"/v1/leases/{lease}/step", json={"kind": "wait", "time": 2.5})
    assert answer.status == 200
    assert (await http("DELETE", f"/v1/leases/{lease}")).status == 204


async def test_a_client_killed_during_a_step_blocks_its_lease_no_longer_than_the_lifetime(
    server: Server, http: Http
) -> None:
    code = (
        "import asyncio, sys, aiohttp\n"
        "async def main(url):\n"
        "    async with aiohttp.ClientSession(url) as http:\n"
        "        async def post(path, **body):\n"
        "            async with http.post('/v1/leases' + path, json=body) as answer: return await answer.json()\n"
        "        lease = (await post('', seconds=2))['id']\n"
        "        await post(f'/{lease}/reset', source='miniwob', environment='click-test')\n"
        "        print(lease, flush=True)\n"
        "        while True: await post(f'/{lease}/step', kind='wait', time=5)\n"
        "asyncio.run(main(sys.argv[1]))\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, server.url], cwd=ROOT, stdout=subprocess.PIPE)
    assert killed.stdout is not None
    lease = (await asyncio.to_thread(killed.stdout.readline)).decode().strip()

    async def acting() -> bool:
        state = (await http("GET", "/v1/state")).json
        assert state["leases"] == [lease]
        return "acting" in (await http("GET", "/")).body.decode()

    await until_async(acting, "a step under way")
    killed.kill()
    killed.wait()
    started = asyncio.get_running_loop().time()

    async def freed() -> bool:
        return (await http("GET", "/v1/state")).json["free"] == 3

    await until_async(freed, "the place free")
    assert asyncio.get_running_loop().time() - started < 4.5  # the step alone would have taken 5 s
    assert (await http("GET", f"/v1/leases/{lease}")).status == protocol.STATUS_LEASE_EXPIRED


async def test_concurrent_operations_conflict_and_a_release_cancels_the_first(http: Http) -> None:
    lease = await http.lease()
    early = await http("POST", f"/v1/leases/{lease}/step", json={"kind": "wait"})
    assert (early.status, early.json["error"]) == (409, "there is no episode; reset begins one")
    assert (await http("GET", f"/v1/leases/{lease}/screenshot")).status == 409
    await http.reset(lease, "click-test")
    waiting = asyncio.ensure_future(http("POST", f"/v1/leases/{lease}/step", json={"kind": "wait", "time": 5}))

    async def acting() -> bool:
        return (await http("GET", f"/v1/leases/{lease}")).json["state"] == "acting"

    await until_async(acting, "a step under way")
    second = await http.reset(lease, "click-test")
    assert (second.status, "another operation" in second.json["error"]) == (409, True)
    assert (await http("DELETE", f"/v1/leases/{lease}")).status == 204
    assert (await waiting).status == 410


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("step", {"kind": "clik"}, "kind: Input should be"),
        ("step", {"kind": "left_click"}, "left_click: "),
        ("step", {"kind": "left_click", "coordinate": [1, 2000]}, "coordinate.1: Input should be less than"),
        ("step", {"kind": "left_click", "coordinates": [1, 2]}, "coordinates: "),
        ("step", {"kind": "left_click", "coordinate": [1]}, "coordinate.1: "),
        ("reset", {}, "task, source, url: give one of them, not none"),
        ("reset", {"source": "miniwob", "url": "http://x.y"}, "task, source, url: give one of them, not source and"),
        ("reset", {"source": "minniwob", "environment": "x"}, "source: 'minniwob' is not known here; near: miniwob"),
        ("reset", {"source": "miniwob", "environment": "../x"}, "environment: '../x' is not known here"),
        ("reset", {"source": "miniwob", "environment": "click-test", "seed": -1}, "seed: -1 is not within"),
        ("reset", {"task": {"id": "x", "source": "miniwob"}}, "task.environment: Field required"),
        ("reset", {"url": "http://example.com"}, "url: this server opens no web pages; start it with"),
        ("reset", {"source": "web"}, "source: give url instead"),
    ],
)  # fmt: skip
async def test_an_invalid_request_is_named_and_changes_nothing(http: Http, path: str, body: object, error: str) -> None:
    lease = await http.lease()
    await http.reset(lease, "click-test")
    answer = await http("POST", f"/v1/leases/{lease}/{path}", json=body)
    assert answer.status == 400
    assert answer.json["error"].startswith(error)
    assert (await http("POST", f"/v1/leases/{lease}/step", json={"kind": "wait", "time": 0})).status == 200
    await http("DELETE", f"/v1/leases/{lease}")


async def test_other_errors_have_the_same_form(http: Http) -> None:
    for method, path, body, status in (
        ("POST", "/v1/leases", b"{", 400),
        *(("POST", "/v1/leases", b'{"seconds": %s}' % seconds, 400) for seconds in (b"4000", b"0", b"-1", b'"nan"')),
        ("POST", "/v1/leases", b'{"owner": "two\\nlines"}', 400),
        ("POST", "/v1/leases", b'{"owner": "%s"}' % (b"x" * 65536), 413),
        ("GET", "/v1/nothing", None, 404),
        ("PUT", "/v1/leases", None, 405),
        ("GET", "/v1/leases/unknown", None, protocol.STATUS_LEASE_EXPIRED),
    ):
        answer = await http(method, path, data=body, headers={"Content-Type": "application/json"})
        assert answer.status == status
        assert set(answer.json) == {"error", "outcome"}


async def test_an_environment_without_a_scripted_policy_has_no_demonstration(http: Http) -> None:
    lease = await http.lease()
    assert (await http("GET", f"/v1/leases/{lease}/demonstration")).status == 409
    unscripted = next(name for name in all_environments() if name not in scripted_policies.supported_environments())
    await http.reset(lease, unscripted)
    answer = await http("GET", f"/v1/leases/{lease}/demonstration")
    assert (answer.status, answer.json["error"]) == (404, f"miniwob has no scripted policy for {unscripted}")
    await http("DELETE", f"/v1/leases/{lease}")


async def test_a_killed_browser_is_a_failure_with_its_outcome_and_the_lease_continues(
    server: Server, http: Http
) -> None:
    lease = await http.lease()
    await http.reset(lease, "click-test")
    waiting = asyncio.ensure_future(http("POST", f"/v1/leases/{lease}/step", json={"kind": "wait", "time": 5}))

    async def acting() -> bool:
        return (await http("GET", f"/v1/leases/{lease}")).json["state"] == "acting"

    await until_async(acting, "a step under way")
    os.kill(browser_of(psutil.Process(server.process.pid)).pid, signal.SIGKILL)
    failed = await waiting
    assert failed.status == protocol.STATUS_BROWSER_FAILED
    assert failed.json["outcome"] == "browser_crashed"
    known = (await http("GET", f"/v1/leases/{lease}")).json
    assert (known["state"], known["outcome"]) == ("crashed", "browser_crashed")
    after = await http("POST", f"/v1/leases/{lease}/step", json={"kind": "wait"})
    assert (after.status, "ended with browser_crashed" in after.json["error"]) == (409, True)
    assert (await http.reset(lease, "click-test")).status == 200
    metrics = (await http("GET", "/metrics")).body.decode()
    assert 'webrl_browsers_errors_total{outcome="browser_crashed"} 1.0' in metrics
    assert "webrl_browsers_pool_launches_total 2.0" in metrics
    await http("DELETE", f"/v1/leases/{lease}")


async def test_health_follows_the_browser(server: Server, http: Http) -> None:
    assert (await http("GET", "/healthz")).status == 200
    browser = browser_of(psutil.Process(server.process.pid))
    browser.suspend()
    try:
        sick = await http("GET", "/healthz")
    finally:
        browser.resume()
    assert sick.status == 503
    assert "answered within" in sick.body.decode()
    assert (await http("GET", "/healthz")).status == 200


async def test_metrics_and_status_page_show_the_state(http: Http) -> None:
    lease = await http.lease(owner="<b>bold</b>")
    await http.reset(lease, "click-test")
    metrics = (await http("GET", "/metrics")).body.decode()
    assert "webrl_browsers_leases_active 1.0" in metrics
    assert 'webrl_browsers_operation_seconds_count{operation="reset"}' in metrics
    assert 'webrl_browsers_episodes_total{source="miniwob"}' in metrics
    resident = next(line for line in metrics.splitlines() if line.startswith("webrl_browsers_pool_resident_mib"))
    assert float(resident.split()[1]) > 20
    page = (await http("GET", "/")).body.decode()
    assert "waiting for the client" in page
    assert "miniwob/click-test" in page
    assert "&lt;b&gt;bold" in page
    assert lease not in page
    assert "http://" not in page.replace(http.url, "")  # nothing comes from elsewhere
    await http("DELETE", f"/v1/leases/{lease}")


async def test_the_openapi_document_is_complete(http: Http) -> None:
    document = (await http("GET", "/openapi.json")).json
    step = document["paths"]["/v1/leases/{lease}/step"]["post"]
    assert {"200", "400", "401", "403", "409", "410", "413", "4XX", "502"} <= set(step["responses"])
    assert set(step["responses"]["200"]["content"]) == {"application/json", protocol.OBSERVATION_MEDIA_TYPE}
    assert step["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/StepRequest")
    assert {"Task-Input", "Observation", "Lease", "LeaseState", "ErrorResponse", "ServerState"} <= set(
        document["components"]["schemas"]
    )
    shot = document["paths"]["/v1/leases/{lease}/screenshot"]["get"]["responses"]["200"]["content"]
    assert {"image/png", "image/jpeg", "image/webp"} <= set(shot)
    assert "422" not in str(document)
    for path in ("/docs", "/redoc"):
        assert (await http("GET", path)).status == 404


async def test_tasks_lists_every_environment(http: Http) -> None:
    sources = (await http("GET", "/v1/tasks")).json["sources"]
    assert set(sources) == {"miniwob", "sites"}
    assert len(sources["miniwob"]) > 100
    assert "shop-find-price" in sources["sites"]


async def test_many_concurrent_episodes_leave_nothing_behind(server: Server, http: Http) -> None:
    async def episode(seed: int) -> float:
        lease = await http.lease()
        try:
            await http.reset(lease, "click-test", seed)
            action = (await http("GET", f"/v1/leases/{lease}/demonstration")).json
            return (await http("POST", f"/v1/leases/{lease}/step", json=action)).json["reward"]
        finally:
            await http("DELETE", f"/v1/leases/{lease}")

    assert all(reward > 0 for reward in await asyncio.gather(*(episode(seed) for seed in range(3))))
    until(lambda: len(server.children()) < 40, "few processes")
