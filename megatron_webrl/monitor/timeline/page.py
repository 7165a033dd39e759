"""The explanation of an update as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_webrl.monitor.timeline.activity import WorkerActivity
from megatron_webrl.monitor.timeline.explanation import (
    EXCHANGE,
    PARTS,
    TRAIN,
    WAIT,
    RunExplanation,
    UpdateExplanation,
)
from megatron_webrl.monitor.timeline.processes import ProcessTimeline

LEAST = 0.005  # share of an update from which a part has a row
MAX_WORKERS = 8  # in the table: the half whose engines are least busy, and the half whose are most busy
_PATH_OF = {WAIT: ("last group:", "waiting,"), TRAIN: ("pack", "log-prob", "forward", "optimizer", "other training")}
_BOUNDS = {
    "rollout": "Rollout bounded it: the trainer waited for groups {wait} of the time.",
    "trainer": "The trainer bounded it: it waited for groups only {wait} of the time.",
    "both": "Both sides bounded it in turn: the trainer waited for groups {wait} of the time.",
}


def render_update(update: UpdateExplanation) -> RenderableType:
    """An update: its parts with the critical path, its workers, and sentences."""
    title = f"update {update.version} took {update.seconds:.1f} s, from the end of update {update.version - 1}"
    parts: list[RenderableType] = [_parts_table(title, update.parts, update.path, update.seconds)]
    if update.workers:
        parts.append(_workers_table(update.workers))
    return Group(*parts, *map(Text, sentences(update)))


def render_run(run: RunExplanation) -> RenderableType:
    """Means over all updates."""
    title = f"updates {run.first} to {run.last}, mean: {run.seconds:.1f} s"
    busy = f"Engines had requests for {run.engine_busy:.0%} of the time."
    outlook = _outlook(run.estimate.one_more_engine, run.estimate.one_more_trainer)
    return Group(_parts_table(title, run.parts, run.path, run.seconds), Text(busy), Text(outlook))


def sentences(update: UpdateExplanation) -> list[str]:
    """What bounded an update, what idled, which group came last, what more machines would give."""
    found = [_BOUNDS[update.bound].format(wait=f"{update.wait_share:.0%}")]
    if update.waited_for and update.parts[WAIT] > 0.05 * update.seconds:
        least = min(update.waited_for, key=lambda each: each.engine_busy)
        shares = sorted(least.shares.items(), key=lambda each: -each[1])
        spent = ", ".join(f"{share:.0%} {name}" for name, share in shares if share >= 0.005)
        whose = f"{least.worker}" if len(update.waited_for) == 1 else f"{least.worker}, whose engine was least busy,"
        found.append(
            f"Meanwhile {whose} had a request in its engine for {least.engine_busy:.0%} of the time; its episodes were "
            f"{spent or 'not running'}."
        )
        if least.no_tickets >= 0.1:
            found.append(f"It had room for more groups, and no ticket, for {least.no_tickets:.0%} of the time.")
    if (last := update.last_group) is not None:
        found.append(
            f"The group that arrived last was ticket {last.ticket} of {last.worker}, claimed "
            f"{last.claimed_before:.1f} s before. Its episode {last.ticket}.{last.episode} ended last; "
            f"the longest part: {last.slowest}, {last.slowest_seconds:.1f} s."
        )
    if update.workers:
        idle = 1 - sum(each.engine_busy + each.engine_paused for each in update.workers) / len(update.workers)
        found.append(
            f"Idle: the trainer for {update.parts[WAIT]:.1f} s, the engines for {idle:.0%} of the time. "
            f"The longest pause of an engine for weights: {update.pause:.2f} s."
        )
    return [*found, _outlook(update.estimate.one_more_engine, update.estimate.one_more_trainer)]


def clock_line(processes: Sequence[ProcessTimeline]) -> str:
    """How well the clocks of the nodes agree; empty for a run on one machine."""
    errors = [each.clock_error for each in processes]
    if all(error == 0.0 for error in errors):
        return ""
    known = [error for error in errors if error is not None]
    unknown = f"; {len(errors) - len(known)} processes are placed by their time of day" * (len(known) < len(errors))
    return f"Clocks of the nodes are aligned within {1e3 * max(known, default=0.0):.1f} ms{unknown}."


def _outlook(engine: float, trainer: float) -> str:
    return f"One more engine: about {engine:.1f} s per update; one more trainer replica: about {trainer:.1f} s."


def _parts_table(title: str, parts: Mapping[str, float], path: Mapping[str, float], seconds: float) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("critical path, on the trainer's first rank")
    for name in ("s", "share"):
        table.add_column(name, justify="right")
    for part in (*PARTS, "other"):
        value = parts.get(part, 0.0)
        if part not in (WAIT, TRAIN, EXCHANGE) and value < LEAST * seconds:
            continue
        table.add_row(part, f"{value:.2f}", f"{value / seconds:.0%}")
        for name, within in path.items():
            if name.startswith(_PATH_OF.get(part, ())) and _PATH_OF.get(part) and within >= LEAST * seconds:
                table.add_row(f"  {name}", f"{within:.2f}", f"{within / seconds:.0%}", style="dim")
    return table


def _workers_table(workers: Sequence[WorkerActivity]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("worker")
    columns = ("engine\nbusy", "re-\nquests", "epi-\nsodes", "gene-\nrating", "in\nbrowsers", "waiting for\na browser")
    for name in (*columns, "judging", "other", "no\nticket"):
        table.add_column(name, justify="right")
    by_load = sorted(workers, key=lambda each: each.engine_busy)
    half = MAX_WORKERS // 2
    shown = by_load if len(by_load) <= MAX_WORKERS else [*by_load[:half], *by_load[-half:]]
    for each in shown:
        shares = [each.shares.get(name, 0.0) for name in ("generating", "in browsers", "waiting for a browser")]
        shares += [each.shares.get(name, 0.0) for name in ("judging", "other")]
        table.add_row(
            each.worker, f"{each.engine_busy:.0%}", f"{each.requests:.1f}", f"{each.episodes:.1f}",
            *(f"{share:.0%}" for share in shares), f"{each.no_tickets:.0%}",
        )  # fmt: skip
    if len(shown) < len(workers):
        table.caption = f"{len(workers)} workers: those whose engines were least and most busy"
    return table
