"""Refusals of sampler settings that a source cannot follow."""

from __future__ import annotations

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import GrowingStepsConfig, SamplerConfig, TasksConfig
from megatron_webrl.tasks.sampler.checks import check_tasks


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
        (
            SamplerConfig("ratio", difficulty_weights={"easy": 2.0}, per="difficulty"),
            "tasks.sampler.per=difficulty has no effect on tasks.sampler.name=ratio, which draws difficulties",
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


FILE = {"source": "webgym", "train_file": "train.jsonl"}


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (TasksConfig(sampler=SamplerConfig("curriculum", per="website")),
         "tasks.sampler.per=website has no effect on tasks.source=miniwob, which has no task file; leave it out"),
        (TasksConfig(sampler=SamplerConfig(target=0.5)),
         "tasks.sampler.target=0.5 has no effect on tasks.sampler.name=uniform; leave it out, or use near_target"),
        (TasksConfig(block_hours=0.0), "tasks.block_hours=0 has no effect on tasks.source=miniwob, "),
        (TasksConfig(source="sites", block_hours=2.0), "tasks.block_hours=2 has no effect on tasks.source=sites, "),
        (TasksConfig(growing_steps=GrowingStepsConfig(initial=5)),
         "tasks.growing_steps.initial=5 has no effect with tasks.growing_steps.interval=0; leave it out, or set "),
        (TasksConfig(**FILE, growing_steps=GrowingStepsConfig(cap_step=5)), "tasks.growing_steps.cap_step=5 has no "),
        (TasksConfig(**FILE, max_steps=20, growing_steps=GrowingStepsConfig(interval=10)),
         "tasks.max_steps=20 has no effect with tasks.growing_steps.interval=10, whose limits replace it; "),
        (TasksConfig(source="sites", max_steps=20, growing_steps=GrowingStepsConfig(interval=10)),
         "tasks.max_steps=20 has no effect with tasks.growing_steps.interval=10, whose limits replace it; "),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(tasks: TasksConfig, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_tasks(tasks)
    assert str(caught.value).startswith(words)


def test_settings_with_an_effect_are_accepted() -> None:
    check_tasks(TasksConfig(sampler=SamplerConfig("near_target", target=0.5)))
    check_tasks(TasksConfig(**FILE, block_hours=0.0, sampler=SamplerConfig(per="difficulty")))
    check_tasks(TasksConfig(**FILE, growing_steps=GrowingStepsConfig(interval=10, initial=5)))
    check_tasks(TasksConfig(source="sites", growing_steps=GrowingStepsConfig(interval=10)))
    growing = GrowingStepsConfig(interval=10)
    check_tasks(TasksConfig(source="my_package.my_source:Source", block_hours=1.0, max_steps=20, growing_steps=growing))
