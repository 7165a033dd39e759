"""Checks of trainer.advantage.* and trainer.critic.*: each setting that has no effect is refused by name."""

from __future__ import annotations

from dataclasses import fields

from megatron_webrl.config.advantage import AdvantageConfig, CriticConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import TasksConfig


def check_credit(config: Config) -> None:
    """Raise ConfigError for a setting of trainer.advantage or trainer.critic that others leave without effect.

    A configuration that only evaluates trains nothing, and is not checked.
    """
    if config.evaluation.only:
        return
    settings, trainer = config.trainer.advantage, config.trainer
    if trainer.without_baseline:
        for each in fields(AdvantageConfig):
            _check_default(settings, each.name, f"{trainer.without_baseline}, which has no advantages")
        for each in fields(CriticConfig):
            _check_critic_default(trainer.critic, each.name, trainer.without_baseline)
        return
    _check_critic(config)
    reward = trainer.reward
    if not (reward.format_penalty or reward.repetition_penalty or reward.length_penalty):
        for name in ("components", "penalties"):
            _check_default(settings, name, "no penalty: all of trainer.reward.* are 0")
    if settings.components == "apart":
        _check_apart(settings)
    if settings.discount < 1 and _longest_episode(config.tasks) == 1:
        _check_default(settings, "discount", "tasks of one step (tasks.max_steps)")
    if not settings.anchor_weight:
        _check_default(settings, "anchor_discount", "trainer.advantage.anchor_weight=0")
    elif settings.scale == "batch_std":
        raise ConfigError(
            f"trainer.advantage.anchor_weight={settings.anchor_weight} compares the steps of a group alone, which "
            "trainer.advantage.scale=batch_std does not divide; set scale to group_std or none"
        )
    if settings.overlong == "mask" and trainer.zero_variance_groups == "keep":
        raise ConfigError(
            "trainer.advantage.overlong=mask could leave nothing to train of the groups that "
            "trainer.zero_variance_groups=keep keeps; set the latter to drop"
        )


def _check_critic(config: Config) -> None:
    """A critic's values replace the statistics of groups."""
    critic, settings = config.trainer.critic, config.trainer.advantage
    if not critic.coefficient:
        for name in ("gae_lambda", "train_trunk", "warmup_updates"):
            _check_critic_default(critic, name, "trainer.critic.coefficient=0")
        return
    for name in ("baseline", "components", "anchor_weight"):
        _check_default(settings, name, "a critic (trainer.critic.coefficient)")
    if settings.scale == "group_std":
        raise ConfigError(
            "trainer.advantage.scale=group_std divides by a statistic of groups, which the advantages of a critic "
            "(trainer.critic.coefficient) do not use; set it to none or batch_std"
        )
    if config.trainer.loss.shuffle_advantages:
        raise ConfigError(
            "trainer.loss.shuffle_advantages has no effect with a critic (trainer.critic.coefficient), which computes "
            "the advantages after the samples are made; leave it at false"
        )
    if _longest_episode(config.tasks) == 1:
        _check_critic_default(critic, "gae_lambda", "tasks of one step (tasks.max_steps)")


def _check_apart(settings: AdvantageConfig) -> None:
    """GDPO has statistics of its own: of each component in its group, then of the sum in the batch."""
    for name in ("baseline", "scale", "penalties"):
        _check_default(settings, name, "trainer.advantage.components=apart, which normalises each component")


def _longest_episode(tasks: TasksConfig) -> int | None:
    """The highest step limit of training; None if a source of the user's own has its own."""
    if tasks.from_import_path:
        return None
    limit = tasks.growing_steps.max if tasks.growing_steps.interval else tasks.max_steps
    return max(limit, *tasks.max_steps_by_difficulty.values(), 1)


def _check_default(settings: AdvantageConfig, name: str, cause: str) -> None:
    _check_unchanged(f"trainer.advantage.{name}", getattr(settings, name), getattr(AdvantageConfig(), name), cause)


def _check_critic_default(settings: CriticConfig, name: str, cause: str) -> None:
    _check_unchanged(f"trainer.critic.{name}", getattr(settings, name), getattr(CriticConfig(), name), cause)


def _check_unchanged(name: str, value: object, default: object, cause: str) -> None:
    if value != default:
        raise ConfigError(f"{name}={value} has no effect with {cause}; leave it at {default}")
