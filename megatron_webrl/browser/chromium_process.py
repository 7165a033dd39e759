"""One running Chromium with the driver that speaks to it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
from playwright.async_api import Browser, CDPSession
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.chromium import use_sandbox
from megatron_webrl.browser.driver import PlaywrightDriver
from megatron_webrl.browser.errors import BrowserCrashed
from megatron_webrl.browser.process_memory import limit_page_memory, pids_by_process_group, resident_mib
from megatron_webrl.system import child_process
from megatron_webrl.system.text import first_line

log = logging.getLogger(__name__)

START_SECONDS = 60.0
CLOSE_SECONDS = 15.0
PING_SECONDS = 10.0
MAX_FAILED_PINGS = 2
"""So many questions must stay unanswered in a row: this process may have slept over the answer to one."""


class Chromium:
    """Driver and browser start and end together: after a crash either may be gone."""

    def __init__(self, driver: PlaywrightDriver, browser: Browser, control: CDPSession, pid: int) -> None:
        self.browser, self.pid = browser, pid
        self.resident_mib = self._began_mib = (
            0.0  # resident memory, driver included, when last measured and after the launch
        )
        self._driver, self._control = driver, control
        self._reachable = True
        # Debian's chromium is a shell script that stays the leader of the group.
        self._group = os.getpgid(pid)
        self._group_began = child_process.start_time(self._group)

    @classmethod
    async def launch(cls, executable: str, arguments: list[str], page_mib: int) -> Chromium:
        """Start both within START_SECONDS; a page's process gets `page_mib` at most. Raises BrowserCrashed."""
        started, driver = time.monotonic(), None
        try:
            async with asyncio.timeout(START_SECONDS):
                driver = await PlaywrightDriver.start()
                browser = await driver.playwright.chromium.launch(
                    executable_path=executable,
                    args=arguments,
                    chromium_sandbox=use_sandbox(),
                    handle_sigint=False, handle_sigterm=False, handle_sighup=False,  # the worker closes it
                    timeout=START_SECONDS * 1000,
                )  # fmt: skip
                control = await browser.new_browser_cdp_session()
                chromium = cls(driver, browser, control, await _pid(control))
                await asyncio.to_thread(limit_page_memory, chromium.pid, page_mib)
                chromium.measure_memory(await asyncio.to_thread(pids_by_process_group))
                chromium._began_mib = chromium.resident_mib
        except BaseException as error:
            if driver is not None:
                await driver.stop(graceful=False)
            if not isinstance(error, PlaywrightError | TimeoutError | ProcessLookupError | psutil.NoSuchProcess):
                raise
            reason = f"not up within {START_SECONDS} s" if isinstance(error, TimeoutError) else first_line(error)
            raise BrowserCrashed(f"{executable} does not start: {reason}") from error
        log.info("launched %s in %.2f s", executable, time.monotonic() - started)
        return chromium

    @property
    def alive(self) -> bool:
        """Whether driver and browser can be spoken to."""
        return self._reachable and self.browser.is_connected()

    @property
    def growth_mib(self) -> float:
        """Resident memory beyond what it held after the launch, when last measured."""
        return self.resident_mib - self._began_mib

    def on_exit(self, ended: Callable[[str], None]) -> None:
        """Call `ended` with a sentence when browser or driver end; possibly with both."""

        def driver_ended() -> None:
            self._reachable = False
            ended("the browser's driver has ended")

        self.browser.on("disconnected", lambda browser: ended("Chromium has ended"))
        self._driver.on_exit(driver_ended)
        if not self.browser.is_connected():
            asyncio.get_running_loop().call_soon(ended, "Chromium has ended")

    async def is_responsive(self) -> bool:
        """Whether the browser answers a question that its main thread answers at once."""
        for _ in range(MAX_FAILED_PINGS):
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await self._control.send("Browser.getVersion")
                return True
            except TimeoutError:
                continue
            except PlaywrightError:  # it has ended; the news may come a little later
                self._reachable = False
                return False
        return False

    def measure_memory(self, groups: Mapping[int, Sequence[int]]) -> None:
        """Set `mib`; `groups` from `by_group`. Takes a few milliseconds for each process."""
        self.resident_mib = resident_mib([*groups.get(self._group, ()), self._driver.process.pid])

    async def close(self, *, graceful: bool = True) -> None:
        """End both; whatever is left after CLOSE_SECONDS, or is not to be ended gently, is killed."""
        graceful = graceful and self.alive
        try:
            if graceful:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.browser.close()
        except (PlaywrightError, TimeoutError) as error:
            graceful = False
            log.warning("Chromium did not end by itself: %s", error or f"{CLOSE_SECONDS} s")
        finally:
            if not graceful:
                await asyncio.to_thread(self._kill)
            await self._driver.stop(graceful=graceful)
            await asyncio.to_thread(self._kill)

    def _kill(self) -> None:
        # A number that is given to another process again names another group.
        if child_process.start_time(self._group) in (0, self._group_began):
            child_process.kill_process_group(self._group)


async def _pid(control: CDPSession) -> int:
    found: list[dict[str, Any]] = (await control.send("SystemInfo.getProcessInfo"))["processInfo"]
    return next(int(process["id"]) for process in found if process["type"] == "browser")
