"""Lockstep rounds with agents that join, leave or are late. No browser, no engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from megatron_webrl.rollout.stepping import Lockstep, LockstepMember

LIMIT = 30.0  # seconds; CI machines are slow


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
        """Wait until all expected agents have arrived."""
        self.joined += 1
        await self.until(lambda: self.joined >= self.expected)

    async def turn(self, stepper: LockstepMember, name: str, answer: asyncio.Event | None) -> None:
        async with stepper.generation_phase():
            self.events.append(f"+{name}")
            if answer is not None:
                await answer.wait()
            self.events.append(f"-{name}")


async def idle() -> None:
    """Let all tasks do what they may."""
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


async def test_an_episode_that_is_aborted_while_it_acts_does_not_block_the_others() -> None:
    timeline = Timeline(Lockstep(LIMIT))

    async def breaking_off() -> None:
        with timeline.stepping.register_episode() as stepper:
            await timeline.together()
            await timeline.turn(stepper, "b", None)
            await asyncio.Event().wait()

    other, broken = asyncio.create_task(timeline.agent("a", 2)), asyncio.create_task(breaking_off())
    await timeline.until(lambda: "a!" in timeline.events)
    await idle()
    assert timeline.events.count("+a") == 1
    broken.cancel()
    async with asyncio.timeout(LIMIT / 2):
        await other


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
