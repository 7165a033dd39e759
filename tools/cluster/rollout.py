"""The rollout side of the simulation: workers that pull tickets, their engines, agents and browsers.

The rules are those of rollout/pool.py, group.py and pace.py; waits have no limits, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from tools.cluster.events import Call, ProcessorSharingServer, ServerJob, SimulatedClock
from tools.cluster.work import EpisodeWork, GroupWork, SimulationSettings, Workload, core_rate, engine_rate


class SimulatedStepping(Protocol):
    """When the agents of a worker generate and act."""

    def join(self, agent: SimulatedAgent) -> None: ...
    def enter(self, agent: SimulatedAgent, call: Call) -> None: ...
    def leave(self, agent: SimulatedAgent, call: Call) -> None: ...
    def quit(self, agent: SimulatedAgent) -> None: ...


class SimulatedFreeRunning:
    """Nobody waits for anybody."""

    def join(self, agent: SimulatedAgent) -> None:
        """Nothing."""

    def enter(self, agent: SimulatedAgent, call: Call) -> None:
        """Generate at once."""
        call()

    def leave(self, agent: SimulatedAgent, call: Call) -> None:
        """Act at once."""
        call()

    def quit(self, agent: SimulatedAgent) -> None:
        """Nothing."""


class SimulatedLockstep:
    """Rounds: all generate, then all act (docs/rollout.md, Stepping)."""

    def __init__(self) -> None:
        self._members: dict[SimulatedAgent, None] = {}
        self._round: dict[SimulatedAgent, None] = {}  # who still generates
        self._entering: dict[SimulatedAgent, Call] = {}
        self._leaving: dict[SimulatedAgent, Call] = {}

    def join(self, agent: SimulatedAgent) -> None:
        """Waited for from here on."""
        self._members[agent] = None

    def enter(self, agent: SimulatedAgent, call: Call) -> None:
        """Generate with the next round."""
        self._entering[agent] = call
        self._advance()

    def leave(self, agent: SimulatedAgent, call: Call) -> None:
        """Act when the round is over."""
        self._round.pop(agent, None)
        self._leaving[agent] = call
        self._advance()

    def quit(self, agent: SimulatedAgent) -> None:
        """Waited for no more."""
        self._members.pop(agent, None)
        self._round.pop(agent, None)
        self._entering.pop(agent, None)
        self._leaving.pop(agent, None)
        self._advance()

    def _advance(self) -> None:
        if self._round:
            return
        over, self._leaving = list(self._leaving.values()), {}
        for call in over:
            call()
        if self._entering and len(self._entering) == len(self._members):
            begin, self._entering = self._entering, {}
            self._round = dict.fromkeys(begin)
            for call in begin.values():
                call()


class SimulatedWorker:
    """One engine, the groups that it runs, and the cores of its node."""

    def __init__(self, clock: SimulatedClock, settings: SimulationSettings, cores: ProcessorSharingServer) -> None:
        self.engine = ProcessorSharingServer(clock, engine_rate(settings.serial))
        self.cores = cores
        self.groups: dict[SimulatedGroup, None] = {}
        self.stepping: SimulatedStepping = (
            SimulatedLockstep() if settings.stepping == "lockstep" else SimulatedFreeRunning()
        )


class SimulatedAgent:
    """One episode under way: reset, then generate and act until its steps are done."""

    __slots__ = ("_job", "_step", "_worker", "ended", "group", "oldest_version", "response_tokens", "work")

    def __init__(self, group: SimulatedGroup, plan: EpisodeWork, worker: SimulatedWorker) -> None:
        self.group, self.work, self._worker = group, plan, worker
        self.oldest_version: int | None = None  # version
        self.response_tokens = 0  # tokens
        self.ended = False
        self._step = 0
        self._job: tuple[ProcessorSharingServer, ServerJob] | None = None

    def start(self) -> None:
        """Reset."""
        self._worker.stepping.join(self)
        self.group.rollout.clock.call_later(self.work.reset, self._next)

    def abort(self) -> None:
        """End where it is."""
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
        self.oldest_version = version if self.oldest_version is None else min(self.oldest_version, version)
        self.response_tokens += self.work.steps[self._step].response
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
    """The episodes of a ticket while they run, and afterwards until the trainer closes them."""

    def __init__(self, rollout: SimulatedRollout, work: GroupWork, worker: SimulatedWorker) -> None:
        self.rollout, self.work, self.worker = rollout, work, worker
        self.aborted = False
        self.agents = [SimulatedAgent(self, episode, worker) for episode in work.episodes]
        self._running = len(self.agents)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version among the responses that count."""
        return min(
            (a.oldest_version for a in self.agents if a.oldest_version is not None and a.work.trainable), default=None
        )

    @property
    def running(self) -> int:
        """Episodes under way."""
        return self._running

    def abort(self) -> None:
        """End all episodes where they are."""
        self.aborted = True
        for agent in self.agents:
            agent.abort()

    def episode_ended(self) -> None:
        """The last one brings the group to the trainer."""
        self._running -= 1
        if not self._running:
            del self.worker.groups[self]
            self.rollout.group_ended(self)


