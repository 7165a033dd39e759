"""Statistics of evaluation results, with confidence intervals; docs/evaluation.md has the definitions.

Success is a share of all requested episodes, of those whose website was reached, and of those with a verdict; episodes
without one (a blocked page, a crash, an error, a time limit) are counted by reason.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_webrl.track.evaluation.evaluation_queue import EvaluationRequest, EvaluationResult
from megatron_webrl.types import BLOCKED
from megatron_webrl.util.clock import steady_time
from megatron_webrl.util.text import metric_label

Z_95 = 1.959963984540054  # half-width of a two-sided 95 % interval of the normal distribution, in standard deviations
BOOTSTRAP_RESAMPLES = 10_000
_RESAMPLES_AT_ONCE = 100  # in memory
STEP_LIMITS = (5, 8, 10, 15, 20, 30, 50)  # of success_within


def wilson_interval(fraction: float, trials: int) -> tuple[float, float] | None:
    """The 95 % interval of a probability, given the observed `fraction` of `trials`; None without trials. Score
    interval of E. B. Wilson, Probable Inference (1927): all p with |fraction - p| <= Z sqrt(p (1 - p) / trials).
    """
    if not trials:
        return None
    spread = Z_95 * Z_95 / trials
    centre = (fraction + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (fraction * (1 - fraction) + spread / 4)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at(k: int, samples: int, successes: int) -> float:
    """Probability that `k` of the `samples`, drawn without replacement, include a success: 1 - C(n - c, k) / C(n, k),
    as in Chen et al. (Evaluating Large Language Models Trained on Code, 2021, eq. 1). ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples of a task")
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def success_within(success_steps: Iterable[int], episodes: int) -> dict[int, float]:
    """Share of `episodes` that succeed in at most 5, 8, ... steps, by this limit; `success_steps` of each success."""
    steps = np.fromiter(success_steps, int)
    return {limit: float((steps <= limit).sum()) / episodes for limit in STEP_LIMITS} if episodes else {}


def aggregate_results(
    request: EvaluationRequest, results: Iterable[EvaluationResult], seconds: float, restart_epoch: int = 0
) -> dict[str, Any]:
    """A line of evaluations.jsonl: success with its interval in total, by environment, difficulty and source. Episodes
    without a result count as missing; `seconds` is the wall-clock time of the evaluation.

    Successes as a share: `success_of_all` of all requested episodes, `success_of_reached` of all but those that their
    website blocked, `success_of_judged` of those with a verdict, `success_past_first_step` of those of them
    that did not fail at their first step. A rate of no episode is None.
    """
    results = list(results)
    outcomes = Counter(result.outcome for result in results)
    reached = request.episodes - outcomes[BLOCKED]
    versions = [version for result in results if result.versions for version in result.versions]
    return {
        "kind": request.kind,
        "variant": request.variant,
        "version": request.version,
        "versions": [min(versions), max(versions)] if versions else None,
        "restart_epoch": restart_epoch,
        "first_task": request.first_task,
        "tasks_requested": request.tasks,
        "samples": request.samples,
        "temperature": request.temperature,
        **_statistics(results),
        "missing": request.episodes - len(results),
        "success_of_all": outcomes["success"] / max(1, request.episodes),
        "success_of_reached": outcomes["success"] / reached if reached else None,
        "evaluators": sorted({result.evaluator for result in results if result.evaluator}),
        "judge_dollars": sum(result.judge_dollars for result in results),
        "not_recorded_requests": sum(result.not_recorded_requests for result in results),
        "pass_at": _pass_at(results, request.samples),
        "success_within": _success_within(results),
        "wall_seconds": seconds,
        "finished_at": steady_time(),
        "environments": _statistics_by(results, lambda result: result.environment),
        "difficulties": _statistics_by(results, lambda result: result.difficulty),
        "sources": _statistics_by(results, lambda result: result.source),
    }


def mlflow_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """MLflow metrics from a line of evaluations.jsonl; those of a variant have its name in front."""
    prefix = f"evaluation/{line['variant']}" if line["variant"] else "evaluation"
    names = ("steps_mean", "response_tokens_mean", "seconds_mean", "success_of_all", "judge_dollars")
    metrics = {name: line[name] for name in (*names, "missing", "not_recorded_requests", "wall_seconds")}
    metrics |= {"episodes": line["episodes"], "no_verdict": sum(line["no_verdict"].values())}
    if line["success_of_reached"] is not None:
        metrics["success_of_reached"] = line["success_of_reached"]
    if line["interval"] is not None:
        low, high = line["interval"]
        rates = {"": line["success_of_judged"], "_low": low, "_high": high}
        metrics |= {f"success_of_judged{end}": rate for end, rate in rates.items()}
    for name in ("pass_at", "success_within"):
        metrics |= {f"{name}/{number}": value for number, value in line[name].items()}
    for part in (line["environments"], line["difficulties"]):
        rates = {metric_label(name): entry["success_of_judged"] for name, entry in part.items()}
        metrics |= {f"success_of_judged/{name}": rate for name, rate in rates.items() if rate is not None}
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}


