"""Uploads to an MLflow that is away, hangs, rejects, or is another one; and from a disk that fails."""

from __future__ import annotations

import errno
import logging
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from mlflow.tracking import MlflowClient

from megatron_webrl.cli import main
from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.track import summary
from megatron_webrl.track import upload as track_upload
from megatron_webrl.track.evaluations import EvaluationLog, EvaluationRequest, aggregate_results
from megatron_webrl.track.metrics import UPDATES_FILE
from megatron_webrl.track.mlflow_upload import MLflowUploader
from megatron_webrl.track.upload import Tracker, UploadState, count_unsent
from tests.file_faults import FileFaults
from tests.track.mlflow_server import black_hole, mlflow_server
from tests.waiting import until

UPDATES = 40


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of MLflow; a new one takes seconds."""
    return tmp_path_factory.mktemp("mlflow") / "mlflow.db"


@pytest.fixture
def store(database: Path) -> str:
    return f"sqlite:///{database}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(track_upload, "MAX_RETRY_SECONDS", 1.0)
    monkeypatch.setattr(track_upload, "POLL_SECONDS", 0.1)


def make_config(folder: Path, uri: str) -> Config:
    config = Config()
    config.run.directory, config.tracking.uri = str(folder), uri
    config.run_folder.mkdir()
    save_config(config, config.run_folder / "config.yaml")
    return config


@pytest.fixture
def config(tmp_path: Path, store: str) -> Config:
    return make_config(tmp_path, store)


def log_updates(config: Config, versions: range, time_of_first: float = 1e9) -> None:
    """Log updates as the trainer does, a second each; those after the first version are rolled back."""
    updates = summary.open_updates(config.run_folder, versions[0] - 1)
    for version in versions:
        updates.append(update_line(version, time_of_first + version))
    updates.close()


def update_line(version: int, finished_at: float = 1e9, **metrics: float) -> dict[str, Any]:
    extra = metrics or {"reward": version / 10, "loss": -version}
    return {"version": version, "finished_at": finished_at, "seconds": {}, "extra": extra}


def wait_until_sent(tracker: Tracker) -> None:
    """Wait until MLflow has all entries, and the run's folder says so."""
    until(lambda: not count_unsent(tracker.config.run_folder), lambda: f"all entries in MLflow: {tracker.error}")


def upload(config: Config, uri: str) -> int:
    config.tracking.uri = uri
    save_config(config, config.run_folder / "config.yaml")
    return main(["upload", str(config.run_folder)])


def history(uri: str, run_id: str | None, name: str = "reward") -> list[int]:
    """The steps of a metric as MLflow has them."""
    assert run_id is not None
    return sorted(metric.step for metric in MlflowClient(uri).get_metric_history(run_id, name))


def check_run(uri: str, run_id: str | None, status: str = "FINISHED") -> list[str]:
    """The run's status and parameters are there; returns the names of its files."""
    run = MlflowClient(uri).get_run(str(run_id))
    assert (run.info.status, run.data.params["run.seed"]) == (status, "0")
    return [each.path for each in MlflowClient(uri).list_artifacts(run.info.run_id)]


@pytest.mark.slow
def test_a_server_that_fails_gets_everything_once_it_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "megatron_webrl"), mlflow_server(tmp_path / "server", start=False) as server:
        tracker = Tracker(config := make_config(tmp_path, server.uri))
        log_updates(config, range(1, UPDATES))
        until(lambda: tracker.error is not None, "a refused connection", 30)
        server.start()
        wait_until_sent(tracker)
        until(lambda: tracker.error is None, "an answer")
        server.pause()
        log_updates(config, range(UPDATES, 2 * UPDATES))
        until(lambda: tracker.error is not None, "a time limit", 30)
        server.resume()
        wait_until_sent(tracker)
        tracker.close("FINISHED")
        assert history(server.uri, tracker.run_id) == list(range(1, 2 * UPDATES))  # each once
        assert check_run(server.uri, tracker.run_id) == ["config.yaml"]
    assert caplog.text.count("does not answer; the files of the run wait for it") == 2
    assert caplog.text.count("answers again") == 2


