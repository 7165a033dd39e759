"""The losses in NumPy and plain Python, token by token or response by response as their papers write them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from megatron_webrl.trainer.loss.token_data import TokenData

VERSION = 6
LARGEST = -0.01  # log-probability in the examples
COEFFICIENT, TEACHER_CLIP = 0.7, 1.0  # of the teacher, in nats
Arrays = dict[str, np.ndarray]


def example(seed: int, lengths: tuple[int, ...] = (9, 1, 14, 6, 3, 20)) -> Arrays:
    """Responses of `lengths` tokens; advantage and weight are a response's, one in five weighs nothing.

    The teacher is up to some nats from the policy; a fifth of the tokens has none.
    """
    rng = np.random.default_rng(seed)
    step, tokens = np.repeat(np.arange(len(lengths)), lengths), sum(lengths)
    proximal = -1 - rng.random(tokens) * 3
    weight = rng.random(len(lengths)) * (rng.random(len(lengths)) > 0.2)
    behaviour = proximal + rng.normal(0, 0.6, tokens) + rng.normal(0, 0.6, len(lengths))[step]
    reference = proximal + rng.normal(0, 0.5, tokens)
    current = proximal + rng.normal(0, 0.5, tokens) + rng.normal(0, 0.5, len(lengths))[step]
    return {
        "proximal_logprobs": proximal,
        "behaviour_logprobs": np.minimum(behaviour, LARGEST),
        "reference_logprobs": reference,
        "current": np.minimum(current, LARGEST),
        "advantage": rng.normal(0, 1, len(lengths))[step],
        "weight": weight[step],
        "step_index": step,
        "step_lengths": np.array(lengths, float),
        "versions": rng.integers(-1, VERSION + 1, tokens),  # -1: unknown
        "entropy": rng.random(tokens) * 2,
        "teacher_logprobs": np.where(
            rng.random(tokens) < 0.2, math.nan, np.minimum(proximal + rng.normal(0, 1.0, tokens), LARGEST)
        ),
    }


def tensors(data: Arrays) -> TokenData:
    return TokenData(**{name: torch.from_numpy(array) for name, array in data.items() if name != "current"})


def taught(data: Arrays, config: Any) -> Arrays:
    """The data with A + coefficient * clip(log teacher - log old), token by token."""
    old = data["proximal_logprobs"] if config.decoupled else data["behaviour_logprobs"]
    found = []
    for advantage, teacher, before in zip(data["advantage"], data["teacher_logprobs"], old, strict=True):
        extra = 0.0 if math.isnan(teacher) else min(max(teacher - before, -TEACHER_CLIP), TEACHER_CLIP)
        found.append(advantage + COEFFICIENT * extra)
    return data | {"advantage": np.array(found)}


def clipped(advantage: float, ratio: float, config: Any) -> float:
    bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    value = min(ratio * advantage, bounded * advantage)
    return max(value, config.dual_clip * advantage) if advantage < 0 and config.dual_clip else value


def divergence(p: float, q: float, kind: str) -> float:
    """Of two outcomes, from q to p."""
    if kind == "total_variation":
        return (abs(p - q) + abs((1 - p) - (1 - q))) / 2
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def surrogate(advantage: float, current: float, old: float, frozen: float, config: Any) -> float:
    """f of one token; `frozen` is the value of `current` behind a stopped gradient."""
    ratio = math.exp(current - old)
    if config.name == "cispo":
        bounded = min(max(math.exp(frozen - old), 1 - config.clip_low), 1 + config.clip_high)
        return bounded * advantage * current
    if config.name == "sapo":
        temperature = 1.0 if advantage > 0 else 1.05
        return 4 / temperature / (1 + math.exp(-temperature * (ratio - 1))) * advantage
    if config.name == "dppo":
        p, q = math.exp(frozen), math.exp(old)
        leaves = (advantage > 0 and p > q) or (advantage < 0 and p < q)
        return 0.0 if leaves and divergence(p, q, config.dppo_divergence) > config.dppo_bound else ratio * advantage
    if config.name == "raft_plus_plus":
        return min(ratio, 1 + config.clip_high) * advantage if advantage > 0 else 0.0
    return clipped(advantage, ratio, config)


def bounded(ratio: float, config: Any) -> float:
    low, high = config.importance_weight_floor, config.importance_weight_cap
    if low <= ratio <= high:
        return ratio
    return 0.0 if config.importance_weight_mode == "mask" else min(max(ratio, low), high)


def beyond(response: list[int], token: int, data: Arrays, config: Any) -> tuple[float, dict[str, bool]]:
    """The importance weight at its level before any bound, and which bounds the token is beyond."""
    offs = {t: math.exp(data["proximal_logprobs"][t] - data["behaviour_logprobs"][t]) for t in response}
    level = {"auto": "geometric" if config.name == "gspo" else "token"}.get(
        config.importance_weight_level, config.importance_weight_level
    )
    product = math.prod(offs.values())
    weight = {"token": offs[token], "geometric": product ** (1 / len(response)), "product": product}[level]
    if not config.decoupled:
        weight = 1.0
    estimates = {"k1": [-math.log(w) for w in offs.values()], "k3": [w - 1 - math.log(w) for w in offs.values()]}
    mean = sum(estimates[config.kl_rejection_estimator]) / len(response)
    lag = VERSION - data["versions"][token]
    return weight, {
        "importance_weight_capped": weight > config.importance_weight_cap,
        "importance_weight_floored": weight < config.importance_weight_floor,
        "kl_rejected": bool(config.kl_rejection_bound) and config.decoupled and mean > config.kl_rejection_bound,
        "lag_masked": bool(config.max_token_lag) and (lag > config.max_token_lag or data["versions"][token] == -1),
    }


def used_weight(response: list[int], token: int, data: Arrays, config: Any) -> float:
    """The importance weight that the loss multiplies with; 0 for a masked token."""
    weight, reasons = beyond(response, token, data, config)
    return 0.0 if reasons["kl_rejected"] or reasons["lag_masked"] else bounded(weight, config)


def responses(data: Arrays) -> list[list[int]]:
    return [list(np.flatnonzero(data["step_index"] == step)) for step in range(len(data["step_lengths"]))]


def by_hand(current: np.ndarray, data: Arrays, config: Any, frozen: np.ndarray | None = None) -> float:
    """The loss; `frozen`: `current` behind a stopped gradient.

    gspo's is that of responses, with one ratio (eq. 7); where its tokens have different weights or advantages, that of
    tokens with a ratio each (GSPO-token, eq. 14).
    """
    differs = config.importance_weight_level == "token" or config.max_token_lag > 0
    differs |= any(len(set(data["advantage"][response])) > 1 for response in responses(data))
    old = data["proximal_logprobs"] if config.decoupled else data["behaviour_logprobs"]
    frozen = current if frozen is None else frozen
    total = 0.0
    for response in responses(data):
        for t in response:
            off, advantage = used_weight(response, t, data, config), data["advantage"][t]
            if config.name == "gspo":
                base = frozen if differs else current
                ratio = math.prod(math.exp(base[i] - old[i]) for i in response) ** (1 / len(response))
                ratio *= math.exp(current[t] - base[t])
                value = clipped(advantage, ratio, config)
            else:
                value = surrogate(advantage, current[t], old[t], frozen[t], config)
            back = math.exp(data["reference_logprobs"][t]) / math.exp(current[t])
            total -= data["weight"][t] * off * value
            divergence = back - 1 - math.log(back) if back <= 10 else 9 - math.log(10) + 9 * math.log(back / 10)
            total += config.kl_coefficient * data["weight"][t] * divergence
            total -= config.entropy_coefficient * data["weight"][t] * data["entropy"][t]
    return total
