"""Statistics of evaluation results, checked against independent computations."""

from __future__ import annotations

import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron_webrl.tasks.miniwob import all_environments
from megatron_webrl.track import evaluations, summary, tables
from megatron_webrl.track.evaluations import (
    GAINS,
    EvaluationLog,
    EvaluationRequest,
    EvaluationResult,
    aggregate_results,
    contrast,
    evaluation_metrics,
    pass_at,
    wilson_interval,
)

REQUEST = EvaluationRequest(number=1, kind="before", tasks=4, samples=1, temperature=0.0, version=3, exclusive=True)


def result(
    index: int, outcome: str = "success", *, sample: int = 0, environment: str = "click-test"
) -> EvaluationResult:
    return EvaluationResult(
        index, sample, f"{environment}/{index}", "miniwob", environment, "easy", outcome, 2, 20, 1.5, (3, 4), "w.1"
    )


def bisected(share: float, trials: int, low: float, high: float) -> float:
    """The p between `low` (inside) and `high` (outside) where |share - p| is Z standard errors of p."""
    for _ in range(200):
        middle = (low + high) / 2
        inside = abs(share - middle) <= 1.959963984540054 * math.sqrt(middle * (1 - middle) / trials)
        low, high = (middle, high) if inside else (low, middle)
    return low


@pytest.mark.parametrize(("successes", "trials"), [(0, 8), (8, 8), (1, 3), (50, 180), (179, 180), (500, 1000)])
def test_the_wilson_interval_ends_where_the_standard_errors_say(successes: int, trials: int):
    share = successes / trials
    interval = wilson_interval(share, trials)
    assert interval is not None
    assert interval[0] == pytest.approx(bisected(share, trials, share, 0.0), abs=1e-9)
    assert interval[1] == pytest.approx(bisected(share, trials, share, 1.0), abs=1e-9)
    assert wilson_interval(0.0, 0) is None


