"""Settings of trainer.advantage and trainer.critic without effect are refused by name, those with an effect are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_webrl.checks.gpu.engine_section import short_job
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.credit_checks import check_credit
from megatron_webrl.launch.validation import load_config

PENALTY = "trainer.reward.format_penalty=0.1"
APART = "trainer.advantage.components=apart"
RAFT = "trainer.loss.name=raft"
CRITIC = "trainer={critic: {coefficient: 0.5}, advantage: {scale: batch_std}}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(
            ([RAFT, f"trainer.advantage.{name}={value}"], f"trainer.advantage.{name}={value} has no effect with {RAFT}")
            for name, value in (
                ("baseline", "leave_one_out"), ("scale", "none"), ("components", "apart"), ("penalties", "step"),
                ("discount", 0.9), ("anchor_weight", 1.0), ("anchor_discount", 0.9), ("overlong", "mask"),
            )
        ),
        ([APART], "trainer.advantage.components=apart has no effect with no penalty: all of trainer.reward.* are 0"),
        (["trainer.advantage.penalties=step"], "trainer.advantage.penalties=step has no effect with no penalty"),
        ([PENALTY, APART, "trainer.advantage.scale=none"], f"trainer.advantage.scale=none has no effect with {APART}"),
        ([PENALTY, APART, "trainer.advantage.baseline=leave_one_out"], f"leave_one_out has no effect with {APART}"),
        ([PENALTY, APART, "trainer.advantage.penalties=step"], f"penalties=step has no effect with {APART}"),
        (["trainer.advantage.discount=0.9", "tasks.max_steps=1"],
         "trainer.advantage.discount=0.9 has no effect with tasks of one step (tasks.max_steps); leave it at 1.0"),
        (["trainer.advantage.anchor_discount=0.9"],
         "trainer.advantage.anchor_discount=0.9 has no effect with trainer.advantage.anchor_weight=0; leave it at 0.9"),
        (["trainer.advantage={anchor_weight: 1, scale: batch_std}"], "scale=batch_std does not divide; set scale to "),
        (["trainer={advantage: {overlong: mask}, zero_variance_groups: keep}"],
         "trainer.advantage.overlong=mask could leave nothing to train"),
        *(
            ([f"trainer.critic.{name}={value}"], f"trainer.critic.{name}={shown} has no effect with trainer.critic.coe")
            for name, value, shown in (
                ("gae_lambda", 0.9, "0.9"), ("train_trunk", "false", "False"), ("warmup_updates", 3, "3")
            )
        ),
        ([RAFT, "trainer.critic.coefficient=1"], f"trainer.critic.coefficient=1.0 has no effect with {RAFT}"),
        *(
            ([CRITIC, PENALTY, f"trainer.advantage.{name}={value}"],
             f"trainer.advantage.{name}={value} has no effect with a critic (trainer.critic.coefficient)")
            for name, value in (("baseline", "leave_one_out"), ("components", "apart"), ("anchor_weight", 1.0))
        ),
        (["trainer.critic.coefficient=1"], "trainer.advantage.scale=group_std divides by a statistic of groups"),
        ([CRITIC, "trainer.loss.shuffle_advantages=true"], "shuffle_advantages has no effect with a critic"),
        ([CRITIC, "trainer.critic.gae_lambda=0.9", "tasks.max_steps=1"],
         "trainer.critic.gae_lambda=0.9 has no effect with tasks of one step (tasks.max_steps); leave it at 0.95"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_named(settings: list[str], words: str) -> None:
    config = parse_config(None, settings)
    with pytest.raises(ConfigError) as caught:
        check_credit(config)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    config.evaluation.only = True  # nothing is trained
    check_credit(config)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        [RAFT],
        [PENALTY, APART, "trainer.advantage.discount=0.9"],
        [PENALTY, "trainer.advantage={penalties: step, scale: batch_std, baseline: leave_one_out}"],
        ["trainer.advantage.discount=0.9", "tasks.max_steps=1", "tasks.max_steps_by_difficulty={easy: 5}"],
        ["trainer.advantage.discount=0.9", "tasks={max_steps: 1, growing_steps: {interval: 5, initial: 2}}"],
        ["trainer.advantage={anchor_weight: 1, anchor_discount: 0.9, scale: none, overlong: mask}"],
        [CRITIC],
        [CRITIC, "trainer.critic={gae_lambda: 0.9, train_trunk: false, warmup_updates: 3}"],
        [CRITIC, PENALTY, "trainer.advantage={penalties: step, scale: none, discount: 0.9}"],
        [CRITIC, "trainer.zero_variance_groups=keep"],
    ],
)
def test_settings_with_an_effect_are_accepted(settings: list[str]) -> None:
    check_credit(parse_config(None, settings))


def test_a_default_never_triggers_whatever_else_is_set() -> None:
    for settings in (["tasks.max_steps=1"], ["trainer.zero_variance_groups=keep"], [PENALTY], [RAFT]):
        check_credit(parse_config(None, settings))
    check_credit(Config())


def test_a_whole_configuration_is_refused_and_its_short_job_is_not(tiny_model: Path, tmp_path: Path) -> None:
    own = [
        f"model.path={tiny_model}", "rollout.max_model_len=1024", "rollout.max_new_tokens=64",
        "ring.capacity_mib=64", "model.platform=cpu", "trainer.advantage.overlong=mask",
    ]  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text("{}\n")
    config = load_config(path, own)
    check_credit(short_job(config, tmp_path))  # which keeps groups of one outcome
    with pytest.raises(ConfigError, match=r"trainer\.advantage\.overlong=mask could leave nothing to train"):
        load_config(path, [*own, "trainer.zero_variance_groups=keep"])
