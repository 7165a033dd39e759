"""Settings that the chosen loss ignores are refused, each with one error that names it."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

import pytest

from megatron_webrl.config.loss import LossConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.loss_validation import SURROGATE_SETTINGS, WEIGHT_SETTINGS, check_loss, ignored_settings

OTHER_VALUES: dict[str, Any] = {
    "loss.clip_low": 0.1, "loss.clip_high": 0.1, "loss.dual_clip": 2.0, "loss.raft_versions": 1,
    "loss.sapo_temperature_positive": 2.0, "loss.sapo_temperature_negative": 2.0, "loss.dppo_divergence": "kl",
    "loss.dppo_bound": 0.1, "loss.decoupled": False, "loss.importance_weight_level": "product",
    "loss.importance_weight_floor": 0.5, "loss.importance_weight_cap": 2.0, "loss.importance_weight_mode": "truncate",
    "loss.kl_rejection_bound": 0.1, "loss.kl_rejection_estimator": "k1", "loss.max_token_lag": 1,
    "loss.normalizer_constant": 5, "reward.format_penalty": 0.1, "reward.repetition_penalty": 0.1,
    "reward.length_penalty": 0.1, "reward.length_window": 100, "zero_variance_groups": "keep", "min_group": 3,
}  # fmt: skip
"""A value other than the default for each setting that some loss ignores."""


def config_with(**values: Any) -> Config:
    """`values`: by name below trainer., with a double underscore for the dot."""
    config = Config()
    for name, value in values.items():
        *parents, last = name.split("__")
        setattr(attrgetter(".".join(parents))(config.trainer) if parents else config.trainer, last, value)
    return config


def error(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_loss(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", SURROGATE_SETTINGS)
def test_the_defaults_of_every_loss_and_normalizer_are_accepted(name: str) -> None:
    check_loss(config_with(loss__name=name))
    check_loss(config_with(loss__name=name, loss__normalizer="token_mean"))
    if name != "raft":
        check_loss(config_with(loss__name=name, loss__decoupled=False))


CASES = [
    *({"loss__name": name} for name in SURROGATE_SETTINGS),
    {"loss__decoupled": False},
    {"loss__normalizer": "async_webrl_per_trajectory"},
]


@pytest.mark.parametrize("chosen", CASES, ids=lambda case: "-".join(f"{k}={v}" for k, v in case.items()))
def test_each_ignored_setting_is_refused_by_name(chosen: dict[str, Any]) -> None:
    ignored = ignored_settings(config_with(**chosen).trainer)
    assert ignored
    for name, cause in ignored.items():
        value = OTHER_VALUES[name]
        message = error(config_with(**chosen, **{name.replace(".", "__"): value}))
        assert message.startswith(f"trainer.{name}={value} has no effect with {cause}; leave it at ")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "cispo", "dual_clip": 2.0}, "=2.0 has no effect with trainer.loss.name=cispo; leave it at 3.0"),
        ({"name": "sapo", "clip_high": 0.3}, "clip_high=0.3 has no effect with trainer.loss.name=sapo"),
        ({"name": "raft_plus_plus", "clip_low": 0.3}, "clip_low=0.3 has no effect with trainer.loss.name=raft_plus"),
        ({"name": "raft", "kl_rejection_bound": 1.0}, "kl_rejection_bound=1.0 has no effect with trainer.loss.name=r"),
        ({"dppo_bound": 0.3}, "dppo_bound=0.3 has no effect with trainer.loss.name=grpo"),
        ({"decoupled": False, "importance_weight_floor": 0.5}, "floor=0.5 has no effect with trainer.loss.decoupled=f"),
        ({"kl_rejection_estimator": "k1"}, "estimator=k1 has no effect with trainer.loss.kl_rejection_bound=0"),
        ({"normalizer": "token_mean", "normalizer_constant": 3}, "no effect with trainer.loss.normalizer=token_mean"),
        ({"max_token_lag": 2}, "max_token_lag=2 masks nothing: no trained token is more than 2 versions old"),
    ],
)  # fmt: skip
def test_the_message_names_setting_and_cause(values: dict[str, Any], message: str) -> None:
    assert message in error(config_with(**{f"loss__{name}": value for name, value in values.items()}))


def test_used_settings_are_accepted() -> None:
    weights = {name.replace(".", "__"): OTHER_VALUES[name] for name in WEIGHT_SETTINGS}
    for name, used in SURROGATE_SETTINGS.items():
        own = {each.replace(".", "__"): OTHER_VALUES[each] for each in used}
        if name != "raft":
            own |= weights | {"loss__max_token_lag": 1}
        config = config_with(loss__name=name, loss__entropy_coefficient=0.1, loss__normalizer_constant=5, **own)
        check_loss(config)


def test_a_lag_is_useful_up_to_the_age_of_replayed_successes() -> None:
    check_loss(config_with(loss__name="raft_plus_plus", loss__raft_versions=3, loss__max_token_lag=4))
    assert "more than 5 versions old" in error(
        config_with(loss__name="raft_plus_plus", loss__raft_versions=3, loss__max_token_lag=5)
    )


def test_every_loss_has_a_row_and_every_setting_exists() -> None:
    (name,) = (each for each in fields(LossConfig) if each.name == "name")
    assert set(SURROGATE_SETTINGS) == set(name.metadata["choices"])
    trainer = Config().trainer
    assert all(attrgetter(each)(trainer) != value for each, value in OTHER_VALUES.items())
