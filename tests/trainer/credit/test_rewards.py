"""Penalties on made-up episodes, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.credit import rewards
from megatron_webrl.types import Action, Step, Trajectory
from tests.trajectories import trajectory

CLICK, OTHER = Action("left_click", (1, 2)), Action("left_click", (3, 4))


def episode(*steps: dict[str, object], reward: float = 1.0) -> Trajectory:
    plain = trajectory(0, 0, reward=reward, steps=len(steps))
    return replace(plain, steps=tuple(replace(s, **given) for s, given in zip(plain.steps, steps, strict=True)))


def of_length(tokens: int) -> Step:
    return replace(trajectory(0, 0).steps[0], response_token_ids=np.zeros(tokens, np.int32))


def penalised(**weights: float) -> Config:
    config = Config()
    for name, weight in weights.items():
        setattr(config.trainer.reward, name, weight)
    return config


def test_a_format_error_counts_as_its_share_of_steps() -> None:
    bad = episode({}, {"format_error": "no_json", "action": None}, {"action": CLICK}, {"action": CLICK}, reward=0.0)
    assert rewards.reward_function(penalised(format_penalty=0.4))(bad) == pytest.approx(-0.1)
    assert rewards.reward_function(Config())(bad) == 0.0  # off unless asked for
    assert not rewards.configured_penalties(Config())


def test_an_action_is_repeated_if_it_had_no_effect_before() -> None:
    reward = rewards.reward_function(penalised(repetition_penalty=0.5))
    for steps, count in (
        ([(CLICK, False), (CLICK, False), (CLICK, True), (CLICK, True)], 2),  # the last one repeats what had an effect
        ([(CLICK, True), (CLICK, True)], 0),
        ([(CLICK, False), (OTHER, False), (CLICK, False)], 0),
        ([(None, False), (None, False)], 0),  # those are format errors
        ([(CLICK, False)], 0),
    ):
        made = episode(*({"action": action, "page_changed": changed} for action, changed in steps))
        assert rewards.repetitions(made).sum() == count, steps
        assert reward(made) == pytest.approx(1 - 0.5 * count / len(steps)), steps


def test_length_counts_within_the_window_before_the_limit() -> None:
    config = penalised(length_penalty=0.6, length_window=20)
    config.rollout.max_new_tokens = 100
    for tokens, part in ((1, 0.0), (80, 0.0), (85, 0.25), (90, 0.5), (100, 1.0), (120, 1.0)):
        made = replace(trajectory(0, 0, reward=1.0), steps=(of_length(tokens), of_length(3)))
        assert rewards.reward_function(config)(made) == pytest.approx(1 - 0.6 * part / 2), tokens


def test_penalties_add_up() -> None:
    reward = rewards.reward_function(penalised(format_penalty=1.0, repetition_penalty=1.0))
    made = episode({"action": CLICK}, {"action": CLICK}, {"action": None, "format_error": "no_json"}, {}, reward=1.0)
    assert reward(made) == pytest.approx(1 - 1 / 4 - 1 / 4)
