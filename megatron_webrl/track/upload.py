"""Upload a run to MLflow, TensorBoard and W&B from config.yaml, updates.jsonl and evaluations.jsonl of its folder.

A JSON file for each of these sinks says how far it got. After a rollback the lines that replace others are sent. A
subclass of Uploader knows one sink. A thread for each sends what the files gain; a sink that fails delays no other.
"""

from __future__ import annotations

import importlib
import json
import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.track import evaluations
from megatron_webrl.track.metrics import UPDATES_FILE, update_metrics
from megatron_webrl.util import atomic_file
from megatron_webrl.util.clock import steady_time
from megatron_webrl.util.history import Tail
from megatron_webrl.util.text import first_line, shorten

log = logging.getLogger(__name__)

MLFLOW = "mlflow"
TITLES = {MLFLOW: "MLflow", "tensorboard": "TensorBoard", "wandb": "W&B"}  # by sink
STATE_FILES = {sink: f"{sink}.json" for sink in TITLES}
REQUEST_SECONDS = 20
POLL_SECONDS = 1.0  # between two looks at the files of a run
RETRY_SECONDS = 1.0  # before the first repetition; doubles up to MAX_RETRY_SECONDS
MAX_RETRY_SECONDS = 60.0
END_SECONDS = 20.0  # limit of waiting for the sinks at the end of a job
_LINES = 20  # sent before they are noted
_MARKS = 256  # last lines of a file by which a rollback is found; after a longer one the whole file is sent

Line = Mapping[str, Any]
METRICS: dict[str, Callable[[Line], dict[str, float]]] = {
    UPDATES_FILE: update_metrics,
    evaluations.FILE: evaluations.evaluation_metrics,
}
"""The histories whose lines become metrics, at the step `version` and the time `finished_at`."""


@dataclass(frozen=True)
class Point:
    """The metrics of a line."""

    step: int
    time: float  # unix time, seconds
    metrics: Mapping[str, float]
    tags: Mapping[str, str]


class LineRejected(Exception):
    """The sink can never store a line, for its content."""


@dataclass(frozen=True)
class UploadState:
    """What a sink has."""

    key: str  # identifies the run, known before the sink has answered with an id
    run_id: str | None = None
    described: bool = False  # whether it has the settings
    status: str = ""  # of the run in the sink
    end: Sequence[Any] | None = None  # status and time (unix ms) with which the run ended; None while it runs
    marks: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)  # Tail.marks of each history

    @classmethod
    def load(cls, folder: Path, sink: str = MLFLOW) -> UploadState | None:
        """The stored state; None without a readable one."""
        path = folder / STATE_FILES[sink]
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            log.warning("%s is damaged and ignored: %s", path, first_line(error))
            return None

    def count_unsent(self, folder: Path) -> int:
        """Entries that the sink lacks: lines, the description of the run, and its end."""
        lines = sum(len(Tail(folder / name, self.marks.get(name, ())).poll()) for name in METRICS)
        return lines + (not self.described) + (self.end is not None and self.status != self.end[0])


def count_unsent(folder: Path, sink: str = MLFLOW) -> int:
    """Entries of a run that a sink lacks; 0 for a run that has never been uploaded there."""
    state = UploadState.load(folder, sink)
    return state.count_unsent(folder) if state else 0


def end_as_failed(folder: Path) -> None:
    """End a run as FAILED whose trainer was killed, unless it has ended; an upload tells the sinks. Raises OSError."""
    for sink, file in STATE_FILES.items():
        state = UploadState.load(folder, sink)
        if state is not None and state.end is None:
            atomic_file.write_json(folder / file, asdict(replace(state, end=_ended("FAILED"))))


def _ended(status: str) -> tuple[str, int]:
    return status, int(steady_time() * 1000)


