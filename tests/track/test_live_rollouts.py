"""The states of rollouts, over the tries and the steps of an episode."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.control.liveness import VIEWED
from megatron_webrl.track.live_rollouts import (
    ACTING,
    CHANGING,
    FIXED,
    JUDGING,
    MAX_CHARACTERS,
    NAVIGATING,
    STATES,
    WAITING_FOR_MODEL,
    RolloutTable,
    RunningEpisodes,
    running_file,
)
from tests.trajectories import trajectory
from tests.waiting import eventually

TASK = replace(trajectory(0).task, website="shop.test", max_steps=9)


def rows(table: RolloutTable) -> dict[str, dict[str, Any]]:
    found = json.loads(table.encode())[1]
    return {row[0]: dict(zip(FIXED + CHANGING, row, strict=True)) for row in found}


def test_an_episode_passes_through_its_states_and_a_fault_starts_another_try():
    table = RolloutTable()
    live = table.open("training", 7, 1, 4, TASK)

    def state() -> tuple[Any, ...]:
        row = rows(table)["training-7-1"]
        return STATES[row["state"]], row["reason"], row["step"], row["version"], row["tries"]

    live.start_try()
    before = live.since
    assert state() == ("waiting for browser", "", 0, None, 1)
    for each in (NAVIGATING, WAITING_FOR_MODEL, ACTING):
        live.set(each)
        assert state() == (each, "", 0, None, 1)
    assert live.since > before
    now, [row] = json.loads(table.encode())
    assert 0 <= now - row[-1] < 5
    live.end_step([4, 5])
    assert state() == ("observing", "", 1, 5, 1)
    live.end_step([])
    assert state() == ("observing", "", 2, None, 1)
    live.finish("browser_crash")
    assert state() == ("masked", "browser_crash", 2, None, 1)
    assert table.open("training", 7, 1, 4, TASK) is live, "another try is the same rollout"
    live.start_try()
    assert state() == ("waiting for browser", "", 0, None, 2)
    live.set(JUDGING)
    live.finish("success")
    assert state() == ("success", "", 0, None, 2)


def test_a_group_leaves_the_table_together_and_an_evaluation_episode_alone():
    table = RolloutTable()
    for kind, ticket in (("training", 7), ("training", 70), ("after", 7)):
        for index in range(2):
            table.open(kind, ticket, index, 2, TASK)
    table.close("training", 7)
    table.close("after", 7, 1)
    table.close("after", 99)
    assert sorted(rows(table)) == ["after-7-0", "training-70-0", "training-70-1"]


class Viewers:
    """The part of a control client by which a worker learns what is looked at."""

    role = "rollout-0"

    def __init__(self) -> None:
        self.keys: list[str] = []

    def get_json(self, key: str) -> Any:
        assert key == VIEWED
        return {"episodes": [f"{self.role}/{each}" for each in self.keys]}

    def report_rollouts(self, encode: Callable[[], str]) -> None: ...


async def test_the_file_of_an_episode_goes_with_its_last_viewer(tmp_path: Path):
    config, table, viewers = Config(), RolloutTable(), Viewers()
    config.run.directory = str(tmp_path)
    for index in range(2):
        table.open("training", 7, index, 2, TASK).episode_so_far = lambda: trajectory(7)
    control: Any = viewers
    running = RunningEpisodes(config, control, table)
    folder = running_file(config.run_folder, viewers.role, "").parent

    async def written(*keys: str) -> None:
        viewers.keys = list(keys)

        def done() -> bool:
            running.poll()
            return sorted(path.stem for path in folder.glob("*.record")) == sorted(keys)

        await eventually(done, 10)

    await written("training-7-0", "training-7-1")
    await written("training-7-1")
    await written()
    await running.close()


def test_a_row_names_the_task_and_is_small_whatever_the_task_is():
    table = RolloutTable()
    table.open("training", 7, 0, 4, TASK)
    row = rows(table)["training-7-0"]
    assert (row["task"], row["site"], row["limit"], row["group_size"]) == (TASK.id, "shop.test", 9, 4)
    table.open("training", 8, 0, 4, replace(TASK, id="x" * 10**6, website="\ud800" * 10**6))
    assert len(table.encode()) < 2000
    assert len(rows(table)["training-8-0"]["task"]) == MAX_CHARACTERS
