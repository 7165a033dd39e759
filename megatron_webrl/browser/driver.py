"""Playwright's driver: the Node process that speaks to one Chromium."""

from __future__ import annotations

import asyncio
import logging
import os
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
from megatron_webrl.system import child_process

log = logging.getLogger(__name__)

STOP_SECONDS = 15.0

_environment: ContextVar[dict[str, str]] = ContextVar("what a driver finds in its environment")


def _driver_environment() -> dict[str, str]:
    return {**get_driver_env(), **_environment.get({})}


# Playwright has no setting for this. The variables of this process stay as they are: others start processes, too.
transport.get_driver_env = _driver_environment


class PlaywrightDriver:
    """What it and its Chromium put into the temporary folder lies in `folder`, and is removed with it.

    Both carry the mark of this process: what survives it is ended by `child_process.sweep_orphans`, and the folder is
    removed by `child_process.sweep_scratch`.
    """

    def __init__(self, playwright: Playwright, process: psutil.Process, folder: Path) -> None:
        self.playwright, self.process, self.folder = playwright, process, folder
        self._watch: int | None = None

    @classmethod
    async def start(cls) -> PlaywrightDriver:
        """Raises BrowserCrashed. Give it a limit: nothing is left if it is cancelled."""
        folder = child_process.make_scratch_folder()
        # What pages show must not depend on the machine's time zone.
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

    def on_exit(self, ended: Callable[[], None]) -> None:
        """Call `ended` when the process ends: Playwright tells only those who wait for an answer."""
        loop = asyncio.get_running_loop()
        try:
            self._watch = os.pidfd_open(self.process.pid)
        except ProcessLookupError:
            loop.call_soon(ended)
        else:
            loop.add_reader(self._watch, self._woken, ended)

    async def stop(self, *, graceful: bool = True) -> None:
        """End it with all that it has started, and remove its folder."""
        self._look_away()
        stopping = asyncio.ensure_future(self.playwright.stop())
        try:
            if not graceful:
                await asyncio.to_thread(_kill, self.folder)
            async with asyncio.timeout(STOP_SECONDS):
                await stopping
        except (PlaywrightError, TimeoutError) as error:
            log.warning("the browser's driver did not end by itself: %s", error or f"{STOP_SECONDS} s")
        finally:
            await asyncio.to_thread(_remove, self.folder)

    def _woken(self, ended: Callable[[], None]) -> None:
        self._look_away()
        ended()

    def _look_away(self) -> None:
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch)
            os.close(self._watch)
            self._watch = None


def _processes(folder: Path) -> list[psutil.Process]:
    """The driver and what it has started, as far as they still have the environment that they were given."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process)
    return found


def _remove(folder: Path) -> None:
    _kill(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _kill(folder: Path) -> None:
    """End a driver with all below it."""
    found = _processes(folder)
    groups = {_group(process) for process in found} - {0, os.getpgrp()}
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for group in groups:
        child_process.kill_process_group(group)


def _group(process: psutil.Process) -> int:
    with suppress(ProcessLookupError):
        return os.getpgid(process.pid)
    return 0
