"""The trainer's side of the simulation, and what comes of a simulated run.

The loop is that of trainer/loop.py with the tickets of trainer/coordinator.py: collect, train, hand the weights over,
close. Groups that arrive while it trains are looked at when it collects again, as in trainer/data/group_source.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_webrl.control.client import ticket_limit
from tools.cluster.events import SimulatedClock
from tools.cluster.rollout import SimulatedGroup, SimulatedRollout
from tools.cluster.work import SimulationSettings, UpdateTimes, Workload

MAX_DROPPED_GROUPS = 10_000
"""Consecutive dropped groups after which the simulation gives an error."""


@dataclass(frozen=True)
class SimulationResult:
    """Figures of a simulated run. Rates and fractions refer to the time after the warm-up updates."""

    seconds: float
    per_hour: float  # trained trajectories
    updates_per_hour: float
    staleness: float  # versions, mean over trained trajectories
    staleness_max: int
    waiting: float  # fraction of time in which the trainer waits for groups
    training: float
    syncing: float
    engines_idle: float  # fraction of time in which an engine has no request
    engines_load: float  # fraction of the throughput of saturated engines
    wasted: float  # fraction of response tokens of closed episodes that were not trained, whole run
    trained: int  # episodes, whole run
    dropped: dict[str, int]
    waiting_episodes: int  # ended, not yet trained or dropped
    running_episodes: int
    started_episodes: int
    update_end_seconds: tuple[float, ...] = field(repr=False)  # end of each update


@dataclass
class _Totals:
    """Totals of a run; those at the end of the warm-up updates are subtracted."""

    time: float = 0.0
    trajectories: int = 0
    lags: int = 0  # versions, sum over trajectories
    wait: float = 0.0
    train: float = 0.0
    sync: float = 0.0
    busy: float = 0.0
    accomplished: float = 0.0


class Simulation:
    """Simulates one run of `settings.updates` updates."""

    def __init__(
        self, settings: SimulationSettings, workload: Workload, cycles: Sequence[UpdateTimes], seed: int
    ) -> None:
        """`cycles`: times of updates; one of them is drawn for each update."""
        if settings.updates <= settings.warmup_updates:
            raise ValueError(
                f"updates={settings.updates} leave none to count after the first {settings.warmup_updates}"
            )
        self._settings, self._cycles = settings, cycles
        self._rng = np.random.default_rng(seed)
        self._clock = SimulatedClock()
        self._rollout = SimulatedRollout(self._clock, settings, workload, seed, self._arrived)
        self._version, self._published = 0, 0
        self._collecting, self._since = False, 0.0
        self._inbox: deque[SimulatedGroup] = deque()
        self._ready: list[SimulatedGroup] = []
        self._limit = self._dropped_groups = 0
        self._drops_in_a_row = 0  # since the last batch
        self._trained, self._dropped = 0, Counter[str]()
        self._tokens = Counter[bool]()  # response tokens by: trained?
        self._lag_max = 0
        self._totals, self._warmup_totals = _Totals(), _Totals()
        self._update_ends: list[float] = []

    def run(self) -> SimulationResult:
        """Simulate to the end and return the figures."""
        self._raise_limit(self._settings.updates_ahead)
        self._collect()
        self._clock.run_until(lambda: len(self._update_ends) >= self._settings.updates)
        return self._result()

    # -- groups ------------------------------------------------------------------------------------

    def _arrived(self, group: SimulatedGroup) -> None:
        self._inbox.append(group)
        if self._collecting:
            self._poll()

    def _collect(self) -> None:
        self._collecting, self._since = True, self._clock.now
        for group in [group for group in self._ready if self._stale(group)]:
            self._ready.remove(group)
            self._drop(group, "stale")
        self._poll()

    def _poll(self) -> None:
        while self._inbox:
            group = self._inbox.popleft()
            reason = self._reason_to_drop(group)
            if reason is None:
                self._ready.append(group)
            else:
                self._drop(group, reason)
        self._raise_limit(self._settings.updates_ahead)
        if self._collecting and len(self._ready) >= self._settings.groups_per_update:
            self._collecting = False
            self._totals.wait += self._clock.now - self._since
            self._drops_in_a_row = 0
            batch = self._ready[: self._settings.groups_per_update]
            del self._ready[: self._settings.groups_per_update]
            self._update(batch)

    def _reason_to_drop(self, group: SimulatedGroup) -> str | None:
        if group.aborted:
            return "aborted"
        return "stale" if self._stale(group) else group.work.drop_reason

    def _stale(self, group: SimulatedGroup) -> bool:
        oldest = group.oldest_version
        return oldest is not None and self._version - oldest > self._settings.staleness

    def _drop(self, group: SimulatedGroup, reason: str) -> None:
        self._dropped_groups += 1
        self._drops_in_a_row += 1
        if self._drops_in_a_row > MAX_DROPPED_GROUPS:
            raise RuntimeError(
                f"{MAX_DROPPED_GROUPS} groups in a row were dropped, the last as {reason}: none is left to train on"
            )
        for agent in group.agents:
            self._dropped[reason if agent.work.trainable else "masked"] += 1
            self._tokens[False] += agent.response_tokens

    def _raise_limit(self, ahead: int) -> None:
        if self._version < self._settings.updates:
            count = self._settings.groups_per_update
            self._limit = ticket_limit(0, self._version * count + self._dropped_groups, ahead, count)
        self._rollout.set_ticket_limit(self._limit)

    # -- an update ---------------------------------------------------------------------------------

    def _update(self, batch: list[SimulatedGroup]) -> None:
        cycle = self._cycles[int(self._rng.integers(len(self._cycles)))]
        tokens = sum(s.prompt + s.response for g in batch for a in g.agents if a.work.trainable for s in a.work.steps)
        train = tokens * cycle.seconds_per_token

        def trained() -> None:
            self._rollout.set_training(False)
            self._totals.train += train
            self._version += 1
            if self._settings.mode == "one_step_off":
                self._record(batch, cycle)
            else:
                self._sync(cycle, lambda: self._record(batch, cycle))

        def begin() -> None:
            self._rollout.set_training(True)
            self._clock.call_later(train, trained)

        def weights_sent() -> None:
            if self._version + 1 < self._settings.updates:
                self._raise_limit(1)
            begin()

        if self._settings.mode != "one_step_off":
            begin()
        elif self._published != self._version:
            self._sync(cycle, weights_sent)
        else:
            weights_sent()

    def _sync(self, cycle: UpdateTimes, done: Callable[[], None]) -> None:
        self._published = self._version
        self._rollout.announce_weights(self._version)

        def end() -> None:
            self._totals.sync += cycle.sync
            self._rollout.resume(self._version)
            done()

        self._clock.call_later(cycle.sync - cycle.pause, self._rollout.pause)
        self._clock.call_later(cycle.sync, end)

    def _record(self, batch: list[SimulatedGroup], cycle: UpdateTimes) -> None:
        self._update_ends.append(self._clock.now)
        for group in batch:
            for agent in group.agents:
                self._close(agent.work.trainable, agent.oldest_version, agent.response_tokens)
        if self._version == self._settings.warmup_updates:
            self._warmup_totals = self._now()
        if self._version < self._settings.updates:
            self._raise_limit(self._settings.updates_ahead)
            self._clock.call_later(cycle.other, self._collect)

    def _close(self, trainable: bool, oldest: int | None, responses: int) -> None:
        self._tokens[trainable] += responses
        if not trainable:
            self._dropped["masked"] += 1
            return
        self._trained += 1
        self._totals.trajectories += 1
        if oldest is not None:
            lag = self._version - 1 - oldest
            self._totals.lags += lag
            self._lag_max = max(self._lag_max, lag)

    # -- figures -----------------------------------------------------------------------------------

    def _now(self) -> _Totals:
        for worker in self._rollout.workers:
            worker.engine.update_totals()
        sums = _Totals(**vars(self._totals))
        sums.time = self._clock.now
        sums.busy = sum(worker.engine.busy_seconds for worker in self._rollout.workers)
        sums.accomplished = sum(worker.engine.work_done for worker in self._rollout.workers)
        return sums

    def _result(self) -> SimulationResult:
        now = vars(self._now())
        counted = _Totals(**{name: now[name] - value for name, value in vars(self._warmup_totals).items()})
        seconds, engines = counted.time, len(self._rollout.workers)
        waiting = [*self._ready, *self._inbox]
        running = [group for worker in self._rollout.workers for group in worker.groups]
        running_episodes = sum(group.running for group in running)
        return SimulationResult(
            seconds=seconds,
            per_hour=3600 * counted.trajectories / seconds,
            updates_per_hour=3600 * (self._settings.updates - self._settings.warmup_updates) / seconds,
            staleness=counted.lags / max(1, counted.trajectories),
            staleness_max=self._lag_max,
            waiting=counted.wait / seconds,
            training=counted.train / seconds,
            syncing=counted.sync / seconds,
            engines_idle=1 - counted.busy / (engines * seconds),
            engines_load=self._settings.serial * counted.accomplished / (engines * seconds),
            wasted=self._tokens[False] / max(1, self._tokens.total()),
            trained=self._trained,
            dropped=dict(self._dropped),
            waiting_episodes=sum(len(g.agents) for g in [*waiting, *running]) - running_episodes,
            running_episodes=running_episodes,
            started_episodes=self._rollout.started_episodes,
            update_end_seconds=tuple(self._update_ends),
        )


def simulate(
    settings: SimulationSettings, workload: Workload, cycles: Sequence[UpdateTimes], seed: int = 0
) -> SimulationResult:
    """Simulate one run. The same seed gives the same run."""
    return Simulation(settings, workload, cycles, seed).run()
