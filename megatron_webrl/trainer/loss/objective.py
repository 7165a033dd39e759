"""The loss that a configuration names: off-policy control, penalty, bonus and teacher. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_webrl.config.advantage import CriticConfig
from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.import_path import find_function
from megatron_webrl.config.loss import (
    ClipConfig,
    DppoConfig,
    DualClipConfig,
    LossConfig,
    OffPolicyLossConfig,
    OwnLossConfig,
    RaftPlusPlusConfig,
)
from megatron_webrl.trainer.data.batching import NO_VERSION
from megatron_webrl.trainer.loss.token_data import Objective, TokenData, clamp_log_ratio, k3, mean_per_step
from megatron_webrl.trainer.metrics.token_metrics import OWN_PREFIX, moments

TEACHER_CLIP = 10.0  # nats
REFERENCE_RATIO_LIMIT = 10.0
"""Of pi_ref / pi_theta: a token whose ratio is in the millions would otherwise be all that an update learns from."""


def make_objective(
    config: LossConfig,
    group: ProcessGroup | None,
    version: int | None = None,
    distillation: DistillationConfig | None = None,
    critic: CriticConfig | None = None,
) -> Objective:
    """The configured loss, plus kl_coefficient * reference_kl, less entropy_coefficient * entropy_bonus.

    With a `distillation` whose coefficient is above 0, the loss has the teacher's advantages, too (`with_teacher`);
    with a `critic`, its coefficient * value_loss is added. Ratios and weights per response are collective over the
    context-parallel `group`. `version`: that of the policy at the start of the update; only max_token_lag needs it.
    """
    base = own_loss(config) if isinstance(config, OwnLossConfig) else OBJECTIVES[config.name](config, group, version)
    if distillation is not None and distillation.coefficient:
        assert isinstance(config, OffPolicyLossConfig), config.name
        base = with_teacher(base, distillation, config.decoupled)
    value_coefficient = critic.coefficient if critic is not None else 0.0
    if not config.kl_coefficient and not config.entropy_coefficient and not value_coefficient:
        return base

    def extended(current: Tensor, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        value, sums = base(current, data)
        if config.kl_coefficient:
            divergence, more = reference_kl(current, data)
            value, sums = value + config.kl_coefficient * divergence, sums | more
        if config.entropy_coefficient:
            value = value - config.entropy_coefficient * entropy_bonus(data)
        if value_coefficient:
            error = value_loss(data)
            value, sums = value + value_coefficient * error, sums | {"value_loss": error.detach()}
        return value, sums

    return extended


@dataclass(frozen=True)
class PolicyRatio:
    """Current policy and the one it is compared with: prox if decoupled, else behave. [tokens] each."""

    ratio: Tensor  # r = theta / old, per token or per response, with the gradient of theta
    current: Tensor  # log theta, with its gradient
    old: Tensor  # log-probabilities of the old policy


@dataclass(frozen=True)
class SurrogateTerms:
    """f(A, r) and which tokens it limits. [tokens] each."""

    value: Tensor
    clipped: Tensor  # bool, the gradient is stopped; cispo: the ratio is bounded
    dual_clipped: Tensor | None = None  # bool, the dual clip stops the gradient


Surrogate = Callable[[PolicyRatio, Tensor, Any], SurrogateTerms]  # of the settings of the loss


def clipped_surrogate(policy: PolicyRatio, advantage: Tensor, config: DualClipConfig) -> SurrogateTerms:
    """PPO's clip (arXiv 1707.06347, eq. 7) with dual clip (arXiv 1912.09729).

    f = min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A), and at least dual_clip * A where A < 0
    """
    unclipped = policy.ratio * advantage
    clipped = policy.ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage
    value = torch.minimum(unclipped, clipped)
    dual = torch.zeros_like(value, dtype=torch.bool)
    if config.dual_clip:
        bound = config.dual_clip * advantage
        dual = (advantage < 0) & (value < bound)
        value = torch.where(advantage < 0, torch.maximum(value, bound), value)
    return SurrogateTerms(value, clipped < unclipped, dual)


def cispo(policy: PolicyRatio, advantage: Tensor, config: ClipConfig) -> SurrogateTerms:
    """CISPO (arXiv 2506.13585, eq. 4 and 5): the clip bounds the weight of a token and stops no gradient.

    f = sg[clamp(r, 1 - clip_low, 1 + clip_high)] * A * log theta. clip_low=1 is the paper's, without a lower bound.
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    ratio = policy.ratio.detach()
    return SurrogateTerms(ratio.clamp(low, high) * advantage * policy.current, (ratio < low) | (ratio > high))


