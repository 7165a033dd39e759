"""Real processes that die with their parent, are swept, or survive because they must; their logs and restarts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import (
    MAX_DELAY_SECONDS,
    ChildProcess,
    ProcessError,
    RestartPolicy,
    SupervisedProcess,
    is_alive,
    restart_delay,
    start_process,
    start_time,
    sweep_orphans,
)
from tests.waiting import until

ROOT = Path(__file__).parents[2]
HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from megatron_webrl.control.child_process import *
def note(): open(os.environ["PIDS"], "a").write(f"{os.getpid()} ")
def spawn(code, **options): return subprocess.Popen([sys.executable, "-c", os.environ["HEAD"] + code], **options)
"""
NOTE_AND_SLEEP = "note(); time.sleep(60)"
Family = list[tuple[int, int]]


class Program:
    """Python programs that note their pids in a file; those that a failing test leaves are killed."""

    def __init__(self, folder: Path) -> None:
        self.pids = folder / "pids"
        self.environment = {**os.environ, "PIDS": str(self.pids), "HEAD": HEAD}

    def start(self, code: str, **environment: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", HEAD + code], cwd=ROOT, env=self.environment | environment)

    def family(self, count: int) -> Family:
        """Pids and start times of the processes that have noted theirs."""
        until(lambda: self.pids.exists() and len(self.pids.read_text().split()) >= count, f"{count} pids")
        return [(pid, start_time(pid)) for pid in map(int, self.pids.read_text().split())]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    yield made
    for pid, started in made.family(0) if made.pids.exists() else ():
        if is_alive(pid, started):
            os.kill(pid, signal.SIGKILL)


def swept() -> set[int]:
    """Sweep; the pids it names."""
    return {int(name.split("(")[-1].rstrip(")")) for name in sweep_orphans()}


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_child_and_grandchild_die_when_their_launcher_is_killed(program: Program, tmp_path: Path) -> None:
    start = "start_process([sys.executable, '-c', os.environ['HEAD'] + {!r}], Path({!r}), os.environ, 'role')\n"
    inner = f"note()\n{start.format(NOTE_AND_SLEEP, str(tmp_path / 'inner'))}time.sleep(60)"
    launcher = program.start(start.format(inner, str(tmp_path / "outer")) + "time.sleep(60)")
    family = program.family(2)
    assert all(is_alive(*process) for process in family)
    assert not any(is_alive(pid, started - 1) for pid, started in family)  # an ended process had the pid before
    end(launcher)
    until(lambda: not any(is_alive(*process) for process in family), "role and its own role dead")


def test_a_role_has_its_own_session_its_log_its_environment_and_its_exit_code(tmp_path: Path) -> None:
    names = ("WEBRL_OWNER", "WEBRL_ROLE")
    code = f"import os, sys; print(os.getsid(0) == os.getpid(), *map(os.getenv, {names})); sys.exit(7)"
    role = start_process([sys.executable, "-c", code], tmp_path / "logs" / "role.log", {"A": "b"}, "trainer")
    assert role.wait(20) == 7
    assert (tmp_path / "logs" / "role.log").read_text() == f"True {os.getpid()}:{start_time(os.getpid())} trainer\n"
    missing = start_process(["no-such-program"], tmp_path / "log", os.environ, "rollout")
    assert missing.wait(20) == 1
    assert "no-such-program" in missing.describe_end()
    with ThreadPoolExecutor(1) as pool, pytest.raises(ProcessError, match="main thread"):  # it would die with it
        pool.submit(start_process, [sys.executable], tmp_path / "log", os.environ, "rollout").result(20)


def test_die_with_parent_sends_the_signal_that_was_asked_for_to_a_late_child_too(program: Program) -> None:
    assert program.start("die_with_parent(parent=1 << 22); time.sleep(60)").wait(20) == -signal.SIGKILL
    child = (
        "signal.signal(signal.SIGUSR1, lambda *_: (Path(os.environ['PIDS'] + '-signalled').touch(), os._exit(0)))\n"
        f"die_with_parent(signal.SIGUSR1); {NOTE_AND_SLEEP}"
    )
    parent = program.start(f"spawn({child!r}); time.sleep(60)")
    program.family(1)
    end(parent)
    until(program.pids.with_name("pids-signalled").exists, "signal in the child")


def test_a_subreaper_ends_those_whose_parent_is_gone_and_that_ignore_sigterm(program: Program, tmp_path: Path) -> None:
    stubborn = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {NOTE_AND_SLEEP}"
    gone = f"spawn({stubborn!r}, start_new_session=True)"
    launcher = program.start(
        "become_subreaper()\n"
        f"spawn({gone!r}).wait()\n"
        f"role = start_process(['sleep', '60'], Path({str(tmp_path / 'log')!r}), os.environ, 'role')\n"
        "log = Path(os.environ['PIDS'])\n"
        "while not (log.exists() and log.read_text()): time.sleep(0.02)\n"
        "hurried = kill_descendants(0.0, [role])\n"
        "left = kill_descendants(2.0, [role])\n"
        "children = psutil.Process().children()\n"
        f"Path({str(tmp_path / 'result')!r}).write_text(f'{{len(hurried)}} {{left}} {{role.returncode}} {{children}}')"
    )
    [orphan] = program.family(1)
    assert launcher.wait(30) == 0
    # All are reaped, and the role's exit code is kept.
    assert (tmp_path / "result").read_text() == f"2 [] {-signal.SIGTERM} []"
    assert not is_alive(*orphan)


HOLDER = (  # holds a named semaphore, which only the resource tracker can remove after a SIGKILL
    "import multiprocessing\n"
    "lock = multiprocessing.get_context('spawn').Lock()\n"
    "Path(os.environ['PIDS'] + '-name').write_text(lock._semlock.name)\n" + NOTE_AND_SLEEP
)


@pytest.mark.parametrize("swept_later", [False, True])
def test_no_killed_group_and_no_sweep_leaves_a_semaphore(program: Program, tmp_path: Path, swept_later: bool) -> None:
    if swept_later:
        run = program.start(f"spawn({HOLDER!r}, env=os.environ | owner_environment()); time.sleep(60)")
    else:
        role = start_process([sys.executable, "-c", HEAD + HOLDER], tmp_path / "log", program.environment, "worker")
    [(pid, _)] = program.family(1)
    name = program.pids.with_name("pids-name").read_text()
    semaphore = Path("/dev/shm/sem." + name.removeprefix("/"))
    assert semaphore.exists()
    if swept_later:
        end(run)
        assert semaphore.exists()
        assert pid in swept()
    else:
        child_process.kill_process_group(role.pid)
        assert role.wait(5) == -signal.SIGKILL
    assert not semaphore.exists()


def test_orphans_of_a_killed_run_are_swept_with_their_children_and_nothing_else(program: Program) -> None:
    browser = (
        f"spawn({NOTE_AND_SLEEP!r}, env={{name: os.environ[name] for name in ('PIDS', 'HEAD')}}); {NOTE_AND_SLEEP}"
    )
    run = program.start(
        f"spawn({browser!r}, env=os.environ | owner_environment(), start_new_session=True); time.sleep(60)"
    )
    family = program.family(2)
    family_pids = {pid for pid, _ in family}
    others = [program.start("time.sleep(60)", **child_process.owner_environment()), program.start("time.sleep(60)")]
    try:
        assert not swept() & family_pids  # the owner lives
        end(run)
        assert all(is_alive(*process) for process in family)
        assert swept() & {*family_pids, *(each.pid for each in others)} == family_pids
        assert not any(is_alive(*process) for process in family)
        assert [each.poll() for each in others] == [None, None]
    finally:
        for each in others:
            end(each)


def test_a_sweep_from_within_an_orphaned_family_spares_its_own_family(program: Program, tmp_path: Path) -> None:
    dead = program.start("")
    owner = f"{dead.pid}:{start_time(dead.pid)}"
    dead.wait()
    child = program.start(
        "inner = spawn('input()', stdin=subprocess.PIPE)\n"
        "assert not spawn('sweep_orphans()').wait()\n"
        f"swept = [name for name in sweep_orphans() if f'({{inner.pid}})' in name]\n"  # there may be others
        f"Path({str(tmp_path / 'result')!r}).write_text(str(swept))\ninner.kill()",
        **{child_process.OWNER_VARIABLE: owner},
    )
    assert child.wait(20) == 0
    assert (tmp_path / "result").read_text() == "[]"


def test_scratch_folders_of_dead_processes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = child_process.make_scratch_folder()
    code = "(make_scratch_folder() / 'socket').touch(); make_scratch_folder()"
    subprocess.run([sys.executable, "-c", HEAD + code], check=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    dead = [folder.name for folder in tmp_path.iterdir() if folder != mine]
    assert len(dead) == 2
    with monkeypatch.context() as elsewhere:  # another node with the same TMPDIR
        elsewhere.setattr(socket, "gethostname", lambda: "another-node")
        others = child_process.make_scratch_folder()
        assert child_process.sweep_scratch() == []
    (tmp_path / "webrl-other-1").mkdir()
    assert child_process.sweep_scratch() == sorted(dead)
    assert sorted(tmp_path.iterdir()) == sorted([mine, others, tmp_path / "webrl-other-1"])


# -- logs ---------------------------------------------------------------------------------------------


def child(log: Path, code: str) -> ChildProcess:
    return start_process([sys.executable, "-u", "-c", code], log, os.environ, "child")


def test_a_rotated_log_keeps_every_line_of_a_child_and_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "MAX_LOG_BYTES", 40_000)
    code = (
        "import os, subprocess, sys\n"
        "inner = 'import os\\nfor n in range(2000): os.write(1, b\"inner %d\\\\n\" % n)'\n"
        "child = subprocess.Popen([sys.executable, '-c', inner])\n"
        "for n in range(6000): os.write(1, b'outer %d\\n' % n)\n"
        "child.wait(); print('the end')"
    )
    log = tmp_path / "logs" / "child.log"
    assert child(log, code).wait(60) == 0
    files = [log.with_name(f"{log.name}.{number}") for number in (3, 2, 1)] + [log]
    found = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    assert found[-1] == "the end"
    assert [line for line in found if line.startswith("inner")] == [f"inner {n}" for n in range(2000)]
    assert [line for line in found if line.startswith("outer")] == [f"outer {n}" for n in range(6000)]
    assert log.with_name("child.log.1").stat().st_size < 40_000 + 2**16


def test_a_log_has_some_files_and_its_last_line_is_of_one_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "MAX_LOG_BYTES", 1000)
    log = tmp_path / "child.log"
    lives = []
    for code in (*(f"print('ERROR of life {life}'); print('{'x' * 1000}')" for life in range(6)), ""):
        lives.append(child(log, code))
        lives[-1].wait(60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child.log", *(f"child.log.{n}" for n in (1, 2, 3))]
    assert [each.last_line() for each in lives] == [*(f"ERROR of life {life}" for life in range(6)), "none"]


def test_a_child_runs_on_while_its_log_cannot_be_written_and_the_lost_bytes_are_counted(tmp_path: Path) -> None:
    folder, marker = tmp_path / "logs", tmp_path / "marker"
    folder.touch()  # in place of the folder
    line = "import os, pathlib, time\nos.write(1, b'lost' * 1000 + b'\\n')"
    wait = f"while not pathlib.Path({str(marker)!r}).exists(): time.sleep(0.01)"
    process = child(folder / "child.log", f"{line}\n{wait}\nprint('written')")
    until(lambda: process.last_line() == ("lost" * 1000)[:500], "its first line")
    folder.unlink()
    marker.touch()
    assert process.wait(60) == 0
    written = (folder / "child.log").read_text()
    assert written == "ERROR 4001 bytes of output were lost: the log was not writable\nwritten\n"


def test_a_child_of_a_dead_child_neither_holds_up_its_parent_nor_the_log(tmp_path: Path) -> None:
    code = "import subprocess, sys\nsubprocess.Popen(['sleep', '60'])\nprint('done')"
    process = child(tmp_path / "log", code)
    assert process.wait(20) == 0
    assert (tmp_path / "log").read_text() == "done\n"
    child_process.kill_process_group(process.pid)
    until(lambda: process._pipe.closed, "the end of the log")


# -- restarts -----------------------------------------------------------------------------------------


def test_nothing_of_a_process_runs_on_when_it_is_restarted(program: Program, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HEAD + f"spawn({NOTE_AND_SLEEP!r})"]
    role = SupervisedProcess("role", command, program.environment, tmp_path / "log", policy=RestartPolicy(1)).start()
    [child] = program.family(1)
    assert (role.process.wait(20), is_alive(*child)) == (0, True)
    assert role.schedule_restart()
    assert not is_alive(*child)


def test_delays_double_up_to_a_limit_and_chance_takes_off_up_to_half() -> None:
    assert [restart_delay(number, 0.0) for number in range(1, 10)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert [restart_delay(number, 1.0) for number in (1, 2, 4, 10**6)] == [0, 0.5, 2, 30]


@given(st.lists(st.floats(0.0, 100.0), max_size=60), st.integers(0, 5), st.floats(1.0, 300.0))
def test_restarts_are_refused_exactly_while_the_window_is_full(pauses: list[float], budget: int, window: float) -> None:
    policy, now, granted = RestartPolicy(budget, window), 1000.0, list[float]()
    for pause in pauses:
        now += pause
        recent = [time for time in granted if now - time < window]
        restart_at = policy.next_restart(now)
        assert (restart_at is None) == (len(recent) >= budget)
        if restart_at is not None:
            granted.append(now)
            assert now <= restart_at <= now + MAX_DELAY_SECONDS
            assert restart_at == now or recent
            assert policy.used == len(recent) + 1
        assert policy.used <= budget
