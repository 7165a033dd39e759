"""Upload a run to MLflow from the files of its folder: config.yaml, updates.jsonl, evaluations.jsonl, summary.json.

mlflow.json says how far MLflow got. A request that is sent twice changes nothing, as each point has the time of its
line: every upload may be repeated. After a rollback the lines that replace others are sent; MLflow keeps both.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.import_path import OWN_CODE_FILE
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import flatten_config
from megatron_webrl.track import evaluations
from megatron_webrl.track.metrics import UPDATES_FILE, update_metrics
from megatron_webrl.util import atomic_file
from megatron_webrl.util.clock import steady_time
from megatron_webrl.util.history import Tail
from megatron_webrl.util.text import first_line, redact, shorten

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

STATE_FILE = "mlflow.json"
KEY_TAG = "webrl.run_key"
NOTE_TAG = "mlflow.note.content"  # the description on MLflow's pages
REQUEST_SECONDS = 20
POLL_SECONDS = 1.0  # between two looks at the files of a run
RETRY_SECONDS = 1.0  # before the first repetition; doubles up to MAX_RETRY_SECONDS
MAX_RETRY_SECONDS = 60.0
END_SECONDS = 20.0  # limit of waiting for MLflow at the end of a job
_LINES = 20  # sent before they are noted
_MARKS = 256  # last lines of a file by which a rollback is found; after a longer one the whole file is sent

Line = Mapping[str, Any]
METRICS: dict[str, Callable[[Line], dict[str, float]]] = {
    UPDATES_FILE: update_metrics,
    evaluations.FILE: evaluations.evaluation_metrics,
}
"""The histories whose lines become metrics, at the MLflow step `version` and the time `finished_at`."""


@dataclass(frozen=True)
class UploadState:
    """What MLflow has."""

    key: str  # a tag of the run, known before MLflow has answered with an id
    run_id: str | None = None
    described: bool = False  # whether it has the parameters and config.yaml
    status: str = ""  # of the run in MLflow
    end: Sequence[Any] | None = None  # status and time (unix ms) with which the run ended; None while it runs
    marks: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)  # Tail.marks of each history

    @classmethod
    def load(cls, folder: Path) -> UploadState | None:
        """The stored state; None without a readable one."""
        path = folder / STATE_FILE
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            log.warning("%s is damaged and ignored: %s", path, first_line(error))
            return None

    def count_unsent(self, folder: Path) -> int:
        """Entries that MLflow lacks: lines, the description of the run, and its end."""
        lines = sum(len(Tail(folder / name, self.marks.get(name, ())).poll()) for name in METRICS)
        return lines + (not self.described) + (self.end is not None and self.status != self.end[0])


def run_id(folder: Path) -> str | None:
    """MLflow's id of a run; None while MLflow does not have it."""
    state = UploadState.load(folder)
    return state.run_id if state else None


def count_unsent(folder: Path) -> int:
    """Entries of a run that MLflow lacks; 0 for a run that has never been uploaded."""
    state = UploadState.load(folder)
    return state.count_unsent(folder) if state else 0


def end_as_failed(folder: Path) -> None:
    """End a run as FAILED whose trainer was killed, unless it has ended; an upload tells MLflow. Raises OSError."""
    state = UploadState.load(folder)
    if state is not None and state.end is None:
        atomic_file.write_json(folder / STATE_FILE, asdict(replace(state, end=_ended("FAILED"))))


def _ended(status: str) -> tuple[str, int]:
    return status, int(steady_time() * 1000)


