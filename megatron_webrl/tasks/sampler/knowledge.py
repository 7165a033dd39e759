"""What the trainer's task sampler has learned, by which it draws the tasks of tickets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

LATEST_GROUP_WEIGHT = 0.3  # of the latest group in the moving average of a pass rate


class PassRate(NamedTuple):
    """Estimated pass rate of a unit after a number of groups."""

    rate: float
    groups: int


@dataclass
class SamplerKnowledge:
    """Estimated pass rates of units, blocked websites, and the policy version, at the time of a draw."""

    version: int = 0
    passes: dict[str, PassRate] = field(default_factory=dict)  # by unit
    blocked: dict[str, float] = field(default_factory=dict)  # by website (host): when it ends, unix time, seconds

    def pass_rates(self, units: Iterable[str], initial: float, trusted_groups: int = 1) -> list[float]:
        """The estimate of each unit, [units]; `initial` for one of fewer than `trusted_groups` groups."""
        untried, passes = PassRate(initial, 0), self.passes
        known = [passes.get(unit, untried) for unit in units]
        return [rate if groups >= trusted_groups else initial for rate, groups in known]

    def learn(self, unit: str, observed: float, initial: float) -> None:
        """Take in the pass rate of a group: an exponential moving average, which starts at `initial`."""
        rate, groups = self.passes.get(unit, PassRate(initial, 0))
        self.passes[unit] = PassRate(rate + LATEST_GROUP_WEIGHT * (observed - rate), groups + 1)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores; the version is that of the checkpoint."""
        return {"passes": dict(self.passes), "blocked": dict(self.blocked)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], version: int) -> Self:
        passes = {unit: PassRate(*known) for unit, known in state.get("passes", {}).items()}
        return cls(version, passes, dict(state.get("blocked", {})))
