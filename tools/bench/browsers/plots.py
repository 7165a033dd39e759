"""The figures of the browsers' benchmark as one page of plots, an SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from megatron_webrl.tracking.plot import (
    BLUE,
    BOTTOM,
    GREEN,
    GREY,
    HEIGHT,
    ORANGE,
    RIGHT,
    TOP,
    WIDTH,
    Plot,
    render_svg,
    svg_rectangle,
    svg_text,
)
from tools.bench.browsers.report import Section


def draw(sections: Mapping[str, Section]) -> str:
    """The picture of all sections that are there."""
    return render_svg([plot(sections[name]) for name, plot in _PLOTS.items() if name in sections])


def _bars(title: str, words: str, unit: str, bars: Sequence[tuple[str, Sequence[tuple[float, str]]]]) -> Plot:
    """Lying bars of one or more parts each, with the sum at the end."""
    plot = Plot(title, words, (1.18 * max(sum(size for size, _ in parts) for _, parts in bars), 1))
    room = (HEIGHT - TOP - 8) / len(bars)
    thick = min(22.0, room - 18)
    for number, (label, parts) in enumerate(bars):
        top, left = TOP + room * number, 0.0
        plot.elements.append(svg_text(0, top + 11, label))
        scale = WIDTH / plot.max_values[0]
        for size, colour in parts:
            plot.elements.append(svg_rectangle(left * scale, top + 16, max(size * scale, 1), thick, colour))
            left += size
        plot.elements.append(
            svg_text(
                left * scale + 6,
                top + 16 + thick / 2 + 4,
                f"{left:,.0f} {unit}" if left >= 100 else f"{left:.3g} {unit}",
            )
        )
    return plot


def _resets(section: Section) -> Plot:
    what = "s to the first screenshot: "
    bars = [
        (row.name.removeprefix(what), [(1e3 * row.median, BLUE if "Pool" in row.name else GREY)])
        for row in section.rows
        if row.name.startswith(what)
    ]
    return _bars("A fresh episode", "time to the first screenshot, MiniWoB++", "ms", bars)


def _steps(section: Section) -> Plot:
    colours = {"acting": GREEN, "settling": ORANGE, "capturing": BLUE}
    bars = [
        (
            f"{who}, {kind}",
            [(section.measurement(f"{kind}, {part}: {who}").median, colour) for part, colour in colours.items()],
        )
        for kind in ("nothing changes", "the page changes")
        for who in ("bare Playwright", "Session")
    ]
    plot = _bars("A step", "click, rest, screenshot of 1280x768", "ms", bars)
    for number, (part, colour) in enumerate(colours.items()):
        plot.elements += [svg_rectangle(200 + 76 * number, 7, 10, 10, colour), svg_text(214 + 76 * number, 16, part)]
    return plot


def _browsergym(section: Section) -> Plot:
    bars = [(row.name, [(1e3 * row.median, BLUE if "Session" in row.name else GREY)]) for row in section.rows]
    return _bars("Against BrowserGym", "reset and click on the same MiniWoB++ tasks", "ms", bars)


def _memory(section: Section) -> Plot:
    points, (base, slope) = section.series["points"], section.series["line"]
    most = max(number for number, _ in points)
    plot = Plot(
        "Memory", f"{slope:.0f} MiB a session, {base:.0f} MiB without any", (1.05 * most, 1.15 * (base + slope * most))
    )
    plot.axes("sessions", "MiB, driver and Chromium")
    plot.line([(0, base), (most, base + slope * most)], GREY)
    for number, mib in points:
        plot.dot(number, mib, BLUE)
    return plot


def _waiting(section: Section) -> Plot:
    ways = {"free-running": BLUE, "step-synchronised": ORANGE, "episode-synchronised": GREEN}
    longest = max(section.series[way]["seconds"] for way in ways)
    most = max(len(section.series[way]["ends"]) for way in ways)
    plot = Plot("Waiting", section.title, (1.02 * longest, 1.1 * most))
    plot.axes("seconds", "steps done")
    for number, (way, colour) in enumerate(ways.items()):
        ends = sorted(section.series[way]["ends"])
        plot.line([(0, 0), *((end, done) for done, end in enumerate(ends, 1))], colour)
        corner = WIDTH - RIGHT - 190, HEIGHT - BOTTOM - 50  # where no curve goes
        plot.legend_entry(number, f"{way}, {section.measurement(way).median:.1f}/s", colour, corner)
    return plot


def _encoding(section: Section) -> Plot:
    captures = section.series["captures"]
    colours = dict(zip(dict.fromkeys(found["format"] for found in captures), (GREY, BLUE, ORANGE), strict=True))
    most = max(math.log10(found["bytes"] / 1000) for found in captures), max(found["ms"] for found in captures)
    plot = Plot(
        "Screenshots", f"{len(captures) // len(colours)} kinds of page, 1280x768", (1.1 * most[0], 1.15 * most[1])
    )
    plot.axes("kB", "ms a capture", lambda value: 10**value)
    for found in captures:
        plot.dot(math.log10(found["bytes"] / 1000), found["ms"], colours[found["format"]])
    for number, (name, colour) in enumerate(colours.items()):
        plot.legend_entry(number, name, colour)
    return plot


_PLOTS: dict[str, Callable[[Section], Plot]] = {
    "reset": _resets, "step": _steps, "browsergym": _browsergym, "memory": _memory, "waiting": _waiting,
    "encoding": _encoding,
}  # fmt: skip
