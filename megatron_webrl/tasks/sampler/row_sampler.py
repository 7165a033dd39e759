"""The row of a task file that a ticket draws: a pure function of knowledge, seed and ticket.

A draw is made of candidates: each comes from the stream of (seed, ticket, attempt), and one on a blocked website is
replaced by that of the next attempt. No draw copies or scans the arrays of the file, however many rows it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import SamplerConfig
from megatron_webrl.tasks.sampler.hashing import fraction, fractions, label_key, number, permuted
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.tasks.sampler.samplers import UNIFORM_FRACTION, draw_environment
from megatron_webrl.tasks.sampler.units import task_unit
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
        task_keys: uint64 [rows]; any of them may be a np.memmap.

        Raises ConfigError for weights that the file cannot follow, and ValueError for arrays of unequal or no length.
        """
        if not len(levels) == len(website_ids) == len(task_keys) or not len(levels):
            raise ValueError(f"a sampler of {len(levels)} levels, {len(website_ids)} websites, {len(task_keys)} keys")
        self._settings, self._websites = settings, websites
        self._levels, self._website_ids, self._task_keys = map(np.asarray, (levels, website_ids, task_keys))
        self._weights = _level_weights(settings, np.bincount(self._levels, minlength=len(DIFFICULTIES)))
        self._search: tuple[frozenset[str], np.ndarray] | None = None  # rows of other websites than these

    def draw(self, seed: int, ticket: int, knowledge: SamplerKnowledge | None = None) -> int:
        """The row of a ticket. If all rows are blocked, the first candidate is drawn all the same."""
        knowledge = knowledge or SamplerKnowledge()
        blocked = frozenset(knowledge.blocked)
        first = row = self._candidate(seed, ticket, 0, knowledge)
        for attempt in range(1, ATTEMPTS):
            if not blocked or self._websites[self._website_ids[row]] not in blocked:
                return row
            row = self._candidate(seed, ticket, attempt, knowledge)
        allowed = self._allowed_rows(blocked)
        return int(allowed[permuted(label_key(seed, "allowed"), ticket, len(allowed))]) if len(allowed) else first

    def _candidate(self, seed: int, ticket: int, attempt: int, knowledge: SamplerKnowledge) -> int:
        name, stream = self._settings.name, number(number(label_key(seed, "stream"), ticket), attempt)
        if attempt:
            ticket = number(stream, -1)  # the place of another ticket in the permutations
        if name == "ratio":
            return self._row_by_ratio(seed, ticket)
        if name == "uniform" or fraction(stream, 0) < UNIFORM_FRACTION:
            return self._uniform_row(seed, ticket)
        if name == "curriculum":
            return self._row_by_variance(seed, ticket, stream, knowledge)
        return self._row_near_target(stream, knowledge)

    def _uniform_row(self, seed: int, ticket: int) -> int:
        per = self._settings.per
        if per == "task":
            return permuted(label_key(seed, "rows"), ticket, len(self._levels))
        strata = self._by_website if per == "website" else self._by_level
        visit, key = ticket // len(strata.ids), label_key(seed, per)
        return strata.row(seed, strata.ids[permuted(key, ticket, len(strata.ids))], visit)

    def _row_by_ratio(self, seed: int, ticket: int) -> int:
        return self._by_level.row(seed, draw_environment(self._weights, seed, ticket), ticket)

    def _row_by_variance(self, seed: int, ticket: int, stream: int, knowledge: SamplerKnowledge) -> int:
        """Rejection sampling: a uniform row is accepted with the probability 4 p (1 - p)."""
        best, best_row = -1.0, 0
        for trial in range(TRIALS):
            row = self._uniform_row(seed, number(stream, 2 * trial + 1) if trial else ticket)
            [rate] = self._pass_rates(np.array([row]), knowledge)
            accepted = 4 * rate * (1 - rate)
            if fraction(stream, 2 * trial + 2) < accepted:
                return row
            if accepted > best:
                best, best_row = accepted, row
        return best_row

    def _row_near_target(self, stream: int, knowledge: SamplerKnowledge) -> int:
        noise = fractions(stream, 1, 2 * CANDIDATES)
        places = (np.arange(CANDIDATES) + noise[:CANDIDATES]) * (len(self._levels) / CANDIDATES)
        rows = self._by_level.order[np.minimum(places.astype(np.int64), len(self._levels) - 1)]
        rates = np.array(self._pass_rates(rows, knowledge))
        distances = np.round(np.abs(rates - self._settings.target), 6)  # equal ones are equal
        kept = np.lexsort((noise[CANDIDATES:], distances))[:KEPT]  # among equal distances by chance
        return int(rows[kept[int(fraction(stream, 2 * CANDIDATES + 1) * KEPT)]])

    def _units(self, rows: np.ndarray) -> list[str]:
        """Names of the units of rows, [rows]."""
        if self._settings.per == "website":
            return [self._websites[website] for website in self._website_ids[rows].tolist()]
        if self._settings.per == "difficulty":
            return [DIFFICULTIES[level] for level in self._levels[rows].tolist()]
        return [task_unit(key) for key in self._task_keys[rows].tolist()]

    def _pass_rates(self, rows: np.ndarray, knowledge: SamplerKnowledge) -> list[float]:
        """The pass rates of the rows' units, [rows]."""
        return knowledge.pass_rates(self._units(rows), INITIAL_PASS_RATE, TRUSTED_GROUPS)

    def _allowed_rows(self, blocked: frozenset[str]) -> np.ndarray:
        """The rows that may be drawn while `blocked` websites may not: int32 [allowed], kept for the next draw."""
        if self._search is None or self._search[0] != blocked:
            sites = np.fromiter((name not in blocked for name in self._websites), bool, len(self._websites))
            allowed = sites[self._website_ids] & (np.array(self._weights) > 0)[self._levels]
            self._search = blocked, np.flatnonzero(allowed).astype(np.int32)
        return self._search[1]

    @cached_property
    def _by_level(self) -> _Strata:
        return _Strata(self._levels, len(DIFFICULTIES))

    @cached_property
    def _by_website(self) -> _Strata:
        return _Strata(self._website_ids, len(self._websites))


