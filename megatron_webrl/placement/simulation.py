"""Discrete-event simulation of rollout and trainer.

Rollout follows rollout/pool.py, rollout/group_run.py and rollout/stepping.py, the trainer trainer/coordinator.py and
trainer/data/group_source.py; waits have no limits, and nothing fails.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from megatron_webrl.control.client import ticket_limit

UNLIMITED_CORES = 10**9
MOST_REQUESTS = 1024  # of an engine, for its most throughput
MAX_DROPPED_GROUPS = 10_000  # in a row, after which the simulation gives an error

Call = Callable[[], None]
Slowdown = Callable[[int], float]
"""How many times as long each of n concurrent jobs, such as the requests of an engine, takes as alone."""

# -- what is simulated ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step of an episode."""

    generation: float  # seconds in an engine without other requests
    browser: float  # seconds
    prompt: int  # tokens
    response: int
    cpu: float = 0.0  # core-seconds before the browser's seconds


@dataclass(frozen=True, slots=True)
class EpisodeWork:
    """The work of one episode."""

    reset: float  # seconds before the first prompt
    steps: tuple[StepWork, ...]
    trainable: bool = True  # False: masked


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The episodes of one ticket, and the reason for which the trainer drops the group in any case."""

    episodes: tuple[EpisodeWork, ...]
    drop_reason: str | None = None  # all_failed, masked, ...


class Workload(Protocol):
    """Source of groups."""

    def draw(self, ticket: int, rng: np.random.Generator) -> GroupWork:
        """The group of a ticket; `rng` belongs to the ticket."""
        ...


@dataclass(frozen=True)
class RecordedWorkload:
    """The groups of a recorded run; an unknown ticket gets a random one."""

    groups: Sequence[GroupWork]
    index_by_ticket: Mapping[int, int] = field(default_factory=dict)  # ticket -> index in `groups`

    def draw(self, ticket: int, rng: np.random.Generator) -> GroupWork:
        index = self.index_by_ticket.get(ticket)
        return self.groups[int(rng.integers(len(self.groups))) if index is None else index]


@dataclass(frozen=True)
class UpdateTimes:
    """Times of one update."""

    seconds_per_token: float  # of training; per token of prompts and responses of the batch
    sync: float  # seconds: weights to the engines
    pause: float  # the last part of sync, in which the engines are paused
    other: float = 0.0  # seconds from the update's record to the next wait: accounting, checkpoints
    steps: float = 0.0  # seconds of training that no token changes: optimizer steps


@dataclass(frozen=True)
class SimulationSettings:
    """Settings of the system; docs/rollout.md explains modes and stepping."""

    mode: str
    groups_per_update: int
    groups_in_flight: int  # per engine
    engines: int
    updates: int
    max_staleness: int = 2  # for async
    stale: str = "drop"  # rollout.stale
    max_token_lag: int = 0  # versions, of trained tokens with stale="mask"
    stepping: str = "free"
    slowdown: Slowdown = lambda _: 1.0  # of each of n requests of an engine
    overlap: float = 1.0  # relative engine speed while the trainer trains; below 1 if they share processors
    nodes: int = 1
    cores: int = UNLIMITED_CORES  # per node, for browsers
    warmup_updates: int = 1  # first updates, left out of all figures

    @property
    def staleness(self) -> int:
        """Maximum staleness, in versions, of the oldest token of a trained group."""
        return {"async": self.max_staleness, "one_step_off": 1, "sync": 0}[self.mode]

    @property
    def updates_ahead(self) -> int:
        """Updates whose groups may start early while groups are collected."""
        return self.max_staleness if self.mode == "async" else 0


@dataclass(frozen=True)
class SimulationResult:
    """Figures of a simulated run. Rates and fractions refer to the time after the warm-up updates."""

    per_hour: float  # trained trajectories
    updates_per_hour: float
    staleness: float  # versions, mean over trained trajectories
    staleness_max: int
    waiting: float  # fraction of time in which the trainer waits for groups
    training: float
    syncing: float
    engines_idle: float  # fraction of time in which an engine has no request
    engines_load: float  # fraction of the throughput of saturated engines
    slots_used: float  # fraction of the groups that workers may run at a time
    cores_used: float  # fraction of the browsers' cores
    wasted: float  # fraction of response tokens of closed episodes that were not trained, whole run
    masked: float  # fraction of response tokens of trained episodes that are too old, whole run
    trained: int  # episodes, whole run
    dropped: dict[str, int]
    waiting_episodes: int  # ended, not yet trained or dropped
    running_episodes: int
    started_episodes: int


# -- time and servers ----------------------------------------------------------------------------


class SimulatedClock:
    """Executes calls in the order of their times; calls at the same time in the order of their requests."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._calls: list[tuple[float, int, Call]] = []
        self._count = 0

    def call_at(self, time: float, call: Call) -> None:
        heapq.heappush(self._calls, (time, self._count, call))
        self._count += 1

    def call_later(self, seconds: float, call: Call) -> None:
        self.call_at(self.now + seconds, call)

    def run_until(self, ended: Callable[[], bool]) -> None:
        """Advance time until `ended()` is true. Raises RuntimeError if no call is left before."""
        while not ended():
            if not self._calls:
                raise RuntimeError(f"deadlock at {self.now:.3f} s: no event is scheduled")
            self.now, _, call = heapq.heappop(self._calls)
            call()


