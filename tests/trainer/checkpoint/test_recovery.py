"""Recovery after a trainer that died in the same job: tickets, records, counted episodes."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.tickets import TICKET_DONE, TICKET_FENCE, TicketClaim, TicketEpoch, ticket_epoch_at
from megatron_webrl.track import episode_log
from megatron_webrl.track.episode_log import EpisodeLog, trajectory_identity
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState, read_trainer_state
from megatron_webrl.trainer.checkpoint.recovery import complete_groups, split_tickets, ticket_claims
from megatron_webrl.trainer.checkpoint.resume_point import ResumePoint
from megatron_webrl.trainer.data.batching import NO_VERSION, clear_versions_before_restart
from megatron_webrl.types import Group
from tests.job_control import connect, control_service
from tests.trajectories import trajectory

EMPTY = Accounting().state_dict()


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlClient]:
    with control_service(tmp_path) as address:
        yield connect(address, "trainer-0")


def test_no_worker_claims_a_slot_above_a_fence_until_the_job_is_opened_again(control: ControlClient) -> None:
    control.start_ticket_epoch(TicketEpoch(0, 0, 0, (), 0), limit=100_000)
    taken: list[list[int]] = [[], []]
    fences: list[int] = []

    def worker(number: int) -> None:
        mine = ControlClient(control.address_file, f"rollout-{number}")
        while claims := mine.claim_tickets(1):
            taken[number].append(claims[0].slot)

    threads = [threading.Thread(target=worker, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while control.claimed_slots() < 50 or not all(taken):
        assert time.monotonic() < deadline
    fences.append(control.fence_tickets())
    for thread in threads:
        thread.join(60)
    assert sorted(taken[0] + taken[1]) == list(range(fences[0]))
    assert control.claimed_slots() == fences[0] + 1
    assert control.claim_tickets(1) == []
    assert set(control.claims(0, fences[0])) == {"rollout-0", "rollout-1"}
    control.start_ticket_epoch(TicketEpoch(1, 0, fences[0] + 1, (3, 5), fences[0]), limit=fences[0] + 4)
    assert control.claim_tickets(9) == [
        TicketClaim(fences[0] + 1 + number, ticket, 1) for number, ticket in enumerate((3, 5, fences[0]))
    ]
    epochs = control.ticket_epochs()
    assert ticket_epoch_at(epochs, 7).ticket_at(7) == 7


def test_each_ticket_has_the_claim_of_its_last_slot() -> None:
    epochs = [TicketEpoch(0, 0, 4, (1, 3), 6), TicketEpoch(1, 2, 10, (1, 7, 8), 9)]
    #  slot  4: 1    5: 3         6: 6   7: 7   8: 8         9      10: 1
    claims = [TICKET_DONE, "rollout-0", TICKET_DONE, TICKET_DONE, "rollout-1", TICKET_FENCE, "rollout-0"]
    assert ticket_claims(epochs[:1], claims[:5], 9) == {
        1: TICKET_DONE,
        3: "rollout-0",
        6: TICKET_DONE,
        7: TICKET_DONE,
        8: "rollout-1",
    }
    # The second epoch reissues 7 and 8, and no worker has claimed them.
    assert ticket_claims(epochs, claims, 11) == {
        1: "rollout-0", 3: "rollout-0", 6: TICKET_DONE, 7: TICKET_FENCE, 8: TICKET_FENCE,
    }  # fmt: skip
    assert epochs[1].next_ticket_at(11) == epochs[1].next_ticket_at(13) == 9
    assert epochs[1].next_ticket_at(15) == 11


def test_a_fence_without_an_opened_job_is_a_ticket_that_no_worker_ran() -> None:
    epochs = [TicketEpoch(0, 0, 0, (), 0)]
    assert ticket_claims(epochs, [TICKET_DONE, TICKET_FENCE, "rollout-0"], 3) == {
        0: TICKET_DONE,
        1: TICKET_FENCE,
        2: "rollout-0",
    }


def test_tickets_in_flight_and_complete_groups_survive_and_all_others_are_reissued() -> None:
    state = TrainerState(3, 0, 6, (2, 5), EMPTY, 0)  # of 0..7 all but 2 and 5 are closed
    claims = {
        2: "rollout-0",
        5: TICKET_DONE,
        7: TICKET_DONE,
        8: TICKET_DONE,
        9: TICKET_DONE,
        10: "rollout-1",
        11: TICKET_FENCE,
        4: TICKET_DONE,
    }
    surviving, reissued = split_tickets(claims, state, 13, complete={8, 7, 4})
    assert surviving == {2, 8, 10}
    assert reissued == (5, 9, 11, 12)  # trained or dropped since, partly freed, or never claimed


def test_a_group_is_complete_with_one_record_of_each_episode() -> None:
    records = [trajectory(1, 0), trajectory(1, 0, worker="rollout-0.2"), trajectory(2, 0), trajectory(2, 1)]
    assert complete_groups(records) == {2}


def test_a_resume_point_knows_closed_and_open_tickets() -> None:
    resume_point = ResumePoint(TicketEpoch(2, 5, 40, (7, 9), 12), surviving_tickets=frozenset({8}))
    assert resume_point.unclosed_tickets == {7, 8, 9}
    assert [ticket for ticket in range(14) if resume_point.is_closed(ticket)] == [*range(7), 10, 11]


def test_a_lost_version_counts_as_the_one_from_which_training_resumed() -> None:
    earlier = (TicketEpoch(0, 0, 0, (), 0), TicketEpoch(1, 4, 20, (), 19))
    resume_point = ResumePoint(TicketEpoch(2, 6, 40, (), 30), earlier)

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


class _Job:
    """A simulated job: claims of slots, and the contents of ring, trainer and checkpoint."""

    GROUPS, AHEAD = 3, 2

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.resume_point = ResumePoint.for_new_job()
        self.epochs, self.claims = [self.resume_point.ticket_epoch], []  # type: list[TicketEpoch], list[str]
        self.in_flight: dict[int, int] = {}  # slot -> ticket
        self.ring: list[int] = []
        self.closed: set[int] = set()  # since the beginning
        self.all_closed: list[int] = []  # not rolled back
        self.saved = (TrainerState(0, 0, 0, (), EMPTY, 0), 0)
        self.wasted = 0

    def claim(self) -> None:
        slot = len(self.claims)
        if slot < self.resume_point.ticket_limit(len(self.closed), self.AHEAD, self.GROUPS):
            self.claims.append("rollout-0")
            self.in_flight[slot] = ticket_epoch_at(self.epochs, slot).ticket_at(slot)

    def finish(self) -> None:
        if self.in_flight:
            slot = self.choose.choice(sorted(self.in_flight))
            self.ring.append(self.in_flight.pop(slot))
            self.claims[slot] = TICKET_DONE

    def close(self) -> None:
        if self.ring:
            ticket = self.ring.pop(self.choose.randrange(len(self.ring)))
            self.closed.add(ticket)
            self.all_closed.append(ticket)

    def save(self) -> None:
        base, open_tickets = self.resume_point.checkpoint_tickets(len(self.claims), self.closed)
        assert sorted([*self.all_closed, *open_tickets]) == list(range(base + len(open_tickets)))
        self.saved = (TrainerState(0, 0, base, open_tickets, EMPTY, 0), len(self.all_closed))

    def trainer_dies(self) -> None:
        state, closed = self.saved
        fence = len(self.claims)
        self.claims.append(TICKET_FENCE)
        if self.choose.random() < 0.2:  # the next attempt dies before it opens the job
            return
        self.wasted += len(self.all_closed) - closed
        del self.all_closed[closed:]
        taken, fresh = ticket_claims(self.epochs, self.claims, fence), self.epochs[-1].next_ticket_at(fence)
        survivors, again = split_tickets(taken, state, fresh, set(self.ring))
        assert survivors == {*self.in_flight.values(), *self.ring}
        start = TicketEpoch(self.epochs[-1].restart_epoch + 1, 0, fence + 1, again, fresh)
        self.resume_point = ResumePoint(start, tuple(self.epochs), survivors)
        self.epochs, self.closed = [*self.epochs, start], set()


@pytest.mark.parametrize("seed", range(20))
def test_after_trainer_deaths_every_ticket_is_closed_once_and_open_tickets_stay_limited(seed: int) -> None:
    job = _Job(seed)
    steps, weights = (job.claim, job.finish, job.close, job.save, job.trainer_dies), (40, 30, 20, 3, 2)
    for _ in range(1500):
        job.choose.choices(steps, weights)[0]()
        open_count = len(job.in_flight) + len(job.ring)
        assert open_count <= (job.AHEAD + 1) * job.GROUPS
        assert len({*job.in_flight.values(), *job.ring}) == open_count  # no surviving ticket is reissued
    assert len(job.epochs) > 5
    assert job.wasted > 0
    for _ in range(40):  # reissued tickets, and those in flight
        for step in (job.claim, job.finish, job.close):
            step()
    job.save()
    state, _ = job.saved
    assert len(job.all_closed) == len(set(job.all_closed)) == state.closed_tickets
    assert len(state.open_tickets) <= (job.AHEAD + 1) * job.GROUPS


def test_episodes_counted_after_the_checkpoint_are_rolled_back_unless_their_record_is_present(tmp_path: Path) -> None:
    made = [replace(trajectory(ticket, 0, reward=1.0), finished_at=ticket + 0.12345) for ticket in range(6)]
    log = EpisodeLog(tmp_path, 0)
    for each in made:
        log.add(each, None, 0)
    log.close()
    present = {trajectory_identity(made[4])}
    rolled_back = episode_log.roll_back(tmp_path, 2, present)
    assert [line["ticket"] for line in rolled_back] == [2, 3, 5]
    assert episode_log.roll_back(tmp_path, 2, present) == rolled_back  # killed before it could truncate the log
    log = EpisodeLog(tmp_path, 2)
    for each in made[4:]:  # the present record, and the reissued ticket
        log.add(replace(each, finished_at=100.0 + each.ticket), None, 1)
    log.close()
    assert [line["ticket"] for line in episode_log.roll_back(tmp_path, 3, ())] == [2, 3, 5, 5]
    assert [line["ticket"] for line in episode_log.read_lines(tmp_path)] == [0, 1, 4, 5]
    episode_log.clear_rolled_back(tmp_path)
    assert episode_log.read_rolled_back(tmp_path) == []


def test_a_state_with_fields_of_another_version_can_be_read(tmp_path: Path) -> None:
    state = asdict(TrainerState(3, 1, 4, (5,), {"trained": 8}, 1, episode_log_bytes=9))
    (tmp_path / "state.json").write_text(json.dumps(state | {"updates": [{"version": 3}]}))
    assert read_trainer_state(tmp_path) == TrainerState(3, 1, 4, (5,), {"trained": 8}, 1, episode_log_bytes=9)
    del state["episode_log_bytes"]
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert read_trainer_state(tmp_path).episode_log_bytes is None
