"""Settings of credit assignment, trainer.advantage.* and trainer.critic.*: docs/algorithm.md says what they do."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.config.setting import setting


@dataclass
class AdvantageConfig:
    baseline: str = setting(
        "group_mean",
        "Subtracted from the return: the group's mean, or the mean of the group's other episodes (RLOO).",
        choices=("group_mean", "leave_one_out"),
    )
    scale: str = setting(
        "group_std",
        "Divisor of the advantage: the group's standard deviation, none (Dr. GRPO), or the standard deviation over "
        "the whole batch (REINFORCE++).",
        choices=("group_std", "none", "batch_std"),
    )
    components: str = setting(
        "sum",
        "Outcome and penalties are added up before the group statistics, or normalised apart and then added with the "
        "penalties as weights (GDPO).",
        choices=("sum", "apart"),
    )
    penalties: str = setting(
        "trajectory",
        "Steps that bear a penalty: all steps of the episode share its mean, or each step bears its own.",
        choices=("trajectory", "step"),
    )
    discount: float = setting(
        1.0, "A step's return is the outcome times this, to the power of the steps that follow it.", above=0, high=1
    )
    anchor_weight: float = setting(
        0.0,
        "Weight of a second advantage, among the steps of a group that saw the same screenshot at the same URL "
        "(GiGPO); 0: none.",
        low=0,
    )
    anchor_discount: float = setting(
        0.95, "Discount of the returns that the second advantage compares.", above=0, high=1
    )
    overlong: str = setting(
        "keep",
        "Failures by the step limit or with a response cut at rollout.max_new_tokens: train them, or mask them from "
        "the loss (DAPO); they count in the group statistics either way.",
        choices=("keep", "mask"),
    )


@dataclass
class CriticConfig:
    coefficient: float = setting(
        0.0,
        "Weight of the value loss of a step critic, a value head on the policy's trunk whose values replace the "
        "group's statistics in the advantage; 0: no critic.",
        low=0,
    )
    gae_lambda: float = setting(
        0.95,
        "Weight of what follows a step against its value: 0 trusts the next step's value, 1 the return of the episode.",
        low=0,
        high=1,
    )
    train_trunk: bool = setting(True, "The value loss trains the policy's trunk too; false: the value head alone.")
    warmup_updates: int = setting(0, "First updates of the run that change the value head alone.", low=0)
