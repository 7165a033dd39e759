"""Every finished episode is counted in exactly one of: trained, dropped by a named reason, waiting."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Accounting:
    """Counts of episodes over the whole run, across restarts."""

    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def closed(self) -> int:
        """Episodes that are done with."""
        return self.trained + sum(self.dropped.values())

    def dropped_line(self) -> str:
        """The dropped episodes by reason, in words."""
        return ", ".join(f"{name} {count}" for name, count in sorted(self.dropped.items())) or "none"

    def summary(self, finished: int, waiting: int) -> dict[str, Any]:
        """The accounting of summary.json. `finished` is what the workers counted, `waiting` what was found unread."""
        return {
            "finished": finished,
            "trained": self.trained,
            "dropped": dict(sorted(self.dropped.items())),
            "waiting": waiting,
            "matches": finished == self.closed + waiting,
        }

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"trained": self.trained, "dropped": dict(self.dropped)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Accounting:
        """From a checkpoint."""
        return cls(state["trained"], Counter(state["dropped"]))
