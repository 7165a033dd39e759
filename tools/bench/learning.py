"""Check that a policy learns from rewards: the quickstart's job and controls that differ from it in one setting.

    python -m tools.bench.learning [--arms NAME ...] [--seeds N ...] [--json FILE] [--add FILE ...] [--plots FILE]

Every arm is `webrl train configs/quickstart.yaml`, evaluated greedily before and after on the first held-out tasks.
--add combines the figures of several calls.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_webrl.tracking import summary
from megatron_webrl.tracking.learning_plot import moving_average
from megatron_webrl.tracking.plot import BLUE, GREEN, GREY, ORANGE, add_legend, add_titles, render_svg
from tools.arguments import write_json
from tools.bench.jobs import run_job

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONFIG = Path("configs/quickstart.yaml")
EVALUATION = ("evaluation.temperature=0", "evaluation.greedy=false", "evaluation.skip=0")
"""For all arms: the evaluation by which their settings were chosen and compared."""
IMITATION_EPISODES = 2000
"""Demonstrations of the imitation control; recording and imitating them takes about as long as the RL run."""

_GRPO = (
    "trainer.loss.name=grpo", "trainer.loss.raft_versions=0", "trainer.minibatches=2",
    "trainer.optimizer.learning_rate=3e-4", "tasks.max_steps=6", "evaluation.blank_images=false", "trainer.updates=30",
)  # fmt: skip
"""Settings of the arms that compare normalizers, with longer episodes, since normalizers differ by length.

