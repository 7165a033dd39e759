"""The figures of an experiment's runs, read from their folders, and their table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_webrl.config.load import parse_config
from megatron_webrl.monitor.progress import trained_episodes
from megatron_webrl.track import summary
from megatron_webrl.track.evaluations import EvaluationResult, evaluation_name, read_evaluations, read_results
from megatron_webrl.trainer.metrics.group_statistics import GROUP_KINDS
from tools.bench.bootstrap import Interval, crossed_interval
from tools.plot import BLUE, GREEN, GREY, ORANGE, add_legend, add_titles, moving_average, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EVALUATED: dict[str, tuple[str, Mapping[str, int]]] = {
    "before": ("success", {"before": 1}),
    "after": ("success", {"after": 1}),
    "gain": ("success", {"after": 1, "before": -1}),
    "gain_of_all": ("success_of_all", {"after": 1, "before": -1}),
    "blind_gain": ("success", {"after_blank_images": 1, "before_blank_images": -1}),
    "seeing_gain": (
        "success",
        {"after": 1, "before": -1, "after_blank_images": -1, "before_blank_images": 1},
    ),
    "greedy_before": ("success", {"before_greedy": 1}),
    "greedy_after": ("success", {"after_greedy": 1}),
    "tokens": ("tokens", {"after": 1}),
}
"""Columns of evaluations: what is summed, and its weight in each of them; they have a value for each task."""
POINTS = ("gain", "gain_of_all", "blind_gain", "seeing_gain")
SHARES = (
    "before", "after", "greedy_before", "greedy_after", "trains", "waits", "syncs", "engine_idle", "wasted",
    "wasted_with_signal", "format_error_rate", "gradient_clipped",
)  # fmt: skip
UNTIL_SUCCESS = ("minutes", "updates", "trained", "sampled")  # at least these where the success was not reached
LOSS = 0.03  # of success, beyond which an environment counts as lost
COLOURS = (BLUE, GREY, ORANGE, GREEN, "#8f5ba8", "#7a7a7a", "#b0803a")


@dataclass(frozen=True)
class Target:
    """When a run ends, and from which update on it is counted."""

    success: float | None = None  # share of sampled episodes, mean of `window` updates; None: after all updates
    window: int = 5
    skipped_updates: int = 0


@dataclass(frozen=True)
class Task:
    """A held-out task of an evaluation, means over its samples with a verdict; None without one."""

    environment: str
    success: float | None
    tokens: float | None  # response tokens of an episode
    success_of_all: float  # of all samples, those without a verdict and missing ones as failures


@dataclass(frozen=True)
class Run:
    """One finished run."""

    arm: str
    seed: int
    reached: bool | None  # the success of the target; None: it has none
    figures: Mapping[str, float]  # by column; without those that the run does not have
    tasks: Mapping[str, Mapping[int, Task]]  # by evaluation, by index
    sampled: Sequence[tuple[int, float]]  # version, success of all episodes that it sampled


def smoothed_success(updates: Sequence[Mapping[str, Any]], window: int) -> list[float | None]:
    """Success over the last `window` updates at the end of each: successes / episodes of all complete groups.

    Also of groups that are dropped for lack of variance or as stale, so that the choice of the training batch does not
    bias the rate. None for the first `window` - 1 updates, and without an episode.
    """
    found: list[float | None] = []
    for number in range(1, len(updates) + 1):
        recent = [update["extra"] for update in updates[max(0, number - window) : number]]
        counts = [int(extra.get("rollout_episodes", 0)) for extra in recent]
        rates = [extra.get("rollout_success_rate") or 0.0 for extra in recent]
        episodes: int = sum(counts)
        total = sum(count * rate for count, rate in zip(counts, rates, strict=True))
        found.append(total / episodes if number >= window and episodes else None)
    return found


def updates_to_success(updates: Sequence[Mapping[str, Any]], target: Target) -> int | None:
    """The number of the first update at whose end the smoothed success is reached; None: never."""
    if target.success is None:
        return None
    curve = smoothed_success(updates, target.window)
    return next((number for number, rate in enumerate(curve, 1) if rate is not None and rate >= target.success), None)


def has_reached(updates: Sequence[Mapping[str, Any]], target: Target) -> bool:
    return updates_to_success(updates, target) is not None


def read_run(arm: str, seed: int, folder: Path, target: Target, metric: str, columns: Sequence[str]) -> Run:
    """The figures of a finished job. Raises RuntimeError if its accounting does not match."""
    accounting = summary.read_summary(folder)["accounting"]
    if accounting and not accounting["matches"]:
        raise RuntimeError(f"the accounting of {folder} does not match: {accounting}")
    updates, last = summary.read_updates(folder), updates_to_success(summary.read_updates(folder), target)
    lines = {evaluation_name(line["kind"], line["variant"]): line for line in read_evaluations(folder)}
    results = {name: read_results(folder, line) for name, line in lines.items()}
    figures = _update_figures(updates[:last], target.skipped_updates, parse_config(folder / "config.yaml"))
    if accounting and "tokens" in accounting:
        figures |= _wasted(accounting["tokens"]["trained"], accounting["tokens"]["dropped"])
    evaluated = results.get("after") or results.get("before", [])
    for outcome in ("success", "failure"):
        if steps := [each.steps for each in evaluated if each.outcome == outcome]:
            figures[f"{outcome}_steps"] = fmean(steps)
    for name in (*columns, metric):
        of, _, count = name.partition("@")
        recent = updates[-int(count) :] if count else updates[target.skipped_updates : last]
        values = [value for each in recent if (value := (each["extra"] | each).get(of)) is not None]
        if name not in figures and values:
            figures[name] = fmean(values)
    rates = [(each["version"] - 1, each["extra"].get("rollout_success_rate")) for each in updates]
    return Run(
        arm=arm, seed=seed, reached=None if target.success is None else last is not None, figures=figures,
        tasks={name: _tasks(each, lines[name]) for name, each in results.items()},
        sampled=[(version, rate) for version, rate in rates if rate is not None],
    )  # fmt: skip


def _update_figures(updates: Sequence[Mapping[str, Any]], skipped: int, config: Any) -> dict[str, float]:
    """What happened from the start of the first update, or from the end of the skipped ones, to the end of the last."""
    counted = updates[skipped:]
    if not counted:
        return {}
    parts = ("wait", "train", "sync")
    first = updates[0]["finished_at"] - sum(updates[0]["seconds"][part] for part in parts)
    seconds = counted[-1]["finished_at"] - (updates[skipped - 1]["finished_at"] if skipped else first)
    trained = sum(trained_episodes(update, config.rollout.group_size) for update in counted)
    shares = {part: sum(update["seconds"][part] for update in counted) / seconds for part in parts}
    return {
        "minutes": seconds / 60, "updates": len(counted), "trained": trained, "per_hour": 3600 * trained / seconds,
        "sampled": sum(int(update["extra"].get("rollout_episodes", 0)) for update in counted),
        "staleness": fmean(update["staleness_mean"] for update in counted),
        "trains": shares["train"], "waits": shares["wait"], "syncs": shares["sync"],
        "engine_idle": fmean(update["extra"].get("engine/idle_fraction", 0.0) for update in counted),
    }  # fmt: skip


def _wasted(trained: int, dropped: Mapping[str, int]) -> dict[str, float]:
    """Shares of the response tokens of the whole run that were not trained; with signal: but for groups of one outcome,
    which the algorithm drops.
    """
    total = trained + sum(dropped.values())
    signal = sum(count for reason, count in dropped.items() if reason not in GROUP_KINDS)
    return {"wasted": sum(dropped.values()) / total, "wasted_with_signal": signal / total} if total else {}


def _tasks(results: Sequence[EvaluationResult], line: Mapping[str, Any]) -> dict[int, Task]:
    """The tasks of an evaluation, those without a result included; `line`: of evaluations.jsonl."""
    by_index: dict[int, list[EvaluationResult]] = defaultdict(list)
    for result in results:
        by_index[result.index].append(result)
    tasks = {}
    for index in range(line["first_task"], line["first_task"] + line["tasks_requested"]):
        each = by_index[index]
        judged, successes = [e for e in each if e.has_verdict], sum(e.outcome == "success" for e in each)
        tasks[index] = Task(
            environment=each[0].environment if each else "", success=successes / len(judged) if judged else None,
            tokens=fmean(e.response_tokens for e in judged) if judged else None,
            success_of_all=successes / line["samples"],
        )  # fmt: skip
    return tasks


def values(runs: Sequence[Run], run: Run, column: str) -> dict[int, float]:
    """The values of a run: of each task, or one. Empty without.

    A task without a verdict in one of the evaluations is left out of all columns but those of all episodes, so that
    they add up. The initial weights were evaluated by another run of the same seed.
    """
    if column not in EVALUATED:
        return {0: run.figures[column]} if column in run.figures else {}
    evaluations = evaluations_of(runs, run)
    what, weights = EVALUATED[column]
    if not weights.keys() <= evaluations.keys():
        return {}
    sums: dict[int, float] = {}
    for index in sorted(set.intersection(*(set(tasks) for tasks in evaluations.values()))):
        tasks = {name: each[index] for name, each in evaluations.items()}
        if what == "success_of_all" or all(task.success is not None for task in tasks.values()):
            sums[index] = sum(weight * getattr(tasks[name], what) for name, weight in weights.items())
    return sums


def evaluations_of(runs: Sequence[Run], run: Run) -> dict[str, Mapping[int, Task]]:
    """The evaluations of a run, and those before training of its seed."""
    initial = next((each.tasks for each in runs if each.arm == "before" and each.seed == run.seed), {})
    return {**initial, **run.tasks}


def arm_figures(runs: Sequence[Run], arm: str, column: str) -> Interval | None:
    """Mean over seeds and the tasks that they share, with its interval; None without a value of each seed."""
    table = _table([values(runs, run, column) for run in runs if run.arm == arm])
    return crossed_interval(table) if table.size else None


def compared_figures(runs: Sequence[Run], arm: str, peer: str, column: str) -> Interval | None:
    """`arm` compared with `peer`: a difference of shares, else a ratio. Over the seeds and tasks that both have.

    The interval of a ratio is that of its logarithm, linearised at the means. None without a common seed and task,
    where a run did not reach the success, and for a ratio of 0.
    """
    rows: list[list[dict[int, float]]] = [[], []]
    for seed in sorted({run.seed for run in runs}):
        pair = [next((run for run in runs if (run.arm, run.seed) == (name, seed)), None) for name in (arm, peer)]
        if any(run is not None and column in UNTIL_SUCCESS and run.reached is False for run in pair):
            return None
        found = [values(runs, run, column) if run else {} for run in pair]
        if all(found):
            for row, each in zip(rows, found, strict=True):
                row.append(each)
    both = _table([*rows[0], *rows[1]])
    if not both.size:
        return None
    ours, theirs = np.split(both, 2)
    if column in SHARES or column in POINTS:
        return crossed_interval(ours - theirs)
    if min(ours.mean(), theirs.mean()) <= 0:
        return None
    ratio, relative = ours.mean() / theirs.mean(), crossed_interval(ours / ours.mean() - theirs / theirs.mean())
    return Interval(float(ratio), *(float(ratio * np.exp(end)) for end in (relative.low, relative.high)))


def _table(rows: Sequence[Mapping[int, float]]) -> np.ndarray:
    """Values by task, of one row each: those of the tasks that all rows have, float64 [rows, tasks]."""
    common = sorted(set.intersection(*map(set, rows))) if rows else []
    return np.array([[row[task] for task in common] for row in rows], np.float64)


def reported_columns(runs: Sequence[Run], arms: Sequence[str], columns: Sequence[str]) -> list[str]:
    """The columns with a value, and after the gain of judged episodes that of all where the two differ."""
    found = []
    for column in columns:
        figures = [arm_figures(runs, arm, column) for arm in arms]
        found += [column] if any(figures) else []
        if column == "gain" and figures != [arm_figures(runs, arm, "gain_of_all") for arm in arms]:
            found.append("gain_of_all")
    return found


def lost_environments(runs: Sequence[Run], arm: str) -> dict[str, float]:
    """Change of the sampled success of the environments that lost more than LOSS, mean over tasks and then seeds."""
    changes: dict[str, list[float]] = defaultdict(list)
    for run in (run for run in runs if run.arm == arm):
        tasks, by_environment = evaluations_of(runs, run).get("before", {}), defaultdict(list)
        for index, gain in values(runs, run, "gain").items():
            by_environment[tasks[index].environment].append(gain)
        for environment, gains in by_environment.items():
            changes[environment].append(fmean(gains))
    return {name: fmean(each) for name, each in sorted(changes.items()) if fmean(each) < -LOSS - 1e-9}


def show(
    runs: Sequence[Run], arms: Sequence[str], columns: Sequence[str], metrics: Mapping[str, str], console: Console
) -> None:
    """Print a row for each arm."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    with_tasks, with_metric = "gain" in columns, any(metrics.get(arm) for arm in arms)
    reaching = any(run.reached is not None for run in runs)
    names = ["arm", "seeds", *(["reached"] if reaching else []), *columns]
    names += [f"lost over {100 * LOSS:.0f} points"] if with_tasks else []
    for name in [*names, *(["metric"] if with_metric else [])]:
        table.add_column(name, justify="left" if name == "arm" else "right", overflow="fold")
    for arm in arms:
        members = [run for run in runs if run.arm == arm]
        cells = [arm, " ".join(str(run.seed) for run in members)]
        cells += [f"{sum(run.reached is True for run in members)} of {len(members)}"] if reaching else []
        for column in columns:
            bound = reaching and column in UNTIL_SUCCESS and not all(run.reached for run in members)
            cells.append(("≥ " if bound else "") + cell(arm_figures(runs, arm, column), column))
        if with_tasks:
            lost = lost_environments(runs, arm)
            cells.append(", ".join(f"{name} {100 * change:.0f}" for name, change in lost.items()) or "none")
        if with_metric:
            metric = metrics.get(arm, "")
            cells.append(f"{metric} {cell(arm_figures(runs, arm, metric), '')}" if metric else "")
        table.add_row(*cells)
    console.print(table)
    console.print(
        "95 % intervals in brackets: bootstrap crossed over seeds and their common tasks, with one seed over tasks "
        "alone; shares in percent, gains in points; gain_of_all: an episode without a verdict is a failure; metric: of "
        "the arm, mean over updates; ≥: a run did not reach the success",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def compare_arms(
    runs: Sequence[Run], arms: Sequence[str], arm: str, columns: Sequence[str], console: Console
) -> dict[str, dict[str, Any]]:
    """Print the arm compared with each other one; returns the figures."""
    found: dict[str, dict[str, Any]] = {}
    for peer in arms if arm in arms else ():
        for column in columns if peer != arm else ():
            if interval := compared_figures(runs, arm, peer, column):
                points = column in SHARES or column in POINTS
                text = cell(interval, POINTS[0] if points else "ratio")
                how = f"{arm} less {peer}, points" if points else f"{arm} / {peer}"
                console.print(f"{column}: {how}: {text}", highlight=False)
                found.setdefault(peer, {})[column] = asdict(interval)
    return found


def cell(interval: Interval | None, column: str) -> str:
    """A value with its interval, if it has one."""
    if interval is None:
        return "-"
    scale, form = 1, ".3g" if abs(interval.value) < 1000 else ".0f"
    if column in POINTS or column in SHARES:
        scale, form = 100, "+.1f" if column in POINTS else ".1f"
    value, low, high = (f"{scale * each:{form}}" for each in (interval.value, interval.low, interval.high))
    return value if low == high else f"{value} ({low} to {high})"


def draw(runs: Sequence[Run], name: str) -> str:
    """Success of sampled episodes, a line for each run with updates, a colour for each arm."""
    by_arm: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if len(run.sampled) > 1:
            by_arm[run.arm].append(run)

    def panel(axes: Axes) -> None:
        add_titles(axes, "Success of sampled episodes", f"means of five updates, {name}", "version", "success rate")
        for (arm, members), colour in zip(by_arm.items(), cycle(COLOURS)):
            for number, run in enumerate(members):
                xs, ys = zip(*moving_average(run.sampled), strict=True)
                axes.plot(xs, ys, color=colour, label="" if number else arm)
        axes.set_xlim(0)
        axes.set_ylim(0, 1)
        if by_arm:
            add_legend(axes)

    return render_svg([panel])
