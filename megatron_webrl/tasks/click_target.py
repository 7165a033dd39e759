"""Coordinates of clicks and drags at a known element, for scripted policies."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.types import COORDINATE_RANGE, Action

if TYPE_CHECKING:
    from playwright.async_api import Page

COORDINATE_STEP = 20  # few different coordinates are easier to learn
RETRY_SECONDS, RETRY_INTERVAL_SECONDS = 2.0, 0.05

_FIND = Path(__file__).with_suffix(".js").read_text()


class ScriptedPolicyError(RuntimeError):
    """The page does not allow the action that the scripted policy needs."""


async def read_page(page: Page, script: str, arguments: Any = None) -> Any:
    """Result of a script; repeated for RETRY_SECONDS while the page navigates. Raises Playwright's Error."""
    from playwright.async_api import (
        Error as PlaywrightError,
    )  # clients of browser servers import this module without it

    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            return await page.evaluate(script, arguments)
        except PlaywrightError as error:
            if "context was destroyed" not in error.message or time.monotonic() > deadline:
                raise
        await asyncio.sleep(RETRY_INTERVAL_SECONDS)


async def resolve_target(page: Page, target: str, argument: Any = None) -> Action:
    """An action at the element that `target` names, or a scroll towards it. Raises ScriptedPolicyError.

    `target` is a JavaScript expression over the page and `argument`: {element} or {element, at: [x, y] in pixels} to
    click, {element, text} to type, {element, kind} with the text or direction of that kind, {element, by: [x, y] in
    pixels} to drag, or {key}; with each of them a {note} for Memory. A failure, such as during an animation, is retried
    for RETRY_SECONDS.
    """
    script = _FIND.replace("TARGET", f"({target})")
    arguments = {"range": COORDINATE_RANGE, "step": COORDINATE_STEP, "argument": argument}
    deadline = time.monotonic() + RETRY_SECONDS
    result: dict[str, Any] = await read_page(page, script, arguments)
    while "problem" in result and time.monotonic() < deadline:
        await asyncio.sleep(RETRY_INTERVAL_SECONDS)
        result = await read_page(page, script, arguments)
    if "problem" in result:
        raise ScriptedPolicyError(str(result["problem"]))
    return Action(
        result["kind"],
        coordinate=_to_int(result.get("coordinate")),
        text=result.get("text"),
        direction=result.get("direction"),
        end_coordinate=_to_int(result.get("end")),
        note=result.get("note"),
    )


def _to_int(point: list[float] | None) -> tuple[int, int] | None:
    return None if point is None else (int(point[0]), int(point[1]))
