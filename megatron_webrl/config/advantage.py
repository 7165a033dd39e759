"""Settings of credit assignment, trainer.advantage.*: docs/algorithm.md says what they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_webrl.config.setting import ConfigError, own_options, setting

PENALTIES = (
    "Steps that bear a penalty: all steps of the episode share its mean, or each step bears its own."  # of two variants
)


@dataclass
class AdvantageConfig:
    """Settings of every way to assign credit; the classes below add those of one."""

    name: str = setting(
        "group",
        "group: the return against the statistics of its group; gdpo: outcome and each penalty normalised separately, "
        "then added with the penalties as weights; critic: a step critic, a value head on the policy's trunk, whose "
        "values replace the statistics of groups; or the import path of a function (docs/extending.md).",
        choices=("group", "gdpo", "critic"),
        own=True,
    )
    discount: float = setting(
        1.0, "A step's return is the outcome times this, to the power of the steps that follow it.", above=0, high=1
    )
    overlong: str = setting(
        "keep",
        "Failures by the step limit or with a response cut at rollout.max_new_tokens: train them, or mask them from "
        "the loss (DAPO); they count in the group statistics either way.",
        choices=("keep", "mask"),
    )


@dataclass
class AnchoredConfig(AdvantageConfig):
    """What advantages from the statistics of groups share."""

    anchor_weight: float = setting(
        0.0,
        "Weight of a second advantage, among the steps of a group that saw the same screenshot at the same URL "
        "(GiGPO); 0: none.",
        low=0,
    )


@dataclass
class GdpoConfig(AnchoredConfig):
    pass


@dataclass
class GroupAdvantageConfig(AnchoredConfig):
    baseline: str = setting(
        "group_mean",
        "Subtracted from the return: the group's mean, or the mean of the group's other episodes (RLOO).",
        choices=("group_mean", "leave_one_out"),
    )
    scale: str = setting(
        "group_std",
        "Divisor of the advantage: the group's standard deviation, none (Dr. GRPO), the standard deviation over the "
        "whole batch (REINFORCE++), or the group's mean outcome (MaxRL).",
        choices=("group_std", "none", "batch_std", "group_mean"),
    )
    penalties: str = setting("trajectory", PENALTIES, choices=("trajectory", "step"))

    def check(self) -> None:
        if self.anchor_weight and self.scale in ("batch_std", "group_mean"):
            raise ConfigError(
                f"trainer.advantage.anchor_weight={self.anchor_weight} compares the steps of a group alone, which "
                f"trainer.advantage.scale={self.scale} does not divide; set scale to group_std or none"
            )


@dataclass
class CriticConfig(AdvantageConfig):
    coefficient: float = setting(0.5, "Weight of the value loss.", above=0)
    gae_lambda: float = setting(
        0.95,
        "Weight of what follows a step against its value: 0 trusts the next step's value, 1 the return of the episode.",
        low=0,
        high=1,
    )
    train_trunk: bool = setting(True, "The value loss trains the policy's trunk too; false: the value head alone.")
    warmup_updates: int = setting(0, "First updates of the run that change the value head alone.", low=0)
    scale: str = setting(
        "batch_std",
        "Divisor of the advantage: the standard deviation over the whole batch, or none.",
        choices=("batch_std", "none"),
    )
    penalties: str = setting("trajectory", PENALTIES, choices=("trajectory", "step"))


@dataclass
class OwnAdvantageConfig(AdvantageConfig):
    """Credit by a function of the user's own."""

    options: dict[str, Any] = own_options()

    def check(self) -> None:
        if self.discount != 1:
            raise ConfigError(
                f"trainer.advantage.discount={self.discount} has no effect with trainer.advantage.name={self.name}, "
                "which makes advantages of rewards itself; leave it out"
            )


ADVANTAGES: dict[str, type[AdvantageConfig]] = {
    "group": GroupAdvantageConfig,
    "gdpo": GdpoConfig,
    "critic": CriticConfig,
}
"""Settings of each way to assign credit, by trainer.advantage.name."""


def advantage_config(name: str = "group", **settings: Any) -> Any:
    """Settings of one way to assign credit; those that are left out have their defaults."""
    return ADVANTAGES.get(name, OwnAdvantageConfig)(name=name, **settings)
