"""Upload a run to MLflow.

A request that is sent twice changes nothing, as each point has the time of its line: every upload may be repeated.
After a rollback MLflow keeps both values of an update.
"""

from __future__ import annotations

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_webrl.config.import_path import OWN_CODE_FILE
from megatron_webrl.config.setting import flatten_config
from megatron_webrl.track.upload import MLFLOW, REQUEST_SECONDS, LineRejected, Point, Uploader, UploadState
from megatron_webrl.util.text import first_line, redact

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

KEY_TAG = "webrl.run_key"
NOTE_TAG = "mlflow.note.content"  # the description on MLflow's pages


def run_id(folder: Path) -> str | None:
    """MLflow's id of a run; None while MLflow does not have it."""
    state = UploadState.load(folder)
    return state.run_id if state else None


class MLflowUploader(Uploader):
    """Sends requests of REQUEST_SECONDS at most."""

    sink = MLFLOW

    @property
    def address(self) -> str:
        return redact(self.config.tracking_uri)

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

    def needs_opening(self) -> bool:
        return True  # tracking.uri may be another store than before

    def open(self) -> None:
        """Find the run by its key. A store that lacks it, perhaps another than before, gets a run with all of it."""
        experiment = self._experiment_id()
        found = self.client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{self.state.key}'", max_results=1)
        run = found[0] if found else None  # perhaps one whose creation MLflow did not confirm
        if run is None or run.info.run_id != self.state.run_id:
            if self.state.run_id is not None:
                what = f"another store, lacks run {self.state.run_id}: a new run gets all of {self.folder}"
                log.warning("MLflow at %s, %s", self.address, what)
            self.forget(run_id=None)  # stores the key, before MLflow has it
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

    def describe(self) -> None:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        parameters = [Param(key, redact(str(value))[:500]) for key, value in flatten_config(self.config).items()]
        try:
            self.client.log_batch(self._run_id, params=parameters)
        except MlflowException as error:  # of another configuration, which the run had when its answer was lost
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            log.error("MLflow cannot store the parameters of %s: %s", self.folder, first_line(error))
        self._send_file("config.yaml")
        self._send_file(OWN_CODE_FILE)

    def log(self, point: Point) -> None:
        from mlflow.entities import Metric, RunTag
        from mlflow.exceptions import MlflowException

        milliseconds = int(point.time * 1000)
        metrics = [Metric(name, value, milliseconds, point.step) for name, value in point.metrics.items()]
        try:
            self.client.log_batch(self._run_id, metrics, tags=[RunTag(*tag) for tag in point.tags.items()])
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            raise LineRejected from error

    def start(self) -> None:
        self.client.update_run(self._run_id, "RUNNING")

    def end(self, status: str, milliseconds: int) -> None:
        self._send_file("summary.json")
        self.client.set_terminated(self._run_id, status, milliseconds)

    @property
    def _run_id(self) -> str:
        return str(self.state.run_id)

    def _send_file(self, name: str) -> None:
        if os.path.isfile(self.folder / name):  # False on a disk that fails
            self.client.log_artifact(self._run_id, str(self.folder / name))


UPLOADER = MLflowUploader
