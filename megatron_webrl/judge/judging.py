"""Judge stored episodes, many at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.judge.budget import USAGE_FILE, BudgetSpent, LocalMeter
from megatron_webrl.judge.evaluation import EpisodeEvaluator, open_evaluator
from megatron_webrl.judge.outcome import REGULAR_ENDS
from megatron_webrl.judge.verdict_file import VerdictFile
from megatron_webrl.types import Trajectory

EPISODES_AT_ONCE = 32  # in memory, with their screenshots


@dataclass
class JudgedEpisodes:
    """Which episodes were judged, in the order of the files; the verdicts are in the file."""

    keys: list[str] = field(default_factory=list)
    masked: Counter[str] = field(default_factory=Counter)  # episodes without a regular end, by it: not judged
    stopped: str = ""  # why judging ended early


async def judge_episodes(
    episodes: Iterator[tuple[str, Trajectory]], limit: int | None, settings: JudgeConfig, verdicts: VerdictFile,
    progress: Callable[[int], None],
) -> JudgedEpisodes:  # fmt: skip
    """Judge the episodes with a regular end, at most the first `limit`, that have no verdict yet.

    `progress` gets the number of episodes done so far. Raises ConfigError.
    """
    found = JudgedEpisodes()
    chosen = islice(_regular(episodes, found), limit)
    workers = min(EPISODES_AT_ONCE, settings.concurrency)
    done = 0

    async def work(evaluator: EpisodeEvaluator) -> None:
        nonlocal done
        for key, trajectory in chosen:  # shared by all workers; each takes the next one
            if not verdicts.holds(key, trajectory):
                verdict = await evaluator.evaluate(trajectory)
                verdicts.add(key, trajectory, verdict)
            done += 1
            progress(done)

    meter = LocalMeter(settings.budget, file=verdicts.path.with_name(USAGE_FILE))
    async with open_evaluator(settings, meter) as evaluator:
        tasks = [asyncio.create_task(work(evaluator)) for _ in range(workers)]
        try:
            await asyncio.gather(*tasks)
        except BudgetSpent as error:
            found.stopped = str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    found.keys = [key for key in found.keys if key in verdicts.lines]
    return found


def _regular(episodes: Iterator[tuple[str, Trajectory]], found: JudgedEpisodes) -> Iterator[tuple[str, Trajectory]]:
    for key, trajectory in episodes:
        if trajectory.end_reason in REGULAR_ENDS:
            found.keys.append(key)
            yield key, trajectory
        else:
            found.masked[trajectory.end_reason] += 1
