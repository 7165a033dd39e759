"""Tables and lines for the terminal: updates, accounting, evaluations, progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_webrl.track.evaluations import BLANK_IMAGES, GREEDY, evaluation_name
from megatron_webrl.types import BLOCKED

VARIANT_NAMES = {BLANK_IMAGES: "blank", GREEDY: "greedy"}
MOST_INTERVALS = 3  # columns of a table that show the interval of each environment
EVALUATION_LEGEND = (
    "success of episodes with a verdict, with its 95 % interval (Wilson), in percent; masked: episodes without one, "
    "that a blocked page, a crash, an error or a time limit ended, or that were never run; they count neither way; "
    "blank: with blank images; episodes, masked and steps are those of the last column of success"
)
IMAGE_GAIN_NAME = "with screenshots over blank images"
GAIN_NAMES = {
    "gain": "gain of the run",
    "blind_gain": "gain with blank images",
    "seeing_gain": "gain that needs the screenshot",
}
FIRST_STEP_NAME = "not failed at the first step"


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def accounting_line(accounting: Mapping[str, Any]) -> str:
    dropped = ", ".join(f"{name} {count}" for name, count in accounting["dropped"].items()) or "none"
    dropped_sum = sum(accounting["dropped"].values())
    rolled_back = accounting["rolled_back"]
    total = accounting["trained"] + dropped_sum + accounting["waiting"] + rolled_back
    rolled_back_term = f" + {rolled_back} rolled back" if rolled_back else ""
    verdict = "matches" if accounting["matches"] else "DOES NOT MATCH"
    return (
        f"episodes: {accounting['finished']} finished = {accounting['trained']} trained + "
        f"{dropped_sum} dropped ({dropped}) + {accounting['waiting']} waiting{rolled_back_term} = {total}: {verdict}"
    )


def evaluation_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Success of judged episodes in several evaluations of the same tasks: a row per environment, and the total. With
    many evaluations only the total has intervals, and steps are left out, so that the table fits a terminal.
    """
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_footer=True)
    wide = len(lines) <= MOST_INTERVALS
    table.add_column("task", footer="all" if wide else "all\n95 % interval", overflow="fold")
    for line in lines:
        footer = format_success(line) if wide else _in_two_lines(line)
        table.add_column(_column_title(line), footer=footer, justify="right", no_wrap=True)
    last = lines[-1]
    for title, footer in (
        ("epi-\nsodes", str(last["episodes"])),
        ("masked", str(_no_verdict(last) + last["missing"])),
        *([("steps", f"{last['steps_mean']:.2f}")] if wide else []),
    ):
        table.add_column(title, footer=footer, justify="right")
    for name in sorted({name for line in lines for name in line["environments"]}):
        entry = last["environments"].get(name)
        entries = [line["environments"].get(name) for line in lines]
        cells = [format_success(each) if wide else _rate(each, 0) for each in entries]
        if entry is not None:
            cells += [str(entry["episodes"]), str(_no_verdict(entry))]
            cells += [f"{entry['steps_mean']:.2f}"] if wide else []
        table.add_row(name, *cells)
    return table


def _column_title(line: Mapping[str, Any]) -> str:
    """Two lines: how the policy acted, and when."""
    how = VARIANT_NAMES.get(line["variant"]) or ("sampled" if line["temperature"] > 0 else "greedy")
    return f"{how}\n{'success' if line['kind'] == 'checkpoint' else line['kind']}"


def rates_lines(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The success rates of evaluations, and who judged: a line each, or one line if no episode lacks a verdict."""
    complete = [line for line in lines if not (line["missing"] or _no_verdict(line) or line["judge_dollars"])]
    if len(complete) < len(lines) or len(lines) <= MOST_INTERVALS:
        return [format_rates(line) for line in lines]
    evaluators = sorted({name for line in lines for name in line["evaluators"]})
    episodes = sum(line["episodes"] for line in lines)
    return [f"all {episodes} episodes of {len(lines)} evaluations have a verdict (evaluator: {', '.join(evaluators)})"]


def format_rates(line: Mapping[str, Any]) -> str:
    """The success rates of an evaluation, of all episodes first, and who judged, in one line."""
    name = evaluation_name(line["kind"], line["variant"]).replace("_", " ")
    requested = line["episodes"] + _no_verdict(line) + line["missing"]
    blocked = line["no_verdict"].get(BLOCKED, 0)
    cost = f", {line['judge_dollars']:.2f} dollars" if line["judge_dollars"] else ""
    return (
        f"{name}: success {line['success_of_all']:.1%} of all {requested} episodes, "
        f"{_percent(line['success_of_reached'])} of {requested - blocked} reached, "
        f"{_percent(line['success_of_judged'])} of {line['episodes']} with a verdict; "
        f"{blocked} blocked by their website (evaluator: {', '.join(line['evaluators']) or 'none'}{cost})"
    )


def format_success(entry: Mapping[str, Any] | None) -> str:
    """Success rate of episodes with a verdict and its interval, in percent."""
    interval = _interval(entry)
    return f"{_rate(entry, 0)} ({interval})" if interval else "-"


def format_difference(name: str, gain: Mapping[str, Any], width: int = 0) -> str:
    """A contrast of success rates in one line; `width` of the name, so that lines below each other are aligned."""
    points = "+5.1f" if width else "+.1f"
    mean, low, high = (format(100 * value, points) for value in (gain["mean"], *gain["interval"]))
    return f"{name + ':':<{width}} {mean} points, 95 % interval {low} to {high} (bootstrap, {gain['tasks']} tasks)"


def gain_lines(evaluation: Mapping[str, Any]) -> list[str]:
    """Total gain of the run, gain with blank images, and gain that needs the screenshot, from the field `evaluation` of
    a summary; then the success before and after of the episodes that did not fail at their first step, because a gain
    may be one habit less, such as a premature submit.
    """
    names = GAIN_NAMES if evaluation["seeing_gain"] else {"gain": GAIN_NAMES["gain"], "image_gain": IMAGE_GAIN_NAME}
    width = 1 + max(map(len, names.values())) if evaluation["seeing_gain"] else 0
    lines = [format_difference(label, evaluation[name], width) for name, label in names.items() if evaluation[name]]
    rates = [evaluation[kind] and evaluation[kind].get("success_past_first_step") for kind in ("before", "after")]
    if lines and None not in rates:
        before, after = map(_percent, rates)
        lines.append(f"{FIRST_STEP_NAME + ':':<{width}} {before} succeed before, {after} after")
    return lines


def _in_two_lines(entry: Mapping[str, Any]) -> str:
    return f"{_rate(entry, 1)}\n{_interval(entry) or '-'}"


def _rate(entry: Mapping[str, Any] | None, digits: int) -> str:
    rate = None if entry is None else entry["success_of_judged"]
    return "-" if rate is None else f"{rate:.{digits}%}"


def _interval(entry: Mapping[str, Any] | None) -> str:
    """The ends of the interval in percent; empty without one."""
    if entry is None or entry["interval"] is None:
        return ""
    low, high = entry["interval"]
    return f"{100 * low:.0f}-{100 * high:.0f}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _no_verdict(entry: Mapping[str, Any]) -> int:
    return sum(entry["no_verdict"].values())
