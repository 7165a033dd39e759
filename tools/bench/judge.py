"""Episodes judged at an endpoint that answers 30 % of the requests with faults, of every kind equally often.

    python -m tools.bench.judge [--quick] [--json FILE]

Exit code 1: a verdict was wrong or missing.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig, judge_config
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import EpisodeEvaluator, open_evaluator
from megatron_webrl.track.tables import progress_bar
from megatron_webrl.types import JUDGE_ERROR, Verdict
from tools.arguments import make_bench_parser, write_json
from tools.bench.judge_episodes import make_episode, truth_of
from tools.judge_endpoint.process import endpoint_process, stats_of

ORACLE = "tools.bench.judge_episodes:NumberOracle"
FAULTS, SCREENSHOTS = "0.3", 4
FULL_EPISODES = {"schema": 1000, "line": 300}  # by the form of replies
QUICK_EPISODES = {"schema": 24, "line": 24}
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


def show(found: Mapping[str, CorrectnessResult], console: Console) -> None:
    """Print one table."""
    table = Table(title="The judge", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, result in found.items():
        faults: Counter[str] = Counter()
        for reason, count in result.masked.items():  # stage: last fault
            faults[reason.rpartition(": ")[2]] += count
        masks = ", ".join(f"{fault} {count}" for fault, count in sorted(faults.items())) or "none"
        table.add_section()
        table.add_row(f"{name}: episodes judged, faulty requests", f"{result.episodes}, {result.fault_rate:.0%}")
        table.add_row(f"{name}: right / wrong / lost", f"{result.right} / {result.wrong} / {result.lost}")
        table.add_row(f"{name}: masked, by last fault", masks)
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    options = make_bench_parser(__doc__, "a few episodes").parse_args(arguments)
    console, found = Console(), {}
    for structured, episodes in (QUICK_EPISODES if options.quick else FULL_EPISODES).items():
        with tempfile.TemporaryDirectory(prefix="webrl-bench-") as folder, progress_bar(console) as bar:
            task = bar.add_task(f"episodes, {structured}", total=episodes)
            found[structured] = measure_correctness(
                Path(folder), episodes, SCREENSHOTS, FAULTS, structured,
                lambda done, bar=bar, task=task: bar.update(task, completed=done),  # type: ignore[misc]
            )  # fmt: skip
    show(found, console)
    write_json(options.json, {name: asdict(result) for name, result in found.items()})
    return int(any(result.wrong or result.lost for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
