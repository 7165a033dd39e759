"""Settings of trainer.distillation that contradict others or have no effect are refused, each with one error."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from megatron_webrl.config.advantage import AdvantageConfig
from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.limits import check_limits
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.credit_checks import check_credit
from megatron_webrl.launch.distillation_checks import check_distillation
from megatron_webrl.launch.loss_validation import BASELINE_SETTINGS, check_loss
from tests.config.test_loss_settings import OTHER_VALUES

URL = "http://node7:8000"
OTHERS = {"rewards": False, "url": URL, "key_variable": "KEY", "clip": 2.0, "timeout_seconds": 9.0}


def config_with(**values: Any) -> Config:
    config = Config()
    config.trainer.distillation = DistillationConfig(**values)
    return config


def check(config: Config) -> None:
    check_limits(config.trainer.distillation, "trainer.distillation.")
    check_loss(config)
    check_credit(config)
    check_distillation(config)


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("rewards", [True, False])
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "sapo", "dppo"])
def test_a_teacher_is_accepted_with_every_loss_that_has_advantages(name: str, rewards: bool) -> None:
    config = config_with(**OTHERS | {"coefficient": 1.0, "rewards": rewards})
    config.trainer.loss.name = name
    check(config)


@pytest.mark.parametrize("name", OTHERS)
def test_each_setting_without_a_coefficient_is_refused(name: str) -> None:
    assert set(OTHERS) | {"coefficient"} == {each.name for each in fields(DistillationConfig)}
    message = refused(config_with(**{name: OTHERS[name]}))
    assert message.startswith(f"trainer.distillation.{name} has no effect with trainer.distillation.coefficient=0")
    assert "KEY" not in message


def test_what_a_teacher_needs_is_named() -> None:
    assert "set trainer.distillation.url to its vLLM server" in refused(config_with(coefficient=1.0))
    for name in ("raft", "raft_plus_plus"):
        config = config_with(coefficient=1.0, url=URL)
        config.trainer.loss.name = name
        assert f"trainer.loss.name={name} has none" in refused(config)
    config = config_with(coefficient=1.0, url=URL)
    config.rollout.temperature = 0.7
    assert "rollout.temperature=0.7 differs from the temperature of the teacher" in refused(config)
    assert "must hold no user" in refused(config_with(coefficient=1.0, url="http://me:secret@node7:8000"))


@pytest.mark.parametrize("name", BASELINE_SETTINGS)
def test_settings_of_rewards_have_no_effect_on_a_teacher_alone(name: str) -> None:
    config = config_with(coefficient=1.0, url=URL, rewards=False)
    *parents, last = name.split(".")
    setattr(getattr(config.trainer, parents[0]) if parents else config.trainer, last, OTHER_VALUES[name])
    assert f"trainer.{name}={OTHER_VALUES[name]} has no effect with trainer.distillation.rewards=f" in refused(config)


def test_credit_assignment_and_shuffling_have_no_effect_on_a_teacher_alone() -> None:
    config = config_with(coefficient=1.0, url=URL, rewards=False)
    config.trainer.advantage = AdvantageConfig(baseline="leave_one_out")
    assert "baseline=leave_one_out has no effect with trainer.distillation.rewards=false" in refused(config)
    config = config_with(coefficient=1.0, url=URL, rewards=False)
    config.trainer.loss.shuffle_advantages = True
    assert "shuffle_advantages=True has no effect with trainer.distillation.rewards=false" in refused(config)


def test_a_configuration_that_only_evaluates_is_not_checked() -> None:
    config = config_with(coefficient=1.0)
    config.evaluation.only = True
    check_distillation(config)
