"""A role's view of its job: facts, tickets and heartbeats of the control service (server.py).

After `start_heartbeat` a thread sends a request a second to the service, or to the relay of the node (relay.py). Its
answers also bring each change of the facts that this role has read before: reading them again costs nothing. Without it
every read is a request.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_webrl.control.connection import LOST_SECONDS, Connection, ControlLost, JobEnded, JobFailed
from megatron_webrl.control.facts import FactFollower, Reports
from megatron_webrl.control.liveness import VIEWED
from megatron_webrl.control.state import TICKETS
from megatron_webrl.types import CLEAN_JOB_OUTCOMES, STOPPED, TaskReference

POLL_SECONDS = 0.05
CLAIM_SECONDS = 1.0  # for which a claim of a Claimer waits at the service
END_SECONDS = 30.0  # for the outcome to reach the service
RELAY_VARIABLE = "WEBRL_CONTROL_RELAY"  # port of the node's relay, in the environment of its roles
_ALWAYS = ("end", "stop")  # facts that every role with a heartbeat knows


@dataclass(frozen=True)
class TicketClaim:
    """The right to run a ticket."""

    ticket: int
    task: TaskReference
    restart_epoch: int  # in which it was claimed

    @classmethod
    def from_json(cls, claim: list[Any]) -> TicketClaim:
        """From a reply of the control service."""
        ticket, task, restart_epoch = claim
        return cls(ticket, TaskReference(*task), restart_epoch)


def ticket_limit(surviving_tickets: int, closed_tickets: int, updates_ahead: int, groups_per_update: int) -> int:
    """Number of tickets to issue in a restart epoch (docs/rollout.md): their groups will be fresh enough to train on.

    surviving_tickets: claimed before it and kept; closed_tickets: trained or dropped in it. After n tickets n +
    surviving - closed are open: at most those of the next update and of `updates_ahead` more. Without a restart the
    limit is (updates_ahead + version + 1) * groups_per_update + dropped.
    """
    return closed_tickets - surviving_tickets + (updates_ahead + 1) * groups_per_update


class ControlClient:
    """One role's connection. May be used by several threads."""

    def __init__(
        self,
        address_file: Path,
        role: str,
        connect_seconds: float = 60.0,
        lost_seconds: float = LOST_SECONDS,
        while_lost: Callable[[], None] = lambda: None,
        relay_port: int | None = None,
    ) -> None:
        """Connect to the service that the file names. Raises JobFailed without an answer within `connect_seconds`.

        `while_lost` is called between the attempts of a request that the service does not answer. `relay_port`: of the
        node's relay, 0 without one; by default that of RELAY_VARIABLE.
        """
        self.address_file, self.role = address_file, role
        self._connection = Connection(address_file, role, lost_seconds, while_lost)
        job = self._ask("job", connect_seconds)
        self.job_id: str = job["job_id"]
        self.heartbeat_timeout_seconds: float = job["heartbeat_timeout_seconds"]
        assert self._connection.address is not None
        self.host, self.port = self._connection.address.host, self._connection.address.port
        relay_port = int(os.environ.get(RELAY_VARIABLE, "0")) if relay_port is None else relay_port
        self._facts = FactFollower(Connection(address_file, role, lost_seconds), relay_port)
        self._reported: dict[str, Any] = {"sender": f"{os.getpid()}-{time.monotonic_ns()}"}  # fields of each report
        self._progress = 0
        self._rollouts: Callable[[], str] | None = None  # of a worker
        self._follows = threading.Event()
        self._lost: ControlLost | None = None  # of the thread
        self._silent_since: dict[str, float] = {}  # by role, as this client saw it

    # -- liveness and the end of the job ----------------------------------------------------------

    def start_heartbeat(self) -> None:
        """Send heartbeats, once a second or as often as the service asks, from a daemon thread until `close`."""
        self.follow_facts(self._report)

    def follow_facts(self, reports: Callable[[], Reports] = dict) -> None:
        """Follow facts, by default without a heartbeat, for a process that is no role."""
        self._follows.set()
        self._facts.follow(_ALWAYS, reports)
        threading.Thread(target=self._follow, args=(reports,), name="heartbeat", daemon=True).start()

    def _follow(self, reports: Callable[[], Reports]) -> None:
        try:
            while self._follows.is_set():
                self._facts.follow((), reports, self._facts.interval)
        except ControlLost as error:
            self._lost = error

    def _report(self) -> Reports:
        report = dict(self._reported)
        if self._progress:
            report["progress"] = f"{os.getpid()}:{self._progress}"
        if self._rollouts is not None and self._facts.facts.get(VIEWED, (0, None))[1] is not None:
            report["rollouts"] = self._rollouts()
        return {self.role: (0.0, report)}

    def report_progress(self) -> None:
        """Count progress of this role for the hang detector; `check_job` and `report_status` do so, too. For the main
        thread, between operations that have a limit: heartbeats continue while the main thread hangs.
        """
        self._progress += 1

    def report_status(self, status: str) -> None:
        """Publish this role's status line for the dashboard, with the next heartbeat."""
        self.report_progress()
        self._reported["status"] = status

    def report_load(self, load: dict[str, Any]) -> None:
        """Publish running sums of this role's engine, with the next heartbeat."""
        self._reported["load"] = load

    def report_rollouts(self, encode: Callable[[], str]) -> None:
        """Publish what `encode` returns with each heartbeat while someone looks at the rollouts."""
        self.get_json(VIEWED)
        self._rollouts = encode

    def job_status(self) -> dict[str, Any]:
        """The whole job at a glance: the answer to GET /status of server.py. One request."""
        return self._connection.status()

    def role_reports(self) -> dict[str, dict[str, Any]]:
        """What each role last reported (liveness.py). One request."""
        reports: dict[str, dict[str, Any]] = self.job_status()["roles"]
        return reports

    def status_of(self, role: str) -> str:
        """The last status line of a role. One request."""
        return str(self.role_reports().get(role, {}).get("status", ""))

    def check_job(self, watched_roles: tuple[str, ...] = (), grace_seconds: float = 0.0) -> None:
        """Raise JobEnded or JobFailed if the job has ended, and JobFailed if a watched role is lost (see is_lost).

        For a role of a worker that was given up, the job has ended.
        """
        self.report_progress()
        end = self.job_end()
        if end is not None:
            if end["outcome"] in CLEAN_JOB_OUTCOMES:
                raise JobEnded
            raise JobFailed(end["outcome"])
        is_worker = self.role.startswith("rollout-")
        given_up = self.given_up_workers() if is_worker or watched_roles else {}
        if is_worker and self.role.partition(".")[0] in given_up:
            raise JobEnded  # its engine was given up because of a part on another node
        for role in watched_roles:
            if role in given_up:
                raise JobFailed(f"{role} is lost: it was given up: {given_up[role]}")
            if self.is_lost(role, grace_seconds):
                raise JobFailed(
                    f"{role} is lost: no heartbeat for {self.heartbeat_timeout_seconds + grace_seconds:.0f} s"
                )

    def is_lost(self, role: str, grace_seconds: float = 0.0) -> bool:
        """Whether the service has had no heartbeat of a role for its timeout; False before the role's first one.

        `grace_seconds` extend the limit for a restart of the role, which counts as silence only then.
        """
        cleared = self.get_json(f"silent/{role}")
        if cleared is None:
            self._silent_since.pop(role, None)
            return False
        since = self._silent_since.setdefault(role, time.monotonic())
        return time.monotonic() - since >= grace_seconds if grace_seconds else not cleared

    def clear_heartbeat(self, role: str) -> None:
        """Clear a role's heartbeat and progress before its restart: it is not lost until it has sent another."""
        self._connection.sync(make_fields=lambda: {"clear": [role]})

    def register_instance(self) -> int:
        """Register this instance of the role; returns its number, which counts the role's restarts from 1."""
        return self.add(f"instances/{self.role}", 1)

    def instance_count(self, role: str) -> int:
        """Number of instances that a role has registered."""
        return int(self.get_json(f"instances/{role}", 0))

    def instance_has_ended(self, instance_id: str) -> bool:
        """Whether an instance <role>.<number> has ended: its role has registered another, was given up, or is lost."""
        role, _, number = instance_id.rpartition(".")
        return role in self.given_up_workers() or self.instance_count(role) != int(number) or self.is_lost(role)

    def give_up_worker(self, worker: str, reason: str) -> None:
        """Supervisor: let the job continue without a worker; other workers run its tickets, and it ends itself."""
        self.run("give_up_worker", worker, reason)

    def given_up_workers(self) -> dict[str, str]:
        """The reason by worker given up, in order."""
        return dict(self.get_json("workers/given_up", {}))

    def request_stop(self, outcome: str = STOPPED) -> None:
        """Request the end after the current update, with a checkpoint. STOPPED replaces others, not vice versa."""
        self.run("put" if outcome == STOPPED else "put_if_absent", "stop", outcome)

    def stop_requested(self) -> bool:
        """Whether a stop was requested."""
        return self.get_json("stop") is not None

    def requested_outcome(self) -> str:
        """The outcome of a requested stop."""
        return str(self.get_json("stop", STOPPED))

    def end_job(self, outcome: str) -> None:
        """End the job for every role; the first outcome counts. Outcomes in CLEAN_JOB_OUTCOMES are no failure."""
        with suppress(ControlLost):  # without a control service every role exits anyway
            self.run("put_if_absent", "end", {"outcome": outcome, "role": self.role}, seconds=END_SECONDS)

    def job_end(self) -> dict[str, str] | None:
        """{"outcome", "role"} of the job's end, or None while it runs."""
        end: dict[str, str] | None = self.get_json("end")
        return end

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Context in which the control service runs on after the end of the job, for at most KEEP_ALIVE_SECONDS."""
        self.put_json("keep_alive", self.role)
        try:
            yield
        finally:
            with suppress(ControlLost):
                self.run("put", "keep_alive", None, seconds=END_SECONDS)

    def shutdown(self) -> None:
        """Let the control service exit without lingering."""
        with suppress(ControlLost):  # it has exited
            self.run("put", "shutdown", True, seconds=END_SECONDS)

    def close(self) -> None:
        """Stop the heartbeat."""
        self._follows.clear()

    # -- tickets ----------------------------------------------------------------------------------

    def start_ticket_epoch(self, restart_epoch: int, version: int, tickets: Mapping[int, TaskReference]) -> None:
        """Trainer: issue the first tickets of a restart epoch, which resumes from a policy version."""
        self.run("start_epoch", restart_epoch, version, list(tickets.items()))

    def ticket_epoch_count(self) -> int:
        """Number of the job's ticket epochs; 0 until the trainer has started the first."""
        return int(self.get_json("tickets/epoch_count", 0))

    def issue_tickets(self, tickets: Mapping[int, TaskReference]) -> None:
        """Trainer: let workers claim these tickets, too, after the others."""
        self.run("append", TICKETS, list(tickets.items()))

    def rewind_tickets(self) -> tuple[list[tuple[int, int]], dict[int, TaskReference], int]:
        """Trainer: take back the tickets that were never claimed, and stop claims until `start_ticket_epoch`.

        Returns restart epoch and version of each epoch of the job, the tasks of the open tickets, and the lowest
        ticket that was never issued.
        """
        found = self.run("rewind_tickets")
        tasks = {ticket: TaskReference(*task) for ticket, task in found["open"]}
        return [(epoch, version) for epoch, version in found["epochs"]], tasks, found["end"]

    def unfinished_claims(self) -> list[TicketClaim]:
        """Worker: tickets that earlier instances of this role claimed and did not close, in order."""
        return list(map(TicketClaim.from_json, self.run("claims_of", TICKETS, self.role)))

    def close_ticket(self, ticket: int) -> None:
        """Worker: close a ticket, whose group is completely in the ring."""
        self.run("close", TICKETS, ticket)

    # -- other queues -----------------------------------------------------------------------------

    def claim(self, queue: str, owner: str, count: int, sharers: int = 1, wait_seconds: float = 0.0) -> list[Any]:
        """Claim up to `count` items of a queue for `owner`, [item, content, restart epoch] each; none of a queue that
        was removed.
        """
        items: list[Any] = self._send([["claim", queue, owner, count, sharers]], wait_seconds=wait_seconds)[0]
        return items

    def run(self, *command: Any, seconds: float | None = None) -> Any:
        """Run a command of the state machine (state.py); returns its reply. Raises ValueError if it fails."""
        return self._send([command], seconds)[0]

    # -- values -----------------------------------------------------------------------------------

    def put_json(self, key: str, value: object) -> None:
        """Store a JSON value; None removes it."""
        self.run("put", key, value)

    def put_if_absent(self, key: str, value: object) -> Any:
        """Store a JSON value unless there is one; returns the stored value."""
        return self.run("put_if_absent", key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, initially 0; returns the sum."""
        return int(self.run("add", key, amount))

    def add_all(self, amounts: Mapping[str, int]) -> list[int]:
        """Add to several numbers at once; returns the sums in the same order."""
        return list(map(int, self._send([["add", key, amount] for key, amount in amounts.items()])))

    def get_json(self, key: str, default: object = None) -> Any:
        """A JSON value, or the default while it is not set. Raises JobFailed without a control service."""
        if not self._follows.is_set():
            value = self._ask(key)
        else:
            if key not in self._facts.facts:
                self._facts.follow([key])
            elif self._lost is not None:
                raise JobFailed(str(self._lost)) from self._lost
            value = self._facts.facts[key][1]
        return default if value is None else value

    def wait_for_key(self, key: str, seconds: float, what: str, watched_roles: tuple[str, ...] = ()) -> Any:
        """Wait for a value and return it. Raises JobFailed naming `what` after `seconds`."""
        deadline = time.monotonic() + seconds
        while (value := self.get_json(key)) is None:
            self.check_job(watched_roles)
            if time.monotonic() > deadline:
                raise JobFailed(f"{self.role} waited {seconds:.0f} s for {what}")
            time.sleep(POLL_SECONDS)
        return value

    def _ask(self, key: str, seconds: float | None = None) -> Any:
        fields = {"keys": [key]}
        return self._connection.sync(make_fields=lambda: fields, seconds=seconds)["facts"][key][1]

    def _send(
        self, commands: Sequence[Sequence[Any]], seconds: float | None = None, wait_seconds: float = 0.0
    ) -> list[Any]:
        """Run commands. The facts that this client reads afterwards are from after them."""
        request = self._facts.request() if self._follows.is_set() else {}
        answer = self._connection.sync(commands, lambda: request, wait_seconds, seconds)
        if request:
            self._facts.merge(request, answer)
        replies: list[Any] = answer["replies"]
        return replies


class Claimer:
    """Claims items of one queue, so that neither a wait nor an outage holds up the caller. Methods never wait.

    They raise JobFailed without a control service.
    """

    def __init__(self, control: ControlClient, queue: str, owner: str, sharers: int = 1) -> None:
        """`owner`: the name that claims; `sharers`: the number of claimers that share free items."""
        self._control, self._queue, self._owner, self._sharers = control, queue, owner, sharers
        self._thread: threading.Thread | None = None
        self._claimed: list[Any] = []
        self._error: Exception | None = None

    def poll(self, room: int) -> list[Any]:
        """Items claimed since the last call, as `ControlClient.claim` returns them; then claims more, up to `room`."""
        if self._is_busy():
            return []
        claimed, self._claimed = self._claimed, []
        if room > len(claimed):
            self._start(lambda: self._claim(room - len(claimed)))
        return claimed

    def put_back(self) -> None:
        """Let others claim the items of the last claim: the caller cannot use them now. Call this until it can."""
        if not self._is_busy() and self._claimed:
            items, self._claimed = [item for item, *_ in self._claimed], []
            self._start(lambda: self._control.run("give_back", self._queue, self._owner, items))

    def _claim(self, count: int) -> None:
        self._claimed = self._control.claim(self._queue, self._owner, count, self._sharers, CLAIM_SECONDS)

    def _is_busy(self) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return True
        if self._error is not None:
            raise self._error
        return False

    def _start(self, request: Callable[[], object]) -> None:
        def run() -> None:
            try:
                request()
            except Exception as error:  # raised by the next call
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
