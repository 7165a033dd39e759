"""Tables and lines for the terminal: updates, accounting, evaluations, progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_webrl.track.evaluations import BLANK_IMAGES, GREEDY, evaluation_name
from megatron_webrl.types import BLOCKED

VARIANT_NAMES = {BLANK_IMAGES: "blank", GREEDY: "greedy"}
EVALUATION_LEGEND = (
    "success of episodes with a verdict, with its 95 % interval (Wilson), in percent; masked: episodes without one, "
    "that a blocked page, a crash, an error or a time limit ended, or that were never run; they count neither way; "
    "blank: with blank images; episodes and masked are those of the last column of success"
)
IMAGE_GAIN_NAME = "with screenshots over blank images"
GAIN_NAMES = {
    "gain": "gain of the run",
    "blind_gain": "gain with blank images",
    "seeing_gain": "gain that needs the screenshot",
}
OF_ALL_NAME = "no verdict as a failure"  # the contrast of the line above, by intention to treat
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
    """Success of judged episodes in several evaluations of the same tasks: a row per environment, and per source where
    there are several, and the total with its interval."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_footer=True)
    table.add_column("task", footer="all\n95 % interval", overflow="fold")
    for line in lines:  # how the policy acted, and when
        how = VARIANT_NAMES.get(line["variant"]) or ("sampled" if line["temperature"] > 0 else "greedy")
        title = f"{how}\n{'success' if line['kind'] == 'checkpoint' else line['kind']}"
        interval = "-".join(f"{100 * end:.0f}" for end in line["interval"] or ()) or "-"
        footer = f"{_percent(line['success_of_judged'])}\n{interval}"
        table.add_column(title, footer=footer, justify="right", no_wrap=True)
    last = lines[-1]
    counts = {"epi-\nsodes": last["episodes"], "masked": _no_verdict(last) + last["missing"]}
    for title, count in counts.items():
        table.add_column(title, footer=str(count), justify="right")
    names = [("environments", name) for name in sorted({name for line in lines for name in line["environments"]})]
    sources = sorted({name for line in lines for name in line["sources"]})
    for key, name in names + [("sources", name) for name in sources if len(sources) > 1]:
        entries = [line[key].get(name) for line in lines]
        cells = [_percent(entry and entry["success_of_judged"], 0) for entry in entries]
        if (entry := entries[-1]) is not None:
            cells += [str(entry["episodes"]), str(_no_verdict(entry))]
        table.add_row(name if key == "environments" else f"all of {name}", *cells)
    return table


def format_rates(line: Mapping[str, Any]) -> str:
    """The success rates of an evaluation, of all episodes first, and who judged, in one line."""
    name = evaluation_name(line["kind"], line["variant"]).replace("_", " ")
    requested = line["episodes"] + _no_verdict(line) + line["missing"]
    blocked = line["no_verdict"].get(BLOCKED, 0)
    cost = f", {line['judge_dollars']:.2f} dollars" if line["judge_dollars"] else ""
    cost += f", votes differ on {line['votes_differ']:.1%}" if line.get("votes_differ") is not None else ""
    return (
        f"{name}: success {line['success_of_all']:.1%} of all {requested} episodes, "
        f"{_percent(line['success_of_reached'])} of {requested - blocked} reached, "
        f"{_percent(line['success_of_judged'])} of {line['episodes']} with a verdict; "
        f"{blocked} blocked by their website (evaluator: {', '.join(line['evaluators']) or 'none'}{cost})"
    )


def format_published(line: Mapping[str, Any]) -> str:
    """The success rates of an evaluation by the denominators of released code, in one line: docs/evaluation.md."""
    names = {"webgym": "WebGym", "async_webrl": "AsyncWebRL"}
    rates = [f"{name} {_percent(found['success'])} of {found['episodes']}"
             for key, name in names.items() for found in [line["published"][key]]]  # fmt: skip
    return f"by published denominators: {', '.join(rates)}; Online-Mind2Web: of all"


def difference_lines(name: str, gain: Mapping[str, Any], width: int = 0) -> list[str]:
    """A contrast of success rates in one line, and in a second one by intention to treat, where that differs.

    `width` of the name, so that lines below each other are aligned.
    """
    points = "+5.1f" if width else "+.1f"

    def describe(found: Mapping[str, Any]) -> str:
        mean, low, high = (format(100 * value, points) for value in (found["mean"], *found["interval"]))
        return f"{mean} points, 95 % interval {low} to {high} (bootstrap, {found['tasks']} tasks)"

    texts = {name: describe(gain), OF_ALL_NAME: describe(gain["of_all"])}
    if texts[name] == texts[OF_ALL_NAME]:
        del texts[OF_ALL_NAME]
    return [f"{label + ':':<{width}} {text}" for label, text in texts.items()]


def gain_lines(evaluation: Mapping[str, Any]) -> list[str]:
    """Total gain of the run, gain with blank images, and gain that needs the screenshot, from the field `evaluation` of
    a summary; then the success before and after of the episodes that did not fail at their first step, because a gain
    may be one habit less, such as a premature submit.
    """
    names = GAIN_NAMES if evaluation["seeing_gain"] else {"gain": GAIN_NAMES["gain"], "image_gain": IMAGE_GAIN_NAME}
    width = 1 + max(map(len, names.values())) if evaluation["seeing_gain"] else 0
    found = [difference_lines(label, evaluation[name], width) for name, label in names.items() if evaluation[name]]
    lines = [*chain.from_iterable(found)]
    rates = [evaluation[kind] and evaluation[kind].get("success_past_first_step") for kind in ("before", "after")]
    if lines and None not in rates:
        before, after = map(_percent, rates)
        lines.append(f"{FIRST_STEP_NAME + ':':<{width}} {before} succeed before, {after} after")
    return lines


def _percent(rate: float | None, digits: int = 1) -> str:
    return "-" if rate is None else f"{rate:.{digits}%}"


def _no_verdict(entry: Mapping[str, Any]) -> int:
    return sum(entry["no_verdict"].values())
