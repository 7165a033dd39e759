"""One browser context for one episode: reset, step, close."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urldefrag

from playwright.async_api import Browser, BrowserContext, Page
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.chromium import proxy_settings
from megatron_webrl.browser.egress.egress_policy import Endpoint, NetworkAccess
from megatron_webrl.browser.egress.har import HARRecorder, HARReplayer
from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserTimeout, NotRecorded
from megatron_webrl.browser.page import settle
from megatron_webrl.browser.page.action_executor import ActionExecutor
from megatron_webrl.browser.page.observer import PageObserver, retry_if_replaced
from megatron_webrl.browser.page.page_clock import repeatable_page_script
from megatron_webrl.browser.page.tabs import MAX_TABS, StepMessages, Tabs, terminate_endless_scripts
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import Action, Observation, Task, TaskSite
from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
SAVE_SECONDS = 60.0  # to write the recording of an episode
SCRIPT_TIMEOUT_FRACTION = 0.25  # of step_seconds, between two pings of the page and for the answer to one
ERROR_GRACE_SECONDS = 1.0  # for the reason of a failure to arrive
T = TypeVar("T")


def context_options(settings: BrowserConfig, network: NetworkAccess) -> dict[str, Any]:
    """Playwright's options of a context whose only way out is `network`."""
    return {
        "viewport": {"width": settings.width, "height": settings.height},
        "device_scale_factor": 1,
        "service_workers": "block",
        "accept_downloads": False,
        "proxy": proxy_settings(network.port),
        "reduced_motion": "reduce" if settings.record or settings.replay else None,
    }


