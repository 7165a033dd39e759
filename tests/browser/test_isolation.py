"""Browsers of a root process: as another user, in a network of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.config.browser import BrowserConfig, check_browser_user
from megatron_webrl.config.setting import ConfigError
from tests.browser.conftest import FolderSite, page_task
from tests.browser.egress.proxy_client import OK, Server, answering

CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)"


def test_the_open_web_needs_a_user_of_its_own_where_the_process_is_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match=r"set browser\.user=nobody or another user, run as another user, or set"):
        check_browser_user(BrowserConfig(open_web=True))
    for settings in ({"open_web": True, "user": "nobody"}, {"open_web": True, "user": "root"}, {}):
        check_browser_user(BrowserConfig(**settings))  # type: ignore[arg-type]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check_browser_user(BrowserConfig(open_web=True))
    with pytest.raises(ConfigError, match=r"browser\.user=nobody needs root"):
        check_browser_user(BrowserConfig(user="nobody"))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@needs_root
def test_an_unknown_user_and_root_under_another_name_are_refused(site: FolderSite) -> None:
    for user, message in (("no-such-user", "is not a user of this machine"), ("0", "is root under another name")):
        with pytest.raises(ConfigError, match=message):
            BrowserPool(BrowserConfig(user=user), {"site": site}, 1)


@needs_root
async def test_browsers_run_as_their_user_and_reach_only_the_egress_proxy(site: FolderSite) -> None:
    async with (
        Server(answering(OK)) as neighbour,
        BrowserPool(BrowserConfig(width=400, height=300, user="nobody"), {"site": site}, 1) as pool,
        pool.episode(page_task("first")) as (session, observation),
    ):
        assert observation.title == "First"
        assert pool._isolation is not None
        namespace = pool._isolation.namespace
        assert namespace is not None
        (browser,) = pool.browsers
        chromium = psutil.Process(browser.chromium.pid)
        processes = [chromium, *chromium.children(recursive=True)]
        assert len(processes) > 2
        assert {process.uids() for process in processes} == {(65534, 65534, 65534)}
        assert "--no-sandbox" not in chromium.cmdline()
        own = os.readlink(namespace)
        assert own != os.readlink("/proc/self/ns/net")
        assert os.readlink(f"/proc/{chromium.pid}/ns/net") == own
        assert "NoNewPrivs:\t1" in Path(f"/proc/{chromium.pid}/status").read_text()

        def reaches(port: int) -> bool:
            command = ["nsenter", f"--net={namespace}", sys.executable, "-c", CONNECT, str(port)]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        assert reaches(session.network.port)
        assert not reaches(neighbour.port)
        assert neighbour.connections == 0
        interfaces = subprocess.run(
            ["nsenter", f"--net={namespace}", "ip", "-o", "link"], capture_output=True, text=True, check=True
        ).stdout
        assert [line.split()[1] for line in interfaces.splitlines()] == ["lo:"]
        home = browser.chromium._home
        assert home is not None
        assert home.is_dir()
    assert not home.exists()
