"""On-policy distillation: the advantage of each token by a teacher that has scored it. Pure functions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.trainer.loss.token_data import Objective, TokenData
from megatron_webrl.trainer.metrics.token_metrics import moments


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
        advantage = data.advantage + settings.coefficient * teacher_advantage(teacher, old, settings.clip)
        value, sums = base(current, replace(data, advantage=advantage))
        counted, missing = data.weight > 0, torch.isnan(teacher)
        return value, sums | {
            "teacher_missing": (counted & missing).to(current.dtype).sum(),
            "teacher_clipped": (counted & ((teacher - old).abs() > settings.clip)).to(current.dtype).sum(),
            **moments("teacher_kl", data.behaviour_logprobs - teacher, counted & ~missing),
        }

    return distilled


def teacher_advantage(teacher: Tensor, old: Tensor, clip: float) -> Tensor:
    """clamp(log teacher - log old, -clip, clip), [tokens]; 0 where `teacher` is NaN: it has not scored the token.

    `old`: the policy that the surrogate compares theta with, prox if decoupled, else behave. NaN in it stays NaN.
    """
    advantage = (teacher - old).clamp(-clip, clip)
    return torch.where(torch.isnan(teacher), torch.zeros_like(advantage), advantage)
