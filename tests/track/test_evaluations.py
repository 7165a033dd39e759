"""Statistics of evaluation results, checked against independent computations."""

from __future__ import annotations

import itertools
import json
import math
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from tests.file_faults import FileFaults, run_forked
from tests.waiting import run_apart

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
    low, high = wilson_interval(share, trials) or (-1.0, -1.0)
    assert low == pytest.approx(bisected(share, trials, share, 0.0), abs=1e-9)
    assert high == pytest.approx(bisected(share, trials, share, 1.0), abs=1e-9)


def test_a_line_states_rates_of_all_episodes_of_reached_websites_and_of_verdicts():
    outcomes = ["success", "failure", "blocked", "judge_error", "browser_crashed"]
    results = [
        replace(result(i, each), evaluator="rubric", judge_dollars=0.25, not_recorded_requests=i)
        for i, each in enumerate(outcomes)
    ]
    results[1] = replace(results[1], environment="focus-text", steps=1)
    assert aggregate_results(REQUEST, results, seconds=9.0)["votes_differ"] is None
    results[:4] = [replace(each, votes_differ=i == 1) for i, each in enumerate(results[:4])]  # the last was not judged
    line = aggregate_results(replace(REQUEST, tasks=6), results, seconds=9.0, restart_epoch=2)  # one is missing
    assert json.loads(json.dumps(line)) == line
    rates = {"success_of_all": 1 / 6, "success_of_reached": 1 / 5, "success_of_judged": 1 / 2}
    assert {name: line[name] for name in rates} == rates
    assert line["success_past_first_step"] == 1.0  # without the failure at it
    metrics = evaluation_metrics(line)
    assert {name: metrics[f"evaluation/{name}"] for name in rates} == rates
    assert (line["episodes"], line["missing"], line["pass_at"], line["evaluators"]) == (2, 1, {"1": 0.5}, ["rubric"])
    assert line["no_verdict"] == {"blocked": 1, "judge_error": 1, "browser_crashed": 1}
    assert line["interval"] == list(wilson_interval(0.5, 2) or ())
    assert (line["steps_mean"], line["response_tokens_mean"], line["versions"]) == (1.5, 40 / 3, [3, 4])
    assert line["votes_differ"] == metrics["evaluation/votes_differ"] == 1 / 4
    assert line["not_recorded_requests"] == metrics["evaluation/not_recorded_requests"] == 10
    assert [metrics[f"evaluation/success_of_judged/{name}"] for name in ("click-test", "focus-text")] == [1.0, 0.0]
    assert metrics["evaluation/success_of_judged_low"] == line["interval"][0]
    assert line["difficulties"]["easy"]["episodes"] == line["sources"]["miniwob"]["episodes"] == 2
    assert tables.format_rates(line) == (
        "before: success 16.7% of all 6 episodes, 20.0% of 5 reached, 50.0% of 2 with a verdict; "
        "1 blocked by their website (evaluator: rubric, 1.25 dollars, votes differ on 25.0%)"
    )
    assert tables.format_published(line) == (
        "by published denominators: WebGym 33.3% of 3, AsyncWebRL 33.3% of 3; Online-Mind2Web: of all"
    )
    for variant in ("blank_images", "greedy"):
        repeated = evaluation_metrics(line | {"variant": variant})
        assert repeated == {f"evaluation/{variant}/{name.partition('/')[2]}": value for name, value in metrics.items()}


def test_published_denominators_leave_out_blocks_and_crashes_and_only_webgym_time_limits():
    for outcomes, webgym, async_webrl in (
        ("success failure judge_error context_overflow", (1 / 4, 4), (1 / 4, 4)),
        ("success failure blocked browser_crashed engine_error", (1 / 2, 2), (1 / 2, 2)),
        ("success episode_timeout episode_timeout", (1.0, 1), (1 / 3, 3)),
        ("blocked episode_timeout", (None, 0), (0.0, 1)), ("", (None, 0), (None, 0)),
    ):  # fmt: skip
        results = [result(i, outcome) for i, outcome in enumerate(outcomes.split())]
        line = aggregate_results(replace(REQUEST, tasks=9), results, seconds=1.0)  # the others are missing
        found = {name: (rate["success"], rate["episodes"]) for name, rate in line["published"].items()}
        assert found == {"webgym": webgym, "async_webrl": async_webrl}, outcomes
        assert all(f"of {count}" in tables.format_published(line) for _, count in (webgym, async_webrl))


