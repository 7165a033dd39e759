"""Judged signs: real pages that give no reward, and an oracle that reads their screenshots."""

from __future__ import annotations

import pytest

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.tasks import PageTasksConfig
from tools.bench.judged_signs import INSTRUCTION, SOURCE, JudgedSigns, SignTruth

NAME = "remember-sign-4-0"


@pytest.mark.asyncio
async def test_only_the_sign_of_the_first_page_is_a_right_answer() -> None:
    """Of the oracle, to scripts that look and to those that guess; and only with the screenshot that shows it."""
    settings = BrowserConfig(width=160, height=224, screenshot="png", reuse_pages=4)
    decided = []
    with JudgedSigns(PageTasksConfig(environments=[NAME], max_steps=4)) as source:
        async with BrowserPool(settings, {SOURCE: source}, 1, 60.0) as pool, pool.session() as session:
            for seed in range(12):
                seen = await session.reset(source.make_task(NAME, seed))
                assert (seen.reward, seen.done) == (None, False)
                first, sign = seen.screenshot, await session.page.evaluate("episode.sign")
                action = await source.demonstrate(session.page, source.make_task(NAME, seed), premature_submit=seed > 3)
                last = (await session.step(action)).screenshot
                answer = await source.demonstrate(session.page, source.make_task(NAME, seed))
                assert (action.kind, answer.kind, answer.text) == ("left_click", "answer", action.note)
                fields, oracle = {"TASK": INSTRUCTION, "ANSWER": str(answer.text)}, SignTruth()
                decided.append(oracle.decide("rubric", fields, [first, last]))
                assert decided[-1] == oracle.decide("supported", fields, [first]) == (answer.text == sign)
                assert not oracle.decide("rubric", fields | {"ANSWER": f"a {sign}"}, [first])
                assert not oracle.decide("rubric", fields | {"ANSWER": sign}, [last])
                assert oracle.decide("rubric", {"TASK": INSTRUCTION, "FACT": "The sign"}, [first, last])
                assert not oracle.decide("rubric", {"TASK": INSTRUCTION, "FACT": "The sign"}, [last])
                assert not oracle.decide("blocked", fields, [first])
            seen = await session.reset(source.make_task(NAME, 0))
            await session.step(await source.demonstrate(session.page, source.make_task(NAME, 0)))
            pressed = await super(JudgedSigns, source).demonstrate(session.page, source.make_task(NAME, 0))
            seen = await session.step(pressed)
            assert (seen.reward, seen.done) == (None, True)
    assert all(decided[:4])
    assert set(decided[4:]) == {True, False}
