"""Effect of the decoupled objective on stale groups: clipped tokens and variance of the gradient.

    python -m tools.bench.staleness [--quick] [--updates N] [--keep FOLDER] [--json FILE] [--plots FILE]
    python -m tools.bench.staleness --run FOLDER [--quick] [--json FILE] [--plots FILE]

First a job runs the quickstart's tasks and model with GRPO and rollout.mode=sync, and keeps a checkpoint and the
trained groups of every version. Then, offline: each version with enough earlier versions repeats its update with the
groups of each of them, once with the decoupled objective and once with ratios against the behaviour policy. Weights,
optimiser, groups and minibatches are equal; only trainer.loss.decoupled differs. --run measures the files of an
earlier job.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.table import Table

from megatron_webrl.config.loss import OffPolicyLossConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.ring.segment import RecordError
from megatron_webrl.track import summary
from megatron_webrl.trainer.data import replay_buffer
from tools.arguments import make_bench_parser, write_json
from tools.bench import recorded_groups
from tools.bench.jobs import run_job
from tools.bench.learning.arms import CONFIG, GRPO
from tools.bench.ranks import staleness_rank
from tools.bench.ranks.staleness_rank import ObjectiveComparison, UpdateStats, checkpoint_path
from tools.plot import BLUE, GREY, add_legend, add_titles, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOAL_AT, GOAL = 2, 2.0
"""Goal: at this staleness decoupling divides both figures by GOAL."""

SECONDS = 600.0  # limit of one measurement, with the time to load
GRADIENT_TOLERANCE = 1e-3  # relative; without staleness and clipping both objectives have the same gradient
CLIPPED_TOLERANCE = 0.005  # fraction of tokens that may differ between log-probabilities of engine and trainer
NORM_TOLERANCE = 0.01  # relative; of a repeated update of the job
MAX_LOGPROB_MISMATCH = 0.05  # of log-probabilities; a quarter of the clipping range

FIGURES: dict[str, Callable[[UpdateStats], float]] = {
    "clip-trigger rate": lambda arm: arm.clipped,
    "gradient variance": lambda arm: arm.variance,
    "trace of covariance": lambda arm: arm.trace,
}
GOAL_FIGURES, TRACE = ("clip-trigger rate", "gradient variance"), "trace of covariance"
"""Keys of FIGURES: those with a goal, and one that is shown in addition."""


@dataclass(frozen=True)
class StalenessBenchSize:
    """Size of the benchmark."""

    updates: int
    staleness: int  # the highest


FULL = StalenessBenchSize(updates=13, staleness=8)
QUICK = StalenessBenchSize(updates=3, staleness=2)


@dataclass(frozen=True)
class MeanAndRange:
    """Mean and range of one figure over the measured versions."""

    mean: float
    low: float
    high: float


def overrides(updates: int) -> list[str]:
    """Settings of the job that differ from the quickstart."""
    return [
        *GRPO,
        "trainer.loss.normalizer=constant",
        "trainer.loss.normalizer_constant=2",  # about the mean number of steps
        "tasks.max_steps=6",
        "trainer.optimizer.schedule=constant",
        "rollout.mode=sync",
        f"trainer.updates={updates}",
        "trainer.checkpoint.every=1",
        f"trainer.checkpoint.keep={updates}",
        "tracking.keep_records=true",
        "tracking.episodes_gib=0",
        *(f"evaluation.{name}=false" for name in ("before", "after", "blank_images", "greedy")),
    ]


def measure(folder: Path, depth: int, console: Console) -> list[ObjectiveComparison]:
    """Measure all versions of a run that have groups of staleness 0 to `depth`. Raises RuntimeError."""
    config = staleness_rank.run_config(folder)
    check_run(config)
    versions = complete_versions(folder, config, depth)
    for version in sorted({version - behind for version in versions for behind in range(depth + 1)}):
        check_records(config, version)
    updates = {update["version"]: update for update in summary.read_updates(folder)}
    decoupled = cast(OffPolicyLossConfig, config.trainer.loss).decoupled
    found: list[ObjectiveComparison] = []
    for version in versions:
        with closing(_measured(folder, version, range(depth + 1))) as pairs:
            for pair in pairs:
                if pair.staleness == 0:
                    check_fresh(pair)
                    check_repeated(pair, updates.get(version + 1), decoupled)
                found.append(pair)
                console.print(f"version {version}, staleness {pair.staleness}: done", highlight=False)
    return found


def check_run(config: Config) -> None:
    """Raise RuntimeError for a run whose updates cannot be repeated here."""
    loss, run = config.trainer.loss, config.run_folder
    if config.rollout.mode != "sync":
        raise RuntimeError(f"{run} has rollout.mode={config.rollout.mode}: its groups are stale already; use sync")
    if loss.imitates_successes:
        raise RuntimeError(f"{run} has trainer.loss.name={loss.name}, which trains successes only; use grpo or gspo")
    if loss.kl_coefficient:
        raise RuntimeError(f"{run} has trainer.loss.kl_coefficient={loss.kl_coefficient}; use a run without reference")
    if config.trainer_world_size > 1:
        raise RuntimeError(f"{run} was trained by {config.trainer_world_size} ranks; use a run of one")


def complete_versions(folder: Path, config: Config, depth: int) -> list[int]:
    """Versions with a checkpoint and with groups of this and the `depth` earlier versions. Raises RuntimeError."""
    kept = {version for version, _ in replay_buffer.list_group_files(config.records_folder)}
    found = [
        version
        for version in sorted(kept)
        if kept.issuperset(range(version - depth, version))
        and (checkpoint_path(folder, version) / "state.json").is_file()
    ]
    if not found:
        raise RuntimeError(
            f"{folder} has no version with a checkpoint and the groups of {depth + 1} versions in records/ "
            f"(there: {len(kept)}); run at least {depth + 1} updates with tracking.keep_records=true, "
            "trainer.checkpoint.every=1 and trainer.checkpoint.keep as high"
        )
    return found


def check_records(config: Config, version: int) -> None:
    """Raise RuntimeError unless all tokens of a version's groups were generated by that version."""
    path = replay_buffer.group_file_path(config.records_folder, version)
    trained = [t for group in recorded_groups.read_groups(path) for t in group.trajectories if t.trainable]
    token_versions = {int(v) for t in trained for step in t.steps for v in step.versions}
    if token_versions != {version}:
        raise RuntimeError(f"{path} has tokens of versions {sorted(token_versions)}, not of {version} alone")


