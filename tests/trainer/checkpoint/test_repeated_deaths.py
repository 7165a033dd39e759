"""A trainer that dies between two checkpoints, and again before the next one."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.control.state import TICKETS
from megatron_webrl.ring.ring import Ring
from megatron_webrl.track.upload import Tracker
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState
from megatron_webrl.trainer.checkpoint.recovery import ResumePoint, make_resume_point
from megatron_webrl.trainer.coordinator import Coordinator
from tests.job_control import claim_tickets, connect, control_service, tickets
from tests.trainer.multi_node.nodes import one_node_exchange


@pytest.mark.usefixtures("one_rank")
def test_each_start_has_an_epoch_of_its_own_and_tickets_that_no_other_start_has_issued(tmp_path: Path) -> None:
    name, state = f"webrl-test-{secrets.token_hex(4)}", TrainerState(1, 0, 1, (1,), Accounting().state_dict(), 0)
    with control_service(tmp_path) as address, Ring.create_or_attach(name, 2**20, name) as ring:
        ring.unlink()
        control, exchange, found = connect(address, "trainer-0"), one_node_exchange(ring), []
        for start in range(3):
            found.append(make_resume_point(control, exchange, state, tmp_path, True))
            again, first = found[-1].reissued_tickets, found[-1].next_ticket
            control.start_ticket_epoch(found[-1].restart_epoch, 1, tickets([*again, first]))
            control.issue_tickets(tickets([first + 1]))  # no checkpoint knows of it
            claim_tickets(control, start)
    assert [(each.restart_epoch, each.next_ticket) for each in found] == [(0, 2), (1, 4), (2, 6)]
    assert [(each.reissued_tickets, sorted(each.surviving_tickets)) for each in found] == [
        ((1,), []), ((1, 2, 3), []), ((2, 3, 4, 5), [1]),
    ]  # fmt: skip


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_has_the_tickets_that_were_issued_and_survived_with_their_tasks(tmp_path: Path) -> None:
    config = parse_config(None, [f"run.directory={tmp_path}", "tracking.uri=http://127.0.0.1:9"])  # nobody listens
    config.run_folder.mkdir()
    name, before = f"webrl-test-{secrets.token_hex(4)}", TrainerState(0, 0, 0, (), Accounting().state_dict(), 0)
    survived = tickets([0])
    resume_point = ResumePoint(next_ticket=1, surviving_tickets=survived)
    with control_service(tmp_path) as address, Ring.create_or_attach(name, 2**20, name) as ring:
        ring.unlink()
        control, tracker = connect(address, "trainer-0"), Tracker(config)
        coordinator = Coordinator(config, control, one_node_exchange(ring), before, resume_point, tracker)
        coordinator.open_job(0)
        issued = control.run("read_queue", TICKETS)["appended"]
        state = coordinator.trainer_state(0)
    assert (state.closed_tickets, state.open_tickets) == (0, tuple(range(1 + issued)))
    assert issued > 1
    assert state.task_sampler is not None
    tasks = dict(state.task_sampler["tasks"])
    assert (tasks[0], sorted(tasks)) == (survived[0], [*state.open_tickets])
