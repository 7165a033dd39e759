"""Simulated runs that write the files of a run, to compare readings of them with the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_webrl.track import summary
from megatron_webrl.track.episodes import EpisodeLog
from tests.tools.written_runs import Timed, update, write_episode
from tools.cluster import simulation as module
from tools.cluster.simulation import (
    SimulatedAgent,
    SimulatedGroup,
    Simulation,
    SimulationResult,
    SimulationSettings,
    UpdateTimes,
    Workload,
)

EPOCH = 1000.0  # unix seconds at which the simulated time begins


class TracedAgent(SimulatedAgent):
    """Records the times of its start, requests, responses, actions and end."""

    __slots__ = ("acted", "answered", "asked", "ended_at", "started_at", "ticket")

    def start(self) -> None:
        self.started_at = self.group.rollout.clock.now
        self.ticket = self.group.rollout._claimed - 1
        self.asked: list[float] = []
        self.answered: list[float] = []
        self.acted: list[float] = []
        super().start()

    def _generate(self) -> None:
        self.asked.append(self.group.rollout.clock.now)
        super()._generate()

    def _generated(self, version: int) -> None:
        self.answered.append(self.group.rollout.clock.now)
        super()._generated(version)

    def _act(self) -> None:
        self.acted.append(self.group.rollout.clock.now)
        super()._act()

    def _end(self) -> None:
        self.ended_at = self.group.rollout.clock.now
        super()._end()

    def timed(self) -> Timed:
        """Times as in episodes.jsonl: waits in lockstep are in neither list; a request without response is no step."""
        steps = self.work.steps[: len(self.answered)]
        generations = [answered - asked for asked, answered in zip(self.asked, self.answered, strict=False)]
        return Timed(
            generations, [step.browser for step in steps], EPOCH + self.ended_at, self.ended_at - self.started_at
        )


class TracedSimulation(Simulation):
    """Writes closed episodes and finished updates to a run folder."""

    def __init__(
        self, folder: Path, settings: SimulationSettings, workload: Workload, cycles: list[UpdateTimes], seed: int
    ) -> None:
        super().__init__(settings, workload, cycles, seed)
        self.log, self.updates = EpisodeLog(folder, 0), list[dict[str, object]]()
        self._past = (0.0, 0.0, 0.0, 0.0)

    def _write(self, group: SimulatedGroup, reason: str | None, version: int) -> None:
        for index, agent in enumerate(group.agents):
            assert isinstance(agent, TracedAgent)
            timed = agent.timed()
            write_episode(
                self.log, agent.ticket, index, timed, version,
                oldest=agent.oldest_version or 0, reward=float(index % 2),
                reason=reason, responses=[step.response for step in agent.work.steps],
            )  # fmt: skip

    def _drop(self, group: SimulatedGroup, reason: str) -> None:
        self._write(group, reason, self._version)
        super()._drop(group, reason)

    def _record(self, batch: list[SimulatedGroup], cycle: UpdateTimes) -> None:
        for group in batch:
            self._write(group, None, self._version - 1)
        engines = [worker.engine for worker in self._rollout.workers]
        for engine in engines:
            engine.update_totals()
        area = sum(engine.job_seconds for engine in engines) / len(engines)
        now = (self._clock.now, self._totals.wait, self._totals.train, area)
        passed, wait, train, requests = (new - old for new, old in zip(now, self._past, strict=True))
        self._past = now
        made = update(
            self._version, EPOCH + self._clock.now, wait=wait, train=train, sync=cycle.sync, pause=cycle.pause
        )
        made["extra"]["engine/running_requests"] = requests / passed
        self.updates.append(made)
        super()._record(batch, cycle)


def traced(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    settings: SimulationSettings,
    workload: Workload,
    cycles: list[UpdateTimes],
    seed: int,
) -> SimulationResult:
    """Simulate a run into a folder."""
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(module, "SimulatedAgent", TracedAgent)
        simulation = TracedSimulation(folder, settings, workload, cycles, seed)
        result = simulation.run()
    simulation.log.close()
    summary.open_updates(folder).append(*simulation.updates)
    config = {
        "rollout": {
            "mode": settings.mode, "stepping": settings.stepping, "engines": settings.engines,
            "groups_in_flight": settings.groups_in_flight, "max_staleness": settings.max_staleness,
        },
        "trainer": {"groups_per_update": settings.groups_per_update, "zero_variance_groups": "keep"},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return result
