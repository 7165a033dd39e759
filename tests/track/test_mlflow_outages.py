import errno
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from megatron_webrl.cli import main
from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.track import mlflow_run, summary
from megatron_webrl.track.mlflow_journal import FILE
from megatron_webrl.track.mlflow_run import MLflowTracker
from megatron_webrl.track.mlflow_upload import Uploader, UploadState
from megatron_webrl.util.history import History
from tests.track.mlflow_server import MLflowServer, black_hole, mlflow_server
from tests.util.test_history import file_size_limit
from tests.waiting import until
from tools.drills.file_faults import FileFaults

UPDATES = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow") / "server") as started:
        yield started


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(mlflow_run, "MAX_RETRY_SECONDS", 1.0)


def make_config(folder: Path, uri: str) -> Config:
    config = Config()
    config.run.directory, config.tracking.uri = str(folder), uri
    config.run_folder.mkdir()
    save_config(config, config.run_folder / "config.yaml")
    return config


def log_updates(tracker: MLflowTracker, versions: range) -> float:
    """Log metrics of updates; returns the seconds that the caller waited."""
    started = time.monotonic()
    for version in versions:
        tracker.log_metrics({"reward": version / 10, "loss": -version}, version)
    return time.monotonic() - started


def history(uri: str, run_id: str | None, name: str = "reward") -> list[int]:
    """The steps of a metric as MLflow has them."""
    assert run_id is not None
    return sorted(metric.step for metric in MlflowClient(uri).get_metric_history(run_id, name))


@pytest.mark.parametrize("outage", ["stopped", "paused"])
def test_a_server_that_fails_costs_no_time_and_gets_everything_once_it_answers(
    tmp_path: Path, server: MLflowServer, outage: str, caplog: pytest.LogCaptureFixture
):
    config = make_config(tmp_path, server.uri)
    with caplog.at_level(logging.INFO, "megatron_webrl"):
        tracker = MLflowTracker(config, None)
        log_updates(tracker, range(1, UPDATES))
        until(lambda: not tracker.uploader.pending(), "the first updates in MLflow")
        (server.stop if outage == "stopped" else server.pause)()
        assert log_updates(tracker, range(UPDATES, 2 * UPDATES)) < 1.0
        until(lambda: tracker.error is not None, "a failure", 30)
        (server.start if outage == "stopped" else server.resume)()
        until(lambda: not tracker.uploader.pending(), lambda: f"the rest in MLflow: {tracker.error}")
        tracker.close("FINISHED")
    assert history(server.uri, tracker.run_id) == list(range(1, 2 * UPDATES))  # each once
    run = MlflowClient(server.uri).get_run(str(tracker.run_id))
    assert (run.info.status, run.data.params["run.seed"]) == ("FINISHED", "0")
    assert [each.path for each in MlflowClient(server.uri).list_artifacts(run.info.run_id)] == ["config.yaml"]
    assert caplog.text.count("does not answer; entries wait in") == 1
    assert "answers again" in caplog.text


