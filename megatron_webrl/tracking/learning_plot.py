"""The picture of a run: success, steps, entropy and staleness over the policy's versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_webrl.tracking.plot import BLACK, BLUE, GREEN, GREY, ORANGE, Plot, render_svg, svg_polyline

FILE = "learning.svg"
WINDOW = 5
"""Updates that a point of a thick line is the mean of: itself and those before it."""

_COLOURS = {"before": ORANGE, "after": GREEN, "during": GREEN, "blank_images": BLACK}


def write(folder: Path, updates: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Draw lines of updates.jsonl and evaluations.jsonl to `folder`; nothing is drawn before the first update."""
    if updates:
        temporary = folder / f".{FILE}"
        temporary.write_text(draw_svg(updates, evaluations))
        temporary.rename(folder / FILE)


def draw_svg(updates: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The picture as SVG. `updates` has at least one update."""
    steps = [(u["version"], u["steps_mean"]) for u in updates]
    entropy = [(u["version"], u["extra"]["entropy"]) for u in updates if "entropy" in u["extra"]]
    return render_svg(
        [
            _success(updates, evaluations),
            _curve(updates, "Steps", "of an episode that was trained", steps),
            _curve(updates, "Entropy", "of the policy per response token, nats", entropy),
            _staleness(updates),
        ]
    )


def moving_average(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each point with the mean of its and up to WINDOW - 1 earlier values."""
    values = [value for _, value in points]
    found = []
    for number, (x, _) in enumerate(points):
        part = values[max(0, number + 1 - WINDOW) : number + 1]
        found.append((x, sum(part) / len(part)))
    return found


def _success(updates: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> Plot:
    plot = Plot(
        "Success", "of all episodes that came (line), of evaluations with 95 % intervals (dots)", (_last(updates), 1)
    )
    plot.axes("version", "share of episodes")
    rates = [(u["version"] - 1, u["extra"].get("rollout_success_rate")) for u in updates]
    _draw(plot, [(version, rate) for version, rate in rates if rate is not None])
    kinds = []
    for line in evaluations:
        if line["interval"] is None or line["kind"] not in _COLOURS:
            continue
        colour, place = _COLOURS[line["kind"]], line["version"]
        plot.elements.append(svg_polyline([(plot.x(place), plot.y(bound)) for bound in line["interval"]], colour, 2))
        plot.dot(place, line["success"], colour)
        kinds.append(line["kind"])
    names = {_COLOURS[kind]: kind.replace("_", " ") for kind in kinds}
    for number, (colour, name) in enumerate(names.items()):
        plot.legend_entry(number, name, colour)
    return plot


def _staleness(updates: Sequence[Mapping[str, Any]]) -> Plot:
    most = max(1, *(u["staleness_max"] for u in updates))
    plot = Plot("Staleness", "of trained episodes, by their oldest token", (_last(updates), 1.15 * most))
    plot.axes("version", "versions")
    plot.line([(u["version"], u["staleness_max"]) for u in updates], GREY)
    plot.line([(u["version"], u["staleness_mean"]) for u in updates], BLUE)
    for number, (name, colour) in enumerate((("largest", GREY), ("mean", BLUE))):
        plot.legend_entry(number, name, colour)
    return plot


def _curve(updates: Sequence[Mapping[str, Any]], title: str, words: str, points: Sequence[tuple[float, float]]) -> Plot:
    most = max((value for _, value in points), default=0.0)
    plot = Plot(title, words, (_last(updates), 1.15 * most or 1.0))
    plot.axes("version", "")
    _draw(plot, points)
    return plot


def _draw(plot: Plot, points: Sequence[tuple[float, float]]) -> None:
    plot.line(points, GREY)
    plot.line(moving_average(points), BLUE)


def _last(updates: Sequence[Mapping[str, Any]]) -> float:
    return float(updates[-1]["version"])
