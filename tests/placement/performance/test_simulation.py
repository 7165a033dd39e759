"""The simulation of rollout and trainer, against sums done by hand and against theory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from megatron_webrl.placement.simulation import (
    EpisodeWork,
    GroupWork,
    ProcessorSharingServer,
    RecordedWorkload,
    SimulatedClock,
    SimulationSettings,
    StepWork,
    UpdateTimes,
    core_slowdown,
    linear_slowdown,
    simulate,
)

RESET, GENERATION, BROWSER, STEPS, TOKENS = 1.0, 2.0, 3.0, 4, 15
EPISODE = RESET + STEPS * (GENERATION + BROWSER)  # seconds
EVEN = RecordedWorkload([GroupWork((EpisodeWork(RESET, (StepWork(GENERATION, BROWSER, 10, 5),) * STEPS),) * 2)])
GROUP_TOKENS = 2 * STEPS * TOKENS


def settings(mode: str, **changes: object) -> SimulationSettings:
    return replace(SimulationSettings(mode, groups_per_update=2, groups_in_flight=4, engines=1, updates=9), **changes)  # type: ignore[arg-type]


def cycle(train: float, sync: float = 1.0, pause: float = 0.5, other: float = 0.0) -> UpdateTimes:
    """`train`: seconds of an update of two groups."""
    return UpdateTimes(train / (2 * GROUP_TOKENS), sync, pause, other)


def uneven(seed: int = 0, groups: int = 40) -> RecordedWorkload:
    """Groups of any length; some are dropped, and some episodes masked."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        episodes = []
        for _ in range(3):
            steps = tuple(
                StepWork(rng.exponential(1.0), rng.lognormal(0, 1), 10, int(rng.integers(1, 9)), rng.exponential(0.1))
                for _ in range(rng.geometric(0.3))
            )
            episodes.append(EpisodeWork(rng.exponential(1.0), steps, trainable=rng.random() < 0.9))
        made.append(GroupWork(tuple(episodes), "all_failed" if rng.random() < 0.3 else None))
    return RecordedWorkload(made)


def ends(works: dict[float, float], rate: float, speeds: dict[float, float] | None = None) -> list[float]:
    """When jobs end that begin at the given times with the given work at a server."""
    clock, found = SimulatedClock(), []
    server = ProcessorSharingServer(clock, linear_slowdown(rate))

    def begin(work: float) -> None:
        server.submit(work, lambda: found.append(clock.now))

    for time, work in works.items():
        clock.call_at(time, partial(begin, work))
    for time, speed in (speeds or {}).items():
        clock.call_at(time, partial(server.set_speed, speed))
    clock.run_until(lambda: len(found) == len(works))
    return found


def test_a_shared_server_gives_everybody_the_same() -> None:
    assert ends({0.0: 1.0, 0.5: 3.0}, rate=1.0) == pytest.approx([1.5, 4.0])
    assert ends({0.0: 1.0, 0.5: 3.0}, rate=0.0) == pytest.approx([1.0, 3.5])
    # Two of half the serial work each take 1.5 times as long: 0.5 + 0.75 for the first; 2.5 then is left of the other.
    assert ends({0.0: 1.0, 0.5: 3.0}, rate=0.5) == pytest.approx([1.25, 3.75])
    assert ends({0.0: 1.0}, rate=1.0, speeds={0.25: 0.0, 4.25: 0.5}) == pytest.approx([5.75])
    assert [core_slowdown(4)(count) for count in (1, 4, 8)] == [1, 1, 2]


@pytest.mark.parametrize("agents", [1, 12])
def test_a_closed_network_has_the_throughput_of_mean_value_analysis(agents: int) -> None:
    """A processor-sharing server and a delay: exact for any distribution (Reiser and Lavenberg 1980)."""
    clock, rng, done = SimulatedClock(), np.random.default_rng(agents), [0]
    server, think = ProcessorSharingServer(clock, lambda count: count), 3.0

    def answered() -> None:
        done[0] += 1
        clock.call_later(rng.exponential(think), ask)

    def ask() -> None:
        server.submit(float(rng.uniform(0.0, 2.0)), answered)

    for _ in range(agents):
        ask()
    clock.run_until(lambda: done[0] >= 12_000)
    queue = throughput = 0.0
    for number in range(1, agents + 1):
        residence = 1.0 * (1 + queue)
        throughput = number / (residence + think)
        queue = throughput * residence
    assert done[0] / clock.now == pytest.approx(throughput, rel=0.03)


def test_each_mode_takes_as_long_as_its_parts() -> None:
    sync = simulate(settings("sync"), EVEN, [cycle(12)])
    assert sync.updates_per_hour == pytest.approx(3600 / (EPISODE + 12 + 1))
    assert sync.per_hour == pytest.approx(4 * sync.updates_per_hour)
    assert (sync.waiting, sync.training) == pytest.approx((EPISODE / (EPISODE + 13), 12 / (EPISODE + 13)))
    assert sync.engines_idle == pytest.approx(1 - STEPS * GENERATION / (EPISODE + 13))
    assert (sync.staleness, sync.staleness_max) == (0, 0)
    for train in (12, 50):
        off = simulate(settings("one_step_off"), EVEN, [cycle(train)])
        assert off.updates_per_hour == pytest.approx(3600 / (max(EPISODE, train) + 1))
        assert (off.staleness, off.staleness_max) == (1, 1)
    slow = simulate(settings("async"), EVEN, [cycle(50, other=2)])
    assert slow.updates_per_hour == pytest.approx(3600 / 53)
    assert (slow.waiting, slow.staleness, slow.staleness_max) == (0, pytest.approx(2, abs=0.2), 2)
    quick = simulate(settings("async", groups_in_flight=3, updates=60, max_staleness=4), EVEN, [cycle(0.1, 0.1, 0.0)])
    assert quick.per_hour == pytest.approx(2 * 3 * 3600 / EPISODE, rel=0.02)  # rollout sets the pace
    assert quick.dropped == {}
    saving = simulate(settings("sync"), EVEN, [cycle(12, other=5)])  # a checkpoint delays the trainer alone
    assert saving.updates_per_hour == pytest.approx(3600 / (EPISODE + 13))
    assert saving.waiting == pytest.approx((EPISODE - 5) / (EPISODE + 13))


