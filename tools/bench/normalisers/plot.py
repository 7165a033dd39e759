"""The curves of all runs, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tools.bench.normalisers.runs import ARMS, Run
from tools.draw_learning import moving_average
from tools.plot import BLUE, GREEN, ORANGE, add_legend, add_titles, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(ARMS, (BLUE, ORANGE, GREEN), strict=True))


def draw(runs: Sequence[Run]) -> str:
    """Steps of failures, success of sampled episodes, and tokens per episode after training; a line for each run."""
    chosen = [run for run in runs if not run.control]
    return render_svg([
        lambda axes: _draw_curves(
            axes, chosen, "Steps of failures", "trained episodes", lambda run: [u.steps_failure for u in run.updates]
        ),
        lambda axes: _draw_curves(
            axes, chosen, "Success", "all sampled episodes", lambda run: [u.success for u in run.updates]
        ),
        lambda axes: _draw_curves(
            axes, chosen, "Response tokens of a step", "trained episodes of the last five updates, by step",
            lambda run: list(run.tokens_at_step), "step", smooth=False,
        ),
        lambda axes: _draw_tokens(axes, chosen),
    ])  # fmt: skip


def _draw_curves(
    axes: Axes, runs: Sequence[Run], title: str, subtitle: str, values: Callable[[Run], Sequence[float | None]],
    x_label: str = "version", smooth: bool = True,
) -> None:  # fmt: skip
    add_titles(axes, title, f"{subtitle}{', means of five updates' if smooth else ''}", x_label, "")
    labelled = set()
    for run in runs:
        points = [(n, value) for n, value in enumerate(values(run), 1) if value is not None]
        if points:
            xs, ys = zip(*(moving_average(points) if smooth else points), strict=True)
            axes.plot(xs, ys, color=COLOURS[run.arm], label="" if run.arm in labelled else run.arm)
            labelled.add(run.arm)
    axes.set_ylim(0)
    if labelled:
        add_legend(axes)


def _draw_tokens(axes: Axes, runs: Sequence[Run]) -> None:
    add_titles(axes, "Tokens per episode", "after training, at temperature 1; a point for each seed", "", "")
    arms = [arm for arm in ARMS if any(run.arm == arm and run.episodes for run in runs)]
    for place, arm in enumerate(arms):
        means = [
            sum(episode.tokens for episode in run.episodes) / len(run.episodes)
            for run in runs
            if run.arm == arm and run.episodes
        ]
        axes.plot([place] * len(means), means, "o", color=COLOURS[arm], clip_on=False)
    axes.set_xticks(range(len(arms)), arms)
    axes.set_xlim(-0.5, max(0.5, len(arms) - 0.5))
    axes.set_ylim(0)
