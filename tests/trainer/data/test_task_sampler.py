"""Task sampling through coordinator, ring, control service and checkpoint state; and its bookkeeping alone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.config.tasks import GrowingStepsConfig, SamplerConfig, TasksConfig, tasks_config
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.tasks.files.table import FileDigest
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.sampler import knowledge, samplers
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.trainer.data.task_sampler import TaskSampler
from megatron_webrl.types import Group, Task
from tests.gloo import spawn
from tests.trainer.data import sampler_ranks
from tests.trainer.data.groups import group
from tests.trainer.data.sampler_ranks import SKILL


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sampler")
    spawn(sampler_ranks.run, str(folder), ranks=1, seconds=300)
    return torch.load(folder / "found.pt", weights_only=False)


SAMPLERS = ("curriculum", "near_target")


def test_a_resumed_run_goes_on_with_the_tasks_of_an_uninterrupted_one(found) -> None:
    for sampler in SAMPLERS:
        whole, resumed = found[sampler, "whole"], found[sampler, "resumed"]
        assert not whole["open"]
        assert len(resumed["open"]) == 2
        assert all(len(tickets) >= 7 for tickets in resumed["open"])  # they were in flight, and are issued again
        assert len(whole["tasks"]) > 60
        assert all(len(tasks) == 1 for tasks in resumed["tasks"].values())
        for name in ("tasks", "rates", "base"):
            assert resumed[name] == whole[name], (sampler, name)
        versions = list(whole["versions"].values())  # of the policy at the admission of each ticket
        assert versions == sorted(versions)
        assert set(versions) == set(range(sampler_ranks.UPDATES))


def test_environments_are_drawn_as_often_as_the_pass_rates_say_and_tasks_of_open_tickets_kept(found) -> None:
    for case in product(SAMPLERS, ("whole", "resumed")):
        drawn = Counter(found[case]["drawn"].values())
        for name, expected in zip(SKILL, found[case]["expected"].tolist(), strict=True):
            assert abs(drawn[name] - expected) < 5, (case, name)
        wanted, unwanted = ("click-tab", "click-link")
        assert drawn[wanted] > drawn[unwanted], case
        assert 1 < found[case]["kept_tasks"] <= 15, case  # 3 groups of each of 5 updates


def test_an_update_tells_what_the_sampler_knows(found) -> None:
    for sampler in SAMPLERS:
        run = found[sampler, "resumed"]
        figures = {key: value for key, value in run["figures"].items() if key.startswith("sampler/")}
        assert len(figures) == 3 * len(SKILL)
        assert sum(figures[f"sampler/probability/{name}"] for name in SKILL) == pytest.approx(1)
        assert figures["sampler/pass_rate/click-test"] > figures["sampler/pass_rate/enter-text"]
        # The metrics are taken before the update's own groups are closed.
        assert sum(figures[f"sampler/closed_tickets/{name}"] for name in SKILL) == run["base"] - 3


def test_an_update_warns_of_a_trainer_far_from_the_engine_and_keeps_its_groups_where_wanted(found) -> None:
    for sampler in SAMPLERS:
        run = found[sampler, "whole"]
        assert run["figures"]["logprob_mismatch/kl/lag_1"] == 0.9
        (warning,) = run["warned"]
        assert warning.startswith(f"update {sampler_ranks.UPDATES}: ")
        assert "0.9 nats" in warning
        assert len(run["trained"]) == 3
        assert run["kept"] == run["trained"]


TWO = tasks_config(environments=["click-test", "click-tab"], sampler=SamplerConfig("curriculum"))
BY_WEBSITE = tasks_config(source="webgym", train_file="train.jsonl", sampler=SamplerConfig("curriculum", per="website"))


@pytest.fixture(autouse=True)
def simple_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samplers that halve the distance to the latest pass rate and draw by it alone."""
    monkeypatch.setattr(knowledge, "LATEST_GROUP_WEIGHT", 0.5)
    monkeypatch.setattr(samplers, "UNIFORM_FRACTION", 0.0)


