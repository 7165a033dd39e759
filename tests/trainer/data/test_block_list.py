"""Websites that block the agent: events, restoring, and the end of a block."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_webrl.trainer.data.task_sampler import BLOCK_LIST_FILE as FILE
from megatron_webrl.trainer.data.task_sampler import BlockList
from megatron_webrl.types import Group
from tests.trainer.data import groups

HOUR = 3600.0


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def group(ticket: int, website: str, *outcomes: str) -> Group:
    return groups.group(ticket, "page", *outcomes, website=website)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_website_is_blocked_by_any_blocked_episode_until_its_time_is_over(tmp_path: Path) -> None:
    blocked: dict[str, float] = {}
    clock = Clock()
    block_list = BlockList(blocked, tmp_path / FILE, clock)
    block_list.record_group(group(3, "a.example", "success", "blocked", "failure"))
    block_list.record_group(group(4, "b.example", "failure", "judge_error"))
    clock.now += HOUR
    block_list.record_group(group(5, "a.example", "blocked"))  # does not prolong it
    block_list.record_group(group(6, "c.example", "blocked", "blocked"))
    assert blocked.keys() == {"a.example", "c.example"}
    assert block_list.pop_metrics() == {"blocked_websites": 2.0, "block_list/added": 2.0}
    clock.now += 10.9 * HOUR
    block_list.remove_expired()
    assert blocked.keys() == {"a.example", "c.example"}
    clock.now += 0.1 * HOUR
    block_list.remove_expired()
    assert blocked.keys() == {"c.example"}
    assert block_list.pop_metrics() == {"blocked_websites": 1.0, "block_list/added": 0.0}
    block_list.record_group(group(9, "a.example", "blocked"))
    assert blocked.keys() == {"a.example", "c.example"}
    assert lines(tmp_path) == [
        {"time": 1000.0, "website": "a.example", "event": "blocked", "until": 44200.0, "ticket": 3},
        {"time": 4600.0, "website": "c.example", "event": "blocked", "until": 47800.0, "ticket": 6},
        {"time": 44200.0, "website": "a.example", "event": "unblocked", "until": 44200.0, "ticket": None},
        {"time": 44200.0, "website": "a.example", "event": "blocked", "until": 87400.0, "ticket": 9},
    ]


def test_tasks_without_a_website_block_nothing(tmp_path: Path) -> None:
    blocked: dict[str, float] = {}
    BlockList(blocked, tmp_path / FILE).record_group(group(0, "", "blocked"))
    assert not blocked
    assert not (tmp_path / FILE).exists()


def test_blocks_of_the_file_that_last_are_restored(tmp_path: Path) -> None:
    clock = Clock()
    block_list = BlockList({}, tmp_path / FILE, clock)
    for ticket, website in enumerate(("early.example", "a.example", "b.example")):
        block_list.record_group(group(ticket, website, "blocked"))
        clock.now += HOUR
    with (tmp_path / FILE).open("a") as file:
        file.write('{"time": 1, "webs')
    clock.now = 1000.0 + 12 * HOUR
    older = {"b.example": 5e9}
    restored = BlockList(older, tmp_path / FILE, clock)
    restored.restore()
    restored.restore()
    assert older == {"a.example": 1000.0 + 13 * HOUR, "b.example": 5e9}
    assert len((tmp_path / FILE).read_text().splitlines()) == 4


def test_the_website_of_the_blocked_episode_is_blocked(tmp_path: Path) -> None:
    blocked: dict[str, float] = {}
    [first], [second] = group(0, "a.example", "failure").trajectories, group(0, "b.example", "blocked").trajectories
    BlockList(blocked, tmp_path / FILE).record_group(Group(0, (first, second)))
    assert blocked.keys() == {"b.example"}
