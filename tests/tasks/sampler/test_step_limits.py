"""Growing step limits of the sources with pages of their own, from the settings to the tasks of tickets."""

from __future__ import annotations

import pytest

from megatron_webrl.config.tasks import GrowingStepsConfig, TasksConfig, tasks_config
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.tasks.sampler.step_limits import growing_limit, training_limit

GROWING = GrowingStepsConfig(interval=10, initial=6, max=26, cap_step=40)
SETTINGS = {
    "miniwob": {"environments": ["click-test", "click-tab"]},
    "sites": {"environments": ["wiki-look-up", "shop-order-list"], "max_steps_by_difficulty": {"hard": 9}},
}


def at_version(version: int) -> SamplerKnowledge:
    return SamplerKnowledge(version)


def test_a_limit_grows_in_equal_parts_until_the_last_version() -> None:
    limits = [growing_limit(GROWING, version) for version in range(60)]
    assert limits == [6] * 10 + [11] * 10 + [16] * 10 + [21] * 10 + [26] * 20
    assert growing_limit(GROWING, None) == 26
    assert growing_limit(GrowingStepsConfig(), 1000) is None


@pytest.mark.parametrize(
    ("by_difficulty", "growing", "version", "limit"),
    [({}, 0, 0, 12), ({"easy": 20}, 0, 0, 20), ({}, 1, 0, 6), ({}, 1, None, 26), ({"easy": 9}, 1, 0, 6),
     ({"easy": 9}, 1, None, 9), ({"hard": 9}, 1, 15, 11)],
)  # fmt: skip
def test_the_smaller_of_the_growing_and_the_difficultys_limit_holds(
    by_difficulty: dict[str, int], growing: int, version: int | None, limit: int
) -> None:
    settings = GROWING if growing else GrowingStepsConfig()
    tasks = TasksConfig(max_steps=12, max_steps_by_difficulty=by_difficulty, growing_steps=settings)
    assert training_limit(tasks, "easy", version) == limit


@pytest.mark.parametrize("name", SETTINGS)
def test_training_follows_the_version_and_evaluation_has_the_last_limit(name: str) -> None:
    source = make_source(tasks_config(source=name, growing_steps=GROWING, **SETTINGS[name]))
    try:
        plain = [source.training_task(0, ticket) for ticket in range(20)]  # such as of demonstrations
        held_out = [source.held_out_task(index) for index in range(4)]
        last = {task.difficulty: task.max_steps for task in [*plain, *held_out]}
        assert last == {difficulty: 9 if difficulty == "hard" else 26 for difficulty in last}
        for version, limit in ((0, 6), (9, 6), (10, 11), (39, 21), (40, 26), (1000, 26)):
            drawn = [source.training_task(0, ticket, at_version(version)) for ticket in range(20)]
            assert [task.id for task in drawn] == [task.id for task in plain]  # the limit changes nothing else
            assert [task.max_steps for task in drawn] == [min(limit, last[task.difficulty]) for task in plain]
    finally:
        source.close()
