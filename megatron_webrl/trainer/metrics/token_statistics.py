"""Statistics of the response tokens of one micro-batch that do not depend on the loss. Pure functions."""

from __future__ import annotations

from torch import Tensor

from megatron_webrl.trainer.loss.token_data import TokenData, k3
from megatron_webrl.trainer.metrics.moments import moments


def token_statistics(current: Tensor, entropy: Tensor, data: TokenData, succeeded: Tensor) -> dict[str, Tensor]:
    """Sums and extremes over the tokens of weight above 0; see moments.py for the names with a slash.

    `current`, `entropy`: float32 [tokens] of the current policy; `succeeded`: bool [tokens], of successful episodes.

    behaviour_kl_k1, behaviour_kl_k3   estimates of KL(behave || theta) from its sample: - log r and r - 1 - log r,
                                       r = pi_theta / pi_behave
    """
    current, counted = current.detach(), data.weight > 0
    mask = counted.to(current.dtype)
    log_ratio = current - data.behaviour_logprobs
    success = mask * succeeded
    entropy = entropy.detach()
    return {
        "response_tokens": mask.sum(),
        "success_tokens": success.sum(),
        "entropy": (entropy * mask).sum(),
        "success_entropy": (entropy * success).sum(),
        "behaviour_kl_k1": -(log_ratio * mask).sum(),
        "behaviour_kl_k3": (k3(log_ratio) * mask).sum(),
        **moments("behaviour_logprob", data.behaviour_logprobs, counted),
        **moments("current_logprob", current, counted),
        **moments("advantage", data.advantage, counted),
    }
