"""One browser context for one episode: reset, step, close."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from playwright.async_api import Browser, BrowserContext, Page, ProxySettings
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.egress.har import HARRecorder, HARReplayer
from megatron_webrl.browser.egress.network_access import NetworkAccess
from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserTimeout
from megatron_webrl.browser.page import settle
from megatron_webrl.browser.page.action_executor import ActionExecutor
from megatron_webrl.browser.page.observer import PageObserver, retry_if_replaced
from megatron_webrl.browser.page.popup_handler import PopupHandler
from megatron_webrl.browser.page.script_watchdog import terminate_endless_scripts
from megatron_webrl.browser.page.step_messages import StepMessages
from megatron_webrl.browser.page.tabs import Tabs
from megatron_webrl.browser.task_page import TaskPage
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.system.text import first_line
from megatron_webrl.types import Action, Observation, Task

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
SCRIPT_TIMEOUT_FRACTION = 0.25  # of an operation's time, twice: a page that is silent for so long has its script ended
ERROR_GRACE_SECONDS = 1.0  # the reason of a failure may become known a little later
T = TypeVar("T")


class Session:
    """Life: prepare -> reset -> step, step, ... -> close; a fleet prepares and closes it.

    Every operation ends within `step_seconds` or raises a BrowserError; after one the session is of no more use.
    """

    def __init__(
        self, context: BrowserContext, settings: BrowserConfig, sites: Mapping[str, TaskPage], step_seconds: float,
        access: NetworkAccess,
    ) -> None:  # fmt: skip
        self.network = access
        self.task: Task | None = None
        self._context, self._settings, self._sites, self._step_seconds = context, settings, sites, step_seconds
        self._recording: HARRecorder | None = None
        self._notes = StepMessages()
        self._whole = True  # the last operation was not broken off
        self._lost: asyncio.Future[BrowserError] = asyncio.get_running_loop().create_future()
        self._intrusions = PopupHandler(context, self._notes)
        limit = settings.tabs if "switch_tab" in settings.actions else 1
        self._tabs = Tabs(context, self._notes, self._intrusions, limit, self.mark_lost)
        self._hands = ActionExecutor(self._tabs, settings, self._notes, access)
        self._eyes = PageObserver(self._tabs, settings, self._notes, access)

    @property
    def lost(self) -> asyncio.Future[BrowserError]:
        """Done once the session is of no more use, with the reason."""
        return self._lost

    @property
    def reusable(self) -> bool:
        """Whether `reset` may begin another episode here, in the page as it was left."""
        settings = self._settings
        return (
            self.task is not None
            and self._sites[self.task.source].can_reuse_page(self.task)
            and not (settings.record or settings.replay)
            and self._whole
            and not self._lost.done()
            and self._tabs.has_single_tab
        )

    @property
    def page(self) -> Page:
        """The page of the active tab."""
        return self._tabs.active.page

    @classmethod
    async def prepare(
        cls, browser: Browser, settings: BrowserConfig, sites: Mapping[str, TaskPage], step_seconds: float,
        access: NetworkAccess, proxy: ProxySettings,
    ) -> Session:  # fmt: skip
        """A context of its own with an empty page, ready for `reset`. Raises BrowserError.

        `access` is what the context may reach, by way of `proxy`; `close` closes it.
        """
        try:
            async with asyncio.timeout(step_seconds):
                context = await browser.new_context(
                    viewport={"width": settings.width, "height": settings.height},
                    device_scale_factor=1,
                    service_workers="block",
                    accept_downloads=False,
                    proxy=proxy,
                )
                await context.add_init_script(settle.DISABLE_CARET_BLINK)
                await context.grant_permissions([])  # which denies all of them, without a question
                session = cls(context, settings, sites, step_seconds, access)
                browser.on("disconnected", session._browser_ended)
                await session._tabs.start()
                return session
        except (PlaywrightError, TimeoutError) as error:
            if not browser.is_connected():
                raise BrowserCrashed(f"Chromium ended while a context was opened: {first_line(error)}") from error
            if isinstance(error, TimeoutError):
                raise BrowserTimeout(
                    f"no context within {step_seconds} s (rollout.operation_timeout_seconds)"
                ) from error
            raise BrowserError(f"a context could not be opened: {first_line(error)}") from error

    async def reset(self, task: Task) -> Observation:
        """Open the task's page; `instruction` is set. Raises BrowserError, KeyError for an unknown source.

        In a session that had an episode before, in the same browser context, what was counted and seen is forgotten.
        """
        again, self.task = self.task is not None, task
        return await self._bounded(f"reset of {task.id}", self._open(self._sites[task.source], task, again))

    async def step(self, action: Action) -> Observation:
        """Carry out an action and wait until the page has come to rest.

        What the page does not allow is told in Observation.error, and the episode goes on. Raises BrowserError,
        ValueError for an action that lacks what its kind needs.
        """
        if self.task is None:
            raise ValueError("reset comes before step")
        self._intrusions.reset_dialog_count()
        return await self._bounded(action.kind, self._act(self._sites[self.task.source], self.task, action))

    def mark_lost(self, error: BrowserError) -> None:
        """End what is going on, and whatever comes, by an error; the first one counts."""
        if not self._lost.done():
            self._lost.set_result(error)

    async def close(self) -> bool:
        """Close the context; whether that worked. What a crashed browser cannot close is gone already."""
        if self._context.browser is not None:  # which outlives this session by far
            self._context.browser.remove_listener("disconnected", self._browser_ended)
        self._intrusions.close()
        self._tabs.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._save_recording()
                await self._context.close()
        except TimeoutError:
            self.mark_lost(BrowserError(f"a context did not close within {CLOSE_SECONDS} s"))
            return False
        except PlaywrightError as error:
            self.mark_lost(BrowserError(f"a context did not close: {first_line(error)}"))
        finally:
            await self.network.close()
        return True

    async def _renew(self) -> None:
        self.network.reset()
        await self._eyes.reset()
        await self.page.mouse.move(0, 0)  # what it was left on would be lit

    async def _open(self, site: TaskPage, task: Task, again: bool) -> Observation:
        started = time.monotonic()
        if again:
            await self._renew()
        if self._settings.replay:
            await HARReplayer.start(self._context, Path(self._settings.replay), task, self.network)
        elif self._settings.record:
            self._recording = HARRecorder(self._context, Path(self._settings.record), task)
            await self._recording.start()
        instruction = await site.open(self.page, task)
        self._notes.clear()
        # Going back must not lead out of the task, to the empty page before it.
        cdp = self._tabs.active.cdp
        await retry_if_replaced(lambda: cdp.send("Page.resetNavigationHistory"))
        return await self._eyes.observe(site, task, time.monotonic() - started, instruction)

    async def _act(self, site: TaskPage, task: Task, action: Action) -> Observation:
        started = time.monotonic()
        await self._hands.execute(action, self._eyes.marks)
        return await self._eyes.observe(site, task, time.monotonic() - started, None)

    async def _save_recording(self) -> None:
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        try:
            log.debug("recorded %s", await recording.save())
        except (PlaywrightError, OSError) as error:
            log.warning("an episode was not recorded: %s", first_line(error))

    async def _bounded(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or a BrowserError after `step_seconds` or as soon as the page is lost."""
        self._whole = False
        running = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(
            terminate_endless_scripts(self._tabs, self._notes, self._step_seconds * SCRIPT_TIMEOUT_FRACTION)
        )
        either: set[asyncio.Future[Any]] = {running, self._lost}
        try:
            await asyncio.wait(either, timeout=self._step_seconds, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                result = running.result()
                self._whole = True
                return result
            if self._lost.done():
                raise self._lost.result()
            late = BrowserTimeout(f"{name} took more than {self._step_seconds} s (rollout.operation_timeout_seconds)")
            self.mark_lost(late)
            raise late
        except PlaywrightError as error:
            await asyncio.wait({self._lost}, timeout=ERROR_GRACE_SECONDS)
            if self._lost.done():
                raise self._lost.result() from error
            raise BrowserError(f"{name} failed: {first_line(error)}") from error
        finally:
            running.cancel()
            watching.cancel()
            await asyncio.gather(running, watching, return_exceptions=True)

    def _browser_ended(self, browser: Browser) -> None:
        self.mark_lost(BrowserCrashed("Chromium has ended"))
