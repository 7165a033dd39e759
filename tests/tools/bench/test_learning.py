"""The arms of the quickstart: their settings, what is read from a run and kept, and figures over seeds."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_webrl.config.advantage import ADVANTAGES
from megatron_webrl.config.load import all_settings, parse_config
from megatron_webrl.config.loss import LOSSES, RewardConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import default_of, flatten_config
from megatron_webrl.config.tasks import GrowingStepsConfig, SamplerConfig
from megatron_webrl.launch.validation import check_config
from megatron_webrl.track import summary
from megatron_webrl.track.evaluations import EvaluationLog, EvaluationResult
from tests.metrics_page import undocumented
from tools.bench.bootstrap import Interval
from tools.bench.learning import __main__ as command
from tools.bench.learning import figures, runs
from tools.bench.learning.arms import ABLATIONS, ARMS, CONFIG, CONTROLS, INITIAL, SETS, WITHOUT_ARM, overrides
from tools.bench.learning.runs import Run, RunFiles, TaskSuccess

VALUES = {
    "trainer.loss": ("importance_weight_cap",),
    "trainer.advantage": ("coefficient",),
    "tasks.sampler": ("target", "per"),
}
"""Settings of an option that has an arm, which leaves them at their defaults, or of WITHOUT_ARM's joint lines."""


@cache
def config_of(arm: str, quick: bool = False) -> Config:
    return parse_config(CONFIG, overrides(arm, 3, quick))


@pytest.mark.parametrize("arm", [INITIAL, *ARMS])
def test_an_arm_is_a_valid_configuration(arm: str):
    check_config(config_of(arm))
    evaluation = config_of(arm).evaluation
    assert (evaluation.temperature, evaluation.blank_images, evaluation.greedy) == (1, True, True)
    assert (evaluation.before, evaluation.after) == ((True, False) if arm == INITIAL else (False, True))
    assert config_of(arm).run.seed == 3


@pytest.mark.parametrize("arm", [INITIAL, *CONTROLS, "max_token_lag", "critic_warmup"])
def test_a_quick_arm_is_valid_and_small(arm: str):
    check_config(config_of(arm, quick=True))
    trainer = config_of(arm, quick=True).trainer
    assert trainer.updates <= 2
    assert trainer.warm_start.demonstrations <= 24
    assert (trainer.warm_start.demonstrations > 0) is (arm == "imitation")


def test_an_ablation_differs_from_its_base_and_from_all_others():
    settings = {arm: flatten_config(config_of(arm)) for arm in ARMS}
    for arm in ABLATIONS:
        base = ARMS[arm].base
        assert [other for other in ARMS if settings[other] == settings[arm]] == [arm]
        inherited = ARMS[base].settings if base else ()
        assert ARMS[arm].settings[: len(inherited)] == inherited
        assert base in ABLATIONS or arm in CONTROLS


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        *(("trainer.loss", kind) for kind in LOSSES.values()), ("trainer.reward", RewardConfig),
        *(("trainer.advantage", kind) for kind in ADVANTAGES.values()),
        ("tasks.sampler", SamplerConfig), ("tasks.growing_steps", GrowingStepsConfig),
    ],
)  # fmt: skip
def test_every_option_has_an_arm_or_a_reason(section: str, kind: type):
    used = {tuple(setting.split("=", 1)) for arm in ARMS.values() for setting in arm.settings}
    names = {name for name, _ in used} | {name for name in WITHOUT_ARM if "=" not in name}
    start = flatten_config(config_of("rewards"))
    for spec in fields(kind):
        name = f"{section}.{spec.name}"
        if spec.name in VALUES.get(section, ()):
            continue
        assert any(each == name or each.startswith(f"{name}.") for each in names), name
        for choice in spec.metadata["choices"] or ():
            unused = (name, choice) not in used and start.get(name, default_of(spec)) != choice
            assert not unused or f"{name}={choice}" in WITHOUT_ARM, (name, choice)


def test_an_option_without_an_arm_is_a_setting_that_no_arm_sets():
    known, used = all_settings(), {setting for arm in ARMS.values() for setting in arm.settings}
    for option in (each for names in WITHOUT_ARM for each in names.split(", ")):
        name = option.partition("=")[0].removesuffix("*")
        assert any(each.startswith(name) for each in known), option
        assert not [setting for setting in used if setting == option or setting.startswith(f"{option}=")]