class Rows:
    """A source whose tickets draw websites in turn, without blocked ones."""

    def training_task(self, seed: int, ticket: int, known: SamplerKnowledge) -> Task:
        websites = [name for name in ("a.example", "b.example") if name not in known.blocked]
        return Task(f"row {ticket}", "web", "page", ticket, known.version, website=websites[ticket % len(websites)])

    def close(self) -> None: ...


def opened(
    folder: Path, saved: Any = None, tasks: TasksConfig = TWO, version: int = 0, source: Any = None, **options: Any
) -> TaskSampler:
    """A sampler; `saved` as a checkpoint stores it."""
    config = Config()
    config.tasks, config.run.directory = tasks, str(folder)
    config.run_folder.mkdir(exist_ok=True)
    source = source or (Rows() if tasks.from_files else make_source(tasks))
    return TaskSampler(config, source, json.loads(json.dumps(saved)), version, **options)


def test_groups_move_the_pass_rates_and_masked_or_missing_episodes_do_not(tmp_path: Path) -> None:
    sampler = opened(tmp_path)
    sampler.record_group(group(0, "click-test", "success", "browser_crashed", "failure", "success", "success"))
    sampler.record_group(group(1, "click-tab", "browser_crashed", "success", "aborted"))
    sampler.record_group(group(2, "click-test", "failure", "failure"))
    sampler.record_group(Group(3, group(3, "click-tab", "success", "success", "failure").trajectories[:2]))
    assert [sampler.pass_rate(name) for name in TWO.environments] == [0.3125, 0.5]  # 0.5, 0.625, 0.3125
    assert sampler.closed_tickets == {"click-test": 2, "click-tab": 2}
    probabilities = [sampler.metrics()[f"sampler/probability/{name}"] for name in TWO.environments]
    assert probabilities == pytest.approx([0.4622, 0.5378], 1e-3)


def test_a_ticket_keeps_its_task_until_it_is_closed_and_a_checkpoint_has_it(tmp_path: Path) -> None:
    sampler = opened(tmp_path)
    drawn = sampler.draw(range(40), 0)
    assert {task.environment for task in drawn.values()} == {"click-test", "click-tab"}
    for ticket in range(20):
        sampler.record_group(group(ticket, "click-test", "success"))
    assert {task.environment for task in sampler.draw(range(40, 60), 0).values()} == {"click-tab"}
    resumed = opened(tmp_path, sampler.state_dict())
    assert resumed.draw(range(20, 40), 5) == {ticket: drawn[ticket] for ticket in range(20, 40)}
    assert resumed.draw(range(60, 80), 1) == sampler.draw(range(60, 80), 1)
    assert resumed.tasks.keys() == set(range(20, 80))


def test_other_environments_after_a_resume_keep_what_is_known(tmp_path: Path) -> None:
    sampler = opened(tmp_path)
    drawn = sampler.draw([0, 1], 0)
    sampler.record_group(group(0, "click-test", "success"))
    three = replace(TWO, environments=["focus-text", "click-test", "click-link"])
    resumed = opened(tmp_path, sampler.state_dict(), three)
    assert [resumed.pass_rate(name) for name in three.environments] == [0.5, 0.75, 0.5]
    assert resumed.draw([1], 0) == {1: drawn[1]}
    resumed.record_group(group(1, "click-tab", "success"))
    assert resumed.closed_tickets == {"click-test": 1}


def test_another_source_or_unit_after_a_resume_forgets_what_does_not_fit(tmp_path: Path) -> None:
    sampler = opened(tmp_path, tasks=BY_WEBSITE)
    drawn = sampler.draw([0, 1], 3)
    sampler.block_list.record_group(group(2, "page", "blocked", "success", website="a.example"))
    sampler.record_group(group(2, "page", "blocked", "success", website="a.example"))
    by_task = opened(tmp_path, sampler.state_dict(), replace(BY_WEBSITE, sampler=SamplerConfig("curriculum")), 7)
    assert (by_task.knowledge.passes, by_task.knowledge.version) == ({}, 7)
    assert by_task.draw([0, 1], 7) == drawn
    assert list(by_task.knowledge.blocked) == ["a.example"]
    other = opened(tmp_path, sampler.state_dict())
    assert other.tasks == other.knowledge.passes == {}


