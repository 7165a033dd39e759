"""Recovery after a trainer that died in the same job: tickets, records, counted episodes."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_webrl.ring.record import decode_trajectory, encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.track import episodes
from megatron_webrl.track.episodes import EpisodeLog, trajectory_identity
from megatron_webrl.trainer.accounting import DAMAGED_COUNTER, Accounting
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState, read_trainer_state
from megatron_webrl.trainer.checkpoint.recovery import ResumePoint, complete_groups, make_resume_point, split_tickets
from megatron_webrl.trainer.data.batching import NO_VERSION, clear_versions_before_restart
from megatron_webrl.types import Group, TaskReference
from tests.job_control import claim_tickets, connect, control_service, tickets
from tests.trainer.multi_node.nodes import one_node_exchange
from tests.trajectories import trajectory

EMPTY = Accounting().state_dict()


def test_tickets_in_flight_and_complete_groups_survive_and_all_others_are_reissued() -> None:
    state = TrainerState(3, 0, 6, (2, 5), EMPTY, 0)  # of 0..7 all but 2 and 5 are closed
    in_ring = dict.fromkeys((2, 8, 7, 4), TaskReference("other", "click-test", 0, 3))
    surviving, reissued = split_tickets(tickets([2, 10]), in_ring, state, 13)
    assert surviving == tickets([2, 10]) | {8: in_ring[8]}
    assert reissued == (5, 9, 11, 12)  # trained or dropped since, partly freed, or never claimed
    resume_point = ResumePoint(2, 5, reissued_tickets=(7, 9), next_ticket=12, surviving_tickets=tickets([8]))
    assert [ticket for ticket in range(14) if resume_point.is_closed(ticket)] == [*range(7), 10, 11]
    # A group is complete with one record of each episode.
    records = [trajectory(1, 0), trajectory(1, 0, worker="rollout-0.2"), trajectory(2, 0), trajectory(2, 1)]
    assert complete_groups(records) == {2: TaskReference.of(records[2].task)}


def test_a_lost_version_counts_as_the_one_from_which_training_resumed() -> None:
    resume_point = ResumePoint(2, 6, earlier_epochs=((0, 0), (1, 4)))

    def oldest(restart_epoch: int, version: int, fixed: bool = False) -> int | None:
        return resume_point.oldest_version(trajectory(version=version, restart_epoch=restart_epoch), fixed)

    assert [oldest(0, version) for version in (3, 4, 5, 9)] == [3, 4, 4, 4]
    assert [oldest(1, version) for version in (5, 6, 8)] == [5, 6, 6]
    assert [oldest(2, version) for version in (6, 9)] == [6, 9]
    assert [oldest(1, version, fixed=True) for version in (5, 6, 8)] == [5, 6, 5]
    assert resume_point.oldest_version(trajectory(steps=0), False) is None


def test_tokens_of_an_earlier_restart_epoch_have_no_version() -> None:
    group = Group(0, (trajectory(0, 0, version=3, restart_epoch=1), trajectory(0, 1, version=3, restart_epoch=2)))
    old, current = clear_versions_before_restart([group], 2)[0].trajectories
    assert set(old.steps[0].versions.tolist()) == {NO_VERSION}
    assert current is group.trajectories[1]
    assert old.steps[0].logprobs is group.trajectories[0].steps[0].logprobs


def test_episodes_counted_after_the_checkpoint_are_rolled_back_unless_their_record_is_present(tmp_path: Path) -> None:
    made = [replace(trajectory(ticket, 0, reward=1.0), finished_at=ticket + 0.12345) for ticket in range(6)]
    log = EpisodeLog(tmp_path, 0)
    for each in made:
        log.add(each, None, 0)
    log.close()
    present = {trajectory_identity(made[4])}
    rolled_back = episodes.roll_back(tmp_path, 2, present)
    assert [line["ticket"] for line in rolled_back] == [2, 3, 5]
    assert episodes.roll_back(tmp_path, 2, present) == rolled_back  # killed before it could truncate the log
    log = EpisodeLog(tmp_path, 2)
    for each in made[4:]:  # the present record, and the reissued ticket
        log.add(replace(each, finished_at=100.0 + each.ticket), None, 1)
    log.close()
    assert [line["ticket"] for line in episodes.roll_back(tmp_path, 3, ())] == [2, 3, 5, 5]
    assert [line["ticket"] for line in episodes.read_lines(tmp_path)] == [0, 1, 4, 5]
    episodes.clear_rolled_back(tmp_path)
    assert episodes.read_rolled_back(tmp_path) == []


def test_a_state_with_fields_of_another_version_can_be_read(tmp_path: Path) -> None:
    state = asdict(TrainerState(3, 1, 4, (5,), {"trained": 8}, 1, episode_log_bytes=9))
    (tmp_path / "state.json").write_text(json.dumps(state | {"updates": [{"version": 3}]}))
    assert read_trainer_state(tmp_path) == TrainerState(3, 1, 4, (5,), {"trained": 8}, 1, episode_log_bytes=9)
    del state["episode_log_bytes"]
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert read_trainer_state(tmp_path).episode_log_bytes is None


@pytest.mark.usefixtures("one_rank")
def test_after_a_death_every_record_and_episode_counts_once(tmp_path: Path) -> None:
    """Of six tickets 0 is trained in the checkpoint, but not freed, 1 is whole in the ring, 2 is in flight, 3 was
    trained after the checkpoint, 4 has lost a damaged record, and 5 was never claimed.
    """
    name, log = f"webrl-test-{secrets.token_hex(4)}", EpisodeLog(tmp_path, 0)
    with control_service(tmp_path) as address, Ring.create_or_attach(name, 2**20, name) as ring:
        ring.unlink()
        control, exchange = connect(address, "trainer-0"), one_node_exchange(ring)
        make_resume_point(control, exchange, TrainerState(0, 0, 0, (), EMPTY, 0, episode_log_bytes=0), tmp_path, True)
        control.start_ticket_epoch(0, 0, tickets(range(6)))
        claim_tickets(control, 5)
        made = {ticket: [trajectory(ticket, index, reward=float(index)) for index in range(2)] for ticket in range(5)}
        for each in (*made[0], *made[1], made[2][0], made[4][0]):
            ring.write(encode_trajectory(each), 1.0)
        for each in (*made[0], *made[3]):
            log.add(each, None, 0)
        log.close()
        for ticket in (0, 1, 3, 4):
            control.close_ticket(ticket)
        state = TrainerState(1, 1, 1, (1, 2, 3), Accounting(trained=2).state_dict(), 0)
        found = make_resume_point(control, exchange, state, tmp_path, True)
        assert (sorted(found.surviving_tickets), found.reissued_tickets) == ([1, 2], (3, 4, 5))
        assert control.add(DAMAGED_COUNTER, 0) == 1  # what is left of ticket 4 is in no other count
        left = [decode_trajectory(ring.read(number)) for number in ring.committed()]
        assert [(each.ticket, each.index) for each in left] == [(1, 0), (1, 1), (2, 0)]
    assert (found.episodes_rolled_back, found.episodes_counted) == (2, {"rollout-0.1": 4})
    assert [line["ticket"] for line in episodes.read_rolled_back(tmp_path)] == [3, 3]
