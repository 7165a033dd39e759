"""The end of a run."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.trainer.coordinator import Coordinator


@pytest.mark.parametrize(
    ("last", "resumed", "completed", "saves"),
    [("true", None, None, 1), ("true", None, 3, 0), ("false", None, None, 0), ("true", 3, None, 0), ("true", 1, 2, 1)],
)
def test_a_run_ends_with_a_checkpoint_unless_there_is_one_or_none_is_wanted(
    last: str, resumed: int | None, completed: int | None, saves: int
) -> None:
    coordinator = mock.Mock(config=parse_config(None, [f"trainer.checkpoint.last={last}"]))
    coordinator.checkpoints.last_error, coordinator._resumed_version = None, resumed
    coordinator.checkpoints.last_completed = completed and (completed, None)
    Coordinator.final_checkpoint(coordinator, mock.Mock(), 3)
    assert coordinator.checkpoints.start_save.call_count == saves
    assert coordinator.checkpoints.close.call_count == 1