def test_the_growing_limit_ends_at_the_limit_of_the_evaluation():
    growing = config_of("growing_steps").tasks.growing_steps
    assert growing.initial < growing.max == config_of("rewards").tasks.max_steps


def test_the_metric_of_an_arm_exists():
    assert not undocumented({arm.metric for arm in ARMS.values()} - {""})


def test_a_name_of_a_set_stands_for_its_arms_each_once():
    assert command.expand(["gspo", "controls", "rewards"]) == ["gspo", "rewards", "shuffled", "imitation"]
    assert command.expand(["ablations"]) == list(ABLATIONS)
    assert not set(SETS) & set(ARMS)


def result(index: int, outcome: str, sample: int = 0) -> EvaluationResult:
    environment = "click-test" if index < 1002 else "focus-text"
    return EvaluationResult(
        index=index, sample=sample, task=f"{environment}/{index}", source="miniwob", environment=environment,
        difficulty="easy", outcome=outcome, steps=2, response_tokens=20, seconds=1.0, versions=(0, 0), worker="w",
    )  # fmt: skip


def a_job(folder: Path, kind: str, variants: Sequence[str] = ("", "blank_images", "greedy")) -> Path:
    """The files of a job of three updates: three tasks, of which the second has no verdict."""
    folder.mkdir(parents=True)
    results = [result(1000, "success"), result(1000, "failure", 1), result(1001, "crash"), result(1002, "success")]
    for variant in variants:
        EvaluationLog(folder).append({"kind": kind, "variant": variant, "version": 3}, results)
    updates = [
        {"version": n + 1, "clip_fraction": n / 10, "extra": {"rollout_success_rate": 0.5, "entropy": n}}
        for n in range(3)
    ]
    summary.open_updates(folder).append(*updates)
    return folder


def test_a_job_is_read_and_comes_back_from_its_file(tmp_path: Path):
    words = overrides("gspo", 0, False)
    run = runs.read_run("gspo", 0, words, a_job(tmp_path / "job", "after"), 1.5)
    assert set(run.evaluations) == {"after", "after_blank_images", "after_greedy"}
    assert run.evaluations["after"] == [TaskSuccess(1000, "click-test", 0.5), TaskSuccess(1002, "focus-text", 1.0)]
    assert run.sampled == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert run.metric == pytest.approx(0.1)  # clip_fraction
    assert (run.settings["trainer.loss.name"], "trainer.loss.decoupled" in run.settings) == ("gspo", False)
    files = RunFiles(tmp_path)
    files.write(run)
    assert files.find("gspo", 0, runs.changed_settings(words)) == run
    assert files.find("gspo", 1, {}) is None
    assert files.read_all() == [run]


def test_an_evaluation_that_is_missing_is_named(tmp_path: Path):
    job = a_job(tmp_path / "job", "after", ["", "greedy"])
    with pytest.raises(RuntimeError, match="gspo, seed 0 has no evaluation after_blank_images"):
        runs.read_run("gspo", 0, overrides("gspo", 0, False), job, 1.0)
    job = a_job(tmp_path / "initial", "before")
    initial = runs.read_run(INITIAL, 0, overrides(INITIAL, 0, False), job, 1.0)
    assert set(initial.evaluations) == {"before", "before_blank_images", "before_greedy"}


def test_a_file_with_other_settings_is_refused(tmp_path: Path):
    run = runs.read_run("gspo", 0, overrides("gspo", 0, True), a_job(tmp_path / "job", "after"), 1.0)
    files = RunFiles(tmp_path)
    files.write(run)
    with pytest.raises(RuntimeError, match=r"gspo-0.json was made with other settings .*trainer.updates.*delete it"):
        files.find("gspo", 0, runs.changed_settings(overrides("gspo", 0, False)))


def rates(changes: dict[str, tuple[float, float]], seed: int, tasks: int = 100) -> dict[str, list[TaskSuccess]]:
    """Evaluations in which the given shares of the tasks of two environments succeed, at random."""
    rng = np.random.default_rng(seed)
    return {
        name: [
            TaskSuccess(index, environment, float(rng.random() < shares[number]))
            for number, environment in enumerate(("click-test", "focus-text"))
            for index in range(1000 + number * tasks, 1000 + (number + 1) * tasks)
        ]
        for name, shares in changes.items()
    }


@cache
def settings_of(arm: str, seed: int) -> dict[str, Any]:
    return runs.changed_settings(overrides(arm, seed, False))


