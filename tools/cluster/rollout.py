"""Rollout side of the simulation: workers that claim tickets, their engines, agents and browsers.

Follows the rules of rollout/pool.py, rollout/group_run.py and rollout/stepping.py; waits have no limits, and nothing
fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from tools.cluster.events import Call, ProcessorSharingServer, ServerJob, SimulatedClock
from tools.cluster.work import EpisodeWork, GroupWork, SimulationSettings, Workload, core_rate, engine_rate


class SimulatedStepping(Protocol):
    """Decides when the agents of a worker generate and act."""

    def join(self, agent: SimulatedAgent) -> None: ...
    def enter(self, agent: SimulatedAgent, call: Call) -> None: ...
    def leave(self, agent: SimulatedAgent, call: Call) -> None: ...
    def quit(self, agent: SimulatedAgent) -> None: ...


class SimulatedFreeRunning:
    """No agent waits for another."""

    def join(self, agent: SimulatedAgent) -> None:
        """Does nothing."""

    def enter(self, agent: SimulatedAgent, call: Call) -> None:
        """Generate at once."""
        call()

    def leave(self, agent: SimulatedAgent, call: Call) -> None:
        """Act at once."""
        call()

    def quit(self, agent: SimulatedAgent) -> None:
        """Does nothing."""


class SimulatedLockstep:
    """Rounds: all generate, then all act (docs/rollout.md, Stepping)."""

    def __init__(self) -> None:
        self._members: dict[SimulatedAgent, None] = {}
        self._round: dict[SimulatedAgent, None] = {}  # agents that still generate
        self._entering: dict[SimulatedAgent, Call] = {}
        self._leaving: dict[SimulatedAgent, Call] = {}

    def join(self, agent: SimulatedAgent) -> None:
        """Add an agent to the rounds."""
        self._members[agent] = None

    def enter(self, agent: SimulatedAgent, call: Call) -> None:
        """Generate in the next round."""
        self._entering[agent] = call
        self._advance()

    def leave(self, agent: SimulatedAgent, call: Call) -> None:
        """Act when all agents of the round have generated."""
        self._round.pop(agent, None)
        self._leaving[agent] = call
        self._advance()

    def quit(self, agent: SimulatedAgent) -> None:
        """Remove an agent from the rounds."""
        self._members.pop(agent, None)
        self._round.pop(agent, None)
        self._entering.pop(agent, None)
        self._leaving.pop(agent, None)
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
        self.engine = ProcessorSharingServer(clock, engine_rate(settings.serial))
        self.cores = cores
        self.groups: dict[SimulatedGroup, None] = {}
        self.stepping: SimulatedStepping = (
            SimulatedLockstep() if settings.stepping == "lockstep" else SimulatedFreeRunning()
        )


class SimulatedAgent:
    """One running episode: reset, then generate and act until its last step."""

    __slots__ = ("_job", "_step", "_worker", "ended", "group", "oldest_version", "response_tokens", "work")

    def __init__(self, group: SimulatedGroup, work: EpisodeWork, worker: SimulatedWorker) -> None:
        self.group, self.work, self._worker = group, work, worker
        self.oldest_version: int | None = None
        self.response_tokens = 0
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
    """The episodes of a ticket, until the trainer closes them."""

    def __init__(self, rollout: SimulatedRollout, work: GroupWork, worker: SimulatedWorker) -> None:
        self.rollout, self.work, self.worker = rollout, work, worker
        self.aborted = False
        self.agents = [SimulatedAgent(self, episode, worker) for episode in work.episodes]
        self._running = len(self.agents)

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version among the responses of trainable episodes."""
        return min(
            (a.oldest_version for a in self.agents if a.oldest_version is not None and a.work.trainable), default=None
        )

    @property
    def running(self) -> int:
        """Number of running episodes."""
        return self._running

    def abort(self) -> None:
        """End all episodes now."""
        self.aborted = True
        for agent in self.agents:
            agent.abort()

    def episode_ended(self) -> None:
        """Count an ended episode; the last one sends the group to the trainer."""
        self._running -= 1
        if not self._running:
            del self.worker.groups[self]
            self.rollout.group_ended(self)


class SimulatedRollout:
    """All workers. They claim tickets up to the limit that the trainer sets."""

    def __init__(
        self,
        clock: SimulatedClock,
        settings: SimulationSettings,
        workload: Workload,
        seed: int,
        arrived: Callable[[SimulatedGroup], None],
    ) -> None:
        """`arrived` is called with every finished group."""
        self.clock, self.version = clock, 0
        self.started_episodes = 0
        self._settings, self._workload, self._seed, self._arrived = settings, workload, seed, arrived
        self._rng = np.random.default_rng(seed)
        nodes = [ProcessorSharingServer(clock, core_rate(settings.cores)) for _ in range(settings.nodes)]
        share = -(-settings.engines // settings.nodes)
        self.workers = [SimulatedWorker(clock, settings, nodes[n // share]) for n in range(settings.engines)]
        self._claimed = self._limit = 0
        self._trains = self._paused = False

    def set_ticket_limit(self, limit: int) -> None:
        """Set the total number of tickets that workers may claim."""
        self._limit = limit
        self._claim_tickets()

    def announce_weights(self, version: int) -> None:
        """Abort the groups that new weights make too stale."""
        for worker in self.workers:
            for group in list(worker.groups):
                oldest = group.oldest_version
                if oldest is not None and version - oldest > self._settings.staleness:
                    group.abort()

    def pause(self) -> None:
        """Pause the engines while they load weights."""
        self._paused = True
        self._set_speed()

    def resume(self, version: int) -> None:
        """Continue with the new weights."""
        self.version, self._paused = version, False
        self._set_speed()

    def set_training(self, trains: bool) -> None:
        """Set whether the trainer trains, which may slow the engines down."""
        self._trains = trains
        self._set_speed()

    def group_ended(self, group: SimulatedGroup) -> None:
        """Hand over a finished group and start new ones in its place."""
        self._arrived(group)
        self._claim_tickets()

    def _set_speed(self) -> None:
        speed = 0.0 if self._paused else self._settings.overlap if self._trains else 1.0
        for worker in self.workers:
            worker.engine.set_speed(speed)

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
        self._claimed += 1
        group = SimulatedGroup(self, work, worker)
        self.started_episodes += len(group.agents)
        worker.groups[group] = None
        for agent in group.agents:
            agent.start()
