"""Who may write to a run folder: real processes that hold, lose, and take over its lease."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.track import run_lease
from megatron_webrl.track.run_lease import Holder, LeaseLost, RunLease, take
from megatron_webrl.util import child_process
from megatron_webrl.util.history import History, read
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def here() -> Holder:
    return Holder.of_this_process({})


def elsewhere() -> Holder:
    return replace(here(), host="n2", machine="another boot", pid=1)


def slurm(job: str, restart: int = 0) -> Holder:
    return Holder.of_this_process({"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restart)})


def silence(lease: RunLease, seconds: float) -> None:
    """Make the last sign of life `seconds` older."""
    modified = lease.path.stat().st_mtime - seconds
    os.utime(lease.path, (modified, modified))


@contextmanager
def process_that_holds(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    code = (
        "import sys, time; from pathlib import Path; from megatron_webrl.track.run_lease import Holder, take\n"
        "take(Path(sys.argv[1]), Holder.of_this_process({})); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run)], cwd=ROOT)
    try:
        until(lambda: any((run / "lease").glob("0*.json")), "the lease of another process", 30)
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_running_process_on_this_machine_keeps_its_lease_and_a_killed_one_does_not(tmp_path: Path) -> None:
    with process_that_holds(tmp_path) as process:
        for number in (0, signal.SIGSTOP):  # a stopped process may wake up
            process.send_signal(number) if number else None
            with pytest.raises(ConfigError, match=rf"a job runs in {tmp_path}, pid {process.pid} on .*; wait for its"):
                take(tmp_path, here())
    lease = take(tmp_path, here())
    assert (lease.epoch, lease.is_held) == (2, True)
    assert [path.name for path in (tmp_path / "lease").iterdir()] == ["000002.json"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [lease.staging.name]


def test_a_launch_that_has_ended_makes_room_at_once(tmp_path: Path) -> None:
    first = take(tmp_path, elsewhere())
    first.check()
    first.release()
    assert not first.is_held
    take(tmp_path, here()).check()
    first.release()  # changes nothing of its successor's
    assert [path.name for path in (tmp_path / "lease").iterdir()] == ["000002.json"]


def test_a_later_launch_of_a_slurm_job_takes_over_at_once_and_an_earlier_one_never(tmp_path: Path) -> None:
    first, second = take(tmp_path, slurm("17")), take(tmp_path, slurm("17", 1))
    with pytest.raises(LeaseLost, match=rf"another launch has taken over {tmp_path}: launch 2 of job 17 on "):
        first.check()
    second.check()
    with pytest.raises(ConfigError, match=r"launch 2 of job 17 .*; wait for its end, or choose another run.name"):
        take(tmp_path, slurm("17"), print)


def test_another_host_keeps_its_lease_until_it_is_silent_for_the_time_limit(tmp_path: Path) -> None:
    held = take(tmp_path, elsewhere())
    silence(held, run_lease.TIMEOUT_SECONDS - 30)
    with pytest.raises(ConfigError, match=r"on n2, since .* is 15\d s old: if it has ended, start again in (30|29) s"):
        take(tmp_path, here())
    with pytest.raises(ConfigError, match=r"is 15. s old"):
        take(tmp_path, slurm("17"))
    silence(held, 31)
    take(tmp_path, here()).check()
    assert not held.is_held


def test_a_batch_job_waits_for_a_silent_holder_but_not_for_one_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(run_lease, "HEARTBEAT_SECONDS", 0.02)
    held, messages = take(tmp_path, slurm("16")), list[str]()
    with held.kept_alive(), pytest.raises(ConfigError, match=r"launch 1 of job 16 .*; wait for its end"):
        take(tmp_path, slurm("17"), messages.append)
    silence(held, run_lease.TIMEOUT_SECONDS - 0.5)
    take(tmp_path, slurm("17"), messages.append).check()
    assert "waiting until it is 180 s old" in messages[-1]


def test_of_launches_at_once_one_takes_the_lease(tmp_path: Path) -> None:
    for number in range(20):
        run, won, lost = tmp_path / str(number), list[RunLease](), list[str]()

        def start(run: Path, won: list[RunLease], lost: list[str], name: str) -> None:
            try:
                won.append(take(run, replace(elsewhere(), machine=name)))
            except ConfigError as error:
                lost.append(str(error))

        threads = [threading.Thread(target=start, args=(run, won, lost, f"m{name}")) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 3), lost
        won[0].check()
        assert [path.name for path in (run / "checkpoints").iterdir()] == [won[0].staging.name]


def test_a_launch_that_was_suspended_while_it_took_the_lease_does_not_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = run_lease._wait_for_end

    def suspended(run: Path, own: Holder, report: object) -> int:
        epoch = judged(run, own, None)
        monkeypatch.setattr(run_lease, "_wait_for_end", judged)
        take(run, elsewhere()).release()
        take(run, elsewhere())
        return epoch

    monkeypatch.setattr(run_lease, "_wait_for_end", suspended)
    with pytest.raises(ConfigError, match="another job has just started"):
        take(tmp_path, here())
    assert [path.name for path in (tmp_path / "lease").iterdir()] == ["000002.json"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_the_staging_folder_of_an_earlier_launch_is_moved_away_with_its_content(tmp_path: Path) -> None:
    first = take(tmp_path, slurm("17"))
    (first.staging / "000001").mkdir()
    second = take(tmp_path, slurm("17", 1))
    with pytest.raises(FileNotFoundError):
        (first.staging / "000001").rename(tmp_path / "checkpoints" / "version-000001")
    with pytest.raises(FileNotFoundError):
        (first.staging / "000002").mkdir()
    assert [path.name for path in second.staging.glob("left-*/*")] == ["000001"]


def test_a_process_suspended_after_its_check_adds_no_line_to_a_history_of_its_successor(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from megatron_webrl.util.history import History\n"
        "from megatron_webrl.track.run_lease import Holder, take\n"
        "lease = take(Path(sys.argv[1]), Holder.of_this_process({'SLURM_JOB_ID': '17'}))\n"
        "suspended = [False]\n"
        "def guard():\n"
        "    lease.check()\n"
        "    if suspended[0]: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "history = History(Path(sys.argv[1], 'updates.jsonl'), guard=guard)\n"
        "history.append({'launch': 1, 'version': 1})\n"
        "suspended[0] = True\n"
        "history.append({'launch': 1, 'version': 2})\n"
        "history.close()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    try:
        until(lambda: child_process.process_state(process.pid) == "T", "its suspension", 30)
        take(tmp_path, slurm("17", 1))
        history = History(tmp_path / "updates.jsonl")
        history.append({"launch": 2, "version": 2})
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 0
        history.append({"launch": 2, "version": 3})
        history.close()
    finally:
        process.kill()
        process.wait()
    lines = [(line["launch"], line["version"]) for line in read(tmp_path / "updates.jsonl")]
    assert lines == [(1, 1), (2, 2), (2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "lease", "updates.jsonl"]


def test_a_damaged_lease_is_held_by_nobody_known_until_it_is_old(tmp_path: Path) -> None:
    held = take(tmp_path, here())
    held.path.write_text("{")
    with pytest.raises(ConfigError, match="on an unknown host"):
        take(tmp_path, here())
    silence(held, run_lease.TIMEOUT_SECONDS + 1)
    assert take(tmp_path, here()).epoch == 2


def test_processes_of_a_launch_find_its_lease(tmp_path: Path) -> None:
    assert run_lease.of_process(tmp_path, {}) is None
    first = take(tmp_path, here())
    assert run_lease.of_process(tmp_path, first.variables) == first
    first.release()
    with pytest.raises(LeaseLost):
        run_lease.of_process(tmp_path, first.variables)
    second = take(tmp_path, slurm("17"))
    assert run_lease.of_process(tmp_path, {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "0"}) == second
    for environment in ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "16"}, first.variables):
        with pytest.raises(LeaseLost, match="launch 1 of job 17"):
            run_lease.of_process(tmp_path, environment)


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    take(tmp_path, here()).check()
    take(tmp_path, here()).check()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "lease").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be written: File exists; set run.directory to a folder"):
        take(tmp_path, here())
