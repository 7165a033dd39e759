"""Terminates endless scripts."""

from __future__ import annotations

import asyncio

from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.page.step_messages import StepMessages
from megatron_webrl.browser.page.tabs import Tabs


async def terminate_endless_scripts(tabs: Tabs, messages: StepMessages, seconds: float) -> None:
    """Ping the active tab every `seconds` until cancelled; terminate its script if it does not answer in `seconds`."""
    while True:
        await asyncio.sleep(seconds)
        cdp = tabs.active.cdp
        try:
            async with asyncio.timeout(seconds):
                await cdp.send("Runtime.evaluate", {"expression": "0"})
        except TimeoutError:
            messages.add("the page did not answer; the script that it ran was ended")
            await _terminate_script(tabs, seconds)
        except PlaywrightError:
            continue  # the document was replaced or the page has closed: handled elsewhere


async def _terminate_script(tabs: Tabs, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            # Chromium accepts this command while a script runs, and answers once the script has ended.
            await tabs.active.cdp.send("Runtime.terminateExecution")
    except (PlaywrightError, TimeoutError):
        pass  # the time limit of the operation ends it
