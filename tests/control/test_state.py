"""The state machine of the control service: pure, so that thousands of histories can be tried."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_webrl.control.state import TICKETS, CommandError, JobState
from megatron_webrl.control.tickets import TICKET_DONE, TICKET_FENCE, TicketEpoch, ticket_limit

WORKERS = ("rollout-0", "rollout-1", "rollout-2")


class Job(RuleBasedStateMachine):
    """Workers, a trainer and a supervisor act in any order; the service is restarted, and requests are sent twice.

    The accounting invariant: each ticket below the newest claim is claimed by one worker, closed, or to be claimed
    again; none is lost and none is run by two workers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = JobState()
        self.journal: list[list[Any]] = []
        self.number = 0
        self.held: dict[int, str] = {}  # model: worker by slot
        self.closed: set[int] = set()
        self.fences: set[int] = set()
        self.tickets: dict[int, int] = {}  # by claimed slot
        self.given_up: set[str] = set()

    def run(self, *command: Any) -> Any:
        self.number += 1
        entry = json.loads(json.dumps(["all", self.number, [list(command)]]))
        replies = self.state.apply(*entry)
        self.journal.append(entry)
        assert self.state.apply(*entry) == replies, "a request that is sent again has another answer"
        return json.loads(json.dumps(replies[0]))

    @initialize(first=st.integers(0, 5), open_tickets=st.lists(st.integers(0, 4), unique=True, max_size=3))
    def start(self, first: int, open_tickets: list[int]) -> None:
        self.first = first
        self.epoch = TicketEpoch(0, 0, first, tuple(sorted(open_tickets)), 5)
        self.run("start_epoch", vars(self.epoch), first + 4)

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 4), sharers=st.integers(1, 3))
    def claim(self, worker: str, count: int, sharers: int) -> None:
        if worker in self.given_up:  # it may not know so far
            assert self.run("claim", TICKETS, worker, count, sharers) == []
            return
        free = self.state.free_slots(TICKETS)
        claims = self.run("claim", TICKETS, worker, count, sharers)
        assert len(claims) == min(count, -(-free // sharers))
        for slot, ticket, _ in claims:
            assert slot not in self.closed
            assert slot not in self.fences
            assert self.held.get(slot) in (None, *self.given_up), "two workers run a ticket"
            assert self.tickets.setdefault(slot, ticket) == ticket
            self.held[slot] = worker

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        assert self.run("close", TICKETS, slot)
        assert not self.run("close", TICKETS, slot), "a slot is closed once"
        del self.held[slot]
        self.closed.add(slot)

    @rule(more=st.integers(0, 5))
    def raise_limit(self, more: int) -> None:
        self.run("set_limit", TICKETS, self.state.counters[TICKETS].limit + more)

    @rule(worker=st.sampled_from(WORKERS[:2]))
    def give_up(self, worker: str) -> None:
        self.run("give_up_worker", worker, "it failed too often")
        self.given_up.add(worker)

    @rule()
    def restart_trainer(self) -> None:
        fence = self.run("fence")
        self.fences.add(fence)
        assert self.run("claim", TICKETS, WORKERS[2], 3) == []
        claimed = [slot for slot in range(self.first, fence) if slot not in self.fences]
        assert set(claimed) == set(self.tickets)
        epoch = TicketEpoch(len(self.fences), 0, fence + 1, (), self.epoch.next_ticket_at(fence))
        self.epoch = epoch
        self.run("start_epoch", vars(epoch), fence + 3)

    @rule()
    def restart_service(self) -> None:
        again = JobState()
        for entry in self.journal:
            again.apply(*entry)
        assert json.dumps(again.to_json()) == json.dumps(self.state.to_json())
        self.state = JobState.from_json(json.loads(json.dumps(self.state.to_json())))

    @invariant()
    def every_claimed_slot_is_accounted_for(self) -> None:
        if TICKETS not in self.state.counters:
            return
        counter = self.state.counters[TICKETS]
        owners = self.state.owners(TICKETS, self.first, counter.claimed)
        expected = [
            TICKET_FENCE if slot in self.fences else TICKET_DONE if slot in self.closed else self.held[slot]
            for slot in range(self.first, counter.claimed)
        ]
        assert owners == expected
        assert max(Counter(self.tickets[slot] for slot in self.tickets).values(), default=1) == 1


Job.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestJob = Job.TestCase


def test_an_unknown_command_changes_nothing() -> None:
    state = JobState()
    for commands in ([["put", "key", 1], ["remove_everything"]], [["put", "key", 1], "put"]):
        with pytest.raises(CommandError, match="unknown command"):
            state.apply("a", 1, commands)
    assert state.facts == {}
    assert state.apply("a", 1, [["put", "key", 1]]) == [None]
    with pytest.raises(CommandError, match="request 0 of a is older than its last, 1"):
        state.apply("a", 0, [["put", "key", 2]])


@pytest.mark.parametrize("command", [["put", "key"], ["add", "key", "1"], ["set_limit", "none", 3], ["claim", 1, 2]])
def test_a_command_with_wrong_arguments_is_answered_with_an_error(command: list[Any]) -> None:
    [reply] = JobState().apply("a", 1, [command])
    assert reply["error"].startswith(f"{command[0]}: ")


def test_a_query_changes_nothing() -> None:
    state = JobState()
    with pytest.raises(CommandError, match="not all of 2 commands are queries"):
        state.query([["get", ["a"]], ["add", "a", 1]])
    assert state.query([["get", ["a"]]]) == [[None]]


def test_the_results_of_a_counter_are_read_once_each() -> None:
    state = JobState()
    state.open_counter("evaluation/1", 3)
    assert state.claim("evaluation/1", "rollout-0.1", 2) == [0, 1]
    assert state.claim("evaluation/1", "rollout-1.1", 2) == [2]
    state.close("evaluation/1", 1, {"outcome": "success"})
    assert state.read_counter("evaluation/1") == {
        "claimed": 3, "limit": 3, "open": [[0, "rollout-0.1"], [2, "rollout-1.1"]],
        "values": [[1, {"outcome": "success"}]],
    }  # fmt: skip
    state.return_slots("evaluation/1", [0, 1])
    assert state.claim("evaluation/1", "rollout-1.1", 9) == [0]
    state.close("evaluation/1", 0, {"outcome": "failure"})
    assert state.read_counter("evaluation/1", 1)["values"] == [[0, {"outcome": "failure"}]]
    state.remove_counter("evaluation/1")
    assert state.claim("evaluation/1", "rollout-1.1", 9) == []
    assert state.close("evaluation/1", 2, {}) is False


def test_open_tickets_are_issued_again_before_later_ones() -> None:
    start = TicketEpoch(restart_epoch=1, version=3, first_slot=24, open_tickets=(20, 22, 25), next_ticket=27)
    assert [start.ticket_at(n) for n in range(24, 30)] == [20, 22, 25, 27, 28, 29]


def test_the_ticket_limit_keeps_groups_trainable() -> None:
    assert ticket_limit(first_slot=0, surviving_tickets=0, closed_tickets=0, updates_ahead=0, groups_per_update=8) == 8
    assert (
        ticket_limit(first_slot=0, surviving_tickets=0, closed_tickets=3 * 8 + 5, updates_ahead=2, groups_per_update=8)
        == 53
    )
    # Behind a fence: 24 may be open, 10 of them are; four that are closed make room for as many.
    assert (
        ticket_limit(first_slot=100, surviving_tickets=10, closed_tickets=0, updates_ahead=2, groups_per_update=8)
        == 114
    )
    assert (
        ticket_limit(first_slot=100, surviving_tickets=10, closed_tickets=4, updates_ahead=2, groups_per_update=8)
        == 118
    )
