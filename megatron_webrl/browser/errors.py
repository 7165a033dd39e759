"""What can go wrong with a browser. `outcome` names what masks an episode that meets the error."""

from __future__ import annotations


class BrowserError(RuntimeError):
    """The browser or its page cannot go on; says nothing about the policy."""

    outcome = "browser_error"


class BrowserMissing(BrowserError):
    """There is no Chromium to run."""


class BrowserCrashed(BrowserError):
    """Chromium, or the driver that speaks to it, has ended."""

    outcome = "browser_crashed"


class PageCrashed(BrowserError):
    """The renderer process of the page has ended."""

    outcome = "page_crashed"


class BrowserTimeout(BrowserError):
    """An operation took longer than its limit."""

    outcome = "browser_timeout"


class NotRecorded(BrowserError):
    """A task is to be replayed that was not recorded."""

    outcome = "not_recorded"


class HostUnreachable(Exception):
    """A server that cannot be connected to, though policy permits it. The message is one sentence."""
