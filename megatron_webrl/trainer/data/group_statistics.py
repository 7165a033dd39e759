"""What the groups show that come out of the ring, whether they are then trained or dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from megatron_webrl.trainer.advantages import common_outcome, has_variance
from megatron_webrl.types import Group, Trajectory

GROUP_KINDS = ("all_succeeded", "all_failed", "zero_variance")


class GroupStatistics:
    """Counts whole groups with a trainable episode, and the successes of such episodes.

    A batch is chosen: groups without variance are not in it, whose success says most. What arrives is the policy's own.
    """

    def __init__(self, reward: Callable[[Trajectory], float]) -> None:
        """`reward` as the group statistics see it."""
        self._reward = reward
        self._groups: Counter[str] = Counter()
        self._episodes: Counter[str] = Counter()  # by environment
        self._successes: Counter[str] = Counter()

    def add(self, group: Group) -> None:
        """A group that has become whole."""
        trainable = [trajectory for trajectory in group.trajectories if trajectory.trainable]
        if not trainable:
            return
        common, varied = common_outcome(group), has_variance(group, self._reward)
        self._groups.update(["all", *([common] if common else []), *([] if varied else ["zero_variance"])])
        for trajectory in trainable:
            self._episodes[trajectory.task.environment] += 1
            self._successes[trajectory.task.environment] += trajectory.outcome == "success"

    def pop_metrics(self) -> dict[str, float]:
        """Since the last call: shares of each kind of group, and the success of all episodes, by environment too."""
        groups, episodes, successes = self._groups, self._episodes, self._successes
        self._groups, self._episodes, self._successes = Counter(), Counter(), Counter()
        if not groups:
            return {}
        figures = {f"group_rate/{name}": groups[name] / groups["all"] for name in GROUP_KINDS}
        figures |= {f"rollout_success_rate/{name}": successes[name] / count for name, count in episodes.items()}
        total = episodes.total()
        return figures | {"rollout_success_rate": successes.total() / total, "rollout_episodes": float(total)}
