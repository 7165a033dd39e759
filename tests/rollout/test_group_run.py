"""Retries, deadlines and abort of a group, and lockstep rounds. No browser, no engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import TicketClaim
from megatron_webrl.rollout.agent import Deadline, DeadlineExpired, Episode
from megatron_webrl.rollout.group import EngineLoad, GroupRun
from megatron_webrl.rollout.stepping import Lockstep, LockstepMember
from megatron_webrl.track.live_rollouts import LiveRollout
from megatron_webrl.types import ABORTED, FAULT_OUTCOMES, TaskReference, Trajectory
from tests.trajectories import trajectory

LIMIT = 30.0  # seconds; CI machines are slow
Play = Callable[[int, Episode], Awaitable[Trajectory]]


class ScriptedRunner:
    """Runs the test's function as an episode, and ends it at its deadline, as the agent does."""

    def __init__(self, play: Play) -> None:
        self.play, self.config = play, Config(rollout=SETTINGS)

    def new_try(self, claim: TicketClaim, index: int) -> Episode:
        return Episode(SETTINGS, LiveRollout(trajectory().task, ticket=claim.ticket, index=index))

    async def run_try(self, generator: None, episode: Episode, on_acted: Callable[[], None]) -> Trajectory:
        deadline, index = episode.deadline, episode.live.index
        try:
            async with deadline.scope(deadline.timeout_seconds):
                played = await self.play(index, episode)
            on_acted()
            return played
        except DeadlineExpired as expired:
            return trajectory(CLAIM.ticket, index, outcome=expired.outcome, group_size=SETTINGS.group_size)


SETTINGS = RolloutConfig(group_size=3, episode_timeout_seconds=LIMIT)
STEP = trajectory(steps=1).steps[0]
CLAIM = TicketClaim(7, TaskReference("task", "click-test", 0, 3), restart_epoch=0)


def group_of(play: Play, unfinished: str = "mask") -> GroupRun:
    runner: Any = ScriptedRunner(play)
    runner.config.trainer.reward.unfinished = unfinished
    generator: Any = None
    return GroupRun(runner, generator, CLAIM, EngineLoad())


async def result(group: GroupRun) -> list[Trajectory]:
    async with asyncio.timeout(LIMIT):
        return await group.run()


async def test_an_infrastructure_fault_is_retried_once_and_is_one_episode_and_no_other_outcome_is() -> None:
    others = ["failure", "context_overflow", "episode_timeout", "no_reward", "browser_busy"]
    for outcome in (*FAULT_OUTCOMES, *others):
        for faults in (1, 2):
            failed: list[int] = []

            async def play(index: int, episode: Episode) -> Trajectory:
                if index == 1 and len(failed) < faults:  # noqa: B023
                    failed.append(index)  # noqa: B023
                    return trajectory(7, index, outcome=outcome, response=5)  # noqa: B023
                return trajectory(7, index, reward=1.0)

            group = group_of(play)
            trajectories = await result(group)
            retried = outcome in FAULT_OUTCOMES
            assert [each.index for each in trajectories] == [0, 1, 2]
            last = "success" if retried and faults == 1 else outcome
            assert [each.outcome for each in trajectories] == ["success", last, "success"]
            second = (2, 5) if retried else (1, 0)
            assert [(each.tries, each.discarded_tokens) for each in trajectories] == [(1, 0), second, (1, 0)]
            assert (group.finished_episodes, group.has_running_episodes) == (3, False)


async def test_episodes_that_are_cut_off_are_failures_if_wanted_but_those_without_a_verdict_stay_masked() -> None:
    limits, others = ("episode_timeout", "context_overflow"), ("judge_error", "blocked", "no_reward", ABORTED)
    failing = {"mask": (), "limits_fail": limits, "all_fail": (*limits, *FAULT_OUTCOMES)}
    for outcome in (*FAULT_OUTCOMES, *limits, *others):
        for wanted, outcomes in failing.items():

            async def play(index: int, episode: Episode) -> Trajectory:
                return replace(trajectory(7, index, outcome=outcome), end_reason=outcome)  # noqa: B023

            group = group_of(play, wanted)
            found = {(each.outcome, each.end_reason, each.reward) for each in await result(group)}
            assert found == {("failure" if outcome in outcomes else outcome, outcome, 0.0)}


