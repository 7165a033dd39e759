"""The experiment on loss normalisers: its gates, its verdict, its demonstrations, and what it keeps of runs."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.trainer import WarmStartConfig
from megatron_webrl.launch.validation import load_config
from megatron_webrl.tasks.source import HELD_OUT_SEEDS
from megatron_webrl.track.evaluations import EvaluationLog, EvaluationResult
from megatron_webrl.types import Task
from tools.bench.normalisers import __main__ as command
from tools.bench.normalisers import runs
from tools.bench.normalisers.gates import (
    EpisodeLength,
    UpdateFigures,
    check_gates,
    check_initial_policy,
    mean_steps,
    share_of_longer_failures,
)
from tools.bench.normalisers.stuck_pages import SOURCE, WAIT, StuckPages
from tools.bench.normalisers.verdict import SEEDS, EvaluatedEpisode, RunFigures, bootstrap, decide, paired_tables

LONG = [
    EpisodeLength(3, True),
    EpisodeLength(5, True),
    EpisodeLength(16, False),
    EpisodeLength(2, False),
    *[EpisodeLength(9, False)] * 2,
]
SHORT = [EpisodeLength(3, True), EpisodeLength(1, False), EpisodeLength(3, False)]
ONE_OUTCOME = [EpisodeLength(16, False)] * 3
GOOD = UpdateFigures(entropy=0.5, format_error_rate=0.01, gradient_clipped=0.0, success=0.5, steps_failure=12.0)


def figures(
    arm: str, seed: int, tokens: float, success: float = 0.5, failure_steps: int = 12, gates_hold: bool = True
) -> RunFigures:
    """A run of 200 tasks whose tokens scatter by a tenth; the two arms of a seed scatter alike."""
    rng = np.random.default_rng(seed)
    scatter, luck = rng.normal(1, 0.1, 200), rng.random(200)
    episodes = [
        EvaluatedEpisode(task, bool(luck[task] < success), 5 if luck[task] < success else failure_steps,
                         round(tokens * scatter[task]))
        for task in range(200)
    ]  # fmt: skip
    return RunFigures(arm, seed, episodes, check_gates([GOOD], 0.5 if gates_hold else 0.2))


def both(ours: dict[str, float], theirs: dict[str, float], seeds: int = SEEDS) -> list[RunFigures]:
    return [
        figures(arm, seed, **values)  # type: ignore[arg-type]
        for seed in range(seeds)
        for arm, values in (("constant", ours), ("per_trajectory", theirs))
    ]


def test_failures_are_compared_with_successes_in_pairs():
    assert share_of_longer_failures(LONG) == 6 / 8
    assert share_of_longer_failures(SHORT) == 1 / 4
    assert share_of_longer_failures(ONE_OUTCOME) is None
    assert mean_steps([LONG, SHORT]) == pytest.approx((3 + 5 + 16 + 2 + 18 + 3 + 1 + 3) / 9)


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, set()),
        ({"entropy": 1.0}, set()),
        ({"entropy": 1.01}, {"entropy, last updates / pilot"}),
        ({"format_error_rate": 0.07}, {"format errors"}),
        ({"gradient_clipped": 0.15}, {"clipped optimiser steps"}),
    ],
)
def test_a_gate_fails_beyond_its_limit(changes: dict[str, float], failing: set[str]):
    updates = [GOOD, *[replace(GOOD, **changes)] * 5]  # type: ignore[arg-type]
    assert {gate.name for gate in check_gates(updates, 0.5) if not gate.passed} == failing


def test_gates_without_a_value_fail():
    assert [gate.passed for gate in check_gates([], 0.5)] == [False] * 3
    assert [gate.passed for gate in check_initial_policy([])] == [False] * 2


@pytest.mark.parametrize(
    ("episodes", "passed"),
    [(LONG, [True, True]), (SHORT, [True, False]), (ONE_OUTCOME, [False, False]), ([*LONG, *LONG[:2]], [True, True]),
     ([*LONG, *LONG[:2], *LONG[:2]], [False, True])],
)  # fmt: skip
def test_the_initial_policy_must_succeed_sometimes_and_fail_in_long_episodes(
    episodes: list[EpisodeLength], passed: list[bool]
):
    assert [gate.passed for gate in check_initial_policy(episodes)] == passed


def test_a_clear_reduction_at_equal_success_confirms():
    verdict = decide(both({"tokens": 150, "failure_steps": 9}, {"tokens": 200}))
    assert (verdict.kind, verdict.reasons) == ("confirmed", ())
    assert verdict.tokens is not None
    assert verdict.tokens.value == pytest.approx(-0.25, abs=0.01)
    assert verdict.tokens.low <= verdict.tokens.value <= verdict.tokens.high < 0
    assert verdict.failure_steps == dict.fromkeys(range(SEEDS), (9, 12))


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        ({"tokens": 178, "failure_steps": 9}, "tokens per episode change by -11%, not by -15% or less"),
        ({"tokens": 150, "failure_steps": 12}, "failures of seed 0 are not shorter"),
        ({"tokens": 150, "failure_steps": 9, "success": 0.4}, "success may be lower by"),
    ],
)
def test_a_reduction_that_misses_one_criterion_is_undecided(ours: dict[str, float], reason: str):
    verdict = decide(both(ours, {"tokens": 200}))
    assert verdict.kind == "undecided"
    assert any(reason in each for each in verdict.reasons)


def test_equal_tokens_refute_and_so_do_more():
    for tokens in (200, 260):
        assert decide(both({"tokens": tokens}, {"tokens": 200})).kind == "refuted"


def test_a_failed_gate_makes_the_comparison_void_and_is_named():
    sound = both({"tokens": 150, "failure_steps": 9}, {"tokens": 200})
    verdict = decide([*sound[:-1], figures("per_trajectory", SEEDS - 1, 200, gates_hold=False)])
    assert verdict.kind == "void"
    assert verdict.reasons == ("per_trajectory, seed 4: entropy, last updates / pilot 2.50, not <= 2.0",)
    assert decide([*sound, figures("token_mean", 0, 1, gates_hold=False)]).kind == "confirmed"  # a third arm is ignored


def test_too_few_seeds_decide_nothing():
    verdict = decide(both({"tokens": 150, "failure_steps": 9}, {"tokens": 200}, seeds=4))
    assert (verdict.kind, verdict.reasons) == ("undecided", ("4 of 5 seeds have both arms",))
    assert decide([figures("constant", 0, 150)]).tokens is None


def test_the_bootstrap_resamples_seeds_and_then_tasks():
    """Against a loop in plain Python: seeds that differ, of different sizes, with little scatter within."""
    rng = np.random.default_rng(0)
    tables = [
        np.stack([np.stack([rng.normal(tokens, 5, n), np.full(n, success)], 1)
                  for tokens, success in ((mean, 1), (200, 0))], 1)
        for mean, n in ((100, 20), (150, 30), (190, 25))
    ]  # fmt: skip
    tokens, success = bootstrap(tables, seed=1)
    plain, ratios = random.Random(2), []
    for _ in range(3000):
        arms = [0.0, 0.0]
        for table in plain.choices(tables, k=3):
            chosen = table[plain.choices(range(len(table)), k=len(table))]
            arms = [total + float(chosen[:, arm, 0].mean()) for arm, total in enumerate(arms)]
        ratios.append(arms[0] / arms[1] - 1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    assert (tokens.low, tokens.high) == (pytest.approx(low, abs=0.015), pytest.approx(high, abs=0.015))
    assert tokens.value == pytest.approx(
        sum(t[:, 0, 0].mean() for t in tables) / sum(t[:, 1, 0].mean() for t in tables) - 1
    )
    assert (success.value, success.low, success.high) == (1, 1, 1)


def test_tasks_without_a_verdict_in_one_arm_are_left_out():
    one, other = figures("constant", 4, 150), figures("per_trajectory", 4, 200)
    table = paired_tables([replace(one, episodes=one.episodes[5:]), replace(other, episodes=other.episodes[:50])])[4]
    assert table.shape == (45, 2, 2)
    assert table[0, 0].tolist() == [one.episodes[5].tokens, one.episodes[5].success]


async def test_half_of_the_episodes_are_on_pages_that_cannot_be_done():
    """Of each training task every second episode, of held-out tasks every second one, in each episode."""
    config = parse_config(runs.CONFIG)
    with StuckPages(config.tasks) as source:
        async with BrowserPool(config.browser, {SOURCE: source}, 1, 30.0) as pool:

            async def play(task: Task) -> tuple[bool, list[str], float]:
                """Whether the query is red, the actions of the script, and the reward."""
                async with pool.episode(task) as (session, _):
                    colour = await session.page.eval_on_selector("#query", "e => getComputedStyle(e).backgroundColor")
                    kinds, observation = [], None
                    while observation is None or not observation.done:
                        action = await source.demonstrate(session.page, task)
                        kinds.append(action.kind)
                        observation = await session.step(action)
                    return colour == "rgb(255, 0, 0)", kinds, observation.reward

            for environment in config.tasks.environments:
                task = source.make_task(environment, 7)
                stuck = [await play(task) for _ in range(4)]
                assert [red for red, *_ in stuck] == [True, False] * 2
                for red, kinds, reward in stuck:
                    assert kinds[-1] == "left_click"
                    assert set(kinds[:-1]) <= ({WAIT.kind} if red else {"left_click"})
                    assert (reward > 0) == (not red)
            held_out = [source.make_task("click-collapsible", HELD_OUT_SEEDS.start + n) for n in range(2)]
            assert [(await play(task))[0] for _ in range(2) for task in held_out] == [False, True] * 2


@pytest.mark.parametrize("arm", runs.ARMS)
def test_an_arm_is_a_configuration_that_holds(
    arm: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    monkeypatch.setattr(runs, "run_job", lambda config, name, overrides, folder: seen.append(overrides) or tmp_path)
    for control, quick in ((False, False), (True, False), (False, True)):
        runs.run_arm(arm, 1, 9, tiny_model, control, quick)
    runs.run_pilot(tiny_model, quick=False)
    main, control_run, quick_run, pilot = (load_config(runs.CONFIG, overrides) for overrides in seen)
    assert (main.trainer.loss.normalizer, main.run.seed, main.trainer.updates) == (arm, 1, 24)
    assert main.trainer.loss.normalizer_constant == (9 if arm == "constant" else 10)
    assert main.trainer.warm_start == WarmStartConfig()
    assert main.evaluation.episodes * len(main.tasks.environments) == 400
    assert (main.tasks.source, control_run.tasks.source) == (SOURCE, "miniwob")
    assert quick_run.trainer.updates < pilot.trainer.updates < 24
    assert (pilot.evaluation.before, pilot.evaluation.after, pilot.run.seed) == (True, False, runs.PILOT_SEED)


def a_run(folder: Path) -> Path:
    """A folder as a run leaves it: two updates of one group each, a dropped episode, an evaluation."""

    def line(version: int, ticket: int, outcome: str, steps: int, disposition: str = "trained") -> str:
        tokens = [{"response_tokens": 10 + 5 * n + version} for n in range(steps)]
        fields = {"version": version, "ticket": ticket, "outcome": outcome, "steps": tokens}
        return json.dumps(fields | {"disposition": disposition}) + "\n"

    folder.mkdir()
    (folder / "episodes.jsonl").write_text(
        line(1, 0, "success", 2) + line(1, 0, "failure", 4) + line(1, 1, "failure", 9, "all_failed")
        + line(2, 2, "success", 1) + line(2, 2, "blocked", 1)
    )  # fmt: skip
    extra = {"entropy": 0.5, "format_error_rate": 0.02, "gradient_clipped": 0.5, "steps_mean/failure": 4.0}
    (folder / "updates.jsonl").write_text("".join(json.dumps({"version": v, "extra": extra}) + "\n" for v in (1, 2)))
    results = [
        EvaluationResult(n, 0, f"t{n}", "miniwob", "use-spinner", "easy", outcome, 3 + n, 40, (2, 2), "w", 1.0)  # type: ignore[arg-type]
        for n, outcome in enumerate(("success", "failure", "browser_crashed"))
    ]
    EvaluationLog(folder).append({"kind": "after", "variant": "", "version": 2}, results)
    return folder


def test_the_figures_of_a_run_are_read_from_its_folder(tmp_path: Path):
    run = runs.read_run("constant", 1, False, a_run(tmp_path / "run"), 3.0)
    assert run.first_batch == [[EpisodeLength(2, True), EpisodeLength(4, False)]]
    assert run.updates == [UpdateFigures(0.5, 0.02, 0.5, None, 4.0)] * 2
    assert run.episodes == [EvaluatedEpisode(0, True, 3, 40), EvaluatedEpisode(1, False, 4, 40)]
    assert run.initial == []
    assert run.tokens_at_step == pytest.approx([(11 + 11 + 12) / 3, 16, 21, 26])
    results = runs.Results(pilot=run, runs=[run, replace(run, control=True)])
    assert {gate.name for gate in results.gates(run) if not gate.passed} == {"clipped optimiser steps"}
    assert [[len(each.gates) for each in results.figures(control)] for control in (False, True)] == [[3], [0]]


def test_finished_runs_are_kept_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run, started = runs.read_run("constant", 0, False, a_run(tmp_path / "run"), 3.0), []

    def finish(arm: str, seed: int, k: int, *rest: object) -> runs.Run:
        started.append((arm, seed, k))
        if seed == 1:
            raise RuntimeError("the machine was needed")
        return replace(run, arm=arm, seed=seed)

    monkeypatch.setattr(command, "run_arm", finish)
    monkeypatch.setattr(command, "make_initial_policy", lambda *arguments: None)
    path = tmp_path / "figures.json"
    with pytest.raises(SystemExit, match=r"bench\.normalisers: there is no pilot yet"):
        command.main(["--json", str(path)])
    runs.Results(pilot=replace(run, seed=runs.PILOT_SEED)).write(path)
    for _ in range(2):
        with pytest.raises(SystemExit, match="the machine was needed"):
            command.main(["--json", str(path)])
    assert started == [("constant", 0, 3), ("per_trajectory", 0, 3), ("constant", 1, 3), ("constant", 1, 3)]
    read = runs.Results.read(path, quick=False)
    assert asdict(read) == asdict(runs.Results(read.pilot, [run, replace(run, arm="per_trajectory")]))
    assert command.main(["--json", str(path), "--seeds", "0", "--plots", str(tmp_path / "plot.svg")]) == 0
    assert "void" in capsys.readouterr().out
    texts = xml.etree.ElementTree.parse(tmp_path / "plot.svg").iter("{http://www.w3.org/2000/svg}text")
    assert {"constant", "per_trajectory", "Steps of failures"} <= {text.text for text in texts}
    with pytest.raises(SystemExit, match="without --quick; name another"):
        command.main(["--quick", "--json", str(path)])


def test_a_pilot_whose_gates_fail_ends_with_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = runs.read_run("constant", 0, False, a_run(tmp_path / "run"), 3.0)
    good = replace(run, updates=[GOOD], initial=run.episodes)
    monkeypatch.setattr(command, "make_initial_policy", lambda *arguments: None)
    for number, (pilot, code) in enumerate(((run, 1), (good, 0))):
        monkeypatch.setattr(command, "run_pilot", lambda *arguments, pilot=pilot: pilot)
        assert command.main(["--pilot", "--json", str(tmp_path / f"{number}.json")]) == code


def test_an_initial_policy_of_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, called = tmp_path / "models" / "normalisers", []

    def run_module(module: str, *arguments: str) -> None:
        called.append(module)
        if module == "tools.pretrain_tiny_model":
            model.mkdir()
            (model / "config.json").write_text("{}")

    monkeypatch.setattr(runs, "_run_module", run_module)
    for _ in range(2):  # the second finds it
        runs.make_initial_policy(model, False, called.append)
        assert called[1::2] == ["megatron_webrl", "tools.pretrain_tiny_model"]
    monkeypatch.setattr(runs, "PRETRAINING_STEPS", 7)
    with pytest.raises(ValueError, match=r"made with the settings of .*normalisers\.json"):
        runs.make_initial_policy(model, False, called.append)
