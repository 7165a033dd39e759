"""What each rollout of a running job does, for the page of rollouts.

GET /api/rollouts                                    server-sent events, each with all rollouts
GET /api/rollout?worker=W&key=K                      one rollout, with its episode so far
GET /api/rollout/images/N?worker=W&key=K             screenshot N of that

The control service is asked twice a second while someone looks, however many do, and not at all otherwise: then the
workers report nothing (control/liveness.py). Each answer becomes one event, encoded once for all viewers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from megatron_webrl.control.connection import FILE
from megatron_webrl.control.http.access import encoded
from megatron_webrl.monitor.access import NO_STORE, image_response, json_response
from megatron_webrl.monitor.control_probe import query_rollouts
from megatron_webrl.monitor.episode_view import TokenTexts, episode_json
from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.ring.segment import RecordError
from megatron_webrl.track.live_rollouts import CHANGING, FIXED, STATES, running_file
from megatron_webrl.types import Trajectory

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # between two events
KEPT_EVENTS = 8  # a viewer that lags behind by more is dropped
MAX_VIEWERS = 32
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
    """Belongs to the event loop of the server."""

    def __init__(self, folder: Path, texts: Callable[[], TokenTexts]) -> None:
        """`folder`: of the run. `texts`: of the run that it holds now."""
        self._folder, self._texts = folder, texts
        self._rows: dict[tuple[str, str], list[Any]] = {}  # by worker and key
        self._answered = asyncio.Event()  # set, and replaced, by each answer of the job
        self._error = ""  # why the rollouts are unknown
        self._history: deque[list[Any]] = deque(maxlen=HISTORY_SECONDS)  # a second each: time, and counts by state
        self._viewers: set[asyncio.Queue[bytes]] = set()  # events that a viewer has not taken; an empty one ends it
        self._episodes: dict[tuple[str, str], float] = {}  # until when each is asked for, by worker and key
        self._following: asyncio.Task[None] | None = None
        self._closed = False

    def routes(self) -> list[Route]:
        return [
            Route("/api/rollouts", self.stream),
            Route("/api/rollout", self.rollout),
            Route("/api/rollout/images/{number:int}", self.image),
        ]

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._send(b"")
        self._answered.set()

    # -- requests ---------------------------------------------------------------------------------

    async def stream(self, request: Request) -> Response:
        """Events until the viewer closes the connection, or stops reading."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise HTTPException(503, f"{MAX_VIEWERS} viewers look at the rollouts already")
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=NO_STORE)

    async def _events(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue(KEPT_EVENTS + 1)
        self._viewers.add(queue)
        try:
            await self._next_answer()
            while not queue.empty():
                queue.get_nowait()  # the first event has it all
            start = {"states": STATES, "fields": FIXED + CHANGING, "history": list(self._history)}
            yield self._event(time.time(), start=start)
            while not self._closed and (event := await queue.get()):
                yield event
        finally:
            self._viewers.discard(queue)

    async def rollout(self, request: Request) -> Response:
        worker, key = _name(request)
        self._episodes[worker, key] = time.monotonic() + EPISODE_SECONDS
        if self._following is None or self._following.done():
            await self._next_answer()
        found = self._find(worker, key)
        episode = None if found is None else await asyncio.to_thread(self._episode_json, worker, key, found)
        return json_response({"time": time.time(), "rollout": found, "episode": episode, "error": self._error})

    async def image(self, request: Request) -> Response:
        worker, key = _name(request)
        known = (worker, key) in self._rows
        episode = await asyncio.to_thread(self._episode, worker, key) if known else None
        number = request.path_params["number"]
        if episode is None or number >= len(episode.images):
            raise HTTPException(404, "there is no such screenshot of a running episode")
        return image_response(episode.images[number])

    # -- events -----------------------------------------------------------------------------------

    async def _next_answer(self) -> None:
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        await self._answered.wait()

    async def _follow(self) -> None:
        """Ask and publish until nobody looks."""
        while not self._closed:
            now = time.monotonic()
            self._episodes = {name: until for name, until in self._episodes.items() if until > now}
            if not self._viewers and not self._episodes:
                break
            names = [f"{worker}/{key}" for worker, key in self._episodes]
            self._publish(await asyncio.to_thread(query_rollouts, self._folder / FILE, names))
            await asyncio.sleep(POLL_SECONDS)
        self._rows = {}  # they are old by the time that someone looks again

    def _publish(self, answer: dict[str, Any] | str) -> None:
        """Take in an answer, or why there is none."""
        now, self._rows, self._error = time.time(), {}, answer if isinstance(answer, str) else ""
        if not isinstance(answer, str):
            try:
                self._rows = read_reports(answer["workers"], now)
            except (ValueError, TypeError) as error:
                self._error = f"the job reports its rollouts in another form, as another version does: {error}"
        if not self._history or now - self._history[-1][0] >= 1:
            counts = Counter(row[_STATE] for row in self._rows.values())
            self._history.append([round(now, 1), *(counts[number] for number in range(len(STATES)))])
        self._send(self._event(now))
        self._answered.set()
        if not self._closed:
            self._answered = asyncio.Event()

    def _send(self, event: bytes) -> None:
        for queue in list(self._viewers):
            if queue.qsize() < KEPT_EVENTS:
                queue.put_nowait(event)
            else:
                log.warning("dropped a viewer of the rollouts that does not read")
                self._viewers.discard(queue)
                queue.put_nowait(b"")

    def _event(self, now: float, **content: Any) -> bytes:
        rows = [[worker, *row] for (worker, _), row in self._rows.items()]
        return b"data: %s\n\n" % encoded({"time": round(now, 2), "error": self._error, "rows": rows, **content})

    # -- episodes ---------------------------------------------------------------------------------

    def _find(self, worker: str, key: str) -> dict[str, Any] | None:
        """A rollout by the names of its fields."""
        if (row := self._rows.get((worker, key))) is None:
            return None
        named = dict(zip(FIXED + CHANGING, row, strict=True))
        return named | {"worker": worker, "state": STATES[named["state"]]}

    def _episode(self, worker: str, key: str) -> Trajectory | None:
        """The episode of a known rollout, as its worker has written it; None if it has not."""
        path = running_file(self._folder, worker, key)
        try:
            return _read(path, path.stat().st_mtime_ns)
        except (OSError, RecordError):
            return None

    def _episode_json(self, worker: str, key: str, row: dict[str, Any]) -> dict[str, Any] | None:
        episode = self._episode(worker, key)
        return None if episode is None else episode_json(episode, row, None, self._texts())


@lru_cache(maxsize=4)
def _read(path: Path, changed_at: int) -> Trajectory:
    """The episode of a file, which changed at that time."""
    return decode_trajectory(next(read_record_file(path)), copy=True)


def _name(request: Request) -> tuple[str, str]:
    return request.query_params.get("worker", ""), request.query_params.get("key", "")
