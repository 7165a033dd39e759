"""Estimates of one more engine and one more trainer, against simulated clusters that have them."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from megatron_webrl.monitor.timeline.estimate import RolloutSettings, estimate
from tools.cluster.rollout import SimulatedGroup, SimulatedRollout, SimulatedWorker
from tools.cluster.simulation import Simulation
from tools.cluster.work import EpisodeWork, GroupWork, SimulationSettings, StepWork, UpdateTimes

GROUPS, SEEDS, UPDATES, WARMUP = 4, 3, 20, 4
TOLERANCE = 0.2


class Groups:
    """Groups of four episodes of one to eight steps; a step takes a second in the engine and two in the browser."""

    def draw(self, ticket: int, rng: np.random.Generator) -> GroupWork:
        return GroupWork(tuple(self._episode(rng) for _ in range(4)))

    def _episode(self, rng: np.random.Generator) -> EpisodeWork:
        steps = min(8, int(rng.geometric(0.25)))
        generations, waits = rng.lognormal(0, 0.5, steps), 2 * rng.lognormal(0, 0.7, steps + 1)
        made = (StepWork(g, w, 1000, 100) for g, w in zip(generations.tolist(), waits[1:].tolist(), strict=True))
        return EpisodeWork(float(waits[0]), tuple(made))


def simulated(settings: SimulationSettings, train: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Means of an update: seconds, of these waiting and training, and seconds of a group."""
    lived: list[float] = []
    start, end = SimulatedRollout._start_group, SimulatedRollout.group_ended
    begun: dict[SimulatedGroup, float] = {}

    def start_group(self: SimulatedRollout, worker: SimulatedWorker) -> None:
        start(self, worker)
        begun[next(reversed(worker.groups))] = self.clock.now

    def group_ended(self: SimulatedRollout, group: SimulatedGroup) -> None:
        lived.append(self.clock.now - begun[group])
        end(self, group)

    with monkeypatch.context() as patched:
        patched.setattr(SimulatedRollout, "_start_group", start_group)
        patched.setattr(SimulatedRollout, "group_ended", group_ended)
        tokens = 1100 * 4 * 3.6 * GROUPS  # of a batch, about
        times = UpdateTimes(train / tokens, 0.3, 0.1, 0.1)
        results = [Simulation(settings, Groups(), [times], seed).run() for seed in range(SEEDS)]
    seconds = fmean(3600 / each.updates_per_hour for each in results)
    waiting, training = fmean(each.waiting for each in results), fmean(each.training for each in results)
    return {"seconds": seconds, "wait": waiting * seconds, "train": training * seconds, "group": fmean(lived)}


@pytest.mark.parametrize(
    ("mode", "engines", "staleness", "train"),
    [
        ("async", 1, 1, 2.0),  # rollout bounds it, and an engine brings room that the tickets fill in part
        ("async", 2, 2, 2.0),
        ("async", 2, 2, 40.0),  # the trainer bounds it
        ("async", 2, 1, 15.0),  # both
        ("async", 4, 1, 2.0),  # the tickets are fewer than the room
        ("one_step_off", 2, 2, 4.0),
        ("sync", 2, 2, 15.0),
    ],
)
def test_an_estimate_is_near_the_simulated_cluster_that_has_one_more(
    mode: str, engines: int, staleness: int, train: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = SimulationSettings(
        mode=mode, groups_per_update=GROUPS, groups_in_flight=4, engines=engines, updates=UPDATES,
        max_staleness=staleness, serial=0.02, warmup_updates=WARMUP,
    )  # fmt: skip
    present = simulated(simulation, train, monkeypatch)
    settings = RolloutSettings(mode, engines, 4, staleness, GROUPS, data_parallel=1)
    found = estimate(settings, present["seconds"], present["wait"], present["train"], GROUPS * present["group"])
    more_engines = simulated(replace(simulation, engines=engines + 1), train, monkeypatch)
    more_trainers = simulated(simulation, train / 2, monkeypatch)
    assert found.one_more_engine == pytest.approx(more_engines["seconds"], rel=TOLERANCE)
    assert found.one_more_trainer == pytest.approx(more_trainers["seconds"], rel=TOLERANCE)


def test_one_more_of_what_does_not_bound_an_update_gives_nothing() -> None:
    settings = RolloutSettings("async", 4, 8, 2, 8, data_parallel=2)
    trainer_bound = estimate(settings, 20.0, 0.0, 19.0, work=10.0)
    assert trainer_bound.one_more_engine == pytest.approx(20.0)
    assert trainer_bound.one_more_trainer == pytest.approx(20.0 - 19.0 / 3)
    rollout_bound = estimate(replace(settings, max_staleness=9), 20.0, 19.0, 0.6, work=32 * 20.0)
    assert rollout_bound.one_more_trainer == pytest.approx(20.0)
    assert rollout_bound.one_more_engine == pytest.approx(20.0 * 4 / 5, rel=0.01)