def test_rates_without_episodes_are_missing():
    line = aggregate_results(replace(REQUEST, tasks=1), [result(0, "blocked")], seconds=1.0)
    assert (line["success_of_all"], line["success_of_reached"], line["success_of_judged"]) == (0.0, None, None)
    assert (line["interval"], line["episodes"], line["pass_at"], line["success_past_first_step"]) == (None, 0, {}, None)
    assert not {"evaluation/success_of_reached", "evaluation/success_of_judged"} & evaluation_metrics(line).keys()
    assert "0.0% of all 1 episodes, - of 0 reached, - of 0 with a verdict; 1 blocked" in tables.format_rates(line)
    line = aggregate_results(REQUEST, [], seconds=1.0)
    assert (line["missing"], line["success_within"]) == (4, {})


def test_samples_of_a_task_do_not_make_the_interval_narrower():
    request = replace(REQUEST, tasks=2, samples=3, temperature=1.0)
    results = [result(i, "success" if s <= i else "failure", sample=s) for i in range(2) for s in range(3)]
    line = aggregate_results(request, results, seconds=1.0)
    assert (line["success_of_judged"], line["interval"]) == (0.5, list(wilson_interval(0.5, 2) or ()))
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


@pytest.mark.parametrize(("samples", "successes"), [(1, 0), (1, 1), (5, 2), (6, 6), (6, 0), (7, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(samples: int, successes: int):
    outcomes = [index < successes for index in range(samples)]
    for k in range(1, samples + 1):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at(k, samples, successes) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match=f"pass@{samples + 1} cannot be estimated from {samples} samples"):
        pass_at(samples + 1, samples, successes)


def crash_evaluations() -> None:
    """A line that is there has its episodes, and once `append` has returned it is there."""
    line, done = aggregate_results(REQUEST, [result(0)], seconds=1.0), False
    for at, how in itertools.product(range(1, 30), ({}, {"power_loss": True}, {"power_loss": True, "seed": 1})):
        if done and not how:
            break
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:  # an fsync takes no time there
            folder, returned = Path(memory, "folder"), Path(memory, "returned")
            folder.mkdir()

            def crash(folder: Path = folder, returned: Path = returned, at: int = at, how: Any = how) -> None:
                with FileFaults(folder, at, **how) as faults:
                    EvaluationLog(folder).append(line, [result(0)])
                    returned.touch()
                    faults.crash()

            assert run_forked(crash) == -signal.SIGKILL
            found, done = evaluations.read_evaluations(folder), returned.exists()
            assert [evaluations.read_results(folder, each) for each in found] == [[result(0)]] * len(found)
            assert found or not done
    assert 8 < at < 29


def test_no_crash_leaves_an_evaluation_without_its_episodes_or_loses_one_that_is_recorded():
    run_apart(crash_evaluations)


def test_the_summary_has_the_first_evaluation_before_and_those_of_the_last_version(tmp_path: Path):
    def append(kind: str, version: int, *outcomes: str, variant: str = "") -> None:
        results = [result(index, outcome) for index, outcome in enumerate(outcomes)]
        request = replace(REQUEST, kind=kind, version=version, tasks=len(outcomes), variant=variant)
        EvaluationLog(tmp_path).append(aggregate_results(request, results, 1.0), results)

    def evaluation() -> dict[str, Any]:
        summary.write_summary(tmp_path, "finished", None)
        return summary.read_summary(tmp_path)["evaluation"]

    names = ("before", "after", "before_blank_images", "after_blank_images", "before_greedy", "after_greedy")
    gains = ("gain", "blind_gain", "seeing_gain", "image_gain", "greedy_gain")
    assert evaluation() == dict.fromkeys((*names, *gains))
    append("after", 0, "success")  # a run without updates
    assert evaluation()["after"]["success_of_judged"] == 1.0
    update = {"version": 1, "steps_mean": 1.0, "staleness_mean": 0.0, "staleness_max": 0, "extra": {}}
    summary.open_updates(tmp_path).append(update)
    append("before", 0, "failure", "failure")
    append("before", 0, "failure", "success", variant="blank_images")
    append("before", 1, "success", "success", variant="greedy")  # of another policy
    append("during", 1, "failure", "success")
    append("after", 1, "failure", "success")
    found = evaluation()
    assert (found["before"]["version"], found["after"]["success_of_judged"]) == (0, 0.5)
    assert (found["gain"]["mean"], found["image_gain"]) == (0.5, None)
    # The run continues: version 1 is no longer the last one.
    append("after", 2, "success", "success")
    append("after", 2, "failure", "success", variant="blank_images")
    summary.open_updates(tmp_path).append(update, update | {"version": 2})
    found = evaluation()
    assert [found[name] and found[name]["mean"] for name in gains] == [1.0, 0.0, 1.0, 0.5, None]
    assert [name for name in names if found[name] is None] == ["before_greedy", "after_greedy"]
    # The run resumes from version 1: the evaluations of version 2 are deleted.
    EvaluationLog(tmp_path, version=1)
    assert [line["version"] for line in evaluations.read_evaluations(tmp_path)] == [0, 0, 0, 1, 1, 1]


def test_the_gain_that_needs_the_screenshot_is_a_difference_of_differences_over_tasks_with_verdicts_in_all_four():
    rates = ((0.3, 0.6, 0.1), (0.7, 0.2, 0.1), (0.2, 0.7, 0.1), (0.4, 0.3, 0.3))
    outcomes = ["success", "failure", "engine_error"]
    rng, matrix, made = np.random.default_rng(0), np.full((4, 40, 2), np.nan), []  # [evaluation, task, sample]
    for number, (rate, missing) in enumerate(zip(rates, (0, 3, 0, 9), strict=True)):
        made.append([result(i, rng.choice(outcomes, p=rate), sample=s) for i in range(missing, 40) for s in range(2)])
        for each in made[-1]:
            if each.outcome != "engine_error":
                matrix[number, each.index, each.sample] = each.outcome == "success"
    before, after, before_blank, after_blank = made
    judged = ~np.isnan(matrix).all(axis=2).any(axis=0)
    assert 20 < judged.sum() < 31
    means = np.nanmean(matrix[:, judged], axis=2)  # several samples of a task count by their mean
    each_task = (means[1] - means[0]) - (means[3] - means[2])

    line = aggregate_results(replace(REQUEST, tasks=40, samples=2), [], 1.0)

    def seeing_gain(*evaluations: list[EvaluationResult]) -> Any:
        names = ("before", "after", "before_blank_images", "after_blank_images")
        results = dict(zip(names, evaluations, strict=True))
        return contrast((weight, line, results[name]) for name, weight in GAINS["seeing_gain"].items())

    found = seeing_gain(before, after, before_blank, after_blank)
    assert (found["tasks"], found["mean"]) == (judged.sum(), pytest.approx(each_task.mean()))
    weights = np.random.default_rng(7).multinomial(len(each_task), [1 / len(each_task)] * len(each_task), 40_000)
    resampled = weights @ each_task / len(each_task)
    assert found["interval"] == pytest.approx(list(np.percentile(resampled, [2.5, 97.5])), abs=0.01)
    assert seeing_gain(before, after, before_blank, []) is None
    # Without any difference by seeing, the two gains cancel in every task.
    assert seeing_gain(before, after, before, after)["interval"] == [0.0, 0.0]


def test_by_intention_to_treat_an_episode_without_a_verdict_or_a_result_is_a_failure():
    """Task 0 is lost to a crash after training, 1 is blocked before, 2 has no result after, 3 succeeds in 1 of 2."""
    request = replace(REQUEST, samples=2)
    outcomes = {
        "before": ["success", "blocked", "success", "failure", "failure", "blocked", "success", "failure"],
        "after": ["engine_error", "success", None, "success", "engine_error", "success", None, "failure"],
    }
    terms = []
    for name, weight in GAINS["gain"].items():
        episodes = [(request.task_and_sample(i), outcome) for i, outcome in enumerate(outcomes[name])]
        results = [result(index, outcome, sample=sample) for (index, sample), outcome in episodes if outcome]
        terms.append((weight, aggregate_results(request, results, 1.0), results))
    found = contrast(terms)
    assert found is not None
    assert (found["mean"], found["tasks"]) == (0.5, 1)  # of task 3 alone
    assert (found["of_all"]["mean"], found["of_all"]["tasks"]) == ((-0.5 + 1 - 1 + 0.5) / 4, 4)
    weights = np.random.default_rng(7).multinomial(4, [1 / 4] * 4, 40_000)
    resampled = weights @ np.array([-0.5, 1, -1, 0.5]) / 4
    assert found["of_all"]["interval"] == pytest.approx(list(np.percentile(resampled, [2.5, 97.5])), abs=0.02)
    judged, all_episodes = tables.difference_lines("gain of the run", found)
    assert "+50.0 points" in judged
    assert all_episodes.startswith("no verdict as a failure: +0.0 points")
    assert "4 tasks" in all_episodes
    complete = [result(i, "success", sample=s) for i in range(4) for s in range(2)]
    line = aggregate_results(request, complete, 1.0)
    assert len(tables.difference_lines("gain", contrast([(1, line, complete)]) or {})) == 1
