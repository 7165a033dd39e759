"""Any web page as a task: on the web, or on the offline websites of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megatron_webrl.types import Action, Task, TaskSite

if TYPE_CHECKING:  # tasks of a file are read where there is no browser
    from playwright.async_api import Page

SOURCE_NAME = "web"
ENVIRONMENT_NAME = "page"
RESPONSE_SECONDS = 20  # for a site to respond, as to a navigation of the agent


class WebPages(TaskSite):
    """Opens `Task.url`; the pages give no reward and have no scripted policy."""

    environments: Sequence[str] = (ENVIRONMENT_NAME,)

    @property
    def origins(self) -> frozenset[str]:
        """Origins besides public addresses, which the egress policy limits."""
        return frozenset()

    @property
    def addresses(self) -> Mapping[str, str]:
        return {}

    async def open(self, page: Page, task: Task) -> str:
        """Begin to load the page; returns the task's instruction. Raises ValueError for a task without a URL."""
        if task.url is None:
            raise ValueError(f"task {task.id} of the source {SOURCE_NAME} has no url")
        await page.goto(task.url, wait_until="commit", timeout=1000 * RESPONSE_SECONDS)
        return task.instruction or ""

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        return None, False

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """Raises KeyError."""
        raise KeyError(task.environment)

    def close(self) -> None:
        """Release what the source holds."""


class OpenWeb(WebPages):
    """What a browser server opens by URL."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps

    def opens(self, url: str) -> bool:
        """Whether a task may begin at a URL, as far as the kind of its host decides."""
        return True

    def task_at(self, url: str, instruction: str | None = None) -> Task:
        return Task(
            id=f"{SOURCE_NAME}/{urlsplit(url).netloc}", source=SOURCE_NAME, environment=ENVIRONMENT_NAME, seed=0,
            max_steps=self.max_steps, instruction=instruction, url=url,
        )  # fmt: skip
