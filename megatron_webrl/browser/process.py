"""One running Chromium with the driver that speaks to it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from typing import Any

from playwright.async_api import Browser, Playwright, async_playwright
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.chromium import sandboxed
from megatron_webrl.browser.errors import BrowserCrashed, BrowserError
from megatron_webrl.browser.memory import bound_pages

log = logging.getLogger(__name__)

START_SECONDS = 60.0
CLOSE_SECONDS = 15.0


class Chromium:
    """Driver and browser start and end together: after a crash either may be gone."""

    def __init__(self, playwright: Playwright, browser: Browser, groups: set[int]) -> None:
        self.browser = browser
        self.sessions = 0  # taken so far
        self.in_use = 0
        self._playwright, self._groups = playwright, groups

    @classmethod
    async def launch(cls, executable: str, arguments: list[str], page_mib: int) -> Chromium:
        """Start both within START_SECONDS; a page's process gets `page_mib` at most. Raises BrowserCrashed."""
        started = time.monotonic()
        playwright = await async_playwright().start()
        try:
            async with asyncio.timeout(START_SECONDS):
                browser = await playwright.chromium.launch(
                    executable_path=executable,
                    args=arguments,
                    chromium_sandbox=sandboxed(),
                    handle_sigint=False, handle_sigterm=False, handle_sighup=False,  # the worker closes it
                    timeout=START_SECONDS * 1000,
                )  # fmt: skip
                groups = await _process_groups(browser, page_mib)
        except BaseException as error:
            await playwright.stop()
            if not isinstance(error, PlaywrightError | TimeoutError):
                raise
            reason = (str(error) or f"not up within {START_SECONDS} s").splitlines()[0]
            raise BrowserCrashed(f"{executable} does not start: {reason}") from error
        log.info("launched %s in %.2f s", executable, time.monotonic() - started)
        return cls(playwright, browser, groups)

    @property
    def alive(self) -> bool:
        """Whether driver and browser can be spoken to."""
        return self.browser.is_connected()

    async def close(self) -> None:
        """End both; whatever is left after CLOSE_SECONDS is killed."""
        try:
            for name, ending in (("Chromium", self.browser.close), ("the browser driver", self._playwright.stop)):
                try:
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await ending()
                except (PlaywrightError, TimeoutError) as error:
                    log.warning("%s did not end by itself: %s", name, error)
        finally:
            for group in self._groups:
                _kill(group)


async def _process_groups(browser: Browser, page_mib: int) -> set[int]:
    control = await browser.new_browser_cdp_session()
    processes: list[dict[str, Any]] = (await control.send("SystemInfo.getProcessInfo"))["processInfo"]
    await control.detach()
    browsers = [int(process["id"]) for process in processes if process["type"] == "browser"]
    for process in browsers:
        bound_pages(process, page_mib)
    # Debian's chromium is a shell script that stays the leader of the group.
    return {os.getpgid(process) for process in browsers} - {os.getpgrp()}


def _kill(group: int) -> None:
    """Kill what is left of a process group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass  # as it should be
    except PermissionError as error:
        raise BrowserError(f"Chromium, process group {group}, belongs to another user and cannot be ended") from error
