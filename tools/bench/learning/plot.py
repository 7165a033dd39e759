"""Sampled success over versions, as SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from tools.bench.learning.arms import CONFIG
from tools.bench.learning.figures import success_figures
from tools.bench.learning.runs import Run
from tools.draw_learning import moving_average
from tools.plot import BLUE, GREEN, GREY, ORANGE, add_legend, add_titles, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, GREY, ORANGE, GREEN, "#8f5ba8", "#7a7a7a", "#b0803a")


def draw(runs: Sequence[Run]) -> str:
    """Success of sampled episodes, a line for each run with updates, a colour for each arm."""
    by_arm: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if len(run.sampled) > 1:
            by_arm[run.arm].append(run)

    def panel(axes: Axes) -> None:
        subtitle = f"means of five updates, {CONFIG.stem}"
        add_titles(axes, "Success of sampled episodes", subtitle, "version", "success rate")
        for (arm, members), colour in zip(by_arm.items(), cycle(COLOURS)):
            after = success_figures([run.evaluations for run in members])["after"]
            label = f"{arm}, after: {after.value:.0%}" if after else arm
            for number, run in enumerate(members):
                versions, rates = zip(*moving_average(run.sampled), strict=True)
                axes.plot(versions, rates, color=colour, label="" if number else label)
        axes.set_xlim(0)
        axes.set_ylim(0, 1)
        if by_arm:
            add_legend(axes)

    return render_svg([panel])
