"""Draw the learning of a run: success, steps, entropy and staleness over policy versions.

Thin lines: each update; thick: the moving average. `python -m tools.draw_learning runs/quickstart learning.svg`
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.track import summary
from megatron_webrl.track.evaluations import BLANK_IMAGES, GREEDY, read_evaluations
from tools.plot import BLACK, BLUE, GREEN, GREY, ORANGE, add_legend, add_titles, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 5  # a point of a thick line is the mean of this update and of up to WINDOW - 1 before it
EVALUATION_ID = "evaluation-"  # start of the SVG id of the points of a kind of evaluation

_EVALUATION_STYLES = {  # by variant, else by kind; a greedy point is drawn below an equal one
    GREEDY: (GREY, "^"),
    "before": (ORANGE, "o"),
    "during": (GREEN, "o"),
    "after": (GREEN, "s"),
    BLANK_IMAGES: (BLACK, "o"),
}

Points = Sequence[tuple[float, float]]
Update = Mapping[str, Any]


def draw_svg(updates: Sequence[Update], evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The figure as SVG, from at least one update."""
    steps = [(u["version"], u["steps_mean"]) for u in updates]
    entropy = [(u["version"], u["extra"]["entropy"]) for u in updates if "entropy" in u["extra"]]
    last = float(updates[-1]["version"])
    return render_svg(
        [
            lambda axes: _draw_success(axes, updates, evaluations),
            lambda axes: _draw_curve(axes, "Steps", "mean of trained episodes", steps, last),
            lambda axes: _draw_curve(axes, "Entropy", "of the policy, nats per response token", entropy, last),
            lambda axes: _draw_staleness(axes, updates),
        ]
    )


def moving_average(points: Points) -> list[tuple[float, float]]:
    """Each point with the mean of its value and up to WINDOW - 1 earlier ones."""
    values = [value for _, value in points]
    averaged = []
    for number, (x, _) in enumerate(points):
        recent = values[max(0, number + 1 - WINDOW) : number + 1]
        averaged.append((x, sum(recent) / len(recent)))
    return averaged


def _draw_success(axes: Axes, updates: Sequence[Update], evaluations: Sequence[Mapping[str, Any]]) -> None:
    add_titles(
        axes, "Success", "of sampled episodes (lines); of evaluations, with 95 % intervals", "version", "success rate"
    )
    rates = [(u["version"] - 1, u["extra"].get("rollout_success_rate")) for u in updates]
    _draw_points_and_average(axes, [(version, rate) for version, rate in rates if rate is not None])
    for kind, (colour, marker) in _EVALUATION_STYLES.items():
        shown = [
            line for line in evaluations if (line["variant"] or line["kind"]) == kind and line["interval"] is not None
        ]
        if shown:
            versions, successes = [line["version"] for line in shown], [line["success_of_judged"] for line in shown]
            low, high = zip(*(line["interval"] for line in shown), strict=True)
            axes.vlines(versions, low, high, colors=colour, linewidth=2, clip_on=False)
            axes.plot(
                versions, successes, marker, color=colour, label=kind.replace("_", " "), gid=EVALUATION_ID + kind,
                clip_on=False,
            )  # fmt: skip
    _limit(axes, float(updates[-1]["version"]), 1)
    if axes.get_legend_handles_labels()[0]:
        add_legend(axes, columns=5)


def _draw_staleness(axes: Axes, updates: Sequence[Update]) -> None:
    add_titles(axes, "Staleness", "of trained episodes, by their oldest token", "version", "versions")
    versions = [u["version"] for u in updates]
    axes.plot(versions, [u["staleness_max"] for u in updates], color=GREY, label="maximum")
    axes.plot(versions, [u["staleness_mean"] for u in updates], color=BLUE, label="mean")
    _limit(axes, float(versions[-1]), 1.15 * max(1, *(u["staleness_max"] for u in updates)))
    add_legend(axes)


def _draw_curve(axes: Axes, title: str, subtitle: str, points: Points, last: float) -> None:
    add_titles(axes, title, subtitle, "version")
    _draw_points_and_average(axes, points)
    _limit(axes, last, 1.15 * max((value for _, value in points), default=0.0) or 1.0)


def _draw_points_and_average(axes: Axes, points: Points) -> None:
    for line, colour, width in ((points, GREY, 1), (moving_average(points), BLUE, 2)):
        axes.plot([x for x, _ in line], [y for _, y in line], color=colour, linewidth=width)


def _limit(axes: Axes, last: float, top: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, last)
    axes.set_ylim(0, top)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run with an update")
    parser.add_argument("output", type=Path, help="SVG file")
    options = parser.parse_args(arguments)
    options.output.write_text(draw_svg(summary.read_updates(options.run), read_evaluations(options.run)))


if __name__ == "__main__":
    main()
