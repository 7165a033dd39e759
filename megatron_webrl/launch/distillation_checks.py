"""Checks of the settings trainer.distillation.*: each that has no effect or no meaning is refused by name."""

from __future__ import annotations

from dataclasses import fields

from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError


def check_distillation(config: Config) -> None:
    """Raise ConfigError for settings of trainer.distillation that contradict others or have no effect.

    A configuration that only evaluates has no teacher, and is not checked.
    """
    if config.evaluation.only:
        return
    settings, loss = config.trainer.distillation, config.trainer.loss
    if not settings.coefficient:
        for each in fields(DistillationConfig):
            # The value is not repeated: that of key_variable may be the key itself.
            if getattr(settings, each.name) != getattr(DistillationConfig(), each.name):
                raise ConfigError(
                    f"trainer.distillation.{each.name} has no effect with trainer.distillation.coefficient=0; leave it "
                    "at its default, or set a coefficient such as 1"
                )
        return
    if not settings.url:
        raise ConfigError(
            f"trainer.distillation.coefficient={settings.coefficient} needs a teacher; set trainer.distillation.url to "
            "its vLLM server, such as http://node7:8000"
        )
    if loss.imitates_successes:
        raise ConfigError(
            f"trainer.distillation.coefficient={settings.coefficient} gives each token an advantage, and "
            f"trainer.loss.name={loss.name} has none; choose another loss, or set the coefficient to 0"
        )
    if config.rollout.temperature != 1:
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature} differs from the temperature of the teacher's "
            "log-probabilities, which is 1 (trainer.distillation); set it to 1"
        )