def test_the_end_waits_up_to_a_limit_for_a_black_hole_and_says_how_to_send_the_rest_later(
    tmp_path: Path, server: MLflowServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.setattr(mlflow_run, "END_SECONDS", 1.0)
    with black_hole() as uri:
        config = make_config(tmp_path, uri)
        started = time.monotonic()
        tracker = MLflowTracker(config, None)
        log_updates(tracker, range(1, UPDATES))
        assert time.monotonic() - started < 1.0
        tracker.close("FINISHED")
        assert time.monotonic() - started < 4.0
        # Parameters, configuration, updates and the end.
        assert f"MLflow at {uri} has not received {UPDATES + 2} entries of {config.run_folder / FILE}" in caplog.text
        assert f"send them with: webrl upload {config.run_folder}" in caplog.text
        assert main(["upload", str(config.run_folder)]) == 1
        assert f"{UPDATES + 2} of {UPDATES + 2} entries wait for the next webrl upload" in capsys.readouterr().err
    config.tracking.uri = server.uri
    save_config(config, config.run_folder / "config.yaml")
    assert main(["upload", str(config.run_folder)]) == 0
    assert f"{UPDATES + 2} entries sent" in capsys.readouterr().out
    state = UploadState.load(config.run_folder)
    assert state is not None
    assert history(server.uri, state.run_id) == list(range(1, UPDATES))


def test_a_restarted_trainer_continues_the_run_and_an_upload_that_is_repeated_changes_nothing(
    tmp_path: Path, server: MLflowServer
):
    config = make_config(tmp_path, server.uri)
    first = MLflowTracker(config, None)
    log_updates(first, range(1, 4))
    first.close_failed()
    until(lambda: not first.uploader.pending(), "the first attempt in MLflow")
    second = MLflowTracker(config, None)
    log_updates(second, range(4, 6))
    second.close("KILLED")
    assert second.run_id == first.run_id
    again = Uploader(config)
    again.state = UploadState(again.state.key)  # as if MLflow's answers had been lost, the run's id among them
    while again.send_some():
        pass
    assert again.state.run_id == first.run_id
    assert history(server.uri, first.run_id) == [1, 2, 3, 4, 5]


def test_a_resume_with_another_store_sends_the_whole_run_there(
    tmp_path: Path, server: MLflowServer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    config = make_config(tmp_path, server.uri)
    first = MLflowTracker(config, None)
    log_updates(first, range(1, 4))
    until(lambda: not first.uploader.pending(), "the first updates in MLflow")
    first.close("KILLED")
    config.tracking.uri = f"sqlite:///{tmp_path / 'other.db'}"
    second = MLflowTracker(config, first.run_id)
    log_updates(second, range(4, 6))
    until(lambda: not second.uploader.pending(), "all updates in the other store")
    second.close("FINISHED")
    assert second.run_id not in (None, first.run_id)
    assert history(config.tracking.uri, second.run_id) == [1, 2, 3, 4, 5]
    run = MlflowClient(config.tracking.uri).get_run(str(second.run_id))
    assert (run.info.status, run.data.params["run.seed"]) == ("FINISHED", "0")
    assert caplog.text.count(f"other.db, another store, lacks run {first.run_id}: a new run gets all entries") == 1
    config.tracking.uri = server.uri
    save_config(config, config.run_folder / "config.yaml")
    assert main(["upload", str(config.run_folder)]) == 0
    assert f"has run {first.run_id}: 10 entries sent" in capsys.readouterr().out
    assert history(config.tracking.uri, first.run_id) == [1, 2, 3, 4, 5]


def test_a_run_whose_trainer_was_killed_is_failed_once_it_is_uploaded(tmp_path: Path, server: MLflowServer):
    config = make_config(tmp_path, server.uri)
    killed = MLflowTracker(config, None)
    log_updates(killed, range(1, 4))
    until(lambda: not killed.uploader.pending(), "the updates in MLflow")
    with (config.run_folder / FILE).open("a") as file:
        file.write('{"metrics": {"rew')  # cut off by the kill
    for _ in range(2):  # once for each launch that fails
        summary.ensure_written(config.run_folder, "failed: trainer-0 killed by SIGKILL")
    assert main(["upload", str(config.run_folder)]) == 0
    client = MlflowClient(server.uri)
    assert killed.run_id is not None
    assert client.get_run(killed.run_id).info.status == "FAILED"
    assert "summary.json" in [each.path for each in client.list_artifacts(killed.run_id)]
    ends = [line for line in (config.run_folder / FILE).read_text().splitlines() if '"FAILED"' in line]
    assert len(ends) == 1


def test_a_run_ends_although_its_disk_has_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = make_config(tmp_path, "http://127.0.0.1:9")  # nobody listens
    tracker = MLflowTracker(config, None)
    log_updates(tracker, range(1, 4))
    with FileFaults(config.run_folder, 1, errno.EROFS, until=1_000_000):
        tracker.close("FINISHED")
    assert "cannot be read, so that MLflow may lack its last entries: [Errno 30]" in caplog.text


def test_entries_for_which_the_disk_has_no_room_until_the_end_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = make_config(tmp_path, "http://127.0.0.1:9")  # nobody listens
    tracker = MLflowTracker(config, None)
    with file_size_limit(tracker.journal.size):
        log_updates(tracker, range(1, 4))
        tracker.close("FINISHED")
    path = config.run_folder / FILE
    assert f"has not received 6 entries of {path}, 4 of which could not be written there" in caplog.text


def test_entries_that_mlflow_can_never_store_are_reported_and_do_not_hold_up_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = make_config(tmp_path, "")
    journal = History(config.run_folder / FILE)
    good: dict[str, Any] = {"metrics": {"reward": 1.0}, "step": 1, "time": 1}
    journal.append(good, {**good, "metrics": {"a metric?": 1.0}}, {**good, "step": 2})
    with (config.run_folder / FILE).open("a") as file:
        file.write("a damaged line\n")
    journal.append({"artifact": "missing.html", "folder": ""}, {"strange": 1}, {**good, "step": 3})
    uploader = Uploader(config)
    while uploader.send_some():
        pass
    assert history(config.tracking_uri, uploader.state.run_id) == [1, 2, 3]
    assert uploader.rejected == 4
    for reason in ("a metric?", "the line is damaged", "missing.html is not a file", "KeyError"):
        assert reason in caplog.text
