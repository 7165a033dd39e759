"""Metrics of steps, computed again from hand-made episodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_webrl.track.metrics import step_metrics
from megatron_webrl.types import Action, Group, Step, Trajectory
from tests.trajectories import trajectory


def step(versions: list[int], *, changed: bool = True, action: str | None = "left_click", characters: int = 0,
         memory: int = -1) -> Step:  # fmt: skip
    (made,) = trajectory(response=len(versions)).steps
    return replace(
        made, versions=np.array(versions, np.int32), page_changed=changed, response_characters=characters,
        memory_characters=memory, action=None if action is None else Action(action),
    )  # fmt: skip


def group(*episodes: tuple[str, list[Step]]) -> Group:
    members: list[Trajectory] = []
    for index, (outcome, steps) in enumerate(episodes):
        made = trajectory(0, index, reward=float(outcome == "success"), outcome=outcome)
        members.append(replace(made, steps=tuple(steps)))
    return Group(0, tuple(members))


BATCH = group(
    ("success", [step([3, 3], characters=10, memory=0), step([3, 5, 4, 4], changed=False, characters=25, memory=7)]),
    ("failure", [
        step([6], changed=False, action="wait", characters=4),
        step([6, 7, 7], changed=False, characters=0, memory=11),
        step([], changed=False, action=None, characters=1, memory=3),
    ]),
    ("browser_crashed", [step([1] * 90, characters=1000, memory=5000)]),
)  # fmt: skip


def test_step_metrics_follow_their_definitions_and_exclude_masked_episodes():
    assert step_metrics([BATCH], uses_memory=True) == pytest.approx({
        "response_characters_mean": 8.0,
        "response_characters_max": 25.0,
        "response_tokens_max": 4.0,
        "response_tokens_mean/success": 3.0,
        "response_tokens_mean/failure": 4 / 3,
        "page_unchanged_rate/success": 0.5,
        "page_unchanged_rate/failure": 1.0,
        "stuck_rate": 2 / 5,  # one click of each episode; neither the wait nor the step without an action
        "memory_missing_rate": 1 / 5,
        "memory_empty_rate": 1 / 5,
        "memory_characters_mean": 21 / 4,
        "memory_characters_max": 11.0,
        "versions_per_batch": 5.0,
        "updates_within_step_mean": (0 + 2 + 0 + 1) / 4,
        "updates_within_step_max": 2.0,
        "updates_across_steps_mean": (2 + 1) / 2,
        "updates_across_steps_max": 2.0,
    })  # fmt: skip


def test_forms_without_memory_have_no_metrics_of_it():
    assert not [name for name in step_metrics([BATCH], uses_memory=False) if name.startswith("memory")]


def test_a_memory_that_is_missing_everywhere_is_reported():
    metrics = step_metrics([group(("failure", [step([1])]))], uses_memory=True)
    assert metrics["memory_missing_rate"] == 1.0
    assert not [name for name in metrics if name.startswith("memory_characters")]  # there is no length to measure


def test_an_answer_that_leaves_the_page_unchanged_is_not_stuck():
    batch = [group(("success", [step([1], changed=False, action="answer")]))]
    assert step_metrics(batch, uses_memory=False)["stuck_rate"] == 0.0


def test_a_batch_without_trainable_episodes_has_no_metrics_of_steps():
    assert step_metrics([group(("engine_error", []))], uses_memory=True) == {}
