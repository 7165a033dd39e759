"""The trace: rows and slices."""

from __future__ import annotations

from pathlib import Path

from megatron_webrl.monitor.timeline import read_timeline
from megatron_webrl.monitor.trace import trace_events, write_trace
from tests.monitor.made_timelines import UNIX, episode, write_process, write_run
from tests.monitor.trace_format import read_trace, trace_problems


def test_a_trace_fits_the_format_and_names_processes_by_role_and_node(tmp_path: Path) -> None:
    folder = write_run(tmp_path, ahead=500.0).run_folder
    for name in ("trace.json", "trace.json.gz"):
        count = write_trace(tmp_path / name, read_timeline(folder))
        events = read_trace(tmp_path / name)
        assert len(events) == count
        assert not trace_problems(events)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rollout-0, node 1, n1", "trainer-0, node 0, n0"]
    assert (tmp_path / "trace.json.gz").stat().st_size < (tmp_path / "trace.json").stat().st_size / 2
    training = next(event for event in events if event["name"] == "train")
    assert (training["ts"], training["dur"]) == (25_000_000, 8_000_000)


def test_episodes_at_the_same_time_have_rows_of_their_own_and_later_ones_use_them_again(tmp_path: Path) -> None:
    spans = [
        *episode(1, 0, 0.0, [("reset", 4.0)], "success"),
        *episode(1, 1, 1.0, [("reset", 1.0)], "success"),
        *episode(2, 0, 2.5, [("reset", 1.0)], "success"),
        *episode(2, 1, 3.0, [("reset", 9.0)], "success"),
    ]
    write_process(tmp_path, "rollout-0", spans)
    events = trace_events(read_timeline(tmp_path))
    assert not trace_problems(events)
    row = {event["name"]: event["tid"] for event in events if event["name"].startswith("episode ")}
    assert len(set(row.values())) == 3
    assert row["episode 1.1"] == row["episode 2.0"]


def test_a_step_in_the_browser_shows_its_parts(tmp_path: Path) -> None:
    write_process(tmp_path, "rollout-0", episode(1, 0, 0.0, [("generate", 1.0), ("act", 0.8)], "success"))
    events = trace_events(read_timeline(tmp_path))
    parts = {e["name"]: (e["ts"], e["dur"]) for e in events if e["name"] in ("action", "settle", "observe")}
    # 0.7 of 0.8 s are of the browser server; half of the rest is the way there.
    assert parts == {"action": (1_050_000, 100_000), "settle": (1_150_000, 200_000), "observe": (1_350_000, 400_000)}
    assert not trace_problems(events)


def test_a_trace_of_one_update_has_what_overlaps_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path).run_folder
    events = trace_events(read_timeline(folder), (UNIX + 10.0, UNIX + 35.0))
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert "update 2" in names
    assert not names & {"update 1", "ticket 8"}
    assert not trace_problems(events)


def test_the_check_of_the_format_finds_what_is_wrong(tmp_path: Path) -> None:
    events = trace_events(read_timeline(write_run(tmp_path).run_folder))
    train = next(event for event in events if event["name"] == "train")
    for event, change, problem in (
        (train, {"dur": -1}, "negative time"),
        (train, {"dur": 1.5}, "fields of"),
        (train, {"dur": train["dur"] + 100}, "ends after"),
        (train, {"tid": 99}, "has no name"),
    ):
        changed = [each | change if each is event else each for each in events]
        assert any(problem in found for found in trace_problems(changed)), problem
