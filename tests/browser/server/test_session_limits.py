"""A browser server refuses more sessions than the limits of processes and files allow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from megatron_webrl.browser.server.server_main import (
    FILES_OF_PROCESS,
    FILES_PER_SESSION,
    TASKS_OF_SERVER,
    TASKS_PER_SESSION,
    pids_problems,
)
from tests.browser.server.conftest import LIMIT, ROOT, SMALL, Http, browser_server

SERVE = [sys.executable, "-m", "megatron_webrl", "browsers", "serve", "--port", "0", "--sessions", "20", *SMALL]


def refusal(prefix: str) -> str:
    """The error of a server with 20 sessions that a shell starts after `prefix`."""
    command = ["bash", "-c", f'{prefix} exec "$@"', "bash", *SERVE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


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


def test_too_few_open_files_are_refused() -> None:
    said = refusal("ulimit -n 150;")
    assert "--sessions=20 needs 164 open files of a process, but ulimit -Hn is 150; raise it" in said


async def test_the_assumed_needs_are_those_of_small_pages(client: aiohttp.ClientSession) -> None:
    sessions = 4
    with browser_server(sessions=sessions) as server:
        http = Http(client, server.url)
        for number in range(sessions):
            assert (await http.reset(await http.lease(), "click-test", number)).status == 200
        processes = [psutil.Process(server.process.pid), *server.children()]
        tasks, files = sum(each.num_threads() for each in processes), max(each.num_fds() for each in processes)
    assert 0.7 * tasks < TASKS_OF_SERVER + TASKS_PER_SESSION * sessions < 1.1 * tasks
    assert 0.7 * files < FILES_OF_PROCESS + FILES_PER_SESSION * sessions < 1.3 * files
