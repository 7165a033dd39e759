"""The history of a run, and when it reached a success. Pure functions.

A run is censored if it did not reach the success within its updates: its time to it is unknown, but at least as long as
the run. Its figures are then of the whole run, and lower bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_webrl.monitor.progress import trained_episodes
from megatron_webrl.monitor.timeline import SYNC, TRAIN, WAIT, UpdateBound
from megatron_webrl.trainer.metrics.group_statistics import GROUP_KINDS


@dataclass(frozen=True)
class UpdateRecord:
    """One update. `parts`, `path` and `engine_idle` are of the timeline: empty and None for an update it lacks."""

    version: int
    ended: float  # seconds since the first update began
    success: float | None  # share of `episodes`; None without any
    episodes: int  # trainable, of the groups completed since the last update, dropped groups included
    trained: int  # trajectories
    staleness: float  # versions, mean over trained trajectories
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds of the trainer; they are all of the update
    path: Mapping[str, float] = field(default_factory=dict)  # critical path: seconds by name
    engine_idle: float | None = None  # share of the update without a request or a pause for weights, mean over engines


@dataclass(frozen=True)
class RunHistory:
    """All updates of a run, at least one, and its response tokens."""

    mode: str
    seed: int
    updates: tuple[UpdateRecord, ...]
    tokens_trained: int
    tokens_dropped: Mapping[str, int]  # by reason

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RunHistory:
        """The history of which `fields` are the JSON form of asdict(history)."""
        return cls(**{**fields, "updates": tuple(UpdateRecord(**update) for update in fields["updates"])})


@dataclass(frozen=True)
class TimeToSuccess:
    """When a run reached the success: at the end of its update number `updates`."""

    reached: bool  # False: censored
    seconds: float  # since the first update began
    updates: int
    trajectories: int  # trained until then
    episodes: int  # sampled until then: trainable, dropped groups included

    @property
    def per_hour(self) -> float:
        """Trained trajectories per hour until then."""
        return 3600 * self.trajectories / self.seconds


@dataclass(frozen=True)
class TimeShares:
    """Shares of the wall time of some updates; the trainer's four are all of it."""

    training: float
    waiting: float  # for groups
    exchanging: float  # weights
    other: float  # checkpoints, logs
    engine_idle: float | None
    path: Mapping[str, float]  # critical path, longest part first


def update_records(
    updates: Sequence[Mapping[str, Any]], group_size: int, bounds: Mapping[int, UpdateBound] | None = None
) -> tuple[UpdateRecord, ...]:
    """From the lines of updates.jsonl, the first of them included, and what bounded the updates, by version.

    The clock starts where the trainer began the first update, as its seconds say, so that the start of processes and
    engines does not count.
    """
    if not updates:
        return ()
    first = updates[0]
    began = first["finished_at"] - sum(first["seconds"][name] for name in ("wait", "train", "sync"))
    return tuple(_record(update, group_size, began, (bounds or {}).get(update["version"])) for update in updates)


def _record(update: Mapping[str, Any], group_size: int, began: float, bound: UpdateBound | None) -> UpdateRecord:
    extra = update["extra"]
    idle = None
    if bound is not None and bound.engines:
        idle = 1 - (bound.engines["generate"] + bound.engines["paused for weights"]) / bound.seconds
    return UpdateRecord(
        version=update["version"],
        ended=update["finished_at"] - began,
        success=extra.get("rollout_success_rate"),
        episodes=int(extra.get("rollout_episodes", 0)),
        trained=trained_episodes(update, group_size),
        staleness=update["staleness_mean"],
        parts=bound.trainer if bound else {},
        path=bound.path if bound else {},
        engine_idle=idle,
    )


def smoothed_success(updates: Sequence[UpdateRecord], window: int) -> list[float | None]:
    """Success over the last `window` updates at the end of each: sum of successes / sum of episodes.

    Every complete group counts, also one that is dropped for lack of variance or as stale, so that the choice of the
    training batch does not bias the rate; an update counts by its episodes. None for the first `window - 1` updates,
    and without an episode.
    """
    found: list[float | None] = []
    for number in range(1, len(updates) + 1):
        recent = [u for u in updates[max(0, number - window) : number] if u.success is not None]
        episodes = sum(update.episodes for update in recent)
        total = sum(update.success * update.episodes for update in recent if update.success is not None)
        found.append(total / episodes if number >= window and episodes else None)
    return found


def time_to_success(updates: Sequence[UpdateRecord], success: float, window: int) -> TimeToSuccess:
    """The first update at whose end the smoothed success is at least `success`; else the whole run, censored.

    `updates`: at least one.
    """
    curve = smoothed_success(updates, window)
    number = next((n for n, rate in enumerate(curve, 1) if rate is not None and rate >= success), None)
    counted = updates[:number]
    return TimeToSuccess(
        reached=number is not None,
        seconds=counted[-1].ended,
        updates=len(counted),
        trajectories=sum(update.trained for update in counted),
        episodes=sum(update.episodes for update in counted),
    )


def wasted_shares(trained: int, dropped: Mapping[str, int]) -> dict[str, float]:
    """Share of all response tokens that were not trained, by reason, largest first. Empty without a token."""
    total = trained + sum(dropped.values())
    ordered = sorted(dropped.items(), key=lambda each: (-each[1], each[0]))
    return {reason: count / total for reason, count in ordered} if total else {}


def wasted_with_signal(shares: Mapping[str, float]) -> float:
    """The wasted share without groups of one outcome, which the algorithm drops in every mode."""
    return sum(share for reason, share in shares.items() if reason not in GROUP_KINDS)


def time_shares(updates: Sequence[UpdateRecord]) -> TimeShares | None:
    """Over the updates of the timeline, each weighted by its seconds; None without any."""
    known = [update for update in updates if update.parts]
    total = sum(sum(update.parts.values()) for update in known)
    if total <= 0:
        return None
    parts, path = Counter[str](), Counter[str]()
    for update in known:
        parts.update(update.parts)
        path.update(update.path)
    idle = [(update.engine_idle, sum(update.parts.values())) for update in known if update.engine_idle is not None]
    idle_seconds, weight = sum(share * seconds for share, seconds in idle), sum(seconds for _, seconds in idle)
    training, waiting, exchanging = (parts[name] / total for name in (TRAIN, WAIT, SYNC))
    return TimeShares(
        training=training,
        waiting=waiting,
        exchanging=exchanging,
        other=1 - training - waiting - exchanging,
        engine_idle=idle_seconds / weight if weight else None,
        path={name: seconds / total for name, seconds in path.most_common()},
    )