def check_fresh(pair: ObjectiveComparison) -> None:
    """Raise RuntimeError if decoupling changes an update without staleness."""
    where = f"version {pair.version}, staleness 0"
    if pair.logprob_mismatch is None or not pair.logprob_mismatch <= MAX_LOGPROB_MISMATCH:
        raise RuntimeError(
            f"{where}: behaviour and trainer differ by {pair.logprob_mismatch}, the limit is {MAX_LOGPROB_MISMATCH}"
        )
    if not pair.difference <= GRADIENT_TOLERANCE:
        raise RuntimeError(f"{where}: gradients differ by {pair.difference:.2g}, the limit is {GRADIENT_TOLERANCE}")
    one, other = pair.decoupled.clipped, pair.coupled.clipped
    if not abs(one - other) <= CLIPPED_TOLERANCE:
        raise RuntimeError(
            f"{where}: {one:.2%} and {other:.2%} of tokens are clipped, the limit is {CLIPPED_TOLERANCE:.2%}"
        )


def check_repeated(pair: ObjectiveComparison, update: Mapping[str, Any] | None, decoupled: bool) -> None:
    """Raise RuntimeError if an update repeated from its checkpoint differs from the job's."""
    if update is None:
        raise RuntimeError(f"updates.jsonl has no update from version {pair.version}")
    arm = pair.decoupled if decoupled else pair.coupled
    norm, clipped = update["extra"]["gradient_norm"], update["clip_fraction"]
    if not (abs(arm.gradient_norm - norm) <= NORM_TOLERANCE * norm and abs(arm.clipped - clipped) <= CLIPPED_TOLERANCE):
        raise RuntimeError(
            f"the update from version {pair.version} differs from the job's: gradient norm {arm.gradient_norm:g} "
            f"for {norm:g}, {arm.clipped:.2%} clipped for {clipped:.2%}"
        )