@pytest.mark.parametrize(("samples", "successes"), [(1, 0), (1, 1), (5, 2), (6, 6), (6, 0), (7, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(samples: int, successes: int):
    outcomes = [index < successes for index in range(samples)]
    for k in range(1, samples + 1):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at(k, samples, successes) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match=f"pass@{samples + 1} cannot be estimated from {samples} samples"):
        pass_at(samples + 1, samples, successes)


def paired_difference(before: list[EvaluationResult], after: list[EvaluationResult]) -> dict[str, Any] | None:
    return contrast([(1, after), (-1, before)])


def test_the_bootstrap_interval_agrees_with_all_possible_resamples():
    before = [result(index, outcome) for index, outcome in enumerate(["failure"] * 5 + ["success"])]
    after = [result(index, outcome) for index, outcome in enumerate(["success"] * 3 + ["failure"] * 3)]
    differences = np.array([1, 1, 1, 0, 0, -1])
    means = [differences[list(draw)].mean() for draw in itertools.product(range(6), repeat=6)]
    found = paired_difference(before, after)
    assert found is not None
    assert found["tasks"] == 6
    assert found["mean"] == pytest.approx(2 / 6)
    assert found["interval"] == pytest.approx(list(np.percentile(means, [2.5, 97.5])), abs=1 / 6 + 1e-9)


def test_the_difference_uses_tasks_with_verdicts_in_both_evaluations():
    before = [result(0, "failure"), result(1, "failure"), result(2, "browser_crashed")]
    after = [result(0), result(1, "engine_error"), result(2), result(3)]
    assert paired_difference(before, after) == {"mean": 1.0, "interval": [1.0, 1.0], "tasks": 1}
    assert paired_difference(before, [result(7)]) is None
    # Several samples of a task count by their mean.
    assert paired_difference([result(0), result(0, "failure", sample=1)], [result(0)]) == {
        "mean": 0.5, "interval": [0.5, 0.5], "tasks": 1,
    }  # fmt: skip


def test_success_past_the_first_step_leaves_out_episodes_that_failed_at_it():
    outcomes = ("success", "failure", "failure")
    at_once = [replace(result(index, outcome), steps=1) for index, outcome in enumerate(outcomes)]
    line = aggregate_results(REQUEST, [*at_once, result(3, "failure"), result(4, "engine_error")], 1.0)
    assert (line["success_of_judged"], line["success_past_first_step"]) == (0.25, 0.5)
    assert aggregate_results(REQUEST, at_once[1:], 1.0)["success_past_first_step"] is None


def test_episodes_without_a_verdict_and_missing_ones_count_neither_way():
    results = [result(0), result(1, "failure", environment="focus-text"), result(2, "browser_crashed")]
    line = aggregate_results(REQUEST, results, seconds=9.0, restart_epoch=2)
    assert json.loads(json.dumps(line)) == line
    assert (line["success_of_judged"], line["episodes"], line["no_verdict"], line["missing"]) == (
        0.5,
        2,
        {"browser_crashed": 1},
        1,
    )
    interval = wilson_interval(0.5, 2)
    assert interval is not None
    assert line["interval"] == list(interval)
    assert (line["steps_mean"], line["response_tokens_mean"], line["versions"]) == (2, 10, [3, 4])
    assert {name: entry["success_of_judged"] for name, entry in line["environments"].items()} == {
        "click-test": 1.0,
        "focus-text": 0.0,
    }
    assert line["difficulties"]["easy"]["episodes"] == line["sources"]["miniwob"]["episodes"] == 2
    assert line["pass_at"] == {"1": 0.5}


def test_success_is_stated_of_all_episodes_of_those_whose_website_was_reached_and_of_those_with_a_verdict():
    outcomes = ["success", "failure", "blocked", "judge_error", "browser_crashed"]
    results = [replace(result(i, each), evaluator="rubric", judge_dollars=0.25) for i, each in enumerate(outcomes)]
    line = aggregate_results(replace(REQUEST, tasks=6), results, seconds=1.0)  # one is missing
    rates = {"success_of_all": 1 / 6, "success_of_reached": 1 / 5, "success_of_judged": 1 / 2}
    assert {name: line[name] for name in rates} == rates
    assert {name: evaluation_metrics(line)[f"evaluation/{name}"] for name in rates} == rates
    assert line["evaluators"] == ["rubric"]
    assert tables.format_rates(line) == (
        "before: success 16.7% of all 6 episodes, 20.0% of 5 reached, 50.0% of 2 with a verdict; "
        "1 blocked by their website (evaluator: rubric, 1.25 dollars)"
    )


def test_requests_that_no_recording_answered_are_counted_over_all_episodes():
    results = [replace(result(0), not_recorded_requests=2), replace(result(1, "blocked"), not_recorded_requests=3)]
    line = aggregate_results(REQUEST, results, seconds=1.0)
    assert line["not_recorded_requests"] == evaluation_metrics(line)["evaluation/not_recorded_requests"] == 5


def test_an_evaluation_whose_websites_all_block_has_no_rate_of_those_reached():
    line = aggregate_results(replace(REQUEST, tasks=1), [result(0, "blocked")], seconds=1.0)
    assert (line["success_of_all"], line["success_of_reached"]) == (0.0, None)
    assert "evaluation/success_of_reached" not in evaluation_metrics(line)
    assert "0.0% of all 1 episodes, - of 0 reached, - of 0 with a verdict; 1 blocked" in tables.format_rates(line)


def test_without_verdicts_there_is_no_success_rate():
    line = aggregate_results(REQUEST, [result(0, "engine_error")], seconds=1.0)
    assert (line["success_of_judged"], line["interval"], line["episodes"], line["pass_at"]) == (None, None, 0, {})
    assert "evaluation/success_of_judged" not in evaluation_metrics(line)
    assert aggregate_results(REQUEST, [], seconds=1.0)["missing"] == 4


def test_samples_of_a_task_do_not_make_the_interval_narrower():
    request = replace(REQUEST, tasks=2, samples=3, temperature=1.0)
    results = [result(i, "success" if s <= i else "failure", sample=s) for i in range(2) for s in range(3)]
    line = aggregate_results(request, results, seconds=1.0)
    assert line["success_of_judged"] == 0.5
    interval = wilson_interval(0.5, 2)
    assert interval is not None
    assert line["interval"] == list(interval)
    assert line["pass_at"] == pytest.approx({"1": 0.5, "2": (2 / 3 + 1) / 2, "3": 1.0})


def test_success_within_a_number_of_steps_is_a_share_of_episodes_with_a_verdict():
    steps = {"success": (4, 5, 12, 51), "failure": (3,), "engine_error": (1,)}
    results = [replace(result(index, outcome), steps=count) for outcome, counts in steps.items()
               for index, count in enumerate(counts)]  # fmt: skip
    line = aggregate_results(replace(REQUEST, samples=2), results, seconds=1.0)
    assert line["success_within"] == {
        "5": 0.4, "8": 0.4, "10": 0.4, "15": 0.6, "20": 0.6, "30": 0.6, "50": 0.6,
    }  # fmt: skip
    assert evaluation_metrics(line)["evaluation/success_within/15"] == 0.6
    assert aggregate_results(REQUEST, [], seconds=1.0)["success_within"] == {}


def test_mlflow_metrics_of_a_variant_have_a_prefix_of_their_own():
    line = aggregate_results(REQUEST, [result(0), result(1, "failure", environment="focus-text")], seconds=2.0)
    values = evaluation_metrics(line)
    assert values["evaluation/success_of_judged"] == 0.5
    assert values["evaluation/success_of_judged/focus-text"] == 0.0
    assert values["evaluation/success_of_judged_low"] == line["interval"][0]
    for variant in ("blank_images", "greedy"):
        repeated = evaluation_metrics(line | {"variant": variant})
        assert repeated == {f"evaluation/{variant}/{name.partition('/')[2]}": value for name, value in values.items()}


def test_the_summary_has_the_first_evaluation_before_and_those_of_the_last_version(tmp_path: Path):
    def append(kind: str, version: int, *outcomes: str, variant: str = "") -> None:
        results = [result(index, outcome) for index, outcome in enumerate(outcomes)]
        request = replace(REQUEST, kind=kind, version=version, tasks=len(outcomes), variant=variant)
        EvaluationLog(tmp_path).append(aggregate_results(request, results, 1.0), results)

    update = {"version": 1, "steps_mean": 1.0, "staleness_mean": 0.0, "staleness_max": 0, "extra": {}}
    summary.open_updates(tmp_path).append(update)
    summary.write_summary(tmp_path, "finished", None)
    names = ("before", "after", "before_blank_images", "after_blank_images", "before_greedy", "after_greedy")
    gains = ("gain", "blind_gain", "seeing_gain", "image_gain", "greedy_gain")
    assert summary.read_summary(tmp_path)["evaluation"] == dict.fromkeys((*names, *gains))
    append("before", 0, "failure", "failure")
    append("before", 0, "failure", "success", variant="blank_images")
    append("before", 1, "success", "success", variant="greedy")  # of another policy
    append("during", 1, "failure", "success")
    append("after", 1, "failure", "success")
    summary.write_summary(tmp_path, "finished", None)
    evaluation = summary.read_summary(tmp_path)["evaluation"]
    assert (evaluation["before"]["version"], evaluation["after"]["success_of_judged"]) == (0, 0.5)
    assert evaluation["gain"]["mean"] == 0.5
    assert evaluation["image_gain"] is None
    # The run continues: version 1 is no longer the last one.
    append("after", 2, "success", "success")
    append("after", 2, "failure", "success", variant="blank_images")
    summary.open_updates(tmp_path).append(update, update | {"version": 2})
    summary.write_summary(tmp_path, "finished", None)
    evaluation = summary.read_summary(tmp_path)["evaluation"]
    assert [evaluation[name] and evaluation[name]["mean"] for name in gains] == [1.0, 0.0, 1.0, 0.5, None]
    assert [name for name in names if evaluation[name] is None] == ["before_greedy", "after_greedy"]
    # The run resumes from version 1: the evaluations of version 2 are deleted.
    EvaluationLog(tmp_path, version=1)
    assert [line["version"] for line in evaluations.read_evaluations(tmp_path)] == [0, 0, 1, 1, 1]


def test_a_run_without_updates_has_an_evaluation_after_training_of_version_0(tmp_path: Path):
    results = [result(0)]
    EvaluationLog(tmp_path).append(
        aggregate_results(replace(REQUEST, kind="after", version=0, tasks=1), results, 1.0), results
    )
    summary.write_summary(tmp_path, "finished", None)
    assert summary.read_summary(tmp_path)["evaluation"]["after"]["success_of_judged"] == 1.0


def successes_of(rates: tuple[float, float, float], seed: int, missing: int) -> list[EvaluationResult]:
    """Results of 40 tasks with two samples, of which some have no verdict and `missing` tasks no result."""
    rng = np.random.default_rng(seed)
    return [
        result(index, rng.choice(["success", "failure", "engine_error"], p=rates), sample=sample)
        for index in range(missing, 40)
        for sample in range(2)
    ]


def test_the_gain_that_needs_the_screenshot_is_a_difference_of_differences_over_tasks_with_verdicts_in_all_four():
    rates = ((0.3, 0.6, 0.1), (0.7, 0.2, 0.1), (0.2, 0.7, 0.1), (0.4, 0.3, 0.3))
    before, after, before_blank, after_blank = (
        successes_of(each, seed, missing) for seed, (each, missing) in enumerate(zip(rates, (0, 3, 0, 9), strict=True))
    )
    matrix = np.full((4, 40, 2), np.nan)  # [evaluation, task, sample]
    for number, results in enumerate((before, after, before_blank, after_blank)):
        for each in results:
            if each.outcome != "engine_error":
                matrix[number, each.index, each.sample] = each.outcome == "success"
    judged = ~np.isnan(matrix).all(axis=2).any(axis=0)
    assert 20 < judged.sum() < 31
    means = np.nanmean(matrix[:, judged], axis=2)
    each_task = (means[1] - means[0]) - (means[3] - means[2])
    names = ("before", "after", "before_blank_images", "after_blank_images")

    def seeing_gain(*evaluations: list[EvaluationResult]) -> dict[str, Any] | None:
        results = dict(zip(names, evaluations, strict=True))
        return contrast((weight, results[name]) for name, weight in GAINS["seeing_gain"].items())

    found = seeing_gain(before, after, before_blank, after_blank)
    assert found is not None
    assert (found["tasks"], found["mean"]) == (judged.sum(), pytest.approx(each_task.mean()))
    weights = np.random.default_rng(7).multinomial(len(each_task), [1 / len(each_task)] * len(each_task), 40_000)
    resampled = weights @ each_task / len(each_task)
    assert found["interval"] == pytest.approx(list(np.percentile(resampled, [2.5, 97.5])), abs=0.01)
    assert seeing_gain(before, after, before_blank, []) is None
    # Without any difference by seeing, the two gains cancel in every task.
    assert seeing_gain(before, after, before, after)["interval"] == [0.0, 0.0]  # type: ignore[index]
    assert contrast([(1, before)])["mean"] == pytest.approx(np.nanmean(np.nanmean(matrix[0], axis=1)))  # type: ignore[index]


def six_evaluations(names: list[str], folder: Path) -> dict[str, Any]:
    for number, name in enumerate(evaluations.NAMES):
        kind, _, variant = name.partition("_")
        rng = np.random.default_rng(number)
        results = [
            result(i, str(rng.choice(["success", "failure"])), environment=names[i % len(names)]) for i in range(240)
        ]
        results[:30] = [replace(each, outcome="success") for each in results[:30]]
        request = replace(
            REQUEST,
            kind=kind,
            variant=variant,
            version=int(kind == "after"),
            tasks=240,
            temperature=float(variant != "greedy"),
        )
        line = aggregate_results(request, [replace(each, evaluator="page") for each in results], 1.0)
        EvaluationLog(folder).append(line, results)
    return evaluations.summarise(folder, 1)


def test_six_evaluations_of_the_longest_environment_names_fit_a_terminal_of_100_columns(tmp_path: Path):
    known = sorted(all_environments(), key=len)
    evaluation = six_evaluations([*known[-7:], known[0]], tmp_path)
    lines = [evaluation[name] for name in evaluations.NAMES]
    out = io.StringIO()
    console = Console(file=out, width=100)
    console.print(tables.evaluation_table(lines))
    for line in tables.gain_lines(evaluation):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    for name in known[-7:]:
        [row] = [line for line in text.splitlines() if f" {name} " in line]  # in one line
        assert row.count("%") == 6
    *_, gain, blind, seeing, first_step = text.splitlines()
    assert [line.partition(":")[0] for line in (gain, blind, seeing, first_step)] == [
        "gain of the run", "gain with blank images", "gain that needs the screenshot", "not failed at the first step",
    ]  # fmt: skip


def test_the_table_fits_a_terminal_of_80_columns():
    results = [
        result(i, "success" if i % 3 else "failure", environment=f"click-collapsible-{i % 6}") for i in range(60)
    ]
    line = aggregate_results(replace(REQUEST, tasks=60), results, 1.0)
    out = io.StringIO()
    lines = [line, line | {"kind": "after"}, line | {"kind": "after", "variant": "blank_images"}]
    Console(file=out, width=80).print(tables.evaluation_table(lines))
    assert "…" not in out.getvalue()
    assert "66.7%" in out.getvalue()
    assert "54-77" in out.getvalue()
    line_of_text = tables.format_difference("gain", {"mean": 0.25, "interval": [0.1, 0.4], "tasks": 60})
    assert line_of_text == "gain: +25.0 points, 95 % interval +10.0 to +40.0 (bootstrap, 60 tasks)"