def test_engines_stand_still_while_they_take_weights_and_go_slower_beside_training() -> None:
    alone = RecordedWorkload([GroupWork((EpisodeWork(0.0, (StepWork(10.0, 0.0, 10, 5),)),))])
    given = SimulationSettings("async", 1, 1, 1, updates=40, max_staleness=2)
    still = simulate(given, alone, [UpdateTimes(0.0, 2.0, 2.0)])
    assert still.updates_per_hour == pytest.approx(3600 / 12, rel=0.03)  # each request meets one pause
    slower = simulate(replace(given, overlap=0.5), alone, [UpdateTimes(4.0 / 15, 0.0, 0.0)])
    assert slower.updates_per_hour == pytest.approx(3600 / 12, rel=0.03)  # and 4 s at half the speed


@pytest.mark.parametrize(
    ("mode", "stepping"), [("async", "free"), ("async", "lockstep"), ("one_step_off", "lockstep"), ("sync", "free")]
)
def test_every_episode_is_accounted_for_and_none_is_too_stale(mode: str, stepping: str) -> None:
    for seed in range(2):
        given = settings(
            mode,
            stepping=stepping,
            engines=3,
            slowdown=linear_slowdown(0.3),
            nodes=2,
            cores=2,
            updates=25,
            groups_in_flight=2,
        )
        found = simulate(given, uneven(), [cycle(5), cycle(9, other=1)], seed)
        closed = found.trained + sum(found.dropped.values())
        assert closed + found.waiting_episodes + found.running_episodes == found.started_episodes
        assert found.staleness_max <= given.staleness
        assert found.dropped["all_failed"] > 0
        assert found.dropped["masked"] > 0
        assert 0 < found.wasted < 1
        shares = found.waiting + found.training + found.syncing
        assert 0.8 < shares <= 1 + 1e-9
        if mode != "async":
            assert found.staleness == given.staleness
            assert found.waiting_episodes == found.running_episodes == 0
        assert found == simulate(given, uneven(), [cycle(5), cycle(9, other=1)], seed)


def test_a_group_that_has_become_too_old_is_abandoned_and_replaced() -> None:
    long = GroupWork((EpisodeWork(0.0, (StepWork(1.0, 1.0, 1, 5),) * 400),) * 2)
    found = simulate(
        settings("async", max_staleness=1, updates=30), RecordedWorkload([EVEN.groups[0]] * 5 + [long]), [cycle(5)]
    )
    assert found.dropped["aborted"] > 0
    assert found.staleness_max == 1
    assert found.started_episodes == sum(
        (found.trained, *found.dropped.values(), found.waiting_episodes, found.running_episodes)
    )


def test_old_groups_are_masked_or_waited_for_instead() -> None:
    """A group with a step of an hour: an update waits for it, or does not, and most of its tokens are too old then."""
    steps = (*[StepWork(1.0, 1.0, 1, 5)] * 3, StepWork(1.0, 3600.0, 1, 5), StepWork(1.0, 1.0, 1, 5))
    work = RecordedWorkload(
        [EVEN.groups[0], GroupWork((EpisodeWork(0.0, steps),) * 2)], {0: 1, **dict.fromkeys(range(1, 999), 0)}
    )
    given = settings("async", max_staleness=1, updates=200, warmup_updates=0)
    waited = simulate(replace(given, stale="wait"), work, [cycle(5)])
    assert (waited.dropped, waited.staleness_max) == ({}, 1)
    assert waited.waiting > 0.5
    masked = simulate(replace(given, stale="mask", max_token_lag=1), work, [cycle(5)])
    assert masked.dropped == {}
    assert masked.staleness_max > 100
    assert masked.masked == pytest.approx(4 / (5 + 398 * STEPS), rel=0.02)
    assert simulate(given, work, [cycle(5)]).dropped == {"aborted": 2}


def test_browsers_share_the_cores_of_their_node() -> None:
    work = RecordedWorkload([GroupWork((EpisodeWork(0.0, (StepWork(1.0, 1.0, 1, 1, cpu=2.0),)),) * 4)])
    given = SimulationSettings("sync", 2, 1, engines=2, updates=3, nodes=1, cores=4)
    crowded = simulate(given, work, [UpdateTimes(0.0, 0.0, 0.0)])
    assert crowded.updates_per_hour == pytest.approx(3600 / (1 + 4 + 1))  # eight on four cores
    apart = simulate(replace(given, nodes=2), work, [UpdateTimes(0.0, 0.0, 0.0)])
    assert apart.updates_per_hour == pytest.approx(3600 / (1 + 2 + 1))


def test_a_batch_that_never_comes_and_a_run_with_nothing_to_count_are_refused() -> None:
    work = RecordedWorkload([GroupWork((EpisodeWork(0.0, (StepWork(1.0, 1.0, 1, 1),)),), "all_failed")])
    with pytest.raises(RuntimeError, match="10000 groups in a row were dropped, the last as all_failed"):
        simulate(settings("async"), work, [cycle(1)])
    with pytest.raises(ValueError, match="updates=1 leave none to count after the first 1"):
        simulate(settings("sync", updates=1), EVEN, [cycle(1)])
