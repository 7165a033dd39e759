"""Probabilities of samplers, and the frequency with which tickets draw."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

import numpy as np
import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import SamplerConfig
from megatron_webrl.tasks.sampler import samplers
from megatron_webrl.tasks.sampler.knowledge import LATEST_GROUP_WEIGHT
from megatron_webrl.tasks.sampler.samplers import (
    adaptive_probabilities,
    draw_environment,
    initial_pass_rate,
    initial_probabilities,
    nearest_target_shares,
    reward_variance_shares,
)

CHI_SQUARE_99 = {1: 6.63, 2: 9.21, 4: 13.28, 5: 15.09}  # by degrees of freedom

MIXTURES = [(0.5, 0.5), (0.5, 0.3, 0.2), (1 / 6,) * 6, (0.9, 0.02, 0.02, 0.02, 0.04)]


def chi_square(counts: Counter[int], probabilities: tuple[float, ...]) -> float:
    total = sum(counts.values())
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in enumerate(probabilities))


def test_a_ticket_draws_the_same_environment_on_every_machine() -> None:
    # A resumed run relies on these values.
    draws = [draw_environment((0.2, 0.3, 0.5), 0, ticket) for ticket in range(12)]
    assert draws == [1, 0, 2, 1, 2, 2, 0, 2, 1, 0, 2, 1]
    assert [draw_environment((0.2, 0.3, 0.5), 1, 2**40 + ticket) for ticket in range(6)] == [2, 1, 0, 2, 1, 2]
    assert draw_environment((2.0, 3.0, 5.0), 0, 77) == draw_environment((0.2, 0.3, 0.5), 0, 77)


@pytest.mark.parametrize("probabilities", MIXTURES, ids=str)
def test_a_ticket_draws_each_environment_with_its_probability_over_seeds(probabilities: tuple[float, ...]) -> None:
    for ticket in (0, 12345, 2**40):
        counts = Counter(draw_environment(probabilities, seed, ticket) for seed in range(3000))
        assert chi_square(counts, probabilities) < CHI_SQUARE_99[len(probabilities) - 1]


@pytest.mark.parametrize("probabilities", MIXTURES, ids=str)
def test_consecutive_tickets_draw_each_environment_as_often_as_the_sampler_says(
    probabilities: tuple[float, ...],
) -> None:
    for seed, first in itertools.product(range(2), (0, 999, 2**40)):
        counts: Counter[int] = Counter()
        for number in range(1000):
            counts[draw_environment(probabilities, seed, first + number)] += 1
            for index, probability in enumerate(probabilities):
                assert abs(counts[index] - (number + 1) * probability) < 3.5, (seed, first, number)
        assert chi_square(counts, probabilities) < CHI_SQUARE_99[len(probabilities) - 1]


def test_another_seed_draws_other_environments() -> None:
    one, other = ([draw_environment((0.5, 0.5), seed, ticket) for ticket in range(64)] for seed in (0, 1))
    assert one != other


def test_an_environment_without_weight_is_never_drawn() -> None:
    for weights in ((0.0, 1.0, 0.0, 2.0, 0.0), (1e-300, 0.0, 1.0), (0.1, 0.2, 0.0)):
        drawn = {draw_environment(weights, seed, ticket) for seed in range(20) for ticket in range(200)}
        assert drawn <= {index for index, weight in enumerate(weights) if weight}


def test_draws_follow_the_probabilities_of_changing_states() -> None:
    """An adaptive sampler with 24 tickets in flight, over 3000 tickets and six environments."""
    settings, chance = SamplerConfig("curriculum"), random.Random(5)
    skill, rates = [0.05, 0.3, 0.5, 0.7, 0.95, 0.99], [0.5] * 6
    counts, expected = np.zeros(6), np.zeros(6)
    ahead: deque[tuple[float, ...]] = deque([adaptive_probabilities(settings, rates)] * 24)
    in_flight: deque[int] = deque()
    for ticket in range(3000):
        probabilities = ahead.popleft()
        environment = draw_environment(probabilities, 3, ticket)
        counts[environment] += 1
        expected += probabilities
        in_flight.append(environment)
        if len(in_flight) > 24:
            done = in_flight.popleft()
            seen = sum(chance.random() < skill[done] for _ in range(8)) / 8
            rates[done] += LATEST_GROUP_WEIGHT * (seen - rates[done])
        ahead.append(adaptive_probabilities(settings, rates))
    assert np.abs(counts - expected).max() < 25  # independent draws stray by this much already as often as not
    assert counts[2] > 2 * counts[5]


def test_ratios_weigh_environments_and_those_left_out_count_one() -> None:
    names, easy = ["a", "b", "c"], ["easy"] * 3
    assert initial_probabilities(SamplerConfig(), names, easy) == (1 / 3, 1 / 3, 1 / 3)
    assert initial_probabilities(SamplerConfig("ratio", weights={"a": 2, "c": 0}), names, easy) == (2 / 3, 1 / 3, 0.0)
    assert initial_probabilities(SamplerConfig("curriculum"), names, easy) == (1 / 3, 1 / 3, 1 / 3)


def test_difficulties_share_the_tickets_out_and_their_environments_share_equally() -> None:
    names, difficulties = ["a", "b", "c", "d"], ["easy", "hard", "easy", "medium"]
    ratio = SamplerConfig("ratio", weights={"easy": 2, "medium": 5, "hard": 3})
    assert initial_probabilities(ratio, names, difficulties) == pytest.approx((0.1, 0.3, 0.1, 0.5))
    assert initial_probabilities(SamplerConfig("ratio", weights={"hard": 0}), names, difficulties) == (
        0.25,
        0,
        0.25,
        0.5,
    )
    with pytest.raises(ConfigError, match=r"weights.hard: none of tasks.environments is hard"):
        initial_probabilities(ratio, ["a", "d"], ["easy", "medium"])
    with pytest.raises(ConfigError, match=r"weights=\{'easy': 0\} is 0 for every one"):
        initial_probabilities(SamplerConfig("ratio", weights={"easy": 0}), ["a"], ["easy"])


def test_a_curriculum_prefers_what_is_neither_hopeless_nor_mastered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reward_variance_shares([0.5, 0.1, 0.9, 1.0]) == pytest.approx((0.25 / 0.43, 0.09 / 0.43, 0.09 / 0.43, 0.0))
    assert reward_variance_shares([0.0, 1.0]) == (0.5, 0.5)
    monkeypatch.setattr(samplers, "UNIFORM_FRACTION", 0.2)
    probabilities = adaptive_probabilities(SamplerConfig("curriculum"), [0.5, 0.0, 1.0, 0.5])
    assert probabilities == pytest.approx((0.45, 0.05, 0.05, 0.45))


@pytest.mark.parametrize("candidates", [1, 2, 4])
def test_the_nearest_candidate_is_as_likely_as_counting_says(candidates: int) -> None:
    target, distances = 0.45, [0, 3, 3, 1, 1, 1]
    rates = [target + distance / 8 * (1 if index % 2 else -1) for index, distance in enumerate(distances)]
    counts = np.zeros(len(rates))
    for drawn in itertools.product(range(len(rates)), repeat=candidates):
        least = min(distances[index] for index in drawn)
        alike = [index for index, distance in enumerate(distances) if distance == least]
        counts[alike] += 1 / len(alike)
    assert nearest_target_shares(rates, target, candidates) == pytest.approx(counts / len(rates) ** candidates)


def test_near_target_prefers_the_target_and_leaves_the_rest_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "NEAR_TARGET_CANDIDATES", 3)
    probabilities = adaptive_probabilities(SamplerConfig("near_target", target=0.3), [0.9, 0.35, 0.0])
    assert probabilities == pytest.approx((0.9 / 27 + 0.1 / 3, 0.9 * 19 / 27 + 0.1 / 3, 0.9 * 7 / 27 + 0.1 / 3))
    assert sum(probabilities) == pytest.approx(1)


def test_estimates_begin_at_the_preferred_pass_rate_and_move_by_a_constant_weight() -> None:
    assert initial_pass_rate(SamplerConfig("curriculum")) == 0.5
    assert initial_pass_rate(SamplerConfig("near_target", target=0.3)) == 0.3