def test_the_end_waits_up_to_a_limit_for_a_black_hole_and_says_how_to_send_the_rest_later(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.setattr(track_upload, "END_SECONDS", 1.0)
    with black_hole() as uri:
        config = make_config(tmp_path, uri)
        started = time.monotonic()
        tracker = Tracker(config)
        log_updates(config, range(1, UPDATES))
        assert time.monotonic() - started < 1.0
        tracker.close("FINISHED")
        assert time.monotonic() - started < 4.0
        # The description, updates and the end.
        assert f"MLflow at {uri} has not received {UPDATES + 1} entries of {config.run_folder}" in caplog.text
        assert f"send them with: webrl upload {config.run_folder}" in caplog.text
        assert upload(config, uri) == 1
        assert f"{UPDATES + 1} of {UPDATES + 1} entries wait for the next webrl upload" in capsys.readouterr().err
    assert upload(config, store) == 0
    assert f"{UPDATES + 1} entries sent" in capsys.readouterr().out
    state = UploadState.load(config.run_folder)
    assert state is not None
    assert history(store, state.run_id) == list(range(1, UPDATES))
    assert count_unsent(config.run_folder) == 0


def test_a_restarted_trainer_continues_the_run_and_sends_updates_that_replace_others_alone(config: Config, store: str):
    first = Tracker(config)
    log_updates(config, range(1, 7))
    wait_until_sent(first)
    log_updates(config, range(4, 6), time_of_first=2e9)  # a trainer that starts again from version 3
    second = MLflowUploader(config)
    assert second.pending() == 2
    second.send()
    assert (second.sent, second.pending()) == (2, 0)
    log_updates(config, range(6, 8), time_of_first=2e9)
    first.close("FAILED")  # of a process that had read the file before it was cut off
    wait_until_sent(first)
    third = Tracker(config)
    until(lambda: MlflowClient(store).get_run(str(first.run_id)).info.status == "RUNNING", "a run that continues")
    third.close("KILLED")
    again = MLflowUploader(config)
    again.state = UploadState(again.state.key)  # as if MLflow's answers had been lost, the run's id among them
    again.send()  # changes nothing
    assert first.run_id == third.run_id == again.state.run_id
    points = MlflowClient(store).get_metric_history(str(first.run_id), "reward")
    assert sorted((point.step, point.timestamp > 1.5e12) for point in points) == [
        *((step, False) for step in (1, 2, 3)), (4, False), (4, True), (5, False), (5, True), (6, False), (6, True),
        (7, True),
    ]  # fmt: skip


def test_a_run_whose_creation_was_not_confirmed_is_found_by_the_next_start(config: Config, store: str):
    config.tracking.experiment = "of an answer that was lost"
    first = MLflowUploader(config)
    create = first.client.create_run

    def lose(*arguments: Any, **options: Any) -> None:
        create(*arguments, **options)
        raise ConnectionResetError

    with mock.patch.object(first.client, "create_run", lose), pytest.raises(ConnectionResetError):
        first.send()
    second = MLflowUploader(config)
    second.send()
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    assert experiment is not None
    assert [run.info.run_id for run in client.search_runs([experiment.experiment_id])] == [second.state.run_id]


def test_a_resume_with_another_store_sends_the_whole_run_there(
    config: Config, tmp_path: Path, database: Path, store: str, caplog: pytest.LogCaptureFixture
):
    config.tracking.experiment = "of both stores"
    shutil.copy(database, tmp_path / "other.db")
    first = Tracker(config)
    log_updates(config, range(1, 4))
    wait_until_sent(first)
    first.close("KILLED")
    config.tracking.uri = f"sqlite:///{tmp_path / 'other.db'}"
    second = Tracker(config)
    log_updates(config, range(4, 6))
    wait_until_sent(second)
    second.close("FINISHED")
    assert second.run_id not in (None, first.run_id)
    assert history(config.tracking.uri, second.run_id) == [1, 2, 3, 4, 5]
    check_run(config.tracking.uri, second.run_id)
    assert caplog.text.count(f"other.db, another store, lacks run {first.run_id}: a new run gets all of") == 1
    assert upload(config, store) == 0
    assert history(config.tracking.uri, first.run_id) == [1, 2, 3, 4, 5]


def test_a_run_whose_trainer_was_killed_is_failed_once_it_is_uploaded(config: Config, store: str):
    killed = Tracker(config)
    updates = summary.open_updates(config.run_folder)
    metrics = {"steps_mean": 1.0, "staleness_max": 0, "staleness_mean": 0.0}
    updates.append(*(update_line(version) | metrics for version in range(1, 4)))
    wait_until_sent(killed)
    with (config.run_folder / UPDATES_FILE).open("a") as file:
        file.write('{"version": 4, "rew')  # cut off by the kill
    for _ in range(2):  # once for each launch that fails
        summary.ensure_written(config.run_folder, "failed: trainer-0 killed by SIGKILL")
    assert count_unsent(config.run_folder) == 1
    assert upload(config, store) == 0
    assert "summary.json" in check_run(store, killed.run_id, "FAILED")


def test_lines_for_which_the_disk_has_no_room_are_sent_once_it_has(config: Config, store: str):
    tracker = Tracker(config)
    updates, evaluations = summary.open_updates(config.run_folder), EvaluationLog(config.run_folder)
    updates.append(update_line(1))
    wait_until_sent(tracker)
    line = aggregate_results(EvaluationRequest(1, "during", 2, 1, 1.0, version=3), [], 1.0)
    with FileFaults(config.run_folder, 1, errno.ENOSPC, until=1_000_000):
        updates.append(update_line(2), update_line(3))
        evaluations.append(line, [])
    assert not evaluations.history.path.read_text()
    updates.sync()
    evaluations.history.sync()
    tracker.close("FINISHED")
    assert history(store, tracker.run_id) == [1, 2, 3]
    assert history(store, tracker.run_id, "evaluation/missing") == [3]


def test_lines_that_mlflow_cannot_store_hold_up_no_others(config: Config, store: str, caplog: pytest.LogCaptureFixture):
    updates = summary.open_updates(config.run_folder)
    updates.append(update_line(1), update_line(2, **{"a metric?": 1.0}), update_line(3))
    with (config.run_folder / UPDATES_FILE).open("a") as file:
        file.write("a damaged line\n")
    updates.append({"strange": 1}, update_line(4))
    uploader = MLflowUploader(config)
    uploader.send()
    assert history(store, uploader.state.run_id) == [1, 3, 4]
    assert (uploader.rejected, uploader.pending()) == (2, 0)
    for reason in ("a metric?", "has a broken line", "KeyError"):
        assert reason in caplog.text
