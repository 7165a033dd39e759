"""A test run that is killed leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron_webrl.control.child_process import is_alive, start_time
from tests.waiting import until

ROOT = Path(__file__).parents[1]
LEAVES_PROCESSES = """
import os, subprocess, sys, time
from pathlib import Path
from megatron_webrl.control import child_process
from tests import guard

def leave_processes(folder):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    orphan = ["sh", "-c", "sleep 600 >/dev/null & echo $!"]
    started = subprocess.run(orphan, start_new_session=True, stdout=subprocess.PIPE, check=True, timeout=30)
    role = child_process.start_process(
        ["sh", "-c", "trap '' TERM; setsid sleep 600 & echo $!; wait"], folder / "role.log", os.environ, "role"
    )
    while not (folder / "role.log").read_text().strip():
        time.sleep(0.01)
    time.sleep(1.5 * guard.SNAPSHOT_SECONDS)
    pids = child.pid, int(started.stdout), role.pid, int((folder / "role.log").read_text())
    (folder / "part").write_text(" ".join(map(str, pids)))
    (folder / "part").rename(folder / "pids")
    time.sleep(600)

guard.start()
leave_processes(Path(sys.argv[1]))
"""


def test_every_process_of_a_killed_test_run_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES_PROCESSES, str(tmp_path)]
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stdout=output, stderr=subprocess.STDOUT)
    left: list[tuple[int, int]] = []
    try:
        until(lambda: (tmp_path / "pids").exists() or run.poll() is not None, "its processes", 120)
        assert run.poll() is None, (tmp_path / "output").read_text()
        left = [(int(pid), start_time(int(pid))) for pid in (tmp_path / "pids").read_text().split()]
        assert len(left) == 4
        assert all(is_alive(*process) for process in left)
    finally:
        run.kill()
        run.wait()
    until(lambda: not any(is_alive(*process) for process in left), lambda: f"the end of {left}", 20)
