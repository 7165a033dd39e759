"""Plots as one SVG: points and lines on linear axes, bars, a key. Needs nothing installed; any browser shows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT, GAP = 420, 300, 34  # pixels of a plot and between plots
COLUMNS = 2
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 52, 44  # pixels around the plotting area
OURS, PEER, OTHER, LAST = "#2a6f97", "#b8b8b8", "#d1803a", "#58944f"
INK, FAINT = "#222", "#ddd"


class Plot:
    """One plot with linear axes from 0; `x` and `y` are places in pixels."""

    def __init__(self, title: str, words: str, most: tuple[float, float]) -> None:
        self.most = most
        self.parts = [text(0, 16, title, size=14, bold=True), text(0, 33, words, size=11, colour="#666")]

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.most[0]

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.most[1]

    def axes(self, across: str, up: str, label: Callable[[float], float] = lambda value: value) -> None:
        """Both axes with ticks and names; `label` is what a place across stands for."""
        for value in _ticks(self.most[0]):
            self.parts.append(text(self.x(value), HEIGHT - BOTTOM + 16, f"{label(value):g}", anchor="middle"))
        for value in _ticks(self.most[1]):
            self.parts.append(path([(LEFT, self.y(value)), (WIDTH - RIGHT, self.y(value))], FAINT, 1))
            self.parts.append(text(LEFT - 6, self.y(value) + 4, f"{value:g}", anchor="end"))
        self.parts.append(path([(LEFT, self.y(0)), (WIDTH - RIGHT, self.y(0))], INK, 1))
        self.parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, anchor="middle", colour="#666"))
        self.parts.append(text(LEFT, TOP - 6, up, colour="#666"))

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """Points joined."""
        self.parts.append(path([(self.x(x), self.y(y)) for x, y in points], colour, 2))

    def dot(self, x: float, y: float, colour: str) -> None:
        """One point."""
        self.parts.append(
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4.5" fill="{colour}" fill-opacity="0.85"/>'
        )

    def key(self, number: int, words: str, colour: str, corner: tuple[float, float] = (LEFT + 8, TOP + 14)) -> None:
        """One line of the key, from `corner` downwards."""
        x, y = corner[0], corner[1] + 16 * number
        self.parts += [box(x, y - 9, 10, 10, colour), text(x + 16, y, words)]


def page(plots: Sequence[Plot]) -> str:
    """Plots side by side, as one SVG."""
    columns = min(COLUMNS, max(1, len(plots)))
    width = columns * WIDTH + (columns + 1) * GAP
    height = -(-len(plots) // columns) * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, plot in enumerate(plots):
        row, column = divmod(number, columns)
        place = f"{GAP + column * (WIDTH + GAP)},{GAP + row * (HEIGHT + GAP)}"
        parts += [f'<g transform="translate({place})">', *plot.parts, "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _ticks(most: float) -> list[float]:
    """Four to eight round numbers from 0."""
    rough = most / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * number for number in range(int(most / step) + 1)]


def path(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    """Points, in pixels, joined: an SVG element, as are the others."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def text(
    x: float, y: float, words: str, *, size: int = 12, bold: bool = False, anchor: str = "start", colour: str = INK
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{escape(words)}</text>"
    )
