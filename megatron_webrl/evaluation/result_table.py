"""Tables and lines about evaluations for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from megatron_webrl.types import BLOCKED

COLUMN_NAMES = {"blank_images": "blank\nimages", "checkpoint": "success"}
LEGEND = (
    "success of episodes with a verdict, with its 95 % interval (Wilson), in percent; masked: episodes without one, "
    "that a blocked page, a crash, an error or a time limit ended, or that were never run; they count neither way"
)


def evaluation_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Success of judged episodes in several evaluations of the same tasks: a row per environment, and the total."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_footer=True)
    table.add_column("task", footer="all", overflow="fold")
    for line in lines:
        name = COLUMN_NAMES.get(line["kind"], line["kind"])
        table.add_column(name, footer=format_success(line), justify="right", no_wrap=True)
    last = lines[-1]
    for title, footer in (
        ("epi-\nsodes", str(last["episodes"])),
        ("masked", str(_no_verdict(last) + last["missing"])),
        ("steps", f"{last['steps_mean']:.2f}"),
    ):
        table.add_column(title, footer=footer, justify="right")
    for name in sorted({name for line in lines for name in line["environments"]}):
        entry = last["environments"].get(name)
        cells = [format_success(line["environments"].get(name)) for line in lines]
        if entry is not None:
            cells += [str(entry["episodes"]), str(_no_verdict(entry)), f"{entry['steps_mean']:.2f}"]
        table.add_row(name, *cells)
    return table


def format_rates(line: Mapping[str, Any]) -> str:
    """The success rates of an evaluation, of all episodes first, and who judged, in one line."""
    kind = line["kind"].replace("_", " ")
    requested = line["episodes"] + _no_verdict(line) + line["missing"]
    blocked = line["no_verdict"].get(BLOCKED, 0)
    cost = f", {line['judge_dollars']:.2f} dollars" if line["judge_dollars"] else ""
    return (
        f"{kind}: success {line['success_of_all']:.1%} of all {requested} episodes, "
        f"{_percent(line['success_of_reached'])} of {requested - blocked} reached, "
        f"{_percent(line['success_of_judged'])} of {line['episodes']} with a verdict; "
        f"{blocked} blocked by their website (evaluator: {', '.join(line['evaluators']) or 'none'}{cost})"
    )


def format_success(entry: Mapping[str, Any] | None) -> str:
    """Success rate of episodes with a verdict and its interval, in percent."""
    if entry is None or entry["success_of_judged"] is None:
        return "-"
    low, high = entry["interval"]
    return f"{entry['success_of_judged']:.0%} ({100 * low:.0f}-{100 * high:.0f})"


def format_difference(name: str, gain: Mapping[str, Any]) -> str:
    """A difference of success rates in one line."""
    low, high = (100 * bound for bound in gain["interval"])
    return (
        f"{name}: {100 * gain['mean']:+.1f} points, 95 % interval {low:+.1f} to {high:+.1f} "
        f"(paired bootstrap over {gain['tasks']} tasks)"
    )


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _no_verdict(entry: Mapping[str, Any]) -> int:
    return sum(entry["no_verdict"].values())
