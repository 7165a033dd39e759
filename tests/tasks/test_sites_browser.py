"""The sites in a real browser: scripted policies solve every task by coordinates and keys, as the agent does."""

from __future__ import annotations

import asyncio
import gc

import pytest

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.tasks import LatencyConfig, TasksConfig
from megatron_webrl.judge.evaluation import outcome
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.tasks.sites.high_level_actions import SubmitForm, first_action
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS, SiteTaskSource, get_goal
from megatron_webrl.types import ANSWER, DONE, STEPS_EXHAUSTED, Action, Observation, Task

MAX_STEPS = 40
SETTINGS = TasksConfig(max_steps=MAX_STEPS)
SLOW = TasksConfig(max_steps=MAX_STEPS, latency=LatencyConfig(median_seconds=0.05))
SMALL = ("shop-order-list", "forum-reply", "calendar-create", "calendar-cancel", "wiki-correct-fact", "forms-apply")


def site_task(environment: str, seed: int = 0) -> Task:
    answer = get_goal(environment, seed).answer
    return Task(f"sites/{environment}/{seed}", "sites", environment, seed, MAX_STEPS, answer=answer)


def pool_on(source: SiteTaskSource, sessions: int = 1, width: int = 1280, height: int = 768) -> BrowserPool:
    return BrowserPool(BrowserConfig(width=width, height=height), {"sites": source}, sessions, 60.0)


async def solve(fleet: BrowserPool, source: SiteTaskSource, task: Task) -> tuple[str, list[Action], list[str]]:
    """Verdict, number of actions, and failed actions."""
    actions: list[Action] = []
    async with fleet.session() as session:
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
    return outcome(seen.reward, ended, task.answer, last.text), actions, [error for error in errors if error]


async def solve_all(tasks: list[Task], width: int, height: int) -> None:
    with SiteTaskSource(list(ENVIRONMENTS), SETTINGS) as source:
        async with pool_on(source, 4, width, height) as fleet:
            found = await asyncio.gather(*(solve(fleet, source, task) for task in tasks))
        failed = [(task.id, verdict, errors) for task, (verdict, _, errors) in zip(tasks, found, strict=True)
                  if verdict != "success" or errors]  # fmt: skip
        assert not failed
        for _, actions, _ in found:
            assert {action.kind for action in actions} <= {"left_click", "type", "scroll", "answer"}


async def test_scripted_policies_solve_every_task_in_the_browser() -> None:
    await solve_all([site_task(environment, 1) for environment in ENVIRONMENTS], 1280, 768)


async def test_scripted_policies_solve_tasks_in_a_small_viewport() -> None:
    await solve_all([site_task(environment, 2) for environment in SMALL], 640, 480)


async def act(session: Session, move: SubmitForm) -> Observation:
    """Execute a high-level action until the page has accepted the form."""
    address, seen = session.page.url, None
    for _ in range(10):
        seen = await session.step(await first_action(session.page, move))
        if session.page.url != address or seen.done:
            break
    assert seen is not None
    return seen


async def test_a_wrong_effect_ends_the_task_without_success() -> None:
    with SiteTaskSource(["forms-vote", "forum-follow-thread", "wiki-watch"], SETTINGS) as source:
        async with pool_on(source) as fleet:
            async with fleet.session() as session:
                await session.reset(site_task("forms-vote"))
                wanted = get_goal("forms-vote", 0).effects[0][1]
                options = await session.page.locator("input[type=radio]").evaluate_all("all => all.map(e => e.value)")
                other = next(option for option in options if option != wanted)
                await session.step(await first_action(session.page, SubmitForm("/vote", {"option": other})))
                seen = await session.step(await first_action(session.page, SubmitForm("/vote", {"option": other})))
            assert (seen.reward, seen.done) == (0.0, True)
            async with fleet.session() as session:
                await session.reset(site_task("forum-follow-thread"))
                wanted = f"/thread/{get_goal('forum-follow-thread', 0).effects[0][1]}"
                others = session.page.locator("table a[href^='/thread/']")
                paths = await others.evaluate_all("all => all.map(e => e.getAttribute('href'))")
                other = next(path for path in paths if path != wanted)
                await session.step(Action("navigate", url=f"http://forum.localhost{other}"))
                seen = await act(session, SubmitForm(other.replace("thread", "follow")))
            assert (seen.reward, seen.done) == (0.0, True)


async def test_two_browsers_show_the_same_page_and_address_for_a_seed() -> None:
    shown = []
    for _ in range(2):
        with SiteTaskSource(["shop-best-offer"], SETTINGS) as source:
            async with pool_on(source) as fleet, fleet.session() as session:
                shown.append(await session.reset(site_task("shop-best-offer", 3)))
    assert shown[0] == shown[1]
    assert shown[0].url == "http://shop.localhost/"
    assert shown[0].instruction == get_goal("shop-best-offer", 3).instruction


async def test_concurrent_episodes_have_separate_carts() -> None:
    with SiteTaskSource(["shop-buy-item"], SETTINGS) as source:
        task = site_task("shop-buy-item", 5)
        async with pool_on(source, 2) as fleet, fleet.session() as one, fleet.session() as other:
            await one.reset(task)
            await other.reset(task)
            seen = None
            for _ in range(MAX_STEPS):
                seen = await one.step(await source.demonstrate(one.page, task))
                if seen.done:
                    break
            assert seen is not None
            assert (seen.reward, seen.done) == (1.0, True)
            cart = await other.step(Action("navigate", url="http://shop.localhost/cart"))
            assert (cart.reward, cart.done) == (None, False)
            assert "Your cart is empty" in await other.page.content()


async def test_an_episode_is_dropped_with_its_browser_context() -> None:
    with SiteTaskSource(["shop-find-price"], SETTINGS) as source:
        async with pool_on(source) as fleet:
            for seed in range(3):
                async with fleet.session() as session:
                    await session.reset(site_task("shop-find-price", seed))
                    assert len(source._episodes) >= 1
            del session
            async with asyncio.timeout(20):
                while source._episodes:  # contexts are closed in the background
                    await asyncio.sleep(0.05)
                    gc.collect()


async def test_a_slow_site_is_waited_for_and_a_dead_end_is_a_scripted_policy_error() -> None:
    with SiteTaskSource(["forum-follow-thread"], SLOW) as source:
        async with pool_on(source) as fleet:
            task = site_task("forum-follow-thread", 1)
            verdict, _, _ = await solve(fleet, source, task)
            assert verdict == "success"
            async with fleet.session() as session:
                await session.reset(task)
                await session.page.evaluate("document.body.replaceChildren()")
                with pytest.raises(ScriptedPolicyError, match="sites/forum-follow-thread/1: "):
                    await source.demonstrate(session.page, task)
