"""Any web page as a task, without reward and scripted policy."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from playwright.async_api import Page

from megatron_webrl.types import Action, Task

SOURCE_NAME = "web"
ENVIRONMENT_NAME = "page"


class OpenWeb:
    """Opens `Task.url`. Only the egress policy limits which addresses pages reach."""

    def __init__(self, max_steps: int) -> None:
        self.environments = (ENVIRONMENT_NAME,)
        self.max_steps = max_steps

    @property
    def origins(self) -> frozenset[str]:
        """No origins besides public addresses."""
        return frozenset()

    @property
    def addresses(self) -> Mapping[str, str]:
        return {}

    def make_task(self, url: str, instruction: str | None = None) -> Task:
        return Task(
            id=f"{SOURCE_NAME}/{urlsplit(url).netloc}", source=SOURCE_NAME, environment=ENVIRONMENT_NAME, seed=0,
            max_steps=self.max_steps, instruction=instruction, url=url,
        )  # fmt: skip

    def can_reuse_page(self, task: Task) -> bool:
        """False: every episode needs a new browser context."""
        return False

    async def open(self, page: Page, task: Task) -> str:
        """Load the page; returns the task's instruction. Raises ValueError for a task without a URL."""
        if task.url is None:
            raise ValueError(f"task {task.id} of the source {SOURCE_NAME} has no url")
        await page.goto(task.url, wait_until="load")
        return task.instruction or ""

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        return None, False

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """Raises KeyError: there is no scripted policy."""
        raise KeyError(SOURCE_NAME)

    def close(self) -> None:
        """Nothing to release."""
