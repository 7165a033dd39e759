"""Errors of browsers and pages. `outcome` is the recorded outcome of the masked episode."""

from __future__ import annotations


class BrowserError(RuntimeError):
    """The browser or its page failed; the policy is not to blame."""

    outcome = "browser_error"


class BrowserMissing(BrowserError):
    """No Chromium is installed."""


class BrowserCrashed(BrowserError):
    """Chromium or its Playwright driver has ended."""

    outcome = "browser_crashed"


class PageCrashed(BrowserError):
    """The renderer process of the page has ended."""

    outcome = "page_crashed"


class BrowserTimeout(BrowserError):
    """An operation exceeded its time limit."""

    outcome = "browser_timeout"


class NotRecorded(BrowserError):
    """The task to replay was not recorded."""

    outcome = "not_recorded"


class TaskRefused(BrowserError):
    """The browser server does not know the task, or not its kind of page."""

    outcome = "task_refused"


class HostUnreachable(Exception):
    """No connection to a server that the policy permits. The message is one sentence for the agent."""
