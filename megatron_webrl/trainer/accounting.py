"""Every finished episode is counted in exactly one of: trained, dropped by a named reason, waiting, rolled back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from megatron_webrl.types import Trajectory
from megatron_webrl.util.text import metric_label

RETRIED = "retried"
DAMAGED = "damaged_record"
# Counter of the job in the control service, over restarts of the trainer; with the other episodes of such groups that
# a restart freed, because their tickets were issued again.
DAMAGED_COUNTER = "accounting/damaged_records"


@dataclass
class Accounting:
    """Counts of episodes and of their response tokens over the whole run, across restarts."""

    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens_trained: int = 0
    tokens_dropped: Counter[str] = field(default_factory=Counter)  # RETRIED: tokens of replaced attempts

    @property
    def closed_episodes(self) -> int:
        """Episodes that were trained or dropped."""
        return self.trained + sum(self.dropped.values())

    def count_episode(self, trajectory: Trajectory, reason: str | None) -> None:
        """Close an episode as trained, or as dropped for a reason."""
        if reason is None:
            self.trained += 1
            self.tokens_trained += trajectory.response_tokens
        else:
            self.dropped[reason] += 1
            self.tokens_dropped[reason] += trajectory.response_tokens
        if trajectory.discarded_tokens:
            self.tokens_dropped[RETRIED] += trajectory.discarded_tokens

    def wasted_token_shares(self) -> dict[str, float]:
        """Fraction of closed episodes' response tokens that were not trained, in total and by reason."""
        total = max(1, self.tokens_trained + sum(self.tokens_dropped.values()))
        shares: dict[str, float] = {}
        for reason, count in self.tokens_dropped.items():
            name = f"wasted_token_fraction/{metric_label(reason)}"
            shares[name] = shares.get(name, 0.0) + count / total
        return shares | {"wasted_token_fraction": sum(shares.values())}

    def format_dropped(self) -> str:
        """The dropped episodes by reason, as text."""
        return ", ".join(f"{name} {count}" for name, count in sorted(self.dropped.items())) or "none"

    def summary(self, finished: int, waiting: int, rolled_back: int = 0, damaged: int = 0) -> dict[str, Any]:
        """The accounting section of summary.json.

        `finished`: episodes that the workers counted; `waiting`: episodes not closed yet; `rolled_back`: episodes that
        a failed trainer closed after its last checkpoint; `damaged`: records of the job that could not be read.
        """
        dropped = self.dropped + Counter({DAMAGED: damaged})
        return {
            "finished": finished,
            "trained": self.trained,
            "dropped": dict(sorted(dropped.items())),
            "waiting": waiting,
            "rolled_back": rolled_back,
            "matches": finished == self.closed_episodes + damaged + waiting + rolled_back,
            "tokens": {"trained": self.tokens_trained, "dropped": dict(sorted(self.tokens_dropped.items()))},
        }

    def state_dict(self) -> dict[str, Any]:
        """The counts that a checkpoint stores."""
        return {
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "tokens_trained": self.tokens_trained,
            "tokens_dropped": dict(self.tokens_dropped),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Accounting:
        """From the counts of a checkpoint."""
        return cls(
            state["trained"], Counter(state["dropped"]), state["tokens_trained"], Counter(state["tokens_dropped"])
        )
