"""Playwright's driver: the Node.js process that controls one Chromium."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

import psutil
from playwright._impl import transport
from playwright._impl._driver import get_driver_env
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import Playwright, async_playwright

from megatron_webrl.browser.errors import BrowserCrashed
from megatron_webrl.util import child_process

log = logging.getLogger(__name__)

STOP_SECONDS = 15.0
# What Node.js, Chromium and their libraries read. Others may hold keys and tokens, which no page may reach.
PASSED_VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|LD_LIBRARY_PATH|LD_PRELOAD|DISPLAY|DBUS_SESSION_BUS_ADDRESS"
    r"|XDG_\w+|FONTCONFIG_\w+|SSL_CERT_\w+|CHROME_\w+|PW_\w+|PLAYWRIGHT_\w+|NODE_OPTIONS"
)

_environment: ContextVar[dict[str, str]] = ContextVar("environment of the next driver")


def _driver_environment() -> dict[str, str]:
    passed = {name: value for name, value in get_driver_env().items() if PASSED_VARIABLES.fullmatch(name)}
    return {**passed, **_environment.get({})}


transport.get_driver_env = _driver_environment  # Playwright has no setting; os.environ would affect other children


class PlaywrightDriver:
    """A driver process with its own temporary folder, which is removed when the driver stops.

    The environment names this process as owner: what outlives it, `sweep_orphans` and `sweep_scratch` remove.
    """

    def __init__(self, playwright: Playwright, process: psutil.Process, folder: Path) -> None:
        self.playwright, self.process, self.folder = playwright, process, folder
        self._pidfd: int | None = None

    @classmethod
    async def start(cls) -> PlaywrightDriver:
        """Start a driver. Raises BrowserCrashed. Cancellation, for example by a timeout, leaves nothing behind."""
        folder = child_process.make_scratch_folder()
        # Pages must not depend on the machine's time zone.
        token = _environment.set({**child_process.owner_environment(), "TMPDIR": str(folder), "TZ": "UTC"})
        try:
            try:
                playwright = await async_playwright().start()
            except Exception as error:  # Playwright has no class of its own for a driver that ends while it starts
                raise BrowserCrashed(f"the browser's driver does not start: {error}") from error
            for process in await asyncio.to_thread(_processes, folder):
                return cls(playwright, process, folder)
            raise BrowserCrashed("the browser's driver ended as soon as it was started")
        except BaseException:
            await asyncio.to_thread(_remove, folder)
            raise
        finally:
            _environment.reset(token)

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the process ends; Playwright reports that only to pending calls."""
        loop = asyncio.get_running_loop()
        try:
            self._pidfd = os.pidfd_open(self.process.pid)
        except ProcessLookupError:
            loop.call_soon(callback)
        else:
            loop.add_reader(self._pidfd, self._on_readable, callback)

    async def stop(self, *, graceful: bool = True) -> None:
        """End the driver and its child processes, and remove its folder."""
        self._stop_watching()
        stopping = asyncio.ensure_future(self.playwright.stop())
        try:
            if not graceful:
                await asyncio.to_thread(_kill, self.folder)
            async with asyncio.timeout(STOP_SECONDS):
                await stopping
        except (PlaywrightError, TimeoutError) as error:
            log.warning("the browser's driver did not stop gracefully: %s", error or f"{STOP_SECONDS} s")
        finally:
            await asyncio.to_thread(_remove, self.folder)

    def _on_readable(self, callback: Callable[[], None]) -> None:
        self._stop_watching()
        callback()

    def _stop_watching(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


def _processes(folder: Path) -> list[psutil.Process]:
    """The driver and its child processes, found by TMPDIR in their environment."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("TMPDIR") == str(folder):
                processes.append(process)
    return processes


def _remove(folder: Path) -> None:
    _kill(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _kill(folder: Path) -> None:
    """Kill a driver with its child processes and their process groups."""
    processes = _processes(folder)
    groups = {child_process.process_group(process.pid) for process in processes} - {0, os.getpgrp()}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for group in groups:
        child_process.kill_process_group(group)
