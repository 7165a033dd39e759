"""The timeline of a run: clocks of several nodes on one, what bounded an update whose answer is known, and traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.monitor.timeline import TRAIN, read_timeline, read_update
from megatron_webrl.monitor.trace import trace_events, write_trace
from megatron_webrl.track.timeline import FOLDER
from tests.monitor.finished_jobs import read_trace, sums, trace_problems
from tests.monitor.made_timelines import UNIX, episode, write_process, write_run


def test_processes_are_placed_by_the_time_of_day_and_those_of_a_machine_by_its_first_one(tmp_path: Path) -> None:
    spans = [("step", "", 5.0, 6.0, {}), ("step", "", 50.0, 51.5, {})]
    write_process(tmp_path, "rollout-0", spans)
    write_process(tmp_path, "trainer-0", spans, unix=UNIX + 3)  # the time of day was set meanwhile
    for node, ahead in ((1, 98765.4), (2, -2.5)):
        write_process(tmp_path, f"rollout-{node}", spans, node=node, ahead=ahead)
    for each in read_timeline(tmp_path):
        assert [(span.start - UNIX, span.end - UNIX) for span in each.spans] == [
            pytest.approx((5.0, 6.0), abs=2e-6), pytest.approx((50.0, 51.5), abs=2e-6)
        ]  # fmt: skip


def test_the_files_of_a_process_are_one_and_a_restarted_role_is_two(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no timeline: start a run with tracking\.timeline=true"):
        read_timeline(tmp_path)
    write_process(tmp_path, "rollout-0", [("inner", "", 5.0, 6.0, {}), ("outer", "", 5.0, 9.0, {})])
    folder = tmp_path / FOLDER
    text = (folder / "rollout-0.0.jsonl").read_text()
    (folder / "rollout-0.1.jsonl").write_text(text)
    (folder / "rollout-0.2.jsonl").write_text(text.replace('"pid": 100', '"pid": 101') + '{"spans": [["half')
    (folder / "rollout-0.3.jsonl").write_text("")
    (folder / "notes.txt").write_text("not ours")
    found = read_timeline(tmp_path)
    assert [(each.pid, len(each.spans)) for each in found] == [(100, 4), (101, 2)]
    assert [span.name for span in found[1].spans] == ["outer", "inner"]


def test_a_window_leaves_out_what_is_long_before_and_after_it(tmp_path: Path) -> None:
    spans = [("step", "", float(second), second + 1.0, {}) for second in range(0, 6000, 100)]
    write_process(tmp_path, "rollout-1", spans, node=1, ahead=50.0)
    write_process(tmp_path, "trainer-0", spans)
    window = UNIX + 3000.0, UNIX + 3010.0
    found = read_timeline(tmp_path, window=window)
    assert [each.role for each in found] == ["rollout-1", "trainer-0"]
    for each in found:
        starts = [round(span.start - UNIX) for span in each.spans]
        assert starts == list(range(2100, 4000, 100))
    assert [each.role for each in read_timeline(tmp_path, role="trainer-0")] == ["trainer-0"]


# -- what bounded an update -----------------------------------------------------------------------


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(each, 3) for name, each in seconds.items() if each > 1e-5}


def test_the_parts_of_an_update_and_what_its_wait_was_for_are_all_of_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path, ahead=77.0).run_folder
    bound, _, _ = read_update(folder)
    assert (bound.version, bound.seconds) == (2, pytest.approx(25.0))
    assert rounded(bound.trainer) == {"wait for groups": 15.0, "train": 8.0, "weight exchange": 2.0}
    assert rounded(bound.training) == {"pack": 1.0, "forward and backward": 6.0, "optimizer": 1.0}
    assert rounded(bound.waiting) == {  # what the last episode of the last group did
        "no ticket": 2.0, "no free browser": 1.0, "browser": 3.0, "engine": 7.0, "judge": 1.5, "ring": 0.5,
    }  # fmt: skip
    assert sums(bound) == pytest.approx((25.0, 15.0, 8.0))
    # Generation from 14 to 16, 15 to 18 and 19 to 23; the pause from 34 to 35; no ticket from 10 to 12.
    assert rounded(bound.engines) == {"generate": 8.0, "paused for weights": 1.0, "no ticket": 2.0}
    path = folder / FOLDER / "trainer-0.0.jsonl"
    path.write_text(path.read_text().replace("25000000", "10100000"))  # the wait ends at once, the training begins
    bound, _, _ = read_update(folder)
    assert sums(bound) == pytest.approx((25.0, 0.1, bound.trainer[TRAIN]))


def test_the_command_prints_the_table_and_writes_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, trace = str(write_run(tmp_path, ahead=1.0).run_folder), tmp_path / "trace.json.gz"
    assert main(["timeline", folder, "--output", str(trace)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["update", "2:", "25.0", "s"] in rows
    assert ["trainer:", "wait", "for", "groups", "15.00", "60%"] in rows
    assert ["engine", "7.00", "28%"] in rows
    assert ["engines:", "generate", "8.00", "32%"] in rows
    assert not trace_problems(read_trace(trace))
    assert main(["timeline", folder, "--update", "1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["version"], content["seconds"]) == (1, pytest.approx(10.0))
    assert main(["timeline", folder, "--update", "9"]) == 2
    assert "update 9 is not in the timeline, which has updates 1 to 2" in capsys.readouterr().err


# -- the trace ---------------------------------------------------------------------------------------


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
    events = trace_events(read_timeline(folder), (UNIX + 10.0, UNIX + 35.0))
    assert not trace_problems(events)
    names = {event["name"] for event in events if event["ph"] == "X"}  # what overlaps one update
    assert "update 2" in names
    assert not names & {"update 1", "ticket 8"}


def test_a_step_in_the_browser_shows_its_parts(tmp_path: Path) -> None:
    write_process(tmp_path, "rollout-0", episode(1, 0, 0.0, [("generate", 1.0), ("act", 0.8)], "success"))
    events = trace_events(read_timeline(tmp_path))
    parts = {e["name"]: (e["ts"], e["dur"]) for e in events if e["name"] in ("action", "settle", "observe")}
    # 0.7 of 0.8 s are of the browser server; half of the rest is the way there.
    assert parts == {"action": (1_050_000, 100_000), "settle": (1_150_000, 200_000), "observe": (1_350_000, 400_000)}
    assert not trace_problems(events)
