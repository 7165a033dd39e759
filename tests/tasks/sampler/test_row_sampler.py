"""Draws of rows: how often, how fast, and never of a blocked website."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import SamplerConfig
from megatron_webrl.tasks.sampler.knowledge import PassRate, SamplerKnowledge, task_unit
from megatron_webrl.tasks.sampler.row_sampler import RowSampler
from megatron_webrl.types import DIFFICULTIES

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
