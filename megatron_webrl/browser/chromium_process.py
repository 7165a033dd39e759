"""One running Chromium with its Playwright driver."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from playwright.async_api import Browser, CDPSession
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.chromium import use_sandbox
from megatron_webrl.browser.driver import PlaywrightDriver
from megatron_webrl.browser.errors import BrowserCrashed
from megatron_webrl.browser.isolation import Isolation
from megatron_webrl.browser.process_memory import limit_page_memory, pids_by_process_group, resident_mib
from megatron_webrl.util import child_process
from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

START_SECONDS = 60.0
CLOSE_SECONDS = 15.0
PING_SECONDS = 10.0
MAX_FAILED_PINGS = 2  # in a row before a browser counts as hung: a pause of this process may delay one answer


class Chromium:
    """Driver and browser, started and ended together; after a crash either may be gone."""

    def __init__(
        self, driver: PlaywrightDriver, browser: Browser, control: CDPSession, pid: int, home: Path | None
    ) -> None:
        """`home`: the browser's own folder, if it runs isolated; removed at the end."""
        self.browser, self.pid = browser, pid
        self.resident_mib = 0.0  # at the latest measurement, driver included
        self._launched_mib = 0.0  # after the launch
        self._driver, self._control, self._home = driver, control, home
        self._connected = True
        self._group = os.getpgid(pid)  # its leader may be a shell script: Debian's chromium is one
        self._group_started = child_process.start_time(self._group)

    @classmethod
    async def launch(
        cls, executable: str, arguments: list[str], page_mib: int, isolation: Isolation | None = None
    ) -> Chromium:
        """Start both within START_SECONDS; each renderer may use `page_mib` MiB. Raises BrowserCrashed."""
        started, driver = time.monotonic(), None
        home = isolation.make_home(executable) if isolation is not None else None
        try:
            async with asyncio.timeout(START_SECONDS):
                driver = await PlaywrightDriver.start()
                browser = await driver.playwright.chromium.launch(
                    executable_path=executable if home is None else home / "chromium",
                    args=arguments,
                    chromium_sandbox=use_sandbox() or isolation is not None,
                    handle_sigint=False, handle_sigterm=False, handle_sighup=False,  # this process closes it
                    timeout=START_SECONDS * 1000,
                )  # fmt: skip
                control = await browser.new_browser_cdp_session()
                chromium = cls(driver, browser, control, await _pid(control), home)
                await asyncio.to_thread(limit_page_memory, chromium.pid, page_mib)
                chromium.measure_memory(await asyncio.to_thread(pids_by_process_group))
                chromium._launched_mib = chromium.resident_mib
        except BaseException as error:
            if driver is not None:
                await driver.stop(graceful=False)
            await asyncio.to_thread(_remove, home)
            if not isinstance(error, PlaywrightError | TimeoutError | ProcessLookupError | psutil.NoSuchProcess):
                raise
            reason = f"not started within {START_SECONDS} s" if isinstance(error, TimeoutError) else first_line(error)
            raise BrowserCrashed(f"{executable} does not start: {reason}") from error
        log.info("launched %s in %.2f s", executable, time.monotonic() - started)
        return chromium

    @property
    def alive(self) -> bool:
        """Whether driver and browser are connected."""
        return self._connected and self.browser.is_connected()

    @property
    def growth_mib(self) -> float:
        """Growth of the resident memory since the launch, at the latest measurement."""
        return self.resident_mib - self._launched_mib

    def on_exit(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason when the browser or the driver ends; possibly once for each."""

        def on_driver_exit() -> None:
            self._connected = False
            callback("the browser's driver has ended")

        self.browser.on("disconnected", lambda browser: callback("Chromium has ended"))
        self._driver.on_exit(on_driver_exit)
        if not self.browser.is_connected():
            asyncio.get_running_loop().call_soon(callback, "Chromium has ended")

    async def is_responsive(self) -> bool:
        """Whether the browser's main thread answers a ping."""
        for _ in range(MAX_FAILED_PINGS):
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await self._control.send("Browser.getVersion")
                return True
            except TimeoutError:
                continue
            except PlaywrightError:  # it has ended; the event may arrive later
                self._connected = False
                return False
        return False

    def measure_memory(self, groups: Mapping[int, Sequence[int]]) -> None:
        """Update `resident_mib`; `groups` from `pids_by_process_group`. Takes milliseconds per process."""
        self.resident_mib = resident_mib([*groups.get(self._group, ()), self._driver.process.pid])

    async def close(self, *, graceful: bool = True) -> None:
        """End both, gracefully for at most CLOSE_SECONDS, then by SIGKILL."""
        graceful = graceful and self.alive
        try:
            if graceful:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.browser.close()
        except (PlaywrightError, TimeoutError) as error:
            graceful = False
            log.warning("Chromium did not close gracefully: %s", error or f"{CLOSE_SECONDS} s")
        finally:
            if not graceful:
                await asyncio.to_thread(self._kill)
            await self._driver.stop(graceful=graceful)
            await asyncio.to_thread(self._kill)
            await asyncio.to_thread(_remove, self._home)

    def _kill(self) -> None:
        if child_process.start_time(self._group) in (0, self._group_started):  # else the id was reused
            child_process.kill_process_group(self._group)


def _remove(home: Path | None) -> None:
    if home is not None:
        shutil.rmtree(home, ignore_errors=True)


async def _pid(control: CDPSession) -> int:
    processes: list[dict[str, Any]] = (await control.send("SystemInfo.getProcessInfo"))["processInfo"]
    return next(int(process["id"]) for process in processes if process["type"] == "browser")
