"""How many times in a row the trainer may fall, and what everyone is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl import falls
from megatron_webrl.config import Config
from megatron_webrl.control import Control
from megatron_webrl.revival import with_attempt
from megatron_webrl.tracking import events, summary
from megatron_webrl.tracking.events import Journal
from tests.planes import connect, control_plane


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    with control_plane(tmp_path) as address:
        yield connect(address, "node-0")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config()
    config.run.directory, config.run.name, config.run.trainer_restarts = str(tmp_path), "here", 2
    (config.run_folder / "checkpoints").mkdir(parents=True)
    return config


def complete(config: Config, name: str) -> None:
    """Let there be a checkpoint of that name."""
    (config.run_folder / "checkpoints" / "latest").write_text(f"{name}\n")


def test_falls_count_anew_once_a_checkpoint_is_complete(control: Control, config: Config) -> None:
    journal = Journal(config.run_folder)
    told = [falls.declare(control, config, journal, attempt, "trainer-0", f"fall {attempt}") for attempt in (0, 1)]
    complete(config, "version-000002")
    told += [falls.declare(control, config, journal, attempt, "trainer-1", f"fall {attempt}") for attempt in (2, 3, 4)]
    assert [fall.in_a_row for fall in told] == [1, 2, 1, 2, 3]
    assert [fall.checkpoint for fall in told] == ["", "", *["version-000002"] * 3]
    assert [fall.outcome(config) is None for fall in told] == [True] * 4 + [False]
    assert told[-1].outcome(config) == (
        "failed: the trainer fell 3 times without a checkpoint in between (run.trainer_restarts=2); "
        "the last time: fall 4"
    )
    summary.write(config.run_folder, "failed", None)
    found = summary.read(config.run_folder)["restarts"]
    assert [(each["role"], each["reason"]) for each in found] == [
        ("trainer-0", "fall 0"), ("trainer-0", "fall 1"), ("trainer-1", "fall 2"), ("trainer-1", "fall 3"),
    ]  # fmt: skip
    assert events.read(config.run_folder)[-1].event == events.FAILED


def test_everyone_is_told_of_the_fall_that_was_declared_first(control: Control, config: Config) -> None:
    assert falls.fall_of(control, 0) is None
    first = falls.declare(control, config, Journal(config.run_folder), 0, "trainer-3", "killed")
    other = falls.declare(control, config, Journal(config.run_folder), 0, "trainer-0", "lost its peer")
    assert other == first == falls.fall_of(control, 0)
    assert falls.fall_of(control, 1) is None
    assert len(events.read(config.run_folder)) == 1


def test_a_rank_is_told_its_attempt() -> None:
    assert with_attempt(["webrl", "trainer"], 1) == ["webrl", "trainer", "--attempt", "1"]
    assert with_attempt(["webrl", "--attempt", "1", "x"], 2) == ["webrl", "--attempt", "2", "x"]
