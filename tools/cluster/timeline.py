"""Reconstruct the requests of a run's engines from episodes.jsonl, and fit the speed of the engines.

episodes.jsonl has the end and the duration of each episode, and the seconds of each response and action in order. The
rest of its time is the reset and, in lockstep, the wait for other episodes. The episodes of a group start together: one
that starts later than the first has waited for a browser session or was retried.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SERIAL_CANDIDATES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
OVERLAP_CANDIDATES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
FIT_TOLERANCE = 1.01  # a fit whose error is within this factor of the least one is as good

EpisodeLine = Mapping[str, Any]
TimeSpan = tuple[float, float]  # from and to, unix seconds
LoadInterval = tuple[TimeSpan, float]  # mean number of requests in an engine during the span


@dataclass(frozen=True)
class EpisodeTimeline:
    """An episode with the times of its requests."""

    line: EpisodeLine
    reset: float  # seconds from the start of its group to its first request
    request_starts: tuple[float, ...]  # unix seconds of each request


@dataclass(frozen=True)
class EngineFit:
    """Parameters that fit the requests of a run best; see SimulationSettings."""

    serial: float
    overlap: float
    request_work: np.ndarray  # [requests], seconds in an engine without other requests


def reconstruct_timelines(lines: Sequence[EpisodeLine], stepping: str) -> list[EpisodeTimeline]:
    """The timelines of all episodes, in no particular order."""
    starts: dict[int, float] = {}
    for line in lines:
        starts[line["ticket"]] = min(_start(line), starts.get(line["ticket"], math.inf))
    if stepping == "free":
        return [_free(line, starts) for line in lines]
    return [placed for cohort in _cohorts(lines) for placed in _in_step(cohort, starts)]


def _start(line: EpisodeLine) -> float:
    return float(line["finished_at"] - line["seconds"])


def _free(line: EpisodeLine, starts: Mapping[int, float]) -> EpisodeTimeline:
    reset = max(
        0.0, line["seconds"] - sum(step["generation_seconds"] + step["browser_seconds"] for step in line["steps"])
    )
    begins, now = [], _start(line) + reset
    for step in line["steps"]:
        begins.append(now)
        now += step["generation_seconds"] + step["browser_seconds"]
    return EpisodeTimeline(line, reset + _start(line) - starts[line["ticket"]], tuple(begins))


def _cohorts(lines: Sequence[EpisodeLine]) -> list[list[EpisodeLine]]:
    """Episodes of a worker that started before the first of them ended: they share all rounds from the first on."""
    cohorts: list[list[EpisodeLine]] = []
    for line in sorted(lines, key=lambda line: (line["worker"], _start(line))):
        last = cohorts[-1] if cohorts else []
        together = last and last[0]["worker"] == line["worker"]
        if together and _start(line) < min(one["finished_at"] for one in last):
            last.append(line)
        else:
            cohorts.append([line])
    return cohorts


def _in_step(cohort: Sequence[EpisodeLine], group_starts: Mapping[int, float]) -> list[EpisodeTimeline]:
    """A round ends with its slowest episode, so only the latest reset is visible; it is used for all episodes."""
    generations = _slowest(cohort, "generation_seconds")
    browsers = _slowest(cohort, "browser_seconds")
    starts = [0.0]  # of rounds, after the first one's
    for generation, browser in zip(generations, browsers, strict=True):
        starts.append(starts[-1] + generation + browser)
    firsts = [
        line["finished_at"] - line["steps"][-1]["browser_seconds"] - generations[len(line["steps"]) - 1]
        - starts[len(line["steps"]) - 1]
        for line in cohort
        if line["steps"]
    ]  # fmt: skip
    first = float(np.median(firsts)) if firsts else 0.0
    placed = []
    for line in cohort:
        begun = group_starts[line["ticket"]]
        reset = max(0.0, first - begun) if line["steps"] else line["finished_at"] - begun
        placed.append(EpisodeTimeline(line, reset, tuple(first + start for start in starts[: len(line["steps"])])))
    return placed


def _slowest(cohort: Sequence[EpisodeLine], what: str) -> list[float]:
    rounds = max(len(line["steps"]) for line in cohort)
    return [max(line["steps"][n][what] for line in cohort if n < len(line["steps"])) for n in range(rounds)]


def fit_engine(
    episodes: Sequence[EpisodeTimeline],
    training: Sequence[TimeSpan],
    pauses: Sequence[TimeSpan],
    levels: Sequence[LoadInterval] = (),
) -> EngineFit:
    """Fit how much concurrent requests, and training on the same processors, slow requests down.

    `training`, `pauses`: time spans. Chooses the pair of SimulationSettings.serial and .overlap for which a linear
    function of the tokens of each request (computed prompt, response) explains the work of the engines best; among
    equally good pairs the one with the least contention. `request_work` is in the order of `episodes`, step by step.

    `levels`: mean requests counted by the workers. Requests of episodes that still ran at the end of the job are in no
    file; where the count is above that of `episodes`, the requests of `episodes` are scaled up to it.
    """
    requests = _Requests(episodes, training, pauses, levels)
    if not len(requests.begins):
        return EngineFit(0.0, 1.0, np.zeros(0))
    trials = [
        (requests.error(serial, overlap), serial, 1 - overlap)
        for serial in SERIAL_CANDIDATES
        for overlap in OVERLAP_CANDIDATES
    ]
    least = min(trials)[0]
    _, serial, slower = min(
        (trial for trial in trials if trial[0] <= FIT_TOLERANCE * least + 1e-9), key=lambda t: t[1:]
    )
    return EngineFit(serial, 1 - slower, requests.work(serial, 1 - slower))


class _Requests:
    """Requests of all engines, and the number in each engine over time."""

    def __init__(
        self,
        episodes: Sequence[EpisodeTimeline],
        training: Sequence[TimeSpan],
        pauses: Sequence[TimeSpan],
        levels: Sequence[LoadInterval],
    ) -> None:
        steps = [step for episode in episodes for step in episode.line["steps"]]
        self.begins = np.array([begin for episode in episodes for begin in episode.request_starts])
        self._ends = self.begins + np.array([step["generation_seconds"] for step in steps])
        # [requests, 3]: inputs of the linear function
        self._features = np.array(
            [(1, step["prompt_tokens"] - step["cached_tokens"], step["response_tokens"]) for step in steps], float
        )
        by_worker: dict[str, list[int]] = defaultdict(list)
        for number, worker in enumerate(e.line["worker"] for e in episodes for _ in e.request_starts):
            by_worker[worker].append(number)
        edges = [moment for span in (*training, *pauses, *(span for span, _ in levels)) for moment in span]
        self._engines = [
            _Load(np.array(numbers), self.begins, self._ends, edges, training, pauses) for numbers in by_worker.values()
        ]
        for span, level in levels:
            here = sum(engine.area(span) for engine in self._engines) / len(self._engines) / (span[1] - span[0])
            for engine in self._engines:
                engine.multiply(span, max(1.0, level / here) if here else 1.0)

    def work(self, serial: float, overlap: float) -> np.ndarray:
        """[requests]: work of the engine for each request; above 0."""
        work = np.zeros(len(self.begins))
        for engine in self._engines:
            done = engine.progress(serial, overlap)
            for sign, moments in ((1, self._ends), (-1, self.begins)):
                work[engine.numbers] += sign * np.interp(moments[engine.numbers], engine.moments, done)
        return np.maximum(work, 1e-6)

    def error(self, serial: float, overlap: float) -> float:
        """Variance of the work that the tokens do not explain, divided by the squared mean."""
        work = self.work(serial, overlap)
        explained, *_ = np.linalg.lstsq(self._features, work, rcond=None)
        return float(np.var(work - self._features @ explained) / np.mean(work) ** 2)


class _Load:
    """Number of requests in one engine, constant between consecutive moments."""

    def __init__(
        self, numbers: np.ndarray, begins: np.ndarray, ends: np.ndarray, edges: Sequence[float],
        training: Sequence[TimeSpan], pauses: Sequence[TimeSpan],
    ) -> None:  # fmt: skip
        self.numbers = numbers
        begin, end = np.sort(begins[numbers]), np.sort(ends[numbers])
        inside = [edge for edge in edges if begin[0] < edge < end[-1]]
        self.moments = np.unique(np.concatenate([begin, end, inside]))
        self._lengths = np.diff(self.moments)
        self._middles = (self.moments[:-1] + self.moments[1:]) / 2
        self._count = (np.searchsorted(begin, self._middles) - np.searchsorted(end, self._middles)).astype(float)
        self._trains = _within(self._middles, training)
        self._pauses = _within(self._middles, pauses)

    def area(self, span: TimeSpan) -> float:
        """Request-seconds within a span."""
        return float((self._count * self._lengths)[_within(self._middles, [span])].sum())

    def multiply(self, span: TimeSpan, factor: float) -> None:
        """Multiply the number of requests within a span."""
        self._count[_within(self._middles, [span])] *= factor

    def progress(self, serial: float, overlap: float) -> np.ndarray:
        """[moments]: work done so far for a request present from the first moment on."""
        rates = np.where(self._trains, overlap, 1.0) / (1 + np.maximum(0.0, self._count - 1) * serial)
        rates[self._pauses] = 0.0
        return np.concatenate([[0.0], np.cumsum(rates * self._lengths)])


def _within(moments: np.ndarray, spans: Sequence[TimeSpan]) -> np.ndarray:
    found = np.zeros(len(moments), bool)
    for begin, end in spans:
        found |= (moments > begin) & (moments < end)
    return found
