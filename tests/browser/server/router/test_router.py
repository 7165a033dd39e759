"""A router and its servers, as processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.router.router import Router
from megatron_webrl.config.browser import BrowserConfig
from tests.browser.server.conftest import Http, Server, browser_server, serving, until_async
from tests.waiting import until

CONCURRENT = 1000
VIEW = protocol.SessionSpec.from_config(BrowserConfig())


class Farm:
    """A router and two servers, with four and two sessions."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.router: Server = stack.enter_context(serving("route"))
        self.servers: list[Server] = [
            stack.enter_context(browser_server("--router", self.router.url, sessions=sessions)) for sessions in (4, 2)
        ]

    def restart_router(self) -> None:
        """Kill the router and restart it at the same address."""
        self.router.process.kill()
        self.router.process.wait()
        port = urlsplit(self.router.url).port
        self.router = self._stack.enter_context(serving("route", "--port", str(port)))


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    with ExitStack() as stack:
        yield Farm(stack)


@pytest.fixture
async def http(farm: Farm, client: aiohttp.ClientSession) -> Http:
    """The router, with both servers registered and without leases."""
    http = Http(client, farm.router.url)

    async def free() -> bool:
        state = (await http("GET", "/v1/state")).json
        return (state["sessions"], state["free"], state["leases"]) == (6, 6, 0)

    await until_async(free, "all places free")
    return http


async def release(client: aiohttp.ClientSession, leases: list[dict[str, str]]) -> None:
    for lease in leases:
        assert (await Http(client, lease["server"])("DELETE", f"/v1/leases/{lease['id']}")).status == 204


async def test_leases_go_to_the_server_with_the_most_free_sessions(
    farm: Farm, http: Http, client: aiohttp.ClientSession
) -> None:
    leases = [(await http("POST", "/v1/leases", json={})).json for _ in range(3)]
    assert [lease["server"] for lease in leases[:2]] == [farm.servers[0].url] * 2  # of 4 and 2, then of 3 and 2
    rest = [(await http("POST", "/v1/leases", json={})).json for _ in range(3)]
    used = Counter(lease["server"] for lease in leases + rest)
    assert used == {farm.servers[0].url: 4, farm.servers[1].url: 2}
    refused = await http("POST", "/v1/leases", json={})
    assert refused.status == protocol.STATUS_BUSY
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.json["error"] == "all 6 sessions of 2 servers are leased"
    await release(client, leases[:1])

    async def another() -> dict[str, str] | None:
        answer = await http("POST", "/v1/leases", json={})
        return answer.json if answer.status == 201 else None

    leases[0] = await until_async(another, "a place that was given back is found", 5.0)
    await release(client, leases + rest)


async def test_requests_about_a_lease_are_redirected_to_its_server(farm: Farm, http: Http) -> None:
    lease = (await http("POST", "/v1/leases", json={"seconds": 30, "owner": "a test"})).json
    path = f"/v1/leases/{lease['id']}"
    sent = await http("GET", f"{path}?x=1")
    assert sent.status == 307
    assert sent.headers["Location"] == f"{lease['server']}{path}?x=1"
    asked = {"source": "miniwob", "environment": "click-test", "seed": 1}
    seen = await http("POST", f"{path}/reset", json=asked, follow=True)
    assert seen.json["instruction"] == "Click the button."
    shown = await http("GET", f"{path}/screenshot", follow=True)
    assert shown.headers["Content-Type"] == "image/png"
    assert (await http("POST", f"{path}/renew", follow=True)).json == lease
    assert (await http("GET", path, follow=True)).json["owner"] == "a test"
    assert (await http("DELETE", path, follow=True)).status == 204
    assert (await http("GET", path, follow=True)).status == protocol.STATUS_LEASE_EXPIRED
    bad = await http("POST", "/v1/leases", json={"seconds": -1})
    assert (bad.status, bad.json["error"][:8]) == (400, "seconds:")


async def test_a_thousand_simultaneous_lease_requests_get_a_lease_or_busy(
    farm: Farm, http: Http, client: aiohttp.ClientSession
) -> None:
    started = time.monotonic()
    patient = aiohttp.ClientTimeout(total=300)
    answers = await asyncio.gather(
        *(http("POST", "/v1/leases", json={"seconds": 300}, timeout=patient) for _ in range(CONCURRENT))
    )
    seconds = time.monotonic() - started
    found = Counter(answer.status for answer in answers)
    assert set(found) == {201, protocol.STATUS_BUSY}
    assert found[201] <= 6
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers if answer.status == protocol.STATUS_BUSY)
    print(f"{CONCURRENT} lease requests at a time, {found[201]} leases: {seconds:.2f} s")  # noqa: T201
    await release(client, [answer.json for answer in answers if answer.status == 201])