def a_run(arm: str, seed: int, evaluations: dict[str, list[TaskSuccess]], **changes: Any) -> Run:
    kept = {"settings": settings_of(arm, seed), "minutes": 9.0, "sampled": [(0, 0.4), (1, 0.6)], "metric": None}
    return Run(arm=arm, seed=seed, evaluations=evaluations, **kept | changes)  # type: ignore[arg-type]


BEFORE = {"before": (0.5, 0.5), "before_blank_images": (0.2, 0.2), "before_greedy": (0.5, 0.5)}
AFTER = {"after": (1, 0.2), "after_blank_images": (0.4, 0.2), "after_greedy": (1, 0.2)}


@cache
def all_runs(seeds: int = 3) -> list[Run]:
    initial = [a_run(INITIAL, seed, rates(BEFORE, seed)) for seed in range(seeds)]
    return [*initial, *(a_run("rewards", seed, rates(AFTER, 10 + seed), metric=0.25) for seed in range(seeds))]


def test_figures_are_means_over_the_tasks_of_a_seed_and_then_over_seeds():
    found = figures.arm_figures(all_runs())
    assert [(each.arm, each.seeds, each.metric, each.minutes) for each in found] == [("rewards", [0, 1, 2], 0.25, 9.0)]
    means = {
        name: np.mean(
            [[task.success for task in run.evaluations[name]] for run in all_runs() if name in run.evaluations]
        )
        for name in (*BEFORE, *AFTER)
    }
    gain, blind = means["after"] - means["before"], means["after_blank_images"] - means["before_blank_images"]
    expected = {
        "before": means["before"], "after": means["after"], "gain": gain, "blind_gain": blind,
        "seeing_gain": gain - blind, "greedy_after": means["after_greedy"],
    }  # fmt: skip
    assert set(expected) == set(figures.FIGURES)
    for name, value in expected.items():
        interval = found[0].success[name]
        assert interval is not None
        assert interval.value == pytest.approx(value)
        assert interval.low < value < interval.high
    changes = [
        np.mean([task.success for task in after.evaluations["after"] if task.environment == "focus-text"])
        - np.mean([task.success for task in before.evaluations["before"] if task.environment == "focus-text"])
        for before, after in zip(all_runs()[:3], all_runs()[3:], strict=True)
    ]
    assert found[0].lost == {"focus-text": pytest.approx(np.mean(changes))}


def test_the_interval_is_over_seeds_and_then_tasks():
    """Against a loop in plain Python, with seeds that differ."""
    shares = (0.3, 0.5, 0.9)
    seeds = [rates({"after": (share, share)}, seed, 40) for seed, share in enumerate(shares)]
    interval = figures.success_figures(seeds)["after"]
    values = [[task.success for task in evaluations["after"]] for evaluations in seeds]
    plain, resampled = random.Random(0), []
    for _ in range(3000):
        chosen = plain.choices(values, k=3)
        resampled.append(np.mean([np.mean(plain.choices(each, k=len(each))) for each in chosen]))
    low, high = np.percentile(resampled, [2.5, 97.5])
    assert interval is not None
    assert (interval.low, interval.high) == (pytest.approx(low, abs=0.03), pytest.approx(high, abs=0.03))
    of_tasks = figures.success_figures(seeds[:1])["after"]
    assert of_tasks is not None
    assert of_tasks.high - of_tasks.low < (interval.high - interval.low) / 2


def test_tasks_without_a_verdict_in_one_evaluation_are_left_out():
    evaluations = {
        "before": [TaskSuccess(1, "click-test", 0.0), TaskSuccess(2, "click-test", 1.0)],
        "after": [TaskSuccess(1, "click-test", 1.0), TaskSuccess(3, "click-test", 0.0)],
    }
    found = figures.success_figures([evaluations])
    assert found["gain"] == Interval(1.0, 1.0, 1.0)
    assert (found["before"], found["after"]) == (Interval(0.0, 0.0, 0.0), Interval(1.0, 1.0, 1.0))
    assert found["seeing_gain"] is found["greedy_after"] is None
    assert set(figures.success_figures([evaluations, {}]).values()) == {None}
    assert figures.changes([evaluations, {}]) == {"click-test": 1.0}


@pytest.mark.parametrize(("successes", "is_lost"), [(97, False), (96, True)])
def test_a_loss_of_three_points_is_none_and_of_four_is_one(successes: int, is_lost: bool):
    def tasks(count: int) -> list[TaskSuccess]:
        return [TaskSuccess(index, "click-test", float(index < count)) for index in range(100)]

    found = figures.arm_figures(
        [a_run(INITIAL, 0, {"before": tasks(100)}), a_run("rewards", 0, {"after": tasks(successes)})]
    )
    assert ("click-test" in found[0].lost) is is_lost


