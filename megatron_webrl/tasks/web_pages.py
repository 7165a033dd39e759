"""Base of task sources whose tasks are web pages, which browser servers open by `Task.url`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_webrl.tasks.files.rows import is_public, parse_website
from megatron_webrl.tasks.source import TaskSourceBase
from megatron_webrl.tasks.web import WebPages


class WebPageSource(WebPages, TaskSourceBase):
    """A TaskSource without pages of its own. Its tasks have the source "web", a url and an instruction."""

    @property
    def public_website(self) -> str:
        """A website of the tasks that is in the network; empty if none is. Here that of the first training task."""
        url = self.training_task(0, 0).url
        website = parse_website(url)[1] if url else ""
        return website if website and is_public(website) else ""

    @property
    def local_websites(self) -> Iterator[str]:
        """Websites of the tasks that are under .localhost, as far as they are known before a ticket is drawn."""
        yield from ()
