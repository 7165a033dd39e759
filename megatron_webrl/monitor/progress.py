"""Speed of a run over its last updates. Pure functions of the lines of updates.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WINDOW = 10  # most updates in a mean


@dataclass(frozen=True)
class Progress:
    """Means over `updates` updates."""

    updates: int
    seconds_per_update: float  # wall clock
    updates_per_hour: float
    episodes_per_hour: float  # trained
    tokens_per_second: float  # trained, prompts included
    success: float | None  # rate over sampled episodes, those of dropped groups included
    staleness_mean: float  # versions
    staleness_max: int
    wait_fraction: float  # share of the trainer's time in which it waits for groups
    reward_mean: float  # over trained episodes
    logprob_mismatch_max: float | None  # nats, largest; None without a token of the updated version

    def __str__(self) -> str:
        figures = [
            f"{self.updates_per_hour:.1f} updates/h, {self.episodes_per_hour:.0f} trained episodes/h",
            f"{self.tokens_per_second:.0f} tokens/s",
            "" if self.success is None else f"success {self.success:.1%}",
            f"reward {self.reward_mean:.3f}, waiting {self.wait_fraction:.0%}",
            f"staleness {self.staleness_mean:.1f}, at most {self.staleness_max}",
            "" if self.logprob_mismatch_max is None else f"mismatch {self.logprob_mismatch_max:.0e}",
        ]
        return ", ".join(filter(None, figures)) + f" (last {self.updates})"


def recent_progress(updates: Sequence[Mapping[str, Any]], group_size: int, since: float) -> Progress | None:
    """Means over the last WINDOW updates finished after `since` (unix time); None without any."""
    numbers = [i for i, update in enumerate(updates) if update["finished_at"] >= since][-WINDOW:]
    if not numbers:
        return None
    chosen = [updates[i] for i in numbers]
    total = sum(_wall(updates, i, since) for i in numbers)
    sampled = [(u["extra"]["rollout_success_rate"], u["extra"].get("rollout_episodes", 1.0))
               for u in chosen if "rollout_success_rate" in u["extra"]]  # fmt: skip
    weight = sum(count for _, count in sampled)
    return Progress(
        updates=len(chosen),
        seconds_per_update=total / len(chosen),
        updates_per_hour=3600 * len(chosen) / total,
        episodes_per_hour=3600 * sum(trained_episodes(u, group_size) for u in chosen) / total,
        tokens_per_second=sum(u["tokens_per_second"] * _busy(u) for u in chosen) / total,
        success=sum(share * count for share, count in sampled) / weight if weight else None,
        staleness_mean=sum(u["staleness_mean"] for u in chosen) / len(chosen),
        staleness_max=max(u["staleness_max"] for u in chosen),
        wait_fraction=sum(u["seconds"]["wait"] for u in chosen) / sum(map(_busy, chosen)),
        reward_mean=sum(u["reward_mean"] for u in chosen) / len(chosen),
        logprob_mismatch_max=max((m for u in chosen if (m := u["logprob_mismatch_max"]) is not None), default=None),
    )


def expected_end(progress: Progress, last: Mapping[str, Any], target: int, now: float) -> float:
    """Unix time of update `target` at the recent speed; `last`: the newest update. The current one may be slower."""
    left, seconds = target - last["version"], progress.seconds_per_update
    return float(max(last["finished_at"] + seconds * left, now + seconds * max(0, left - 1)))


def trained_episodes(update: Mapping[str, Any], group_size: int) -> int:
    """Unmasked episodes of an update's groups."""
    return int(update["groups"] * group_size - update["extra"].get("masked_episodes", 0))


def _busy(update: Mapping[str, Any]) -> float:
    """Seconds of an update, as the training loop measured them; never 0."""
    seconds = update["seconds"]
    return max(1e-9, seconds["wait"] + seconds["train"] + seconds["sync"])


def _wall(updates: Sequence[Mapping[str, Any]], number: int, since: float) -> float:
    """Seconds since the previous update, checkpoints included; for a job's first update as the loop measured them."""
    if number and updates[number - 1]["finished_at"] >= since:
        return max(1e-9, updates[number]["finished_at"] - updates[number - 1]["finished_at"])
    return _busy(updates[number])
