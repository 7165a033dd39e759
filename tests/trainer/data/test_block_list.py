"""Websites that block the agent: from the group that shows it to the state that leaves them out."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_webrl.config.tasks import SamplerConfig, TasksConfig
from megatron_webrl.tasks.sampler.knowledge import SamplerLog
from megatron_webrl.tasks.sampler.states import SamplerStateReader
from megatron_webrl.trainer.data.block_list import FILE, BlockList
from megatron_webrl.trainer.data.task_sampler import TaskSampler
from megatron_webrl.types import Group
from tests.job_control import connect, control_service
from tests.trajectories import trajectory

HOUR = 3600.0


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def group(ticket: int, website: str, *outcomes: str, task_id: str = "") -> Group:
    made = [trajectory(ticket, i, outcome=outcome, group_size=len(outcomes)) for i, outcome in enumerate(outcomes)]
    task = replace(made[0].task, id=task_id or f"task {ticket}", website=website, source="web")
    return Group(ticket, tuple(replace(each, task=task) for each in made))


def blocked(log: SamplerLog) -> frozenset[str]:
    return log.at(log.end).blocked


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_website_is_blocked_by_any_blocked_episode_until_its_time_is_over(tmp_path: Path) -> None:
    log, clock = SamplerLog(), Clock()
    block_list = BlockList(log, 12.0, tmp_path / FILE, clock)
    block_list.record_group(group(3, "a.example", "success", "blocked", "failure"))
    block_list.record_group(group(4, "b.example", "failure", "judge_error"))
    clock.now += HOUR
    block_list.record_group(group(5, "a.example", "blocked"))  # does not prolong it
    block_list.record_group(group(6, "c.example", "blocked", "blocked"))
    assert blocked(log) == {"a.example", "c.example"}
    assert block_list.pop_metrics() == {"blocked_websites": 2.0, "block_list/added": 2.0}
    clock.now += 10.9 * HOUR
    block_list.remove_expired()
    assert blocked(log) == {"a.example", "c.example"}
    clock.now += 0.1 * HOUR
    block_list.remove_expired()
    assert blocked(log) == {"c.example"}
    assert block_list.pop_metrics() == {"blocked_websites": 1.0, "block_list/added": 0.0}
    block_list.record_group(group(9, "a.example", "blocked"))
    assert blocked(log) == {"a.example", "c.example"}
    assert lines(tmp_path) == [
        {"time": 1000.0, "website": "a.example", "event": "blocked", "until": 44200.0, "ticket": 3},
        {"time": 4600.0, "website": "c.example", "event": "blocked", "until": 47800.0, "ticket": 6},
        {"time": 44200.0, "website": "a.example", "event": "unblocked", "until": 44200.0, "ticket": None},
        {"time": 44200.0, "website": "a.example", "event": "blocked", "until": 87400.0, "ticket": 9},
    ]


def test_without_block_hours_nothing_is_blocked_and_earlier_blocks_end(tmp_path: Path) -> None:
    log = SamplerLog()
    BlockList(log, 1.0, tmp_path / FILE).record_group(group(0, "a.example", "blocked"))
    assert blocked(log) == {"a.example"}
    block_list = BlockList(log, 0.0, tmp_path / FILE)
    block_list.record_group(group(1, "b.example", "blocked"))
    assert blocked(log) == {"a.example"}
    block_list.remove_expired()
    assert not blocked(log)
    assert [line["event"] for line in lines(tmp_path)] == ["blocked", "unblocked"]


def test_tasks_without_a_website_block_nothing(tmp_path: Path) -> None:
    log = SamplerLog()
    BlockList(log, 1.0, tmp_path / FILE).record_group(group(0, "", "blocked"))
    assert log.end == 0
    assert not (tmp_path / FILE).exists()


def test_blocks_of_the_file_that_last_are_restored(tmp_path: Path) -> None:
    clock = Clock()
    block_list = BlockList(SamplerLog(), 12.0, tmp_path / FILE, clock)
    for ticket, website in enumerate(("early.example", "a.example", "b.example")):
        block_list.record_group(group(ticket, website, "blocked"))
        clock.now += HOUR
    with (tmp_path / FILE).open("a") as file:
        file.write('{"time": 1, "webs')
    clock.now = 1000.0 + 12 * HOUR
    older = SamplerLog()
    older.append("block", "b.example", 5e9)
    restored = BlockList(older, 12.0, tmp_path / FILE, clock)
    restored.restore()
    restored.restore()
    assert older.blocks.all(older.end) == {"a.example": 1000.0 + 13 * HOUR, "b.example": 5e9}
    assert older.end == 2
    assert len((tmp_path / FILE).read_text().splitlines()) == 4
    unblocked = SamplerLog()
    BlockList(unblocked, 0.0, tmp_path / FILE, clock).restore()
    assert unblocked.end == 0


def test_the_website_of_the_blocked_episode_is_blocked(tmp_path: Path) -> None:
    log = SamplerLog()
    [first], [second] = group(0, "a.example", "failure").trajectories, group(0, "b.example", "blocked").trajectories
    BlockList(log, 1.0, tmp_path / FILE).record_group(Group(0, (first, second)))
    assert blocked(log) == {"b.example"}


async def test_a_job_that_resumes_from_an_older_checkpoint_keeps_the_blocks(tmp_path: Path) -> None:
    tasks = TasksConfig(source="webgym", train_file="train.jsonl")
    sampler = TaskSampler(tasks, 0, (), None, tmp_path)
    checkpoint = json.loads(json.dumps(sampler.state_dict()))
    sampler.block_list.record_group(group(0, "a.example", "blocked"))
    with control_service(tmp_path) as address:
        resumed = TaskSampler(tasks, 4, range(4), checkpoint, tmp_path)
        resumed.publish_initial_states(connect(address, "trainer-0"))
        resumed.publish_adapted_state(6, 1)
        worker = SamplerStateReader(connect(address, "rollout-0"), 60)
        assert [(await worker.knowledge(ticket)).blocked for ticket in (5, 6)] == [frozenset(), {"a.example"}]


def test_a_group_of_several_tasks_teaches_no_pass_rate(tmp_path: Path) -> None:
    tasks = TasksConfig(source="webgym", sampler=SamplerConfig("curriculum", per="website"))
    sampler = TaskSampler(tasks, 0, (), None, tmp_path)
    [first], [second] = (group(0, "a", "success", task_id=name).trajectories for name in "xy")
    sampler.record_group(Group(0, (first, second)))
    sampler.record_group(group(1, "b", "success"))
    assert [entry[1:3] for entry in sampler.state_dict()["log"]["entries"]] == [["pass", "b"]]


async def test_admitted_tickets_keep_their_meaning_and_a_checkpoint_keeps_the_list(tmp_path: Path) -> None:
    tasks = TasksConfig(source="webgym", train_file="train.jsonl")
    with control_service(tmp_path) as address:
        sampler = TaskSampler(tasks, 0, (), None, tmp_path)
        sampler.publish_initial_states(connect(address, "trainer-0"))
        worker = SamplerStateReader(connect(address, "rollout-0"), 60)
        sampler.block_list.record_group(group(0, "a.example", "blocked"))
        assert not (await worker.knowledge(5)).blocked
        sampler.publish_adapted_state(6, 1)
        assert not (await worker.knowledge(5)).blocked
        assert (await worker.knowledge(6)).blocked == {"a.example"}
    (again := tmp_path / "again").mkdir()
    with control_service(again) as address:
        resumed = TaskSampler(tasks, 6, range(6), json.loads(json.dumps(sampler.state_dict())), tmp_path)
        resumed.publish_initial_states(connect(address, "trainer-0"))
        worker = SamplerStateReader(connect(address, "rollout-0"), 60)
        assert not (await worker.knowledge(5)).blocked
        assert (await worker.knowledge(6)).blocked == {"a.example"}


async def test_a_restarted_trainer_keeps_websites_that_were_blocked_after_its_checkpoint(tmp_path: Path) -> None:
    tasks = TasksConfig(source="webgym", train_file="train.jsonl")
    with control_service(tmp_path) as address:
        control = connect(address, "trainer-0")
        dead = TaskSampler(tasks, 0, (), None, tmp_path)
        dead.publish_initial_states(control)
        checkpoint = dead.state_dict()
        dead.block_list.record_group(group(0, "a.example", "blocked"))
        dead.publish_adapted_state(6, 1)
        sampler = TaskSampler(tasks, 4, range(4), checkpoint, tmp_path)
        sampler.publish_initial_states(control)
        sampler.publish_adapted_state(6, 1)
        worker = SamplerStateReader(connect(address, "rollout-0"), 60)
        assert [(await worker.knowledge(ticket)).blocked for ticket in (5, 6)] == [frozenset(), {"a.example"}]


def test_metrics_of_a_task_file_count_tasks_websites_and_duplicates(tmp_path: Path) -> None:
    tasks = TasksConfig(source="webgym", sampler=SamplerConfig("curriculum", per="difficulty"))
    sampler = TaskSampler(tasks, 0, (), None, tmp_path)
    for ticket, (website, task_id) in enumerate([("a", "1"), ("b", "2"), ("a", "3"), ("b", "2"), ("b", "2")]):
        sampler.record_group(group(ticket, website, "success", task_id=task_id))
    resumed = TaskSampler(tasks, 5, (), json.loads(json.dumps(sampler.state_dict())), tmp_path)
    assert resumed.metrics() == sampler.metrics() == {
        "sampler/tasks_seen": 3.0, "sampler/websites_seen": 2.0, "sampler/duplicate_tasks": 2.0,
        "blocked_websites": 0.0, "block_list/added": 0.0,
        "sampler/pass_rate/easy": 1 - 0.5 * 0.7**5, "sampler/pass_rate/medium": 0.5, "sampler/pass_rate/hard": 0.5,
    }  # fmt: skip
