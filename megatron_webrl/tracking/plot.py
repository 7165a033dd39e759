"""Plots as one SVG: points and lines on linear axes, bars, a key. Needs nothing installed; any browser shows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT, GAP = 420, 300, 34  # pixels of a plot and between plots
COLUMNS = 2
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 52, 44  # pixels around the plotting area
BLUE, GREY, ORANGE, GREEN = "#2a6f97", "#b8b8b8", "#d1803a", "#58944f"
BLACK, LIGHT_GREY = "#222", "#ddd"


class Plot:
    """One plot with linear axes from 0; `x` and `y` are places in pixels."""

    def __init__(self, title: str, subtitle: str, max_values: tuple[float, float]) -> None:
        self.max_values = max_values
        self.elements = [svg_text(0, 16, title, size=14, bold=True), svg_text(0, 33, subtitle, size=11, colour="#666")]

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.max_values[0]

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.max_values[1]

    def axes(self, x_label: str, y_label: str, tick_value: Callable[[float], float] = lambda value: value) -> None:
        """Both axes with ticks and names; `label` is what a place across stands for."""
        for value in _ticks(self.max_values[0]):
            self.elements.append(
                svg_text(self.x(value), HEIGHT - BOTTOM + 16, f"{tick_value(value):g}", anchor="middle")
            )
        for value in _ticks(self.max_values[1]):
            self.elements.append(svg_polyline([(LEFT, self.y(value)), (WIDTH - RIGHT, self.y(value))], LIGHT_GREY, 1))
            self.elements.append(svg_text(LEFT - 6, self.y(value) + 4, f"{value:g}", anchor="end"))
        self.elements.append(svg_polyline([(LEFT, self.y(0)), (WIDTH - RIGHT, self.y(0))], BLACK, 1))
        self.elements.append(svg_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, anchor="middle", colour="#666"))
        self.elements.append(svg_text(LEFT, TOP - 6, y_label, colour="#666"))

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """Points joined."""
        self.elements.append(svg_polyline([(self.x(x), self.y(y)) for x, y in points], colour, 2))

    def dot(self, x: float, y: float, colour: str) -> None:
        """One point."""
        self.elements.append(
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4.5" fill="{colour}" fill-opacity="0.85"/>'
        )

    def legend_entry(
        self, number: int, label: str, colour: str, corner: tuple[float, float] = (LEFT + 8, TOP + 14)
    ) -> None:
        """One line of the key, from `corner` downwards."""
        x, y = corner[0], corner[1] + 16 * number
        self.elements += [svg_rectangle(x, y - 9, 10, 10, colour), svg_text(x + 16, y, label)]


def render_svg(plots: Sequence[Plot]) -> str:
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
        parts += [f'<g transform="translate({place})">', *plot.elements, "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _ticks(most: float) -> list[float]:
    """Four to eight round numbers from 0."""
    rough = most / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * number for number in range(int(most / step) + 1)]


def svg_polyline(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    """Points, in pixels, joined: an SVG element, as are the others."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def svg_rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def svg_text(
    x: float, y: float, words: str, *, size: int = 12, bold: bool = False, anchor: str = "start", colour: str = BLACK
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{escape(words)}</text>"
    )
