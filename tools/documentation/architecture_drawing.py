"""The drawing of the system: what runs on each node, and what travels between its processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.plot import BLACK, BLUE, DARK_GREY, GREEN, ORANGE, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 100.0, 62.0


@dataclass(frozen=True)
class Box:
    """A process or a part of one: left, bottom, width, height, in units of the drawing."""

    x: float
    y: float
    width: float
    height: float
    title: str
    text: str = ""
    colour: str = DARK_GREY

    def side(self, where: str) -> tuple[float, float]:
        """The middle of a side."""
        x = {"left": self.x, "right": self.x + self.width}.get(where, self.x + self.width / 2)
        y = {"bottom": self.y, "top": self.y + self.height}.get(where, self.y + self.height / 2)
        return x, y


NODE = Box(1, 14, 98, 45, "each node")
WORKER = Box(4, 18, 42, 36, "rollout worker", "one for each engine", BLUE)
TRAINER = Box(62, 18, 34, 36, "trainer ranks", "TP x PP x CP x EP x DP", ORANGE)
BROWSERS = Box(7, 37, 16, 10, "browsers", "Chromium", BLUE)
AGENTS = Box(27, 37, 16, 10, "agents", "asyncio", BLUE)
ENGINE = Box(27, 21, 16, 10, "engine", "vLLM", BLUE)
RING = Box(48, 37, 12, 10, "ring", "shared memory", GREEN)
BATCHES = Box(65, 37, 28, 10, "batches", "groups, merged and packed", ORANGE)
LEARNER = Box(65, 21, 28, 10, "learner", "loss, optimizer, checkpoint", ORANGE)
CONTROL = Box(1, 1, 98, 9, "control service", "tickets, policy version, heartbeats, evaluations: facts, no data")


def svg() -> str:
    """The figure."""
    return render_svg([_draw], (8.0, 5.0))


def _draw(axes: Axes) -> None:
    for box in (NODE, WORKER, TRAINER):
        _add_box(axes, box, filled=False)
    for box in (BROWSERS, AGENTS, ENGINE, RING, BATCHES, LEARNER, CONTROL):
        _add_box(axes, box, filled=True)
    _add_arrow(axes, BROWSERS.side("right"), AGENTS.side("left"), both=True)
    _add_arrow(axes, AGENTS.side("bottom"), ENGINE.side("top"), both=True)
    _add_arrow(axes, AGENTS.side("right"), RING.side("left"))
    _add_arrow(axes, RING.side("right"), BATCHES.side("left"))
    _add_arrow(axes, BATCHES.side("bottom"), LEARNER.side("top"))
    _add_arrow(axes, LEARNER.side("left"), ENGINE.side("right"))
    axes.text(54, 27, "weights,\nshard to shard,\nNCCL", ha="center", va="bottom", fontsize=7, color=DARK_GREY)
    axes.text(54, 34, "episodes in groups", ha="center", va="bottom", fontsize=7, color=DARK_GREY)
    for box in (WORKER, TRAINER):
        x, y = box.side("bottom")
        _add_arrow(axes, (x, y), (x, CONTROL.y + CONTROL.height), both=True)
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, HEIGHT)
    axes.set_axis_off()


def _add_box(axes: Axes, box: Box, filled: bool) -> None:
    """A box with its title: inside if it is filled, else along its upper edge."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import FancyBboxPatch

    face = to_rgba(box.colour, 0.12) if filled else "none"
    style = "round,pad=0,rounding_size=1.2"
    axes.add_patch(FancyBboxPatch((box.x, box.y), box.width, box.height, style, facecolor=face, edgecolor=box.colour))
    x, middle = box.side("middle")
    if not filled:
        left, top = box.x + 1.5, box.y + box.height - 1.2
        axes.text(left, top, box.title, va="top", color=box.colour, weight="bold")
        axes.text(left, top - 2.6, box.text, va="top", color=DARK_GREY, fontsize=7)
        return
    axes.text(x, middle + 0.3, box.title, ha="center", va="bottom", color=BLACK, weight="bold")
    axes.text(x, middle - 0.3, box.text, ha="center", va="top", color=DARK_GREY, fontsize=7)


def _add_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], both: bool = False) -> None:
    style = {"arrowstyle": "<|-|>" if both else "-|>", "color": BLACK, "shrinkA": 2, "shrinkB": 2, "linewidth": 1.2}
    axes.annotate("", end, start, arrowprops=style)
