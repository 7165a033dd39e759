"""Settings of the algorithm, trainer.loss.* and trainer.reward.*: docs/algorithm.md says what they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_webrl.config.setting import ConfigError, own_options, setting

LOSS_NAMES = ("grpo", "gspo", "cispo", "sapo", "dppo", "raft", "raft_plus_plus")


@dataclass
class LossConfig:
    """Settings of every loss; the classes below add those of one loss."""

    name: str = setting(
        "grpo",
        "grpo: clipped surrogate, ratios per token; gspo: ratios per response; cispo: log-likelihood with clipped "
        "weights; sapo: sigmoid gate instead of a clip; dppo: bound of the divergence instead of the ratio; raft: "
        "log-likelihood of successes; raft_plus_plus: clipped surrogate of successes; or the import path of a loss "
        "(docs/extending.md).",
        choices=LOSS_NAMES,
        own=True,
    )
    normalizer: str = setting(
        "constant",
        "Weight of a trajectory's tokens.",
        choices=(
            "constant", "per_trajectory", "token_mean", "async_webrl_constant", "async_webrl_per_trajectory"
        )
    )  # fmt: skip
    normalizer_constant: int = setting(
        10,
        "The normalisers constant and async_webrl_constant divide by k steps.",
        low=1,
        only_with=("normalizer", "constant", "async_webrl_constant"),
    )
    kl_coefficient: float = setting(
        0.0, "Weight of the KL divergence from the policy at the start of RL; 0: none, and no reference is kept.", low=0
    )
    entropy_coefficient: float = setting(0.0, "Weight of the entropy bonus; 0: none.", low=0)
    shuffle_advantages: bool = setting(
        False,
        "Control experiment: assign the advantages of a batch (raft, raft_plus_plus: the rewards) to its trajectories "
        "at random, so that nothing can be learned.",
    )

    @property
    def imitates_successes(self) -> bool:
        """Whether only successes are trained, at advantage 1, without a baseline."""
        return isinstance(self, ReplayConfig)

    @property
    def oldest_replayed(self) -> int:
        """Versions back to which successes are trained again; 0: none are."""
        if isinstance(self, ReplayConfig):
            return self.replay_versions
        return self.replay_into_failed_groups if isinstance(self, BaselineLossConfig) else 0


@dataclass
class OffPolicyLossConfig(LossConfig):
    """Settings of a loss with ratios of policies: all but raft."""

    decoupled: bool = setting(
        True,
        "Clip against the policy at the start of the update and weight by proximal/behaviour; otherwise "
        "clip against the behaviour policy.",
    )
    importance_weight_level: str = setting(
        "auto",
        "Proximal/behaviour weight of each token, geometric mean over a response, or product over a response; auto: "
        "geometric with gspo, else token.",
        choices=("auto", "token", "geometric", "product"),
        only_with="decoupled",
    )
    importance_weight_floor: float = setting(
        0.0, "Smallest proximal/behaviour weight inside the bounds; 0: none.", low=0, high=1, only_with="decoupled"
    )
    importance_weight_cap: float = setting(5.0, "Cap of the proximal/behaviour weight.", above=1, only_with="decoupled")
    importance_weight_mode: str = setting(
        "mask",
        "Tokens whose weight is outside of floor and cap are masked, or their weight is truncated to the bound.",
        choices=("mask", "truncate"),
        only_with="decoupled",
    )
    kl_rejection_bound: float = setting(
        0.0,
        "Responses whose KL estimate of behaviour and proximal policy exceeds this are masked; 0: none.",
        low=0,
        only_with="decoupled",
    )
    kl_rejection_estimator: str = setting(
        "k3",
        "Estimator of that KL, mean over the response, w = proximal/behaviour. k1: - log w; k3: w - 1 - log w.",
        choices=("k1", "k3"),
        only_with="kl_rejection_bound",
    )
    max_token_lag: int = setting(
        0, "Tokens of a policy more than this many versions older than the current one are masked; 0: none.", low=0
    )


@dataclass
class BaselineLossConfig(OffPolicyLossConfig):
    """sapo, and the base of all losses that need groups with a baseline."""

    replay_into_failed_groups: int = setting(
        0,
        "Number of earlier versions whose successes complete groups of the same task that failed as a whole, one each; "
        "0: none.",
        low=0,
    )


@dataclass
class ClipConfig(BaselineLossConfig):
    """cispo, and the base of grpo and gspo."""

    clip_low: float = setting(0.2, "Lower clip of the ratio, 1 - clip_low; gspo: about 3e-4.", above=0, high=1)
    clip_high: float = setting(0.2, "Upper clip of the ratio, 1 + clip_high; gspo: about 4e-4.", above=0)


@dataclass
class DualClipConfig(ClipConfig):
    """grpo and gspo."""

    dual_clip: float = setting(
        3.0, "Bound of the surrogate as a multiple of a negative advantage; above 1, or 0 for none.", low=0
    )

    def check(self) -> None:
        if 0 < self.dual_clip <= 1:
            raise ConfigError(
                f"trainer.loss.dual_clip={self.dual_clip} would clip the ratio 1 itself; set it above 1, or 0 for none"
            )


@dataclass
class DppoConfig(BaselineLossConfig):
    dppo_divergence: str = setting(
        "total_variation", "Divergence that dppo bounds, of the token against all others.",
        choices=("total_variation", "kl")
    )  # fmt: skip
    dppo_bound: float = setting(0.15, "Largest divergence of a token up to which dppo moves away.", above=0)


@dataclass
class ReplayConfig:
    """What raft and raft_plus_plus share, which imitate successes."""

    replay_versions: int = setting(0, "Number of earlier versions whose successes are imitated again.", low=0)
    unchanged_pages: str = setting(
        "keep",
        "Steps after which the screenshot was the same: imitate them, or skip all but an episode's last step.",
        choices=("keep", "skip"),
    )


@dataclass
class RaftConfig(ReplayConfig, LossConfig):
    pass


@dataclass
class RaftPlusPlusConfig(ReplayConfig, OffPolicyLossConfig):
    clip_high: float = setting(0.2, "Upper clip of the ratio, 1 + clip_high.", above=0)


@dataclass
class OwnLossConfig(LossConfig):
    """A loss of the user's own."""

    options: dict[str, Any] = own_options()


