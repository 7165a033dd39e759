"""Validation of trainer.loss and trainer.reward: values that contradict each other, and settings without effect."""

from __future__ import annotations

from operator import attrgetter

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.trainer import TrainerConfig

WEIGHT_SETTINGS = (
    "loss.importance_weight_level", "loss.importance_weight_floor", "loss.importance_weight_cap",
    "loss.importance_weight_mode", "loss.kl_rejection_bound", "loss.kl_rejection_estimator",
)  # fmt: skip
"""Settings of the decoupled weight."""

SURROGATE_SETTINGS = {
    "grpo": ("loss.clip_low", "loss.clip_high", "loss.dual_clip"),
    "gspo": ("loss.clip_low", "loss.clip_high", "loss.dual_clip"),
    "cispo": ("loss.clip_low", "loss.clip_high"),
    "sapo": ("loss.sapo_temperature_positive", "loss.sapo_temperature_negative"),
    "dppo": ("loss.dppo_divergence", "loss.dppo_bound"),
    "raft": ("loss.raft_versions",),
    "raft_plus_plus": ("loss.clip_high", "loss.raft_versions"),
}
"""Settings that only some losses use, by trainer.loss.name."""

BASELINE_SETTINGS = (
    "reward.format_penalty", "reward.repetition_penalty", "reward.length_penalty", "zero_variance_groups", "min_group",
)  # fmt: skip
"""Settings of advantages of rewards, which neither losses that imitate successes nor a teacher alone use."""


def check_loss(config: Config) -> None:
    """Check trainer.loss and trainer.reward. Raises ConfigError."""
    trainer, loss, reward = config.trainer, config.trainer.loss, config.trainer.reward
    for name, cause in ignored_settings(trainer).items():
        value, default = (attrgetter(name)(settings) for settings in (trainer, TrainerConfig()))
        if value != default:
            raise ConfigError(f"trainer.{name}={value} has no effect with {cause}; leave it at {default}")
    if 0 < loss.dual_clip <= 1:
        raise ConfigError(
            f"trainer.loss.dual_clip={loss.dual_clip} would clip the ratio 1 itself; set it above 1, or 0 for none"
        )
    oldest = config.staleness_limit + loss.raft_versions
    if loss.max_token_lag and loss.max_token_lag >= oldest:
        raise ConfigError(
            f"trainer.loss.max_token_lag={loss.max_token_lag} masks nothing: no trained token is more than {oldest} "
            "versions old (rollout.max_staleness, rollout.mode, trainer.loss.raft_versions); lower it, or set it to 0"
        )
    if reward.length_penalty and reward.length_window > config.rollout.max_new_tokens:
        raise ConfigError(
            f"trainer.reward.length_window={reward.length_window} exceeds "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}; lower it"
        )


def ignored_settings(trainer: TrainerConfig) -> dict[str, str]:
    """Settings below trainer. that its loss ignores -> the setting that is the cause."""
    loss = trainer.loss
    used = SURROGATE_SETTINGS[loss.name]
    by_name = [name for names in SURROGATE_SETTINGS.values() for name in names if name not in used]
    if loss.name == "raft":
        by_name += ["loss.decoupled", *WEIGHT_SETTINGS, "loss.max_token_lag"]
    causes = dict.fromkeys(by_name, f"trainer.loss.name={loss.name}")
    if trainer.without_baseline:
        causes |= dict.fromkeys(BASELINE_SETTINGS, trainer.without_baseline)
    if not trainer.reward.length_penalty:
        causes["reward.length_window"] = "trainer.reward.length_penalty=0"
    if trainer.distillation.alone:
        causes["loss.shuffle_advantages"] = trainer.without_baseline
    others = (
        (not loss.decoupled, WEIGHT_SETTINGS, "decoupled=false"),
        (not loss.kl_rejection_bound, ("loss.kl_rejection_estimator",), "kl_rejection_bound=0"),
        (
            loss.normalizer not in ("constant", "async_webrl_constant"),
            ("loss.normalizer_constant",),
            f"normalizer={loss.normalizer}",
        ),
    )
    for ignores, names, cause in others:
        if ignores:
            causes = dict.fromkeys(names, f"trainer.loss.{cause}") | causes
    return causes
