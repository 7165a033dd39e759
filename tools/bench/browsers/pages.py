"""The page of the browser benchmark, generated from a seed and served locally."""

from __future__ import annotations

import random

from playwright.async_api import Page

from megatron_webrl.tasks.server import LocalServer, PageRequest, PageResponse
from megatron_webrl.types import Task
from tools.bench.screenshots import random_words

HOST = "bench.localhost"
ORIGIN = f"http://{HOST}"

# A click anywhere but on the box changes nothing.
_BOX = """<div style="position:absolute;left:0;top:0;width:200px;height:200px;background:#c33"
 onclick="this.style.background = this.style.background === 'rgb(34, 102, 170)' ? '#c33' : '#26a'"></div>"""


class BenchSite:
    """The page as a task site. A context manager that stops the server."""

    def __init__(self, seed: int = 0) -> None:
        self._page = make_page(seed)
        self._server = LocalServer(self._respond, "bench-server")

    def __enter__(self) -> BenchSite:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close()

    @property
    def origins(self) -> frozenset[str]:
        """The origin of the page."""
        return frozenset({ORIGIN})

    @property
    def addresses(self) -> dict[str, str]:
        """Host name to server address."""
        return {HOST: self._server.address}

    def can_reuse_page(self, task: Task) -> bool:
        return False

    async def open(self, page: Page, task: Task) -> str:
        """Load the page."""
        await page.goto(f"{ORIGIN}/", wait_until="load")
        return ""

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """No reward."""
        return None, False

    def task(self) -> Task:
        """A task that shows the page."""
        return Task(id="bench/box", source="bench", environment="box", seed=0, max_steps=1)

    def _respond(self, request: PageRequest) -> PageResponse:
        return PageResponse(404) if request.path != "/" else PageResponse(200, self._page.encode())


def make_page(seed: int) -> str:
    """A page of text with a box, which fills a viewport of 1280x768."""
    rng = random.Random(seed)
    text = "".join(f"<p>{random_words(rng, rng.randint(40, 90))}.</p>" for _ in range(12))
    style = "<style>body{font:15px sans-serif;margin:0}</style>"
    main = f"<main style='padding:220px 20px;column-count:3'>{text}</main>"
    return f"<!DOCTYPE html><meta charset=utf-8><title>box</title>{style}{main}{_BOX}"
