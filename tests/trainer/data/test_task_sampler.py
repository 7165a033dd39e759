"""Task sampling through coordinator, ring, control service and checkpoint state; and its bookkeeping alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.config.tasks import SamplerConfig, TasksConfig
from megatron_webrl.control.client import ControlClient
from megatron_webrl.tasks.sampler import samplers
from megatron_webrl.tasks.sampler.states import SamplerState, read_published
from megatron_webrl.trainer.data.task_sampler import TaskSampler
from megatron_webrl.types import Group
from tests.gloo import spawn
from tests.job_control import connect, control_service
from tests.trainer.data import sampler_ranks
from tests.trainer.data.sampler_ranks import SKILL
from tests.trajectories import trajectory


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sampler")
    spawn(sampler_ranks.run, str(folder), ranks=1, seconds=300)
    return torch.load(folder / "found.pt", weights_only=False)


BOTH = pytest.mark.parametrize("sampler", ["curriculum", "near_target"])


@BOTH
def test_a_resumed_run_goes_on_with_the_tasks_of_an_uninterrupted_one(found, sampler: str) -> None:
    whole, resumed = found[sampler, "whole"], found[sampler, "resumed"]
    assert not whole["open"]
    assert len(resumed["open"]) == 2
    assert all(len(tickets) >= 7 for tickets in resumed["open"])  # they were in flight, and are issued again
    assert len(whole["tasks"]) > 60
    assert all(len(tasks) == 1 for tasks in resumed["tasks"].values())
    assert resumed["tasks"] == whole["tasks"]
    assert resumed["rates"] == whole["rates"]
    assert resumed["base"] == whole["base"]


@BOTH
def test_environments_are_drawn_as_often_as_the_states_of_their_tickets_say(found, sampler: str) -> None:
    for label in ("whole", "resumed"):
        run = found[sampler, label]
        drawn = Counter(task.split("/")[1] for tasks in run["tasks"].values() for task in tasks)
        for name, expected in zip(SKILL, run["expected"].tolist(), strict=True):
            assert abs(drawn[name] - expected) < 5, name
        wanted, unwanted = ("click-tab", "click-link")
        assert drawn[wanted] > drawn[unwanted]


@BOTH
def test_a_state_is_published_before_its_first_ticket_may_be_taken(found, sampler: str) -> None:
    raises = found[sampler, "resumed"]["raises"]
    firsts = {first for _, _, index in raises for first in index}
    assert len(firsts) > 12
    for before, after, index in raises:
        assert firsts & set(range(before, after)) <= set(index)


@BOTH
def test_states_of_closed_tickets_are_forgotten(found, sampler: str) -> None:
    for label in ("whole", "resumed"):
        run = found[sampler, label]
        assert 1 < run["most"] < 20
        assert run["states"][0] > 0
        assert run["published"] == run["states"]


@BOTH
def test_tickets_know_the_policy_version_of_their_admission(found, sampler: str) -> None:
    versions = found[sampler, "whole"]["versions"]
    assert versions == sorted(versions)
    assert set(versions) == set(range(sampler_ranks.UPDATES))


@BOTH
def test_an_update_tells_what_the_sampler_knows(found, sampler: str) -> None:
    run = found[sampler, "resumed"]
    figures = {key: value for key, value in run["figures"].items() if key.startswith("sampler/")}
    assert len(figures) == 3 * len(SKILL)
    assert sum(figures[f"sampler/probability/{name}"] for name in SKILL) == pytest.approx(1)
    assert figures["sampler/pass_rate/click-test"] > figures["sampler/pass_rate/enter-text"]
    # The metrics are taken before the update's own groups are closed.
    assert sum(figures[f"sampler/closed_tickets/{name}"] for name in SKILL) == run["base"] - 3


@BOTH
def test_an_update_tells_how_far_the_trainer_is_from_the_engine(found, sampler: str) -> None:
    run = found[sampler, "whole"]
    assert run["figures"]["logprob_mismatch/kl/lag_1"] == 0.9
    (warning,) = run["warned"]
    assert warning.startswith(f"update {sampler_ranks.UPDATES}: the trainer has diverged from the engine by 0.9 nats")


@BOTH
def test_the_groups_of_an_update_are_kept_where_that_is_wanted(found, sampler: str) -> None:
    run = found[sampler, "whole"]
    assert len(run["trained"]) == 3
    assert run["kept"] == run["trained"]


TWO = TasksConfig(environments=["a", "b"], sampler=SamplerConfig("curriculum"))


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlClient]:
    """A control service; samplers that halve the distance to the latest pass rate and draw by it alone."""
    monkeypatch.setattr(samplers, "LATEST_GROUP_WEIGHT", 0.5)
    monkeypatch.setattr(samplers, "UNIFORM_FRACTION", 0.0)
    with control_service(tmp_path) as address:
        yield connect(address, "trainer-0")


def group(ticket: int, environment: str, *outcomes: str) -> Group:
    made = (
        trajectory(ticket, index, outcome=outcome, group_size=len(outcomes)) for index, outcome in enumerate(outcomes)
    )
    return Group(ticket, tuple(replace(each, task=replace(each.task, environment=environment)) for each in made))


def started(
    control: ControlClient,
    folder: Path,
    fresh: int = 0,
    open_tickets: Sequence[int] = (),
    saved: Any = None,
    tasks: TasksConfig = TWO,
) -> TaskSampler:
    """A sampler that has published its first states; `saved` as a checkpoint stores it."""
    sampler = TaskSampler(tasks, fresh, open_tickets, json.loads(json.dumps(saved)), folder)
    sampler.publish_initial_states(control)
    return sampler


def rates(sampler: TaskSampler, state: int = -1, units: Sequence[str] = ("a", "b")) -> list[float]:
    """Pass rates that the tickets of a state know."""
    return sampler.log.at(sampler.states[state].learned).pass_rates(units, 0.5)


def firsts(sampler: TaskSampler) -> list[int]:
    return [state.first_ticket for state in sampler.states]


def test_groups_count_in_the_order_of_their_tickets_and_masked_episodes_do_not(
    control: ControlClient, tmp_path: Path
) -> None:
    sampler = started(control, tmp_path)
    sampler.record_group(group(2, "a", "failure", "failure"))
    sampler.record_group(group(0, "a", "success", "browser_crashed", "failure", "success", "success"))
    sampler.record_group(group(1, "b", "browser_crashed", "success", "aborted"))
    sampler.publish_adapted_state(6, 1)
    assert rates(sampler) == [0.3125, 0.5]  # 0.5, then half-way to 0.75, then half-way to 0
    assert rates(sampler, 0) == [0.5, 0.5]
    assert sampler.closed_tickets == {"a": 2, "b": 1}
    assert sampler.states == [SamplerState(0, 0, 0), SamplerState(6, 2, 1)]  # tickets 3 to 5 are open
    assert read_published(control)[1] == tuple(sampler.states)
    assert [sampler.metrics()[f"sampler/probability/{name}"] for name in "ab"] == pytest.approx([0.4622, 0.5378], 1e-3)


def test_a_group_that_lacks_an_episode_says_nothing_of_its_task(control: ControlClient, tmp_path: Path) -> None:
    sampler = started(control, tmp_path)
    sampler.record_group(Group(0, group(0, "a", "success", "success", "failure").trajectories[:2]))
    sampler.record_group(group(1, "b", "success", "success", "failure"))
    sampler.publish_adapted_state(6, 1)
    assert rates(sampler) == [0.5, pytest.approx(0.5833, 1e-3)]


def test_a_state_stays_as_long_as_one_of_its_tickets_is_open(control: ControlClient, tmp_path: Path) -> None:
    sampler = started(control, tmp_path)
    for limit, ticket in ((4, 1), (5, 3), (6, 2), (7, 4)):
        sampler.record_group(group(ticket, "a", "success"))
        sampler.publish_adapted_state(limit, 0)
    assert firsts(sampler) == [0, 4, 5, 6, 7]
    sampler.record_group(group(0, "b", "failure"))
    sampler.publish_adapted_state(8, 0)
    assert firsts(sampler) == [5, 6, 7, 8]
    assert read_published(control)[1] == tuple(sampler.states)


def test_a_limit_that_rises_without_anything_learned_needs_no_state(control: ControlClient, tmp_path: Path) -> None:
    sampler = started(control, tmp_path)
    sampler.record_group(group(0, "a", "browser_crashed"))
    sampler.publish_adapted_state(5, 0)
    assert firsts(sampler) == [0]
    sampler.publish_adapted_state(6, 1)  # the policy has changed
    assert sampler.states == [SamplerState(0, 0, 0), SamplerState(6, 0, 1)]


def test_a_limit_that_is_lower_after_a_resume_redefines_only_what_was_never_issued(
    control: ControlClient, tmp_path: Path
) -> None:
    sampler = started(control, tmp_path)
    for ticket, limit in enumerate((6, 9)):
        sampler.record_group(group(ticket, "a", "success"))
        sampler.publish_adapted_state(limit, 0)
    resumed = started(control, tmp_path, 7, (2, 3, 4, 5, 6), sampler.state_dict())
    assert resumed.states == sampler.states
    resumed.record_group(group(2, "b", "failure"))
    resumed.publish_adapted_state(4, 0)  # a limit below the tickets in flight
    assert firsts(resumed) == [0, 6, 7]


def test_other_environments_after_a_resume_keep_what_is_known(control: ControlClient, tmp_path: Path) -> None:
    sampler = started(control, tmp_path)
    sampler.record_group(group(0, "a", "success"))
    sampler.publish_adapted_state(4, 0)
    three = replace(TWO, environments=["c", "a", "b"])
    resumed = started(control, tmp_path, 1, (), sampler.state_dict(), three)
    assert rates(resumed, units="cab") == [0.5, 0.75, 0.5]
    resumed.record_group(group(1, "d", "success"))
    assert resumed.state_dict()["closed_tickets"] == {"a": 1}


@pytest.mark.parametrize("name", ["uniform", "ratio"])
def test_a_sampler_that_does_not_adapt_learns_no_pass_rates(control: ControlClient, tmp_path: Path, name: str) -> None:
    sampler = started(control, tmp_path, tasks=TasksConfig(sampler=SamplerConfig(name)))
    sampler.record_group(group(0, "click-test", "success"))
    sampler.publish_adapted_state(4, 1)
    assert sampler.states == [SamplerState(0, 0, 0), SamplerState(4, 0, 1)]
    assert sampler.log.end == 0
    assert sampler.metrics() == {}
