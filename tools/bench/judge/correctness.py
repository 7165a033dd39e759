"""Episodes judged at an endpoint with faults of every kind: none wrong, none lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig, judge_config
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import EpisodeEvaluator, open_evaluator
from megatron_webrl.types import JUDGE_ERROR, Verdict
from tools.bench.judge.episodes import make_episode, truth_of
from tools.judge_endpoint.process import endpoint_process, stats_of

ORACLE = "tools.bench.judge.episodes:NumberOracle"
AT_ONCE = 64
TIMEOUT_SECONDS = 10.0  # of a request; on a busy machine a shorter one also ends requests that do not hang


@dataclass(frozen=True)
class CorrectnessResult:
    """Counts of one run. Rates are of requests."""

    episodes: int
    right: int
    wrong: int
    lost: int  # without a verdict
    masked: dict[str, int]  # by reason
    requests: int
    fault_rate: float
    faults: dict[str, int]  # that the endpoint injected
    met: dict[str, int]  # that the stages name
    seconds: float


async def _judge(url: str, episodes: int, screenshots: int, structured: str, progress: Callable[[int], None]) -> (
    list[Verdict | None]
):  # fmt: skip
    settings = judge_config(
        evaluators=["judge"], verdict=JudgeModelConfig("oracle", url), timeout_seconds=TIMEOUT_SECONDS,
        concurrency=AT_ONCE, structured=structured,
    )  # fmt: skip
    verdicts: list[Verdict | None] = [None] * episodes
    numbers = iter(range(episodes))

    async def work(evaluator: EpisodeEvaluator) -> None:
        for number in numbers:
            verdicts[number] = await evaluator.evaluate(make_episode(number, screenshots))
            progress(episodes - verdicts.count(None))

    async with open_evaluator(settings, LocalMeter(BudgetConfig())) as evaluator:
        await asyncio.gather(*(work(evaluator) for _ in range(AT_ONCE)))
    return verdicts


def measure_correctness(
    folder: Path, episodes: int, screenshots: int, faults: str, structured: str,
    progress: Callable[[int], None] = lambda done: None,
) -> CorrectnessResult:  # fmt: skip
    """Judge episodes 0 to `episodes` - 1. `faults`: as of tools.judge_endpoint. Raises RuntimeError."""
    options = ["--oracle", ORACLE, "--faults", faults, "--retry-after", "0.2", "--seed", "1"]
    options += ["--no-schemas"] if structured == "line" else []
    started = time.monotonic()
    with endpoint_process(folder, *options) as url:
        verdicts = asyncio.run(_judge(url, episodes, screenshots, structured, progress))
        stats = stats_of(url)
    seconds = time.monotonic() - started
    given = [(number, verdict) for number, verdict in enumerate(verdicts) if verdict is not None]
    masked = [verdict for _, verdict in given if verdict.outcome == JUDGE_ERROR]
    right = sum(verdict.outcome == truth_of(number) for number, verdict in given)
    return CorrectnessResult(
        episodes=episodes, right=right, wrong=len(given) - right - len(masked), lost=episodes - len(given),
        masked=dict(Counter(verdict.reason for verdict in masked)), requests=stats["requests"],
        fault_rate=sum(stats["faults"].values()) / stats["requests"], faults=stats["faults"],
        met=dict(Counter(name for _, v in given for stage in v.stages for name in stage.errors)), seconds=seconds,
    )  # fmt: skip