def sapo(policy: PolicyRatio, advantage: Tensor, config: OffPolicyLossConfig) -> SurrogateTerms:
    """Soft adaptive policy optimisation, SAPO (arXiv 2511.20347): a smooth gate instead of a clip.

    f = 4 / T * sigmoid(T (r - 1)) * A, T = 1.0 where A > 0, else 1.05, as in the paper. On policy df/dr = A; the
    gate closes on both sides of r = 1, the sooner the higher T.
    """
    temperature = torch.full_like(advantage, 1.05).masked_fill(advantage > 0, 1.0)
    gate = 4 / temperature * torch.sigmoid(temperature * (policy.ratio - 1))
    return SurrogateTerms(gate * advantage, torch.zeros_like(advantage, dtype=torch.bool))


def dppo(policy: PolicyRatio, advantage: Tensor, config: DppoConfig) -> SurrogateTerms:
    """Divergence proximal policy optimisation, DPPO (arXiv 2602.04879), with a binary divergence per token.

    f = M r A; M = 0 where D > dppo_bound and the update would increase D: A > 0 and theta > old, or A < 0 and
    theta < old. D compares two outcomes, the token and all others (eq. 13 and 14), with p = theta, q = old:
    total_variation  |p - q|
    kl               q log(q / p) + (1 - q) log((1 - q) / (1 - p))
    """
    with torch.no_grad():
        divergence = binary_divergence(policy.current, policy.old, config.dppo_divergence)
        away = advantage * (policy.current - policy.old) > 0
        stopped = away & (divergence > config.dppo_bound)
    value = policy.ratio * advantage
    return SurrogateTerms(torch.where(stopped, torch.zeros_like(value), value), stopped)


def binary_divergence(current: Tensor, old: Tensor, kind: str) -> Tensor:
    """Divergence of two Bernoulli distributions from log-probabilities of one outcome, see `dppo`. [tokens]."""
    if kind == "total_variation":
        return (torch.exp(current) - torch.exp(old)).abs()
    tiny = torch.finfo(current.dtype).tiny  # keeps the logarithm of a token that is certain finite
    rest, old_rest = (-torch.expm1(current)).clamp(min=tiny), (-torch.expm1(old)).clamp(min=tiny)
    return torch.exp(old) * (old - current) + old_rest * (old_rest.log() - rest.log())


def raft_plus_plus(policy: PolicyRatio, advantage: Tensor, config: RaftPlusPlusConfig) -> SurrogateTerms:
    """RAFT++ (arXiv 2504.11343): successes only, weighted by the ratio and clipped.

    f = min(r, 1 + clip_high) for successes. The caller sets advantage 1 for these; others have no effect. No lower
    clip and no dual clip: with a positive advantage the minimum chooses neither.
    """
    success = advantage.clamp(min=0)
    value = policy.ratio.clamp(max=1 + config.clip_high) * success
    return SurrogateTerms(value, (success > 0) & (policy.ratio > 1 + config.clip_high))


SURROGATES: dict[str, Surrogate] = {
    "grpo": clipped_surrogate,
    "gspo": clipped_surrogate,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "raft_plus_plus": raft_plus_plus,
}  # by trainer.loss.name


