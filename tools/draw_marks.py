"""Draw a page with numbered elements: `python -m tools.draw_marks docs/images/marks.png`.

The image is a session's screenshot of a small page with a frame, a shadow root and a covered button.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from playwright.async_api import Page

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.rollout.contexts import element_line
from megatron_webrl.tasks.server import FolderServer
from megatron_webrl.types import Observation, Task

HOST = "shop.localhost"
PAGES = {
    "shop.html": """<!DOCTYPE html><meta charset=utf-8><title>Shop</title><style>
        body { margin: 0; font: 15px sans-serif; color: #1c2430; background: #fff; }
        nav { display: flex; gap: 24px; padding: 18px 24px; background: #eef1f5; }
        main { display: flex; gap: 28px; padding: 30px 24px; } section { width: 230px; }
        button, select, input { font: inherit; padding: 6px; } .photo { height: 110px; background: #c9dcee; }
        iframe { border: 1px solid #c5ccd6; width: 190px; height: 190px; }
        .note { position: fixed; right: 0; bottom: 0; width: 250px; height: 70px; padding: 12px; background: #fff3cd; }
      </style>
      <nav><a href=shop.html>Home</a><a href=shop.html>Orders</a><input aria-label=Search value=jacket></nav>
      <main>
        <section><div class=photo></div><h3>Rain jacket</h3>
          <select aria-label=Size><option>S<option selected>M<option>L</select> <button>Add to basket</button></section>
        <section><div class=photo></div><h3>Umbrella</h3>
          <label><input type=checkbox checked> Gift wrap</label> <button disabled>Sold out</button></section>
        <section><iframe src=help.html></iframe></section>
      </main>
      <p style="padding: 0 24px"><rating-stars></rating-stars></p>
      <button style="position:fixed;right:20px;bottom:20px">Covered</button>
      <div class=note>Free delivery from 40 <button>Close</button></div>
      <script>customElements.define("rating-stars", class extends HTMLElement { connectedCallback() {
        this.attachShadow({mode: "closed"}).innerHTML = "<button>Rate this page</button> (closed shadow root)"; } });
      </script>""",
    "help.html": """<!DOCTYPE html><style>body { font: 15px sans-serif; }</style>
      <p>A frame</p><p><a href=help.html>Delivery</a></p><p><a href=help.html>Returns</a></p><textarea rows=2 cols=14
      aria-label="Your question"></textarea>""",
}


class _Shop:
    """The pages as a task site."""

    origins = frozenset({f"http://{HOST}"})

    def __init__(self, server: FolderServer) -> None:
        self.addresses = {HOST: server.address}

    def can_reuse_page(self, task: Task) -> bool:
        return False

    async def open(self, page: Page, task: Task) -> str:
        await page.goto(f"http://{HOST}/shop.html")
        return ""

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        return None, False


async def observe() -> Observation:
    """The page as an agent would see it."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in PAGES.items():
            (Path(folder) / name).write_text(text)
        server = FolderServer(Path(folder))
        try:
            settings = BrowserConfig(width=800, height=440, screenshot="png", marks=True)
            async with BrowserPool(settings, {"shop": _Shop(server)}, sessions=1) as pool, pool.session() as session:
                return await session.reset(Task("shop", "shop", "shop", seed=0, max_steps=1))
        finally:
            server.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="PNG file to write")
    file: Path = parser.parse_args().file
    seen = asyncio.run(observe())
    file.write_bytes(seen.screenshot)
    print("\n".join(map(element_line, seen.elements or ())))


if __name__ == "__main__":
    main()
