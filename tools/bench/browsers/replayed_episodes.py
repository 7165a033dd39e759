"""Episodes of the replay benchmark: played live or recorded, then played again from the recordings.

`python -m tools.bench.browsers.replayed_episodes FOLDER RESULT ...` replays in a process of its own, without a network.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.browser import chromium, session
from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.page import settle
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS, SiteTaskSource
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Action, Observation, Task, TaskSite
from megatron_webrl.util.network import leave_network
from tools.bench.browsers.changing_site import HEIGHT, WIDTH, ChangingWeb, web_actions, web_task
from tools.bench.browsers.no_network import has_route, interfaces

MAX_ACTIONS = 25
SECONDS = 60.0  # limit of one operation
EPISODES_FILE = "episodes.json"
LEAVE_OUT = ("script", "recorded-script", "stillness")


@dataclass(frozen=True)
class PlayedEpisode:
    """Actions of an episode, and a digest of what each observation shows."""

    number: int
    actions: tuple[Action, ...]
    seen: tuple[str, ...]  # [actions + 1]
    reward: float | None

    @classmethod
    def from_json(cls, values: dict) -> PlayedEpisode:
        actions = tuple(Action(**_with_tuples(action)) for action in values["actions"])
        return cls(values["number"], actions, tuple(values["seen"]), values["reward"])


@dataclass(frozen=True)
class PlayedRun:
    """All episodes, once."""

    episodes: list[PlayedEpisode]  # by number
    seconds: float
    replayed: int  # requests that recordings answered
    refused: dict[str, int]  # requests by reason
    connections: int  # by the proxy, to servers
    failed: list[str]  # messages of episodes that failed


def task_of(number: int, sites: SiteTaskSource) -> Task:
    """Tasks of the sites and of the web take turns."""
    if number % 2:
        return web_task(number)
    names = list(ENVIRONMENTS)
    return sites.make_task(names[number // 2 % len(names)], number)


async def play(
    settings: BrowserConfig, numbers: Sequence[int], sessions: int, earlier: Sequence[PlayedEpisode] | None = None
) -> PlayedRun:
    """Play episodes: those of `earlier` again, or live ones with scripted actions."""
    web = OpenWeb(MAX_ACTIONS) if earlier is not None else ChangingWeb(MAX_ACTIONS)
    with SiteTaskSource(list(ENVIRONMENTS), TasksConfig(max_steps=MAX_ACTIONS)) as sites:
        catalog: dict[str, TaskSite] = {"sites": sites, "web": web}
        actions = {episode.number: episode.actions for episode in earlier or ()}
        episodes: list[PlayedEpisode] = []
        failed: list[str] = []
        waiting = list(reversed(numbers))

        async def work(pool: BrowserPool) -> None:
            while waiting:
                number = waiting.pop()
                task = task_of(number, sites)
                try:
                    async with pool.episode(task) as (played, first):
                        episodes.append(await _play_one(number, played, first, task, sites, actions.get(number)))
                except Exception as error:  # the benchmark reports it and goes on
                    failed.append(f"{task.id}: {type(error).__name__}: {error}")

        try:
            async with BrowserPool(settings, catalog, sessions, SECONDS) as pool:
                started = time.monotonic()
                await asyncio.gather(*(work(pool) for _ in range(sessions)))
                seconds = time.monotonic() - started
        finally:
            web.close()
    totals = pool.egress_proxy.totals
    episodes.sort(key=lambda episode: episode.number)
    return PlayedRun(episodes, seconds, totals.replayed, dict(totals.refused), totals.connections, failed)


async def _play_one(
    number: int, played: Session, first: Observation, task: Task, sites: SiteTaskSource,
    given: Sequence[Action] | None,
) -> PlayedEpisode:  # fmt: skip
    planned = given if given is not None else web_actions(number) if task.source == "web" else None
    observation, seen = first, [_digest(first)]
    actions: list[Action] = []
    while len(actions) < (MAX_ACTIONS if planned is None else len(planned)):
        action = planned[len(actions)] if planned is not None else await sites.demonstrate(played.page, task)
        observation = await played.step(action)
        actions.append(action)
        seen.append(_digest(observation))
        if planned is None and (observation.done or action.kind == "answer"):
            break
    return PlayedEpisode(number, tuple(actions), tuple(seen), observation.reward)


def browser_settings(**settings: str) -> BrowserConfig:
    return BrowserConfig(width=WIDTH, height=HEIGHT, open_web=True, **settings)  # type: ignore[arg-type]


def leave_out(parts: Sequence[str], recording: bool) -> None:
    """Leave parts of what makes pages repeatable out, to show what they are for."""
    if "script" in parts or (recording and "recorded-script" in parts):
        session.repeatable_page_script = lambda *given: ""
    if "stillness" in parts:
        wait = settle.wait_until_idle
        settle.wait_until_idle = lambda tab, until=None, still=False: wait(tab, until)
        chromium._STILL_IMAGES = chromium._STILL_IMAGES.removesuffix(",imageAnimationPolicy=2")


def main() -> None:
    """Replay the recordings of a folder some times and write the runs to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="recordings, and what was seen in them")
    parser.add_argument("result", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--leave-out", nargs="*", default=[], choices=LEAVE_OUT)
    options = parser.parse_args()
    leave_out(options.leave_out, recording=False)
    try:
        leave_network()
        isolation = "" if not has_route() and interfaces() == ["lo"] else "the namespace has a route"
    except OSError as error:
        isolation = str(error)
    recorded = [PlayedEpisode.from_json(each) for each in json.loads((options.folder / EPISODES_FILE).read_text())]
    settings = browser_settings(replay=str(options.folder))
    numbers = [episode.number for episode in recorded]
    runs = [asyncio.run(play(settings, numbers, options.sessions, recorded)) for _ in range(options.repeats)]
    options.result.write_text(json.dumps({"not_isolated": isolation, "runs": [asdict(run) for run in runs]}))


def _with_tuples(action: dict) -> dict:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in action.items()}


def _digest(observation: Observation) -> str:
    return hashlib.blake2b(observation.screenshot, digest_size=12).hexdigest()


if __name__ == "__main__":
    main()
