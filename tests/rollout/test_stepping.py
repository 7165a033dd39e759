"""Lockstep rounds with agents that join, leave or are late. No browser, no engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from megatron_webrl.rollout.stepping import EpisodeStepper, FreeStepping, Lockstep, SteppingMode

LIMIT = 30.0  # seconds; CI machines are slow


class Stage:
    """Events of agents in order: "+a" begins to generate, "-a" has its response, "a!" acts."""

    def __init__(self, pacing: SteppingMode) -> None:
        self.pacing = pacing
        self.events: list[str] = []
        self.joined, self.expected = 0, 1
        self._moved = asyncio.Event()

    def record(self, event: str) -> None:
        self.events.append(event)
        self._moved.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition():
                self._moved.clear()
                await self._moved.wait()

    async def agent(self, name: str, rounds: int, answers: list[asyncio.Event] | None = None) -> None:
        """Generates and acts `rounds` times; each response waits for its event, if there is one."""
        with self.pacing.register_episode() as pace:
            await self.together()
            for number in range(rounds):
                await self.turn(pace, name, answers[number] if answers else None)
                self.record(f"{name}!")

    async def together(self) -> None:
        """Wait until all expected agents have arrived."""
        self.joined += 1
        self._moved.set()
        await self.until(lambda: self.joined >= self.expected)

    async def turn(self, pace: EpisodeStepper, name: str, answer: asyncio.Event | None) -> None:
        async with pace.generation_phase():
            self.record(f"+{name}")
            if answer is not None:
                await answer.wait()
            self.record(f"-{name}")


async def run(*agents, limit: float = LIMIT) -> None:
    async with asyncio.timeout(limit):
        await asyncio.gather(*agents)


async def test_all_generate_then_all_act() -> None:
    stage, go = Stage(Lockstep(LIMIT)), [asyncio.Event(), asyncio.Event()]
    stage.expected = 2

    async def conduct() -> None:
        await stage.until(lambda: "-b" in stage.events)
        for _ in range(20):  # b could act by now, were it allowed to
            await asyncio.sleep(0)
        assert "b!" not in stage.events
        for event in go:
            event.set()

    await run(stage.agent("a", 2, go), stage.agent("b", 2), conduct())
    assert len(stage.events) == 12
    for first in (0, 6):
        assert set(stage.events[first : first + 4]) == {"+a", "-a", "+b", "-b"}
        assert set(stage.events[first + 4 : first + 6]) == {"a!", "b!"}


async def test_free_running_agents_do_not_wait_for_each_other() -> None:
    stage, never = Stage(FreeStepping()), asyncio.Event()
    slow = asyncio.create_task(stage.agent("a", 1, [never]))
    await run(stage.agent("b", 3))
    assert stage.events.count("b!") == 3
    assert "a!" not in stage.events
    never.set()
    await run(slow)


async def test_the_next_round_waits_for_a_late_episode() -> None:
    stage, go = Stage(Lockstep(LIMIT)), asyncio.Event()
    early = asyncio.create_task(stage.agent("a", 2, [go, go]))
    await stage.until(lambda: "+a" in stage.events)
    with stage.pacing.register_episode() as pace:  # it resets its page while the first round runs
        go.set()
        await stage.until(lambda: "a!" in stage.events)
        for _ in range(20):
            await asyncio.sleep(0)
        assert stage.events.count("+a") == 1  # not without the one that began
        await stage.turn(pace, "b", None)
        stage.record("b!")
    await run(early)
    assert stage.events[:3] == ["+a", "-a", "a!"]
    assert set(stage.events[3:7]) == {"+a", "-a", "+b", "-b"}
    assert set(stage.events[7:]) == {"a!", "b!"}


@pytest.mark.parametrize("where", ["generating", "waiting to act", "waiting to generate", "acting"])
async def test_an_aborted_episode_does_not_block_the_others(where: str) -> None:
    stage, never, answers = Stage(Lockstep(LIMIT)), asyncio.Event(), [asyncio.Event(), asyncio.Event()]
    stage.expected = 2

    async def breaking_off() -> None:
        with stage.pacing.register_episode() as pace:
            await stage.together()
            if where == "waiting to generate":
                with stage.pacing.register_episode():  # a third one that is not there: no round can begin
                    await stage.turn(pace, "b", None)
            await stage.turn(pace, "b", never if where == "generating" else None)
            await never.wait()

    other = asyncio.create_task(stage.agent("a", 2, answers))
    broken = asyncio.create_task(breaking_off())
    if where in ("generating", "waiting to act"):
        await stage.until(lambda: {"+a", "+b"} <= set(stage.events))
    elif where == "acting":
        answers[0].set()
        await stage.until(lambda: "a!" in stage.events and "-b" in stage.events)
    for _ in range(20):
        await asyncio.sleep(0)
    broken.cancel()
    for answer in answers:
        answer.set()
    await run(other)
    assert stage.events.count("a!") == 2
    with pytest.raises(asyncio.CancelledError):
        await broken


async def test_an_error_while_generating_leaves_the_round() -> None:
    stage = Stage(Lockstep(LIMIT))
    stage.expected = 2

    async def failing() -> None:
        with stage.pacing.register_episode() as pace:
            await stage.together()
            with pytest.raises(ValueError, match="no answer"):
                await broken_turn(pace)

    async def broken_turn(pace: EpisodeStepper) -> None:
        async with pace.generation_phase():
            raise ValueError("no answer")

    await run(stage.agent("a", 3), failing())
    assert stage.events.count("a!") == 3


async def test_no_wait_exceeds_the_limit_and_missing_episodes_rejoin() -> None:
    stage, back = Stage(Lockstep(0.2)), asyncio.Event()
    stage.expected = 2

    async def slow() -> None:
        with stage.pacing.register_episode() as pace:
            await stage.together()
            await stage.turn(pace, "b", None)
            await back.wait()  # acts for longer than others wait
            await stage.turn(pace, "b", None)

    slowly = asyncio.create_task(slow())
    answers = [asyncio.Event() for _ in range(3)]
    others = asyncio.create_task(stage.agent("a", 3, answers))
    answers[0].set()
    await stage.until(lambda: stage.events.count("+a") == 2)  # a round without b
    assert stage.events.count("-b") == 1
    back.set()
    answers[1].set()
    answers[2].set()
    await run(slowly, others)
    assert stage.events.count("-b") == 2
    assert stage.events.count("a!") == 3


@pytest.mark.parametrize("seed", range(5))
async def test_no_mixture_of_starts_ends_and_cancellations_blocks_the_others(seed: int) -> None:
    chance, lockstep = random.Random(seed), Lockstep(LIMIT)
    generating: set[int] = set()
    acting: set[int] = set()

    async def pause() -> None:
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)

    async def agent(number: int) -> None:
        await pause()
        with lockstep.register_episode() as pace:
            for _ in range(chance.randrange(1, 8)):
                await pause()  # the reset, or the action
                acting.discard(number)
                async with pace.generation_phase():
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

    async def cancel() -> None:
        for number in chance.sample(range(30), 6):
            await pause()
            agents[number].cancel()
            acting.discard(number)

    async with asyncio.timeout(LIMIT):
        await cancel()
        results = await asyncio.gather(*agents, return_exceptions=True)
    assert not [result for result in results if isinstance(result, Exception)]
    assert sum(result is None for result in results) >= 24
