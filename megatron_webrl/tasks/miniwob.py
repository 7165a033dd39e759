"""MiniWoB++ environments, and pages of ours in their form, as tasks."""

from __future__ import annotations

import asyncio
import importlib.util
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks import remember_sign, scripted_policies
from megatron_webrl.tasks.latency import EpisodeDelays, ResponseDelays
from megatron_webrl.tasks.server import FolderServer
from megatron_webrl.tasks.source import LocalTaskSource, check_environments
from megatron_webrl.types import Action, Task

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page

UNSUPPORTED_ENVIRONMENTS = {"hover-shape": "its page never gives a reward and never ends"}  # reason by environment

STATEFUL_ENVIRONMENTS = frozenset({
    "book-flight", "book-flight-nodelay", "copy-paste", "copy-paste-2", "scroll-text", "scroll-text-2",
    "use-colorwheel", "use-colorwheel-2", "chase-circle", "drag-cube", "moving-items", "simon-says", "stock-market",
    "terminal",
})  # fmt: skip
"""Their restarted page may differ from a new one: scroll positions and open widgets stay, or animations continue."""

FIXED_DATE = "2025-01-01T12:00:00Z"  # on all pages: some show it or a calendar of it; later than any date in a task
STARTUP_ANIMATION_MS = {"click-pie": 3000}  # maximum, where a session does not wait long enough for a page's animation

START_SCRIPT = Path(__file__).with_name("miniwob_start.js").read_text()

IS_STARTED_SCRIPT = "() => Boolean(window.episodeRuns)"  # whether an episode was started since the page was loaded

# The raw reward, without the page's reduction by elapsed time.
RESULT_SCRIPT = """() => window.episodeRuns && WOB_DONE_GLOBAL ? [WOB_RAW_REWARD_GLOBAL, true] : [null, false]"""


def pages_folder() -> Path:
    """The folder of pages in the package. Raises ConfigError if MiniWoB++ is not installed."""
    # The package is not imported: that would import selenium and gymnasium, which are not needed.
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("tasks.source=miniwob needs the package miniwob; install it with pip install miniwob==1.1.0")
    return Path(spec.submodule_search_locations[0]) / "html"


def all_environments(folder: Path | None = None) -> list[str]:
    """Sorted names of all environments: the package's, with flight pages as flight.<page>, and remember_sign's."""
    pages = folder or pages_folder()
    names = [file.stem for file in (pages / "miniwob").glob("*.html")]
    names += [f"flight.{file.parent.name}" for file in (pages / "flight").glob("*/wrapper.html")]
    return sorted({*names, *remember_sign.ENVIRONMENTS} - set(UNSUPPORTED_ENVIRONMENTS))


def page_path(environment: str) -> str:
    """Path and query of the page of an environment."""
    if environment in remember_sign.ENVIRONMENTS:
        return remember_sign.page_address(environment)
    kind, _, name = environment.partition(".")
    return f"/flight/{name}/wrapper.html" if kind == "flight" else f"/miniwob/{environment}.html"


def can_reuse_page(environment: str) -> bool:
    """Whether a restarted page of the environment is like a new one."""
    return environment not in STATEFUL_ENVIRONMENTS and not environment.startswith("flight.")


def start_arguments(environment: str, seed: int) -> dict[str, object]:
    """The argument of START_SCRIPT."""
    return {"seed": seed, "today": FIXED_DATE, "unfoldingMs": STARTUP_ANIMATION_MS.get(environment, 0)}


SOURCE_NAME = "miniwob"
DIFFICULTY = "easy"
HOST = "miniwob.localhost"
ORIGIN = f"http://{HOST}"


class MiniWobTaskSource(LocalTaskSource):
    """Tasks of a list of MiniWoB++ environments. A context manager; close stops the server."""

    def __init__(self, environments: Sequence[str], tasks: TasksConfig) -> None:
        """Raises ConfigError for an unknown or unsupported environment."""
        folder = pages_folder()
        for name in {*environments} & {*UNSUPPORTED_ENVIRONMENTS}:
            reason = UNSUPPORTED_ENVIRONMENTS[name]
            raise ConfigError(f"tasks.environments: {name} cannot be used: {reason}; leave it out")
        check_environments("MiniWoB++ has", environments, all_environments(folder))
        server = FolderServer(folder, {remember_sign.PATH: remember_sign.PAGE})
        super().__init__(tasks, environments, [DIFFICULTY] * len(environments), server)
        self._delays = EpisodeDelays(tasks.latency)
        self._open: weakref.WeakKeyDictionary[BrowserContext, ResponseDelays] = weakref.WeakKeyDictionary()

    @property
    def origins(self) -> frozenset[str]:
        """The origin of the pages: they can reach nothing else."""
        return frozenset({ORIGIN})

    @property
    def addresses(self) -> dict[str, str]:
        return {HOST: self._server.address}

    def make_task(self, environment: str, seed: int) -> Task:
        return Task(
            id=f"{SOURCE_NAME}/{environment}/{seed}", source=SOURCE_NAME, environment=environment, seed=seed,
            max_steps=self.training_steps(DIFFICULTY, None), difficulty=DIFFICULTY,
        )  # fmt: skip

    def can_reuse_page(self, task: Task) -> bool:
        """True, except for pages that keep state of an earlier episode."""
        return can_reuse_page(task.environment)

    async def open(self, page: Page, task: Task) -> str:
        """Start the episode, on the environment's page if it is open already; returns the instruction."""
        self._open[page.context] = self._delays.start(f"{task.environment}/{task.seed}")
        address = ORIGIN + page_path(task.environment)
        if page.url != address or not self.can_reuse_page(task) or not await page.evaluate(IS_STARTED_SCRIPT):
            await page.goto(address, wait_until="load", timeout=0)
        return str(await page.evaluate(START_SCRIPT, start_arguments(task.environment, task.seed)))

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """The page's reward, None while there is none, and whether the page has ended the episode.

        Pages answer without a request, so that the simulated response time of an action passes here.
        """
        await asyncio.sleep(self._open[page.context].next())
        if not page.url.startswith(ORIGIN + "/"):
            return None, False
        reward, done = await page.evaluate(RESULT_SCRIPT)
        return (None if reward is None else float(reward)), bool(done)

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """The next scripted action. Raises ScriptedPolicyError, and KeyError without a scripted policy."""
        return await scripted_policies.next_scripted_action(page, task.environment, premature_submit)
