"""The end of a run, and what waits for its disk."""

from __future__ import annotations

import errno
import json
import secrets
from pathlib import Path
from unittest import mock

import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.track.upload import Tracker
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState
from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
from megatron_webrl.trainer.coordinator import Coordinator
from tests.file_faults import FileFaults
from tests.job_control import claim_tickets, connect, control_service
from tests.ring.support import damage
from tests.trainer.multi_node.nodes import one_node_exchange
from tests.trajectories import trajectory


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


def test_an_update_warns_of_what_its_metrics_say_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = mock.Mock(config=parse_config(None, []))
    coordinator.group_source.pop_alarms.return_value = ["dropped groups differ"]
    result = mock.Mock(version=3)
    result.mismatch.alarms.return_value = ["the engine differs"]
    Coordinator.log_update(coordinator, result)
    assert caplog.messages == ["update 3: the engine differs", "update 3: dropped groups differ"]


@pytest.mark.usefixtures("one_rank")
def test_lines_wait_for_a_full_disk_and_are_written_before_a_checkpoint(tmp_path: Path) -> None:
    config = parse_config(None, [f"run.directory={tmp_path}", "tracking.uri=http://127.0.0.1:9"])  # nobody listens
    folder, name = config.run_folder, f"webrl-test-{secrets.token_hex(4)}"
    folder.mkdir()
    state = TrainerState(0, 0, 0, (), Accounting().state_dict(), 0)
    with control_service(tmp_path) as address, Ring.create_or_attach(name, 2**20, name) as ring:
        ring.unlink()
        control, exchange, tracker = (connect(address, "trainer-0"), one_node_exchange(ring), Tracker(config))
        coordinator = Coordinator(config, control, exchange, state, ResumePoint(), tracker)
        with FileFaults(folder, 1, errno.ENOSPC, until=1_000_000):
            assert coordinator.evaluation_log is not None
            coordinator.evaluation_log.append({"kind": "during", "variant": "", "version": 1}, [])
            with pytest.raises(OSError, match="No space left"):
                coordinator._sync_histories()
        assert not (folder / "evaluations.jsonl").read_text()
        coordinator._sync_histories()
    assert json.loads((folder / "evaluations.jsonl").read_text())["version"] == 1


@pytest.mark.usefixtures("one_rank")
def test_another_ticket_takes_the_place_of_one_whose_record_is_damaged(tmp_path: Path) -> None:
    config = parse_config(None, [f"run.directory={tmp_path}", "tracking.uri=http://127.0.0.1:9"])
    config.run_folder.mkdir()
    name, state = f"webrl-test-{secrets.token_hex(4)}", TrainerState(0, 0, 0, (), Accounting().state_dict(), 0)
    with control_service(tmp_path) as address, Ring.create_or_attach(name, 2**20, name) as ring:
        damage(ring, ring.write(encode_trajectory(trajectory(0, 0, group_size=2)), 1.0))
        ring.unlink()
        control, worker = connect(address, "trainer-0"), connect(address, "rollout-0")
        exchange, tracker = one_node_exchange(ring), Tracker(config)
        coordinator = Coordinator(config, control, exchange, state, ResumePoint(), tracker)
        coordinator.open_job(0)
        assert claim_tickets(worker, 1000)
        coordinator.collect(0, has_new_engines=lambda: True)
        assert len(claim_tickets(worker, 1000)) == 1
