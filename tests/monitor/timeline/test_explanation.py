"""The explanation of an update whose answer is known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.monitor.timeline.explanation import UpdateExplainer, UpdateExplanation
from megatron_webrl.monitor.timeline.processes import read_timeline
from tests.monitor.timeline.made_timelines import write_run
from tests.monitor.timeline.trace_format import read_trace, trace_problems


@pytest.fixture
def update(tmp_path: Path) -> UpdateExplanation:
    config = write_run(tmp_path, ahead=77.0)
    return UpdateExplainer(read_timeline(config.run_folder), config).explain(2)


def test_the_parts_of_an_update_are_all_of_it(update: UpdateExplanation) -> None:
    assert update.seconds == pytest.approx(25.0)
    parts = {name: round(seconds, 3) for name, seconds in update.parts.items() if seconds > 1e-6}
    assert parts == {"wait for groups": 15.0, "train": 8.0, "weight exchange": 2.0}
    assert update.training == pytest.approx(
        {"pack": 1.0, "forward and backward": 6.0, "optimizer": 1.0, "log-probabilities": 0.0}
    )
    assert update.pause == pytest.approx(1.0)
    assert update.bound == "rollout"


def test_the_critical_path_follows_the_last_episode_of_the_last_group(update: UpdateExplanation) -> None:
    assert sum(update.path.values()) == pytest.approx(update.seconds)
    path = {name: round(seconds, 3) for name, seconds in update.path.items() if seconds > 1e-5}
    assert path == {
        "last group: not claimed yet": 2.0,
        "last group: waiting for a browser": 1.0,
        "last group: in browsers": 3.0,
        "last group: generating": 7.0,
        "last group: judging": 1.5,
        "last group: writing to the ring": 0.5,
        "pack": 1.0,
        "forward and backward": 6.0,
        "optimizer": 1.0,
        "weight exchange": 2.0,
    }
    last = update.last_group
    assert last is not None
    assert (last.ticket, last.worker, last.episode, last.slowest) == (7, "rollout-0", 1, "step 2, generation")
    assert (last.claimed_before, last.slowest_seconds) == (pytest.approx(13.0), pytest.approx(4.0))


def test_shares_of_a_worker_are_those_of_its_episodes_time(update: UpdateExplanation) -> None:
    (worker,) = update.waited_for
    # 15 s of waiting; episode 7.0 takes 5 s, 7.1 takes 12.5 s; generation from 14 to 16, 15 to 18 and 19 to 23.
    assert worker.engine_busy == pytest.approx(8 / 15)
    assert worker.requests == pytest.approx(9 / 15)
    assert worker.episodes == pytest.approx(17.5 / 15)
    assert worker.groups == pytest.approx(11 / 15)  # from the claim at 12 to 23, when only the verdict was missing
    assert worker.no_tickets == pytest.approx(2 / 15)
    assert {name: round(17.5 * share, 3) for name, share in worker.shares.items()} == {
        "generating": 9.0, "in browsers": 5.0, "waiting for a browser": 1.0, "judging": 2.5, "other": 0.0
    }  # fmt: skip
    (whole,) = update.workers
    assert whole.engine_paused == pytest.approx(1 / 25)


def test_an_update_that_did_not_wait_is_bounded_by_the_trainer(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    path = config.run_folder / "timeline" / "trainer-0.0001.jsonl"
    path.write_text(path.read_text().replace("25000000", "10100000"))  # the wait ends at once, the training begins
    update = UpdateExplainer(read_timeline(config.run_folder), config).explain(2)
    assert update.bound == "trainer"
    assert update.parts["wait for groups"] == pytest.approx(0.1)
    assert sum(update.path.values()) == pytest.approx(25.0)


def test_an_update_that_is_not_in_the_timeline_is_refused(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    explainer = UpdateExplainer(read_timeline(config.run_folder), config)
    with pytest.raises(ConfigError, match="update 9 is not in the timeline, which has updates 1 to 2"):
        explainer.explain(9)


def test_the_command_explains_in_words_and_writes_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, trace = write_run(tmp_path, ahead=1.0).run_folder, tmp_path / "trace.json.gz"
    assert main(["timeline", str(folder), "--all", "--output", str(trace)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= max(100, len(f"{trace}: 99 events; open it in https://ui.perfetto.dev"))
    words = re.sub(r"\s+", " ", text)
    for sentence in (
        "update 2 took 25.0 s, from the end of update 1",
        "Rollout bounded it: the trainer waited for groups 60% of the time.",
        "rollout-0 had a request in its engine for 53% of the time; its episodes were 51% generating, 29% in browsers",
        "It had room for more groups, and no ticket, for 13% of the time.",
        "was ticket 7 of rollout-0, claimed 13.0 s before. Its episode 7.1 ended last; the longest part: step 2, "
        "generation, 4.0 s.",
        "Idle: the trainer for 15.0 s",
        "One more engine: about",
        "updates 1 to 2, mean: 17.5 s",
    ):
        assert sentence in words
    assert not trace_problems(read_trace(trace))


def test_the_command_gives_json_of_the_update_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path).run_folder
    assert main(["timeline", str(folder), "--update", "1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["update"]["version"], content["update"]["seconds"]) == (1, pytest.approx(10.0))
    assert content["update"]["last_group"] is None
    assert content["clock_errors"] == {"rollout-0, pid 101": 0.0, "trainer-0, pid 100": 0.0}


def test_the_command_names_the_setting_that_a_run_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path).run_folder
    for path in (folder / "timeline").iterdir():
        path.unlink()
    assert main(["timeline", str(folder)]) == 2
    assert capsys.readouterr().err.endswith("has no timeline: start a run with tracking.timeline=true\n")
