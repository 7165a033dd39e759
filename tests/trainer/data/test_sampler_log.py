"""The log of the task sampler over crashes of the trainer, and how much of it is kept."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.tasks import SamplerConfig, TasksConfig
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.tasks.sampler import states
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.tasks.sampler.samplers import updated_pass_rate
from megatron_webrl.tasks.sampler.states import SamplerStateReader
from megatron_webrl.tasks.sampler.task_files import FileDigest
from megatron_webrl.trainer.data import task_sampler
from megatron_webrl.trainer.data.task_sampler import TaskSampler
from megatron_webrl.types import Group
from tests.job_control import connect, control_service
from tests.trajectories import trajectory

WEBSITES = [f"{letter}.example" for letter in "abcdefgh"]
TASKS = TasksConfig(source="webgym", train_file="train.jsonl", sampler=SamplerConfig("curriculum", per="website"))


@pytest.fixture
def controls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ControlClient, ControlClient]]:
    """Connections of a trainer and a worker; logs are cut into small pieces."""
    monkeypatch.setattr(task_sampler, "FOLD_ENTRIES", 4)
    monkeypatch.setattr(states, "CHUNK_ENTRIES", 8)
    with control_service(tmp_path) as address:
        yield connect(address, "trainer-0"), connect(address, "rollout-0")


def group(ticket: int, website: str, *outcomes: str) -> Group:
    made = [trajectory(ticket, i, outcome=outcome, group_size=len(outcomes)) for i, outcome in enumerate(outcomes)]
    return Group(ticket, tuple(replace(each, task=replace(each.task, website=website)) for each in made))


class Simulation:
    """A run whose trainer crashes, and an oracle: pass rates in a dictionary, and what each ticket was admitted by."""

    def __init__(self, controls: tuple[ControlClient, ControlClient], folder: Path, seed: int) -> None:
        self.control, self.worker_control = controls
        self.folder, self.random = folder, random.Random(seed)
        self.reader = SamplerStateReader(self.worker_control, 60)
        self.rates = dict.fromkeys(WEBSITES, 0.5)
        self.claimed = self.limit = self.version = 0
        self.in_flight: set[int] = set()
        self.closed: set[int] = set()
        self.recorded: dict[int, tuple[str, float]] = {}
        self.admitted: dict[int, tuple] = {}  # by ticket
        self.sampler = TaskSampler(TASKS, 0, (), None, folder)
        self.sampler.publish_initial_states(self.control)
        self.checkpoint: tuple[Any, ...] = ()
        self.save()

    def known(self, ticket: int, reader: SamplerStateReader | None = None) -> tuple:
        knowledge: SamplerKnowledge = asyncio.run((reader or self.reader).knowledge(ticket))
        return tuple(knowledge.pass_rates(WEBSITES, 0.5)), knowledge.blocked, knowledge.version

    def claim(self) -> None:
        """Claim a ticket, whose knowledge must be what the trainer had learned when the limit rose above it."""
        if self.claimed < self.limit:
            self.admitted[self.claimed] = self.known(self.claimed)
            self.in_flight.add(self.claimed)
            self.claimed += 1

    def close(self) -> None:
        if self.in_flight:
            ticket, website = self.random.choice(sorted(self.in_flight)[:4]), self.random.choice(WEBSITES)
            outcomes = self.random.choices(("success", "failure", "blocked"), (8, 8, 1), k=4)
            made = group(ticket, website, *outcomes)
            self.sampler.block_list.record_group(made)
            self.sampler.record_group(made)
            self.in_flight.remove(ticket)
            self.closed.add(ticket)
            self.recorded[ticket] = website, outcomes.count("success") / max(1, 4 - outcomes.count("blocked"))

    def learn(self) -> None:
        for _, (website, rate) in sorted(self.recorded.items()):
            self.rates[website] = updated_pass_rate(self.rates[website], rate)
        self.recorded.clear()

    def raise_limit(self) -> None:
        self.learn()
        self.version += 1
        self.sampler.publish_adapted_state(self.limit, self.version)
        self.limit = max(self.limit, self.claimed) + 5

    def save(self) -> None:
        self.learn()
        saved = json.loads(json.dumps(self.sampler.state_dict()))
        self.checkpoint = saved, set(self.closed), self.claimed, dict(self.rates), self.version

    def crash(self) -> None:
        """Restart from the checkpoint. Tickets in flight survive; others that it does not know as closed are lost."""
        saved, closed, claimed, rates, self.version = self.checkpoint
        self.closed, self.rates = set(closed), dict(rates)
        self.recorded.clear()
        open_tickets = set(range(self.claimed)) - self.closed
        self.sampler = TaskSampler(TASKS, self.claimed, open_tickets, saved, self.folder, self.version)
        self.sampler.publish_initial_states(self.control)
        self.limit = self.claimed
        kept = self.in_flight | {ticket for ticket in open_tickets if ticket < claimed}
        for reader in (self.reader, SamplerStateReader(self.worker_control, 60)):
            assert {ticket: self.known(ticket, reader) for ticket in kept} == {
                ticket: self.admitted[ticket] for ticket in kept
            }
        for ticket in open_tickets - kept:  # lost, and issued again: may draw otherwise, but only once
            self.admitted[ticket] = self.known(ticket)
        self.in_flight = open_tickets


@pytest.mark.parametrize("seed", range(4))
def test_tickets_keep_their_knowledge_over_crashes_of_the_trainer(
    controls: tuple[ControlClient, ControlClient], tmp_path: Path, seed: int
) -> None:
    run = Simulation(controls, tmp_path, seed)
    crashes = 0
    for _ in range(400):
        what = run.random.choices(("claim", "close", "raise", "save", "crash"), (10, 10, 5, 0.3, 0.3))[0]
        {"claim": run.claim, "close": run.close, "raise": run.raise_limit, "save": run.save, "crash": run.crash}[what]()
        crashes += what == "crash"
        if what in ("raise", "crash"):
            assert [run.sampler.pass_rate(website) for website in WEBSITES] == list(run.rates.values())
            assert all(run.known(ticket) == run.admitted[ticket] for ticket in run.in_flight)
    assert crashes
    assert run.claimed > 60


def test_the_log_of_a_job_may_be_folded_beyond_the_checkpoint(
    controls: tuple[ControlClient, ControlClient], tmp_path: Path
) -> None:
    def rate_at(ticket: int) -> float | None:
        return asyncio.run(SamplerStateReader(controls[1], 60).knowledge(ticket)).pass_rate("a.example")

    dead = TaskSampler(TASKS, 0, (), None, tmp_path)
    dead.publish_initial_states(controls[0])
    dead.record_group(group(0, "a.example", "success"))
    dead.publish_adapted_state(4, 1)
    checkpoint = json.loads(json.dumps(dead.state_dict()))
    for ticket in range(1, 10):
        dead.record_group(group(ticket, WEBSITES[ticket % 3], "failure"))
        dead.publish_adapted_state(ticket + 4, 2)
    assert dead.log.base > checkpoint["log"]["end"]
    admitted = {ticket: rate_at(ticket) for ticket in range(10, 14)}
    resumed = TaskSampler(TASKS, 14, range(1, 14), checkpoint, tmp_path, 1)
    resumed.publish_initial_states(controls[0])
    assert (resumed.pass_rate("a.example"), resumed.pass_rate("b.example")) == (0.65, 0.5)
    assert {ticket: rate_at(ticket) for ticket in admitted} == admitted
    assert admitted[10] < 0.5
    assert (rate_at(3), rate_at(4)) == (None, 0.65)
    resumed.publish_adapted_state(14, 1)
    assert rate_at(14) == 0.65


def test_a_trainer_that_crashes_before_the_first_ticket_leaves_a_state_for_it(
    controls: tuple[ControlClient, ControlClient], tmp_path: Path
) -> None:
    for version in (0, 3):
        sampler = TaskSampler(TASKS, 0, (), None, tmp_path, version)
        sampler.publish_initial_states(controls[0])
        knowledge = asyncio.run(SamplerStateReader(controls[1], 60).knowledge(0))
        assert knowledge.version == version


def test_neither_store_nor_checkpoint_grows_with_the_groups(
    controls: tuple[ControlClient, ControlClient], tmp_path: Path
) -> None:
    sampler, sizes, keys = TaskSampler(TASKS, 0, (), None, tmp_path), [], []
    sampler.publish_initial_states(controls[0])
    for ticket in range(300):
        sampler.record_group(group(ticket, WEBSITES[ticket % 8], "success", "failure"))
        sampler.publish_adapted_state(ticket + 4, ticket)
        log = sampler.state_dict()["log"]
        sizes.append(len(log["folded"]) + len(log["entries"]))
        keys.append(len(controls[0].get_json("sampler/index")["chunks"]))
    assert max(sizes) <= 8 + 4 + 4  # names, entries before the next fold, groups in flight
    assert max(keys) <= 4
    assert sampler.log.end == 300


def test_a_checkpoint_of_another_training_file_is_refused(tmp_path: Path) -> None:
    files = {"tasks.train_file": FileDigest("train.jsonl", "aa"), "tasks.test_file": FileDigest("test.jsonl", "bb")}
    saved = json.loads(json.dumps(TaskSampler(TASKS, 0, (), None, tmp_path, files=files).state_dict()))
    moved = {"tasks.train_file": FileDigest("moved.jsonl", "aa"), "tasks.test_file": FileDigest("test.jsonl", "cc")}
    TaskSampler(TASKS, 0, (), saved, tmp_path, files=moved)
    other = {"tasks.train_file": FileDigest("train.jsonl", "cc")}
    with pytest.raises(JobFailed, match=r"^tasks\.train_file=train\.jsonl has the digest cc, but .* aa, .* a new run"):
        TaskSampler(TASKS, 0, (), saved, tmp_path, files=other)


def test_pass_rates_of_other_units_are_forgotten_and_blocks_are_not(
    controls: tuple[ControlClient, ControlClient], tmp_path: Path
) -> None:
    sampler = TaskSampler(TASKS, 0, (), None, tmp_path)
    sampler.block_list.record_group(group(0, "a.example", "blocked", "success"))
    sampler.record_group(group(0, "a.example", "blocked", "success"))
    saved = json.loads(json.dumps(sampler.state_dict()))
    assert sampler.pass_rate("a.example") == 0.65
    by_task = replace(TASKS, sampler=SamplerConfig("curriculum", per="task"))
    resumed = TaskSampler(by_task, 1, (), saved, tmp_path, version=7)
    resumed.publish_initial_states(controls[0])
    knowledge = asyncio.run(SamplerStateReader(controls[1], 60).knowledge(1))
    assert (knowledge.pass_rate("a.example"), knowledge.blocked, knowledge.version) == (None, {"a.example"}, 7)
