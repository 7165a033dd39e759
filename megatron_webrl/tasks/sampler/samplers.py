"""Probability of each environment, and the environment that a ticket draws: pure functions, alike on all machines."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import SamplerConfig
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge

UNIFORM_FRACTION = 0.1  # share of the tickets that curriculum and near_target draw uniformly, and the margin ignores
NEAR_TARGET_CANDIDATES = 4  # `near_target` takes the nearest of this many environments drawn uniformly
_RANGE = 2**64
_GOLDEN = 0x9E3779B97F4A7C15  # _RANGE over the golden ratio


def draw_environment(probabilities: Sequence[float], seed: int, ticket: int) -> int:
    """Index of the environment that a ticket draws. probabilities: [environments], at least 0, not all 0, of any sum.

    Each environment is an arc of a circle, as long as its probability. Tickets advance on it by the golden ratio (a
    Weyl sequence) from a start that depends on `seed`: the draws of an environment differ from their expectation by at
    most three in a thousand tickets and five in 300,000; with independent draws it would be the square root.
    """
    start = int.from_bytes(hashlib.blake2b(f"sampler/{seed}".encode(), digest_size=8).digest(), "big")
    ends = list(accumulate(probabilities))
    return bisect_right([int(end / ends[-1] * _RANGE) for end in ends], (start + ticket * _GOLDEN) % _RANGE)


def initial_probabilities(
    sampler: SamplerConfig, environments: Sequence[str], difficulties: Sequence[str]
) -> tuple[float, ...]:
    """Initial probabilities, [environments] like `difficulties`. Raises ConfigError if all weights are 0."""
    weights = sampler.weights if sampler.name == "ratio" else {}
    if weights and sampler.by_difficulty:
        return _by_difficulty(weights, difficulties)
    return _shares([weights.get(name, 1.0) for name in environments])


def environment_probabilities(
    sampler: SamplerConfig,
    environments: Sequence[str],
    difficulties: Sequence[str],
    knowledge: SamplerKnowledge | None = None,
) -> tuple[float, ...]:
    """The probabilities by which a ticket of that knowledge draws environments, [environments] like `difficulties`.

    Without knowledge all count as untried. With pass_rate_margin an environment outside of it has a share
    UNIFORM_FRACTION of its probability, so that its estimate keeps up with the policy. Raises ConfigError if all
    weights are 0.
    """
    if not sampler.adapts or knowledge is None:
        return initial_probabilities(sampler, environments, difficulties)
    pass_rates = knowledge.pass_rates(environments, initial_pass_rate(sampler))
    if sampler.name in ("curriculum", "near_target"):
        probabilities = adaptive_probabilities(sampler, pass_rates)
    else:
        probabilities = initial_probabilities(sampler, environments, difficulties)
    within = [p if sampler.admits(rate) else 0.0 for p, rate in zip(probabilities, pass_rates, strict=True)]
    if not any(within):
        return probabilities
    kept = _shares(within)
    return tuple((1 - UNIFORM_FRACTION) * a + UNIFORM_FRACTION * b for a, b in zip(kept, probabilities, strict=True))


def initial_pass_rate(sampler: SamplerConfig) -> float:
    """The assumed pass rate of an environment before its first group: the one that the sampler draws most."""
    return sampler.target if sampler.name == "near_target" else 0.5


def adaptive_probabilities(sampler: SamplerConfig, pass_rates: Sequence[float]) -> tuple[float, ...]:
    """Probabilities of an adaptive sampler from estimated pass rates within 0..1, both [environments]:
    (1 - u) * share_i + u / n with u = UNIFORM_FRACTION, so that every environment is drawn sometimes.
    """
    shares = (
        nearest_target_shares(pass_rates, sampler.target, NEAR_TARGET_CANDIDATES)
        if sampler.name == "near_target"
        else reward_variance_shares(pass_rates)
    )
    return tuple((1 - UNIFORM_FRACTION) * share + UNIFORM_FRACTION / len(pass_rates) for share in shares)


def reward_variance_shares(pass_rates: Sequence[float]) -> tuple[float, ...]:
    """Shares in proportion to p (1 - p), the variance of an episode's reward (ProCuRL, arXiv 2304.12877): a group's
    gradient scales with it, whatever the group's size; it is zero where all episodes end alike.
    """
    return _shares([rate * (1 - rate) for rate in pass_rates])


def nearest_target_shares(pass_rates: Sequence[float], target: float, candidates: int) -> tuple[float, ...]:
    """The probability of each environment to be the nearest to the target among `candidates` drawn uniformly: for n
    environments, k candidates, a farther ones and b equally far (itself included), ((a + b)^k - a^k) / n^k / b.
    """
    distances = [round(abs(rate - target), 9) for rate in pass_rates]  # rounded: equal distances share equally
    counts, n = Counter(distances), len(pass_rates)
    shares = {}
    for distance, equal in counts.items():
        farther = sum(count for other, count in counts.items() if other > distance)
        shares[distance] = (((farther + equal) / n) ** candidates - (farther / n) ** candidates) / equal
    return tuple(shares[distance] for distance in distances)


def _shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights normalised to the sum 1; equal shares if all weights are 0."""
    total = sum(weights)
    return tuple(weight / total if total > 0 else 1 / len(weights) for weight in weights)


def _by_difficulty(weights: dict[str, float], difficulties: Sequence[str]) -> tuple[float, ...]:
    """Share the tickets among difficulties by weight, then equally among the environments of each difficulty."""
    counts = Counter(difficulties)
    for name in weights:
        if name not in counts:
            raise ConfigError(f"tasks.sampler.weights.{name}: none of tasks.environments is {name}")
    shares = [weights.get(difficulty, 1.0) / counts[difficulty] for difficulty in difficulties]
    if not any(shares):
        raise ConfigError(f"tasks.sampler.weights={weights} is 0 for every one of tasks.environments; raise one")
    return _shares(shares)