async def test_an_aborted_group_ends_at_once_in_any_state() -> None:
    waiting = asyncio.Event()

    async def play(index: int, episode: Episode) -> Trajectory:
        if index == 0:
            return trajectory(7, index, reward=1.0)
        if index == 1:
            waiting.set()
            await asyncio.Event().wait()
        await waiting.wait()
        group.abort()  # inside a try: the try is masked and not retried
        return trajectory(7, index, outcome="engine_error")

    group = group_of(play)
    trajectories = await result(group)
    assert [each.outcome for each in trajectories][:2] == ["success", ABORTED]
    assert trajectories[2].outcome in ("engine_error", ABORTED)
    assert group.finished_episodes == 3

    async def wait(index: int, episode: Episode) -> Trajectory:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")

    early = group_of(wait)
    early.abort()  # before it starts
    assert [each.outcome for each in await result(early)] == [ABORTED] * 3


async def test_the_oldest_version_is_that_of_running_and_trainable_episodes() -> None:
    go, generated = [asyncio.Event() for _ in range(3)], [asyncio.Event() for _ in range(3)]

    async def play(index: int, episode: Episode) -> Trajectory:
        episode.record(replace(STEP, versions=np.full(3, 1 if index == 0 else 4, np.int32)))
        generated[index].set()
        await go[index].wait()
        return trajectory(7, index, outcome="no_reward" if index == 0 else "failure")

    group = group_of(play)
    assert group.oldest_version is None
    running = asyncio.create_task(group.run())
    async with asyncio.timeout(LIMIT):
        for event in generated:
            await event.wait()
        assert group.oldest_version == 1
        go[0].set()
        go[1].set()
        while group.finished_episodes < 2:
            await asyncio.sleep(0)
        assert group.oldest_version == 4  # without the masked episode
        go[2].set()
        await running


async def test_a_dead_engine_ends_the_whole_group_with_its_error() -> None:
    ended: list[int] = []

    async def play(index: int, episode: Episode) -> Trajectory:
        if index == 2:
            raise RuntimeError("engine 0 is dead")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(index)
        raise AssertionError("nobody sets the event")

    with pytest.raises(RuntimeError, match="engine 0 is dead"):
        await result(group_of(play))
    assert sorted(ended) == [0, 1]


async def test_each_scope_of_a_deadline_has_its_own_timeout() -> None:
    deadline = Deadline(0.05)
    async with deadline.scope(None):  # without a timeout
        await asyncio.sleep(0.1)
    with pytest.raises(DeadlineExpired, match="episode_timeout"):
        async with asyncio.timeout(LIMIT), deadline.scope(deadline.timeout_seconds):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError):
        async with deadline.scope():
            raise TimeoutError  # of the work itself
    deadline.expire(ABORTED)  # after it has expired: changes only the outcome
    assert deadline.outcome == ABORTED


def test_the_load_is_integrated_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("megatron_webrl.rollout.group.time.monotonic", lambda: now)
    load = EngineLoad()
    now = 11.0
    with load.track("episodes"), load.track("requests"):
        now = 13.0
        with load.track("requests"):
            now = 14.0
        now = 18.0
    now = 20.0
    assert load.totals() == {"seconds": 10.0, "busy": 7.0, "requests": 2 * 1 + 1 * 2 + 4 * 1, "episodes": 7.0}