@dataclass(slots=True)
class ServerJob:
    """A job at a server."""

    end: float  # in units of the server's progress
    done: Call | None  # None once it has ended or was cancelled

    def __lt__(self, other: ServerJob) -> bool:
        return self.end < other.end


class ProcessorSharingServer:
    """Processor sharing: all jobs run at the same rate, which depends on their number.

    Progress is the work done for a job that was present from the beginning. A job that starts at progress p ends at
    p + its work, so that an arrival or a departure changes the rate of all jobs in O(log n).
    """

    def __init__(self, clock: SimulatedClock, slowdown: Slowdown) -> None:
        """`slowdown`: seconds that a second's work of each of n concurrent jobs takes."""
        self.count = 0
        self.busy_seconds = self.job_seconds = self.work_done = 0.0  # seconds with a job; job-seconds; work done
        self._clock, self._slowdown = clock, slowdown
        self._jobs: list[ServerJob] = []
        self._progress, self._since, self._speed = 0.0, 0.0, 1.0
        self._planned = 0  # number of the latest plan; earlier ones are void

    def submit(self, work: float, done: Call) -> ServerJob:
        """Start a job; `done` is called at its end."""
        self.update_totals()
        job = ServerJob(self._progress + work, done)
        heapq.heappush(self._jobs, job)
        self.count += 1
        self._plan()
        return job

    def cancel(self, job: ServerJob) -> None:
        """Remove a job before its end; does nothing if it has ended."""
        if job.done is not None:
            self.update_totals()
            job.done = None
            self.count -= 1
            self._plan()

    def set_speed(self, speed: float) -> None:
        """Scale the rate of all jobs by `speed` from this moment on; 0 stops the server."""
        self.update_totals()
        self._speed = speed
        self._plan()

    def update_totals(self) -> None:
        """Update the totals to this moment."""
        passed = self._clock.now - self._since
        self._since = self._clock.now
        if self.count and passed:
            done = passed * self._speed / self._slowdown(self.count)
            self._progress += done
            self.busy_seconds += passed
            self.job_seconds += passed * self.count
            self.work_done += done * self.count

    def _plan(self) -> None:
        self._planned += 1
        while self._jobs and self._jobs[0].done is None:
            heapq.heappop(self._jobs)
        if self._jobs and self._speed:
            seconds = (self._jobs[0].end - self._progress) * self._slowdown(self.count) / self._speed
            self._clock.call_later(max(0.0, seconds), partial(self._finish, self._planned))

    def _finish(self, plan: int) -> None:
        if plan != self._planned:
            return
        self.update_totals()
        self._progress = max(self._progress, self._jobs[0].end)  # rounding must not leave a remainder
        ended: list[Call] = []
        while self._jobs and self._jobs[0].end <= self._progress:
            job = heapq.heappop(self._jobs)
            if job.done is not None:
                ended.append(job.done)
                job.done = None
        self.count -= len(ended)
        self._plan()
        for call in ended:
            call()