def _measured(folder: Path, version: int, staleness: Sequence[int]) -> Generator[ObjectiveComparison]:
    """Measure one version in a process of its own. Raises RuntimeError if it fails or takes too long."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = theirs, os.getpid(), folder, version, staleness
    process = context.Process(target=staleness_rank.serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        for behind in staleness:
            if not ours.poll(SECONDS):
                raise RuntimeError(f"version {version}, staleness {behind}: not finished within {SECONDS:.0f} s")
            yield ours.recv()
    except EOFError:
        raise RuntimeError(f"the process of version {version} ended; see its output above") from None
    finally:
        ours.close()
        process.join(5)
        process.kill()


def mean_and_range(
    pairs: Sequence[ObjectiveComparison], staleness: int, arm: str, figure: Callable[[UpdateStats], float]
) -> MeanAndRange:
    """A figure of one arm ("decoupled" or "coupled") over all versions."""
    values = [figure(getattr(pair, arm)) for pair in pairs if pair.staleness == staleness]
    return MeanAndRange(sum(values) / len(values), min(values), max(values))


def show(pairs: Sequence[ObjectiveComparison], console: Console) -> None:
    """Print a table for each figure, and whether the goals are met."""
    stale = sorted({pair.staleness for pair in pairs})
    clipping, variance = (
        {staleness: _cells(pairs, staleness, name, form) for staleness in stale}
        for name, form in zip(GOAL_FIGURES, (_percent, _number), strict=True)
    )
    capped = [
        f"{mean_and_range(pairs, staleness, 'decoupled', lambda arm: arm.capped).mean:.2%}" for staleness in stale
    ]
    traces = [_ratio(*_both(pairs, staleness, TRACE)) for staleness in stale]
    _print_table("Response tokens clipped, without and with decoupling", clipping, ("above cap", capped), console)
    _print_table("Variance of the gradient", variance, ("trace ratio", traces), console)
    for name in GOAL_FIGURES:
        console.print(_verdict(pairs, name), highlight=False, soft_wrap=True)
    console.print(
        f"versions measured: {len({pair.version for pair in pairs})}, means with lowest and highest; groups of an "
        f"update: {pairs[0].groups}; variance: trace of the covariance of the groups' gradients by the squared norm of "
        "their mean; ratio: without / with; above cap: tokens that decoupling leaves out or bounds",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def _print_table(
    title: str, cells: Mapping[int, Sequence[str]], last: tuple[str, Sequence[str]], console: Console
) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("stale", "without", "with", "ratio", last[0]):
        table.add_column(column, justify="right")
    for (staleness, texts), more in zip(cells.items(), last[1], strict=True):
        table.add_row(str(staleness), *texts, more)
    console.print(table)


def draw(pairs: Sequence[ObjectiveComparison]) -> str:
    """Both figures over staleness, as SVG: lines through means, a point for each version."""
    return render_svg([partial(_draw_figure, pairs=pairs, name=name) for name in GOAL_FIGURES])


def _draw_figure(axes: Axes, pairs: Sequence[ObjectiveComparison], name: str) -> None:
    figure = FIGURES[name]
    y_label = "fraction of response tokens" if name == GOAL_FIGURES[0] else "trace / squared mean"
    add_titles(axes, name.capitalize(), "one update, by staleness of its groups", "staleness, versions", y_label)
    stale = range(max(pair.staleness for pair in pairs) + 1)
    for arm, label, colour in (("coupled", "without decoupling", GREY), ("decoupled", "with decoupling", BLUE)):
        axes.plot(stale, [mean_and_range(pairs, s, arm, figure).mean for s in stale], color=colour, label=label)
        values = [figure(getattr(pair, arm)) for pair in pairs]
        axes.plot([pair.staleness for pair in pairs], values, "o", color=colour, markersize=4, alpha=0.6)
    axes.set_ylim(0, axes.get_ylim()[1] or 1)
    add_legend(axes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_bench_parser(__doc__, "three updates, staleness 0 to 2; figures mean little")
    parser.add_argument("--updates", type=int, metavar="N", help=f"updates of the job (default: {FULL.updates})")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="run the job there and keep its files for --run")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="measure this run instead of starting a job")
    parser.add_argument("--plots", type=Path, metavar="FILE", help="draw the figures as SVG")
    options = parser.parse_args(arguments)
    amount = QUICK if options.quick else FULL
    if options.run and (options.updates is not None or options.keep):
        parser.error("--run measures an existing run; --updates and --keep belong to a new job")
    updates = amount.updates if options.updates is None else options.updates
    if updates <= amount.staleness:
        parser.error(f"--updates={updates}: staleness {amount.staleness} needs at least {amount.staleness + 1}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        if options.run:
            pairs = measure(options.run, amount.staleness, console)
        else:
            pairs = _measure_job(options.keep, updates, amount.staleness, console)
    except (RuntimeError, OSError, ConfigError, RecordError) as error:
        sys.exit(f"bench.staleness: {error}")
    show(pairs, console)
    if options.plots:
        options.plots.write_text(draw(pairs))
    write_json(options.json, _figures(pairs))


def _measure_job(keep: Path | None, updates: int, depth: int, console: Console) -> list[ObjectiveComparison]:
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        console.print(f"a job of {updates} updates ...", highlight=False)
        return measure(run_job(CONFIG, "staleness", overrides(updates), folder), depth, console)


def _both(pairs: Sequence[ObjectiveComparison], staleness: int, name: str) -> tuple[MeanAndRange, MeanAndRange]:
    """A figure without and with decoupling."""
    return (
        mean_and_range(pairs, staleness, "coupled", FIGURES[name]),
        mean_and_range(pairs, staleness, "decoupled", FIGURES[name]),
    )


def _cells(
    pairs: Sequence[ObjectiveComparison], staleness: int, name: str, form: Callable[[MeanAndRange], str]
) -> tuple[str, str, str]:
    without, with_it = _both(pairs, staleness, name)
    return form(without), form(with_it), _ratio(without, with_it)


def _verdict(pairs: Sequence[ObjectiveComparison], name: str) -> str:
    without, with_it = _both(pairs, GOAL_AT, name)
    met = without.mean > 0 and GOAL * with_it.mean <= without.mean
    return (
        f"{name} at staleness {GOAL_AT}, without / with: {_ratio(without, with_it)} "
        f"(goal: halved at {GOAL_AT}: {'met' if met else 'missed'})"
    )


def _ratio(without: MeanAndRange, with_it: MeanAndRange) -> str:
    if not with_it.mean:
        return "inf" if without.mean else "-"
    return f"{without.mean / with_it.mean:.2f}"


def _percent(figure: MeanAndRange) -> str:
    return f"{figure.mean:.2%} ({100 * figure.low:.1f} to {100 * figure.high:.1f})"


def _number(figure: MeanAndRange) -> str:
    return f"{figure.mean:.2f} ({figure.low:.2f} to {figure.high:.2f})"


def _figures(pairs: Sequence[ObjectiveComparison]) -> Mapping[str, Any]:
    means = [
        {
            "staleness": staleness,
            **{name: dict(zip(("without", "with"), map(asdict, _both(pairs, staleness, name)), strict=True))
               for name in FIGURES},
        }
        for staleness in sorted({pair.staleness for pair in pairs})
    ]  # fmt: skip
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "means": means,
        "verdicts": [_verdict(pairs, name) for name in GOAL_FIGURES],
        "pairs": [asdict(pair) for pair in pairs],
    }


if __name__ == "__main__":
    main()
