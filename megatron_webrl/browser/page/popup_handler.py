"""What pages do uninvited: dialogs, file choosers, downloads, addresses that belong to other programs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import BrowserContext, CDPSession, Dialog, Download, FileChooser, Page
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.page.step_messages import StepMessages, shorten

MAX_DIALOGS = 20
"""A page that has opened so many in one step opens no more: its running script is ended, its dialogs are taken away."""

DIALOG_SECONDS = 10.0  # to answer one, or to silence a page
MAX_TEXT = 100  # characters of a dialog's text
_SILENCE = "(() => { const nothing = () => undefined; window.alert = window.confirm = window.prompt = nothing; })()"
_SCHEMES = frozenset({"http", "https", "about", "blob", "data", "javascript", "chrome-error", ""})


class PopupHandler:
    """Answers or refuses them, and tells the agent by notes."""

    def __init__(self, context: BrowserContext, notes: StepMessages) -> None:
        self._notes = notes
        self._dialogs = 0
        self._sessions: dict[Page, CDPSession] = {}
        self._answering: set[asyncio.Task[None]] = set()
        context.on("dialog", self._dialog)

    def attach(self, page: Page, cdp: CDPSession) -> None:
        """Refuse files and downloads of a page."""
        self._sessions[page] = cdp
        page.on("filechooser", self._chooser)
        page.on("download", self._download)

    def on_navigation_request(self, url: str) -> None:
        """A page asks to go to an address."""
        try:
            scheme = urlsplit(url).scheme.lower()
        except ValueError:
            return
        if scheme not in _SCHEMES:
            self._notes.add(f"{shorten(url, MAX_TEXT)} was not opened: only web pages can be")

    def reset_dialog_count(self) -> None:
        """Dialogs are counted anew."""
        self._dialogs = 0

    def close(self) -> None:
        """Answer nothing any more."""
        for task in self._answering:
            task.cancel()

    def _dialog(self, dialog: Dialog) -> None:
        self._dialogs += 1
        text = shorten(dialog.message, MAX_TEXT)
        if dialog.type == "beforeunload":
            self._notes.add("the page asked whether to leave it; it was left")
        else:
            self._notes.add(f'the page opened a dialog, "{text}", which was answered with OK')
        if self._dialogs % MAX_DIALOGS == 0 and dialog.page in self._sessions:
            # Asked for while the dialog holds the script: it takes effect when the script goes on.
            self._do(_silence(self._sessions[dialog.page]))
        self._do(_answer(dialog))

    def _chooser(self, chooser: FileChooser) -> None:
        self._notes.add("the page asked for a file; none was given")

    def _download(self, download: Download) -> None:
        self._notes.add(f"the download of {shorten(download.suggested_filename, MAX_TEXT)} was refused")

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)


async def _answer(dialog: Dialog) -> None:
    try:
        async with asyncio.timeout(DIALOG_SECONDS):
            await dialog.accept(dialog.default_value if dialog.type == "prompt" else None)
    except (PlaywrightError, TimeoutError):
        pass  # it went with its page, or the page's own limits end it


async def _silence(cdp: CDPSession) -> None:
    try:
        async with asyncio.timeout(DIALOG_SECONDS):
            # Both at once: between two timers there may be nothing to end, and no answer.
            silence = cdp.send("Runtime.evaluate", {"expression": _SILENCE})
            await asyncio.gather(cdp.send("Runtime.terminateExecution"), silence)
    except (PlaywrightError, TimeoutError):
        pass  # the page has gone, or the limits of the session end it
