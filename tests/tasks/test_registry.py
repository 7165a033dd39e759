"""Settings of a source: step limits and shares of the tickets."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import SamplerConfig, tasks_config
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.sampler.knowledge import PassRate, SamplerKnowledge


def test_difficulties_have_step_limits_and_shares_of_the_tickets() -> None:
    settings = tasks_config(
        source="sites", environments=["forms-vote", "forms-apply", "forms-renew", "wiki-watch"], max_steps=12,
        max_steps_by_difficulty={"medium": 20, "hard": 30}, evaluation_max_steps_by_difficulty={"easy": 50, "hard": 70},
        sampler=SamplerConfig("ratio", weights={"easy": 0.5, "medium": 0.3, "hard": 0.2}),
    )  # fmt: skip
    source = make_source(settings)
    try:
        training = [source.training_task(0, ticket) for ticket in range(100)]
        assert {(task.difficulty, task.max_steps) for task in training} == {("easy", 12), ("medium", 20), ("hard", 30)}
        counts = Counter(task.environment for task in training)
        expected = {"forms-vote": 25, "wiki-watch": 25, "forms-apply": 30, "forms-renew": 20}
        assert all(abs(counts[name] - wanted) <= 3 for name, wanted in expected.items()), counts
        held_out = [source.held_out_task(index) for index in range(8)]
        assert [task.max_steps for task in held_out] == [50, 20, 70, 50] * 2
    finally:
        source.close()
    one_difficulty = tasks_config(sampler=SamplerConfig("ratio", weights={"hard": 2.0}))
    with pytest.raises(ConfigError, match=r"weights.hard: none of tasks.environments is hard"):
        make_source(one_difficulty)


def test_a_ticket_draws_by_what_is_known_and_keeps_its_page_seed() -> None:
    names = ["forms-vote", "forms-apply", "forms-renew", "wiki-watch"]
    source = make_source(tasks_config(source="sites", environments=names, sampler=SamplerConfig("curriculum")))
    knowledge = SamplerKnowledge(passes={name: PassRate(1.0, 5) for name in (*names[:2], names[3])})
    try:
        training = [source.training_task(0, ticket) for ticket in range(100)]
        assert {task.environment for task in training} == set(names)
        learned = [source.training_task(0, ticket, knowledge) for ticket in range(100)]
        counts = Counter(task.environment for task in learned)
        assert counts["forms-renew"] == pytest.approx(92.5, abs=3)  # a tenth is shared by all
        assert [task.seed for task in learned] == [task.seed for task in training]
        assert [source.training_task(0, ticket, SamplerKnowledge()) for ticket in range(100)] == training
    finally:
        source.close()
