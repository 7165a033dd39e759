"""What each rollout of a running job does, for the page of rollouts.

GET /api/rollouts?after=TIME                         all rollouts, and how many were in each state since a time
GET /api/rollout?worker=W&key=K                      one rollout, with its episode so far
GET /api/rollout/images/N?worker=W&key=K             screenshot N of that

The control service is asked twice a second while pages ask, however many do, and not at all otherwise: then the workers
report nothing (control/liveness.py).
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from megatron_webrl.control.connection import FILE
from megatron_webrl.monitor.access import image_response, number_of
from megatron_webrl.monitor.control_probe import query
from megatron_webrl.monitor.episode_view import TokenTexts, episode_json
from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.ring.segment import RecordError
from megatron_webrl.track.live_rollouts import CHANGING, FIXED, STATES, running_file
from megatron_webrl.types import Trajectory

POLL_SECONDS = 0.5  # for which an answer of the job is shown
EPISODE_SECONDS = 5.0  # for which one request asks for an episode
HISTORY_SECONDS = 600


_STATE, _SINCE = len(FIXED) + CHANGING.index("state"), len(FIXED) + CHANGING.index("since")


def read_reports(workers: Mapping[str, tuple[float, str]], now: float) -> dict[tuple[str, str], list[Any]]:
    """Rows of FIXED and CHANGING by worker and key, from the age and the text of each worker's report.

    The workers' clocks differ: `since` becomes a time of the clock of `now`. Raises ValueError for other reports.
    """
    found = {}
    for worker, (age, text) in workers.items():
        reported_at, rows = json.loads(text)
        for row in rows:
            if len(row) != len(FIXED) + len(CHANGING):
                raise ValueError(f"{worker} reports rollouts of {len(row)} fields")
            since = round(now - age - reported_at + row[_SINCE], 2)
            found[worker, row[0]] = [*row[:_SINCE], since, *row[_SINCE + 1 :]]
    return found


class LiveRollouts:
    """May be used by several threads: a request waits for the answer that another one asks for."""

    def __init__(self, folder: Path, texts: Callable[[], TokenTexts]) -> None:
        """`folder`: of the run. `texts`: of the run that it holds now."""
        self._folder, self._texts = folder, texts
        self._lock = threading.Lock()  # of `_ask`
        self._asked_at = -math.inf  # monotonic time of the last answer
        self._rows: dict[tuple[str, str], list[Any]] = {}  # by worker and key
        self._error = ""  # why the rollouts are unknown
        self._history: deque[list[Any]] = deque(maxlen=HISTORY_SECONDS)  # a second each: time, and counts by state
        self._episodes: dict[tuple[str, str], float] = {}  # until when each is asked for, by worker and key

    def rollouts(self, request: Request) -> dict[str, Any]:
        self._ask()
        after = number_of(request, "after", 0.0)
        return {
            "time": time.time(),
            "error": self._error,
            "states": STATES,
            "fields": FIXED + CHANGING,
            "rows": [[worker, *row] for (worker, _), row in self._rows.items()],
            "history": [counts for counts in list(self._history) if counts[0] > after],
        }

    def rollout(self, request: Request) -> dict[str, Any]:
        """A rollout by the names of its fields, and its episode; None if there is none."""
        worker, key = name = _name(request)
        self._ask(name)
        row, found, shown = self._rows.get(name), None, None
        if row is not None:
            named = dict(zip(FIXED + CHANGING, row, strict=True))
            found = named | {"worker": worker, "state": STATES[named["state"]]}
            if (episode := self._episode(worker, key)) is not None:
                shown = episode_json(episode, found, None, self._texts())
        return {"time": time.time(), "rollout": found, "episode": shown, "error": self._error}

    def image(self, request: Request) -> Response:
        name, number = _name(request), request.path_params["number"]
        episode = self._episode(*name) if name in self._rows else None
        if episode is None or number >= len(episode.images):
            raise HTTPException(404, "there is no such screenshot of a running episode")
        return image_response(episode.images[number])

    def _ask(self, *viewed: tuple[str, str]) -> None:
        """Ask the job, unless its last answer is POLL_SECONDS old at most. `viewed`: an episode that a page shows."""
        with self._lock:
            began = time.monotonic()
            self._episodes |= dict.fromkeys(viewed, began + EPISODE_SECONDS)
            if began - self._asked_at < POLL_SECONDS:
                return
            self._episodes = {name: until for name, until in self._episodes.items() if until > began}
            names = [f"{worker}/{key}" for worker, key in self._episodes]
            answer = query(self._folder / FILE, request=lambda connection, limit: connection.rollouts(names, limit))
            self._asked_at, now = time.monotonic(), time.time()
            error = answer if isinstance(answer, str) else ""
            if error and (self._folder / "summary.json").is_file():
                error = "the run has ended"
            try:
                rows = {} if isinstance(answer, str) else read_reports(answer["workers"], now)
            except (ValueError, TypeError) as cause:
                rows, error = {}, f"the job reports its rollouts in another form, as another version does: {cause}"
            self._rows, self._error = rows, error
            if not self._history or now - self._history[-1][0] >= 1:
                counts = Counter(row[_STATE] for row in rows.values())
                self._history.append([round(now, 1), *(counts[number] for number in range(len(STATES)))])

    def _episode(self, worker: str, key: str) -> Trajectory | None:
        """The episode of a known rollout, as its worker has written it; None if it has not."""
        path = running_file(self._folder, worker, key)
        try:
            return _read(path, path.stat().st_mtime_ns)
        except (OSError, RecordError):
            return None


@lru_cache(maxsize=4)
def _read(path: Path, changed_at: int) -> Trajectory:
    """The episode of a file, which changed at that time."""
    return decode_trajectory(next(read_record_file(path)), copy=True)


def _name(request: Request) -> tuple[str, str]:
    return request.query_params.get("worker", ""), request.query_params.get("key", "")
