"""The runner of experiments: the settings of every arm, what it reads from a run, and a quick experiment."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from megatron_webrl.config.load import parse_config
from megatron_webrl.track import summary
from megatron_webrl.track.evaluations import EvaluationLog, EvaluationRequest, EvaluationResult, aggregate_results
from tests.tools.written_runs import write_run
from tests.waiting import started, until
from tools.bench import experiment as runner
from tools.bench.experiment_figures import (
    Run,
    Target,
    Task,
    arm_figures,
    compared_figures,
    read_run,
    reported_columns,
)


@pytest.mark.parametrize("name", runner.names())
def test_the_settings_of_every_arm_are_valid_and_no_two_arms_are_the_same(name: str, tmp_path: Path):
    jobs = runner.Jobs(runner.Experiment.load(name), tmp_path, [], False, Console())
    arms = [*jobs.experiment.arms, *([runner.BEFORE] if jobs.experiment.before else ())]
    parsed = [repr(parse_config(jobs.config, jobs.settings(arm, 3))) for arm in arms]
    assert all("seed=3" in each for each in parsed)
    assert len(set(parsed)) == len(arms)


def test_the_list_of_arms_shows_settings_with_brackets(capsys: pytest.CaptureFixture[str]):
    assert runner.main(["signs", "--list"]) == 0
    assert "tasks.environments=[remember-sign-4-1-hidden]" in capsys.readouterr().out


def test_a_preparation_ends_with_the_experiment(tmp_path: Path):
    number = tmp_path / "pid"
    code = f"import os,pathlib,time; pathlib.Path('{number}').write_text(str(os.getpid())); time.sleep(600)"
    experiment = {
        "config": "configs/quickstart.yaml", "columns": ["sampled"], "arms": {"alone": {"metric": "entropy"}},
        "prepare": [{"creates": "{folder}/made", "command": shlex.join(["python", "-c", code])}],
    }  # fmt: skip
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(experiment))
    command = [sys.executable, "-m", "tools.bench.experiment", str(tmp_path / "own.yaml"), "--folder", str(tmp_path)]
    with started(command) as process:
        until(lambda: number.is_file() and number.read_text(), "the preparation", 120)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    until(lambda: not Path(f"/proc/{number.read_text()}").exists(), "its end", 30)


def update(version: int, success: float, seconds: float = 10.0) -> dict[str, Any]:
    extra = {"rollout_success_rate": success, "rollout_episodes": 4, "engine/idle_fraction": 0.25, "entropy": version}
    parts = {"rollout": 8.0, "train": 3.0, "sync": 1.0, "wait": 6.0}
    return {
        "version": version, "seconds": parts, "finished_at": 1000.0 + seconds * version, "staleness_mean": 0.5,
        "groups": 2, "extra": extra,
    }  # fmt: skip


def written(folder: Path, matches: bool = True) -> Path:
    """Five updates of four trajectories, ten seconds each; a tenth of the tokens is wasted."""
    write_run(folder, [update(n + 1, success) for n, success in enumerate((0.0, 0.5, 0.5, 1.0, 1.0))])
    accounting = {"matches": matches, "tokens": {"trained": 90, "dropped": {"stale": 2, "all_failed": 8}}}
    (folder / "summary.json").write_text(json.dumps({"accounting": accounting}))
    return folder


def test_a_run_is_counted_until_the_success_or_from_the_skipped_updates_on(tmp_path: Path):
    folder = written(tmp_path / "run")
    until = read_run("async", 0, folder, Target(0.75, window=2), "entropy", ["entropy@2"])
    assert until.reached
    assert until.figures["updates"] == 4
    assert until.figures["minutes"] == pytest.approx(40 / 60)
    assert (until.figures["entropy"], until.figures["entropy@2"]) == (2.5, 4.5)
    whole = read_run("async", 0, folder, Target(skipped_updates=1), "", [])
    assert whole.reached is None
    assert (whole.figures["trained"], whole.figures["per_hour"]) == (16, 3600 * 16 / 40)
    assert (whole.figures["waits"], whole.figures["trains"]) == (0.6, 0.3)
    assert (whole.figures["wasted"], whole.figures["wasted_with_signal"]) == (0.1, 0.02)
    assert read_run("async", 0, folder, Target(0.9, window=3), "", []).reached is False


def test_a_run_whose_accounting_does_not_match_gives_no_figures(tmp_path: Path):
    with pytest.raises(RuntimeError, match="does not match"):
        read_run("async", 0, written(tmp_path / "run", matches=False), Target(), "", [])


def evaluated(arm: str, seed: int, successes: dict[str, list[float]], tokens: float = 10.0) -> Run:
    tasks = {
        name: {n: Task("click", rate, tokens, rate) for n, rate in enumerate(each)} for name, each in successes.items()
    }
    return Run(arm, seed, None, {"per_hour": tokens}, tasks, [])


def test_gains_are_of_the_same_tasks_and_arms_are_compared_in_pairs():
    runs = [
        evaluated("before", 0, {"before": [0.0, 0.0, 1.0], "before_blank_images": [0.0, 0.0, 0.0]}),
        evaluated("ours", 0, {"after": [1.0, 0.0, 1.0], "after_blank_images": [0.0, 0.0, 0.0]}, tokens=5.0),
        evaluated("theirs", 0, {"after": [0.0, 0.0, 1.0], "after_blank_images": [0.0, 0.0, 0.0]}),
    ]
    gain = arm_figures(runs, "ours", "gain")
    assert gain is not None
    assert gain.value == pytest.approx(1 / 3)
    assert gain.low < 0 < gain.high  # of three tasks
    assert arm_figures(runs, "ours", "greedy_after") is None
    lead, ratio = (compared_figures(runs, "ours", "theirs", column) for column in ("after", "per_hour"))
    assert lead is not None
    assert ratio is not None
    assert (lead.value, ratio.value, ratio.low, ratio.high) == (pytest.approx(1 / 3), 0.5, 0.5, 0.5)


def test_the_gain_of_all_episodes_is_beside_that_of_the_judged_ones_where_they_differ(tmp_path: Path):
    def result(index: int, outcome: str) -> EvaluationResult:
        return EvaluationResult(index, 0, f"click/{index}", "miniwob", "click", "easy", outcome, 2, 20, 1.5, (3, 4), "")

    def run(seed: int, after: list[str]) -> Run:
        folder = written(tmp_path / f"run-{seed}")
        for kind, outcomes in (("before", ["failure", "failure", "success"]), ("after", after)):
            request = EvaluationRequest(1, kind, 3, 1, 0.0, 3)
            results = [result(index, outcome) for index, outcome in enumerate(outcomes)]
            EvaluationLog(folder).append(aggregate_results(request, results, 1.0), results)
        return read_run("ours", seed, folder, Target(), "", [])

    runs = [run(0, ["success", "failure", "success"])]
    assert reported_columns(runs, ["ours"], ["gain", "per_hour"]) == ["gain", "per_hour"]
    runs.append(run(1, ["success", "engine_error"]))  # and no result of the third task
    assert reported_columns(runs, ["ours"], ["gain", "per_hour"]) == ["gain", "gain_of_all", "per_hour"]
    judged, of_all = (arm_figures(runs, "ours", column) for column in ("gain", "gain_of_all"))
    assert judged is not None
    assert of_all is not None
    assert judged.value == 1  # of the task with verdicts in all evaluations of both seeds
    assert of_all.value == pytest.approx((1 / 3 + 0) / 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the whole job, on a busy machine
def test_a_quick_experiment_runs_and_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = ["modes", "--quick", "--arms", "async", "--folder", str(tmp_path), "--json"]
    assert runner.main([*words, str(tmp_path / "first.json")]) == 0
    monkeypatch.setattr(runner, "run_job", None)
    assert runner.main([*words, str(tmp_path / "again.json")]) == 0
    first, again = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "again"))
    assert first["arms"] == again["arms"]
    assert first["arms"]["async"]["updates"]["value"] == 2
    assert len(summary.read_updates(tmp_path / "runs" / "async-0")) == 2
    with pytest.raises(SystemExit):
        runner.main([*words, str(tmp_path / "other.json"), "--arms", "nothing"])