The constant 2 is about the mean number of steps, so that gradients and their clipping are similar in both arms."""
_IMITATION = (
    "trainer.updates=0", "evaluation.before=false", f"trainer.warm_start.demonstrations={IMITATION_EPISODES}",
    "trainer.warm_start.epochs=2", "trainer.warm_start.samples_per_update=16",
    "trainer.warm_start.learning_rate=1e-3", "rollout.context.rounds=4",
)  # fmt: skip
"""Settings of the arms that compare context policies: imitation, four screenshots in a prompt."""

ARMS: dict[str, tuple[str, ...]] = {
    "rewards": (),
    "shuffled": ("trainer.loss.shuffle_advantages=true",),
    "imitation": (
        "trainer.updates=0",
        "evaluation.before=false",
        f"trainer.warm_start.demonstrations={IMITATION_EPISODES}",
        "trainer.warm_start.premature_submit_probability=0.6",
        "trainer.warm_start.epochs=2",
        "trainer.warm_start.samples_per_update=16",
        "trainer.warm_start.learning_rate=1e-3",
    ),
    "constant": (*_GRPO, "trainer.loss.normalizer=constant", "trainer.loss.normalizer_constant=2"),
    "per_trajectory": (*_GRPO, "trainer.loss.normalizer=per_trajectory"),
    "sliding": (*_IMITATION, "rollout.context.policy=sliding"),
    "append": (*_IMITATION, "rollout.context.policy=append"),
}
DEFAULT_ARMS = ("rewards", "shuffled", "imitation")
COLOURS = dict(zip(ARMS, (BLUE, GREY, ORANGE, GREEN, "#8f5ba8", "#7a7a7a", "#b0803a"), strict=True))
LAST_UPDATES = 5
"""First or last updates of a run over which its figures are averaged."""


@dataclass(frozen=True)
class ArmResult:
    """Result of one run. Steps and tokens are means of the last LAST_UPDATES updates; None without updates."""

    arm: str
    seed: int
    before: float | None  # greedy success; None if not evaluated
    after: float
    gain: Mapping[str, Any] | None  # mean and 95 % interval
    pixels: Mapping[str, Any] | None  # the same, compared with blank images
    minutes: float  # of the whole job
    sampled: tuple[tuple[int, float], ...]  # version, success of all sampled episodes
    entropy: tuple[float, float] | None  # of the first and of the last updates
    steps_success: float | None
    steps_failure: float | None
    tokens_per_step: float | None
    clipped: float | None  # fraction of tokens


def read_result(arm: str, seed: int, run: Path, before: float | None, seconds: float) -> ArmResult:
    """Read the result of a run; `before` is used if the run did not evaluate its initial weights."""
    content = summary.read_summary(run)
    evaluation, updates = content["evaluation"], content["updates"]
    first, late = updates[:LAST_UPDATES], updates[-LAST_UPDATES:]

    def mean(part: Sequence[Mapping[str, Any]], name: str) -> float | None:
        values = [u["extra"][name] for u in part if u["extra"].get(name) is not None]
        return sum(values) / len(values) if values else None

    sampled = [(u["version"] - 1, u["extra"].get("rollout_success_rate")) for u in updates]
    entropy = mean(first, "entropy"), mean(late, "entropy")
    return ArmResult(
        arm=arm,
        seed=seed,
        before=evaluation["before"]["success_of_judged"] if evaluation["before"] else before,
        after=evaluation["after"]["success_of_judged"],
        gain=evaluation["gain"],
        pixels=evaluation["image_gain"],
        minutes=seconds / 60,
        sampled=tuple((version, rate) for version, rate in sampled if rate is not None),
        entropy=None if entropy[0] is None or entropy[1] is None else (entropy[0], entropy[1]),
        steps_success=mean(late, "steps_mean/success"),
        steps_failure=mean(late, "steps_mean/failure"),
        tokens_per_step=sum(u["response_tokens_mean"] for u in late) / len(late) if late else None,
        clipped=sum(u["clip_fraction"] for u in updates) / len(updates) if updates else None,
    )  # fmt: skip


def show(outcomes: Sequence[ArmResult], console: Console) -> None:
    """Print the table."""
    table = Table(title="Greedy success on held-out tasks", title_justify="left")
    for column in ("arm", "seed", "before", "after", "gain, 95 %", "over blank images", "sampled, first and last",
                   "entropy", "steps: success / failure", "tokens a step", "minutes"):  # fmt: skip
        table.add_column(column, justify="left" if column == "arm" else "right")
    for each in outcomes:
        rates = [rate for _, rate in each.sampled]
        table.add_row(
            each.arm, str(each.seed), _percent(each.before), _percent(each.after), _points(each.gain),
            _points(each.pixels),
            f"{_percent(_mean(rates[:LAST_UPDATES]))} {_percent(_mean(rates[-LAST_UPDATES:]))}",
            "-" if each.entropy is None else f"{each.entropy[0]:.2f} {each.entropy[1]:.2f}",
            f"{_number(each.steps_success)} / {_number(each.steps_failure)}", _number(each.tokens_per_step),
            f"{each.minutes:.1f}",
        )  # fmt: skip
    console.print(table)


def draw(outcomes: Sequence[ArmResult]) -> str:
    """Success of sampled episodes over versions, a line for each run, as SVG."""
    by_arm: dict[str, list[ArmResult]] = defaultdict(list)
    for each in outcomes:
        if len(each.sampled) > 1:
            by_arm[each.arm].append(each)

    def panel(axes: Axes) -> None:
        subtitle = f"means of five updates, {CONFIG.stem}"
        add_titles(axes, "Success of sampled episodes", subtitle, "version", "success rate")
        for arm, runs in by_arm.items():
            after = sum(run.after for run in runs) / len(runs)
            for number, run in enumerate(runs):
                versions, rates = zip(*moving_average(run.sampled), strict=True)
                label = "" if number else f"{arm}, greedy after: {after:.0%}"
                axes.plot(versions, rates, color=COLOURS[arm], label=label)
        axes.set_xlim(0)
        axes.set_ylim(0, 1)
        if by_arm:
            add_legend(axes)

    return render_svg([panel])


def measure(arms: Sequence[str], seeds: Sequence[int], before: float | None, console: Console) -> Iterator[ArmResult]:
    """Run all arms, one after another. `before`: success of the initial weights, if known. Raises RuntimeError."""
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as temporary:
        for seed in seeds:
            for arm in arms:
                console.print(f"{arm}, seed {seed} ...")
                overrides = [*EVALUATION, *ARMS[arm], f"run.seed={seed}", "tracking.episodes_gib=0"]
                started = time.monotonic()
                run = run_job(CONFIG, f"{arm}-{seed}", overrides, Path(temporary))
                found = read_result(arm, seed, run, before, time.monotonic() - started)
                before = found.before
                console.print(f"  greedy success {_percent(found.before)} -> {_percent(found.after)}")
                yield found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=DEFAULT_ARMS, metavar="NAME", help=", ".join(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N", help="one run of each arm per seed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, after each run")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE", help="figures of earlier calls")
    parser.add_argument("--plots", type=Path, metavar="FILE", help="draw the curves as SVG")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        found = [ArmResult(**line) for path in options.add for line in json.loads(path.read_text())["runs"]]
        before = next((each.before for each in found if each.before is not None), None)
        for each in measure(options.arms, options.seeds, before, console):
            found.append(each)
            if options.json:  # after each run, since the next takes long
                write_results(found, options.json)
        if options.json:
            write_results(found, options.json)
    except (RuntimeError, OSError) as error:
        sys.exit(f"bench.learning: {error}")
    show(found, console)
    if options.plots:
        options.plots.write_text(draw(found))


def write_results(outcomes: Sequence[ArmResult], path: Path) -> None:
    """Write figures to a file. Raises OSError."""
    content = {"cpus": os.cpu_count(), "load": os.getloadavg(), "runs": [asdict(each) for each in outcomes]}
    write_json(path, content)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _points(gain: Mapping[str, Any] | None) -> str:
    if gain is None:
        return "-"
    low, high = gain["interval"]
    return f"{100 * gain['mean']:+.0f} ({100 * low:+.0f} to {100 * high:+.0f})"


if __name__ == "__main__":
    main()