def policy_loss(
    current: Tensor,
    data: TokenData,
    config: OffPolicyLossConfig,
    group: ProcessGroup | None = None,
    version: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = - sum weight * w * f(A, r), f the surrogate of the configured name, w from `off_policy_correction`.

    decoupled (arXiv 2505.24298, eq. 5)  r = pi_theta / pi_prox, w = pi_prox / pi_behave
    otherwise (PPO, arXiv 1707.06347)    r = pi_theta / pi_behave, w = 1

    name=gspo (arXiv 2507.18071, eq. 13 to 15): r is the geometric mean over the tokens of a response. In
    r_t = sg[r] * pi_theta,t / sg[pi_theta,t] the mean needs no gradient, and sum_t r_t has the gradient of |y| r. Where
    tokens of a response differ in w or A, it is the paper's GSPO-token.

    Metrics, summed over tokens of weight above 0: clipped, and dual_clipped if the surrogate has one (without masked
    tokens); the bounds that tokens are beyond, see OffPolicyCorrection; policy_ratio (r),
    behaviour_importance_weight (w), approx_kl (k3 of r per token); and clipped_logprob, the moments of log pi_theta
    over the clipped tokens.
    """
    old = data.proximal_logprobs if config.decoupled else data.behaviour_logprobs
    log_ratio = current - old
    with torch.no_grad():
        counted = (data.weight > 0).to(current.dtype)
        divergence = k3(log_ratio)
    if config.name == "gspo":
        log_ratio = mean_per_step(log_ratio.detach()[None], data, group)[0] + (current - current.detach())
    correction = off_policy_correction(data, config, group, version)
    ratio = torch.exp(clamp_log_ratio(log_ratio))
    terms = SURROGATES[config.name](PolicyRatio(ratio, current, old), data.advantage, config)
    loss = -(data.weight * correction.weight * terms.value).sum()
    with torch.no_grad():
        clipped = (data.weight > 0) & ~correction.masked & terms.clipped
        sums = {
            "clipped": clipped.to(current.dtype).sum(),
            **{name: (counted * beyond).sum() for name, beyond in correction.beyond.items()},
            "policy_ratio": (counted * ratio).sum(),
            "behaviour_importance_weight": (counted * correction.weight).sum(),
            "approx_kl": (counted * divergence).sum(),
            **moments("clipped_logprob", current, clipped),
        }
        if terms.dual_clipped is not None:
            sums["dual_clipped"] = (counted * (terms.dual_clipped & ~correction.masked)).sum()
    return loss, sums


def negative_log_likelihood(current: Tensor, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood - sum weight * log pi_theta, over tokens with a positive advantage.

    Demonstrations and RAFT (arXiv 2304.06767): the caller sets advantage 1 for imitated tokens and 0 for others.
    """
    return -(data.weight * (data.advantage > 0) * current).sum(), {}


def reference_kl(current: Tensor, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
    """KL estimate: sum weight * k3 of q = pi_ref / pi_theta (arXiv 2402.03300, eq. 4).

    Beyond REFERENCE_RATIO_LIMIT it continues along its tangent in log q: a token pulls by that limit less 1 at most,
    where k3 pulls by q - 1, without a bound.
    """
    assert data.reference_logprobs is not None
    log_ratio = data.reference_logprobs - current
    limit = math.log(REFERENCE_RATIO_LIMIT)
    within = torch.where(log_ratio > limit, limit, log_ratio)  # clamp would hide NaN from the gradient
    divergence = torch.exp(within) - 1 - within + (REFERENCE_RATIO_LIMIT - 1) * (log_ratio - within)
    counted = (data.weight > 0).to(current.dtype)
    return (data.weight * divergence).sum(), {"reference_kl": (counted * divergence.detach()).sum()}


def entropy_bonus(data: TokenData) -> Tensor:
    """sum weight * H, H the entropy of pi_theta over the vocabulary at the token (PPO, arXiv 1707.06347, eq. 9).

    H and its gradient are exact, at the sampling temperature (model/logprobs.py). The bonus covers all response
    tokens, masked and clipped ones included.
    """
    assert data.entropy is not None
    return (data.weight * data.entropy).sum()


def value_loss(data: TokenData) -> Tensor:
    """sum weight * (V - target)^2 over steps, V the current value of the step (PPO, arXiv 1707.06347, eq. 9).

    The weights are one over the minibatch's steps.
    """
    assert data.values is not None
    return (data.values.weight * (data.values.predicted - data.values.targets) ** 2).sum()


def with_teacher(base: Objective, settings: DistillationConfig, decoupled: bool) -> Objective:
    """`base` with the advantage A + coefficient * `teacher_advantage` of each token; A: that of the rewards.

    With r = 1 and without a clip the gradient is that of coefficient * sum weight * KL(theta || teacher), the reverse
    KL of the next token at each context of the policy's own responses (GKD, arXiv 2306.13649; MiniLLM, arXiv
    2306.08543; Lu, On-Policy Distillation, Thinking Machines, 2025). Later tokens are not credited to earlier ones.

    Metrics, of tokens of weight above 0: moments of teacher_kl, log behave - log teacher over the tokens with a
    teacher; teacher_missing, tokens without one; teacher_clipped, tokens whose advantage is beyond the clip.
    """

    def distilled(current: Tensor, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        scores = data.teacher_logprobs
        teacher = torch.full_like(data.advantage, torch.nan) if scores is None else scores
        old = data.proximal_logprobs if decoupled else data.behaviour_logprobs
        advantage = data.advantage + settings.coefficient * teacher_advantage(teacher, old)
        value, sums = base(current, replace(data, advantage=advantage))
        counted, missing = data.weight > 0, torch.isnan(teacher)
        return value, sums | {
            "teacher_missing": (counted & missing).to(current.dtype).sum(),
            "teacher_clipped": (counted & ((teacher - old).abs() > TEACHER_CLIP)).to(current.dtype).sum(),
            **moments("teacher_kl", data.behaviour_logprobs - teacher, counted & ~missing),
        }

    return distilled


def teacher_advantage(teacher: Tensor, old: Tensor) -> Tensor:
    """clamp(log teacher - log old, +-TEACHER_CLIP), [tokens]; 0 where `teacher` is NaN: it has not scored the token.

    `old`: the policy that the surrogate compares theta with, prox if decoupled, else behave. NaN in it stays NaN.
    """
    advantage = (teacher - old).clamp(-TEACHER_CLIP, TEACHER_CLIP)
    return torch.where(torch.isnan(teacher), torch.zeros_like(advantage), advantage)


def own_loss(config: OwnLossConfig) -> Objective:
    """The loss that trainer.loss.name names by import path; what it sums over tokens is reported as a metric of its
    own. Raises ConfigError.
    """
    loss = find_function(config.name, "trainer.loss.name", ("current", "data"), config.options)

    def objective(current: Tensor, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        value, sums = loss(current, data)
        return value, {f"{OWN_PREFIX}{name}": total.detach() for name, total in sums.items()}

    return objective


OBJECTIVES: dict[str, Callable[[Any, ProcessGroup | None, int | None], Objective]] = {
    **dict.fromkeys(
        SURROGATES, lambda config, group, version: partial(policy_loss, config=config, group=group, version=version)
    ),
    "raft": lambda config, group, version: negative_log_likelihood,
}  # by trainer.loss.name


@dataclass(frozen=True)
class OffPolicyCorrection:
    """What off-policy control makes of each token; without a gradient."""

    weight: Tensor  # float32 [tokens], w within its bounds; 0 for masked tokens
    masked: Tensor  # bool [tokens], left out of the surrogate
    beyond: dict[str, Tensor]  # metric -> bool [tokens], tokens beyond one bound; one token can be beyond several


@torch.no_grad()
def off_policy_correction(
    data: TokenData, config: OffPolicyLossConfig, group: ProcessGroup | None = None, version: int | None = None
) -> OffPolicyCorrection:
    """The decoupled weight (arXiv 2505.24298, eq. 5) after its bounds, KL rejection and the mask of old tokens.

    Without `decoupled` w is 1, and only the mask of old tokens applies. Collective over the context-parallel `group`
    for weights per response and for KL rejection. `version`: the current policy's.
    """
    log_weight = torch.zeros_like(data.behaviour_logprobs)
    if config.decoupled:
        log_weight = data.proximal_logprobs - data.behaviour_logprobs
    weight, above, below = bounded_weight(weight_at_level(log_weight, data, config, group), config)
    beyond = {"importance_weight_capped": above}
    masked = above if config.importance_weight_mode == "mask" else torch.zeros_like(above)
    if config.importance_weight_floor:
        beyond["importance_weight_floored"] = below
        masked = masked | below if config.importance_weight_mode == "mask" else masked
    if config.kl_rejection_bound:
        beyond["kl_rejected"] = rejected_by_kl(log_weight, data, config, group)
        masked = masked | beyond["kl_rejected"]
    if config.max_token_lag:
        beyond["lag_masked"] = too_old(data, config.max_token_lag, version)
        masked = masked | beyond["lag_masked"]
    return OffPolicyCorrection(torch.where(masked, torch.zeros_like(weight), weight), masked, beyond)


def weight_at_level(
    log_weight: Tensor, data: TokenData, config: OffPolicyLossConfig, group: ProcessGroup | None = None
) -> Tensor:
    """log w of each token at `importance_weight_level`. [tokens] -> [tokens]. Collective, except per token.

    token      log w_t                               TIS, MIS per token
    geometric  1/|y| sum_t log w_t                   as GSPO's ratio (arXiv 2507.18071, eq. 7)
    product    sum_t log w_t, the response's ratio   unbiased, of high variance; clamped before exp
    auto       geometric with gspo, else token
    """
    level = config.importance_weight_level
    if level == "auto":
        level = "geometric" if config.name == "gspo" else "token"
    if level == "token":
        return log_weight
    mean = mean_per_step(log_weight[None], data, group)[0]
    return mean * data.step_lengths.to(mean.dtype)[data.step_index] if level == "product" else mean


def bounded_weight(log_weight: Tensor, config: OffPolicyLossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """w within [floor, cap], and whether it is above the cap and below the floor, bool. [tokens] each.

    mask      0 outside the bounds (IcePop, arXiv 2510.18855; with the cap alone MIS)
    truncate  the nearer bound outside them (TIS)

    NaN stays NaN: the gradient is refused.
    """
    weight = torch.exp(clamp_log_ratio(log_weight))
    above, below = weight > config.importance_weight_cap, weight < config.importance_weight_floor
    if config.importance_weight_mode == "mask":
        return torch.where(above | below, torch.zeros_like(weight), weight), above, below
    return weight.clamp(config.importance_weight_floor, config.importance_weight_cap), above, below


def rejected_by_kl(
    log_weight: Tensor, data: TokenData, config: OffPolicyLossConfig, group: ProcessGroup | None = None
) -> Tensor:
    """Whether the response's estimate of KL(behave || prox) exceeds kl_rejection_bound, bool [tokens]. Collective.

    Mean over the response's tokens of k1 = - log w or of k3 = w - 1 - log w (Schulman, Approximating KL Divergence,
    2020). Trust Region Masking for Long-Horizon LLM Reinforcement Learning (Li et al., 2026) leaves out such responses
    as a whole: no clip of single tokens bounds the error of a long response.
    """
    estimate = k3(log_weight) if config.kl_rejection_estimator == "k3" else -log_weight
    return mean_per_step(estimate[None], data, group)[0] > config.kl_rejection_bound


def too_old(data: TokenData, max_lag: int, version: int | None) -> Tensor:
    """Whether a token's version is more than `max_lag` older than `version`, or unknown, bool [tokens]."""
    assert version is not None
    return (data.versions == NO_VERSION) | (version - data.versions > max_lag)
