"""The row of a task file that a ticket draws: a pure function of knowledge, seed and ticket.

A draw is made of candidates: the first one has its place in a permutation, the others are random, and one on a blocked
website, or outside of the margin of pass rates, is replaced by the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import SamplerConfig
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge, task_unit
from megatron_webrl.tasks.sampler.samplers import UNIFORM_FRACTION, draw_environment
from megatron_webrl.types import DIFFICULTIES

INITIAL_PASS_RATE = 0.5  # of a unit before it is trusted
TRUSTED_GROUPS = 2  # groups from which on the estimate of a unit counts
CANDIDATES = 1024  # of `near_target`, of which the nearest KEPT may be drawn
KEPT = CANDIDATES // 4
TRIALS = 64  # candidates that `curriculum` may reject
ATTEMPTS = 32  # candidates on blocked websites, before the rows of other websites are listed


class RowSampler:
    """Draws rows of a task file as `tasks.sampler` says.

    uniform      every unit of `per` as often: all rows once before one is repeated; or all websites (difficulties),
                 and all rows of a website (difficulty) before one of its rows is repeated
    ratio        difficulties by weight, then a row of the difficulty
    curriculum   units in proportion to p (1 - p), by rejection; a tenth of the tickets uniformly
    near_target  one of the quarter of 1,024 candidates whose units are nearest to the target; a tenth uniformly

    With `pass_rate_margin` nine tenths of the tickets of every sampler leave out the units outside of it; if none of
    ATTEMPTS candidates is inside, any row of a website that is not blocked is drawn.

    The candidates of near_target are rows: each from an equal share of the rows in order of difficulty, so that
    difficulties are represented as in the file.
    """

    def __init__(
        self,
        settings: SamplerConfig,
        levels: np.ndarray,
        website_ids: np.ndarray,
        websites: Sequence[str],
        task_keys: np.ndarray,
    ) -> None:
        """levels: uint8 [rows], indices into DIFFICULTIES; website_ids: int32 [rows], indices into `websites`;
        task_keys: uint64 [rows]. Raises ConfigError for weights that the file cannot follow.
        """
        self._settings, self._websites = settings, websites
        self._levels, self._website_ids, self._task_keys = levels, website_ids, task_keys
        self._weights = _level_weights(settings, np.bincount(levels, minlength=len(DIFFICULTIES)))
        self._by_level = _Strata(levels)
        unit_of_row = {"website": website_ids, "difficulty": levels}.get(settings.per)
        self._uniform = _Strata(np.zeros(len(levels), np.uint8) if unit_of_row is None else unit_of_row)

    def draw(self, seed: int, ticket: int, knowledge: SamplerKnowledge | None = None) -> int:
        """The row of a ticket. If all rows are blocked, the first candidate is drawn all the same."""
        knowledge, rng = knowledge or SamplerKnowledge(), _generator("draw", seed, ticket)
        blocked, settings = knowledge.blocked, self._settings
        bounded = settings.pass_rate_margin > 0 and rng.random() >= UNIFORM_FRACTION
        first = row = self._candidate(seed, ticket, rng, knowledge)
        for _ in range(ATTEMPTS):
            reachable = not blocked or self._websites[self._website_ids[row]] not in blocked
            if reachable and (not bounded or settings.admits(self._pass_rates(np.array([row]), knowledge)[0])):
                return row
            row = self._candidate(seed, None, rng, knowledge)
        sites = np.fromiter((name not in blocked for name in self._websites), bool, len(self._websites))
        allowed = np.flatnonzero(sites[self._website_ids] & (np.array(self._weights) > 0)[self._levels])
        return int(rng.choice(allowed)) if len(allowed) else first

    def _candidate(self, seed: int, ticket: int | None, rng: np.random.Generator, known: SamplerKnowledge) -> int:
        """`ticket`: whose place in the permutations is taken; None: a random one."""
        name = self._settings.name
        if name == "ratio":
            level = draw_environment(self._weights, seed, int(rng.integers(2**62)) if ticket is None else ticket)
            return self._by_level.row(seed, level, ticket, rng)
        if name == "uniform" or rng.random() < UNIFORM_FRACTION:
            return self._uniform_row(seed, ticket, rng)
        if name == "curriculum":
            return self._row_by_variance(seed, ticket, rng, known)
        return self._row_near_target(rng, known)

    def _uniform_row(self, seed: int, ticket: int | None, rng: np.random.Generator) -> int:
        strata = self._uniform
        if ticket is None:
            return strata.row(seed, int(rng.choice(strata.ids)), None, rng)
        stratum = int(strata.ids[_permuted(seed, "strata", ticket, len(strata.ids))])
        return strata.row(seed, stratum, ticket // len(strata.ids), rng)

    def _row_by_variance(self, seed: int, ticket: int | None, rng: np.random.Generator, known: SamplerKnowledge) -> int:
        """Rejection sampling: a uniform row is accepted with the probability 4 p (1 - p)."""
        best, best_row = -1.0, 0
        for trial in range(TRIALS):
            row = self._uniform_row(seed, None if trial else ticket, rng)
            [rate] = self._pass_rates(np.array([row]), known)
            accepted = 4 * rate * (1 - rate)
            if rng.random() < accepted:
                return row
            if accepted > best:
                best, best_row = accepted, row
        return best_row

    def _row_near_target(self, rng: np.random.Generator, known: SamplerKnowledge) -> int:
        places = (np.arange(CANDIDATES) + rng.random(CANDIDATES)) * (len(self._levels) / CANDIDATES)
        rows = self._by_level.order[np.minimum(places.astype(np.int64), len(self._levels) - 1)]
        distances = np.abs(np.array(self._pass_rates(rows, known)) - self._settings.target)
        ties = rng.random(CANDIDATES)  # among equal distances by chance
        return int(rows[rng.choice(np.lexsort((ties, np.round(distances, 6)))[:KEPT])])

    def _pass_rates(self, rows: np.ndarray, known: SamplerKnowledge) -> list[float]:
        """The pass rates of the rows' units, [rows]."""
        if self._settings.per == "website":
            units = [self._websites[website] for website in self._website_ids[rows].tolist()]
        elif self._settings.per == "difficulty":
            units = [DIFFICULTIES[level] for level in self._levels[rows].tolist()]
        else:
            units = [task_unit(key) for key in self._task_keys[rows].tolist()]
        return known.pass_rates(units, INITIAL_PASS_RATE, TRUSTED_GROUPS)


