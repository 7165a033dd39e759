"""What one process did and when, for `webrl timeline` (docs/timeline.md).

    timeline/<role>.<number>.jsonl    of a run's folder; the lines of a file:
    {"role", "node", "host", "pid", "clock", "monotonic", "unix"}    whose it is, and both clocks at its start
    {"spans": [[name, track, start, end, facts], ...]}               microseconds of CLOCK_MONOTONIC

A span measures its time whether it is recorded or not: the metrics of an update and the times of a step are those of
their spans. A thread writes the spans once a second. A process keeps FILES files of FILE_BYTES: it deletes its oldest.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.util.clock import clock_identity
from megatron_webrl.util.history import History

log = logging.getLogger(__name__)

FOLDER = "timeline"
PROFILES = "profiles"  # folder of torch's profiles of a run (trainer/telemetry.py)
FILE_BYTES, FILES = 16 * 2**20, 4  # of each process
UNWRITTEN_SPANS = 200_000  # in memory; while the disk stalls the oldest are lost
FLUSH_SECONDS, CLOSE_SECONDS = 1.0, 10.0
_FILE = re.compile(r"(?P<role>[\w.-]+)\.(?P<number>\d{4,})\.jsonl")

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
        self._folder, self._role, self._node, self._timeline = folder, role, node, timeline
        folder.mkdir(parents=True, exist_ok=True)
        self._history = self._open_next()

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
            self._history.append({"spans": spans})
            if self._history.size > FILE_BYTES:
                self._history.close()
                self._history = self._open_next()
        except OSError as error:
            log.error("the timeline ends here, without the last spans: %s", error)
            self._timeline.recording = False

    def close(self) -> None:
        """Write the rest, and close the file."""
        self.write()
        self._timeline.recording = False
        self._history.close()

    def _open_next(self) -> History:
        """A file after those of this role; deletes the oldest."""
        found = [(int(match["number"]), path) for path, match in timeline_files(self._folder, self._role)]
        for _, path in sorted(found)[: max(0, len(found) + 1 - FILES)]:
            path.unlink(missing_ok=True)
        history = History(self._folder / f"{self._role}.{max(found, default=(0,))[0] + 1:04d}.jsonl", 0)
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        owner = {"role": self._role, "node": self._node, "host": host, "pid": os.getpid()}
        history.append({**owner, "clock": clock_identity(), "monotonic": time.monotonic(), "unix": time.time()})
        return history


def timeline_files(folder: Path, role: str = "") -> list[tuple[Path, re.Match[str]]]:
    """The files in a timeline folder, or those of a role, with their `role` and `number`."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [(path, match) for path in paths if (match := _FILE.fullmatch(path.name))]
    return [(path, match) for path, match in found if role in ("", match["role"])]


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
        else:
            files.close()
