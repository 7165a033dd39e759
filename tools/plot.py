"""Figures as SVG, drawn by matplotlib in one style. matplotlib is imported when the first figure is drawn."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 2
WINDOW = 5  # points of a moving average
WIDTH, HEIGHT = 5.0, 3.8  # inches of one plot
BLUE, GREY, ORANGE, GREEN = "#2a6f97", "#a0a0a0", "#d1803a", "#58944f"
BLACK, LIGHT_GREY, DARK_GREY = "#222222", "#dddddd", "#666666"

_STYLE: Any = {  # matplotlib types the keys as one long literal
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "megatron_webrl",  # the same figure gives the same bytes
    "figure.constrained_layout.w_pad": 0.15,  # inches
    "figure.constrained_layout.h_pad": 0.15,
    "font.size": 9,
    "text.color": BLACK,
    "axes.edgecolor": BLACK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelcolor": DARK_GREY,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": LIGHT_GREY,
    "legend.frameon": False,
    "xtick.color": BLACK,
    "ytick.color": BLACK,
    "ytick.left": False,
}


def render_svg(panels: Sequence[Callable[[Axes], None]], size: tuple[float, float] = (WIDTH, HEIGHT)) -> str:
    """The figure as SVG: each function draws on axes of its own, two side by side. `size`: of one plot, inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    with rc_context(_STYLE):
        figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
        for number, panel in enumerate(panels, 1):
            panel(figure.add_subplot(rows, columns, number))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def add_titles(axes: Axes, title: str, subtitle: str, x_label: str = "", y_label: str = "") -> None:
    axes.set_title(title, loc="left", weight="bold", fontsize=11, pad=20)
    axes.annotate(
        subtitle, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", color=DARK_GREY, fontsize=8
    )
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)


def add_legend(axes: Axes, columns: int = 2) -> None:
    """A legend below the plot, where it covers no data."""
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=columns, borderaxespad=0, fontsize=8)


def moving_average(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each point with the mean of its value and up to WINDOW - 1 earlier ones."""
    averaged = []
    for number, (x, _) in enumerate(points):
        recent = [value for _, value in points[max(0, number + 1 - WINDOW) : number + 1]]
        averaged.append((x, sum(recent) / len(recent)))
    return averaged