class _Strata:
    """Rows by stratum."""

    def __init__(self, strata: np.ndarray, count: int) -> None:
        """strata: [rows], within 0..count-1."""
        counts = np.bincount(strata, minlength=count)
        self.order = np.argsort(strata, kind="stable").astype(np.int32)  # [rows], rows of stratum 0 first
        self.starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)  # [count + 1], indices into `order`
        self.ids = np.flatnonzero(counts).astype(np.int32)  # strata that have rows

    def row(self, seed: int, stratum: int, visit: int) -> int:
        """The row of a visit: every row of the stratum once in as many consecutive visits, in another order each."""
        start, end = int(self.starts[stratum]), int(self.starts[stratum + 1])
        key = number(label_key(seed, "stratum"), int(stratum))
        return int(self.order[start + permuted(key, visit, end - start)])


def _level_weights(settings: SamplerConfig, counts: np.ndarray) -> tuple[float, ...]:
    """Weights of the difficulties that have rows, [DIFFICULTIES]; 0 for the others. Raises ConfigError."""
    given = settings.difficulty_weights if settings.name == "ratio" else {}
    for name in given:
        if not counts[DIFFICULTIES.index(name)]:
            raise ConfigError(f"tasks.sampler.difficulty_weights.{name}: no task of the training file is {name}")
    weights = [given.get(name, 1.0) if count else 0.0 for name, count in zip(DIFFICULTIES, counts, strict=True)]
    if not any(weights):
        raise ConfigError(f"tasks.sampler.difficulty_weights={given} is 0 for every task of the training file")
    return tuple(weights)
