"""Take the pictures of docs/monitor.md: the pages of a run in Chromium, light and dark, wide and narrow.

python -m tools.draw_monitor_pages RUN OTHER_RUN [--out docs/images]
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from playwright.async_api import Page, async_playwright

from megatron_webrl.browser.chromium import find_chromium, use_sandbox
from megatron_webrl.monitor.access import MonitorAccess
from megatron_webrl.monitor.run_set import RunSet
from megatron_webrl.service.http_service import ListenAddress, Listener, run_http_server
from megatron_webrl.status.report import find_run

WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 800}
PICTURES = (
    ("run", "#/", WIDE, "light"),
    ("run_phone", "#/", NARROW, "dark"),
    ("episodes", "#/episodes?kind=training", WIDE, "dark"),
    ("episode", "#/episode/{failure}", WIDE, "light"),
    ("episode_phone", "#/episode/{failure}", NARROW, "dark"),
    ("group", "#/group/{failure}", WIDE, "light"),
    ("compare", "#/compare", WIDE, "light"),
    ("compare_phone", "#/compare?x=hours", NARROW, "dark"),
)


async def take_pictures(folders: Sequence[Path], out: Path) -> None:
    """Write monitor_NAME.png for each of PICTURES. The episode shown is the newest failure of a training group."""
    runs, token = RunSet(folders), secrets.token_urlsafe(24)
    runs.refresh()
    listener = Listener(ListenAddress("127.0.0.1", 0))
    async with (
        run_http_server(MonitorAccess(runs.app(), token, "webrl-pictures"), listener),
        async_playwright() as play,
    ):
        browser = await play.chromium.launch(executable_path=find_chromium(), chromium_sandbox=use_sandbox())
        for name, place, viewport, scheme in PICTURES:
            context = await browser.new_context(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
            page = await context.new_page()
            await page.goto(f"{listener.url}/?token={token}")
            await _go(page, "#/episodes?kind=training&outcome=failure")
            link = await page.locator(".rows a").first.get_attribute("href")
            await _go(page, place.format(failure=(link or "").rpartition("/")[2]))
            await page.wait_for_load_state("networkidle")
            await page.screenshot(path=out / f"monitor_{name}.png")
            await context.close()
        await browser.close()


async def _go(page: Page, place: str) -> None:
    await page.evaluate("place => { document.querySelector('h1')?.remove(); location.hash = place; }", place)
    await page.locator("h1").wait_for()


def main() -> int:
    """Take the pictures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", metavar="RUN", nargs="+", help="folder of a run, or the name of a run in runs/")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), metavar="FOLDER", help="default: docs/images")
    options = parser.parse_args()
    asyncio.run(take_pictures([find_run(each) for each in options.of], options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
