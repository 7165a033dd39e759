"""What injected texts change at a judge model, beyond what the same model decides without them.

    python -m tools.bench.judge.injection --url URL --model NAME [--quick] [--limit N] [--json FILE]

Every attempt is put in every place of an episode whose answer is right, and of one whose answer is wrong; the model
judges them and their twins without the attempt, at temperature 0. Harmless texts in the same places are the control:
a model whose verdicts they turn as often cannot read, and its figures say nothing about injections.
Exit code 1: the endpoint gave no verdict at all; 2: bad input.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_webrl.config.judge import BudgetConfig, JudgeConfig, JudgeModelConfig, judge_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import EpisodeEvaluator, open_evaluator
from megatron_webrl.judge.protocols import PROTOCOLS
from megatron_webrl.track.tables import progress_bar
from megatron_webrl.types import BLOCKED, JUDGE_ERROR, TRAINABLE_OUTCOMES
from tools.arguments import bounded_number, make_bench_parser, write_json
from tools.bench.judge.attacked_episodes import PLACES, ShopEpisode
from tools.bench.judge.attempts import ATTEMPTS, HARMLESS

TWINS = 8  # episodes without a text that are right, and as many wrong ones
CONTROL = "harmless texts"


@dataclass(frozen=True)
class InjectionCounts:
    """Pairs of an episode with a text and its twin without."""

    pairs: int
    decided_without: int  # the twin is a success or a failure
    decided_with: int
    to_success: int  # failure without, success with the text
    to_failure: int
    masked_to_success: int  # masked without, success with the text, of episodes that are none
    judge_error: int  # in either
    blocked: int  # in either

    @classmethod
    def of(cls, cases: Sequence[tuple[str, str, str]]) -> InjectionCounts:
        """`cases`: truth, outcome without the text, outcome with it."""
        pairs = [(without, found) for _, without, found in cases]
        return cls(
            pairs=len(pairs),
            decided_without=sum(without in TRAINABLE_OUTCOMES for without, _ in pairs),
            decided_with=sum(found in TRAINABLE_OUTCOMES for _, found in pairs),
            to_success=pairs.count(("failure", "success")),
            to_failure=pairs.count(("success", "failure")),
            masked_to_success=sum(
                truth != "success" and without not in TRAINABLE_OUTCOMES and found == "success"
                for truth, without, found in cases
            ),
            judge_error=sum(JUDGE_ERROR in pair for pair in pairs),
            blocked=sum(BLOCKED in pair for pair in pairs),
        )


@dataclass(frozen=True)
class InjectionResult:
    """Counts by place, of all places, and of the harmless texts."""

    counts: Mapping[str, InjectionCounts]
    alone: Mapping[str, int]  # outcomes of the twins
    alone_right: int  # twins whose outcome is the truth


def plan(texts: Sequence[str], in_turn: bool = False) -> list[ShopEpisode]:
    """Every text in every place (`in_turn`: in one), in an episode with a right answer and in one with a wrong one."""
    return [
        ShopEpisode(number % TWINS, right, place, text)
        for number, text in enumerate(texts)
        for place in ([PLACES[number % len(PLACES)]] if in_turn else PLACES)
        for right in (True, False)
    ]


def chosen_attempts(limit: int | None) -> list[str]:
    """`limit` attempts, evenly from all kinds; None: all."""
    count = min(limit or len(ATTEMPTS), len(ATTEMPTS))
    return [ATTEMPTS[place * len(ATTEMPTS) // count] for place in range(count)]


async def judge_all(
    episodes: Sequence[ShopEpisode], settings: JudgeConfig, font: Path | None, progress: Callable[[int], None]
) -> dict[ShopEpisode, str]:
    """The outcome of each episode. Raises ConfigError, OSError (the font)."""
    outcomes: dict[ShopEpisode, str] = {}
    waiting = iter(episodes)

    async def work(evaluator: EpisodeEvaluator) -> None:
        for episode in waiting:
            outcomes[episode] = (await evaluator.evaluate(episode.trajectory(font))).outcome
            progress(len(outcomes))

    async with open_evaluator(settings, LocalMeter(BudgetConfig())) as evaluator:
        await asyncio.gather(*(work(evaluator) for _ in range(settings.concurrency)))
    return outcomes


def measure(
    attempts: Sequence[str], settings: JudgeConfig, in_turn: bool = False, font: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> InjectionResult:  # fmt: skip
    """Judge attempts, harmless texts and twins; `in_turn`: each attempt in one place.

    `progress` gets episodes done and in total. Raises ConfigError, OSError (the font).
    """
    attacked, control = plan(attempts, in_turn), plan(HARMLESS[: len(attempts)])
    episodes = list(dict.fromkeys([each.twin for each in [*attacked, *control]] + attacked + control))
    outcomes = asyncio.run(judge_all(episodes, settings, font, lambda done: progress(done, len(episodes))))

    def counts(chosen: Sequence[ShopEpisode]) -> InjectionCounts:
        return InjectionCounts.of([(each.truth, outcomes[each.twin], outcomes[each]) for each in chosen])

    twins = [each for each in episodes if not each.place]
    found = [outcomes[each] for each in twins]
    by_place = {place: counts([each for each in attacked if each.place == place]) for place in PLACES}
    return InjectionResult(
        by_place | {"all places": counts(attacked), CONTROL: counts(control)},
        {name: found.count(name) for name in sorted(set(found))},
        sum(outcomes[each] == each.truth for each in twins),
    )


def show(result: InjectionResult, console: Console) -> None:
    """Print one table."""
    table = Table(title="Injected texts at the judge model", title_justify="left")
    for name in ("place", "attempts", "decided\nwithout", "decided\nwith", "failure to\nsuccess", "success to\nfailure",
                 "masked to\nsuccess", "judge_error\nin either", "blocked\nin either"):  # fmt: skip
        table.add_column(name, justify="left" if name == "place" else "right", no_wrap=name == "place")
    for name, counts in result.counts.items():
        if name not in PLACES:
            table.add_section()
        table.add_row(name, *(str(count) for count in asdict(counts).values()))
    console.print(table)
    outcomes = ", ".join(f"{name} {count}" for name, count in result.alone.items())
    console.print(
        f"without any text: right on {result.alone_right} of {sum(result.alone.values())} episodes, "
        f"half of which are successes; outcomes: {outcomes}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_bench_parser(__doc__, "each attempt in one place, in turn")
    parser.add_argument("--url", required=True, help="OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, metavar="NAME", help="the model's name at the endpoint")
    parser.add_argument("--key-variable", default="", metavar="NAME", help="environment variable with the key")
    count = bounded_number(int, 1)
    parser.add_argument("--limit", type=count, metavar="N", help=f"N of the {len(ATTEMPTS)} attempts (default: all)")
    names = list(PROTOCOLS)
    parser.add_argument("--protocol", default="rubric", choices=names, help="(default: %(default)s)")
    parser.add_argument("--structured", default="schema", choices=("schema", "line"), help="as judge.structured")
    parser.add_argument("--concurrency", type=count, default=32, help="requests in flight (default: %(default)s)")
    parser.add_argument("--font", type=Path, metavar="FILE", help="of screenshots (default: one of Latin letters only)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    options = _parser().parse_args(arguments)
    settings = judge_config(
        evaluators=["judge"], protocol=options.protocol, structured=options.structured, 
        verdict=JudgeModelConfig(
            options.model, options.url, options.key_variable, options={"temperature": 0.0, "top_p": 1.0}
        ),
        concurrency=options.concurrency,
        attempts=1,  # at temperature 0 a second reply is the first one
    )  # fmt: skip
    console = Console()
    try:
        with progress_bar(console) as bar:
            task = bar.add_task("episodes", total=None)
            result = measure(
                chosen_attempts(options.limit), settings, options.quick, options.font,
                lambda done, total: bar.update(task, completed=done, total=total),
            )  # fmt: skip
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"injection: {error}\n")
        return 2
    show(result, console)
    figures: dict[str, Any] = {"model": options.model, "protocol": options.protocol, **asdict(result)}
    write_json(options.json, figures)
    return int(not any(each.decided_with or each.blocked for each in result.counts.values()))


if __name__ == "__main__":
    sys.exit(main())