def linear_slowdown(serial: float) -> Slowdown:
    """An iteration of the engine takes the same time for one request as for many, except for the serial fraction.

    It repeats that for each of them: prefill, and a little of every token.
    """
    return lambda count: 1 + (count - 1) * serial


def saturated_rate(slowdown: Slowdown) -> float:
    """The most that an engine does at a time: requests' work per second, each of one second alone."""
    return max(count / slowdown(count) for count in range(1, MOST_REQUESTS + 1))


def core_slowdown(cores: int) -> Slowdown:
    """Of each of n runnable processes."""
    return lambda count: max(1.0, count / cores)


# -- rollout -------------------------------------------------------------------------------------


class SimulatedRounds:
    """Lockstep: all agents of a worker generate, then all act (docs/rollout.md, Stepping). Free: none waits."""

    def __init__(self, free: bool) -> None:
        self._free = free
        self._members: dict[SimulatedAgent, None] = {}
        self._round: dict[SimulatedAgent, None] = {}  # agents that still generate
        self._entering: dict[SimulatedAgent, Call] = {}
        self._leaving: dict[SimulatedAgent, Call] = {}

    def join(self, agent: SimulatedAgent) -> None:
        self._members[agent] = None

    def enter(self, agent: SimulatedAgent, call: Call) -> None:
        """Generate: in the next round."""
        if self._free:
            return call()
        self._entering[agent] = call
        self._advance()

    def leave(self, agent: SimulatedAgent, call: Call) -> None:
        """Act: when all agents of the round have generated."""
        if self._free:
            return call()
        self._round.pop(agent, None)
        self._leaving[agent] = call
        self._advance()

    def quit(self, agent: SimulatedAgent) -> None:
        for agents in (self._members, self._round, self._entering, self._leaving):
            agents.pop(agent, None)
        self._advance()

    def _advance(self) -> None:
        if self._round:
            return
        acting, self._leaving = list(self._leaving.values()), {}
        for call in acting:
            call()
        if self._entering and len(self._entering) == len(self._members):
            generating, self._entering = self._entering, {}
            self._round = dict.fromkeys(generating)
            for call in generating.values():
                call()


class SimulatedWorker:
    """One engine, its running groups, and the cores of its node."""

    def __init__(self, clock: SimulatedClock, settings: SimulationSettings, cores: ProcessorSharingServer) -> None:
        self.engine = ProcessorSharingServer(clock, settings.slowdown)
        self.cores = cores
        self.groups: dict[SimulatedGroup, None] = {}
        self.stepping = SimulatedRounds(settings.stepping == "free")


class SimulatedAgent:
    """One running episode: reset, then generate and act until its last step."""

    __slots__ = ("_job", "_step", "_worker", "ended", "group", "tokens", "work")

    def __init__(self, group: SimulatedGroup, work: EpisodeWork, worker: SimulatedWorker) -> None:
        self.group, self.work, self._worker = group, work, worker
        self.tokens = Counter[int]()  # of responses, by the version at their start
        self.ended = False
        self._step = 0
        self._job: tuple[ProcessorSharingServer, ServerJob] | None = None

    def start(self) -> None:
        """Join the stepping and reset the page."""
        self._worker.stepping.join(self)
        self.group.rollout.clock.call_later(self.work.reset, self._next)

    def abort(self) -> None:
        """End the episode now."""
        if not self.ended:
            if self._job is not None:
                server, job = self._job
                server.cancel(job)
            self._end()

    def _next(self) -> None:
        if self.ended:
            return
        if self._step == len(self.work.steps):
            self._end()
        else:
            self._worker.stepping.enter(self, self._generate)

    def _generate(self) -> None:
        version = self.group.rollout.version
        step = self.work.steps[self._step]
        self._job = self._worker.engine, self._worker.engine.submit(step.generation, lambda: self._generated(version))

    def _generated(self, version: int) -> None:
        self._job = None
        self.tokens[version] += self.work.steps[self._step].response
        self._worker.stepping.leave(self, self._act)

    def _act(self) -> None:
        cpu = self.work.steps[self._step].cpu
        if cpu:
            self._job = self._worker.cores, self._worker.cores.submit(cpu, self._wait)
        else:
            self._wait()

    def _wait(self) -> None:
        self._job = None
        browser, self._step = self.work.steps[self._step].browser, self._step + 1
        self.group.rollout.clock.call_later(browser, self._next)

    def _end(self) -> None:
        self.ended = True
        self._worker.stepping.quit(self)
        self.group.episode_ended()


