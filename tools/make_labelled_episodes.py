"""Record episodes of the offline websites whose right verdict is known, to measure a judge with.

    python -m tools.make_webgym_tasks TASKS
    python -m tools.make_labelled_episodes --tasks TASKS --out judged.records --labels judged.jsonl [--episodes 300]
    webrl judge judged.records --against judged.jsonl

Scripts play in Chromium: successes, near misses (the right page and a neighbouring answer, or an effect with one wrong
detail), hallucinated answers, failures, denied access, and episodes without an answer. A line of the labels has ticket,
index, label ("success", "failure" or "blocked"), kind and task_id. Records hold no tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.progress import Progress

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.evaluation import outcome
from megatron_webrl.ring.record import RecordFileWriter, encode_trajectory
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.tasks.sites.website_server import OfflineWebsites
from megatron_webrl.tasks.web import SOURCE_NAME
from megatron_webrl.types import ANSWER, STEPS_EXHAUSTED, Action, Observation, Step, Task, Trajectory
from tools.arguments import bounded_number
from tools.offline.scripted_episodes import EpisodePlan, EpisodePlayer, Tasks, plan_episodes
from tools.offline.task_rows import read_tasks, write_lines

MAX_STEPS = {"easy": 10, "medium": 20, "hard": 30}
MAX_TRIES = 3
STEP_SECONDS = 60.0


async def play_episodes(
    plans: Sequence[EpisodePlan], tasks: Tasks, settings: BrowserConfig, sessions: int, progress: Callable[[], object]
) -> list[Trajectory]:
    """Play the plans; `progress` is called after each. Raises BrowserError, ScriptedPolicyError, ConfigError."""
    waiting, played = iter(plans), dict[int, Trajectory]()
    websites = OfflineWebsites()

    async def work(pool: BrowserPool) -> None:
        for plan in waiting:
            task, goal = tasks[plan.task_id]
            for attempt in range(MAX_TRIES):
                try:
                    played[plan.ticket] = await _play(pool, plan, task, EpisodePlayer(plan, task, goal, websites))
                    break
                except BrowserError:
                    if attempt == MAX_TRIES - 1:
                        raise
            progress()

    try:
        async with (
            BrowserPool(settings, {SOURCE_NAME: websites}, sessions, STEP_SECONDS) as pool,
            asyncio.TaskGroup() as workers,
        ):
            for _ in range(min(sessions, len(plans))):
                workers.create_task(work(pool))
    except ExceptionGroup as group:  # the first error cancelled the other workers
        raise group.exceptions[0] from None
    finally:
        websites.close()
    return [played[plan.ticket] for plan in plans]


async def _play(pool: BrowserPool, plan: EpisodePlan, task: Task, player: EpisodePlayer) -> Trajectory:
    started = time.monotonic()
    steps: list[Step] = []
    async with pool.episode(task) as (session, seen):
        images = [seen.screenshot]
        while (action := await player.next_action(session.page)) is not None:
            after = await session.step(action)
            steps.append(_step(len(images) - 1, seen, action, after))
            images.append(after.screenshot)
            seen = after
            if action.kind == "answer":
                break
    answer = action.text if action is not None else None
    end_reason = ANSWER if action is not None else STEPS_EXHAUSTED
    verdict = outcome(None, end_reason, task.answer, answer)
    return Trajectory(
        ticket=plan.ticket, index=0, group_size=1, restart_epoch=0,
        task=replace(task, max_steps=MAX_STEPS[task.difficulty] if answer is not None else len(steps)),
        instruction=task.instruction or "", steps=tuple(steps), images=tuple(images),
        reward=float(verdict == "success"), outcome=verdict, temperature=1.0, seconds=time.monotonic() - started,
        finished_at=time.time(), end_reason=end_reason,
    )  # fmt: skip


def _step(image: int, seen: Observation, action: Action, after: Observation) -> Step:
    tokens = np.zeros(0, np.int32)
    return Step(
        prompt_token_ids=tokens, response_token_ids=tokens, logprobs=np.zeros(0, np.float32), versions=tokens,
        images=np.array([image], np.int32), image_grids=np.zeros((1, 3), np.int32), finish_reason="stop",
        action=action, url=seen.url, title=seen.title, page_changed=after.page_changed,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Exit code 2: bad input; 1: a browser failed."""
    options = _parser().parse_args(arguments)
    settings = BrowserConfig(width=options.width, height=options.height)
    try:
        tasks = read_tasks(options.tasks)
        plans = plan_episodes(tasks, options.episodes, options.seed)
    except (OSError, KeyError, ValueError) as error:
        sys.stderr.write(f"make_labelled_episodes: {error}\n")
        return 2
    try:
        with Progress(transient=True) as bar:
            shown = bar.add_task("episodes", total=len(plans))
            played = asyncio.run(play_episodes(plans, tasks, settings, options.sessions, lambda: bar.advance(shown)))
    except (BrowserError, ScriptedPolicyError, ConfigError, RuntimeError) as error:
        sys.stderr.write(f"make_labelled_episodes: {error}\n")
        return 1
    with RecordFileWriter(options.out) as file:
        for trajectory in played:
            file.write(encode_trajectory(trajectory))
    write_lines(options.labels, [
        {"ticket": plan.ticket, "index": 0, "label": plan.label, "kind": plan.kind, "task_id": plan.task_id}
        for plan in plans
    ])  # fmt: skip
    kinds = Counter(plan.kind for plan in plans)
    print(f"{options.out}: {len(plans)} episodes, " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, required=True, metavar="FOLDER", help="of tools.make_webgym_tasks")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="record file to write")
    parser.add_argument("--labels", type=Path, required=True, metavar="FILE", help="JSONL file of labels to write")
    count = bounded_number(int, 1)
    parser.add_argument("--episodes", type=count, default=300, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="other seeds plan other episodes (default: 0)")
    parser.add_argument("--sessions", type=count, default=4, help="episodes at a time (default: %(default)s)")
    parser.add_argument("--width", type=bounded_number(int, 160), default=640, help="pixels (default: %(default)s)")
    parser.add_argument("--height", type=bounded_number(int, 224), default=480, help="pixels (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
