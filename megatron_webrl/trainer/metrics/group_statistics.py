"""Metrics of complete groups before selection, of what selection drops, and of the verdicts on their episodes."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megatron_webrl.config.advantage import AdvantageConfig, AnchoredConfig
from megatron_webrl.track.metrics import mean
from megatron_webrl.trainer.credit.advantages import common_outcome, is_overlong, steps_by_state
from megatron_webrl.types import BLOCKED, DIFFICULTIES, FAULT_OUTCOMES, JUDGE_ERROR, Group, Trajectory, Verdict
from megatron_webrl.util.text import metric_label

GROUP_KINDS = ("all_succeeded", "all_failed")
ALWAYS_NAMED_MASKS = (BLOCKED, JUDGE_ERROR)  # have a rate even if it is 0
FIGURES = ("calls", "prompt_tokens", "response_tokens", "dollars", "seconds")
TRAINED = "trained"
SELECTION_UPDATES = 10  # over which dropped groups are compared with trained ones
SELECTION_GROUPS = 8  # of either kind, below which a difference is no alarm
SELECTION_LIMIT = 1 / 3  # difference relative to the trained groups above which an update warns
UNJUDGED = "none"  # evaluator of an episode without a regular end
Item = TypeVar("Item")


@dataclass(frozen=True)
class _Episode:
    """What is counted of an episode, without its arrays: these are views of the ring."""

    environment: str
    difficulty: str
    part: str  # name of its source in tasks.mix
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
                t.task.part,
                t.outcome == "success",
                t.outcome in FAULT_OUTCOMES or t.end_reason in FAULT_OUTCOMES,
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


class SelectionStatistics:
    """Compares dropped groups with trained ones by length and difficulty, over the last SELECTION_UPDATES updates.

    A batch without long or hard tasks teaches short and easy ones. Groups of one outcome differ by their nature;
    stale and aborted ones differ where a limit is too tight for long episodes.
    """

    def __init__(self) -> None:
        # By what became of a group: sums of groups, episodes, their steps, groups with a difficulty, their levels.
        self._updates: deque[dict[str, np.ndarray]] = deque([{}], maxlen=SELECTION_UPDATES)
        self._alarmed: set[str] = set()  # names of metrics whose alarm was raised and still holds

    def add(self, group: Group, reason: str | None) -> None:
        """Count a closed group; `reason` of the drop, None if it was trained.

        Masked episodes count with the steps that they had. Difficulty is 1 (easy) to 3 (hard).
        """
        steps, difficulty = [len(t.steps) for t in group.trajectories], group.trajectories[0].task.difficulty
        level = DIFFICULTIES.index(difficulty) + 1 if difficulty in DIFFICULTIES else 0
        name = TRAINED if reason is None else metric_label(reason)
        sums = self._updates[-1].setdefault(name, np.zeros(5))
        sums += (1, len(steps), sum(steps), level > 0, level)

    def pop_metrics(self) -> dict[str, float]:
        """Metrics by MLflow name; the next update begins."""
        metrics: dict[str, float] = {}
        for name, (groups, _, _, _, _) in self._totals().items():
            metrics[f"selection/{name}/groups"] = float(groups)
        for figure, means in self._means().items():
            metrics |= {f"selection/{name}/{figure}": mean for name, mean in means.items()}
        self._updates.append({})
        return metrics

    def pop_alarms(self) -> list[str]:
        """What differs by more than SELECTION_LIMIT and did not at the last call."""
        found, totals = {}, self._totals()
        enough = {name for name, sums in totals.items() if sums[0] >= SELECTION_GROUPS}
        for figure, means in self._means().items():
            trained = means.get(TRAINED, 0.0)
            for name in sorted(enough & means.keys() - {TRAINED}) if trained and TRAINED in enough else ():
                if abs(means[name] / trained - 1) > SELECTION_LIMIT:
                    found[f"selection/{name}/{figure}"] = (
                        f"the groups dropped as {name} differ from the trained ones by more than a third: {figure} "
                        f"{means[name]:.3g} of {totals[name][0]:.0f} groups against {trained:.3g}, over the last "
                        f"{SELECTION_UPDATES} updates (selection/{name}/{figure})"
                    )
        raised = [text for name, text in found.items() if name not in self._alarmed]
        self._alarmed = set(found)
        return raised

    def _totals(self) -> dict[str, np.ndarray]:
        totals: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(5))
        for update in self._updates:
            for name, sums in update.items():
                totals[name] += sums
        return dict(sorted(totals.items()))

    def _means(self) -> dict[str, dict[str, float]]:
        """Mean steps of an episode and mean difficulty of a group, by what became of the group."""
        totals = self._totals().items()
        return {
            "steps_mean": {name: float(sums[2] / sums[1]) for name, sums in totals},
            "difficulty_mean": {name: float(sums[4] / sums[3]) for name, sums in totals if sums[3]},
        }


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
    for name, alike in _by([each for each in episodes if each.part], lambda each: each.part):
        metrics[f"rollout_success_rate_of_source/{name}"] = mean([each.succeeded for each in alike])
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
        if voted := [verdict.votes_differ for verdict in given if verdict.votes]:
            metrics[f"{prefix}/votes_differ"] = mean(voted)
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