def paired_difference(
    before: Iterable[EvaluationResult], after: Iterable[EvaluationResult], seed: int = 0
) -> dict[str, Any] | None:
    """The `contrast` after - before: how much a policy gained."""
    return contrast(((1, after), (-1, before)), seed)


def seeing_gain(
    before: Iterable[EvaluationResult],
    after: Iterable[EvaluationResult],
    before_blank: Iterable[EvaluationResult],
    after_blank: Iterable[EvaluationResult],
    seed: int = 0,
) -> dict[str, Any] | None:
    """The `contrast` (after - before) - (after_blank - before_blank), a difference of differences: what the policy
    gained beyond what it gained with blank images. It is positive, too, when a habit that needs no screenshot goes and
    what the policy saw before counts for more: it does not show that something was learned to be seen.
    """
    return contrast(((1, after), (-1, before), (-1, after_blank), (1, before_blank)), seed)


def contrast(terms: Iterable[tuple[int, Iterable[EvaluationResult]]], seed: int = 0) -> dict[str, Any] | None:
    """Weighted sum of the success of the same tasks in several evaluations, mean over tasks, with a 95 % interval.

    `terms`: weight and results of each evaluation. Of each task sum_e weight_e * success_e, where success_e is the mean
    of its samples. A task without a verdict in one of them is left out; None if no task is left. Paired bootstrap over
    the tasks (Efron, Bootstrap Methods, 1979): 2.5th to 97.5th percentile of BOOTSTRAP_RESAMPLES means.
    """
    weighted = [(weight, _successes(results)) for weight, results in terms]
    tasks = sorted(set.intersection(*(set(successes) for _, successes in weighted)))
    if not tasks:
        return None
    values = np.array([sum(weight * np.mean(successes[task]) for weight, successes in weighted) for task in tasks])
    rng = np.random.default_rng(seed)
    draws = (
        rng.integers(0, len(tasks), (_RESAMPLES_AT_ONCE, len(tasks)))
        for _ in range(BOOTSTRAP_RESAMPLES // _RESAMPLES_AT_ONCE)
    )
    means = np.concatenate([values[draw].mean(axis=1) for draw in draws])
    low, high = np.percentile(means, [2.5, 97.5])
    return {"mean": float(values.mean()), "interval": [float(low), float(high)], "tasks": len(tasks)}


def _statistics(results: Sequence[EvaluationResult]) -> dict[str, Any]:
    judged = [result for result in results if result.has_verdict]
    success = sum(result.outcome == "success" for result in judged) / len(judged) if judged else None
    # Samples of one task are correlated: counting tasks makes the interval too wide rather than too narrow.
    interval = wilson_interval(success, len({result.index for result in judged})) if success is not None else None
    steps = sum(result.steps for result in judged)
    past_first = [result for result in judged if result.outcome == "success" or result.steps > 1]
    return {
        "success_of_judged": success,
        "interval": list(interval) if interval else None,
        "success_past_first_step": (
            sum(result.outcome == "success" for result in past_first) / len(past_first) if past_first else None
        ),
        "episodes": len(judged),
        "no_verdict": dict(sorted(Counter(result.outcome for result in results if not result.has_verdict).items())),
        "steps_mean": steps / max(1, len(judged)),
        "response_tokens_mean": sum(result.response_tokens for result in judged) / max(1, steps),
        "seconds_mean": sum(result.seconds for result in judged) / max(1, len(judged)),
    }


def _statistics_by(
    results: Sequence[EvaluationResult], name: Callable[[EvaluationResult], str]
) -> dict[str, dict[str, Any]]:
    parts: dict[str, list[EvaluationResult]] = defaultdict(list)
    for result in results:
        parts[name(result)].append(result)
    return {key: _statistics(parts[key]) for key in sorted(parts)}


def _successes(results: Iterable[EvaluationResult]) -> dict[tuple[str, str], list[bool]]:
    """For each task with verdicts, by source and id: whether each sample succeeded."""
    successes: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for result in results:
        if result.has_verdict:
            successes[result.source, result.task].append(result.outcome == "success")
    return successes


def _pass_at(results: Sequence[EvaluationResult], samples: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... and `samples`, over the tasks with at least k verdicts."""
    tasks = _successes(results).values()
    ks = sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})
    values_by_k = {k: [pass_at(k, len(each), sum(each)) for each in tasks if len(each) >= k] for k in ks}
    return {str(k): sum(values) / len(values) for k, values in values_by_k.items() if values}


def _success_within(results: Sequence[EvaluationResult]) -> dict[str, float]:
    judged = [result for result in results if result.has_verdict]
    shares = success_within((result.steps for result in judged if result.outcome == "success"), len(judged))
    return {str(limit): share for limit, share in shares.items()}
