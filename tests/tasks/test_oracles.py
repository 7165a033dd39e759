"""Every oracle solves its environment."""

from __future__ import annotations

import asyncio

import pytest

from megatron_webrl.browser.fleet import Fleet
from megatron_webrl.config import BrowserConfig
from megatron_webrl.tasks.aim import STEP, OracleError
from megatron_webrl.tasks.miniwob import Miniwob
from megatron_webrl.tasks.oracles import environments, next_action
from megatron_webrl.types import Action, Observation, Task

SEEDS = 5


async def solve(fleet: Fleet, environment: str, seed: int) -> tuple[Observation, list[Action]]:
    task = Task(id=f"miniwob/{environment}/{seed}", source="miniwob", environment=environment, seed=seed, max_steps=4)
    actions: list[Action] = []
    async with fleet.session() as session:
        seen = await session.reset(task)
        while not seen.done and len(actions) < task.max_steps:
            actions.append(await next_action(session.page, environment))
            seen = await session.step(actions[-1])
    return seen, actions


async def test_each_oracle_earns_a_reward_from_every_seed_on_the_coarse_grid() -> None:
    tasks = [(environment, seed) for environment in environments() for seed in range(SEEDS)]
    with Miniwob(environments(), 4) as source:
        settings = BrowserConfig(width=160, height=210, screenshot="png")
        async with Fleet(settings, {"miniwob": source}, 6, 30.0) as fleet:
            found = await asyncio.gather(*(solve(fleet, *task) for task in tasks))
    failed = [task for task, (seen, _) in zip(tasks, found, strict=True) if seen.reward is None or seen.reward <= 0]
    assert not failed
    assert len(found) == 13 * SEEDS
    coordinates = [action.coordinate for _, actions in found for action in actions]
    assert all(point is not None and not point[0] % STEP and not point[1] % STEP for point in coordinates)


async def test_small_targets_of_a_large_viewport_get_exact_coordinates() -> None:
    with Miniwob(["grid-coordinate"], 4) as source:
        async with Fleet(BrowserConfig(), {"miniwob": source}, 1, 20.0) as fleet:
            seen, actions = await solve(fleet, "grid-coordinate", 0)
    assert seen.reward is not None
    assert seen.reward > 0
    assert any(value % STEP for value in actions[0].coordinate or ())


async def test_a_page_without_the_target_is_an_oracle_error() -> None:
    with Miniwob(["click-dialog"], 4) as source:
        async with Fleet(BrowserConfig(), {"miniwob": source}, 1, 20.0) as fleet, fleet.session() as session:
            task = source.held_out(0)
            await session.reset(task)
            await session.page.evaluate("() => document.querySelector('.ui-dialog').remove()")
            with pytest.raises(OracleError, match="click-dialog: the element to act on is not on the page"):
                await next_action(session.page, "click-dialog")
