"""MiniWoB++ as a task source: its pages are served from the installed package and reset by a seed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from playwright.async_api import Page

from megatron_webrl.config import ConfigError
from megatron_webrl.tasks import oracles
from megatron_webrl.tasks.server import FolderServer
from megatron_webrl.tasks.source import check_environments, draw, evaluation
from megatron_webrl.types import Action, Task

NAME = "miniwob"
HOST = "miniwob.localhost"
ORIGIN = f"http://{HOST}"

# The reward panel and the trace of clicks would leak into the screenshot, and the cover that waits for START would
# hide the last state of the page. The page's own time limit (10 s by default, and rewards shrink towards it) is put
# out of reach: episodes are limited in steps. The mark tells an episode from a page that was merely loaded again.
_START = """async (seed) => {
  const style = document.createElement("style");
  style.textContent = "#reward-display, #click-canvas, #sync-task-cover { display: none !important; }";
  document.head.appendChild(style);
  core.EPISODE_MAX_TIME = 2e9;
  Math.seedrandom(seed);
  core.startEpisodeReal();
  while (!WOB_TASK_READY) await new Promise(requestAnimationFrame);
  window.episodeRuns = true;
  const utterance = core.getUtterance();
  return typeof utterance === "string" ? utterance : utterance.utterance;
}"""

_RESULT = """() => window.episodeRuns && WOB_DONE_GLOBAL ? [WOB_REWARD_GLOBAL, true] : [null, false]"""


class Miniwob:
    """Tasks drawn uniformly from some environments of MiniWoB++. A context manager; close stops the server."""

    def __init__(self, environments: Sequence[str], max_steps: int) -> None:
        """Raises ConfigError for an environment that the package does not have."""
        folder = pages_folder()
        check_environments("MiniWoB++ has", environments, all_environments(folder))
        self.environments, self.max_steps = tuple(environments), max_steps
        self._server = FolderServer(folder)

    def __enter__(self) -> Miniwob:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving pages."""
        self._server.close()

    @property
    def origins(self) -> frozenset[str]:
        """The pages' own origin: they can reach nothing else."""
        return frozenset({ORIGIN})

    @property
    def addresses(self) -> dict[str, str]:
        """The server behind the origin."""
        return {HOST: self._server.address}

    def make(self, environment: str, seed: int) -> Task:
        """The task of an environment and a page seed; the same on every machine."""
        return Task(
            id=f"{NAME}/{environment}/{seed}", source=NAME, environment=environment, seed=seed, max_steps=self.max_steps
        )

    def task(self, seed: int, ticket: int) -> Task:
        """The task of a training ticket: a pure function of sampler seed and ticket."""
        environment, page_seed = draw(seed, ticket, len(self.environments))
        return self.make(self.environments[environment], page_seed)

    def held_out(self, index: int) -> Task:
        """The index-th evaluation task; environments take turns, and no page seed is ever trained on."""
        environment, page_seed = evaluation(index, len(self.environments))
        return self.make(self.environments[environment], page_seed)

    async def open(self, page: Page, task: Task) -> str:
        """Load the environment's page and start its episode; returns the instruction."""
        await page.goto(f"{ORIGIN}/miniwob/{task.environment}.html", wait_until="load")
        return str(await page.evaluate(_START, task.seed))

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """Reward, once the page gave one, and whether the page has ended the episode."""
        if not page.url.startswith(ORIGIN + "/"):
            return None, False
        reward, done = await page.evaluate(_RESULT)
        return (None if reward is None else float(reward)), bool(done)

    async def demonstrate(self, page: Page, task: Task) -> Action:
        """What the environment's oracle would do next. Raises OracleError, KeyError without an oracle."""
        return await oracles.next_action(page, task.environment)


def pages_folder() -> Path:
    """The package's folder of pages. Raises ConfigError if MiniWoB++ is not installed."""
    # Found, not imported: importing would pull in selenium and gymnasium, which are not needed.
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("tasks.source=miniwob needs the package miniwob; install it with pip install miniwob==1.1.0")
    return Path(spec.submodule_search_locations[0]) / "html"


def all_environments(folder: Path | None = None) -> list[str]:
    """Names of all environments of the installed package, sorted."""
    return sorted(file.stem for file in ((folder or pages_folder()) / "miniwob").glob("*.html"))