class Session:
    """One browser context: prepare -> reset -> step, step, ... -> close. The pool prepares and closes it.

    Every operation ends within `step_seconds` or raises a BrowserError, after which the session is unusable.
    """

    def __init__(
        self, context: BrowserContext, settings: BrowserConfig, sites: Mapping[str, TaskSite],
        declared: Mapping[str, Mapping[Endpoint, Endpoint]], step_seconds: float, network: NetworkAccess,
    ) -> None:  # fmt: skip
        """`declared`: endpoints by task source; `network` reaches only those of the episode's own source."""
        self.network = network
        self._declared = declared
        self.task: Task | None = None
        self._context, self._settings, self._sites, self._step_seconds = context, settings, sites, step_seconds
        self.recording_saved: bool | None = None  # once closed; None: there was no episode to record
        self._recording: HARRecorder | None = None
        self._messages = StepMessages()
        self._completed = True  # the last operation was not interrupted
        # Done, with the reason, once the session is unusable.
        self.lost: asyncio.Future[BrowserError] = asyncio.get_running_loop().create_future()
        self.cdp_address: str | None = None  # http://host:port, at which other programs can control the browser
        self.cdp_relay: asyncio.Server | None = None  # at that address, to a browser in a network of its own
        limit = MAX_TABS if settings.cdp or "switch_tab" in settings.actions else 1
        self._tabs = Tabs(context, self._messages, limit, self.mark_lost)
        self._executor = ActionExecutor(self._tabs, settings, self._messages, network)
        self._observer = PageObserver(self._tabs, settings, self._messages, network)

    @property
    def reusable(self) -> bool:
        """Whether `reset` may start another episode in the current page."""
        settings = self._settings
        return (
            self.task is not None
            and self._sites[self.task.source].can_reuse_page(self.task)
            and not (settings.record or settings.replay)
            and self._completed
            and not self.lost.done()
            and self._tabs.has_single_tab
        )

    @property
    def page(self) -> Page:
        return self._tabs.active.page

    @classmethod
    async def prepare(
        cls, browser: Browser, settings: BrowserConfig, sites: Mapping[str, TaskSite],
        declared: Mapping[str, Mapping[Endpoint, Endpoint]], step_seconds: float, network: NetworkAccess,
        context: BrowserContext | None = None,
    ) -> Session:  # fmt: skip
        """Open a context with an empty page; `close` closes `network`, its only way out. Raises BrowserError.

        `context`: the only one of a browser, with `context_options`; it is taken instead.
        """
        try:
            async with asyncio.timeout(step_seconds):
                if context is None:
                    context = await browser.new_context(**context_options(settings, network))
                await context.add_init_script(settle.DISABLE_CARET_BLINK)
                await context.grant_permissions([])  # denies all permissions without a prompt
                session = cls(context, settings, sites, declared, step_seconds, network)
                browser.on("disconnected", session._on_browser_exit)
                await session._tabs.start()
                return session
        except (PlaywrightError, TimeoutError) as exc:
            if not browser.is_connected():
                raise BrowserCrashed(f"Chromium ended while a context was opened: {first_line(exc)}") from exc
            if isinstance(exc, TimeoutError):
                raise BrowserTimeout(f"no context within {step_seconds} s (rollout.operation_timeout_seconds)") from exc
            raise BrowserError(f"a context could not be opened: {first_line(exc)}") from exc

    async def reset(self, task: Task) -> Observation:
        """Open the task's page; the observation has `instruction`. Raises BrowserError, KeyError (unknown source)."""
        reused, self.task = self.task is not None, task
        self.network.declared = self._declared[task.source]
        return await self._bounded(f"reset of {task.id}", self._open(self._sites[task.source], task, reused))

    async def step(self, action: Action) -> Observation:
        """Execute an action and wait until the page is idle; Observation.error reports what it could not do.

        Raises BrowserError, ValueError for a missing argument.
        """
        if self.task is None:
            raise ValueError("call reset before step")
        self._tabs.start_step()
        return await self._bounded(action.kind, self._act(self._sites[self.task.source], self.task, action))

    def mark_lost(self, error: BrowserError) -> None:
        """Fail the current and all later operations with an error; the first error counts."""
        if not self.lost.done():
            self.lost.set_result(error)

    async def close(self) -> bool:
        """Close the context; returns False after a timeout. A crashed browser has no context to close."""
        if self._context.browser is not None:  # it outlives this session
            self._context.browser.remove_listener("disconnected", self._on_browser_exit)
        self._tabs.close()
        try:
            await self._save_recording()
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._context.close()
        except TimeoutError:
            self.mark_lost(BrowserError(f"a context did not close within {CLOSE_SECONDS} s"))
            return False
        except PlaywrightError as error:
            self.mark_lost(BrowserError(f"a context did not close: {first_line(error)}"))
        finally:
            if self.cdp_relay is not None:
                self.cdp_relay.close()
            await self.network.close()
        return True

    async def _open(self, site: TaskSite, task: Task, reused: bool) -> Observation:
        started = time.monotonic()
        if reused:
            self.network.reset()
            await self._observer.reset()
            await self.page.mouse.move(0, 0)  # away from elements with a hover effect
        if self._settings.record or self._settings.replay:
            instruction = await self._open_repeatably(site, task)
        else:
            instruction = await self._open_first_page(site, task)
        self._messages.clear()
        cdp = self._tabs.active.cdp
        await retry_if_replaced(lambda: cdp.send("Page.resetNavigationHistory"))  # no way back to the empty page
        return await self._observer.observe(site, task, time.monotonic() - started, instruction)

    async def _act(self, site: TaskSite, task: Task, action: Action) -> Observation:
        started = time.monotonic()
        await self._executor.execute(action, self._observer.marks)
        return await self._observer.observe(site, task, time.monotonic() - started, None)

    async def _open_repeatably(self, site: TaskSite, task: Task) -> str:
        """Open the task's page while its requests are recorded, or answered from recordings. Raises NotRecorded."""
        settings = self._settings
        if settings.replay:
            replayer = await HARReplayer.open(Path(settings.replay), task, settings.replay_ignore)
            self.network.replayer = replayer
            clock_ms, seconds_ago = replayer.clock_ms, replayer.seconds_ago
        else:
            self._recording = HARRecorder(self._context, Path(settings.record), task)
            clock_ms, seconds_ago = self._recording.clock_ms, 0
            await self._recording.start()
        await self._context.add_init_script(repeatable_page_script(task.id, clock_ms, seconds_ago))
        try:
            return await self._open_first_page(site, task)
        except BaseException:
            if self._recording is not None:
                self._recording.void = True
            raise

    async def _open_first_page(self, site: TaskSite, task: Task) -> str:
        """Open the task's page; returns its instruction. Raises NotRecorded, and BrowserError if it is refused."""
        instruction = await site.open(self.page, task)
        url = urldefrag(self.page.url).url
        if url in self.network.unrecorded_urls:
            raise NotRecorded(f"the first page of {task.id}, {self.page.url}, was not recorded (browser.replay)")
        if url in self.network.refused_urls:
            reasons = "; ".join(self.network.take_errors(self.page.url))
            raise BrowserError(f"the first page of {task.id}, {self.page.url}, is refused: {reasons}")
        return instruction

    async def _save_recording(self) -> None:
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        self.recording_saved = None if recording.void else False
        try:
            async with asyncio.timeout(SAVE_SECONDS):
                path = await recording.save()
            self.recording_saved = None if path is None else True
        except TimeoutError:
            log.warning("an episode was not recorded: its file was not complete within %g s", SAVE_SECONDS)
        except (PlaywrightError, OSError, NotRecorded) as error:
            log.warning("an episode was not recorded: %s", first_line(error))

    async def _bounded(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`. Raises BrowserError after `step_seconds` or as soon as the session is lost."""
        self._completed = False
        running = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(
            terminate_endless_scripts(self._tabs, self._messages, self._step_seconds * SCRIPT_TIMEOUT_FRACTION)
        )
        either: set[asyncio.Future[Any]] = {running, self.lost}
        try:
            await asyncio.wait(either, timeout=self._step_seconds, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                result = running.result()
                self._completed = True
                return result
            if self.lost.done():
                raise self.lost.result()
            reason = BrowserTimeout(f"{name} took more than {self._step_seconds} s (rollout.operation_timeout_seconds)")
            self.mark_lost(reason)
            raise reason
        except PlaywrightError as error:
            await asyncio.wait({self.lost}, timeout=ERROR_GRACE_SECONDS)
            if self.lost.done():
                raise self.lost.result() from error
            reasons = "; ".join([first_line(error), *self.network.take_errors("")])  # the proxy knows more
            raise BrowserError(f"{name} failed: {reasons}") from error
        finally:
            running.cancel()
            watching.cancel()
            await asyncio.gather(running, watching, return_exceptions=True)

    def _on_browser_exit(self, browser: Browser) -> None:
        self.mark_lost(BrowserCrashed("Chromium has ended"))