async def test_a_restarted_router_learns_servers_and_leases(farm: Farm, http: Http) -> None:
    lease = (await http("POST", "/v1/leases", json={})).json
    path = f"/v1/leases/{lease['id']}"
    farm.restart_router()  # by this thread: processes die with the one that started them

    async def found() -> bool:
        answer = await http("GET", path)
        assert answer.status in (307, protocol.STATUS_BUSY), answer.body  # never lost
        return answer.status == 307

    await until_async(found, "the lease's server registered")

    async def listed() -> bool:
        state = (await http("GET", "/v1/state")).json
        return any(lease["id"] in known["leases"] for known in state["servers"])

    await until_async(listed, "the lease listed")
    assert (await http("DELETE", path, follow=True)).status == 204


async def test_a_dead_server_loses_its_leases_at_once_and_others_replace_it(
    farm: Farm, http: Http, client: aiohttp.ClientSession
) -> None:
    with browser_server("--router", farm.router.url, sessions=8) as doomed:

        async def known() -> bool:
            return (await http("GET", "/v1/state")).json["sessions"] == 14

        await until_async(known, "the third server registered")
        lease = (await http("POST", "/v1/leases", json={})).json
        assert lease["server"] == doomed.url
        await Http(client, doomed.url).reset(lease["id"], "click-test")
        below = doomed.children()
        assert len(below) >= 3
        doomed.process.send_signal(signal.SIGKILL)
        doomed.process.wait()
        other = (await http("POST", "/v1/leases", json={})).json  # which finds out
        assert other["server"] in [server.url for server in farm.servers]
        lost = await http("POST", f"/v1/leases/{lease['id']}/step", json={"kind": "wait"})
        assert lost.status == protocol.STATUS_LEASE_EXPIRED
        assert lost.json["error"] == f"browser server {doomed.url} refuses connections; its leases are lost"
        assert (await http("GET", "/v1/state")).json["sessions"] == 6
        await release(client, [other])
        until(lambda: not any(_runs(process) for process in below), "its browsers ended with it")


async def test_a_silent_server_is_dead_until_its_next_heartbeat(farm: Farm, http: Http) -> None:
    lease = (await http("POST", "/v1/leases", json={})).json
    silent = next(server for server in farm.servers if server.url == lease["server"])
    os.kill(silent.process.pid, signal.SIGSTOP)
    try:

        async def lost() -> bool:
            return (await http("GET", f"/v1/leases/{lease['id']}")).status == protocol.STATUS_LEASE_EXPIRED

        await until_async(lost, "the lease lost", 30.0)
        answer = await http("GET", f"/v1/leases/{lease['id']}")
        assert answer.json["error"].startswith(f"browser server {lease['server']} sent no heartbeat for")
        assert (await http("GET", "/healthz")).status == 200  # the other server is alive
    finally:
        os.kill(silent.process.pid, signal.SIGCONT)

    async def back() -> bool:
        return (await http("GET", f"/v1/leases/{lease['id']}")).status == 307

    await until_async(back, "the lease found again")
    assert (await http("DELETE", f"/v1/leases/{lease['id']}", follow=True)).status == 204


async def test_the_router_shows_its_servers_and_their_environments(farm: Farm, http: Http) -> None:
    sources = (await http("GET", "/v1/tasks")).json["sources"]
    assert "click-test" in sources["miniwob"]
    page = (await http("GET", "/")).body.decode()
    assert all(server.url in page for server in farm.servers)
    metrics = (await http("GET", "/metrics")).body.decode()
    assert "webrl_router_servers 2.0" in metrics
    document = (await http("GET", "/openapi.json")).json
    sent_on = document["paths"]["/v1/leases/{lease}/{operation}"]["post"]["responses"]
    assert set(sent_on) == {"307", "400", "401", "403", "410", "413", "503"}
    unknown = await http("GET", "/v1/leases/12345678-secret")
    assert unknown.status in (protocol.STATUS_LEASE_EXPIRED, protocol.STATUS_BUSY)


async def test_a_suspended_router_counts_no_server_as_dead() -> None:
    now = 1000.0
    async with Router(None, lambda: now) as router:
        router.register(protocol.ServerState("http://server", "b007", sessions=2, free=2, spec=VIEW))
        assert router.server_of("b007-secret") == "http://server"
        await asyncio.sleep(0)  # the router looks at the clock
        now += 100
        assert router.server_of("b007-secret") == "http://server"
        assert router.state().servers[0].alive


async def test_a_router_without_servers_grants_no_leases_and_is_unhealthy(client: aiohttp.ClientSession) -> None:
    with serving("route") as server:
        http = Http(client, server.url)
        for path, method in (("/v1/leases", "POST"), ("/healthz", "GET")):
            answer = await http(method, path, json={})
            assert answer.status == 503
            assert b"no browser server has sent a heartbeat lately" in answer.body
        state = protocol.ServerState("file:///x", "1", 1, 1, VIEW)
        wrong = await http(
            "POST", "/v1/servers", data=protocol.dump(state), headers={"Content-Type": "application/json"}
        )
        assert (wrong.status, "file:///x" in wrong.json["error"]) == (400, True)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
