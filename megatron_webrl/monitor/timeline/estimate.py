"""How long an update would take with one more engine, or one more trainer replica. An estimate, not a measurement.

An update needs `work` group-seconds: the groups that it trains and drops, times the seconds of a group. While the
trainer waits for groups, workers may run `waiting` groups at a time, while it is busy `busy` ones: what tickets and
rollout.groups_in_flight allow. So the trainer, busy for B seconds, then waits (work - B * busy) / waiting seconds, or
not at all. One more engine raises what workers may run, one more replica shortens the training. What this leaves out,
it leaves out of the present update too: the result is scaled by measured / modelled seconds of the present.

It assumes that a group takes as long as now, although engines with fewer requests are faster, and that the processors
are no bottleneck. `tests/monitor/timeline/test_estimate.py` compares it with tools/simulate_cluster.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.config.schema import Config


@dataclass(frozen=True)
class RolloutSettings:
    """The settings that an estimate depends on."""

    mode: str
    engines: int
    groups_in_flight: int  # of a worker
    max_staleness: int
    groups_per_update: int
    data_parallel: int

    @classmethod
    def from_config(cls, config: Config) -> RolloutSettings:
        rollout, trainer = config.rollout, config.trainer
        return cls(
            rollout.mode, rollout.engines, rollout.groups_in_flight, rollout.max_staleness, trainer.groups_per_update,
            trainer.data_parallel,
        )  # fmt: skip

    def groups(self, engines: int) -> tuple[float, float]:
        """Groups that may run at a time: while the trainer is busy, and while it waits."""
        room, batch = float(engines * self.groups_in_flight), self.groups_per_update
        if self.mode == "sync":
            return 0.0, min(room, batch)
        if self.mode == "one_step_off":
            return min(room, batch), min(room, batch)
        # Groups of the next batch that have arrived hold their tickets: half of a batch, mean over the wait.
        return min(room, self.max_staleness * batch), min(room, (self.max_staleness + 1) * batch - (batch - 1) / 2)


@dataclass(frozen=True)
class Estimate:
    """Seconds of an update."""

    one_more_engine: float
    one_more_trainer: float


def estimate(settings: RolloutSettings, seconds: float, wait: float, train: float, work: float) -> Estimate:
    """`seconds` of the update, of these waiting for groups and training; `work`: group-seconds."""
    busy = seconds - wait
    present = _modelled(busy, work, settings.groups(settings.engines))
    faster = busy - train / (settings.data_parallel + 1)
    if settings.mode == "one_step_off" and wait > 0:
        with_trainer = seconds  # the batch that is generated meanwhile takes longer than the training
    else:
        with_trainer = _modelled(faster, work, settings.groups(settings.engines)) * seconds / present
    with_engine = _modelled(busy, work, settings.groups(settings.engines + 1)) * seconds / present
    return Estimate(min(seconds, with_engine), min(seconds, with_trainer))


def _modelled(busy: float, work: float, groups: tuple[float, float]) -> float:
    while_busy, while_waiting = groups
    return max(1e-9, busy + max(0.0, work - busy * while_busy) / max(1e-9, while_waiting))
