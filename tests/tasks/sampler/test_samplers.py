"""Draws of environments and rows: probabilities, frequencies, what the sampler has learned, blocked websites."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import GrowingStepsConfig, SamplerConfig, TasksConfig, tasks_config
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.sampler import samplers
from megatron_webrl.tasks.sampler.knowledge import (
    PassRate,
    SamplerKnowledge,
    draws_environments,
    task_key,
    task_unit,
    unit_kind,
    unit_of,
)
from megatron_webrl.tasks.sampler.row_sampler import RowSampler
from megatron_webrl.tasks.sampler.samplers import (
    adaptive_probabilities,
    draw_environment,
    initial_pass_rate,
    initial_probabilities,
    nearest_target_shares,
    reward_variance_shares,
)
from megatron_webrl.tasks.sampler.step_limits import growing_limit, training_limit
from megatron_webrl.types import DIFFICULTIES, Task

CHI_SQUARE_99 = {1: 6.63, 2: 9.21, 4: 13.28, 5: 15.09}  # by degrees of freedom

GROWING = GrowingStepsConfig(interval=10, initial=6, max=26, cap_step=40)
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
def test_environments_are_drawn_with_their_probability_over_seeds_and_tickets(probabilities: tuple[float, ...]) -> None:
    limit = CHI_SQUARE_99[len(probabilities) - 1]
    for first in (0, 999, 2**40):
        over_seeds = Counter(draw_environment(probabilities, seed, first) for seed in range(3000))
        assert chi_square(over_seeds, probabilities) < limit
        counts: Counter[int] = Counter()
        for number in range(1000):
            counts[draw_environment(probabilities, 1, first + number)] += 1
            for index, probability in enumerate(probabilities):
                assert abs(counts[index] - (number + 1) * probability) < 3.5, (first, number)
        assert chi_square(counts, probabilities) < limit


def test_an_environment_without_weight_is_never_drawn() -> None:
    for weights in ((0.0, 1.0, 0.0, 2.0, 0.0), (1e-300, 0.0, 1.0), (0.1, 0.2, 0.0)):
        drawn = {draw_environment(weights, seed, ticket) for seed in range(20) for ticket in range(200)}
        assert drawn <= {index for index, weight in enumerate(weights) if weight}


def test_weights_are_of_environments_or_of_difficulties_whose_environments_share_equally() -> None:
    names, difficulties = ["a", "b", "c", "d"], ["easy", "hard", "easy", "medium"]
    for sampler, expected in (
        (SamplerConfig(), (0.25,) * 4),
        (SamplerConfig("curriculum"), (0.25,) * 4),
        (SamplerConfig("ratio", weights={"a": 2, "c": 0}), (0.5, 0.25, 0, 0.25)),
        (SamplerConfig("ratio", weights={"easy": 2, "medium": 5, "hard": 3}), (0.1, 0.3, 0.1, 0.5)),
        (SamplerConfig("ratio", weights={"hard": 0}), (0.25, 0, 0.25, 0.5)),
    ):
        assert initial_probabilities(sampler, names, difficulties) == pytest.approx(expected)
    for weights, message in (({"hard": 3}, "weights.hard: none of"), ({"easy": 0}, r"weights=\{'easy': 0\} is 0")):
        with pytest.raises(ConfigError, match=message):
            initial_probabilities(SamplerConfig("ratio", weights=weights), ["a"], ["easy"])


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
    assert [initial_pass_rate(SamplerConfig(name, target=0.3)) for name in ("curriculum", "near_target")] == [0.5, 0.3]


def test_environments_outside_of_the_margin_have_a_tenth_of_their_draws() -> None:
    names, easy = ["a", "b", "c", "d"], ["easy"] * 4
    knowledge = SamplerKnowledge(passes={"a": PassRate(0.05, 3), "b": PassRate(0.95, 3), "c": PassRate(0.9, 3)})
    for settings, expected in (
        (SamplerConfig(pass_rate_margin=0.1), (0.025, 0.025, 0.475, 0.475)),
        (SamplerConfig("ratio", weights={"a": 2, "d": 4}, pass_rate_margin=0.1), (0.025, 0.0125, 0.1925, 0.77)),
        (SamplerConfig(pass_rate_margin=0.04), (0.25,) * 4),
    ):
        assert samplers.environment_probabilities(settings, names, easy, knowledge) == pytest.approx(expected)
        assert samplers.environment_probabilities(settings, names, easy, SamplerKnowledge()) == pytest.approx(
            initial_probabilities(settings, names, easy)
        )
    settings = SamplerConfig("curriculum", pass_rate_margin=0.1)
    plain = adaptive_probabilities(settings, [0.05, 0.95, 0.9, 0.5])
    found = samplers.environment_probabilities(settings, names, easy, knowledge)
    assert found[:2] == pytest.approx([0.1 * each for each in plain[:2]])
    knowledge = SamplerKnowledge(passes=dict.fromkeys(names, PassRate(0.0, 3)))  # none is left: all are drawn
    assert (
        samplers.environment_probabilities(SamplerConfig(pass_rate_margin=0.1), names, easy, knowledge) == (0.25,) * 4
    )


def test_a_pass_rate_is_a_moving_average_that_survives_json_and_is_trusted_after_enough_groups() -> None:
    knowledge = SamplerKnowledge(3, blocked={"a.example": 5e9})
    for observed in (1.0, 0.0):
        knowledge.learn("a", observed, 0.5)
    assert knowledge.passes == {"a": (pytest.approx(0.65 * 0.7), 2)}
    assert SamplerKnowledge.from_state_dict(json.loads(json.dumps(knowledge.state_dict())), 3) == knowledge
    assert SamplerKnowledge.from_state_dict({}, 0) == SamplerKnowledge()
    knowledge = SamplerKnowledge(passes={"a": PassRate(0.9, 1), "b": PassRate(0.1, 2)})
    assert knowledge.pass_rates(["a", "b", "c"], 0.5, 2) == [0.5, 0.1, 0.5]
    assert knowledge.pass_rates(["a", "b"], 0.5) == [0.9, 0.1]


def test_a_unit_is_named_after_what_the_sampler_draws() -> None:
    task = Task("shop/1", "web", "Shopping", 0, 10, difficulty="hard", website="shop.example")
    named = [unit_of(task, kind) for kind in ("environment", "task", "website", "difficulty")]
    assert named == ["Shopping", "bb4e6eb49d732433", "shop.example", "hard"]  # a resumed run relies on the key
    assert (task_unit(task_key("shop/1")), task_unit(10)) == (named[1], "000000000000000a")
    for source, kind in {
        "miniwob": "environment",
        "sites": "environment",
        "webgym": "website",
        "a:B": "website",
    }.items():
        tasks = tasks_config(source=source)
        tasks.sampler.per = "website"
        assert (unit_kind(tasks), draws_environments(tasks)) == (kind, kind == "environment"), source


def test_a_limit_grows_in_equal_parts_until_the_last_version() -> None:
    limits = [growing_limit(GROWING, version) for version in range(60)]
    assert limits == [6] * 10 + [11] * 10 + [16] * 10 + [21] * 10 + [26] * 20
    assert growing_limit(GrowingStepsConfig(interval=30, initial=5, max=10, cap_step=100), 60) == 8  # 3 increases
    assert (growing_limit(GROWING, None), growing_limit(GrowingStepsConfig(), 1000)) == (26, None)
    for by_difficulty, settings, version, limit in (
        ({}, GrowingStepsConfig(), 0, 12), ({"easy": 20}, GrowingStepsConfig(), 0, 20), ({}, GROWING, 0, 6),
        ({}, GROWING, None, 26), ({"easy": 9}, GROWING, 0, 6), ({"easy": 9}, GROWING, None, 9),
        ({"hard": 9}, GROWING, 15, 11),
    ):  # fmt: skip
        tasks = TasksConfig(max_steps=12, max_steps_by_difficulty=by_difficulty, growing_steps=settings)
        assert training_limit(tasks, "easy", version) == limit, (by_difficulty, version)


def test_tickets_of_a_source_follow_its_limits_its_weights_and_what_is_known() -> None:
    names = ["forms-vote", "forms-apply", "forms-renew", "wiki-watch"]
    settings: dict[str, Any] = {"source": "sites", "environments": names, "growing_steps": GROWING}
    source = make_source(tasks_config(**settings, max_steps_by_difficulty={"hard": 9}))
    plain = [source.training_task(0, ticket) for ticket in range(20)]  # such as of demonstrations
    last = {task.difficulty: task.max_steps for task in [*plain, *map(source.held_out_task, range(4))]}
    assert last == {"easy": 26, "medium": 26, "hard": 9}
    for version, limit in ((0, 6), (9, 6), (10, 11), (40, 26), (1000, 26)):
        drawn = [source.training_task(0, ticket, SamplerKnowledge(version)) for ticket in range(20)]
        assert [task.id for task in drawn] == [task.id for task in plain]  # the limit changes nothing else
        assert [task.max_steps for task in drawn] == [min(limit, last[task.difficulty]) for task in plain]

    weights = SamplerConfig("ratio", weights={"easy": 0.5, "medium": 0.3, "hard": 0.2})
    source = make_source(tasks_config(**settings, sampler=weights, evaluation_max_steps_by_difficulty={"hard": 70}))
    counts = Counter(source.training_task(0, ticket).environment for ticket in range(100))
    assert counts == {name: pytest.approx(count, abs=3) for name, count in zip(names, (25, 30, 20, 25), strict=True)}
    assert [source.held_out_task(index).max_steps for index in range(8)] == [26, 26, 70, 26] * 2

    source = make_source(tasks_config(**settings, sampler=SamplerConfig("curriculum")))
    knowledge = SamplerKnowledge(passes={name: PassRate(1.0, 5) for name in (*names[:2], names[3])})
    training = [source.training_task(0, ticket) for ticket in range(100)]
    learned = [source.training_task(0, ticket, knowledge) for ticket in range(100)]
    counts = Counter(task.environment for task in learned)
    assert counts["forms-renew"] == pytest.approx(92.5, abs=3)  # a tenth is shared by all
    assert [task.seed for task in learned] == [task.seed for task in training]


ROWS, SITES = 600, 24
LEVELS = np.repeat(np.array([0, 1, 2], np.uint8), [360, 180, 60])
SITE_OF_ROW = (np.random.default_rng(0).random(ROWS) ** 1.5 * SITES).astype(np.int32)  # 15 to 60 rows each
NAMES = [f"www{site}.example" for site in range(SITES)]
KEYS = np.arange(ROWS, dtype=np.uint64) * np.uint64(2**50) + np.uint64(7)
UNIT_NAMES: dict[str, Callable[[int], str]] = {
    "task": lambda row: task_unit(int(KEYS[row])),
    "website": lambda row: NAMES[SITE_OF_ROW[row]],
    "difficulty": lambda row: DIFFICULTIES[LEVELS[row]],
}
EVERY = [
    *(SamplerConfig(name, per=per) for name in ("uniform", "curriculum", "near_target") for per in UNIT_NAMES),
    SamplerConfig("ratio", weights={"easy": 2, "medium": 5, "hard": 3}),
]
BY_NAME = pytest.mark.parametrize("settings", EVERY, ids=lambda each: f"{each.name}-{each.per}")


def sampler(settings: SamplerConfig) -> RowSampler:
    return RowSampler(settings, LEVELS, SITE_OF_ROW, NAMES, KEYS)


def known(rates: dict[str, float], blocked: Sequence[str] = (), groups: int = 2) -> SamplerKnowledge:
    passes = {unit: PassRate(rate, groups) for unit, rate in rates.items()}
    return SamplerKnowledge(0, passes, dict.fromkeys(blocked, 1e9))


def draws(settings: SamplerConfig, tickets: range, knowledge: SamplerKnowledge | None = None, seed: int = 3) -> list:
    made = sampler(settings)
    return [made.draw(seed, ticket, knowledge) for ticket in tickets]


@BY_NAME
def test_a_ticket_draws_the_same_row_on_every_machine(settings: SamplerConfig) -> None:
    knowledge = known({UNIT_NAMES[settings.per](row): row / ROWS for row in range(0, ROWS, 7)}, NAMES[:3])
    one = draws(settings, range(60), knowledge)
    assert one == draws(settings, range(59, -1, -1), knowledge)[::-1]  # whatever was drawn before
    assert one != draws(settings, range(60), knowledge, seed=4)
    assert len(set(one)) > 25


def test_a_pass_has_every_row_once() -> None:
    for name in ("uniform", "curriculum"):  # a resumed run relies on these draws
        assert draws(SamplerConfig(name), range(6), seed=0) == [360, 270, 119, 344, 349, 36]
    rows = draws(SamplerConfig(), range(3 * ROWS))
    passes = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    assert all(sorted(each) == list(range(ROWS)) for each in passes)
    assert passes[0] != passes[1] != passes[2]


def test_websites_and_difficulties_are_drawn_equally_and_so_are_the_rows_of_each() -> None:
    rows = draws(SamplerConfig(per="website"), range(40 * SITES))
    for start in range(0, len(rows), SITES):
        assert sorted(SITE_OF_ROW[rows[start : start + SITES]]) == list(range(SITES))
    for site in range(SITES):
        counts = Counter(row for row in rows if SITE_OF_ROW[row] == site)
        assert len(counts) == min(40, np.bincount(SITE_OF_ROW)[site])
        assert max(counts.values()) - min(counts.values()) <= 1
    rows = draws(SamplerConfig(per="difficulty"), range(180))
    assert Counter(LEVELS[rows].tolist()) == {0: 60, 1: 60, 2: 60}
    assert len(set(rows)) == 180


@BY_NAME
def test_rows_outside_of_the_margin_have_a_tenth_of_the_draws(settings: SamplerConfig) -> None:
    margin, unit = replace(settings, pass_rate_margin=0.2), UNIT_NAMES[settings.per]
    failing = {unit(row) for row in range(0, ROWS, 5)} if settings.per == "task" else {*map(unit, range(0, ROWS, 97))}
    failing = failing - {"easy"}
    knowledge = known(dict.fromkeys(sorted(failing), 0.0))
    shares = [
        np.mean([unit(row) in failing for row in draws(each, range(1500), knowledge)]) for each in (settings, margin)
    ]
    # Of the tenth of the tickets that ignore the margin as many are failing as without it; of the others none.
    assert shares[1] == pytest.approx(0.1 * shares[0], abs=0.02)
    assert shares[0] > (0.01 if settings.name in ("curriculum", "near_target") else 0.1)
    nothing = known({unit(row): 1.0 for row in range(ROWS)}, NAMES[:3])
    assert {NAMES[SITE_OF_ROW[row]] for row in draws(margin, range(50), nothing)}.isdisjoint(NAMES[:3])


def test_difficulties_are_drawn_by_their_weights() -> None:
    rows = draws(SamplerConfig("ratio", weights={"easy": 2, "medium": 5, "hard": 0}), range(700))
    assert Counter(LEVELS[rows].tolist()) == {0: pytest.approx(200, abs=3), 1: pytest.approx(500, abs=3)}
    assert max(Counter(rows).values()) <= 5  # 180 rows, 500 draws: each window of 180 tickets repeats none
    hard = sorted({NAMES[site] for site in SITE_OF_ROW[LEVELS == 2]})
    settings = SamplerConfig("ratio", weights={"easy": 0, "medium": 0})
    for blocked in (hard[1:], NAMES):
        assert set(LEVELS[draws(settings, range(50), known({}, blocked))].tolist()) == {2}


def test_a_curriculum_draws_units_in_proportion_to_the_variance_of_their_rewards() -> None:
    rates = {NAMES[site]: site / (SITES - 1) for site in range(SITES)}
    rows = draws(SamplerConfig("curriculum", per="website"), range(5000), known(rates))
    shares = np.bincount(SITE_OF_ROW[rows], minlength=SITES) / len(rows)
    variance = np.array([rate * (1 - rate) for rate in rates.values()])
    expected = 0.9 * variance / variance.sum() + 0.1 / SITES
    assert np.abs(shares - expected).max() < 4 * (expected.max() / len(rows)) ** 0.5


def test_a_curriculum_goes_through_untried_tasks_before_it_repeats_one() -> None:
    rows = draws(SamplerConfig("curriculum"), range(ROWS))
    assert len(set(rows)) == ROWS
    trusted = draws(SamplerConfig("curriculum"), range(ROWS), known({UNIT_NAMES["task"](5): 0.99}, groups=1))
    assert trusted == rows


def test_a_curriculum_of_mastered_tasks_draws_the_least_mastered_of_many() -> None:
    rates = {UNIT_NAMES["task"](row): 1.0 - 1e-9 * row for row in range(ROWS)}
    rows = np.array(draws(SamplerConfig("curriculum"), range(400), known(rates)))
    assert np.count_nonzero(rows > 0.9 * ROWS) > 0.8 * len(rows)


def test_near_target_draws_units_near_the_target() -> None:
    rates = {UNIT_NAMES["task"](row): (row * 7 % ROWS) / ROWS for row in range(ROWS)}
    settings = SamplerConfig("near_target", target=0.3)
    drawn = np.array([rates[UNIT_NAMES["task"](row)] for row in draws(settings, range(700), known(rates))])
    near = np.abs(drawn - 0.3) < 0.13  # a quarter of the rates, and what candidates miss of it by chance
    assert np.count_nonzero(near) / len(near) == pytest.approx(0.9 + 0.1 * 0.26, abs=0.04)
    assert np.histogram(drawn[near], 4)[0].min() > 100  # all of the quarter, not its middle alone


def test_candidates_of_near_target_represent_difficulties_as_the_file_does() -> None:
    rows = draws(SamplerConfig("near_target"), range(900))  # all at the same distance
    assert np.bincount(LEVELS[rows]) / len(rows) == pytest.approx([0.6, 0.3, 0.1], abs=0.04)
    rates = {"easy": 0.9, "medium": 0.2, "hard": 0.4}
    rows = draws(SamplerConfig("near_target", per="difficulty"), range(400), known(rates))
    easy, _, hard = np.bincount(LEVELS[rows]) / len(rows)
    # A tenth of the candidates are hard; the medium ones are the next nearest and fill up the quarter.
    assert hard > 0.35
    assert easy < 0.06
    rates = {"gone.example": 0.3, **{name: site / (SITES - 1) for site, name in enumerate(NAMES)}}
    rows = draws(SamplerConfig("near_target", per="website", target=0.3), range(500), known(rates))
    distances = np.abs(np.array(list(rates.values())[1:])[SITE_OF_ROW] - 0.3)
    near = distances <= np.sort(distances)[ROWS // 4]
    assert np.count_nonzero(near[rows]) / len(rows) == pytest.approx(0.9 + 0.1 * near.mean(), abs=0.04)


@BY_NAME
def test_a_blocked_website_is_never_drawn_and_other_tickets_keep_their_row(settings: SamplerConfig) -> None:
    free, rows = draws(settings, range(100)), draws(settings, range(100), known({}, NAMES[:6]))
    assert all(SITE_OF_ROW[row] >= 6 for row in rows)
    assert all(one == two for one, two in zip(free, rows, strict=True) if SITE_OF_ROW[one] >= 6)
    rows = draws(settings, range(12), known({}, [name for name in NAMES if name != NAMES[7]]))
    assert {int(site) for site in SITE_OF_ROW[rows]} == {7}
    assert len(set(rows)) > 5
    assert draws(settings, range(8), known({}, NAMES)) == free[:8]  # without any website the draw stands


def test_weights_must_fit_the_file() -> None:
    easy = np.zeros(ROWS, np.uint8)
    for weights, words in (
        ({"hard": 2.0}, "tasks.sampler.weights.hard: no task of the training file is hard"),
        ({"easy": 0.0}, r"weights=\{'easy': 0.0\} is 0 for every task of the training file"),
    ):
        with pytest.raises(ConfigError, match=words):
            RowSampler(SamplerConfig("ratio", weights=weights), easy, SITE_OF_ROW, NAMES, KEYS)


@pytest.mark.parametrize("name", ["uniform", "ratio", "curriculum", "near_target"])
def test_draws_among_300_000_rows_do_not_scan_them(name: str) -> None:
    rows, random = 300_000, np.random.default_rng(0)
    keys = random.integers(0, 2**63, rows, dtype=np.uint64)
    knowledge = known({task_unit(int(key)): 0.9 for key in keys[:20_000]}, [f"site{number}" for number in range(100)])
    sampler = RowSampler(
        SamplerConfig(name, weights={"easy": 2.0} if name == "ratio" else {}),
        np.sort(random.integers(0, 3, rows).astype(np.uint8)),
        random.integers(0, 50_000, rows).astype(np.int32),
        [f"site{number}" for number in range(50_000)],
        keys,
    )
    sampler.draw(0, 0, knowledge)
    started = time.process_time()
    for ticket in range(200):
        sampler.draw(0, ticket, knowledge)
    assert time.process_time() - started < 0.8  # 4 ms each
