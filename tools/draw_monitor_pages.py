"""Take the pictures of docs/monitor.md: the pages of a run in Chromium, light and dark, wide and narrow.

python -m tools.draw_monitor_pages RUN OTHER_RUN [--out docs/images]

The first run has a timeline. The rollouts are 1,280 simulated ones (tools/simulated_rollouts.py): a run that has ended
has none.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.async_api import Page, async_playwright

from megatron_webrl.browser.chromium import find_chromium, use_sandbox
from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_http_server
from megatron_webrl.monitor.access import MonitorAccess
from megatron_webrl.monitor.app import RunSet
from megatron_webrl.monitor.episode_view import TokenTexts
from megatron_webrl.monitor.live_view import LiveRollouts
from megatron_webrl.monitor.status import find_run
from tests.control.service_process import service_process
from tools.simulated_rollouts import ROLLOUTS, simulate

SIMULATED_WORKERS, SIMULATED_SECONDS = 32, 45.0  # before the pictures, for the history
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 800}
LONG = {"width": 1280, "height": 1500}
PICTURES = (
    ("run", "#/", LONG, "light"),
    ("run_phone", "#/", NARROW, "dark"),
    ("episodes", "#/episodes?kind=training", WIDE, "dark"),
    ("episode", "#/episode/{failure}", WIDE, "light"),
    ("episode_phone", "#/episode/{failure}", NARROW, "dark"),
    ("group", "#/group/{failure}", WIDE, "light"),
    ("compare", "#/compare", WIDE, "light"),
    ("compare_phone", "#/compare?x=hours", NARROW, "dark"),
    ("rollouts", "#/rollouts?by=group", WIDE, "light"),
    ("rollouts_dark", "#/rollouts?by=state", WIDE, "dark"),
    ("rollouts_phone", "#/rollouts", NARROW, "dark"),
)


@contextmanager
def simulated_job() -> Iterator[Path]:
    """The folder of a job whose rollouts change their states."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name, service_process(Path(name), 60.0) as service:
        stop = context.Event()
        simulation = context.Process(target=simulate, args=(stop, service.address, SIMULATED_WORKERS), daemon=True)
        simulation.start()
        yield Path(name)
        stop.set()
        simulation.join()


async def take_pictures(folders: Sequence[Path], job: Path, out: Path) -> None:
    """Write monitor_NAME.png for each of PICTURES. The episode shown is the newest failure of a training group.

    `job`: the folder of the job whose rollouts are shown.
    """
    runs, token = RunSet(folders), secrets.token_urlsafe(24)
    pages = next(iter(runs.pages.values()))
    texts = TokenTexts(Path(pages.config.model.path))
    pages.live = LiveRollouts(job, lambda: texts)
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
            if "rollouts" in name:
                await page.get_by_text(f"{SIMULATED_WORKERS * ROLLOUTS:,} rollouts shown").wait_for()
                await page.locator(".wall").focus()
                await page.wait_for_timeout(1000 * (SIMULATED_SECONDS if name == "rollouts" else 2))
            else:
                await page.wait_for_load_state("networkidle")
            if place == "#/":
                await page.get_by_role("button", name="Show").click()
                await page.get_by_text("trainer: train").wait_for()
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
    with simulated_job() as job:
        asyncio.run(take_pictures([find_run(each) for each in options.of], job, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
