"""Record episodes of the offline websites whose right verdict is known, to measure a judge with.

    python -m tools.make_webgym_tasks TASKS
    python -m tools.make_labelled_episodes --tasks TASKS --out judged.records --labels judged.jsonl [--episodes 300]
    webrl judge judged.records --labels judged.jsonl

Scripts play in Chromium: successes, near misses (the right page and a neighbouring answer, or an effect with one wrong
detail), hallucinated answers, failures, denied access, and episodes without an answer. A line of the labels has ticket,
index, label ("success", "failure" or "blocked"), kind and task_id. Records hold no tokens. Episodes played already are
kept beside the records until all are: a second run goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import shutil
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
from megatron_webrl.ring.record import RecordFileWriter, count_records, encode_trajectory, read_record_file
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


async def record_episodes(
    plans: Sequence[EpisodePlan], tasks: Tasks, parts: Path, settings: BrowserConfig, sessions: int,
    progress: Callable[[int], None] = lambda done: None,
) -> None:  # fmt: skip
    """Play the plans that have no record in `parts` yet; `progress` gets each new total. Raises BrowserError,
    ScriptedPolicyError, ConfigError.
    """
    left = [plan for plan in plans if not _part(parts, plan).exists()]
    done = len(plans) - len(left)
    progress(done)
    if not left:
        return
    waiting = iter(left)
    websites = OfflineWebsites()

    async def work(pool: BrowserPool) -> None:
        nonlocal done
        for plan in waiting:
            task, goal = tasks[plan.task_id]
            trajectory = await _play(pool, plan, task, lambda: EpisodePlayer(plan, task, goal, websites))  # noqa: B023
            with RecordFileWriter(_part(parts, plan)) as file:
                file.write(encode_trajectory(trajectory))
            done += 1
            progress(done)

    try:
        async with (
            BrowserPool(settings, {SOURCE_NAME: websites}, sessions, STEP_SECONDS) as pool,
            asyncio.TaskGroup() as workers,
        ):
            for _ in range(min(sessions, len(left))):
                workers.create_task(work(pool))
    except ExceptionGroup as group:  # the first error cancelled the other workers
        raise group.exceptions[0] from None
    finally:
        websites.close()


async def _play(pool: BrowserPool, plan: EpisodePlan, task: Task, player: Callable[[], EpisodePlayer]) -> Trajectory:
    """Play an episode; after a browser error again, at most MAX_TRIES times."""
    for attempt in range(MAX_TRIES):
        try:
            return await _play_once(pool, plan, task, player())
        except BrowserError:
            if attempt == MAX_TRIES - 1:
                raise
    raise AssertionError("unreachable")


async def _play_once(pool: BrowserPool, plan: EpisodePlan, task: Task, player: EpisodePlayer) -> Trajectory:
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
    try:
        tasks = read_tasks(options.tasks)
        plans = plan_episodes(tasks, options.episodes, options.seed)
        if options.out.exists() and count_records(options.out) == len(plans) and options.labels.exists():
            print(f"{options.out} is complete; remove it to record it again")
            return 0
        parts = _parts_folder(options)
    except (OSError, KeyError, ValueError) as error:
        sys.stderr.write(f"make_labelled_episodes: {error}\n")
        return 2
    settings = BrowserConfig(width=options.width, height=options.height)
    try:
        with Progress(transient=True) as bar:
            shown = bar.add_task("episodes", total=len(plans))
            played = record_episodes(
                plans, tasks, parts, settings, options.sessions, lambda done: bar.update(shown, completed=done)
            )
            asyncio.run(played)
    except (BrowserError, ScriptedPolicyError, ConfigError, RuntimeError) as error:
        sys.stderr.write(f"make_labelled_episodes: {error}; what was recorded is kept, run it again to go on\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("make_labelled_episodes: interrupted; run it again to go on\n")
        return 130
    _join(plans, parts, options.out, options.labels)
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


def _parts_folder(options: argparse.Namespace) -> Path:
    """The folder of single records, for one set of arguments. Raises ValueError if it belongs to another one."""
    folder = options.out.with_name(f"{options.out.name}.parts")
    rows = b"".join((options.tasks / name).read_bytes() for name in ("train.jsonl", "test.jsonl"))
    asked = f"{options.episodes}/{options.seed}/{options.width}x{options.height}/{hashlib.sha256(rows).hexdigest()}"
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "arguments"
    if mark.exists() and mark.read_text() != asked:
        raise ValueError(f"{folder} is of other tasks or arguments; give those again, or remove it")
    mark.write_text(asked)
    return folder


def _part(parts: Path, plan: EpisodePlan) -> Path:
    return parts / f"{plan.ticket:06d}.records"


def _join(plans: Sequence[EpisodePlan], parts: Path, out: Path, labels: Path) -> None:
    """Write records and labels in the order of tickets, and remove the parts."""
    with RecordFileWriter(out) as file:
        for plan in plans:
            for record in read_record_file(_part(parts, plan)):
                file.write([record])
    labels.parent.mkdir(parents=True, exist_ok=True)
    write_lines(labels, [
        {"ticket": plan.ticket, "index": 0, "label": plan.label, "kind": plan.kind, "task_id": plan.task_id}
        for plan in plans
    ])  # fmt: skip
    shutil.rmtree(parts)


if __name__ == "__main__":
    sys.exit(main())
