"""What one process did and when, for `webrl timeline` (docs/monitor.md).

    timeline/<role>.<number>.jsonl    of a run's folder, the newest has number 0; a line of a file:
    {"role", "node", "host", "pid", "clock", "monotonic", "unix",    whose it is, and both clocks at its start
     "spans": [[name, track, start, end, facts], ...]}               microseconds of CLOCK_MONOTONIC

A span measures its time whether it is recorded or not: the metrics of an update and the times of a step are those of
their spans. A thread writes the spans once a second. A process keeps FILES files of FILE_BYTES: it deletes its oldest.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.util.clock import clock_identity

log = logging.getLogger(__name__)

FOLDER = "timeline"
PROFILES = "profiles"  # folder of torch's profiles of a run (trainer/telemetry.py)
FILE_BYTES, FILES = 16 * 2**20, 4  # of each process
UNWRITTEN_SPANS = 200_000  # in memory; while the disk stalls the oldest are lost
FLUSH_SECONDS, CLOSE_SECONDS = 1.0, 10.0

RecordedSpan = tuple[str, str, int, int, dict[str, Any]]  # name, track, start and end in microseconds, facts


class Timeline:
    """The spans of a process. `Timeline()` records none."""

    def __init__(self, recording: bool = False) -> None:
        self.recording = recording
        self._spans: deque[RecordedSpan] = deque(maxlen=UNWRITTEN_SPANS)

    def span(self, name: str, track: str = "", **facts: Any) -> Span:
        """A context that measures itself. Spans of one `track` lie within each other, or one after the other.

        `facts` are for people; the context may add to them.
        """
        return Span(self, name, track, facts)

    def record(self, name: str, started: float, ended: float, track: str = "", /, **facts: Any) -> None:
        """Record a span that was measured elsewhere, by time.monotonic()."""
        if self.recording:
            self._spans.append((name, track, round(started * 1e6), round(ended * 1e6), facts))

    def take(self) -> list[RecordedSpan]:
        """The spans since the last call."""
        return [self._spans.popleft() for _ in range(len(self._spans))]  # another thread may add meanwhile


class Span:
    """See Timeline.span."""

    __slots__ = ("_timeline", "_track", "facts", "name", "seconds", "started")

    def __init__(self, timeline: Timeline, name: str, track: str, facts: dict[str, Any]) -> None:
        self._timeline, self.name, self._track, self.facts = timeline, name, track, facts
        self.started = self.seconds = 0.0  # seconds: once it has ended

    def __enter__(self) -> Span:
        self.started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        ended = time.monotonic()
        self.seconds = ended - self.started
        if self._timeline.recording:
            self._timeline.record(self.name, self.started, ended, self._track, **self.facts)


class Track:
    """A row of a timeline, such as an episode."""

    def __init__(self, timeline: Timeline, name: str = "") -> None:
        self._timeline, self._name = timeline, name
        self._state, self._since = "", 0.0

    def span(self, name: str, **facts: Any) -> Span:
        """A span of this track."""
        return self._timeline.span(name, self._name, **facts)

    def switch(self, state: str) -> None:
        """End the current state, if another one begins; an empty one is not recorded."""
        if state != self._state:
            now = time.monotonic()
            if self._state:
                self._timeline.record(self._state, self._since, now, self._name)
            self._state, self._since = state, now


OFF = Timeline()
NO_TRACK = Track(OFF)


class TimelineFiles:
    """Writes the spans of a process; bounded. A disk that fails ends the recording, and no more."""

    def __init__(self, folder: Path, role: str, node: int, timeline: Timeline) -> None:
        """Raises OSError."""
        self._timeline = timeline
        self._paths = [folder / f"{role}.{number}.jsonl" for number in range(FILES)]  # newest first
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._owner = {"role": role, "node": node, "host": host, "pid": os.getpid(), "clock": clock_identity()}
        self._owner |= {"monotonic": time.monotonic(), "unix": time.time()}
        folder.mkdir(parents=True, exist_ok=True)
        self._rotate()  # the file of a killed process may end in half a line

    def write_until(self, ended: threading.Event) -> None:
        """Write once a second until the event is set, and at last."""
        while not ended.wait(FLUSH_SECONDS):
            self.write()
        self.write()

    def write(self) -> None:
        """Write the spans since the last call."""
        spans = self._timeline.take()
        if not spans or not self._timeline.recording:
            return
        try:
            with self._paths[0].open("a") as file:
                file.write(json.dumps(self._owner | {"spans": spans}) + "\n")
                size = file.tell()
            if size > FILE_BYTES:
                self._rotate()
        except OSError as error:
            log.error("the timeline ends here, without the last spans: %s", error)
            self._timeline.recording = False

    def _rotate(self) -> None:
        for older, newer in pairwise(reversed(self._paths)):
            with suppress(FileNotFoundError):
                newer.replace(older)


@contextmanager
def open_timeline(config: Config, role: str, node: int) -> Iterator[Timeline]:
    """The timeline of this process, written until the context ends; OFF without tracking.timeline."""
    if not config.tracking.timeline:
        yield OFF
        return
    timeline = Timeline(recording=True)
    try:
        files = TimelineFiles(config.run_folder / FOLDER, role, node, timeline)
    except OSError as error:
        log.error("there is no timeline of %s: %s", role, error)
        yield OFF
        return
    ended = threading.Event()
    thread = threading.Thread(target=files.write_until, args=(ended,), name="timeline", daemon=True)
    thread.start()
    try:
        yield timeline
    finally:
        ended.set()
        thread.join(CLOSE_SECONDS)
        if thread.is_alive():
            log.error("the timeline lacks its end: the disk did not take it within %.0f s", CLOSE_SECONDS)
        timeline.recording = False
