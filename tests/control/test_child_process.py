"""Real processes that die with their parent, are swept, or survive because they must."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import ProcessError, is_alive, start_process, start_time, sweep_orphans
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SLEEP = "import time; time.sleep(60)"


def python(code: str, **environment: str) -> subprocess.Popen[bytes]:
    """A process that runs `code` in the checkout, with `P` as its sys.executable."""
    head = "import os, signal, subprocess, sys, time\nfrom pathlib import Path\nP = sys.executable\n"
    return subprocess.Popen([sys.executable, "-c", head + code], cwd=ROOT, env={**os.environ, **environment})


def pids_in(file: Path, count: int) -> list[tuple[int, int]]:
    """The pids that processes appended to a file, with their start times."""
    until(lambda: file.exists() and len(file.read_text().split()) >= count, f"{count} pids in {file}")
    return [(pid, start_time(pid)) for pid in map(int, file.read_text().split())]


def swept() -> set[int]:
    """Sweep; the pids it names."""
    return {int(name.split("(")[-1].rstrip(")")) for name in sweep_orphans()}


@pytest.fixture
def cleared():
    """Kills at the end what a failing test would leave behind."""
    left: list[tuple[int, int]] = []
    yield left
    for pid, started in left:
        if is_alive(pid, started):
            os.kill(pid, signal.SIGKILL)


def test_a_process_is_named_by_pid_and_start_time_and_a_zombie_counts_as_dead() -> None:
    assert is_alive(os.getpid(), start_time(os.getpid()))
    assert not is_alive(os.getpid(), start_time(os.getpid()) + 1)
    child = python("time.sleep(60)")
    started = start_time(child.pid)
    assert is_alive(child.pid, started)
    child.kill()
    until(lambda: not is_alive(child.pid, started), "child dead")
    assert start_time(child.pid) == started  # not yet reaped
    child.wait()
    assert start_time(child.pid) == 0


def test_child_and_grandchild_die_when_their_launcher_is_killed(tmp_path: Path, cleared) -> None:
    log = tmp_path / "pids"
    role = (
        "import os, subprocess, sys\nfrom pathlib import Path\n"
        "from megatron_webrl.control.child_process import start_process\n"
        f"start_process([sys.executable, '-c', {SLEEP!r}], Path(sys.argv[1]), os.environ, 'inner')\n"
        "import psutil, time\nprint(os.getpid(), psutil.Process().children()[0].pid, flush=True)\ntime.sleep(60)"
    )
    launcher = python(
        "from megatron_webrl.control.child_process import start_process\n"
        f"start_process([P, '-c', {role!r}, {str(tmp_path / 'inner')!r}], Path({str(log)!r}), os.environ, 'outer')\n"
        "time.sleep(60)"
    )
    cleared += (family := pids_in(log, 2))
    assert all(is_alive(*process) for process in family)
    launcher.kill()
    launcher.wait()
    until(lambda: not any(is_alive(*process) for process in family), "role and its own role dead")


def test_a_role_has_its_own_session_its_log_its_environment_and_its_exit_code(tmp_path: Path) -> None:
    names = ("WEBRL_OWNER", "WEBRL_ROLE")
    code = f"import os, sys; print(os.getsid(0) == os.getpid(), *map(os.getenv, {names})); sys.exit(7)"
    role = start_process([sys.executable, "-c", code], tmp_path / "logs" / "role.log", {"A": "b"}, "trainer")
    assert role.wait(20) == 7
    assert (tmp_path / "logs" / "role.log").read_text() == f"True {os.getpid()}:{start_time(os.getpid())} trainer\n"


def test_a_missing_program_ends_and_a_wrong_thread_is_refused(tmp_path: Path) -> None:
    missing = start_process(["no-such-program"], tmp_path / "log", os.environ, "rollout")
    assert missing.wait(20) == 1
    assert "no-such-program" in missing.describe_end()
    errors: list[ProcessError] = []

    def elsewhere() -> None:
        with pytest.raises(ProcessError, match="main thread") as caught:
            start_process([sys.executable], tmp_path / "log", os.environ, "rollout")
        errors.append(caught.value)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(20)
    assert len(errors) == 1


def test_die_with_parent_ends_a_process_whose_parent_is_already_gone() -> None:
    child = python(
        "from megatron_webrl.control.child_process import die_with_parent\n"
        "die_with_parent(parent=1 << 22)\ntime.sleep(60)"
    )
    assert child.wait(20) == -signal.SIGKILL


def test_die_with_parent_sends_the_signal_that_was_asked_for(tmp_path: Path, cleared) -> None:
    log = tmp_path / "pids"
    child = (
        "import os, signal, time\nfrom pathlib import Path\n"
        "from megatron_webrl.control.child_process import die_with_parent\n"
        f"signal.signal(signal.SIGUSR1, lambda *_: (Path({str(tmp_path / 'signalled')!r}).touch(), os._exit(0)))\n"
        f"die_with_parent(signal.SIGUSR1)\nPath({str(log)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)"
    )
    parent = python(f"subprocess.Popen([P, '-c', {child!r}])\ntime.sleep(60)")
    cleared += pids_in(log, 1)
    parent.kill()
    parent.wait()
    until((tmp_path / "signalled").exists, "signal in the child")


def test_a_subreaper_ends_even_those_whose_parent_is_gone_and_that_ignore_sigterm(tmp_path: Path, cleared) -> None:
    log, result = tmp_path / "pids", tmp_path / "result"
    stubborn = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(log)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(60)"
    )
    gone = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)"
    launcher = python(
        "from megatron_webrl.control.child_process import *\n"
        "from megatron_webrl.control.child_process import _POLL_SECONDS\nbecome_subreaper()\n"
        f"subprocess.run([P, '-c', {gone!r}], check=True)\n"
        f"role = start_process([P, '-c', {SLEEP!r}], Path({str(tmp_path / 'log')!r}), os.environ, 'role')\n"
        f"log = Path({str(log)!r})\n"
        "while not (log.exists() and log.read_text()): time.sleep(_POLL_SECONDS)\n"
        "hurried = kill_descendants(0.0, [role])\n"
        "left = kill_descendants(2.0, [role])\n"
        "import psutil\nchildren = psutil.Process().children()\n"
        f"Path({str(result)!r}).write_text(f'{{len(hurried)}} {{left}} {{role.returncode}} {{children}}')\n"
    )
    cleared += (orphan := pids_in(log, 1))
    assert launcher.wait(30) == 0
    assert result.read_text() == f"2 [] {-signal.SIGTERM} []"  # all reaped; the role's exit code is kept
    assert not is_alive(*orphan[0])


HOLDER = (  # holds a named semaphore, which only the resource tracker can remove after a SIGKILL
    "import multiprocessing, os, time\n"
    "lock = multiprocessing.get_context('spawn').Lock()\n"
    "open({log!r}, 'a').write(f'{{os.getpid()}} {{lock._semlock.name}} ')\n"
    "time.sleep(60)"
)


def holder(tmp_path: Path) -> tuple[int, Path]:
    """Pid of a process started from HOLDER, and its semaphore's file."""
    log = tmp_path / "held"
    until(lambda: log.exists() and len(log.read_text().split()) == 2, "semaphore made")
    pid, name = log.read_text().split()
    return int(pid), Path("/dev/shm/sem." + name.removeprefix("/"))


