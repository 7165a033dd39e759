"""Simulated rollouts, as the page of rollouts shows them: workers that report to a control service."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from megatron_webrl.control.child_process import die_with_parent
from megatron_webrl.control.client import ControlClient
from megatron_webrl.track.live_rollouts import (
    ACTING,
    JUDGING,
    OBSERVING,
    STATES,
    WAITING_FOR_MODEL,
    WAITING_FOR_STEP,
    LiveRollout,
    RolloutTable,
)
from megatron_webrl.types import Task

ROLLOUTS = 40  # of a worker
GROUP, MAX_STEPS = 8, 15
CHANGES_PER_SECOND = 5
TICK_SECONDS = 0.02
OTHER_STATES = (WAITING_FOR_STEP, WAITING_FOR_MODEL, ACTING, OBSERVING, JUDGING, *STATES[:2])
NICE = 10


def simulate(stop: Any, address: Path, workers: int) -> None:
    """Run the workers' tables until `stop` is set."""
    os.nice(NICE)
    die_with_parent()
    tables, chance = [], random.Random(0)
    for worker in range(workers):
        table = RolloutTable()
        control = ControlClient(address, f"rollout-{worker}")
        control.start_heartbeat()
        control.report_rollouts(table.encode)
        tables.append(table)
    live = [open_rollout(table, worker, slot) for worker, table in enumerate(tables) for slot in range(ROLLOUTS)]
    due = 0.0
    while not stop.is_set():
        due += len(live) * CHANGES_PER_SECOND * TICK_SECONDS
        for _ in range(int(due)):
            each = chance.choice(live)
            if each.state == ACTING:
                each.end_step([chance.randrange(40, 44)])
            else:
                each.set(chance.choice(OTHER_STATES))
            if each.step >= MAX_STEPS:
                each.finish(chance.choice(("success", "failure", "browser_timeout")))
                each.step = 0
        due -= int(due)
        stop.wait(TICK_SECONDS)


def open_rollout(table: RolloutTable, worker: int, slot: int) -> LiveRollout:
    """A rollout of a worker's table, in groups of GROUP."""
    ticket = worker * 1000 + slot // GROUP
    site = f"shop-{ticket % 29}.test"
    difficulty = ("easy", "medium", "hard")[ticket % 3]
    task = Task(f"web/{ticket}", "web", "", 0, MAX_STEPS, difficulty=difficulty, website=site)
    live = table.open("training", ticket, slot % GROUP, GROUP, task)
    live.start_try()
    return live