class SimulatedRollout:
    """All workers. They take tickets under the limit that the trainer raises."""

    def __init__(
        self,
        clock: SimulatedClock,
        settings: SimulationSettings,
        workload: Workload,
        seed: int,
        arrived: Callable[[SimulatedGroup], None],
    ) -> None:
        """`arrived` is told of every group that is whole."""
        self.clock, self.version = clock, 0
        self.started_episodes = 0  # episodes
        self._settings, self._workload, self._seed, self._arrived = settings, workload, seed, arrived
        self._rng = np.random.default_rng(seed)
        nodes = [ProcessorSharingServer(clock, core_rate(settings.cores)) for _ in range(settings.nodes)]
        share = -(-settings.engines // settings.nodes)
        self.workers = [SimulatedWorker(clock, settings, nodes[n // share]) for n in range(settings.engines)]
        self._taken = self._limit = 0
        self._trains = self._paused = False

    def set_ticket_limit(self, limit: int) -> None:
        """Tickets that may be taken in all."""
        self._limit = limit
        self._fill()

    def announce_weights(self, version: int) -> None:
        """There are new weights: groups that they make too old are given up."""
        for worker in self.workers:
            for group in list(worker.groups):
                oldest = group.oldest_version
                if oldest is not None and version - oldest > self._settings.staleness:
                    group.abort()

    def pause(self) -> None:
        """The engines take weights."""
        self._paused = True
        self._set_speed()

    def resume(self, version: int) -> None:
        """The engines have them."""
        self.version, self._paused = version, False
        self._set_speed()

    def set_training(self, trains: bool) -> None:
        """The trainer trains, or has done so."""
        self._trains = trains
        self._set_speed()

    def group_ended(self, group: SimulatedGroup) -> None:
        """A group is whole: its place is free."""
        self._arrived(group)
        self._fill()

    def _set_speed(self) -> None:
        speed = 0.0 if self._paused else self._settings.overlap if self._trains else 1.0
        for worker in self.workers:
            worker.engine.set_speed(speed)

    def _fill(self) -> None:
        """Workers look one after another, in any order, and take at most their share of what is free."""
        while self._taken < self._limit:
            room = [w for w in self.workers if len(w.groups) < self._settings.groups_in_flight]
            if not room:
                return
            for number in self._rng.permutation(len(room)):
                worker = room[number]
                share = -(-(self._limit - self._taken) // len(self.workers))
                for _ in range(min(share, self._settings.groups_in_flight - len(worker.groups))):
                    self._begin(worker)

    def _begin(self, worker: SimulatedWorker) -> None:
        # A ticket means the same work in every system, so that systems are compared on the same.
        work = self._workload.draw(self._taken, np.random.default_rng((self._seed, self._taken)))
        self._taken += 1
        group = SimulatedGroup(self, work, worker)
        self.started_episodes += len(group.agents)
        worker.groups[group] = None
        for agent in group.agents:
            agent.start()