def test_a_subreaper_reaps_what_was_handed_to_it_and_roles_keep_their_exit_codes() -> None:
    code = """
import subprocess, time
import psutil
from megatron_webrl.control.child_process import become_subreaper, reap
become_subreaper()
role = subprocess.Popen(["sh", "-c", "exit 7"])
subprocess.run(["sh", "-c", "sleep 0.1 & sleep 0.1 & sleep 60 &"], check=True)
deadline = time.monotonic() + 20
while len(psutil.Process().children()) > 1 and time.monotonic() < deadline:
    reap([role])
    time.sleep(0.01)
[left] = psutil.Process().children()
print(left.name(), role.returncode)
left.kill()
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60, check=True, text=True)
    assert done.stdout == "sleep 7\n"


def test_a_killed_group_leaves_no_semaphore_behind(tmp_path: Path) -> None:
    code = HOLDER.format(log=str(tmp_path / "held"))
    role = start_process([sys.executable, "-c", code], tmp_path / "log", os.environ, "worker")
    _, semaphore = holder(tmp_path)
    assert semaphore.exists()
    child_process.kill_process_group(role.pid)
    assert role.wait(5) == -signal.SIGKILL
    assert not semaphore.exists()


def test_a_sweep_leaves_no_semaphore_behind(tmp_path: Path, cleared) -> None:
    code = HOLDER.format(log=str(tmp_path / "held"))
    run = python(
        "from megatron_webrl.control.child_process import owner_environment\n"
        f"subprocess.Popen([P, '-c', {code!r}], env={{**os.environ, **owner_environment()}})\ntime.sleep(60)"
    )
    pid, semaphore = holder(tmp_path)
    cleared.append((pid, start_time(pid)))
    run.kill()
    run.wait()
    assert semaphore.exists()
    assert pid in swept()
    assert not semaphore.exists()


def test_orphans_of_a_killed_run_are_swept_with_their_children_and_nothing_else(tmp_path: Path, cleared) -> None:
    log = tmp_path / "pids"
    note = f"open({str(log)!r}, 'a').write(f'{{os.getpid()}} ')"
    leaf = f"import os, time\n{note}\ntime.sleep(60)"
    browser = f"import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {leaf!r}], env={{}})\n{leaf}"
    run = python(
        "from megatron_webrl.control.child_process import owner_environment\n"
        "environment = {**os.environ, **owner_environment()}\n"
        f"subprocess.Popen([P, '-c', {browser!r}], env=environment, start_new_session=True)\n"
        "time.sleep(60)"
    )
    cleared += (family := pids_in(log, 2))
    family_pids = {pid for pid, _ in family}
    alive = python("time.sleep(60)", **child_process.owner_environment())
    foreign = python("time.sleep(60)")
    try:
        assert not swept() & family_pids  # the owner lives
        run.kill()
        run.wait()
        assert all(is_alive(*process) for process in family)
        assert swept() & {*family_pids, alive.pid, foreign.pid} == family_pids
        assert not any(is_alive(*process) for process in family)
        assert alive.poll() is None
        assert foreign.poll() is None
        assert not swept() & family_pids
    finally:
        for process in (alive, foreign):
            process.kill()
            process.wait()


def test_a_sweep_from_within_an_orphaned_family_spares_itself_its_ancestors_and_children(tmp_path: Path) -> None:
    dead = python("")
    owner = f"{dead.pid}:{start_time(dead.pid)}"
    dead.wait()
    child = python(
        "inner = subprocess.Popen([P, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "from megatron_webrl.control.child_process import sweep_orphans\n"
        "sweep = 'from megatron_webrl.control.child_process import sweep_orphans; sweep_orphans()'\n"
        "code = subprocess.call([P, '-c', sweep])\n"
        "alone = sweep_orphans()\n"
        f"Path({str(tmp_path / 'result')!r}).write_text(f'{{alone}}')\ninner.kill()\n",
        **{child_process.OWNER_VARIABLE: owner},
    )
    assert child.wait(20) == 0
    assert (tmp_path / "result").read_text() == "[]"


def test_scratch_folders_of_dead_processes_are_swept_and_those_of_live_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = child_process.make_scratch_folder()
    code = "from megatron_webrl.control import child_process; (child_process.make_scratch_folder() / 'socket').touch()"
    code += "; child_process.make_scratch_folder()"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    dead = [folder.name for folder in tmp_path.iterdir() if folder != mine]
    assert len(dead) == 2
    with monkeypatch.context() as elsewhere:  # another node with the same TMPDIR
        elsewhere.setattr(socket, "gethostname", lambda: "another-node")
        others = child_process.make_scratch_folder()
        assert child_process.sweep_scratch() == []
    (tmp_path / "webrl-other-1").mkdir()
    assert child_process.sweep_scratch() == sorted(dead)
    assert sorted(tmp_path.iterdir()) == sorted([mine, others, tmp_path / "webrl-other-1"])