class SimulatedGroup:
    """The episodes of a ticket, until the trainer closes them."""

    def __init__(self, rollout: SimulatedRollout, ticket: int, work: GroupWork, worker: SimulatedWorker) -> None:
        self.rollout, self.ticket, self.work, self.worker = rollout, ticket, work, worker
        self.aborted = False
        self.agents = [SimulatedAgent(self, episode, worker) for episode in work.episodes]
        self.running = len(self.agents)  # episodes

    @property
    def versions(self) -> list[int]:
        """Policy versions of the responses of trainable episodes."""
        return [version for agent in self.agents if agent.work.trainable for version in agent.tokens]

    def abort(self) -> None:
        """End all episodes now."""
        self.aborted = True
        for agent in self.agents:
            agent.abort()

    def episode_ended(self) -> None:
        """Count an ended episode; the last one sends the group to the trainer."""
        self.running -= 1
        if not self.running:
            del self.worker.groups[self]
            self.rollout.group_ended(self)


class SimulatedRollout:
    """All workers. They claim tickets up to the limit that the trainer sets."""

    def __init__(
        self, clock: SimulatedClock, settings: SimulationSettings, workload: Workload, seed: int,
        arrived: Callable[[SimulatedGroup], None],
    ) -> None:  # fmt: skip
        """`arrived` is called with every finished group."""
        self.clock, self.version = clock, 0
        self.started_episodes = 0
        self.group_seconds = 0.0  # of running groups
        self._running, self._since = 0, 0.0  # groups, and the moment until which they are counted
        self._settings, self._workload, self._seed, self._arrived = settings, workload, seed, arrived
        self._rng = np.random.default_rng(seed)
        self.cores = [ProcessorSharingServer(clock, core_slowdown(settings.cores)) for _ in range(settings.nodes)]
        share = -(-settings.engines // settings.nodes)
        self.workers = [SimulatedWorker(clock, settings, self.cores[n // share]) for n in range(settings.engines)]
        self._claimed = self._limit = 0

    def set_ticket_limit(self, limit: int) -> None:
        """Set the total number of tickets that workers may claim."""
        self._limit = limit
        self._claim_tickets()

    def abort_stale_groups(self, version: int) -> None:
        """Abort the groups that weights of this version make too stale."""
        if self._settings.stale == "mask":
            return
        for worker in self.workers:
            for group in list(worker.groups):
                if version - min(group.versions, default=version) > self._settings.staleness:
                    group.abort()

    def set_speed(self, speed: float) -> None:
        """Relative speed of all engines."""
        for worker in self.workers:
            worker.engine.set_speed(speed)

    def update_totals(self) -> None:
        """Update the totals to this moment, those of the servers too."""
        self._count(0)
        for server in (*self.cores, *(worker.engine for worker in self.workers)):
            server.update_totals()

    def group_ended(self, group: SimulatedGroup) -> None:
        """Hand over a finished group and start new ones in its place."""
        self._count(-1)
        self._arrived(group)
        self._claim_tickets()

    def _count(self, change: int) -> None:
        self.group_seconds += self._running * (self.clock.now - self._since)
        self._running, self._since = self._running + change, self.clock.now

    def _claim_tickets(self) -> None:
        """Let the workers claim tickets in random order, each at most its share of the free ones."""
        while self._claimed < self._limit:
            room = [w for w in self.workers if len(w.groups) < self._settings.groups_in_flight]
            if not room:
                return
            for number in self._rng.permutation(len(room)):
                worker = room[number]
                share = -(-(self._limit - self._claimed) // len(self.workers))
                for _ in range(min(share, self._settings.groups_in_flight - len(worker.groups))):
                    self._start_group(worker)

    def _start_group(self, worker: SimulatedWorker) -> None:
        # A ticket stands for the same work in every system, so that all systems are compared on equal work.
        work = self._workload.draw(self._claimed, np.random.default_rng((self._seed, self._claimed)))
        group = SimulatedGroup(self, self._claimed, work, worker)
        self._claimed += 1
        self.started_episodes += len(group.agents)
        worker.groups[group] = None
        self._count(1)
        for agent in group.agents:
            agent.start()


# -- trainer -------------------------------------------------------------------------------------


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
    groups: float = 0.0  # seconds of running ones
    cores: float = 0.0  # core-seconds


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
        self._masked_tokens = 0  # of them
        self._issued: dict[int, int] = {}  # tickets whose group has not arrived, and the version when they were issued
        self._lag_max = 0
        self._totals, self._warmup_totals = _Totals(), _Totals()
        self._updates = 0

    def run(self) -> SimulationResult:
        """Simulate to the end and return the figures."""
        self._raise_limit(self._settings.updates_ahead)
        self._collect()
        self._clock.run_until(lambda: self._updates >= self._settings.updates)
        return self._result()

    # -- groups ------------------------------------------------------------------------------------

    def _arrived(self, group: SimulatedGroup) -> None:
        del self._issued[group.ticket]
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
        if self._collecting and len(self._ready) >= self._settings.groups_per_update and not self._misses_old_group():
            self._collecting = False
            self._totals.wait += self._clock.now - self._since
            self._drops_in_a_row = 0
            self._ready.sort(key=self._decisive_version)
            batch = self._ready[: self._settings.groups_per_update]
            del self._ready[: self._settings.groups_per_update]
            self._update(batch)

    def _reason_to_drop(self, group: SimulatedGroup) -> str | None:
        if group.aborted:
            return "aborted"
        return "stale" if self._stale(group) else group.work.drop_reason

    def _stale(self, group: SimulatedGroup) -> bool:
        masks = self._settings.stale == "mask"
        limit = self._settings.max_token_lag if masks else self._settings.staleness
        return self._version - self._decisive_version(group) > limit

    def _decisive_version(self, group: SimulatedGroup) -> int:
        choose = max if self._settings.stale == "mask" else min
        return choose(group.versions, default=self._version)

    def _misses_old_group(self) -> bool:
        oldest = self._version + 1 - self._settings.staleness
        return self._settings.stale == "wait" and any(issued < oldest for issued in self._issued.values())

    def _drop(self, group: SimulatedGroup, reason: str) -> None:
        self._dropped_groups += 1
        self._drops_in_a_row += 1
        if self._drops_in_a_row > MAX_DROPPED_GROUPS:
            raise RuntimeError(
                f"{MAX_DROPPED_GROUPS} groups in a row were dropped, the last as {reason}: none is left to train on"
            )
        for agent in group.agents:
            self._dropped[reason if agent.work.trainable else "masked"] += 1
            self._tokens[False] += agent.tokens.total()

    def _raise_limit(self, ahead: int) -> None:
        if self._version < self._settings.updates:
            count = self._settings.groups_per_update
            limit = ticket_limit(0, self._version * count + self._dropped_groups, ahead, count)
            self._issued |= dict.fromkeys(range(self._limit, limit), self._version)
            self._limit = limit
        self._rollout.set_ticket_limit(self._limit)

    # -- an update ---------------------------------------------------------------------------------

    def _update(self, batch: list[SimulatedGroup]) -> None:
        cycle = self._cycles[int(self._rng.integers(len(self._cycles)))]
        tokens = sum(s.prompt + s.response for g in batch for a in g.agents if a.work.trainable for s in a.work.steps)
        train = tokens * cycle.seconds_per_token + cycle.steps

        def trained() -> None:
            self._rollout.set_speed(1.0)
            self._totals.train += train
            self._version += 1
            if self._settings.mode == "one_step_off":
                self._record(batch, cycle)
            else:
                self._sync(cycle, lambda: self._record(batch, cycle))

        def begin() -> None:
            self._rollout.set_speed(self._settings.overlap)
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
        self._rollout.abort_stale_groups(self._version)

        def end() -> None:
            self._totals.sync += cycle.sync
            self._rollout.version = self._version
            self._rollout.set_speed(1.0)
            done()

        self._clock.call_later(cycle.sync - cycle.pause, partial(self._rollout.set_speed, 0.0))
        self._clock.call_later(cycle.sync, end)

    def _record(self, batch: list[SimulatedGroup], cycle: UpdateTimes) -> None:
        self._updates += 1
        for group in batch:
            for agent in group.agents:
                self._close(agent)
        if self._version == self._settings.warmup_updates:
            self._warmup_totals = self._now()
        if self._version < self._settings.updates:
            self._raise_limit(self._settings.updates_ahead)
            self._clock.call_later(cycle.other, self._collect)

    def _close(self, agent: SimulatedAgent) -> None:
        self._tokens[agent.work.trainable] += agent.tokens.total()
        if not agent.work.trainable:
            self._dropped["masked"] += 1
            return
        self._trained += 1
        self._totals.trajectories += 1
        if self._settings.stale == "mask":
            oldest = self._version - 1 - self._settings.max_token_lag
            self._masked_tokens += sum(count for version, count in agent.tokens.items() if version < oldest)
        if agent.tokens:
            lag = self._version - 1 - min(agent.tokens)
            self._totals.lags += lag
            self._lag_max = max(self._lag_max, lag)

    # -- figures -----------------------------------------------------------------------------------

    def _now(self) -> _Totals:
        self._rollout.update_totals()
        sums = _Totals(**vars(self._totals))
        sums.time = self._clock.now
        sums.busy = sum(worker.engine.busy_seconds for worker in self._rollout.workers)
        sums.accomplished = sum(worker.engine.work_done for worker in self._rollout.workers)
        sums.groups = self._rollout.group_seconds
        sums.cores = sum(node.work_done for node in self._rollout.cores)
        return sums

    def _result(self) -> SimulationResult:
        now = vars(self._now())
        counted = _Totals(**{name: now[name] - value for name, value in vars(self._warmup_totals).items()})
        seconds, engines = counted.time, len(self._rollout.workers)
        waiting = [*self._ready, *self._inbox]
        running = [group for worker in self._rollout.workers for group in worker.groups]
        running_episodes = sum(group.running for group in running)
        return SimulationResult(
            per_hour=3600 * counted.trajectories / seconds,
            updates_per_hour=3600 * (self._settings.updates - self._settings.warmup_updates) / seconds,
            staleness=counted.lags / max(1, counted.trajectories),
            staleness_max=self._lag_max,
            waiting=counted.wait / seconds,
            training=counted.train / seconds,
            syncing=counted.sync / seconds,
            engines_idle=1 - counted.busy / (engines * seconds),
            engines_load=counted.accomplished / (engines * seconds) / saturated_rate(self._settings.slowdown),
            slots_used=counted.groups / (engines * self._settings.groups_in_flight * seconds),
            cores_used=counted.cores / (self._settings.nodes * self._settings.cores * seconds),
            wasted=self._tokens[False] / max(1, self._tokens.total()),
            masked=self._masked_tokens / max(1, self._tokens[True]),
            trained=self._trained,
            dropped=dict(self._dropped),
            waiting_episodes=sum(len(g.agents) for g in [*waiting, *running]) - running_episodes,
            running_episodes=running_episodes,
            started_episodes=self._rollout.started_episodes,
        )


def simulate(
    settings: SimulationSettings, workload: Workload, cycles: Sequence[UpdateTimes], seed: int = 0
) -> SimulationResult:
    """Simulate one run. The same seed gives the same run."""
    return Simulation(settings, workload, cycles, seed).run()