class Uploader(ABC):
    """Sends what a sink lacks, and stores how far it came."""

    sink: str  # as tracking.also names it
    rewinds = False  # whether the run is opened again after a rollback, for a sink without values that were replaced

    def __init__(self, config: Config) -> None:
        self.config, self.folder = config, config.run_folder
        self.state = UploadState.load(self.folder, self.sink) or UploadState(secrets.token_hex(16))
        self.sent = self.rejected = 0  # entries: all, and those of them that the sink does not accept
        self._is_open = False
        self._tails: dict[str, Tail] = {}
        self._lock = threading.Lock()

    @property
    def title(self) -> str:
        return TITLES[self.sink]

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the sink is, without secrets."""

    @abstractmethod
    def open(self) -> None:
        """Find or create the run. May `forget` what the sink has."""

    @abstractmethod
    def describe(self) -> None:
        """Send the settings."""

    @abstractmethod
    def log(self, point: Point) -> None:
        """Send the metrics of a line. Raises LineRejected."""

    def flush(self) -> None:  # noqa: B027
        """Store what was logged, before it is noted as sent."""

    def start(self) -> None:  # noqa: B027
        """Mark the run as running."""

    @abstractmethod
    def end(self, status: str, milliseconds: int) -> None:
        """End the run with an MLflow status."""

    def close(self) -> None:  # noqa: B027
        """Release what a failed request has left. If `_is_open` is false, the run is opened again."""

    def needs_opening(self) -> bool:
        """Whether there is something to send, or to compare with what the sink has."""
        return self.pending() > 0

    def pending(self) -> int:
        """Entries that the sink lacks."""
        return self.state.count_unsent(self.folder)

    def change(self, **fields: Any) -> None:
        """Change fields of the state, and store it."""
        with self._lock:
            self.state = replace(self.state, **fields)
            try:
                atomic_file.write_json(self.folder / STATE_FILES[self.sink], asdict(self.state))
            except OSError as error:  # a full disk: what is sent again later changes nothing
                log.warning("%s cannot be written: %s", self.folder / STATE_FILES[self.sink], first_line(error))

    def forget(self, marks: Mapping[str, Sequence[Sequence[int]]] | None = None, **fields: Any) -> None:
        """Send the settings and the lines after `marks`, by default all of them, again."""
        self.change(described=False, marks=marks or {}, **fields)
        self._tails.clear()

    def send(self) -> None:
        """Send everything that the sink lacks. Raises what the sink raises."""
        try:
            self._send()
        except Exception:
            self.close()
            raise

    def _send(self) -> None:
        if self._is_open and self.rewinds and self._is_cut():
            self.close()
        if not self._is_open:
            if not self.needs_opening():
                return
            self.open()
            self._is_open = True
        if not self.state.described:
            self.describe()
            self.sent += 1
            self.change(described=True)
        for name in METRICS:
            while self._send_lines(name):
                pass
        end = self.state.end
        if end is None and self.state.status != "RUNNING":
            self.start()
            self.change(status="RUNNING")
        elif end is not None and self.state.status != end[0]:
            self.end(*end)
            self.sent += 1
            self.change(status=end[0])

    def _is_cut(self) -> bool:
        """Whether the sink has lines that were cut off."""
        for name, marks in self.state.marks.items():
            tail = Tail(self.folder / name, marks)
            tail.poll(0)
            if tail.marks[-1:] != [list(mark) for mark in marks[-1:]]:
                return True
        return False

    def _send_lines(self, name: str) -> bool:
        """Send the next lines of a history; False if there are none. Lines that can never be stored are left out."""
        before = self.state.marks.get(name, ())
        tail = self._tails.pop(name, None) or Tail(self.folder / name, before)
        for line in (lines := tail.poll(_LINES)):  # after a failure they are read again, by another Tail
            try:
                tags = {"checkpoint": line["checkpoint"]} if "checkpoint" in line else {}
                point = Point(line["version"], float(line["finished_at"]), METRICS[name](line), tags)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self._reject(name, line, error)
                continue
            try:
                self.log(point)
            except LineRejected as error:
                self._reject(name, line, error.__cause__ or error)
        self.flush()
        self._tails[name] = tail
        if not lines and tail.marks[-1:] == list(before[-1:]):
            return False
        self.sent += len(lines)
        self.change(marks={**self.state.marks, name: tail.marks[-_MARKS:]})
        return True

    def _reject(self, name: str, line: Line, error: BaseException) -> None:
        self.rejected += 1
        reason, text = f"{type(error).__name__}: {first_line(error)}", shorten(json.dumps(line), 200)
        log.error("%s cannot store a line of %s: %s: %s", self.title, self.folder / name, reason, text)


def make_uploaders(config: Config) -> list[Uploader]:
    """The uploaders of MLflow and of tracking.also."""
    modules = [importlib.import_module(f"{__package__}.{name}_upload") for name in (MLFLOW, *config.tracking.also)]
    return [module.UPLOADER(config) for module in modules]


class Tracker:
    """Uploads a run while its job runs, in threads. Only `close` waits for the sinks, with a limit; nothing raises."""

    def __init__(self, config: Config) -> None:
        """Continue the run that the folder names, else create one."""
        self.config, self.threads = config, [UploadThread(uploader) for uploader in make_uploaders(config)]
        self.uploader = self.threads[0].uploader  # of MLflow

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until MLflow has answered."""
        return self.uploader.state.run_id

    @property
    def error(self) -> str | None:
        """The sinks that do not answer, and why; None while all do."""
        return "; ".join(
            f"{each.uploader.title} does not answer: {each.error}" for each in self.threads if each.error
        ) or None  # fmt: skip

    def close(self, status: str, seconds: float | None = None) -> None:
        """Log the summary and end the run with an MLflow status: FINISHED, KILLED or FAILED.

        Waits for the sinks for at most `seconds`, by default END_SECONDS, then logs what they have not received and how
        to send it.
        """
        for each in self.threads:
            each.uploader.change(end=_ended(status))
            each.closing.set()
        deadline = time.monotonic() + (END_SECONDS if seconds is None else seconds)
        for each in self.threads:
            each.join(max(0.0, deadline - time.monotonic()))
        if message := self.pending_message():
            log.warning("%s", message)

    def pending_message(self) -> str | None:
        """What the sinks have not received, and how to send it; None if they have everything."""
        counts = {each: each.uploader.pending() for each in self.threads}
        lacking = [
            f"{each.uploader.title} at {each.uploader.address} has not received {count} entries of "
            f"{self.config.run_folder}{f' ({each.error})' if each.error else ''}"
            for each, count in counts.items() if count
        ]  # fmt: skip
        return f"{'; '.join(lacking)}; send them with: webrl upload {self.config.run_folder}" if lacking else None


