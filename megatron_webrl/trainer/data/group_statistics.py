"""Metrics of complete groups before selection, trained and dropped ones alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from megatron_webrl.trainer.advantages import common_outcome, has_variance
from megatron_webrl.types import Group, Trajectory

GROUP_KINDS = ("all_succeeded", "all_failed", "zero_variance")


class GroupStatistics:
    """Counts complete groups with a trainable episode, and the successes among trainable episodes.

    A training batch is a biased sample: it lacks groups without variance. These metrics estimate the policy itself.
    """

    def __init__(self, reward: Callable[[Trajectory], float]) -> None:
        """`reward`: the reward function that decides whether a group has variance."""
        self._reward = reward
        self._groups: Counter[str] = Counter()
        self._episodes: Counter[str] = Counter()  # by environment
        self._successes: Counter[str] = Counter()

    def add(self, group: Group) -> None:
        """Count a complete group."""
        trainable = [trajectory for trajectory in group.trajectories if trajectory.trainable]
        if not trainable:
            return
        common, varied = common_outcome(group), has_variance(group, self._reward)
        self._groups.update(["all", *([common] if common else []), *([] if varied else ["zero_variance"])])
        for trajectory in trainable:
            self._episodes[trajectory.task.environment] += 1
            self._successes[trajectory.task.environment] += trajectory.outcome == "success"

    def pop_metrics(self) -> dict[str, float]:
        """Metrics since the last call: rate of each kind of group, success rate over all and by environment."""
        groups, episodes, successes = self._groups, self._episodes, self._successes
        self._groups, self._episodes, self._successes = Counter(), Counter(), Counter()
        if not groups:
            return {}
        metrics = {f"group_rate/{name}": groups[name] / groups["all"] for name in GROUP_KINDS}
        metrics |= {f"rollout_success_rate/{name}": successes[name] / count for name, count in episodes.items()}
        total = episodes.total()
        return metrics | {"rollout_success_rate": successes.total() / total, "rollout_episodes": float(total)}
