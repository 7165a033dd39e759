"""Pages of the browser benchmark, generated from a seed and served locally."""

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

# Gradients under noise: about as hard to compress as a photograph.
_PICTURE = """<canvas id=c width=1280 height=768 style="position:absolute;left:0;top:0"></canvas><script>
const context = c.getContext("2d"), image = context.createImageData(1280, 768);
let state = 12345;
for (let i = 0; i < image.data.length; i += 4) {
  state = (1103515245 * state + 12345) % 2147483648;
  const x = i / 4 % 1280, y = i / 5120, noise = state % 24;
  image.data[i] = 128 + 100 * Math.sin(x / 90 + y / 200) + noise;
  image.data[i + 1] = 110 + 90 * Math.sin(y / 70) + noise;
  image.data[i + 2] = 90 + 80 * Math.cos((x + y) / 110) + noise;
  image.data[i + 3] = 255;
}
context.putImageData(image, 0, 0);
</script>"""


class BenchSite:
    """The pages as a task site. A context manager that stops the server."""

    def __init__(self, seed: int = 0) -> None:
        self.pages = make_pages(seed)
        self._server = LocalServer(self._respond, "bench-server")

    def __enter__(self) -> BenchSite:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close()

    @property
    def origins(self) -> frozenset[str]:
        """The origin of the pages."""
        return frozenset({ORIGIN})

    @property
    def addresses(self) -> dict[str, str]:
        """Host name to server address."""
        return {HOST: self._server.address}

    def can_reuse_page(self, task: Task) -> bool:
        return False

    async def open(self, page: Page, task: Task) -> str:
        """Load the page named by the task's environment."""
        await page.goto(f"{ORIGIN}/{task.environment}", wait_until="load")
        return ""

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """No reward."""
        return None, False

    def task(self, name: str) -> Task:
        """A task that shows one page."""
        return Task(id=f"bench/{name}", source="bench", environment=name, seed=0, max_steps=1)

    def _respond(self, request: PageRequest) -> PageResponse:
        found = self.pages.get(request.path.lstrip("/"))
        return PageResponse(404) if found is None else PageResponse(200, found.encode())


def make_pages(seed: int) -> dict[str, str]:
    """HTML by name; each page fills a viewport of 1280x768."""
    rng = random.Random(seed)
    text = "".join(f"<p>{random_words(rng, rng.randint(40, 90))}.</p>" for _ in range(12))
    fields = "".join(f"<label>{random_words(rng, 2)} <input value='{random_words(rng, 1)}'></label>" for _ in range(60))
    cards = "".join(
        f"<div class=card style='background:hsl({rng.randrange(360)},60%,{rng.randint(55, 85)}%)'>"
        f"<b>{random_words(rng, 3)}</b><br>{random_words(rng, 9)}<br><button>{random_words(rng, 1)}</button></div>"
        for _ in range(40)
    )
    bodies = {
        "empty": "",
        "text": f"<main style='column-count:3;padding:0 20px'>{text}</main>",
        "form": f"<form style='columns:4;line-height:2.6'>{fields}</form>",
        "cards": f"<main style='display:flex;flex-wrap:wrap;gap:8px'>{cards}</main>",
        "picture": _PICTURE,
        "box": f"<main style='padding:220px 20px;column-count:3'>{text}</main>{_BOX}",
    }
    style = "<style>body{font:15px sans-serif;margin:0} .card{width:145px;height:180px;padding:6px}</style>"
    return {
        name: f"<!DOCTYPE html><meta charset=utf-8><title>{name}</title>{style}{body}" for name, body in bodies.items()
    }
