"""Process of a browser server: access, start and shutdown."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from megatron_webrl.cli import main
from tests.browser.server.conftest import LIMIT, ROOT, SMALL, Http, Server, browser_server
from tests.waiting import until

TOKEN = secrets.token_urlsafe(24)
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The error of `webrl browsers ...`."""

    def run(*arguments: str, token: str) -> str:
        monkeypatch.setenv("WEBRL_BROWSERS_TOKEN", token)
        assert main(["browsers", *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert len(said.err.splitlines()) == 1
        return said.err

    return run


def all_gone(processes: list[psutil.Process]) -> bool:
    return not [process for process in processes if process.is_running() and _state(process) != psutil.STATUS_ZOMBIE]


def _state(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def test_off_loopback_a_token_is_required(refusal: Callable[..., str], tmp_path: Path) -> None:
    said = refusal("serve", "--host", "0.0.0.0", "--port", "0", token="")
    assert "WEBRL_BROWSERS_TOKEN is not set, and --host=0.0.0.0 is not a loopback address" in said
    assert "--token-file" in said
    short = refusal("serve", "--port", "0", token="hunter2")
    assert "at least 16" in short
    assert "hunter2" not in short
    assert "cannot be read" in refusal("serve", "--token-file", str(tmp_path / "none"), token=TOKEN)
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "not a text" in refusal("serve", "--token-file", str(tmp_path / "binary"), token=TOKEN)
    assert "is empty" in refusal("serve", "--token-file", str(tmp_path / "empty"), token=TOKEN)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--max-connections", "0"], "--max-connections=0 must be at least 1"),
        (["--sessions", "0"], "--sessions=0 must be at least 1"),
        (["browser.colour=red"], "unknown setting browser.colour in an override"),
        (["browser.width=3"], "browser.width=3 must be at least 32"),
        (["no-such.yaml"], "configuration no-such.yaml is not a file"),
        (["--host", "192.0.2.1"], "cannot listen on --host=192.0.2.1 --port=8700"),  # nobody's address
    ],
)
def test_invalid_options_are_refused_before_anything_starts(
    arguments: list[str], error: str, refusal: Callable[..., str]
) -> None:
    assert error in refusal("serve", *arguments, token=TOKEN)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on a public address."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN + "\n")
    with browser_server("--host", "0.0.0.0", "--token-file", str(file), sessions=1) as server:
        assert TOKEN not in " ".join(psutil.Process(server.process.pid).cmdline())
        port = server.url.rpartition(":")[2]
        yield Server(f"http://127.0.0.1:{port}", server.process)


async def test_every_path_of_the_api_needs_the_token(guarded: Server, client: aiohttp.ClientSession) -> None:
    http = Http(client, guarded.url)
    paths = [
        ("GET", "/v1/state"), ("GET", "/v1/tasks"), ("POST", "/v1/leases"), ("GET", "/v1"),
        ("GET", "/v1/leases/x"), ("DELETE", "/v1/leases/x"), ("POST", "/v1/leases/x/step"), ("GET", "/v1/nothing"),
    ]  # fmt: skip
    for method, path in paths:
        wrong = [{}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": "Bearer \xe9"}]
        for headers in wrong:
            answer = await http(method, path, headers=headers)
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert set(answer.json) == {"error", "outcome"}
            assert TOKEN not in answer.body.decode()
        assert (await http(method, path, headers=BEARER)).status not in (401, 403)
    for path in ("/healthz", "/metrics", "/", "/openapi.json"):
        assert (await http("GET", path)).status in (200, 503)
    assert (await http("GET", "/openapi.json")).json["paths"]["/v1/state"]["get"]["security"] == [{"client": []}]
    assert (await http("GET", "/v1/state", headers={**BEARER, "Host": "browsers.example"})).status == 200


async def test_without_a_token_only_loopback_hosts_and_own_pages_are_accepted(
    client: aiohttp.ClientSession,
) -> None:
    with browser_server(sessions=1, WEBRL_BROWSERS_TOKEN="") as server:
        http, place = Http(client, server.url), server.url.removeprefix("http://")
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
        own = await http("GET", "/v1/state", headers={"Origin": server.url})
        assert own.status == 200


async def test_large_bodies_are_refused_with_any_encoding(guarded: Server, client: aiohttp.ClientSession) -> None:
    http = Http(client, guarded.url)
    body = b'{"owner": "' + b"x" * 70_000 + b'"}'

    async def in_pieces():  # type: ignore[no-untyped-def]
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]
            await asyncio.sleep(0)

    headers = {**BEARER, "Content-Type": "application/json"}
    for data, status, error in (
        (body, 413, "the body is larger than 65536 bytes"), (in_pieces(), 411, "send the body with Content-Length"),
    ):  # fmt: skip
        answer = await http("POST", "/v1/leases", data=data, headers=headers)
        assert (answer.status, error in answer.json["error"]) == (status, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_terminated_server_leaves_no_process(client: aiohttp.ClientSession, number: signal.Signals) -> None:
    with browser_server(sessions=2) as server:
        http = Http(client, server.url)
        lease = await http.lease()
        await http.reset(lease, "click-test")
        waiting = asyncio.ensure_future(http("POST", f"/v1/leases/{lease}/step", json={"kind": "wait", "time": 2}))
        below = server.children()
        assert len(below) >= 3
        server.process.send_signal(number)
        assert await asyncio.to_thread(server.process.wait, LIMIT) == 0
        until(lambda: all_gone(below), "no process left")
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_server_ends_with_its_parent_if_configured(client: aiohttp.ClientSession, tmp_path: Path) -> None:
    file = tmp_path / "address"
    command = [
        sys.executable, "-m", "megatron_webrl", "browsers", "serve", "--port", "0", "--sessions", "1",
        "--address-file", str(file), "--die-with-parent", *SMALL,
    ]  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        until(file.exists, "an address")
        below = psutil.Process(parent.pid).children(recursive=True)
        assert len(below) >= 4  # server, driver, browser, renderer
    finally:
        parent.kill()
        parent.wait()
    until(lambda: all_gone(below), "no process left")


async def test_pages_reach_neither_the_server_nor_anything_else_of_this_machine(client: aiohttp.ClientSession) -> None:
    user = ["browser.user=nobody"] if os.geteuid() == 0 else []
    with browser_server("browser.open_web=true", *user, sessions=1) as server:
        http = Http(client, server.url)
        port = server.url.rpartition(":")[2]
        assert (await http("GET", "/v1/tasks")).json["sources"]["web"] == ["page"]
        lease = await http.lease()
        for host in ("127.0.0.1", "localhost", "[::1]", "2130706433"):
            url = f"http://{host}:{port}/v1/state"
            answer = await http("POST", f"/v1/leases/{lease}/reset", json={"url": url})
            assert (answer.status, answer.json["outcome"]) == (502, "browser_error")
            assert "is refused" in answer.json["error"]
        await http.reset(lease, "click-test")
        step = await http("POST", f"/v1/leases/{lease}/step", json={"kind": "navigate", "url": server.url})
        assert "may not be opened" in step.json["error"]
        for url, error in (("ftp://example.com", "url: "), ("x", "url: "), ("ws://example.com", "url: ws")):
            bad = await http("POST", f"/v1/leases/{lease}/reset", json={"url": url})
            assert (bad.status, bad.json["error"].startswith(error)) == (400, True)


async def test_a_lease_counts_the_refused_requests_of_its_pages(client: aiohttp.ClientSession) -> None:
    with browser_server("browser.max_requests=6", sessions=1) as server:
        http = Http(client, server.url)
        lease = await http.lease()
        await http.reset(lease, "click-test")
        state = (await http("GET", f"/v1/leases/{lease}")).json
        assert state["refused_requests"] == {}
        for number in range(6):  # pages that no cache holds
            url = f"{state['url']}?{number}"
            await http("POST", f"/v1/leases/{lease}/step", json={"kind": "navigate", "url": url})
        assert (await http("GET", f"/v1/leases/{lease}")).json["refused_requests"]["requests"] >= 1


def test_a_server_needs_no_torch() -> None:
    for module in ("server_main", "commands"):
        code = f"import sys, megatron_webrl.browser.server.{module}; print('torch' in sys.modules)"
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "False"
    heavy = "{'fastapi', 'aiohttp', 'playwright'}"
    code = f"import sys, megatron_webrl.browser.server.commands; print({heavy} & set(sys.modules))"
    cheap = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert cheap.stdout.strip() == "set()"
