"""The sites in a real browser: scripted policies solve every task by coordinates and keys, as the agent does."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.tasks import LatencyConfig, TasksConfig
from megatron_webrl.judge.evaluation import outcome
from megatron_webrl.tasks import click_target
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS, SiteTaskSource
from megatron_webrl.types import ANSWER, DONE, STEPS_EXHAUSTED, Action, Task
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW_SITES = TasksConfig(max_steps=40, latency=LatencyConfig(median_seconds=0.05))
SOME = ("forum-reply", "forms-apply")


@asynccontextmanager
async def pool_on(
    environments: Sequence[str], tasks: TasksConfig, width: int, height: int
) -> AsyncIterator[tuple[SiteTaskSource, BrowserPool]]:
    with SiteTaskSource(list(environments), tasks) as source:
        async with BrowserPool(BrowserConfig(width=width, height=height), {"sites": source}, 3, 60.0) as pool:
            yield source, pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites() -> AsyncIterator[tuple[SiteTaskSource, BrowserPool]]:
    async with pool_on([*SOME, "shop-buy-item"], SLOW_SITES, 640, 480) as found:
        yield found


async def check_solved(source: SiteTaskSource, pool: BrowserPool, environments: Sequence[str], seed: int) -> None:
    async def solve(task: Task) -> None:
        actions: list[Action] = []
        async with pool.session() as session:
            seen = await session.reset(task)
            errors = [seen.error]
            while not seen.done and len(actions) < task.max_steps:
                actions.append(await source.demonstrate(session.page, task))
                seen = await session.step(actions[-1])
                errors.append(seen.error)
                if actions[-1].kind == "answer":
                    break
        last = actions[-1]
        ended = DONE if seen.done else ANSWER if last.kind == "answer" else STEPS_EXHAUSTED
        assert (outcome(seen.reward, ended, task.answer, last.text), set(errors)) == ("success", {None}), task.id
        assert {action.kind for action in actions} <= {"left_click", "type", "scroll", "answer"}

    await asyncio.gather(*(solve(source.make_task(environment, seed)) for environment in environments))


@pytest.mark.slow
async def test_scripted_policies_solve_every_task_in_the_browser() -> None:
    async with pool_on(list(ENVIRONMENTS), TasksConfig(max_steps=40), 1280, 768) as (source, pool):
        await check_solved(source, pool, list(ENVIRONMENTS), 1)


async def test_scripted_policies_solve_tasks_of_slow_sites_in_a_small_viewport_until_a_dead_end(
    sites: tuple[SiteTaskSource, BrowserPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, pool = sites
    await check_solved(source, pool, SOME, 2)

    def are_dropped() -> bool:  # with their contexts, which are closed in the background
        gc.collect()
        return not source._episodes

    await eventually(are_dropped, 20)
    monkeypatch.setattr(click_target, "RETRY_SECONDS", 0.2)
    async with pool.session() as session:
        task = source.make_task("forum-reply", 1)
        await session.reset(task)
        await session.page.evaluate("document.body.replaceChildren()")
        with pytest.raises(ScriptedPolicyError, match="sites/forum-reply/1: "):
            await source.demonstrate(session.page, task)
