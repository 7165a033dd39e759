"""Metrics of complete groups before selection, dropped ones included, and of the verdicts on their episodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_webrl.track.evaluations import pass_at, success_within
from megatron_webrl.trainer.credit.advantages import common_outcome
from megatron_webrl.types import BLOCKED, FAULT_OUTCOMES, JUDGE_ERROR, Group, Trajectory, Verdict
from megatron_webrl.util.text import metric_label

GROUP_KINDS = ("all_succeeded", "all_failed")
ALWAYS_NAMED_MASKS = (BLOCKED, JUDGE_ERROR)  # have a rate even if it is 0
FIGURES = ("calls", "prompt_tokens", "response_tokens", "dollars", "seconds")
UNJUDGED = "none"  # evaluator of an episode without a regular end
_Sums = dict[str, float]  # by figure, and "episodes"


class VerdictStatistics:
    """Sums over verdicts by evaluator and outcome. Episodes that ended before they could be judged do not count."""

    def __init__(self) -> None:
        self._by_outcome: defaultdict[str, defaultdict[str, _Sums]]
        self._stages: defaultdict[str, Counter[str]]
        self._errors: defaultdict[str, Counter[str]]
        self._reset()

    def add(self, verdict: Verdict) -> None:
        """Count a verdict."""
        if verdict.evaluator == UNJUDGED:
            return
        judge = metric_label(f"{verdict.evaluator} {verdict.protocol}")
        sums = self._by_outcome[judge][metric_label(verdict.outcome)]
        sums["episodes"] = sums.get("episodes", 0) + 1
        for figure in FIGURES:
            sums[figure] = sums.get(figure, 0.0) + getattr(verdict, figure)
        for stage in verdict.stages:
            name = metric_label(stage.name)
            self._stages[name].update(questions=1, attempts=stage.attempts, undecided=int(stage.decision == "none"))
            self._errors[name].update(map(metric_label, stage.errors))

    def pop_metrics(self) -> dict[str, float]:
        """Metrics since the last call, by MLflow name; cost only of evaluators that asked a judge model."""
        metrics: dict[str, float] = {}
        for judge, outcomes in sorted(self._by_outcome.items()):
            metrics |= _judge_metrics(f"verdict/{judge}", outcomes)
        for stage, counts in sorted(self._stages.items()):
            metrics[f"judge_stage/{stage}/questions"] = float(counts["questions"])
            metrics[f"judge_stage/{stage}/undecided_rate"] = counts["undecided"] / counts["questions"]
            for error, count in sorted(self._errors[stage].items()):
                metrics[f"judge_stage/{stage}/error_rate/{error}"] = count / max(1, counts["attempts"])
        self._reset()
        return metrics

    def _reset(self) -> None:
        self._by_outcome = defaultdict(lambda: defaultdict(dict))
        self._stages, self._errors = defaultdict(Counter), defaultdict(Counter)


def _judge_metrics(prefix: str, outcomes: dict[str, _Sums]) -> dict[str, float]:
    episodes = sum(sums["episodes"] for sums in outcomes.values())
    metrics = {f"{prefix}/episodes": float(episodes)}
    metrics |= {f"{prefix}/rate/{name}": sums["episodes"] / episodes for name, sums in sorted(outcomes.items())}
    totals = {figure: sum(sums[figure] for sums in outcomes.values()) for figure in FIGURES}
    if not totals["calls"]:
        return metrics
    metrics[f"{prefix}/dollars_total"] = totals["dollars"]
    for figure in FIGURES:
        metrics[f"{prefix}/{figure}"] = totals[figure] / episodes
        metrics |= {
            f"{prefix}/{figure}/{name}": sums[figure] / sums["episodes"] for name, sums in sorted(outcomes.items())
        }
    return metrics


@dataclass
class _Totals:
    """Counts since the last call of `pop_metrics`. Holds no trajectory: their arrays are views of the ring."""

    groups: Counter[str] = field(default_factory=Counter)
    episodes: Counter[str] = field(default_factory=Counter)  # trainable, by environment
    successes: Counter[str] = field(default_factory=Counter)  # by environment
    success_steps: Counter[int] = field(default_factory=Counter)  # successes by their number of steps
    reward_variances: list[float] = field(default_factory=list)  # of groups
    pass_at: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by k, of groups
    finished: int = 0  # episodes, masked ones included
    masks: Counter[str] = field(default_factory=Counter)  # masked episodes by reason
    difficulties: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    dropped_steps: Counter[str] = field(default_factory=Counter)  # steps of dropped groups, by reason


class GroupStatistics:
    """Counts complete groups and their episodes, masked ones included, and the verdicts on them.

    A training batch is a biased sample: it lacks groups without variance. These metrics estimate the policy itself.
    Aborted groups count among finished episodes and verdicts only: their trainable episodes are biased to short ones.
    """

    def __init__(self, reward: Callable[[Trajectory], float]) -> None:
        """`reward`: the reward function whose variance within groups is measured."""
        self._reward = reward
        self._totals, self._verdicts = _Totals(), VerdictStatistics()

    def add(self, group: Group) -> None:
        """Count a complete group."""
        for trajectory in group.trajectories:
            self._add_finished(trajectory)
        trainable = [trajectory for trajectory in group.trajectories if trajectory.trainable]
        if not trainable or not group.is_complete:
            return
        totals, common = self._totals, common_outcome(group)
        totals.groups.update(["all", *([common] if common else [])])
        totals.reward_variances.append(float(np.var([self._reward(trajectory) for trajectory in trainable])))
        for trajectory in trainable:
            environment, succeeded = metric_label(trajectory.task.environment), trajectory.outcome == "success"
            difficulty = totals.difficulties[metric_label(trajectory.task.difficulty)]
            difficulty.update(trainable=1, successes=succeeded)
            totals.episodes[environment] += 1
            totals.successes[environment] += succeeded
            totals.success_steps[len(trajectory.steps)] += succeeded
        successes, size = sum(t.outcome == "success" for t in trainable), len(group.trajectories)
        for k in {size, size // 2} - {0}:
            if len(trainable) >= k:
                totals.pass_at[k].append(pass_at(k, len(trainable), successes))

    def add_dropped(self, group: Group, reason: str) -> None:
        """Count the steps of a group that is dropped for `reason`."""
        self._totals.dropped_steps[metric_label(reason)] += sum(len(t.steps) for t in group.trajectories)

    def pop_metrics(self) -> dict[str, float]:
        """Metrics since the last call, by MLflow name; none without a complete or a dropped group."""
        totals, self._totals = self._totals, _Totals()
        return (
            _finished_metrics(totals) | _group_metrics(totals) | _dropped_metrics(totals) | self._verdicts.pop_metrics()
        )

    def _add_finished(self, trajectory: Trajectory) -> None:
        totals, difficulty = self._totals, self._totals.difficulties[metric_label(trajectory.task.difficulty)]
        totals.finished += 1
        difficulty["episodes"] += 1
        difficulty["crashes"] += trajectory.outcome in FAULT_OUTCOMES
        if not trajectory.trainable:
            totals.masks[metric_label(mask_name(trajectory))] += 1
        if trajectory.verdict is not None:
            self._verdicts.add(trajectory.verdict)


def mask_name(trajectory: Trajectory) -> str:
    """Why an episode that is not trainable is masked."""
    return "no_tokens" if trajectory.outcome in ("success", "failure") else trajectory.outcome


def _group_metrics(totals: _Totals) -> dict[str, float]:
    """Rates of kinds of groups, success over all and by environment: over the groups that `add` counts in full."""
    groups, episodes, successes = totals.groups, totals.episodes, totals.successes
    if not groups:
        return {}
    metrics = {f"group_rate/{name}": groups[name] / groups["all"] for name in GROUP_KINDS}
    metrics |= {f"rollout_success_rate/{name}": successes[name] / count for name, count in episodes.items()}
    total = episodes.total()
    metrics |= {"rollout_success_rate": successes.total() / total, "rollout_episodes": float(total)}
    within = success_within(totals.success_steps.elements(), total)
    metrics |= {f"success_within/{limit}": share for limit, share in within.items()}
    metrics |= {f"rollout_pass_at/{k}": float(np.mean(values)) for k, values in sorted(totals.pass_at.items())}
    return metrics | {"group_reward_variance": float(np.mean(totals.reward_variances))}


def _finished_metrics(totals: _Totals) -> dict[str, float]:
    """Rates of masked episodes by reason and of crashes by difficulty: over all episodes of complete groups."""
    if not totals.finished:
        return {}
    metrics = {"finished_episodes": float(totals.finished), "masked_rate": totals.masks.total() / totals.finished}
    reasons = sorted({*totals.masks, *ALWAYS_NAMED_MASKS})
    metrics |= {f"masked_rate/{reason}": totals.masks[reason] / totals.finished for reason in reasons}
    for name, counts in sorted(totals.difficulties.items()):
        metrics[f"difficulty/{name}/episodes"] = float(counts["episodes"])
        metrics[f"difficulty/{name}/crash_rate"] = counts["crashes"] / counts["episodes"]
        if counts["trainable"]:
            metrics[f"difficulty/{name}/success_rate"] = counts["successes"] / counts["trainable"]
    return metrics


def _dropped_metrics(totals: _Totals) -> dict[str, float]:
    """Steps of dropped groups, in total and by reason."""
    if not (totals.finished or totals.dropped_steps):
        return {}
    by_reason = {f"filtered_steps/{name}": float(count) for name, count in sorted(totals.dropped_steps.items())}
    return by_reason | {"filtered_steps": float(totals.dropped_steps.total())}
