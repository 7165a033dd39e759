"""What a session needs to know of the place where tasks are done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from playwright.async_api import Page

from megatron_webrl.types import Task


class TaskPage(Protocol):
    """Opens the page of a task and reads its result. Implemented by task sources."""

    @property
    def origins(self) -> frozenset[str]:
        """All that pages may reach, such as http://shop.localhost."""
        ...

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where host names of the site lead to, such as {"shop.localhost": "127.0.0.1:8000"}; others are looked up.

        URLs stay the same from run to run although servers of this machine take any free port.
        """
        ...

    def can_reuse_page(self, task: Task) -> bool:
        """Whether `open` may be given the page of an episode of this task, in its browser context, for another one."""
        ...

    async def open(self, page: Page, task: Task) -> str:
        """Bring the page to the start of the task; returns the instruction."""
        ...

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """Reward (None while there is none) and whether the task is over."""
        ...
