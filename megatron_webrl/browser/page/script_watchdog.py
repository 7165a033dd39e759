"""Pages whose scripts run without end."""

from __future__ import annotations

import asyncio

from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.page.step_messages import StepMessages
from megatron_webrl.browser.page.tabs import Tabs


async def terminate_endless_scripts(tabs: Tabs, notes: StepMessages, patience: float) -> None:
    """Ask the active tab for a sign of life every `patience` seconds; end its script if it gives none for as long.

    Runs until it is cancelled. A page that is busy with something else than a script is merely asked again.
    """
    while True:
        await asyncio.sleep(patience)
        cdp = tabs.active.cdp
        try:
            async with asyncio.timeout(patience):
                await cdp.send("Runtime.evaluate", {"expression": "0"})
        except TimeoutError:
            notes.add("the page did not answer; the script that it ran was ended")
            await _end_script(tabs, patience)
        except PlaywrightError:
            continue  # it is replaced, or gone, of which others take care


async def _end_script(tabs: Tabs, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            # Chromium takes this one while a script runs; the answer comes when it has ended.
            await tabs.active.cdp.send("Runtime.terminateExecution")
    except (PlaywrightError, TimeoutError):
        pass  # the limit of the operation ends it
