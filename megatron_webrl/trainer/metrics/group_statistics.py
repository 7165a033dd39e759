"""Metrics of complete groups before selection, dropped ones included, and of the verdicts on their episodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megatron_webrl.config.advantage import AdvantageConfig, AnchoredConfig
from megatron_webrl.track.metrics import mean
from megatron_webrl.trainer.credit.advantages import common_outcome, is_overlong, steps_by_state
from megatron_webrl.types import BLOCKED, FAULT_OUTCOMES, JUDGE_ERROR, Group, Trajectory, Verdict
from megatron_webrl.util.text import metric_label

GROUP_KINDS = ("all_succeeded", "all_failed")
ALWAYS_NAMED_MASKS = (BLOCKED, JUDGE_ERROR)  # have a rate even if it is 0
FIGURES = ("calls", "prompt_tokens", "response_tokens", "dollars", "seconds")
UNJUDGED = "none"  # evaluator of an episode without a regular end
Item = TypeVar("Item")


@dataclass(frozen=True)
class _Episode:
    """What is counted of an episode, without its arrays: these are views of the ring."""

    environment: str
    difficulty: str
    succeeded: bool
    crashed: bool
    mask: str  # why it is masked; empty if it is trainable
    reward: float


@dataclass(frozen=True)
class _Group:
    kind: str | None  # one of GROUP_KINDS
    episodes: tuple[_Episode, ...]  # trainable ones


class GroupStatistics:
    """Counts complete groups and their episodes, masked ones included, and the verdicts on them.

    A training batch is a biased sample: it lacks groups without variance. These metrics estimate the policy itself.
    Aborted groups count among finished episodes and verdicts only: their trainable episodes are biased to short ones.
    """

    def __init__(self, reward: Callable[[Trajectory], float]) -> None:
        """`reward`: the reward function whose variance within groups is measured."""
        self._reward = reward
        self._reset()

    def _reset(self) -> None:
        self._finished: list[_Episode] = []
        self._verdicts: list[Verdict] = []
        self._groups: list[_Group] = []

    def add(self, group: Group) -> None:
        """Count a complete group."""
        episodes = [
            _Episode(
                metric_label(t.task.environment),
                metric_label(t.task.difficulty),
                t.outcome == "success",
                t.outcome in FAULT_OUTCOMES,
                "" if t.trainable else metric_label(mask_name(t)),
                self._reward(t) if t.trainable else 0.0,
            )
            for t in group.trajectories
        ]
        self._finished += episodes
        self._verdicts += [t.verdict for t in group.trajectories if t.verdict is not None]
        trainable = tuple(each for each in episodes if not each.mask)
        if trainable and group.is_complete:
            self._groups.append(_Group(common_outcome(group), trainable))

    def pop_metrics(self) -> dict[str, float]:
        """Metrics since the last call, by MLflow name; none without a complete group."""
        metrics = _finished_metrics(self._finished, [each for group in self._groups for each in group.episodes])
        metrics |= _group_metrics(self._groups) | verdict_metrics(self._verdicts)
        self._reset()
        return metrics


def mask_name(trajectory: Trajectory) -> str:
    """Why an episode that is not trainable is masked."""
    return "no_tokens" if trajectory.outcome in ("success", "failure") else trajectory.outcome


def _finished_metrics(finished: Sequence[_Episode], counted: Sequence[_Episode]) -> dict[str, float]:
    """Rates of masked episodes by reason and of crashes by difficulty: over all episodes of complete groups.

    `counted`: the trainable episodes that estimate the policy.
    """
    if not finished:
        return {}
    masks = Counter(each.mask for each in finished if each.mask)
    metrics = {"finished_episodes": float(len(finished)), "masked_rate": masks.total() / len(finished)}
    reasons = sorted({*masks, *ALWAYS_NAMED_MASKS})
    metrics |= {f"masked_rate/{reason}": masks[reason] / len(finished) for reason in reasons}
    for name, alike in _by(finished, lambda each: each.difficulty):
        metrics[f"difficulty/{name}/episodes"] = float(len(alike))
        metrics[f"difficulty/{name}/crash_rate"] = mean([each.crashed for each in alike])
        if trainable := [each.succeeded for each in counted if each.difficulty == name]:
            metrics[f"difficulty/{name}/success_rate"] = mean(trainable)
    return metrics


def _group_metrics(groups: Sequence[_Group]) -> dict[str, float]:
    """Rates of kinds of groups, success over all and by environment: over the groups that `add` counts in full."""
    if not groups:
        return {}
    episodes = [each for group in groups for each in group.episodes]
    metrics = {f"group_rate/{name}": mean([group.kind == name for group in groups]) for name in GROUP_KINDS}
    for name, alike in _by(episodes, lambda each: each.environment):
        metrics[f"rollout_success_rate/{name}"] = mean([each.succeeded for each in alike])
    metrics["rollout_success_rate"] = mean([each.succeeded for each in episodes])
    metrics["rollout_episodes"] = float(len(episodes))
    variances = [float(np.var([each.reward for each in group.episodes])) for group in groups]
    return metrics | {"group_reward_variance": mean(variances)}


def verdict_metrics(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """Metrics by MLflow name and evaluator; cost only of evaluators that asked a judge model.

    Episodes that ended before they could be judged do not count.
    """
    judged = [verdict for verdict in verdicts if verdict.evaluator != UNJUDGED]
    metrics: dict[str, float] = {}
    for judge, given in _by(judged, lambda each: metric_label(f"{each.evaluator} {each.protocol}")):
        outcomes, prefix = Counter(metric_label(each.outcome) for each in given), f"verdict/{judge}"
        metrics[f"{prefix}/episodes"] = float(len(given))
        metrics |= {f"{prefix}/rate/{name}": count / len(given) for name, count in sorted(outcomes.items())}
        if any(verdict.calls for verdict in given):
            metrics[f"{prefix}/dollars_total"] = float(sum(verdict.dollars for verdict in given))
            metrics |= {f"{prefix}/{figure}": mean([getattr(each, figure) for each in given]) for figure in FIGURES}
    return metrics


def _by(items: Iterable[Item], key: Callable[[Item], str]) -> list[tuple[str, list[Item]]]:
    """The items of each key, in the order of the keys."""
    found: defaultdict[str, list[Item]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return sorted(found.items())


def credit_metrics(groups: Sequence[Group], settings: AdvantageConfig) -> dict[str, float]:
    """What the configured options of credit assignment change in a batch, over its trainable episodes."""
    members = [[t for t in group.trajectories if t.trainable] for group in groups]
    metrics: dict[str, float] = {}
    if settings.overlong == "mask":
        metrics["overlong_masked_rate"] = mean([is_overlong(t) for trajectories in members for t in trajectories])
    if isinstance(settings, AnchoredConfig) and settings.anchor_weight:
        steps = sum(len(t.steps) for trajectories in members for t in trajectories)
        states = [state for trajectories in members for state in steps_by_state(trajectories).values()]
        anchored = sum(len(state) for state in states if len(state) > 1)
        metrics["anchored_step_rate"] = anchored / max(1, steps)
    return metrics
