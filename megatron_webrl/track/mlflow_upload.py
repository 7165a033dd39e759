"""Send mlflow.jsonl of a run to MLflow. A request that is sent twice changes nothing: every upload may be repeated."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.schema import Config
from megatron_webrl.track.mlflow_journal import FILE, Entry, count_entries, read_entries
from megatron_webrl.util import atomic_file
from megatron_webrl.util.redaction import redact
from megatron_webrl.util.text import first_line, shorten

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

STATE_FILE = "mlflow.json"
KEY_TAG = "webrl.run_key"
NOTE_TAG = "mlflow.note.content"  # the description on MLflow's pages
REQUEST_SECONDS = 20
_MAX_METRICS = 1_000  # of one request, a limit of MLflow


@dataclass(frozen=True)
class UploadState:
    """What MLflow has. `key` identifies the run before MLflow has answered with an id."""

    key: str
    run_id: str | None = None
    position: int = 0  # bytes of mlflow.jsonl that MLflow has

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


def count_unsent(folder: Path) -> int:
    """Entries of a run that MLflow does not have."""
    state = UploadState.load(folder)
    return count_entries(folder, state.position if state else 0)


def run_id(folder: Path) -> str | None:
    """MLflow's id of a run; None while MLflow does not have it."""
    state = UploadState.load(folder)
    return state.run_id if state else None


class _RejectedError(Exception):
    """MLflow can never store an entry."""


