"""What the task sampler has learned, and names of units."""

from __future__ import annotations

import json

import pytest

from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.tasks.sampler.knowledge import (
    PassRate,
    SamplerKnowledge,
    draws_environments,
    task_key,
    task_unit,
    unit_kind,
    unit_of,
)
from megatron_webrl.types import Task


def test_estimates_of_too_few_groups_are_not_trusted() -> None:
    knowledge = SamplerKnowledge(passes={"a": PassRate(0.9, 1), "b": PassRate(0.1, 2)})
    assert knowledge.pass_rates(["a", "b", "c"], 0.5, 2) == [0.5, 0.1, 0.5]
    assert knowledge.pass_rates(["a", "b"], 0.5) == [0.9, 0.1]


def test_a_pass_rate_is_a_moving_average_and_survives_json() -> None:
    knowledge = SamplerKnowledge(3, blocked={"a.example": 5e9})
    for observed in (1.0, 0.0):
        knowledge.learn("a", observed, 0.5)
    assert knowledge.passes == {"a": (pytest.approx(0.65 * 0.7), 2)}
    assert SamplerKnowledge.from_state_dict(json.loads(json.dumps(knowledge.state_dict())), 3) == knowledge
    assert SamplerKnowledge.from_state_dict({}, 0) == SamplerKnowledge()


def test_a_unit_is_named_after_what_the_sampler_draws() -> None:
    task = Task("shop/1", "web", "Shopping", 0, 10, difficulty="hard", website="shop.example")
    named = {kind: unit_of(task, kind) for kind in ("environment", "task", "website", "difficulty")}
    # A resumed run relies on the key.
    assert named == {
        "environment": "Shopping", "task": "bb4e6eb49d732433", "website": "shop.example", "difficulty": "hard"
    }  # fmt: skip
    assert task_unit(task_key("shop/1")) == named["task"]
    assert task_unit(10) == "000000000000000a"


def test_only_pages_of_our_own_are_drawn_by_environment() -> None:
    for source, kind in (
        ("miniwob", "environment"), ("sites", "environment"), ("webgym", "website"), ("a:B", "website"),
    ):  # fmt: skip
        tasks = tasks_config(source=source)
        tasks.sampler.per = "website"
        assert unit_kind(tasks) == kind, source
        assert draws_environments(tasks) is (kind == "environment"), source
