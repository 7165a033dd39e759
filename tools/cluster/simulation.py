"""The trainer's side of the simulation, and what comes of a simulated run.

The loop is that of trainer/loop.py with the tickets of trainer/coordinator.py: collect, train, hand the weights over,
close. Groups that arrive while it trains are looked at when it collects again, as in trainer/groups.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_webrl.control import ticket_limit
from tools.cluster.events import Clock
from tools.cluster.rollout import Group, Rollout
from tools.cluster.work import Cycle, Settings, Workload

HOPELESS = 10_000
"""Groups dropped in a row after which a batch is not waited for any longer."""


@dataclass(frozen=True)
class Result:
    """Figures of a simulated run. Rates and shares are of the time after the uncounted updates."""

    seconds: float
    per_hour: float  # trained trajectories
    updates_per_hour: float
    staleness: float  # versions, mean over trained trajectories
    staleness_max: int
    waiting: float  # share: the trainer waits for groups
    training: float
    syncing: float
    engines_idle: float  # share in which an engine has no request
    engines_load: float  # share of what engines full of requests would do
    wasted: float  # share of response tokens of closed episodes that were not trained, of the whole run
    trained: int  # episodes, of the whole run
    dropped: dict[str, int]
    waiting_episodes: int  # ended, and neither trained nor dropped
    running_episodes: int
    begun: int
    marks: tuple[float, ...] = field(repr=False)  # seconds at which each update was done


@dataclass
class _Sums:
    """Counts of a run; a copy at the end of the uncounted updates is taken off."""

    time: float = 0.0
    trajectories: int = 0
    lags: int = 0  # versions, sum over trajectories
    wait: float = 0.0
    train: float = 0.0
    sync: float = 0.0
    busy: float = 0.0
    accomplished: float = 0.0


class Simulation:
    """One run of `settings.updates` updates."""

    def __init__(self, settings: Settings, workload: Workload, cycles: Sequence[Cycle], seed: int) -> None:
        """`cycles`: one of them is drawn for each update."""
        if settings.updates <= settings.uncounted:
            raise ValueError(f"updates={settings.updates} leave none to count after the first {settings.uncounted}")
        self._settings, self._cycles = settings, cycles
        self._rng = np.random.default_rng(seed)
        self._clock = Clock()
        self._rollout = Rollout(self._clock, settings, workload, seed, self._arrived)
        self._version, self._published = 0, 0
        self._collecting, self._since = False, 0.0
        self._inbox: deque[Group] = deque()
        self._ready: list[Group] = []
        self._limit = self._dropped_groups = 0
        self._in_vain = 0  # groups dropped since the last batch
        self._trained, self._dropped = 0, Counter[str]()
        self._tokens = Counter[bool]()  # response tokens by whether they were trained
        self._lag_max = 0
        self._sums, self._before = _Sums(), _Sums()
        self._marks: list[float] = []

    def run(self) -> Result:
        """Let it run to the end."""
        self._raise_limit(self._settings.ahead)
        self._collect()
        self._clock.run(lambda: len(self._marks) >= self._settings.updates)
        return self._result()

    # -- groups ------------------------------------------------------------------------------------

    def _arrived(self, group: Group) -> None:
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
        self._raise_limit(self._settings.ahead)
        if self._collecting and len(self._ready) >= self._settings.groups_per_update:
            self._collecting = False
            self._sums.wait += self._clock.now - self._since
            self._in_vain = 0
            batch = self._ready[: self._settings.groups_per_update]
            del self._ready[: self._settings.groups_per_update]
            self._update(batch)

    def _reason_to_drop(self, group: Group) -> str | None:
        if group.abandoned:
            return "abandoned"
        return "stale" if self._stale(group) else group.work.fault

    def _stale(self, group: Group) -> bool:
        oldest = group.oldest
        return oldest is not None and self._version - oldest > self._settings.staleness

    def _drop(self, group: Group, reason: str) -> None:
        self._dropped_groups += 1
        self._in_vain += 1
        if self._in_vain > HOPELESS:
            raise RuntimeError(
                f"{HOPELESS} groups in a row were dropped, the last as {reason}: none is left to train on"
            )
        for agent in group.agents:
            self._dropped[reason if agent.plan.trainable else "masked"] += 1
            self._tokens[False] += agent.responses

    def _raise_limit(self, ahead: int) -> None:
        if self._version < self._settings.updates:
            count = self._settings.groups_per_update
            self._limit = ticket_limit(0, 0, self._version * count + self._dropped_groups, ahead, count)
        self._rollout.set_limit(self._limit)

    # -- an update ---------------------------------------------------------------------------------

    def _update(self, batch: list[Group]) -> None:
        cycle = self._cycles[int(self._rng.integers(len(self._cycles)))]
        tokens = sum(s.prompt + s.response for g in batch for a in g.agents if a.plan.trainable for s in a.plan.steps)
        train = tokens * cycle.seconds_per_token

        def trained() -> None:
            self._rollout.training(False)
            self._sums.train += train
            self._version += 1
            if self._settings.mode == "one_step_off":
                self._record(batch, cycle)
            else:
                self._sync(cycle, lambda: self._record(batch, cycle))

        def begin() -> None:
            self._rollout.training(True)
            self._clock.after(train, trained)

        def handed_over() -> None:
            if self._version + 1 < self._settings.updates:
                self._raise_limit(1)
            begin()

        if self._settings.mode != "one_step_off":
            begin()
        elif self._published != self._version:
            self._sync(cycle, handed_over)
        else:
            handed_over()

    def _sync(self, cycle: Cycle, done: Callable[[], None]) -> None:
        self._published = self._version
        self._rollout.offer(self._version)

        def end() -> None:
            self._sums.sync += cycle.sync
            self._rollout.resume(self._version)
            done()

        self._clock.after(cycle.sync - cycle.pause, self._rollout.pause)
        self._clock.after(cycle.sync, end)

    def _record(self, batch: list[Group], cycle: Cycle) -> None:
        self._marks.append(self._clock.now)
        for group in batch:
            for agent in group.agents:
                self._close(agent.plan.trainable, agent.oldest, agent.responses)
        if self._version == self._settings.uncounted:
            self._before = self._now()
        if self._version < self._settings.updates:
            self._raise_limit(self._settings.ahead)
            self._clock.after(cycle.other, self._collect)

    def _close(self, trainable: bool, oldest: int | None, responses: int) -> None:
        self._tokens[trainable] += responses
        if not trainable:
            self._dropped["masked"] += 1
            return
        self._trained += 1
        self._sums.trajectories += 1
        if oldest is not None:
            lag = self._version - 1 - oldest
            self._sums.lags += lag
            self._lag_max = max(self._lag_max, lag)

    # -- figures -----------------------------------------------------------------------------------

    def _now(self) -> _Sums:
        for worker in self._rollout.workers:
            worker.engine.advance()
        sums = _Sums(**vars(self._sums))
        sums.time = self._clock.now
        sums.busy = sum(worker.engine.busy for worker in self._rollout.workers)
        sums.accomplished = sum(worker.engine.accomplished for worker in self._rollout.workers)
        return sums

    def _result(self) -> Result:
        now = vars(self._now())
        found = _Sums(**{name: now[name] - value for name, value in vars(self._before).items()})
        seconds, engines = found.time, len(self._rollout.workers)
        held = [*self._ready, *self._inbox]
        running = [group for worker in self._rollout.workers for group in worker.groups]
        under_way = sum(group.running for group in running)
        return Result(
            seconds=seconds,
            per_hour=3600 * found.trajectories / seconds,
            updates_per_hour=3600 * (self._settings.updates - self._settings.uncounted) / seconds,
            staleness=found.lags / max(1, found.trajectories),
            staleness_max=self._lag_max,
            waiting=found.wait / seconds,
            training=found.train / seconds,
            syncing=found.sync / seconds,
            engines_idle=1 - found.busy / (engines * seconds),
            engines_load=self._settings.serial * found.accomplished / (engines * seconds),
            wasted=self._tokens[False] / max(1, self._tokens.total()),
            trained=self._trained,
            dropped=dict(self._dropped),
            waiting_episodes=sum(len(g.agents) for g in [*held, *running]) - under_way,
            running_episodes=under_way,
            begun=self._rollout.begun,
            marks=tuple(self._marks),
        )


def simulate(settings: Settings, workload: Workload, cycles: Sequence[Cycle], seed: int = 0) -> Result:
    """One simulated run. The same seed gives the same run."""
    return Simulation(settings, workload, cycles, seed).run()
