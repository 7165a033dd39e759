"""Draw an update from its trace: `python -m tools.draw_timeline TRACE docs/images/timeline.svg`.

TRACE is what `webrl timeline RUN --update N --output TRACE` has written. One row for the trainer's first rank, its
engines' pauses, and each group that ran at a time; groups that the update trained are in the trainer's colour.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.plot import BLUE, DARK_GREY, GREEN, GREY, LIGHT_GREY, ORANGE, add_titles, render_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "wait for groups": LIGHT_GREY, "pack": GREEN, "log-probabilities": "#7fb2d1", "forward and backward": BLUE,
    "optimizer": "#1b4a66", "weight exchange": ORANGE, "pause for weights": ORANGE,
}  # fmt: skip
SIZE = (10.0, 4.2)  # inches
LABEL_SHARE = 0.035  # of the width from which a group has its number


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace."""
    content = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)[
        "traceEvents"
    ]
    return events


def draw(axes: Axes, events: Sequence[dict[str, Any]]) -> None:
    """Draw the last update of a trace."""
    slices = [event for event in events if event["ph"] == "X"]
    update = max((each for each in slices if each["name"].startswith("update ")), key=lambda each: each["ts"])
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    trained = {ticket for _, ticket in update["args"]["tickets"]}
    rows: dict[tuple[int, int], int] = {}
    labels: list[str] = []
    order = {"trainer-0": 0, "engine": 1, "ticket": 2}
    for place in sorted(names, key=lambda place: (order.get(names[place], 9), place)):
        if names[place] in order:
            rows[place] = len(labels)
            labels.append({"engine": "engine", "ticket": "group"}.get(names[place], names[place]))
    zero, end = update["ts"], update["ts"] + update["dur"]
    shown: dict[str, str] = {}
    for each in slices:
        row = rows.get((each["pid"], each["tid"]))
        start, stop = max(each["ts"], zero), min(each["ts"] + each["dur"], end)
        if row is None or stop <= start:
            continue
        is_group = each["name"].startswith("ticket ")
        ticket = each["args"].get("ticket")
        colour = (BLUE if ticket in trained else GREY) if is_group else COLOURS.get(each["name"])
        if colour is None:
            continue
        extent = ((start - zero) / 1e6, (stop - start) / 1e6)
        axes.broken_barh([extent], (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.6)
        if is_group and extent[1] > LABEL_SHARE * update["dur"] / 1e6:
            axes.text(extent[0] + extent[1] / 2, row, str(ticket), ha="center", va="center", fontsize=7, color="white")
        if not is_group:
            shown[each["name"]] = colour
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlim(0, update["dur"] / 1e6)
    for name, colour in shown.items():
        axes.plot([], [], linewidth=7, color=colour, label=name)
    axes.plot([], [], linewidth=7, color=BLUE, label="group that it trained")
    axes.plot([], [], linewidth=7, color=GREY, label="group for a later update, or dropped")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=4, borderaxespad=0, fontsize=8, labelcolor=DARK_GREY)
    add_titles(axes, f"{update['name']}: {update['dur'] / 1e6:.1f} s", "groups by ticket; seconds from its beginning")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="of one update")
    parser.add_argument("output", type=Path, help="SVG file")
    options = parser.parse_args(arguments)
    events = read(options.trace)
    options.output.write_text(render_svg([lambda axes: draw(axes, events)], SIZE))


if __name__ == "__main__":
    main()
