"""Refusals of sampler settings that a source cannot follow."""

from __future__ import annotations

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import SamplerConfig, TasksConfig
from megatron_webrl.sampling.checks import check_tasks


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (
            SamplerConfig("ratio", weights={"click-test": 2.0}),
            "which tasks.source=webgym does not have; use tasks.samp",
        ),
        (
            SamplerConfig("ratio", difficulty_weights={"easy": 2.0}, per="website"),
            "tasks.sampler.per=website has no effect on tasks.sampler.name=ratio, which draws difficulties",
        ),
    ],
)
def test_weights_of_task_files_are_those_of_difficulties(sampler: SamplerConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_tasks(TasksConfig(source="webgym", train_file="train.jsonl", sampler=sampler))
    check_tasks(TasksConfig(source="my_package.my_source:Source", sampler=sampler))


def test_a_ratio_of_difficulties_fits_task_files() -> None:
    sampler = SamplerConfig("ratio", difficulty_weights={"easy": 2.0, "medium": 5.0, "hard": 3.0})
    check_tasks(TasksConfig(source="webgym", train_file="train.jsonl", sampler=sampler))
