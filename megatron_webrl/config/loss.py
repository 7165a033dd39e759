"""Settings of the algorithm, trainer.loss.* and trainer.reward.*: docs/algorithm.md says what they do."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.config.setting import setting


@dataclass
class LossConfig:
    name: str = setting(
        "grpo",
        "grpo: clipped surrogate, ratios per token; gspo: ratios per response; raft: log-likelihood of successes.",
        choices=("grpo", "gspo", "raft"),
    )
    normalizer: str = setting(
        "constant", "Weight of a trajectory's tokens.", choices=("constant", "per_trajectory", "token_mean")
    )
    normalizer_constant: int = setting(10, "The constant normaliser divides by k steps.", low=1)
    decoupled: bool = setting(
        True,
        "Clip against the policy at the start of the update and weight by proximal/behaviour; otherwise "
        "clip against the behaviour policy.",
    )
    importance_weight_cap: float = setting(5.0, "Cap of the proximal/behaviour weight.", above=1)
    importance_weight_mode: str = setting(
        "mask", "Tokens whose weight exceeds the cap are masked, or their weight is truncated to the cap.",
        choices=("mask", "truncate"),
    )  # fmt: skip
    clip_low: float = setting(0.2, "Lower clip of the ratio, 1 - clip_low; gspo: about 3e-4.", above=0, high=1)
    clip_high: float = setting(0.2, "Upper clip of the ratio, 1 + clip_high; gspo: about 4e-4.", above=0)
    dual_clip: float = setting(
        3.0, "Bound of the surrogate as a multiple of a negative advantage; above 1, or 0 for none.", low=0
    )
    kl_coefficient: float = setting(
        0.0, "Weight of the KL divergence from the policy at the start of RL; 0: none, and no reference is kept.", low=0
    )
    raft_versions: int = setting(0, "Number of earlier versions whose successes are imitated again (raft).", low=0)
    shuffle_advantages: bool = setting(
        False,
        "Control experiment: assign the advantages of a batch (raft: the rewards) to its trajectories at "
        "random, so that nothing can be learned.",
    )


@dataclass
class RewardConfig:
    format_penalty: float = setting(
        0.0, "Subtracted from the reward, times the fraction of steps with a format error.", low=0
    )
    repetition_penalty: float = setting(
        0.0,
        "Subtracted from the reward, times the fraction of steps that repeat an action which had left the"
        " page unchanged.",
        low=0,
    )
    length_penalty: float = setting(
        0.0,
        "Subtracted from the reward, times the mean over steps of a number that rises from 0 to 1 within "
        "the length window.",
        low=0,
    )
    length_window: int = setting(512, "Length window: the last tokens before rollout.max_new_tokens.", low=1)