LOSSES: dict[str, type[LossConfig]] = {
    "grpo": DualClipConfig,
    "gspo": DualClipConfig,
    "cispo": ClipConfig,
    "sapo": BaselineLossConfig,
    "dppo": DppoConfig,
    "raft": RaftConfig,
    "raft_plus_plus": RaftPlusPlusConfig,
}
"""Settings of each loss, by trainer.loss.name."""


def loss_config(name: str = "grpo", **settings: Any) -> Any:
    """Settings of one loss; those that are left out have their defaults."""
    return LOSSES.get(name, OwnLossConfig)(name=name, **settings)


@dataclass
class RewardConfig:
    function: str = setting(
        "",
        "Import path of a function that gives the reward of a judged episode (docs/extending.md); empty: 1 for a "
        "success, 0 or what judge.graded says for a failure.",
        own=True,
    )
    options: dict[str, Any] = own_options(only_with="function")
    unfinished: str = setting(
        "mask",
        "Episodes that are cut off. mask: none is trained; limits_fail: those that reach "
        "rollout.episode_timeout_seconds or a prompt above rollout.max_model_len are failures; all_fail: those that a "
        "fault of browser or engine ends after a retry, too.",
        choices=("mask", "limits_fail", "all_fail"),
    )
    turn_discount: float = setting(
        1.0, "The reward is multiplied by this, to the power of the steps after the first.", above=0, high=1
    )
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
    length_window: int = setting(
        512, "Length window: the last tokens before rollout.max_new_tokens.", low=1, only_with="length_penalty"
    )

    @property
    def has_penalties(self) -> bool:
        return bool(self.format_penalty or self.repetition_penalty or self.length_penalty)