def test_runs_of_earlier_calls_are_shown_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for run in all_runs():
        RunFiles(tmp_path).write(run)
    words = ["--arms", "--folder", str(tmp_path), "--json", str(tmp_path / "all.figures")]
    assert command.main([*words, "--plots", str(tmp_path / "plot.svg")]) == 0
    out = capsys.readouterr().out
    after = figures.arm_figures(all_runs())[0].success["after"]
    assert after is not None
    assert f"{100 * after.value:.1f} ({100 * after.low:.1f} to {100 * after.high:.1f})" in out
    assert "entropy 0.25" in out
    written = json.loads((tmp_path / "all.figures").read_text())
    assert written["arms"][0]["success"]["after"] == asdict(after)
    assert len(written["runs"]) == 6
    drawn = xml.etree.ElementTree.parse(tmp_path / "plot.svg")
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert f"rewards, after: {after.value:.0%}" in texts


class Jobs:
    """Takes the place of run_arm: figures without a job; a name in `broken` fails, one in `interrupted` is Ctrl-C."""

    def __init__(self, broken: Sequence[str] = (), interrupted: Sequence[str] = ()) -> None:
        self.broken, self.interrupted = broken, interrupted
        self.started: list[tuple[str, int]] = []

    def __call__(self, arm: str, seed: int, quick: bool, folder: Path, updates: int | None = None) -> Run:
        self.started.append((arm, seed))
        if arm in self.interrupted:
            raise KeyboardInterrupt
        if arm in self.broken:
            raise RuntimeError(f"job {arm}-{seed} ended with exit code 1")
        return a_run(arm, seed, rates(BEFORE if arm == INITIAL else AFTER, seed, 5))


def test_a_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    jobs = Jobs()
    monkeypatch.setattr(command, "run_arm", jobs)
    assert command.main(["--arms", "gspo", "--seeds", "0", "1", "--folder", str(tmp_path)]) == 0
    assert jobs.started == [(INITIAL, 0), ("gspo", 0), (INITIAL, 1), ("gspo", 1)]
    assert command.main(["--arms", "cispo", "gspo", "--folder", str(tmp_path)]) == 0
    assert jobs.started[4:] == [("cispo", 0)]


def test_updates_shorten_the_arms_with_rewards_alone(capsys: pytest.CaptureFixture[str]):
    for arm in ARMS:
        given, shorter = config_of(arm), parse_config(CONFIG, overrides(arm, 3, False, updates=7))
        assert shorter.trainer.updates == min(7, given.trainer.updates)
    with pytest.raises(SystemExit):
        command.main(["--quick", "--updates", "7"])
    assert "--quick sets --updates" in capsys.readouterr().err


def test_an_interrupt_loses_the_running_arm_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "run_arm", Jobs(interrupted=["sapo"]))
    assert command.main(["--arms", "gspo", "sapo", "cispo", "--folder", str(tmp_path)]) == 130
    assert "gspo" in capsys.readouterr().out.partition("interrupted")[2]
    jobs = Jobs()
    monkeypatch.setattr(command, "run_arm", jobs)
    assert command.main(["--arms", "gspo", "sapo", "cispo", "--folder", str(tmp_path)]) == 0
    assert jobs.started == [("sapo", 0), ("cispo", 0)]


def test_an_arm_that_fails_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "run_arm", Jobs(broken=["gspo"]))
    assert command.main(["--arms", "gspo", "sapo", "--folder", str(tmp_path)]) == 1
    assert "failed: job gspo-0 ended with exit code 1" in capsys.readouterr().out
    assert [run.arm for run in RunFiles(tmp_path).read_all()] == [INITIAL, "sapo"]
    monkeypatch.setattr(command, "run_arm", Jobs(broken=[INITIAL]))
    with pytest.raises(SystemExit, match=r"bench.learning: job initial-1"):
        command.main(["--arms", "gspo", "--seeds", "1", "--folder", str(tmp_path)])


def test_the_list_names_every_arm_and_every_option_without_one(capsys: pytest.CaptureFixture[str]):
    assert command.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(f" {arm} " in out for arm in ARMS)
    assert all(option in out for option in WITHOUT_ARM)