class Timeline:
    """Events of agents in order: "+a" begins to generate, "-a" has its response, "a!" acts."""

    def __init__(self, stepping: Lockstep, expected: int = 2) -> None:
        self.stepping, self.expected, self.joined = stepping, expected, 0
        self.events: list[str] = []

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition():
                await asyncio.sleep(0)

    async def agent(self, name: str, rounds: int, answers: list[asyncio.Event] | None = None) -> None:
        """Generates and acts `rounds` times; each response waits for its event, if there is one."""
        with self.stepping.register_episode() as stepper:
            await self.together()
            for number in range(rounds):
                await self.turn(stepper, name, answers[number] if answers else None)
                self.events.append(f"{name}!")

    async def together(self) -> None:
        self.joined += 1
        await self.until(lambda: self.joined >= self.expected)

    async def turn(self, stepper: LockstepMember, name: str, answer: asyncio.Event | None) -> None:
        async with stepper.generation_phase():
            self.events.append(f"+{name}")
            if answer is not None:
                await answer.wait()
            self.events.append(f"-{name}")


async def idle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_all_generate_then_all_act_and_the_next_round_waits_for_a_late_episode() -> None:
    timeline, go = Timeline(Lockstep(LIMIT)), [asyncio.Event(), asyncio.Event(), asyncio.Event()]
    both = [asyncio.create_task(timeline.agent("a", 3, go)), asyncio.create_task(timeline.agent("b", 3))]
    await timeline.until(lambda: "-b" in timeline.events)
    await idle()
    assert "b!" not in timeline.events
    go[0].set()
    await timeline.until(lambda: timeline.events.count("-b") == 2)
    assert set(timeline.events[:4]) == {"+a", "-a", "+b", "-b"}
    assert set(timeline.events[4:6]) == {"a!", "b!"}
    with timeline.stepping.register_episode() as stepper:  # it resets its page while the second round runs
        go[1].set()
        await timeline.until(lambda: timeline.events.count("a!") == 2)
        await idle()
        assert timeline.events.count("+a") == 2  # not without the one that began
        go[2].set()
        await timeline.turn(stepper, "c", None)
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*both)
    assert set(timeline.events[12:18]) == {"+a", "-a", "+b", "-b", "+c", "-c"}
    assert set(timeline.events[18:]) == {"a!", "b!"}


async def test_no_wait_exceeds_the_limit_and_missing_episodes_rejoin() -> None:
    timeline, back = Timeline(Lockstep(0.2)), asyncio.Event()

    async def slow() -> None:
        with timeline.stepping.register_episode() as stepper:
            await timeline.together()
            await timeline.turn(stepper, "b", None)
            await back.wait()  # acts for longer than others wait
            await timeline.turn(stepper, "b", None)

    slowly = asyncio.create_task(slow())
    answers = [asyncio.Event() for _ in range(3)]
    others = asyncio.create_task(timeline.agent("a", 3, answers))
    answers[0].set()
    await timeline.until(lambda: timeline.events.count("+a") == 2)  # a round without b
    assert timeline.events.count("-b") == 1
    back.set()
    answers[1].set()
    answers[2].set()
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(slowly, others)
    assert timeline.events.count("-b") == 2
    assert timeline.events.count("a!") == 3


@pytest.mark.parametrize("seed", range(3))
async def test_no_mixture_of_starts_ends_and_cancellations_blocks_the_others(seed: int) -> None:
    chance, lockstep = random.Random(seed), Lockstep(LIMIT)
    generating: set[int] = set()
    acting: set[int] = set()

    async def pause() -> None:
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)

    async def agent(number: int) -> None:
        await pause()
        with lockstep.register_episode() as stepper:
            for _ in range(chance.randrange(1, 8)):
                await pause()  # the reset, or the action
                acting.discard(number)
                async with stepper.generation_phase():
                    assert not acting, "somebody acts while another generates"
                    generating.add(number)
                    try:
                        await pause()
                    finally:
                        generating.discard(number)
                assert not generating
                acting.add(number)
            acting.discard(number)

    agents = [asyncio.create_task(agent(number)) for number in range(30)]
    async with asyncio.timeout(LIMIT):
        for number in chance.sample(range(30), 6):
            await pause()
            agents[number].cancel()
            acting.discard(number)
        results = await asyncio.gather(*agents, return_exceptions=True)
    assert not [result for result in results if isinstance(result, Exception)]
    assert sum(result is None for result in results) >= 24