class UploadThread(threading.Thread):
    """Sends what the files of a run gain, until `closing` is set."""

    def __init__(self, uploader: Uploader) -> None:
        super().__init__(name=uploader.sink, daemon=True)
        self.uploader, self.closing = uploader, threading.Event()
        self.error: str | None = None  # of the last request, while the sink does not answer
        uploader.change(end=None)
        self.start()

    def run(self) -> None:
        """Send repeatedly. After a failure wait, longer each time, and try again."""
        delay = RETRY_SECONDS
        while True:
            closing = self.closing.is_set()
            try:
                self.uploader.send()
                self._note(None)
                seconds, delay = POLL_SECONDS, RETRY_SECONDS
            except Exception as error:  # of a sink, its database or the network: none may end training
                self._note(error)
                seconds, delay = delay, min(2 * delay, MAX_RETRY_SECONDS)
            if closing:
                return
            self.closing.wait(seconds)

    def _note(self, error: Exception | None) -> None:
        """Log the first failure in a row, and its end."""
        text = None if error is None else shorten(f"{type(error).__name__}: {first_line(error)}", 300)
        sink = f"{self.uploader.title} at {self.uploader.address}"
        if text is not None and self.error is None:
            log.warning("%s does not answer; the files of the run wait for it: %s", sink, text)
        elif text is None and self.error is not None:
            log.info("%s answers again", sink)
        self.error = text
