"""Handles dialogs, file choosers, downloads and links to other programs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import BrowserContext, CDPSession, Dialog, Download, FileChooser, Page
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.page.step_messages import StepMessages, shorten

MAX_DIALOGS = 20  # in one step; then the running script is terminated and the page's dialog functions are removed
DIALOG_SECONDS = 10.0  # to answer a dialog, or to remove the dialog functions
MAX_TEXT = 100  # characters of a dialog's text
_REMOVE_DIALOGS = (
    "(() => { const nothing = () => undefined; window.alert = window.confirm = window.prompt = nothing; })()"
)
_SCHEMES = frozenset({"http", "https", "about", "blob", "data", "javascript", "chrome-error", ""})


class PopupHandler:
    """Answers dialogs, refuses the rest, and adds messages for the agent."""

    def __init__(self, context: BrowserContext, messages: StepMessages) -> None:
        self._messages = messages
        self._dialogs = 0
        self._sessions: dict[Page, CDPSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        context.on("dialog", self._on_dialog)

    def attach(self, page: Page, cdp: CDPSession) -> None:
        """Subscribe to the file choosers and downloads of a page."""
        self._sessions[page] = cdp
        page.on("filechooser", self._on_file_chooser)
        page.on("download", self._on_download)

    def on_navigation_request(self, url: str) -> None:
        """Report a navigation that Chromium refuses because of its scheme."""
        try:
            scheme = urlsplit(url).scheme.lower()
        except ValueError:
            return
        if scheme not in _SCHEMES:
            self._messages.add(f"{shorten(url, MAX_TEXT)} was not opened: only web pages can be")

    def reset_dialog_count(self) -> None:
        """Start a new step: set the count of dialogs to 0."""
        self._dialogs = 0

    def close(self) -> None:
        """Stop answering."""
        for task in self._tasks:
            task.cancel()

    def _on_dialog(self, dialog: Dialog) -> None:
        self._dialogs += 1
        text = shorten(dialog.message, MAX_TEXT)
        if dialog.type == "beforeunload":
            self._messages.add("the page asked whether to leave it; it was left")
        else:
            self._messages.add(f'the page opened a dialog, "{text}", which was answered with OK')
        if self._dialogs % MAX_DIALOGS == 0 and dialog.page in self._sessions:
            # Sent while the dialog blocks the script: takes effect when the script resumes.
            self._start(_remove_dialogs(self._sessions[dialog.page]))
        self._start(_answer(dialog))

    def _on_file_chooser(self, chooser: FileChooser) -> None:
        self._messages.add("the page asked for a file; none was given")

    def _on_download(self, download: Download) -> None:
        self._messages.add(f"the download of {shorten(download.suggested_filename, MAX_TEXT)} was refused")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answer(dialog: Dialog) -> None:
    try:
        async with asyncio.timeout(DIALOG_SECONDS):
            await dialog.accept(dialog.default_value if dialog.type == "prompt" else None)
    except (PlaywrightError, TimeoutError):
        pass  # the page has closed, or the time limit of the operation ends it


async def _remove_dialogs(cdp: CDPSession) -> None:
    try:
        async with asyncio.timeout(DIALOG_SECONDS):
            # Both at once: between two timers no script runs, and terminateExecution is not answered.
            remove = cdp.send("Runtime.evaluate", {"expression": _REMOVE_DIALOGS})
            await asyncio.gather(cdp.send("Runtime.terminateExecution"), remove)
    except (PlaywrightError, TimeoutError):
        pass  # the page has closed, or the time limit of the operation ends it
