"""Groups of one task, by outcome."""

from __future__ import annotations

from dataclasses import replace

from megatron_webrl.types import Group
from tests.trajectories import trajectory


def group(ticket: int, environment: str, *outcomes: str, website: str = "", task_id: str = "") -> Group:
    made = [trajectory(ticket, i, outcome=outcome, group_size=len(outcomes)) for i, outcome in enumerate(outcomes)]
    task = replace(made[0].task, id=task_id or f"task {ticket}", environment=environment, website=website)
    return Group(ticket, tuple(replace(each, task=task) for each in made))
