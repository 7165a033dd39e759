"""Figures of the browser benchmark: one plot per section, as one SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tools.bench.browsers.report import Section
from tools.plot import BLUE, GREEN, GREY, ORANGE, add_legend, add_titles, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bar = tuple[str, Sequence[tuple[float, str]]]
"""Label, and size and colour of each part."""


def draw(sections: Mapping[str, Section]) -> str:
    """All given sections as SVG."""
    return render_svg(
        [
            lambda axes, plot=plot, section=sections[name]: plot(axes, section)  # type: ignore[misc]
            for name, plot in _PLOTS.items()
            if name in sections
        ]
    )


def _draw_bars(axes: Axes, title: str, subtitle: str, unit: str, bars: Sequence[Bar]) -> None:
    """Horizontal bars of one or more parts each, with their sum at the end."""
    add_titles(axes, title, subtitle, unit)
    longest = max(sum(size for size, _ in parts) for _, parts in bars)
    for row, (_, parts) in enumerate(bars):
        left = 0.0
        for size, colour in parts:
            axes.barh(row, size, 0.6, left, color=colour)
            left += size
        axes.text(left + 0.01 * longest, row, f"{left:,.0f}" if left >= 100 else f"{left:.3g}", va="center")
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * longest)
    axes.grid(visible=False)


def _draw_resets(axes: Axes, section: Section) -> None:
    quantity = "s to the first screenshot: "
    bars = [
        (
            row.name.removeprefix(quantity).replace(", ", ",\n"),
            [(1e3 * row.median, BLUE if "Pool" in row.name else GREY)],
        )
        for row in section.rows
        if row.name.startswith(quantity)
    ]
    _draw_bars(axes, "A fresh episode", "time to the first screenshot, MiniWoB++", "ms", bars)


def _draw_steps(axes: Axes, section: Section) -> None:
    colours = {"acting": GREEN, "settling": ORANGE, "capturing": BLUE}
    bars = [
        (
            f"{contestant},\n{kind}",
            [(section.measurement(f"{kind}, {part}: {contestant}").median, colour) for part, colour in colours.items()],
        )
        for kind in ("nothing changes", "the page changes")
        for contestant in ("bare Playwright", "Session")
    ]
    _draw_bars(axes, "A step", "click, settle, screenshot of 1280x768", "ms", bars)
    for part, colour in colours.items():
        axes.bar(0, 0, color=colour, label=part)
    add_legend(axes, columns=3)


def _draw_browsergym(axes: Axes, section: Section) -> None:
    bars = [
        (row.name.replace("without", "\nwithout").replace("with numbered", "\nwith numbered"),
         [(1e3 * row.median, BLUE if "Session" in row.name else GREY)])
        for row in section.rows
    ]  # fmt: skip
    _draw_bars(axes, "Against BrowserGym", "reset and click on the same MiniWoB++ tasks", "ms", bars)


def _draw_memory(axes: Axes, section: Section) -> None:
    points, (base, slope) = section.series["points"], section.series["line"]
    most = max(sessions for sessions, _ in points)
    subtitle = f"{slope:.0f} MiB per session, {base:.0f} MiB without sessions"
    add_titles(axes, "Memory", subtitle, "sessions", "MiB, driver and Chromium")
    axes.plot([0, most], [base, base + slope * most], color=GREY)
    axes.plot([sessions for sessions, _ in points], [mib for _, mib in points], "o", color=BLUE)
    axes.set_xlim(0, 1.05 * most)
    axes.set_ylim(0, 1.1 * max(mib for _, mib in points))


def _draw_waiting(axes: Axes, section: Section) -> None:
    add_titles(axes, "Waiting", section.title, "seconds", "steps done")
    schedules = {"free-running": BLUE, "step-synchronised": ORANGE, "episode-synchronised": GREEN}
    for schedule, colour in schedules.items():
        ends = sorted(section.series[schedule]["ends"])
        label = f"{schedule}, {section.measurement(schedule).median:.1f}/s"
        axes.plot([0, *ends], range(len(ends) + 1), color=colour, label=label)
    axes.set_xlim(0, max(section.series[schedule]["seconds"] for schedule in schedules))
    axes.set_ylim(0)
    add_legend(axes)


def _draw_encoding(axes: Axes, section: Section) -> None:
    captures = section.series["captures"]
    formats = list(dict.fromkeys(capture["format"] for capture in captures))
    subtitle = f"{len(captures) // len(formats)} kinds of page, 1280x768"
    add_titles(axes, "Screenshots", subtitle, "kB", "ms per screenshot")
    for name, colour in zip(formats, (GREY, BLUE, ORANGE), strict=True):
        chosen = [capture for capture in captures if capture["format"] == name]
        sizes, times = [capture["bytes"] / 1000 for capture in chosen], [capture["ms"] for capture in chosen]
        axes.plot(sizes, times, "o", color=colour, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0)
    add_legend(axes, columns=3)


_PLOTS: dict[str, Callable[[Axes, Section], None]] = {
    "reset": _draw_resets, "step": _draw_steps, "browsergym": _draw_browsergym, "memory": _draw_memory,
    "waiting": _draw_waiting, "encoding": _draw_encoding,
}  # fmt: skip
