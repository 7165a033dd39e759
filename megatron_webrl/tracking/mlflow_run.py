"""The MLflow run of a training run: parameters, metrics, the configuration, a few trajectories."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from megatron_webrl.config.load import flatten_config
from megatron_webrl.config.schema import Config
from megatron_webrl.tracking.metrics import UpdateMetrics
from megatron_webrl.tracking.trajectory_page import write_trajectory_page
from megatron_webrl.types import Trajectory

log = logging.getLogger(__name__)


class MLflowTracker:
    """Writes one MLflow run. All metrics of an update are sent in one call: each call is a transaction."""

    def __init__(self, config: Config, resume: str | None, decode: Callable[[np.ndarray], str]) -> None:
        """Create a run, or reopen the run with id `resume`. `decode` turns token ids into text for trajectory pages."""
        self.config, self.decode = config, decode
        self.pages_folder = config.run_folder / "trajectories"
        self.pages_folder.mkdir(parents=True, exist_ok=True)
        uri = config.tracking_uri
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self.client = MlflowClient(uri)
        if resume is not None:
            self.run_id = resume
            self.client.set_terminated(resume, "RUNNING")
            return
        self.run_id = self.client.create_run(self._experiment_id(uri), run_name=config.run.name).info.run_id
        parameters = [Param(key, str(value)[:500]) for key, value in flatten_config(config).items()]
        self.client.log_batch(self.run_id, params=parameters)
        self.client.log_artifact(self.run_id, str(config.run_folder / "config.yaml"))

    def log_update(self, update: UpdateMetrics, trajectories: Sequence[Trajectory]) -> None:
        self.log_metrics(update.mlflow_metrics(), update.version)
        for trajectory in trajectories:
            name = f"version-{update.version:06d}-ticket-{trajectory.ticket}-{trajectory.index}.html"
            path = self.pages_folder / name
            write_trajectory_page(path, trajectory, self.decode)
            self.client.log_artifact(self.run_id, str(path), "trajectories")

    def log_metrics(self, values: Mapping[str, float], version: int) -> None:
        """Log metrics with the policy version as the MLflow step."""
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, version) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self, status: str) -> None:
        """Store the summary and end the run with an MLflow status: FINISHED, KILLED or FAILED."""
        summary = self.config.run_folder / "summary.json"
        if summary.is_file():
            self.client.log_artifact(self.run_id, str(summary))
        self.client.set_terminated(self.run_id, status)

    def _experiment_id(self, uri: str) -> str:
        name = self.config.tracking.experiment
        experiment = self.client.get_experiment_by_name(name)
        if experiment is not None:
            return experiment.experiment_id
        local = uri.startswith("sqlite:")
        artifacts = (Path(self.config.run.directory).absolute() / "mlartifacts").as_uri() if local else None
        return self.client.create_experiment(name, artifact_location=artifacts)