class Uploader:
    """Sends entries in order and stores how far it came. Every call may take REQUEST_SECONDS or more."""

    def __init__(self, config: Config, run_id: str | None = None) -> None:
        """`run_id`: the run to continue if the folder does not name one."""
        self.config, self.folder = config, config.run_folder
        self.state = UploadState.load(self.folder) or UploadState(secrets.token_hex(16), run_id)
        self.sent = 0  # entries, those that MLflow does not accept among them
        self.rejected = 0  # entries that MLflow does not accept
        self._checked = False  # whether MLflow was asked for the run that the folder names
        self._client: MlflowClient | None = None

    @property
    def client(self) -> MlflowClient:
        if self._client is None:
            # Its own retries would hide an outage for minutes: the caller retries.
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_SECONDS))
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
            # It would print the address, password included, at the end of a run.
            os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
            from mlflow.tracking import MlflowClient  # takes seconds

            logging.getLogger("alembic").setLevel(logging.WARNING)
            self._client = MlflowClient(self.config.tracking_uri)
        return self._client

    def pending(self) -> int:
        """Entries that MLflow does not have."""
        return count_entries(self.folder, self.state.position)

    def send_some(self) -> bool:
        """Send at most one request's worth of entries; False if there were none. Raises what MLflow raises."""
        if self.state.run_id is not None and not self._checked:
            self._check_run(self.state.run_id)
        self._checked = True
        entries = read_entries(self.folder, self.state.position)
        if not entries:
            return False
        if self.state.run_id is None:
            self._store(UploadState(self.state.key, self._find_or_create_run(), self.state.position))
        batch = _metric_batch(entries) or entries[:1]
        try:
            self._send([entry for _, entry in batch])
        except _RejectedError as error:
            if len(batch) > 1:  # find out which entry it is
                batch = batch[:1]
                self._send_or_reject(batch[0][1])
            else:
                self._reject(batch[0][1], error)
        self._store(UploadState(self.state.key, self.state.run_id, batch[-1][0]))
        self.sent += len(batch)
        return True

    def _check_run(self, run_id: str) -> None:
        """Start from the first entry if MLflow lacks the run: tracking.uri names another store than before."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            uri, path = redact(self.config.tracking_uri), self.folder / FILE
            log.warning(
                "MLflow at %s, another store, lacks run %s: a new run gets all entries of %s", uri, run_id, path
            )
            self._store(UploadState(self.state.key))

    def _send_or_reject(self, entry: Entry | None) -> None:
        try:
            self._send([entry])
        except _RejectedError as error:
            self._reject(entry, error)

    def _reject(self, entry: Entry | None, error: _RejectedError) -> None:
        self.rejected += 1
        text = shorten(json.dumps(entry), 200)
        log.error("MLflow cannot store an entry of %s: %s: %s", self.folder / FILE, first_line(error), text)

    def _send(self, entries: Sequence[Entry | None]) -> None:
        """Send one entry of any kind, or several of metrics. Raises _RejectedError if MLflow cannot ever store one."""
        from mlflow.exceptions import MlflowException

        try:
            request = self._request(entries)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _RejectedError(f"{type(error).__name__}: {first_line(error)}") from error
        try:
            request()
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            raise _RejectedError(first_line(error)) from error

    def _request(self, entries: Sequence[Entry | None]) -> Callable[[], object]:
        """The call of MLflow that stores the entries."""
        from mlflow.entities import Metric, Param, RunTag

        run_id, first = self.state.run_id, entries[0]
        assert run_id is not None
        if first is None:
            raise ValueError("the line is damaged")
        if "metrics" in first:
            metrics = [
                Metric(name, value, entry["time"], entry["step"])
                for entry in entries if entry is not None
                for name, value in entry["metrics"].items()
            ]  # fmt: skip
            return partial(self.client.log_batch, run_id, metrics=metrics)
        if "params" in first:
            params = [Param(name, value) for name, value in first["params"].items()]
            return partial(self.client.log_batch, run_id, params=params)
        if "tags" in first:
            tags = [RunTag(name, value) for name, value in first["tags"].items()]
            return partial(self.client.log_batch, run_id, tags=tags)
        if "artifact" in first:
            if not (path := self.folder / first["artifact"]).is_file():
                raise ValueError(f"{path} is not a file")
            return partial(self.client.log_artifact, run_id, str(path), first["folder"] or None)
        return partial(self.client.set_terminated, run_id, first["status"], first["time"])

    def _find_or_create_run(self) -> str:
        """The run with this key: one whose creation MLflow did not confirm, else a new one."""
        experiment = self._experiment_id()
        found = self.client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{self.state.key}'", max_results=1)
        if found:
            return found[0].info.run_id
        self._store(self.state)  # the key, before MLflow has it
        tags = {KEY_TAG: self.state.key, NOTE_TAG: _note(self.folder.absolute())}
        run = self.client.create_run(experiment, tags=tags, run_name=self.config.run.name)
        return run.info.run_id

    def _experiment_id(self) -> str:
        name = self.config.tracking.experiment
        experiment = self.client.get_experiment_by_name(name)
        if experiment is not None:
            return experiment.experiment_id
        local = self.config.tracking_uri.startswith("sqlite:")
        artifacts = (Path(self.config.run.directory).absolute() / "mlartifacts").as_uri() if local else None
        return self.client.create_experiment(name, artifact_location=artifacts)

    def _store(self, state: UploadState) -> None:
        self.state = state
        try:
            atomic_file.write_json(self.folder / STATE_FILE, asdict(state))
        except OSError as error:  # a full disk: what is sent again later changes nothing
            log.warning("%s cannot be written: %s", self.folder / STATE_FILE, first_line(error))


def _note(folder: Path) -> str:
    """How to look at the run, as Markdown."""
    pages, state = (f"`webrl {command} {folder}`" for command in ("monitor", "status"))
    return f"- files: `{folder}`\n- pages, with each stored episode: {pages}\n- state of its job: {state}\n"


def _metric_batch(entries: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """The first entries, as long as they hold metrics, of at most one request."""
    batch: list[tuple[int, Any]] = []
    count = 0
    for position, entry in takewhile(lambda each: each[1] is not None and "metrics" in each[1], entries):
        count += len(entry["metrics"])
        if batch and count > _MAX_METRICS:
            break
        batch.append((position, entry))
    return batch
