"""Invariants of a finished run: no ticket lost, skipped or trained twice, whatever failed in between."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

from megatron_webrl.launch.validation import load_config
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.track import episodes, summary
from tests.metrics_page import undocumented


def run_problems(folder: Path, updates: int, open_at_end: int) -> list[str]:
    """Violated invariants of a finished run; empty if there are none.

    folder: of the run; updates: their number; open_at_end: tickets that may have been in flight at its end.
    """
    config = load_config(folder / "config.yaml", ["run.resume=false"])
    content, lines = summary.read_summary(folder), episodes.read_lines(folder)
    accounting = content["accounting"]
    if unknown := undocumented({name for update in content["updates"] for name in update["extra"]}):
        return [f"metrics that docs/metrics.md lacks: {unknown}"]
    problems = [] if content["outcome"] == "finished" else [f"the outcome is {content['outcome']}"]
    if accounting is None or not accounting["matches"]:
        return [*problems, f"the accounting does not match: {accounting}"]
    if (made := [update["version"] for update in content["updates"]]) != list(range(1, updates + 1)):
        problems.append(f"the updates are {made}, not 1 to {updates}")
    if len(lines) != (closed := accounting["trained"] + sum(accounting["dropped"].values())):
        problems.append(f"episodes.jsonl has {len(lines)} lines for {closed} episodes")
    kept = [line for line in lines if line["disposition"] != "duplicate"]
    counts = Counter((line["ticket"], line["index"]) for line in kept)
    if twice := sorted({ticket for (ticket, _), count in counts.items() if count > 1}):
        problems.append(f"tickets counted twice: {twice}")
    trained: dict[int, set[int]] = defaultdict(set)
    for line in kept:
        if line["disposition"] == episodes.TRAINED:
            trained[line["version"]].add(line["ticket"])
    found = {version: len(tickets) for version, tickets in trained.items()}
    if found != dict.fromkeys(range(updates), config.trainer.groups_per_update):
        problems.append(f"groups trained from each version: {found}")
    # Tickets close in roughly their order, so only those that were in flight at the end may be open.
    tickets = {line["ticket"] for line in kept}
    skipped = sorted(set(range(max(tickets, default=-1) + 1)) - tickets)
    if len(skipped) > open_at_end:
        problems.append(f"tickets skipped: {skipped}")
    source = make_source(config.tasks)
    try:
        wanted = {ticket: source.training_task(config.run.seed, ticket).id for ticket in tickets}
    finally:
        source.close()
    if {line["ticket"]: line["task"] for line in kept} != wanted:
        problems.append("a ticket was run with another task than the sampler's")
    return problems
