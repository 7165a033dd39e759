"""The limit on consecutive trainer failures, and the record of a failure that all machines share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.launch import trainer_failure
from megatron_webrl.launch.role_supervisor import with_attempt
from megatron_webrl.track import events, summary
from megatron_webrl.track.events import EventLog
from tests.job_control import connect, control_service


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlClient]:
    with control_service(tmp_path) as address:
        yield connect(address, "node-0")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config()
    config.run.directory, config.run.name, config.run.max_trainer_restarts = str(tmp_path), "here", 2
    (config.run_folder / "checkpoints").mkdir(parents=True)
    return config


def complete(config: Config, name: str) -> None:
    """Mark a checkpoint of that name as complete."""
    (config.run_folder / "checkpoints" / "latest").write_text(f"{name}\n")


def test_a_complete_checkpoint_resets_the_count_of_failures(control: ControlClient, config: Config) -> None:
    journal = EventLog(config.run_folder)
    failures = [
        trainer_failure.record_failure(control, config, journal, attempt, "trainer-0", f"failure {attempt}")
        for attempt in (0, 1)
    ]
    complete(config, "version-000002")
    failures += [
        trainer_failure.record_failure(control, config, journal, attempt, "trainer-1", f"failure {attempt}")
        for attempt in (2, 3, 4)
    ]
    assert [failure.consecutive_failures for failure in failures] == [1, 2, 1, 2, 3]
    assert [failure.checkpoint for failure in failures] == ["", "", *["version-000002"] * 3]
    assert [failure.job_outcome(config) is None for failure in failures] == [True] * 4 + [False]
    assert failures[-1].job_outcome(config) == (
        "failed: the trainer failed 3 times in a row without a new checkpoint (run.max_trainer_restarts=2); "
        "the last time: failure 4"
    )
    summary.write_summary(config.run_folder, "failed", None)
    found = summary.read_summary(config.run_folder)["restarts"]
    assert [(each["role"], each["reason"]) for each in found] == [
        ("trainer-0", "failure 0"), ("trainer-0", "failure 1"), ("trainer-1", "failure 2"), ("trainer-1", "failure 3"),
    ]  # fmt: skip
    assert events.read_events(config.run_folder)[-1].event == events.FAILED


def test_a_run_folder_that_fails_hides_no_failure_and_is_no_progress(
    control: ControlClient, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(config, "version-000002")
    journal = EventLog(config.run_folder)
    trainer_failure.record_failure(control, config, journal, 0, "trainer-0", "failure 0")
    unreadable = config.run_folder / ("x" * 300)  # any look at it raises OSError
    monkeypatch.setattr(Config, "run_folder", property(lambda self: unreadable))
    failure = trainer_failure.record_failure(control, config, journal, 1, "trainer-0", "failure 1")
    assert (failure.checkpoint, failure.consecutive_failures) == ("version-000002", 2)


def test_every_machine_sees_the_failure_that_was_recorded_first(control: ControlClient, config: Config) -> None:
    assert trainer_failure.failure_of_attempt(control, 0) is None
    first = trainer_failure.record_failure(control, config, EventLog(config.run_folder), 0, "trainer-3", "killed")
    other = trainer_failure.record_failure(
        control, config, EventLog(config.run_folder), 0, "trainer-0", "lost its peer"
    )
    assert other == first == trainer_failure.failure_of_attempt(control, 0)
    assert trainer_failure.failure_of_attempt(control, 1) is None
    assert len(events.read_events(config.run_folder)) == 1


def test_the_attempt_is_an_argument_of_a_rank() -> None:
    assert with_attempt(["webrl", "trainer"], 1) == ["webrl", "trainer", "--attempt", "1"]
    assert with_attempt(["webrl", "--attempt", "1", "x"], 2) == ["webrl", "--attempt", "2", "x"]
