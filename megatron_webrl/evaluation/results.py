"""What the results of an evaluation say, and how sure that is. Pure functions; docs/evaluation.md has the definitions.

Success is the share of successes among episodes with a verdict. Episodes without one (a crashed browser, an engine
error, a time limit) are neither: they are counted beside it by name, and so is what was never run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_webrl.evaluation.evaluation_queue import EvaluationRequest, EvaluationResult
from megatron_webrl.tracking.metrics import mean

Z_95 = 1.959963984540054
"""Of a two-sided interval of 95 % under a normal distribution."""
BOOTSTRAP_RESAMPLES = 10_000
_AT_ONCE = 100  # resamples in memory at once


def wilson_interval(fraction: float, trials: int) -> tuple[float, float] | None:
    """The 95 % interval of a probability of which `share` of `trials` was seen; None without trials.

    The score interval of E. B. Wilson, Probable Inference, the Law of Succession, and Statistical Inference (1927):
    all p with |share - p| <= Z sqrt(p (1 - p) / trials).
    """
    if not trials:
        return None
    spread = Z_95 * Z_95 / trials
    centre = (fraction + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (fraction * (1 - fraction) + spread / 4)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at(k: int, samples: int, successes: int) -> float:
    """Probability that one of `k` of the `samples` drawn without putting back is a success: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al., Evaluating Large Language Models Trained on Code (2021), equation 1. Raises
    ValueError for k outside 1..samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be told from {samples} samples of a task")
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def aggregate_results(
    request: EvaluationRequest, results: Iterable[EvaluationResult], seconds: float, restart_epoch: int = 0
) -> dict[str, Any]:
    """A line of evaluations.jsonl: success with its interval over all, by environment, difficulty and source.

    `results` may lack episodes, which count as missing; `seconds` is the wall clock of the whole.
    """
    found = list(results)
    versions = [version for result in found if result.versions for version in result.versions]
    return {
        "kind": request.kind,
        "version": request.version,
        "versions": [min(versions), max(versions)] if versions else None,
        "restart_epoch": restart_epoch,
        "tasks_requested": request.tasks,
        "samples": request.samples,
        "temperature": request.temperature,
        **_figures(found),
        "missing": request.episodes - len(found),
        "pass_at": _pass_at(found, request.samples),
        "wall_seconds": seconds,
        "environments": _by(found, lambda result: result.environment),
        "difficulties": _by(found, lambda result: result.difficulty),
        "sources": _by(found, lambda result: result.source),
    }


def mlflow_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Flat names and numbers for MLflow, from a line of evaluations.jsonl."""
    prefix = "evaluation/blank_images" if line["kind"] == "blank_images" else "evaluation"
    names = ("steps_mean", "response_tokens_mean", "seconds_mean")
    found = {name: line[name] for name in (*names, "missing", "wall_seconds")}
    found |= {"episodes": line["episodes"], "no_verdict": sum(line["no_verdict"].values())}
    if line["interval"] is not None:
        found |= {"success": line["success"], "success_low": line["interval"][0], "success_high": line["interval"][1]}
    found |= {f"pass_at/{k}": value for k, value in line["pass_at"].items()}
    for part in (line["environments"], line["difficulties"]):
        found |= {f"success/{name}": entry["success"] for name, entry in part.items() if entry["success"] is not None}
    return {f"{prefix}/{name}": float(value) for name, value in found.items()}


def paired_difference(
    before: Iterable[EvaluationResult], after: Iterable[EvaluationResult], seed: int = 0
) -> dict[str, Any] | None:
    """How much more of the same tasks succeed after than before, with a 95 % interval; None without a common task.

    The paired bootstrap: of each task judged both times the difference of its mean successes; tasks are drawn with
    putting back RESAMPLES times, and the interval goes from the 2.5th to the 97.5th percentile of the means.
    """
    first, second = _successes(before), _successes(after)
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    differences = np.array([np.mean(second[task]) - np.mean(first[task]) for task in common])
    generator = np.random.default_rng(seed)
    draws = (
        generator.integers(0, len(common), (_AT_ONCE, len(common))) for _ in range(BOOTSTRAP_RESAMPLES // _AT_ONCE)
    )
    means = np.concatenate([differences[draw].mean(axis=1) for draw in draws])
    low, high = np.percentile(means, [2.5, 97.5])
    return {"mean": float(differences.mean()), "interval": [float(low), float(high)], "tasks": len(common)}


def _figures(results: Sequence[EvaluationResult]) -> dict[str, Any]:
    judged = [result for result in results if result.has_verdict]
    success = mean([result.outcome == "success" for result in judged]) if judged else None
    # Episodes of one task depend on each other: taken for one, they make the interval too wide rather than too narrow.
    interval = wilson_interval(success, len({result.index for result in judged})) if success is not None else None
    steps = sum(result.steps for result in judged)
    return {
        "success": success,
        "interval": list(interval) if interval else None,
        "episodes": len(judged),
        "no_verdict": dict(sorted(Counter(result.outcome for result in results if not result.has_verdict).items())),
        "steps_mean": mean([result.steps for result in judged]),
        "response_tokens_mean": sum(result.response_tokens for result in judged) / max(1, steps),
        "seconds_mean": mean([result.seconds for result in judged]),
    }


def _by(results: Sequence[EvaluationResult], name: Callable[[EvaluationResult], str]) -> dict[str, dict[str, Any]]:
    parts: dict[str, list[EvaluationResult]] = defaultdict(list)
    for result in results:
        parts[name(result)].append(result)
    return {key: _figures(parts[key]) for key in sorted(parts)}


def _successes(results: Iterable[EvaluationResult]) -> dict[tuple[str, str], list[bool]]:
    """Of each task that was judged: which samples succeeded."""
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for result in results:
        if result.has_verdict:
            found[result.source, result.task].append(result.outcome == "success")
    return found


def _pass_at(results: Sequence[EvaluationResult], samples: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... and `samples`, over the tasks with at least k judged samples."""
    tasks = _successes(results).values()
    ks = sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})
    found = {k: [pass_at(k, len(each), sum(each)) for each in tasks if len(each) >= k] for k in ks}
    return {str(k): mean(values) for k, values in found.items() if values}
