"""The limit on consecutive trainer failures, and the record of a failure that all nodes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.launch.node import failure_of_attempt, record_failure
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
    failures = [record_failure(control, config, attempt, "trainer-0", f"failure {attempt}")[0] for attempt in (0, 1)]
    complete(config, "version-000002")
    failures += [
        record_failure(control, config, attempt, "trainer-1", f"failure {attempt}")[0] for attempt in (2, 3, 4)
    ]
    assert [failure.consecutive_failures for failure in failures] == [1, 2, 1, 2, 3]
    assert [failure.checkpoint for failure in failures] == ["", "", *["version-000002"] * 3]
    assert [failure.job_outcome(config) is None for failure in failures] == [True] * 4 + [False]
    assert failures[-1].job_outcome(config) == (
        "failed: the trainer failed 3 times in a row without a new checkpoint (run.max_trainer_restarts=2); "
        "the last time: failure 4"
    )


def test_a_run_folder_that_fails_hides_no_failure_and_is_no_progress(
    control: ControlClient, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(config, "version-000002")
    record_failure(control, config, 0, "trainer-0", "failure 0")
    unreadable = config.run_folder / ("x" * 300)  # any look at it raises OSError
    monkeypatch.setattr(Config, "run_folder", property(lambda self: unreadable))
    failure, _ = record_failure(control, config, 1, "trainer-0", "failure 1")
    assert (failure.checkpoint, failure.consecutive_failures) == ("version-000002", 2)


def test_every_node_sees_the_failure_that_was_recorded_first(control: ControlClient, config: Config) -> None:
    assert failure_of_attempt(control, 0) is None
    first, is_first = record_failure(control, config, 0, "trainer-3", "killed")
    other, is_other = record_failure(control, config, 0, "trainer-0", "lost its peer")
    assert (is_first, is_other) == (True, False)
    assert other == first == failure_of_attempt(control, 0)
    assert failure_of_attempt(control, 1) is None
