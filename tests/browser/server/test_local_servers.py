"""Local browser servers: they serve, restart, and end with their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from megatron_webrl.browser.server import local_servers as local_servers_module
from megatron_webrl.browser.server.client import BrowserClient
from megatron_webrl.browser.server.local_servers import LocalServers, local_servers
from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import ProcessError, is_alive, start_time
from tests.browser.server.servers import LIMIT, click_task, config_for, server_processes, until


def below(process: psutil.Process) -> list[tuple[int, int]]:
    """A process and its descendants, by pid and start time."""
    return [(each.pid, start_time(each.pid)) for each in [process, *process.children(recursive=True)]]


def running(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [process for process in found if is_alive(*process)]


@pytest.mark.alone
async def test_closing_leaves_no_process_no_file_and_nothing_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = set(os.listdir("/dev/shm"))
    async with local_servers(config_for(processes=2), 3, tmp_path / "logs", "mine") as servers:
        assert len(servers.addresses()) == 2
        async with BrowserClient(servers.poll_addresses, servers.token) as browsers:
            assert sorted([(await browsers.server_state(url)).sessions for url in servers.addresses()]) == [1, 2]
            async with browsers.session() as session:
                await session.reset(click_task())
                found = [process for server in server_processes() for process in below(server)]
    assert len(found) > 6  # servers, drivers, Chromium
    assert not running(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["mine-0.log", "mine-1.log"]
    assert set(os.listdir("/dev/shm")) <= shared


async def test_a_killed_server_is_restarted_a_limited_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_servers_module, "MAX_RESTARTS", 1)
    async with (
        local_servers(config_for(), 1) as servers,
        BrowserClient(servers.poll_addresses, servers.token, wait_seconds=60) as browsers,
    ):
        [first] = server_processes()
        first.kill()
        async with browsers.session() as session:  # waits for the restarted server
            assert (await session.reset(click_task())).instruction == "Click the button."
        [second] = server_processes()
        assert second != first
        second.kill()
        with pytest.raises(ProcessError, match=r"browsers-0 killed by SIGKILL; last log line: .*, after 1 restarts"):
            async with browsers.session():
                raise AssertionError("there is no place")


async def test_a_server_that_cannot_start_is_an_error_with_its_last_log_line(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match=r"browsers-0 exited with code 1; last log line: .*/bin/true does not start"):
        async with local_servers(config_for(executable="/bin/true"), 1):
            raise AssertionError("it is not up")
    assert not server_processes()


def test_servers_are_started_from_the_main_thread_only() -> None:
    servers = LocalServers(config_for(), 1)
    try:
        with pytest.raises(ProcessError, match="must be started from the main thread"):
            asyncio.run(asyncio.to_thread(servers.start))
    finally:
        servers.close()


async def test_servers_and_their_browsers_end_with_a_killed_parent(tmp_path: Path) -> None:
    code = """
import asyncio
from megatron_webrl.browser.server.client import BrowserClient
from megatron_webrl.browser.server.local_servers import local_servers
from tests.browser.server.servers import click_task, config_for

async def main():
    async with (
        local_servers(config_for(processes=2), 2) as servers,
        BrowserClient(servers.poll_addresses, servers.token) as browsers,
    ):
        async with browsers.session() as a, browsers.session() as b:
            await asyncio.gather(a.reset(click_task()), b.reset(click_task()))
            print("ready", flush=True)
            await asyncio.sleep(600)

asyncio.run(main())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    found: list[tuple[int, int]] = []
    try:
        assert parent.stdout is not None
        assert await asyncio.wait_for(asyncio.to_thread(parent.stdout.readline), 2 * LIMIT) == b"ready\n"
        found = below(psutil.Process(parent.pid))
        assert len(found) > 6  # servers, drivers, Chromium
        parent.kill()
        parent.wait(LIMIT)
        await until(lambda: not running(found), "all of them dead")
    finally:
        parent.kill()
        for pid, _ in running(found):
            os.kill(pid, signal.SIGKILL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        assert len(child_process.sweep_scratch()) == 1
    assert not list(tmp_path.iterdir())