class Uploader:
    """Sends what MLflow lacks, and stores how far it came."""

    def __init__(self, config: Config) -> None:
        self.config, self.folder = config, config.run_folder
        self.state = UploadState.load(self.folder) or UploadState(secrets.token_hex(16))
        self.sent = self.rejected = 0  # entries: all, and those of them that MLflow does not accept
        self._found = False  # whether the run is known to be in MLflow
        self._tails: dict[str, Tail] = {}
        self._lock = threading.Lock()

    @cached_property
    def client(self) -> MlflowClient:
        # Its own retries would hide an outage for minutes: the caller retries.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_SECONDS))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        # It would print the address, password included, at the end of a run.
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        from mlflow.tracking import MlflowClient  # takes seconds

        logging.getLogger("alembic").setLevel(logging.WARNING)
        return MlflowClient(self.config.tracking_uri)

    def pending(self) -> int:
        """Entries that MLflow lacks."""
        return self.state.count_unsent(self.folder)

    def change(self, **fields: Any) -> None:
        """Change fields of the state, and store it."""
        with self._lock:
            self.state = replace(self.state, **fields)
            try:
                atomic_file.write_json(self.folder / STATE_FILE, asdict(self.state))
            except OSError as error:  # a full disk: what is sent again later changes nothing
                log.warning("%s cannot be written: %s", self.folder / STATE_FILE, first_line(error))

    def send(self) -> None:
        """Send everything that MLflow lacks, in requests of REQUEST_SECONDS at most. Raises what MLflow raises."""
        if not self._found:
            self._find_or_create_run()
            self._found = True
        run_id = str(self.state.run_id)
        if not self.state.described:
            self._describe(run_id)
        for name in METRICS:
            while self._send_lines(run_id, name):
                pass
        end = self.state.end
        if end is None and self.state.status != "RUNNING":
            self.client.update_run(run_id, "RUNNING")
            self.change(status="RUNNING")
        elif end is not None and self.state.status != end[0]:
            self._send_file(run_id, "summary.json")
            self.client.set_terminated(run_id, *end)
            self.sent += 1
            self.change(status=end[0])

    def _find_or_create_run(self) -> None:
        """Find the run by its key. A store that lacks it, perhaps another than before, gets a run with all of it."""
        experiment = self._experiment_id()
        found = self.client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{self.state.key}'", max_results=1)
        run = found[0] if found else None  # perhaps one whose creation MLflow did not confirm
        if run is None or run.info.run_id != self.state.run_id:
            if self.state.run_id is not None:
                uri = redact(self.config.tracking_uri)
                what = f"another store, lacks run {self.state.run_id}: a new run gets all of {self.folder}"
                log.warning("MLflow at %s, %s", uri, what)
            self.change(run_id=None, described=False, marks={})  # stores the key, before MLflow has it
            self._tails.clear()
        if run is None:
            pages, state = (f"`webrl {command} {self.folder.absolute()}`" for command in ("monitor", "status"))
            note = f"- files: `{self.folder.absolute()}`\n- pages, with each stored episode: {pages}\n"
            tags = {KEY_TAG: self.state.key, NOTE_TAG: f"{note}- state of its job: {state}\n"}
            run = self.client.create_run(experiment, tags=tags, run_name=self.config.run.name)
        self.change(run_id=run.info.run_id, status=run.info.status)

    def _experiment_id(self) -> str:
        name = self.config.tracking.experiment
        experiment = self.client.get_experiment_by_name(name)
        if experiment is not None:
            return experiment.experiment_id
        local = self.config.tracking_uri.startswith("sqlite:")
        artifacts = (Path(self.config.run.directory).absolute() / "mlartifacts").as_uri() if local else None
        return self.client.create_experiment(name, artifact_location=artifacts)

    def _describe(self, run_id: str) -> None:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        parameters = [Param(key, redact(str(value))[:500]) for key, value in flatten_config(self.config).items()]
        try:
            self.client.log_batch(run_id, params=parameters)
        except MlflowException as error:  # of another configuration, which the run had when its answer was lost
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            log.error("MLflow cannot store the parameters of %s: %s", self.folder, first_line(error))
        self._send_file(run_id, "config.yaml")
        self._send_file(run_id, OWN_CODE_FILE)
        self.sent += 1
        self.change(described=True)

    def _send_file(self, run_id: str, name: str) -> None:
        if os.path.isfile(self.folder / name):  # False on a disk that fails
            self.client.log_artifact(run_id, str(self.folder / name))

    def _send_lines(self, run_id: str, name: str) -> bool:
        """Send the next lines of a history; False if there are none. Lines that MLflow can never store are left out."""
        from mlflow.entities import Metric, RunTag
        from mlflow.exceptions import MlflowException

        before = self.state.marks.get(name, ())
        tail = self._tails.pop(name, None) or Tail(self.folder / name, before)
        for line in (lines := tail.poll(_LINES)):  # after a failure they are read again, by another Tail
            try:
                milliseconds, step = int(line["finished_at"] * 1000), line["version"]
                points = [Metric(metric, value, milliseconds, step) for metric, value in METRICS[name](line).items()]
                tags = [RunTag("checkpoint", line["checkpoint"])] if "checkpoint" in line else []
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self._reject(name, line, error)
                continue
            try:
                self.client.log_batch(run_id, metrics=points, tags=tags)
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                self._reject(name, line, error)
        self._tails[name] = tail
        if not lines and tail.marks[-1:] == list(before[-1:]):
            return False
        self.sent += len(lines)
        self.change(marks={**self.state.marks, name: tail.marks[-_MARKS:]})
        return True

    def _reject(self, name: str, line: Line, error: Exception) -> None:
        self.rejected += 1
        reason, text = f"{type(error).__name__}: {first_line(error)}", shorten(json.dumps(line), 200)
        log.error("MLflow cannot store a line of %s: %s: %s", self.folder / name, reason, text)