def test_a_sampler_that_does_not_adapt_learns_no_pass_rates(tmp_path: Path) -> None:
    for name, weights in (("uniform", {}), ("ratio", {"click-test": 1.0})):
        sampler = opened(tmp_path, tasks=tasks_config(sampler=SamplerConfig(name, weights=weights)))
        sampler.record_group(group(0, "click-test", "success"))
        assert sampler.knowledge.passes == sampler.metrics() == {}, name


def test_a_growing_step_limit_is_that_of_the_version_of_the_draw(tmp_path: Path) -> None:
    tasks = tasks_config(growing_steps=GrowingStepsConfig(interval=10, initial=6, max=26, cap_step=40))
    sampler = opened(tmp_path, tasks=tasks)
    for first, version in ((0, 0), (20, 15), (40, 40)):
        sampler.draw(range(first, first + 20), version)
    assert sampler.metrics() == {"sampler/step_limit": 26.0}
    resumed = opened(tmp_path, sampler.state_dict(), tasks)
    assert [task.max_steps for task in resumed.draw(range(60), 50).values()] == [6] * 20 + [11] * 20 + [26] * 20


def test_no_ticket_draws_a_blocked_website_also_after_a_restart_from_an_older_checkpoint(tmp_path: Path) -> None:
    sampler = opened(tmp_path, tasks=BY_WEBSITE)
    before = sampler.draw(range(6), 0)
    checkpoint = sampler.state_dict()
    sampler.block_list.record_group(group(0, "page", "blocked", website="a.example"))
    assert sampler.draw(range(6), 0) == before  # open tickets keep their tasks
    for each in (sampler, opened(tmp_path, checkpoint, BY_WEBSITE)):
        assert list(each.knowledge.blocked) == ["a.example"]


def test_a_group_of_several_tasks_teaches_no_pass_rate(tmp_path: Path) -> None:
    sampler = opened(tmp_path, tasks=BY_WEBSITE)
    [first], [second] = (group(0, "page", "success", website="a", task_id=name).trajectories for name in "xy")
    sampler.record_group(Group(0, (first, second)))
    sampler.record_group(group(1, "page", "success", website="b"))
    assert list(sampler.knowledge.passes) == ["b"]


def test_metrics_of_a_task_file_have_blocks_and_pass_rates(tmp_path: Path) -> None:
    tasks = replace(BY_WEBSITE, sampler=SamplerConfig("curriculum", per="difficulty"))
    sampler = opened(tmp_path, tasks=tasks)
    for ticket, (website, task_id) in enumerate([("a", "1"), ("b", "2"), ("a", "3"), ("b", "2"), ("b", "2")]):
        sampler.record_group(group(ticket, "page", "success", website=website, task_id=task_id))
    resumed = opened(tmp_path, sampler.state_dict(), tasks)
    assert resumed.metrics() == sampler.metrics() == {
        "blocked_websites": 0.0, "block_list/added": 0.0,
        "sampler/pass_rate/easy": 1 - 0.5**6, "sampler/pass_rate/medium": 0.5, "sampler/pass_rate/hard": 0.5,
    }  # fmt: skip


def test_a_checkpoint_of_another_training_file_is_refused(tmp_path: Path) -> None:
    def files(path: str, train: str, test: str) -> dict[str, FileDigest]:
        return {"tasks.train_file": FileDigest(path, train), "tasks.test_file": FileDigest("test.jsonl", test)}

    saved = opened(tmp_path, files=files("train.jsonl", "aa", "bb")).state_dict()
    opened(tmp_path, saved, files=files("moved.jsonl", "aa", "cc"))
    with pytest.raises(JobFailed, match=r"^tasks\.train_file=train\.jsonl has the digest cc, but .* aa, .* a new run"):
        opened(tmp_path, saved, files=files("train.jsonl", "cc", "bb"))
