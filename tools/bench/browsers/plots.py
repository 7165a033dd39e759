"""The figures of the browsers' benchmark as one page of plots, an SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from tools.bench.browsers.report import Section

WIDTH, HEIGHT, GAP = 420, 300, 34  # pixels of a plot and between plots
COLUMNS = 2
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 52, 44  # pixels around the plotting area
OURS, PEER, OTHER, LAST = "#2a6f97", "#b8b8b8", "#d1803a", "#58944f"
INK, FAINT = "#222", "#ddd"


class Plot:
    """One plot with linear axes from 0; `x` and `y` are places in pixels."""

    def __init__(self, title: str, words: str, most: tuple[float, float]) -> None:
        self.most = most
        self.parts = [_text(0, 16, title, size=14, bold=True), _text(0, 33, words, size=11, colour="#666")]

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.most[0]

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.most[1]

    def axes(self, across: str, up: str, label: Callable[[float], float] = lambda value: value) -> None:
        """Both axes with ticks and names; `label` is what a place across stands for."""
        for value in _ticks(self.most[0]):
            self.parts.append(_text(self.x(value), HEIGHT - BOTTOM + 16, f"{label(value):g}", anchor="middle"))
        for value in _ticks(self.most[1]):
            self.parts.append(_line([(LEFT, self.y(value)), (WIDTH - RIGHT, self.y(value))], FAINT, 1))
            self.parts.append(_text(LEFT - 6, self.y(value) + 4, f"{value:g}", anchor="end"))
        self.parts.append(_line([(LEFT, self.y(0)), (WIDTH - RIGHT, self.y(0))], INK, 1))
        self.parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, anchor="middle", colour="#666"))
        self.parts.append(_text(LEFT, TOP - 6, up, colour="#666"))

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """Points joined."""
        self.parts.append(_line([(self.x(x), self.y(y)) for x, y in points], colour, 2))

    def dot(self, x: float, y: float, colour: str) -> None:
        """One point."""
        self.parts.append(
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4.5" fill="{colour}" fill-opacity="0.85"/>'
        )

    def key(self, number: int, words: str, colour: str) -> None:
        """One line of the key, from the top left downwards."""
        y = TOP + 14 + 16 * number
        self.parts += [_box(LEFT + 8, y - 9, 10, 10, colour), _text(LEFT + 24, y, words)]


def draw(sections: Mapping[str, Section]) -> str:
    """The picture of all sections that are there."""
    plots = [plot(sections[name]) for name, plot in _PLOTS.items() if name in sections]
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


def _bars(title: str, words: str, unit: str, bars: Sequence[tuple[str, Sequence[tuple[float, str]]]]) -> Plot:
    """Lying bars of one or more parts each, with the sum at the end."""
    plot = Plot(title, words, (1.18 * max(sum(size for size, _ in parts) for _, parts in bars), 1))
    room = (HEIGHT - TOP - 8) / len(bars)
    thick = min(22.0, room - 18)
    for number, (label, parts) in enumerate(bars):
        top, left = TOP + room * number, 0.0
        plot.parts.append(_text(0, top + 11, label))
        scale = WIDTH / plot.most[0]
        for size, colour in parts:
            plot.parts.append(_box(left * scale, top + 16, max(size * scale, 1), thick, colour))
            left += size
        plot.parts.append(
            _text(
                left * scale + 6,
                top + 16 + thick / 2 + 4,
                f"{left:,.0f} {unit}" if left >= 100 else f"{left:.3g} {unit}",
            )
        )
    return plot


def _resets(section: Section) -> Plot:
    what = "s to the first screenshot: "
    bars = [
        (row.name.removeprefix(what), [(1e3 * row.median, OURS if "Fleet" in row.name else PEER)])
        for row in section.rows
        if row.name.startswith(what)
    ]
    return _bars("A fresh episode", "time to the first screenshot, MiniWoB++", "ms", bars)


def _steps(section: Section) -> Plot:
    colours = {"acting": LAST, "settling": OTHER, "capturing": OURS}
    bars = [
        (f"{who}, {kind}", [(section.row(f"{kind}, {part}: {who}").median, colour) for part, colour in colours.items()])
        for kind in ("nothing changes", "the page changes")
        for who in ("bare Playwright", "Session")
    ]
    plot = _bars("A step", "click, rest, screenshot of 1280x768", "ms", bars)
    for number, (part, colour) in enumerate(colours.items()):
        plot.parts += [_box(200 + 76 * number, 7, 10, 10, colour), _text(214 + 76 * number, 16, part)]
    return plot


def _browsergym(section: Section) -> Plot:
    bars = [(row.name, [(1e3 * row.median, OURS if "Session" in row.name else PEER)]) for row in section.rows]
    return _bars("Against BrowserGym", "reset and click on the same MiniWoB++ tasks", "ms", bars)


def _memory(section: Section) -> Plot:
    points, (base, slope) = section.series["points"], section.series["line"]
    most = max(number for number, _ in points)
    plot = Plot(
        "Memory", f"{slope:.0f} MiB a session, {base:.0f} MiB without any", (1.05 * most, 1.15 * (base + slope * most))
    )
    plot.axes("sessions", "MiB, driver and Chromium")
    plot.line([(0, base), (most, base + slope * most)], PEER)
    for number, mib in points:
        plot.dot(number, mib, OURS)
    return plot


def _waiting(section: Section) -> Plot:
    ways = {"free-running": OURS, "step-synchronised": OTHER, "episode-synchronised": LAST}
    longest = max(section.series[way]["seconds"] for way in ways)
    most = max(len(section.series[way]["ends"]) for way in ways)
    plot = Plot("Waiting", section.title, (1.02 * longest, 1.1 * most))
    plot.axes("seconds", "steps done")
    for number, (way, colour) in enumerate(ways.items()):
        ends = sorted(section.series[way]["ends"])
        plot.line([(0, 0), *((end, done) for done, end in enumerate(ends, 1))], colour)
        plot.key(number, f"{way}, {section.row(way).median:.1f}/s", colour)
    return plot


def _encoding(section: Section) -> Plot:
    captures = section.series["captures"]
    colours = dict(zip(dict.fromkeys(found["format"] for found in captures), (PEER, OURS, OTHER), strict=True))
    most = max(math.log10(found["bytes"] / 1000) for found in captures), max(found["ms"] for found in captures)
    plot = Plot(
        "Screenshots", f"{len(captures) // len(colours)} kinds of page, 1280x768", (1.1 * most[0], 1.15 * most[1])
    )
    plot.axes("kB", "ms a capture", lambda value: 10**value)
    for found in captures:
        plot.dot(math.log10(found["bytes"] / 1000), found["ms"], colours[found["format"]])
    for number, (name, colour) in enumerate(colours.items()):
        plot.key(number, name, colour)
    return plot


_PLOTS: dict[str, Callable[[Section], Plot]] = {
    "reset": _resets, "step": _steps, "browsergym": _browsergym, "memory": _memory, "waiting": _waiting,
    "encoding": _encoding,
}  # fmt: skip


def _ticks(most: float) -> list[float]:
    """Four to eight round numbers from 0."""
    rough = most / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * number for number in range(int(most / step) + 1)]


def _line(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(
    x: float, y: float, words: str, *, size: int = 12, bold: bool = False, anchor: str = "start", colour: str = INK
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{escape(words)}</text>"
    )
