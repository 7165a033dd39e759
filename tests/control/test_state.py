"""The state machine of the control service: pure, so that thousands of histories can be tried."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_webrl.control import state as states
from megatron_webrl.control.client import ticket_limit
from megatron_webrl.control.state import TICKETS, CommandError, JobState

WORKERS = ("rollout-0", "rollout-1", "rollout-2")


class Job(RuleBasedStateMachine):
    """Workers, a trainer and a supervisor act in any order; the service is restarted, and requests are sent twice.

    The accounting invariant: each ticket that was issued is waiting, run by one worker, to be claimed again, or closed;
    none is lost and none is run by two workers. Each keeps the task with which it was issued.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = JobState()
        self.journal: list[list[Any]] = []
        self.number = 0
        self.waiting: list[int] = []  # model: tickets that were never claimed
        self.held: dict[int, str] = {}  # worker by ticket
        self.returned: list[int] = []  # open tickets that others may claim
        self.closed: set[int] = set()
        self.next, self.epoch = 5, 0
        self.given_up: set[str] = set()

    def run(self, *command: Any) -> Any:
        self.number += 1
        entry = json.loads(json.dumps(["all", self.number, [list(command)]]))
        replies = self.state.apply(*entry)
        self.journal.append(entry)
        assert self.state.apply(*entry) == replies, "a request that is sent again has another answer"
        return json.loads(json.dumps(replies[0]))

    def issue(self, count: int) -> list[list[Any]]:
        tickets = list(range(self.next, self.next + count))
        self.next += count
        self.waiting += tickets
        return [[ticket, f"task {ticket}"] for ticket in tickets]

    @initialize(reissued=st.lists(st.integers(0, 4), unique=True, max_size=3))
    def start(self, reissued: list[int]) -> None:
        self.waiting = sorted(reissued)
        self.run("start_epoch", 0, 0, [[ticket, f"task {ticket}"] for ticket in self.waiting] + self.issue(4))

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 4), sharers=st.integers(1, 3))
    def claim(self, worker: str, count: int, sharers: int) -> None:
        if worker in self.given_up:  # it may not know so far
            assert self.run("claim", TICKETS, worker, count, sharers) == []
            return
        free = self.returned + self.waiting
        claims = self.run("claim", TICKETS, worker, count, sharers)
        expected = free[: min(count, -(-len(free) // sharers))]
        assert claims == [[ticket, f"task {ticket}", self.epoch] for ticket in expected]
        for ticket in expected:
            (self.returned if ticket in self.returned else self.waiting).remove(ticket)
            self.held[ticket] = worker

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def close(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.held)))
        assert self.run("close", TICKETS, ticket)
        assert not self.run("close", TICKETS, ticket), "a ticket is closed once"
        del self.held[ticket]
        self.returned = [each for each in self.returned if each != ticket]
        self.closed.add(ticket)

    @rule(more=st.integers(0, 5))
    def raise_limit(self, more: int) -> None:
        self.run("append", TICKETS, self.issue(more))

    @rule()
    @precondition(lambda self: self.held or self.waiting)
    def issue_twice(self) -> None:
        ticket = next(iter([*self.held, *self.waiting]))
        assert "already" in self.run("append", TICKETS, [[self.next, None], [ticket, None]])["error"]

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def give_back(self, worker: str, data: st.DataObject) -> None:
        mine = [ticket for ticket, owner in self.held.items() if owner == worker and ticket not in self.returned]
        tickets = data.draw(st.lists(st.integers(0, self.next), unique=True, max_size=3)) + mine[:1]
        self.run("give_back", TICKETS, worker, tickets)
        self.returned += [each for each in dict.fromkeys(tickets) if each in mine]

    @rule(worker=st.sampled_from(WORKERS[:2]))
    def give_up(self, worker: str) -> None:
        self.run("give_up_worker", worker, "it failed too often")
        self.given_up.add(worker)
        mine = sorted(ticket for ticket, owner in self.held.items() if owner == worker)
        self.returned += [ticket for ticket in mine if ticket not in self.returned]

    @rule()
    def restart_trainer(self) -> None:
        rewound = self.run("rewind_tickets")
        assert rewound["open"] == [[ticket, f"task {ticket}"] for ticket in sorted(self.held)]
        assert (len(rewound["epochs"]), rewound["end"]) == (self.epoch + 1, self.next)
        assert self.run("claim", TICKETS, WORKERS[2], 3) == []
        lost, self.waiting = self.waiting, []
        self.epoch += 1
        again = [[ticket, f"task {ticket}"] for ticket in lost]
        self.waiting = list(lost)
        self.run("start_epoch", self.epoch, 7, again + self.issue(1))

    @rule()
    def restart_service(self) -> None:
        again = JobState()
        for entry in self.journal:
            again.apply(*entry)
        assert again == self.state
        self.state = pickle.loads(pickle.dumps(again))

    @invariant()
    def every_issued_ticket_is_accounted_for(self) -> None:
        if TICKETS not in self.state.queues:
            return
        queue = self.state.queues[TICKETS]
        assert (queue.waiting, queue.owners, queue.returned) == (self.waiting, self.held, self.returned)
        assert queue.contents.keys() == {*self.waiting, *self.held}
        assert {*range(5, self.next)} <= {*self.waiting, *self.held, *self.closed}


Job.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestJob = Job.TestCase


def test_an_unknown_command_a_wrong_argument_and_a_query_change_nothing() -> None:
    state = JobState()
    for commands in ([["put", "key", 1], ["remove_everything"]], [["put", "key", 1], "put"]):
        with pytest.raises(CommandError, match="unknown command"):
            state.apply("a", 1, commands)
    assert state.query([["get", ["a"]]]) == [[None]]
    assert state == JobState()
    assert state.apply("a", 1, [["put", "key", 1]]) == [None]
    with pytest.raises(CommandError, match="request 0 of a is older than its last, 1"):
        state.apply("a", 0, [["put", "key", 2]])
    for command in (["put", "key"], ["add", "key", "1"], ["append", "a", [3]], ["claim", 1, 2]):
        [reply] = JobState().apply("a", 1, [command])
        assert reply["error"].startswith(f"{command[0]}: ")


def test_the_stream_that_was_silent_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MAX_STREAMS", 3)
    state = JobState()
    for stream, number in (("a", 1), ("b", 1), ("c", 1), ("a", 2), ("d", 1)):
        state.apply(stream, number, [["add", stream, 1]])
    assert [state.request_count(stream) for stream in "abcd"] == [2, 0, 1, 1]
    for stream, number in (("a", 2), ("c", 1), ("d", 1)):  # sent again: with the reply that they had, and no effect
        assert state.apply(stream, number, [["add", stream, 1]]) == [number]
    assert state.facts == {"a": 2, "b": 1, "c": 1, "d": 1}


def test_the_results_of_a_queue_are_read_once_each() -> None:
    state, name = JobState(), "evaluation/1"
    state.append(name, [[episode, None] for episode in range(3)])
    assert state.claim(name, "rollout-0.1", 2) == [[0, None, 0], [1, None, 0]]
    assert state.claim(name, "rollout-1.1", 2) == [[2, None, 0]]
    state.close(name, 1, {"outcome": "success"})
    assert state.read_queue(name) == {
        "appended": 3, "claimed": 3, "open": [[0, "rollout-0.1"], [2, "rollout-1.1"]],
        "values": [[1, {"outcome": "success"}]],
    }  # fmt: skip
    state.give_back(name, "rollout-0.1", [0, 1, 2])
    assert state.claim(name, "rollout-1.1", 9) == [[0, None, 0]]
    state.close(name, 0, {"outcome": "failure"})
    assert state.read_queue(name, 1)["values"] == [[0, {"outcome": "failure"}]]
    state.remove_queue(name)
    assert state.claim(name, "rollout-1.1", 9) == []
    assert state.close(name, 2, {}) is False


def test_the_ticket_limit_keeps_groups_trainable() -> None:
    assert ticket_limit(surviving_tickets=0, closed_tickets=0, updates_ahead=0, groups_per_update=8) == 8
    assert ticket_limit(surviving_tickets=0, closed_tickets=3 * 8 + 5, updates_ahead=2, groups_per_update=8) == 53
    # After a restart: 24 may be open, 10 of them are; four that are closed make room for as many.
    assert ticket_limit(surviving_tickets=10, closed_tickets=0, updates_ahead=2, groups_per_update=8) == 14
    assert ticket_limit(surviving_tickets=10, closed_tickets=4, updates_ahead=2, groups_per_update=8) == 18