class _Strata:
    """Rows by stratum."""

    def __init__(self, strata: np.ndarray) -> None:
        """strata: integers, [rows]."""
        counts = np.bincount(strata)
        self.order = np.argsort(strata, kind="stable").astype(np.int32)  # [rows], rows of stratum 0 first
        self.ids = np.flatnonzero(counts)  # strata that have rows
        self._ends = np.cumsum(counts)  # [strata], indices into `order`
        self._counts = counts

    def row(self, seed: int, stratum: int, visit: int | None, rng: np.random.Generator) -> int:
        """The row of a visit: every row of the stratum once in as many consecutive visits, in another order each.

        `visit` None: a random row.
        """
        count = int(self._counts[stratum])
        place = rng.integers(count) if visit is None else _permuted(seed, f"stratum {stratum}", visit, count)
        return int(self.order[self._ends[stratum] - count + place])


def _permuted(seed: int, label: str, index: int, count: int) -> int:
    """Element `index % count` of a permutation of range(count) that depends on the pass, index // count."""
    return int(_permutation(seed, label, index // count, count)[index % count])


@lru_cache(maxsize=8)
def _permutation(seed: int, label: str, turn: int, count: int) -> np.ndarray:
    return _generator(label, seed, turn).permutation(count).astype(np.int32)


def _generator(*key: object) -> np.random.Generator:
    """Random numbers that depend on the key alone."""
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=16).digest(), "big"))


def _level_weights(settings: SamplerConfig, counts: np.ndarray) -> tuple[float, ...]:
    """Weights of the difficulties that have rows, [DIFFICULTIES]; 0 for the others. Raises ConfigError."""
    given = settings.weights if settings.name == "ratio" else {}
    for name in given:
        if not counts[DIFFICULTIES.index(name)]:
            raise ConfigError(f"tasks.sampler.weights.{name}: no task of the training file is {name}")
    weights = [given.get(name, 1.0) if count else 0.0 for name, count in zip(DIFFICULTIES, counts, strict=True)]
    if not any(weights):
        raise ConfigError(f"tasks.sampler.weights={given} is 0 for every task of the training file")
    return tuple(weights)
