"""Uploads to TensorBoard and W&B: what their own files hold after a resume with a rollback, and sinks that fail."""

from __future__ import annotations

import importlib.util
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.schema import Config, TrackingConfig
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.launch.validation import check_sinks
from megatron_webrl.track import upload
from megatron_webrl.track.tensorboard_upload import TensorBoardUploader
from megatron_webrl.track.upload import STATE_FILES, Point, Tracker, Uploader, count_unsent
from megatron_webrl.track.wandb_upload import WandbUploader
from tests.track.test_mlflow_outages import log_updates, make_config
from tests.waiting import until

CANARY = "canary-of-a-secret"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "POLL_SECONDS", 0.1)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("CANARY_TOKEN", CANARY)


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"the optional package {package} is not installed")


def make_run(folder: Path, *sinks: str) -> Config:
    config = make_config(folder, f"sqlite:///{folder}/mlflow.db")
    config.tracking.also, config.tasks.environments = list(sinks), [CANARY]  # type: ignore[attr-defined]
    return config


def send_with_rollback(kind: type[Uploader], config: Config) -> None:
    """Log updates 1 to 30, restart from version 24 before the rollback is made, and log up to 27 and then 28."""
    first = kind(config)
    log_updates(config, range(1, 29))
    first.send()
    first.close()  # W&B's process refuses a second run of the id
    log_updates(config, range(29, 31))
    second = kind(config)  # of a process that has started before the histories are cut off
    second.send()
    log_updates(config, range(25, 28), time_of_first=2e9)
    second.send()
    second.close()
    third = kind(config)
    log_updates(config, range(28, 29), time_of_first=2e9)
    third.change(end=("FINISHED", 0))
    third.send()
    assert (third.pending(), third.state.key) == (0, first.state.key)


EXPECTED = [(step, 1e9 + step if step < 25 else 2e9 + step, step / 10) for step in range(1, 29)]


@needs("tensorboard")
def test_tensorboard_shows_each_update_once_after_a_rollback(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_run(tmp_path, "tensorboard")
    send_with_rollback(TensorBoardUploader, config)
    shown = EventAccumulator(str(config.run_folder / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    points = shown.Scalars("reward")
    assert [(point.step, point.wall_time, round(point.value, 4)) for point in points] == EXPECTED
    texts = {tag: shown.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in shown.Tags()["tensors"]}
    assert texts["status/text_summary"] == "FINISHED"
    assert "run.seed: 0" in texts["settings/text_summary"]
    assert CANARY not in texts["settings/text_summary"]


@needs("tensorboard")
def test_tensorboard_replaces_more_lines_than_there_are_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(upload, "_MARKS", 4)
    config = make_run(tmp_path, "tensorboard")
    send_with_rollback(TensorBoardUploader, config)
    shown = EventAccumulator(str(config.run_folder / "tensorboard"), {"scalars": 0}).Reload()
    assert [(point.step, point.wall_time, round(point.value, 4)) for point in shown.Scalars("reward")] == EXPECTED


@needs("tensorboard")
def test_a_file_that_cannot_be_written_costs_no_point_and_no_other_sink(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_run(tmp_path, "tensorboard")
    blocked = config.run_folder / "tensorboard"
    blocked.write_text("a file where the folder should be")
    tracker = Tracker(config)
    log_updates(config, range(1, 4))
    until(lambda: not count_unsent(config.run_folder), "updates in MLflow", 60)
    until(lambda: tracker.error is not None and "TensorBoard does not answer" in tracker.error, "an error")
    blocked.unlink()
    until(lambda: not count_unsent(config.run_folder, "tensorboard"), "updates in TensorBoard", 60)
    tracker.close("FINISHED")
    assert [point.step for point in EventAccumulator(str(blocked)).Reload().Scalars("reward")] == [1, 2, 3]
    assert caplog.text.count("TensorBoard at") == 1


@needs("wandb")
def test_the_newest_offline_folder_of_wandb_has_each_update_once_after_a_rollback(tmp_path: Path):
    config = make_run(tmp_path, "wandb")
    send_with_rollback(WandbUploader, config)
    [file] = (config.run_folder / "wandb" / "latest-run").resolve().glob("*.wandb")
    assert CANARY.encode() not in file.read_bytes()
    records = read_wandb(file)
    rows = [{item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            for record in records if record.HasField("history")]  # fmt: skip
    points = [(int(row["update"]), float(row["_timestamp"]), float(row["reward"])) for row in rows]
    assert points == EXPECTED
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.run_id, run.project) for run in runs} == {(WandbUploader(config).state.key, "megatron_webrl")}
    written = {item.key or "/".join(item.nested_key): item.value_json
               for record in records for item in record.config.update}  # fmt: skip
    assert written["run.seed"] == "0"
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


def read_wandb(path: Path) -> list[Any]:
    """The records of a .wandb file: chunks as of LevelDB's log, in blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, found, parts = path.read_bytes(), 7, [], b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        if not kind:
            break
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


@needs("wandb")
def test_without_an_account_the_reason_is_named_and_nothing_asks_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    import wandb

    wandb.teardown()
    try:
        with pytest.raises(PermissionError, match="WANDB_API_KEY"):
            WandbUploader(make_run(tmp_path, "wandb")).send()
    finally:
        wandb.teardown()


class Hanging(WandbUploader):
    def open(self) -> None:
        time.sleep(600)


class Raising(WandbUploader):
    def open(self) -> None:
        self._is_open = True

    def describe(self) -> None:
        pass

    def log(self, point: Point) -> None:
        raise RuntimeError("of a sink")


@pytest.mark.parametrize("kind", [Hanging, Raising])
def test_a_sink_that_hangs_or_raises_costs_no_other_and_the_end_has_a_limit(
    kind: type[Uploader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("megatron_webrl.track.wandb_upload.UPLOADER", kind)
    config = make_run(tmp_path, "wandb")
    tracker = Tracker(config)
    log_updates(config, range(1, 4))
    until(lambda: not count_unsent(config.run_folder), "updates in MLflow", 60)
    started = time.monotonic()
    tracker.close("FINISHED", seconds=3.0)
    assert time.monotonic() - started < 10
    message = tracker.pending_message()
    assert message is not None
    assert message.startswith(f"W&B at {config.run_folder / 'wandb'} has not received {5 if kind is Hanging else 4} ")
    assert "MLflow" not in message
    assert caplog.text.count("does not answer") == (kind is Raising)


def test_a_missing_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    with pytest.raises(ConfigError, match=r"tracking.also=wandb .*megatron_webrl\[wandb\]"):
        check_sinks(TrackingConfig(also=["wandb"]))
    check_sinks(TrackingConfig())


def test_an_unknown_sink_is_refused_and_mlflow_is_the_default():
    config = Config()
    assert config.tracking.also == []
    config.tracking.also = ["comet"]
    with pytest.raises(ConfigError, match=r"tracking.also: 'comet' is not one of tensorboard, wandb"):
        check_sections(config)
    assert {sink for sink in STATE_FILES if sink != upload.MLFLOW} == {"tensorboard", "wandb"}
