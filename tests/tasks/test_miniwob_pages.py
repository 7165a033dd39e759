"""Every environment of MiniWoB++ opens, and a seed fixes its page."""

from __future__ import annotations

import hashlib
import random

import pytest

from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.tasks import miniwob
from megatron_webrl.tasks.miniwob import all_environments, can_reuse_page
from megatron_webrl.tasks.scripted_policies import next_scripted_action
from megatron_webrl.types import Action
from tests.tasks.miniwob_sessions import in_each, pool_of, task_of

SEED = 3
SIZE = (560, 680)  # as large as the largest task, a flight page with its instruction at its right

MOVING = {"chase-circle", "moving-items", "simon-says", "stock-market", "terminal"}
"""Environments with animations: sessions observe them at different times."""

# The document as text, with field values and scroll positions, but without the reward panel,
# and where the folded labels of click-pie end: a hundredth of a pixel more or less.
DOCUMENT = """() => {
  const text = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    if (node.nodeType !== Node.ELEMENT_NODE || ['reward-display', 'click-canvas'].includes(node.id)) return '';
    const names = [...node.attributes].filter((a) => a.name !== 'transform').map((a) => `${a.name}="${a.value}"`);
    const state = [node.value, node.checked, node.scrollTop, node.scrollLeft].join();
    const inside = node.tagName === 'IFRAME' ? [node.contentDocument.body] : [...node.childNodes];
    return `<${node.tagName} ${names.join(' ')} ${state}>${inside.map(text).join('')}</>`;
  };
  return text(document.body);
}"""

# Lets a page begin 400 days later.
LATER = """
  const Today = Date, now = () => Today.now() + 400 * 24 * 3600 * 1000;
  window.Date = class extends Today {
    constructor(...given) { super(...(given.length ? given : [now()])); }
    static now() { return now(); }
  };
"""

EXTENT = """() => {
  const boxes = ['#wrap', '#query'].map((name) => document.querySelector(name).getBoundingClientRect());
  return [Math.max(...boxes.map((box) => box.right)), Math.max(...boxes.map((box) => box.bottom))];
}"""


async def view(session: Session, environment: str) -> tuple[object, ...]:
    """Result of a reset: instruction, document, pixels, and extent of task and instruction."""
    seen = await session.reset(task_of(environment, SEED))
    assert (seen.error, seen.reward, seen.done) == (None, None, False), environment
    assert seen.instruction, environment
    extent = await session.page.evaluate(EXTENT)
    if environment in MOVING:  # what the start script leaves, before a frame is drawn
        start = f"(given) => {{ ({miniwob.START_SCRIPT})(given); return ({DOCUMENT})(); }}"
        await session.page.reload()
        document = await session.page.evaluate(start, miniwob.start_arguments(environment, SEED))
        return seen.instruction, document, None, extent
    pixels = hashlib.sha256(seen.screenshot).hexdigest()
    return seen.instruction, await session.page.evaluate(DOCUMENT), pixels, extent


@pytest.mark.slow
async def test_every_environment_opens_to_the_same_page_twice() -> None:
    environments = all_environments()
    async with pool_of(environments, *SIZE) as fleet:
        first, second = [await in_each(fleet, environments, view) for _ in range(2)]
    found = {name: (first[name], second[name]) for name in environments}
    default = BrowserConfig()
    for name, looks in found.items():
        for what, *values in zip(("instruction", "document", "pixels", "extent"), *looks, strict=True):
            assert values[0] == values[1], f"{what} of {name}"
        extent = looks[0][-1]
        assert isinstance(extent, list)
        assert extent[0] <= default.width, name
        assert extent[1] <= default.height, name
        assert extent == ([540, 667] if name.startswith("flight.") else [160, 210]), name


async def test_a_page_is_the_same_on_any_day() -> None:
    environments = ["terminal", "choose-date", "book-flight", "enter-time", "daily-calendar"]

    async def later(session: Session, environment: str) -> tuple[object, ...]:
        await session.page.add_init_script(LATER)
        return await view(session, environment)

    async with pool_of(environments, *SIZE) as fleet:
        assert await in_each(fleet, environments, view) == await in_each(fleet, environments, later)


async def test_pages_show_times_of_one_zone_and_text_beyond_ascii() -> None:
    async with pool_of(["unicode-test"], 160, 210) as fleet, fleet.session() as session:
        seen = await session.reset(task_of("unicode-test", SEED))
        zone = await session.page.evaluate("Intl.DateTimeFormat().resolvedOptions().timeZone")
    assert (zone, seen.instruction) == ("UTC", 'Click on the "确定" button.')


@pytest.mark.parametrize("share", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)])
async def test_a_restarted_page_is_like_a_new_one(share: int) -> None:
    environments = [name for name in all_environments() if can_reuse_page(name)][share::3]

    async def used(session: Session, environment: str) -> tuple[object, ...]:
        await session.reset(task_of(environment, SEED + 1))
        choose = random.Random(environment)
        for kind in ("left_click", "left_click", "type", "left_click"):
            place = choose.randrange(1000), choose.randrange(200, 1000)
            await session.step(Action(kind, coordinate=place, text="some words" if kind == "type" else None))
        assert session.reusable, environment
        return (await view(session, environment))[::2]

    async def fresh(session: Session, environment: str) -> tuple[object, ...]:
        return (await view(session, environment))[::2]

    async with pool_of(environments, *SIZE) as fleet:
        first, again = await in_each(fleet, environments, fresh), await in_each(fleet, environments, used)
    different = [name for name in environments if first[name] != again[name]]
    assert not different


@pytest.mark.parametrize(
    "environment", ["choose-date", "choose-date-easy", "choose-date-medium", "choose-date-nodelay"]
)
async def test_a_restarted_calendar_is_like_a_new_one(environment: str) -> None:
    async def look(session: Session, seed: int, steps: int) -> list[bytes]:
        seen = [await session.reset(task_of(environment, seed))]
        while not seen[-1].done and len(seen) <= steps:
            seen.append(await session.step(await next_scripted_action(session.page, environment)))
        return [each.screenshot for each in seen]

    async with pool_of([environment], *SIZE) as fleet:
        async with fleet.session() as session:
            new = await look(session, SEED, 4)
        async with fleet.session() as session:
            await session.reset(task_of(environment, SEED))
            await session.page.evaluate("() => { window.opened = true; }")
            for steps in (4, 1):  # a date is chosen; a calendar is open
                await look(session, SEED + 1, steps)
                assert await look(session, SEED, 4) == new
            unfolding = f"""async (given) => {{
                jQuery('#datepicker').datepicker('show');
                await ({miniwob.START_SCRIPT})(given);
                return jQuery('#ui-datepicker-div').is(':visible');
            }}"""
            assert not await session.page.evaluate(unfolding, miniwob.start_arguments(environment, SEED))
            assert await session.page.evaluate("() => window.opened")  # never loaded again
