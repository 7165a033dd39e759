"""Sections take the settings of the chosen variant only; a setting without effect is refused by name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.advantage import ADVANTAGES, CriticConfig
from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.judge import PROTOCOLS
from megatron_webrl.config.load import all_settings, parse_config, save_config
from megatron_webrl.config.loss import LOSSES, loss_config
from megatron_webrl.config.schema import Config, check_combinations
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import SOURCES
from tests.config.conftest import refusal

PENALTY = "trainer.reward.format_penalty=0.1"
GDPO = "trainer.advantage.name=gdpo"
RAFT = "trainer.loss.name=raft"
CRITIC = "trainer.advantage.name=critic"
URL = "http://node7:8000"
TEACHER = f"trainer.distillation={{coefficient: 1, url: '{URL}'}}"
ALONE = "trainer.distillation.rewards=false"
FILE = ("tasks.source=webgym", "tasks.train_file=train.jsonl")
OWN = "tasks.source=my_package.my_source:Source"
VARIANTS = [
    *(("trainer.loss", "name", name, kind) for name, kind in LOSSES.items()),
    *(("trainer.advantage", "name", name, kind) for name, kind in ADVANTAGES.items()),
    *(("judge", "protocol", name, kind) for name, kind in PROTOCOLS.items()),
    *(("tasks", "source", name, kind) for name, kind in SOURCES.classes.items()),
    ("tasks", "source", "my_package.my_source:Source", SOURCES.own),
]


def accept(*settings: str) -> Config:
    config = parse_config(None, list(settings))
    check_combinations(config)
    return config


def refused(*settings: str) -> str:
    return refusal(accept, *settings)


def test_a_section_has_the_settings_of_its_variant_alone() -> None:
    for section, key, name, kind in VARIANTS:
        config: Any = parse_config(None, [f"{section}.{key}={name}"])
        for part in section.split("."):
            config = getattr(config, part)
        assert (type(config), getattr(config, key)) == (kind, name)
        own = {spec.name for spec in fields(kind)}
        all_known = (each.removeprefix(f"{section}.") for each in all_settings() if each.startswith(section))
        known = {each.partition(".")[0] for each in all_known}
        assert own <= known, name
        for other in known - own:
            message = refused(f"{section}.{key}={name}", f"{section}.{other}=1")
            assert message.startswith(f"{section}.{other} in an override is a setting of {section}.{key}="), message


def test_an_override_that_chooses_another_variant_leaves_out_what_the_file_says_of_the_former(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {loss: {name: raft, normalizer: token_mean, replay_versions: 3}}\n")
    assert parse_config(path).trainer.loss == loss_config("raft", normalizer="token_mean", replay_versions=3)
    chosen = parse_config(path, ["trainer.loss.name=cispo", "trainer.loss.clip_low=1"]).trainer.loss
    assert chosen == loss_config("cispo", normalizer="token_mean", clip_low=1.0)
    save_config(parse_config(path, ["trainer.loss.name=sapo", CRITIC, *FILE]), tmp_path / "stored.yaml")
    stored = parse_config(tmp_path / "stored.yaml")
    assert (stored.trainer.loss.name, stored.tasks.source) == ("sapo", "webgym")
    assert stored.trainer.critic == CriticConfig("critic")
    with pytest.raises(ConfigError, match=r"trainer.loss.dual_clip in .* is a setting of trainer.loss.name=grpo, tr"):
        parse_config(path, ["trainer.loss.dual_clip=2"])


REFUSED = [
    (["trainer.loss.name=grpoo"], "trainer.loss.name='grpoo' is not one of grpo, gspo, cispo, sapo, dppo, raft, "),
    (["tasks.source=webgim"], "near: webgym"),
    (["judge.protocol=mine"], "judge.protocol='mine' is not one of rubric, webgym, async_webrl, webjudge, webv"),
    (["judge={protocol: agenttrek, max_screenshots: 3}"], "is a setting of judge.protocol=rubric, judge.protocol=web"),
    (["judge.unusable_replies=as_released"], "judge.unusable_replies has no effect with judge.protocol=rubric"),
    (["trainer.loss.raft_versions=3"], "did you mean trainer.loss.replay_versions?"),
    (["trainer.loss={decoupled: false, importance_weight_floor: 0.5}"],
     "trainer.loss.importance_weight_floor has no effect with trainer.loss.decoupled=false"),
    (["trainer.loss.kl_rejection_estimator=k1"], "estimator has no effect with trainer.loss.kl_rejection_bound=0"),
    (["trainer.loss={normalizer: token_mean, normalizer_constant: 3}"],
     "normalizer_constant has no effect with trainer.loss.normalizer=token_mean"),
    (["trainer.loss.max_token_lag=2"], "max_token_lag=2 masks nothing: no trained token is more than 2 versions"),
    (["trainer.loss={name: raft_plus_plus, replay_versions: 3, max_token_lag: 5}"], "more than 5 versions old"),
    *(
        ([RAFT, setting], f"{setting} has no effect with {RAFT}")
        for setting in (
            "trainer.advantage.baseline=leave_one_out", "trainer.advantage.scale=none", GDPO, CRITIC,
            "trainer.advantage.discount=0.9", "trainer.advantage.overlong=mask", PENALTY,
            "trainer.zero_variance_groups=keep", "trainer.reward.turn_discount=0.9",
            "trainer.reward.unfinished=all_fail",
        )
    ),
    (["tasks.sampler={name: near_target, target: 0.95, pass_rate_margin: 0.1}"], "sampler.target=0.95 is outside of"),
    (["trainer.loss.replay_into_failed_groups=3"], "has no effect with tasks.source=miniwob, whose tasks do not come"),
    (["judge.graded=true"], "judge.graded has no effect with judge.evaluators=['page']"),
    (["judge={graded: true, evaluators: [judge]}", RAFT], f"judge.graded has no effect with {RAFT}"),
    (["judge={graded: true, protocol: webjudge}"], "judge.graded has no effect with judge.protocol=webjudge"),
    ([GDPO], "trainer.advantage.name=gdpo has no effect with no penalty"),
    (["trainer.advantage.penalties=step"], "trainer.advantage.penalties=step has no effect with no penalty"),
    (["trainer.advantage={anchor_weight: 1, scale: batch_std}"], "scale=batch_std does not divide"),
    (["trainer.advantage={anchor_weight: 1, scale: group_mean}"], "scale=group_mean does not divide"),
    (["trainer={advantage: {overlong: mask}, zero_variance_groups: keep}"], "trainer.advantage.overlong=mask"),
    ([CRITIC, "trainer.loss.shuffle_advantages=true"], "shuffle_advantages has no effect with a critic"),
    ([CRITIC, "trainer.advantage.scale=group_std"], "scale='group_std' is not one of batch_std, none"),
    (["trainer.distillation.coefficient=1"], "set trainer.distillation.url"),
    ([TEACHER, RAFT], "trainer.loss.name=raft has none"),
    ([TEACHER, "trainer.loss.name=raft_plus_plus"], "trainer.loss.name=raft_plus_plus has none"),
    ([TEACHER, "rollout.temperature=0.7"], "rollout.temperature=0.7 differs from the temperature of the teacher"),
    ([TEACHER, "trainer.distillation.url=http://me:secret@node7:8000"], "must hold no user"),
    ([TEACHER, ALONE, PENALTY], f"{PENALTY} has no effect with {ALONE}"),
    ([TEACHER, ALONE, "trainer.advantage.baseline=leave_one_out"], f"leave_one_out has no effect with {ALONE}"),
    ([TEACHER, ALONE, "trainer.loss.shuffle_advantages=true"], f"shuffle_advantages has no effect with {ALONE}"),
    ([*FILE, "tasks.sampler={name: ratio, weights: {click-test: 2}}"], "'click-test' is not one of easy"),
    (["tasks.sampler.target=0.5"], "tasks.sampler.target has no effect with tasks.sampler.name=uniform"),
    (["tasks.growing_steps.initial=5"], "growing_steps.initial has no effect with tasks.growing_steps.interval=0"),
    ([*FILE, "tasks.max_steps=20", "tasks.growing_steps.interval=10"],
     "tasks.max_steps=20 has no effect with tasks.growing_steps.interval=10"),
]  # fmt: skip
ACCEPTED = [
    [],
    [RAFT],
    [PENALTY, GDPO, "trainer.advantage.discount=0.9"],
    [PENALTY, "trainer.advantage={penalties: step, scale: batch_std, baseline: leave_one_out}"],
    ["trainer.advantage={anchor_weight: 1, scale: none, overlong: mask}"],
    [CRITIC, "trainer.advantage={gae_lambda: 0.9, train_trunk: false, warmup_updates: 3}"],
    [CRITIC, PENALTY, "trainer.advantage={penalties: step, scale: none, discount: 0.9}"],
    [CRITIC, "trainer.zero_variance_groups=keep"],
    ["trainer.loss={name: raft_plus_plus, replay_versions: 3, max_token_lag: 4}"],
    *([TEACHER, f"trainer.loss.name={name}"] for name, kind in LOSSES.items() if not name.startswith("raft")),
    [TEACHER, ALONE],
    ["tasks.sampler={name: near_target, target: 0.5}"],
    [*FILE, "tasks.sampler.per=difficulty"],
    [*FILE, "tasks.growing_steps={interval: 10, initial: 5}"],
    [*FILE, "tasks.sampler={name: ratio, weights: {easy: 2, medium: 5, hard: 3}}"],
    [OWN, "tasks={max_steps: 20, growing_steps: {interval: 10}, sampler: {per: website}}"],
    [OWN, "tasks.sampler={name: ratio, weights: {mine: 2}}"],
]


def test_a_setting_without_effect_is_named_and_one_with_an_effect_accepted() -> None:
    for settings, words in REFUSED:
        assert words in refused(*settings)
    for settings in ACCEPTED:
        accept(*settings)
    config = parse_config(None, ["trainer.advantage.name=gdpo"])
    config.evaluation.only = True  # is not checked for training
    check_combinations(config)


def test_a_setting_of_a_teacher_needs_a_coefficient_and_its_value_is_not_shown() -> None:
    for name in {spec.name for spec in fields(DistillationConfig)} - {"coefficient"}:
        value = {"rewards": "false", "url": URL, "key_variable": "KEY"}.get(name, "2.5")
        key = f"trainer.distillation.{name}"
        message = refused(f"{key}={value}")
        assert message.startswith(f"{key} has no effect with trainer.distillation.coefficient=0")
        assert value not in message.partition("coefficient=0;")[0].removeprefix(key)
