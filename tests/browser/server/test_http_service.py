"""Process of a browser server: access, TLS, limits, start and shutdown."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
import trustme

from megatron_webrl.browser.server.client import BrowserClient, ServerUnreachable
from megatron_webrl.browser.server.server_main import (
    FILES_OF_PROCESS,
    FILES_PER_SESSION,
    TASKS_OF_SERVER,
    TASKS_PER_SESSION,
    pids_problems,
)
from megatron_webrl.cli import main
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.http.access import client_context, server_context
from megatron_webrl.types import Action
from tests.browser.browser_processes import alive_pids
from tests.browser.server.conftest import LIMIT, ROOT, Http, Server, browser_server
from tests.browser.server.servers import click_task
from tests.waiting import exit_code, fork, until

TOKEN = secrets.token_urlsafe(24)
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def test_bad_options_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for token, arguments, error in (
        ("", ["--host", "0.0.0.0", "--port", "0"], "WEBRL_BROWSERS_TOKEN is not set, and --host=0.0.0.0 is not a loop"),
        ("hunter2", ["--port", "0"], "at least 16"),
        (TOKEN, ["--token-file", str(tmp_path / "none")], "cannot be read"),
        (TOKEN, ["--token-file", str(tmp_path / "empty")], "is empty"),
        (TOKEN, ["--sessions", "0"], "--sessions=0 must be at least 1"),
        (TOKEN, ["browser.width=3"], "browser.width=3 must be at least 32"),
        (TOKEN, ["no-such.yaml"], "configuration no-such.yaml is not a file"),
        (TOKEN, ["--host", "192.0.2.1"], "cannot listen on --host=192.0.2.1 --port=8700"),  # nobody's address
    ):
        monkeypatch.setenv("WEBRL_BROWSERS_TOKEN", token)
        assert main(["browsers", "serve", *arguments]) == 2
        said = capsys.readouterr()
        assert (said.out, len(said.err.splitlines())) == ("", 1)
        assert error in said.err
        assert not token or token not in said.err


@pytest.mark.parametrize(("mount", "line"), [("", "0::/a/b"), ("pids", "7:pids:/a/b"), ("", "0::/of/the/host/a/b")])
def test_every_group_above_this_process_counts(tmp_path: Path, mount: str, line: str) -> None:
    groups, root = tmp_path / "groups", tmp_path / "root"
    groups.write_text(f"3:memory:/x\n{line}\n")
    above = root / mount if "host" in line else root / mount / "a"
    for folder, limit, used in ((root / mount / "a" / "b", "max", 5), (above, "100", 30)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pids.max").write_text(f"{limit}\n")
        (folder / "pids.current").write_text(f"{used}\n")
    assert list(pids_problems(70, groups, root)) == []
    assert [problem.partition(" (")[0] for problem in pids_problems(71, groups, root)] == [
        f"pids.max of {above} is 100, of which 30 are used"
    ]


def test_too_few_open_files_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    def serve() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150))
        assert main(["browsers", "serve", "--port", "0", "--sessions", "20"]) == 2

    assert exit_code(fork(serve)) == 0
    error = capfd.readouterr().err
    assert "--sessions=20 needs 164 open files of a process, but ulimit -Hn is 150; raise it" in error
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on a public address that opens pages of the web."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN + "\n")
    user = ["browser.user=nobody"] if os.geteuid() == 0 else []
    options = ("--host", "0.0.0.0", "--token-file", str(file), "browser.open_web=true", *user)
    with browser_server(*options, sessions=1) as server:
        assert TOKEN not in " ".join(psutil.Process(server.process.pid).cmdline())
        port = server.url.rpartition(":")[2]
        yield Server(f"http://127.0.0.1:{port}", server.process)


async def test_every_path_of_the_api_needs_the_token(guarded: Server, client: aiohttp.ClientSession) -> None:
    http = Http(client, guarded.url)
    for method, path in (
        ("GET", "/v1/state"), ("GET", "/v1/tasks"), ("POST", "/v1/leases"), ("GET", "/v1"),
        ("GET", "/v1/leases/x"), ("DELETE", "/v1/leases/x"), ("POST", "/v1/leases/x/step"), ("GET", "/v1/nothing"),
    ):  # fmt: skip
        for wrong in (None, TOKEN, f"Bearer {TOKEN}x", "Bearer \xe9"):
            answer = await http(method, path, headers={} if wrong is None else {"Authorization": wrong})
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert set(answer.json) == {"error", "outcome"}
            assert TOKEN not in answer.body.decode()
        assert (await http(method, path, headers=BEARER)).status not in (401, 403)
    for path in ("/healthz", "/metrics", "/", "/openapi.json"):
        assert (await http("GET", path)).status in (200, 503)
    assert (await http("GET", "/openapi.json")).json["paths"]["/v1/state"]["get"]["security"] == [{"client": []}]
    assert (await http("GET", "/v1/state", headers={**BEARER, "Host": "browsers.example"})).status == 200


async def test_pages_reach_nothing_of_this_machine(guarded: Server, client: aiohttp.ClientSession) -> None:
    http = Http(client, guarded.url, BEARER)
    port = guarded.url.rpartition(":")[2]
    assert (await http("GET", "/v1/tasks")).json["sources"]["web"] == ["page"]
    lease = await http.lease()
    answer = await http("POST", f"/v1/leases/{lease}/reset", json={"url": f"http://localhost:{port}/v1/state"})
    assert (answer.status, answer.json["outcome"]) == (502, "browser_error")
    assert "is refused" in answer.json["error"]
    await http.reset(lease, "click-test")
    step = await http("POST", f"/v1/leases/{lease}/step", json={"kind": "navigate", "url": guarded.url})
    assert "may not be opened" in step.json["error"]
    for url, error in (("ftp://example.com", "url: "), ("x", "url: "), ("ws://example.com", "url: ws")):
        bad = await http("POST", f"/v1/leases/{lease}/reset", json={"url": url})
        assert (bad.status, bad.json["error"].startswith(error)) == (400, True)


class TlsFiles(NamedTuple):
    certificate: Path
    key: Path


def authority(folder: Path) -> tuple[Path, TlsFiles]:
    """A new certificate authority and a certificate of it for 127.0.0.1."""
    folder.mkdir()
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    files = TlsFiles(folder / "certificate.pem", folder / "key.pem")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(files.key)
    return folder / "ca.pem", files


async def test_a_server_with_tls_has_the_assumed_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca, files = authority(tmp_path / "server")
    tls = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    environment = {"WEBRL_BROWSERS_TOKEN": TOKEN, "WEBRL_BROWSERS_CA": str(ca)}
    sessions = 3
    with browser_server(*tls, "browser.max_requests=6", sessions=sessions, **environment) as server:
        scheme, port = urlsplit(server.url).scheme, urlsplit(server.url).port
        assert scheme == "https"
        stalled = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        async with BrowserClient(server.url) as browsers, AsyncExitStack() as stack:
            await browsers.wait_until_ready(LIMIT)
            used = [await stack.enter_async_context(browsers.session()) for _ in range(sessions)]
            seen = (await asyncio.gather(*(session.reset(click_task()) for session in used)))[0]
            processes = [psutil.Process(server.process.pid), *server.children()]
            tasks, files_open = (
                sum(each.num_threads() for each in processes), max(each.num_fds() for each in processes)
            )  # fmt: skip
            assert 0.7 * tasks < TASKS_OF_SERVER + TASKS_PER_SESSION * sessions < 1.1 * tasks
            assert 0.7 * files_open < FILES_OF_PROCESS + FILES_PER_SESSION * sessions < 1.3 * files_open
            assert (await used[0].lease_state()).refused_requests == {}
            for number in range(4):  # pages that no cache holds
                await used[0].step(Action("navigate", url=f"{seen.url}?{number}"))
            assert (await used[0].lease_state()).refused_requests["requests"] >= 1
            for _, writer in stalled:
                writer.close()
            other, _ = authority(tmp_path / "other")
            monkeypatch.setenv("WEBRL_BROWSERS_CA", str(other))
            async with BrowserClient(server.url) as strangers:
                with pytest.raises(ServerUnreachable, match="certificate"):
                    await strangers.wait_until_ready(0.5)
            async with aiohttp.ClientSession() as plain:
                with pytest.raises(aiohttp.ClientError):
                    await plain.get(f"http://127.0.0.1:{port}/healthz")
            acting = asyncio.ensure_future(used[0].step(Action("wait", time=2)))
            while (await used[0].lease_state()).state != "acting":
                await asyncio.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.process.wait, LIMIT) == 0
            until(lambda: not alive_pids(process.pid for process in processes), "no process left")
            await asyncio.gather(acting, return_exceptions=True)


def test_unusable_files_of_tls_are_named(tmp_path: Path) -> None:
    _, files = authority(tmp_path / "server")
    _, others = authority(tmp_path / "other")
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for certificate, key in ((files.certificate, others.key), (broken, files.key), (tmp_path / "none", files.key)):
        with pytest.raises(ConfigError, match=f"--tls-certificate={certificate} with --tls-key={key} cannot be used"):
            server_context(certificate, key)
    with pytest.raises(ConfigError, match=f"WEBRL_BROWSERS_CA={broken} cannot be used"):
        client_context(str(broken), "WEBRL_BROWSERS_CA")


def test_modules_import_nothing_heavy() -> None:
    code = "import sys"
    for module, heavy in (
        ("commands", "torch fastapi aiohttp playwright"), ("client", "playwright torch vllm"), ("server_main", "torch"),
    ):  # fmt: skip
        code += f", megatron_webrl.browser.server.{module}; print(set({heavy.split()}) & set(sys.modules)); import sys"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT) == b"set()\n" * 3
