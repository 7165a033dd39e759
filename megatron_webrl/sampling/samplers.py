"""How often each environment is drawn, and which one a ticket draws. Pure functions, the same on every machine."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import SamplerConfig

ADAPTIVE_SAMPLERS = ("curriculum", "near_target")
"""Samplers whose probabilities follow the policy's success; those of the others never change."""

_RANGE = 2**64
_GOLDEN = 0x9E3779B97F4A7C15  # _RANGE over the golden ratio


def draw_environment(probabilities: Sequence[float], seed: int, ticket: int) -> int:
    """Index of the environment that a ticket draws.

    probabilities: [environments], at least 0, not all 0; only their ratio matters. Tickets go around a circle on which
    each environment has an arc of its probability, from a start by `seed`, in steps of the golden ratio (a Weyl
    sequence): among consecutive tickets an environment is drawn as often as its probability says, give or take three
    among a thousand, and five among 300,000. Independent draws would stray by the square root of that number.
    """
    start = int.from_bytes(hashlib.blake2b(f"sampler/{seed}".encode(), digest_size=8).digest(), "big")
    ends = list(accumulate(probabilities))
    return bisect_right([int(end / ends[-1] * _RANGE) for end in ends], (start + ticket * _GOLDEN) % _RANGE)


def initial_probabilities(
    sampler: SamplerConfig, environments: Sequence[str], difficulties: Sequence[str]
) -> tuple[float, ...]:
    """Probabilities that need no knowledge of the policy; of adaptive samplers, those at the very beginning.

    difficulties: [environments]. Raises ConfigError for weights that leave nothing to draw.
    """
    if sampler.name == "ratio" and sampler.difficulty_weights:
        return _by_difficulty(sampler.difficulty_weights, difficulties)
    weights = sampler.weights if sampler.name == "ratio" else {}
    return _shares([weights.get(name, 1.0) for name in environments])


def initial_pass_rate(sampler: SamplerConfig) -> float:
    """The pass rate that an environment is taken to have before its first group: the most wanted one."""
    return sampler.target if sampler.name == "near_target" else 0.5


def updated_pass_rate(sampler: SamplerConfig, estimate: float, observed: float) -> float:
    """The estimate of a pass rate after a group that passed at the rate `seen`: an exponential moving average."""
    return estimate + sampler.alpha * (observed - estimate)


def adaptive_probabilities(sampler: SamplerConfig, pass_rates: Sequence[float]) -> tuple[float, ...]:
    """Probabilities of an adaptive sampler by estimates of the pass rates: [environments], each within 0..1.

    (1 - epsilon) * w_i / sum(w) + epsilon / n, so that no environment is ever forgotten. The weights w: see
    `learnable` and `nearest`.
    """
    shares = (
        nearest_target_shares(pass_rates, sampler.target, sampler.candidates)
        if sampler.name == "near_target"
        else reward_variance_shares(pass_rates)
    )
    return tuple((1 - sampler.epsilon) * share + sampler.epsilon / len(pass_rates) for share in shares)


def reward_variance_shares(pass_rates: Sequence[float]) -> tuple[float, ...]:
    """Shares by p (1 - p), the variance of an episode's reward: most where success and failure are equally likely.

    It is what the gradient of a group has to work with, whatever the group's size; nothing can be learnt from an
    environment where all episodes end alike. (As in ProCuRL, arXiv 2304.12877.)
    """
    return _shares([rate * (1 - rate) for rate in pass_rates])


def nearest_target_shares(pass_rates: Sequence[float], target: float, candidates: int) -> tuple[float, ...]:
    """Probabilities that, of `candidates` environments drawn uniformly, each is the nearest to the target rate.

    With n environments, k candidates and a of them farther away than one, b at its own distance (itself included):
    ((a + b)^k - a^k) / n^k, shared by those b.
    """
    distances = [round(abs(rate - target), 9) for rate in pass_rates]  # equal ones share, whatever their last bits
    counts, n = Counter(distances), len(pass_rates)
    shares = {}
    for distance, alike in counts.items():
        farther = sum(count for other, count in counts.items() if other > distance)
        shares[distance] = (((farther + alike) / n) ** candidates - (farther / n) ** candidates) / alike
    return tuple(shares[distance] for distance in distances)


def _shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights as parts of 1; equal parts if all are 0."""
    total = sum(weights)
    return tuple(weight / total if total > 0 else 1 / len(weights) for weight in weights)


def _by_difficulty(weights: dict[str, float], difficulties: Sequence[str]) -> tuple[float, ...]:
    """Each difficulty has its share of the tickets, and its environments equal parts of it."""
    counts = Counter(difficulties)
    for name in weights:
        if name not in counts:
            raise ConfigError(f"tasks.sampler.difficulty_weights.{name}: none of tasks.environments is {name}")
    parts = [weights.get(difficulty, 1.0) / counts[difficulty] for difficulty in difficulties]
    if not any(parts):
        raise ConfigError(
            f"tasks.sampler.difficulty_weights={weights} is 0 for every one of tasks.environments; raise one"
        )
    return _shares(parts)
