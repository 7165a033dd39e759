"""What a person reads: processes that are alike share a line, and everything fits the terminal."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron_webrl.cli import main
from megatron_webrl.monitor.status import page
from megatron_webrl.monitor.status.final_report import final_report_lines, print_final_report
from megatron_webrl.monitor.status.report import RingState, RunReport, build_report
from megatron_webrl.monitor.status.role_status import ProcessRestart, RoleState
from megatron_webrl.track import events, summary
from megatron_webrl.track.events import EventLog
from tests.monitor.status.made_runs import begin_job, make_run, train
from tests.waiting import started

ROOT = Path(__file__).parents[3]
WIDTHS = [80, 120, 200]


def role(name: str, node: int, doing: str, **other: object) -> RoleState:
    state = RoleState(name, node, f"n{node + 1}", "running", doing, 0.5, time.time(), f"logs/node-{node}/{name}.log")
    return replace(state, **other)  # type: ignore[arg-type]


def cluster() -> list[RoleState]:
    """The processes of 32 nodes with 256 GPUs: one worker was restarted, one rank is silent."""
    ranks = [role(f"trainer-{n}", n // 4, "update 7: training on 512 groups") for n in range(128)]
    workers = [
        role(f"rollout-{n}", n // 4, f"version 6: {n % 3 + 2} groups running, {100 + n} episodes done")
        for n in range(128)
    ]
    ranks[0] = replace(ranks[0], status_line="update 8: waiting for groups, 3 of 512; dropped so far: stale 6")
    ranks[77] = replace(ranks[77], state="silent", heartbeat_age_seconds=31.25)
    workers[40] = replace(workers[40], restarts=[ProcessRestart(time.time(), "killed by SIGKILL")])
    return [role("control", 0, "", heartbeat_age_seconds=None), *ranks, *workers]


def rendered(what: object, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(what)
    return out.getvalue()


@pytest.fixture
def report(tmp_path: Path) -> RunReport:
    made = make_run(tmp_path, config=str(ROOT / "configs" / "8b_32node.yaml"))
    begin_job(made, 3600)
    train(made, 7)
    for node in range(32):
        EventLog(made.run_folder, node).add_all([(f"trainer-{4 * node}", None)], events.STARTED)
    EventLog(made.run_folder, 10).add(
        "rollout-40", events.RESTARTED,
        "rollout-40 killed by SIGKILL; last log line: version 6 (log: here.log)", Path("here.log"),
    )  # fmt: skip
    found = build_report(made.run_folder)
    return replace(found, roles=cluster(), hosts=[f"n{node + 1}" for node in range(32)], state="running", healthy=True)


def test_similar_processes_share_a_line_and_others_have_their_own() -> None:
    parts = [role(f"rollout-{n}.follower-1", n + 16, f"with life 1 of rollout-{n}") for n in range(16)]
    rows = [line.split() for line in rendered(page.roles_table([*cluster(), *parts]), 200).splitlines()]
    by_process = {" ".join(row[:2]): row for row in rows if len(row) > 3}
    assert {"trainer 0", "trainer 1-76,78-127", "trainer 77", "rollout 0-39,41-127", "rollout 40"} <= set(by_process)
    assert by_process["trainer 77"][2:5] == ["19", "silent", "31.2"]
    assert by_process["rollout 40"][2:6] == ["10", "running", "0.5", "1"]
    assert by_process["trainer 1-76,78-127"][2] == "0-31"
    text = " ".join(by_process["rollout 0-39,41-127"])
    assert text.endswith("version 6: 2-4 groups running, 100-227 episodes done")
    assert by_process["rollout follower-1"][2:5] == ["0-15", "16-31", "running"]
    assert len(rows) < 15


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_of_32_nodes_fits_a_terminal(report: RunReport, width: int) -> None:
    text = rendered(page.render_report(report), width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) < 50
    assert "…" not in text
    whole = " ".join(text.split())
    for text_part in ("32 nodes: n[1-32]", "7 of ", "trainer 77", "rollout-40 1", "100.0 updates/h"):
        assert text_part in whole


def test_hosts_are_named_in_the_order_of_their_nodes(report: RunReport) -> None:
    for hosts, shown in (
        (["n1", "n2", "n3", "n7"], "n[1-3,7]"),
        (["gpu-a", "gpu-b"], "gpu-a gpu-b"),
        (["n01", "n02"], "n[01-02]"),
        (["vm", "vm"], "vm"),
    ):
        assert dict(page.report_lines(replace(report, hosts=hosts)))["job"] == f"32 nodes: {shown}"


def test_the_fullest_ring_of_a_machine_is_shown(report: RunReport) -> None:
    rings = [RingState(0, 1.0, 64.0, 3), RingState(1, 32.0, 64.0, 9), RingState(2, 0.0, 64.0, 0)]
    shown = dict(page.report_lines(replace(report, rings=rings)))["ring"]
    assert shown == "node 1: 32.0 of 64 MiB (50%), 9 episodes; 2 others here, less full"


def test_events_are_listed_with_reason_and_log(report: RunReport) -> None:
    text = " ".join(rendered(page.render_report(report), 200).split())
    assert "rollout-40 restarted killed by SIGKILL; last log line: version 6 [here.log]" in text
    assert "trainer-4 started" not in text
    assert "trainer-4 started" in " ".join(rendered(page.events_table(report.events), 200).split())


def test_only_the_last_events_are_shown(report: RunReport) -> None:
    more = [replace(report.events[-1], time=report.time + n, reason=f"reason {n}") for n in range(20)]
    text = rendered(page.render_report(replace(report, events=[*report.events, *more])), 120)
    assert "reason 19" in text
    assert "reason 11" not in text
    assert "and 13 earlier ones: --events" in text


# -- the end of a job ---------------------------------------------------------------------------------


def test_the_final_report_is_the_same_wherever_the_job_ran(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    begin_job(made, 3600)
    journal = EventLog(made.run_folder)
    journal.add("rollout-0", events.STARTED)
    journal.add("rollout-0", events.RESTARTED, "rollout-0 killed by SIGKILL; last log line: none")
    train(made, 3)
    accounting = {"finished": 120, "trained": 90, "dropped": {"stale": 6}, "waiting": 24, "rolled_back": 0}
    accounting |= {"matches": True, "tokens": {}}
    summary.write_summary(made.run_folder, "finished", accounting)
    journal.add(events.JOB, events.ENDED, "finished")
    out = io.StringIO()
    print_final_report(made.run_folder, "finished", Console(file=out, width=120), table=True)
    printed, logged = out.getvalue(), final_report_lines(made.run_folder, "finished")
    assert "steps" in printed  # of the table of updates
    assert set(logged) <= {line.rstrip() for line in printed.splitlines()}
    lines = dict(line.split(":", 1) for line in logged if line.split(":", 1)[0].isalpha())
    assert lines["state"].strip().startswith("finished; 20")
    assert lines["episodes"].strip() == ("120 finished = 90 trained + 6 dropped (stale 6) + 24 waiting = 120: matches")
    assert lines["restarts"].strip() == "rollout-0 1"
    assert lines["speed"].strip().startswith("100.0 updates/h")
    assert lines["logs"].strip() == f"{made.run_folder}/logs/<process>.log"
    assert lines["summary"].strip() == f"{made.run_folder}/summary.json"
    assert any("restarted" in line and "killed by SIGKILL" in line for line in logged)


def test_a_failure_is_one_line_of_a_log(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    outcome = "failed: trainer-0 exited with code 1; last log line: " + "no more memory " * 30
    summary.ensure_written(made.run_folder, outcome)
    assert any(outcome in line for line in final_report_lines(made.run_folder, outcome))


def test_the_end_of_a_job_whose_summary_could_not_be_written_is_reported(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    (line,) = final_report_lines(made.run_folder, "preempted")
    assert line.startswith("preempted; newest checkpoint: none; no summary: [Errno 2]")


# -- the command --------------------------------------------------------------------------------------


def test_the_exit_code_tells_a_healthy_run_from_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path / "runs")
    summary.ensure_written(made.run_folder, "finished")
    assert main(["status", "made"]) == 0
    assert "finished; 20" in capsys.readouterr().out
    assert main(["status", "made", "--watch", "60"]) == 0  # there is nothing more to wait for
    capsys.readouterr()
    summary.ensure_written(made.run_folder, "failed: trainer-0: ValueError")
    assert main(["status", "made", "--json"]) == 1
    assert '"reason": "trainer-0: ValueError"' in capsys.readouterr().out
    assert main(["status", "other"]) == 2
    assert capsys.readouterr().err == (
        "webrl: RUN=other is neither the folder of a run nor the name of one in runs/; there are made\n"
    )
    assert main(["status", "made", "--watch", "0"]) == 2
    assert "--watch=0 must be greater than 0" in capsys.readouterr().err


def test_ctrl_c_ends_a_watch_cleanly(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    command = [sys.executable, "-m", "megatron_webrl", "status", str(made.run_folder), "--watch", "0.1", "--json"]
    with started(command, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert all('"state": "starting"' in line for line in lines)
    assert (process.returncode, error) == (0, "")


def test_help_explains_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "1: it failed or does not respond; 2: there is no such run" in text
    assert "--watch SECONDS" in text