class MLflowTracker:
    """Uploads a run while its job runs, in a thread. Only `close` waits for MLflow, with a limit; nothing raises."""

    def __init__(self, config: Config) -> None:
        """Continue the run that the folder names, else create one."""
        self.config, self.uploader = config, Uploader(config)
        self.error: str | None = None  # of the last request, while MLflow does not answer
        self.uploader.change(end=None)
        self._closing = threading.Event()
        self.thread = threading.Thread(target=self._send_repeatedly, name="mlflow", daemon=True)
        self.thread.start()

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until MLflow has answered."""
        return self.uploader.state.run_id

    def close(self, status: str, seconds: float | None = None) -> None:
        """Log the summary and end the run with an MLflow status: FINISHED, KILLED or FAILED.

        Waits for MLflow for at most `seconds`, by default END_SECONDS, then logs what it has not received and how to
        send it.
        """
        self.uploader.change(end=_ended(status))
        self._closing.set()
        self.thread.join(END_SECONDS if seconds is None else seconds)
        if message := self.pending_message():
            log.warning("%s", message)

    def pending_message(self) -> str | None:
        """What MLflow has not received, and how to send it; None if it has everything."""
        if not (count := self.uploader.pending()):
            return None
        return (
            f"MLflow at {redact(self.config.tracking_uri)} has not received {count} entries of "
            f"{self.config.run_folder}{f' ({self.error})' if self.error else ''}; "
            f"send them with: webrl upload {self.config.run_folder}"
        )

    def _send_repeatedly(self) -> None:
        """Send what the files have gained. After a failure wait, longer each time, and try again."""
        delay = RETRY_SECONDS
        while True:
            closing = self._closing.is_set()
            try:
                self.uploader.send()
                self._note(None)
                seconds, delay = POLL_SECONDS, RETRY_SECONDS
            except Exception as error:  # of MLflow, its database or the network: none may end training
                self._note(error)
                seconds, delay = delay, min(2 * delay, MAX_RETRY_SECONDS)
            if closing:
                return
            self._closing.wait(seconds)

    def _note(self, error: Exception | None) -> None:
        """Log the first failure in a row, and its end."""
        text = None if error is None else shorten(f"{type(error).__name__}: {first_line(error)}", 300)
        uri = redact(self.config.tracking_uri)
        if text is not None and self.error is None:
            log.warning("MLflow at %s does not answer; the files of the run wait for it: %s", uri, text)
        elif text is None and self.error is not None:
            log.info("MLflow at %s answers again", uri)
        self.error = text
