"""What must hold of a run that has finished, whatever befell it: no ticket lost, skipped or trained twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

from megatron_webrl.launch.validation import load_config
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tracking import episode_log, summary


def wrong_with(folder: Path, updates: int, open_at_end: int) -> list[str]:
    """What is wrong with a finished run of so many updates; empty if nothing is.

    folder: the run's; open_at_end: tickets that may have been in flight when it ended.
    """
    config = load_config(folder / "config.yaml", ["run.resume=false"])
    content, lines = summary.read_summary(folder), episode_log.read_lines(folder)
    accounting = content["accounting"]
    wrong = [] if content["outcome"] == "finished" else [f"the outcome is {content['outcome']}"]
    if accounting is None or not accounting["matches"]:
        return [*wrong, f"the accounting does not match: {accounting}"]
    if (made := [update["version"] for update in content["updates"]]) != list(range(1, updates + 1)):
        wrong.append(f"the updates are {made}, not 1 to {updates}")
    if len(lines) != (closed := accounting["trained"] + sum(accounting["dropped"].values())):
        wrong.append(f"episodes.jsonl has {len(lines)} lines for {closed} episodes")
    kept = [line for line in lines if line["disposition"] != "duplicate"]
    counts = Counter((line["ticket"], line["index"]) for line in kept)
    if twice := sorted({ticket for (ticket, _), count in counts.items() if count > 1}):
        wrong.append(f"tickets counted twice: {twice}")
    trained: dict[int, set[int]] = defaultdict(set)
    for line in kept:
        if line["disposition"] == episode_log.TRAINED:
            trained[line["version"]].add(line["ticket"])
    found = {version: len(tickets) for version, tickets in trained.items()}
    if found != dict.fromkeys(range(updates), config.trainer.groups_per_update):
        wrong.append(f"groups trained from each version: {found}")
    # Tickets are closed in about their order: what is open at the end is what could be in flight then.
    tickets = {line["ticket"] for line in kept}
    skipped = sorted(set(range(max(tickets, default=-1) + 1)) - tickets)
    if len(skipped) > open_at_end:
        wrong.append(f"tickets skipped: {skipped}")
    source = make_source(config.tasks)
    try:
        wanted = {ticket: source.training_task(config.run.seed, ticket).id for ticket in tickets}
    finally:
        source.close()
    if {line["ticket"]: line["task"] for line in kept} != wanted:
        wrong.append("a ticket was run with another task than the sampler's")
    return wrong
