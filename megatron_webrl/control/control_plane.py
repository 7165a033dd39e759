"""The control plane: one TCPStore that outlives both steps, and the few small keys they meet through.

`serve` is the `webrl control` process. `Control` is a role's connection: rendezvous, tickets, policy
version, heartbeats, stop. No data passes through it.

Tickets (docs/architecture.md): position n of the counter may be taken while n is under the limit that
the trainer raises. After a resume the first positions stand for the tickets that were open in the
checkpoint; later positions stand for fresh tickets. Who takes a position signs it, and marks it once its
group is in the ring: a worker that is started again finds what its earlier life left undone. The counter goes on
when the trainer is started again within the job: it fences off what was taken before, and opens the job once more.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from megatron_webrl.types import CLEAN_JOB_OUTCOMES, STOPPED

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
HEARTBEAT_SECONDS = 1.0
LINGER_SECONDS = 10.0  # the control plane stays this long after the end, so that every role reads it
KEEP_ALIVE_SECONDS = 90.0  # and before that, while the trainer does its accounts, at most so long
OPERATION_SECONDS = 30.0
TICKET_DONE = "done"  # instead of the signature on a position whose group is in the ring; no role has this name
TICKET_FENCE = "fence"  # the signature on a position between the tickets of two incarnations; it stands for no ticket
_CHUNK = 1000  # positions asked for at once


class JobEnded(Exception):
    """The job has ended in good order; the role should finish and exit 0."""


class JobFailed(RuntimeError):
    """Another role failed or was lost. The message names it."""


@dataclass(frozen=True)
class TicketEpoch:
    """What the positions of the counter stand for, from the beginning of an incarnation on."""

    restart_epoch: int
    version: int
    first_slot: int  # position from which on it holds
    open_tickets: tuple[int, ...]  # taken before, to be run again: the first positions stand for them
    next_ticket: int  # ticket of the position after those

    def ticket_at(self, position: int) -> int:
        """The ticket at a position of the counter, from `first` on."""
        index = position - self.first_slot
        return self.open_tickets[index] if index < len(self.open_tickets) else self.next_ticket_at(position)

    def next_ticket_at(self, position: int) -> int:
        """The lowest ticket that was never taken, where `position` is the next one to be taken."""
        return self.next_ticket + max(0, position - self.first_slot - len(self.open_tickets))


def ticket_epoch_at(starts: Sequence[TicketEpoch], position: int) -> TicketEpoch:
    """The one of a job's starts, in their order, that says what a position stands for."""
    return next(start for start in reversed(starts) if start.first_slot <= position)


def ticket_limit(
    first_slot: int, surviving_tickets: int, closed_tickets: int, updates_ahead: int, groups_per_update: int
) -> int:
    """Where the counter of positions may get to (docs/rollout.md): a group started under this limit is trainable.

    first: position from which on the start holds; survivors: tickets taken before that come as they are; closed:
    tickets trained or dropped since; ahead: updates whose groups may be begun before their turn.

    Where the counter stands at n, (n - first) + survivors - closed tickets are taken and not closed: at most those of
    the next update and of `ahead` more. Without a restart closed = version * groups_per_update + dropped, and the limit
    (ahead + version + 1) * groups_per_update + dropped.
    """
    return first_slot - surviving_tickets + closed_tickets + (updates_ahead + 1) * groups_per_update


def serve(host: str, port: int, job_id: str, address_file: Path | None = None, seconds: float | None = None) -> None:
    """Host the store until the job has ended (plus LINGER_SECONDS, and as long as it is held) or `seconds` have passed.

    Listens on `host` only. `ring_name` tells the job from others; on one node its ring has that name.
    `address_file` receives {"host", "port", "pid", "job_id"} once the store accepts connections.
    """
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    # The store takes the descriptor over and closes it.
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    store.set("job/id", job_id)
    if address_file is not None:
        temporary = address_file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"host": host, "port": port, "pid": os.getpid(), "job_id": job_id}))
        temporary.rename(address_file)
    log.info("control plane on %s:%d", host, port)
    deadline = None if seconds is None else time.monotonic() + seconds
    while not store.check(["end"]):
        if deadline is not None and time.monotonic() > deadline:
            log.warning("control plane ends after %.0f s without an end of the job", seconds)
            return
        time.sleep(POLL_SECONDS * 4)
    for key, limit in (("keep_alive", KEEP_ALIVE_SECONDS), ("end", LINGER_SECONDS)):
        since = time.monotonic()
        while store.check([key]) and time.monotonic() - since < limit and not store.check(["shutdown"]):
            time.sleep(POLL_SECONDS)


class ControlClient:
    """One role's connection to the control plane. Used by one thread; heartbeats go through another connection."""

    def __init__(
        self, host: str, port: int, role: str, heartbeat_timeout_seconds: float, connect_seconds: float = 60.0
    ) -> None:
        """Connect. Raises JobFailed if nothing answers within `connect_seconds`."""
        self.host, self.port, self.role, self.heartbeat_timeout_seconds = host, port, role, heartbeat_timeout_seconds
        try:
            self.store = TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=connect_seconds), wait_for_workers=False
            )
        except (DistNetworkError, DistStoreError) as error:
            raise JobFailed(
                f"{role} cannot reach the control plane at {host}:{port} within {connect_seconds:.0f} s"
            ) from error
        self.store.set_timeout(timedelta(seconds=OPERATION_SECONDS))
        self._watched: dict[str, tuple[str, float]] = {}  # role -> its last heartbeat, and when it was first seen
        self._beating = threading.Event()
        self._marks = 0

    # -- life and death ---------------------------------------------------------------------------

    def start_heartbeat(self) -> None:
        """Send a heartbeat every BEAT_SECONDS from a daemon thread until `close`."""
        self._beating.set()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        # A connection of its own: a blocking call of the role must not hold the heartbeat back.
        with suppress(DistNetworkError, DistStoreError):
            store = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False)
            beats = marked = 0
            while self._beating.is_set():
                beats += 1
                store.set(f"heartbeat/{self.role}", f"{beats} {time.time():.1f}")
                if marked != (marks := self._marks):
                    store.set(f"progress/{self.role}", f"{os.getpid()}:{marks}")
                    marked = marks
                time.sleep(HEARTBEAT_SECONDS)

    def report_progress(self) -> None:
        """Make a mark that this role gets on, for who looks for roles that hang; `check` and `report` do, too.

        For its main thread, between steps that end by themselves or have a limit: heartbeats go on where it hangs.
        """
        self._marks += 1

    def liveness_value(self, role: str, kind: str) -> str:
        """What changes while a role lives (kind "heartbeat") or gets on (kind "progress"); empty before the first sign."""
        return self._get(f"{kind}/{role}") or ""

    def check_job(self, watched_roles: tuple[str, ...] = (), grace_seconds: float = 0.0) -> None:
        """Raise Stopped or JobFailed if the job has ended, or JobFailed if a watched role is lost (see is_lost)."""
        self.report_progress()
        end = self.job_end()
        if end is not None:
            if end["outcome"] in CLEAN_JOB_OUTCOMES:
                raise JobEnded
            raise JobFailed(end["outcome"])
        for role in watched_roles:
            if self.is_lost(role, grace_seconds):
                raise JobFailed(
                    f"{role} is lost: no heartbeat for {self.heartbeat_timeout_seconds + grace_seconds:.0f} s"
                )

    def is_lost(self, role: str, grace_seconds: float = 0.0) -> bool:
        """Whether a role that was heard of has been silent for `heartbeat_timeout_seconds` while this one looked.

        With `patience` it has that many seconds more, in which it may be started again; a heartbeat that was taken away
        is silence, too.
        """
        beat = self._get(f"heartbeat/{role}") or ""
        seen, since = self._watched.get(role, ("", 0.0))
        if beat != seen and (beat or not grace_seconds):
            self._watched[role] = (beat, time.monotonic())
            return False
        return bool(seen) and time.monotonic() - since > self.heartbeat_timeout_seconds + grace_seconds

    def reset_heartbeat_watch(self) -> None:
        """Count the silence of all roles from here on: this one was held up, and could not look."""
        self._watched.clear()

    def clear_heartbeat(self, role: str) -> None:
        """Take a role's signs of life away before it is started again: it is not lost until it has sent another."""
        self.store.delete_key(f"heartbeat/{role}")
        self.store.delete_key(f"progress/{role}")

    def register_instance(self) -> int:
        """Number of this life of the role, from 1: a role that is started again counts on."""
        return int(self.store.add(f"instances/{self.role}", 1))

    def instance_count(self, role: str) -> int:
        """How many lives a role has begun."""
        return int(self._get(f"instances/{role}") or 0)

    def instance_has_ended(self, life: str) -> bool:
        """Whether a life of a role, named <role>.<number>, is over: the role began another, or is lost (is_lost)."""
        role, _, number = life.rpartition(".")
        return self.instance_count(role) != int(number) or self.is_lost(role)

    def request_stop(self, outcome: str = STOPPED) -> None:
        """Ask the trainer to end after the update it is at, with a checkpoint, and with that outcome.

        STOPPED, which the user asks for, takes the place of PREEMPTED, and not the other way round.
        """
        if outcome == STOPPED:
            self.store.set("stop", outcome)
        else:
            self.store.compare_set("stop", "", outcome)

    def stop_requested(self) -> bool:
        """Whether somebody asked for an early end."""
        return self._get("stop") is not None

    def requested_outcome(self) -> str:
        """The outcome of a job that ends early: as was asked for."""
        return self._get("stop") or STOPPED

    def end_job(self, outcome: str) -> None:
        """End the job for every role; the first outcome counts. Those of GOOD_OUTCOMES are no failure."""
        with suppress(DistNetworkError, DistStoreError):  # without a control plane every role ends anyway
            self.store.compare_set("end", "", json.dumps({"outcome": outcome, "role": self.role}))

    def job_end(self) -> dict[str, str] | None:
        """How the job ended, or None while it runs."""
        text = self._get("end")
        return json.loads(text) if text else None

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Within this context the control plane stays, HELD_SECONDS at most, though the job has ended."""
        self.store.set("keep_alive", self.role)
        try:
            yield
        finally:
            with suppress(DistNetworkError, DistStoreError):
                self.store.delete_key("keep_alive")

    def shutdown(self) -> None:
        """Let the control plane go without lingering."""
        self.store.set("shutdown", "1")

    def close(self) -> None:
        """Stop the heartbeat."""
        self._beating.clear()

    def report_status(self, status: str) -> None:
        """Tell what this role is doing, in a few words, for the live board."""
        self.report_progress()
        self.store.set(f"status/{self.role}", status)

    def status_of(self, role: str) -> str:
        """What a role last reported."""
        return self._get(f"status/{role}") or ""

    # -- tickets ----------------------------------------------------------------------------------

    def start_ticket_epoch(self, start: TicketEpoch, limit: int) -> None:
        """Trainer: publish what positions stand for; from here on workers may take them.

        A start beside the first of a job begins behind a fence.
        """
        number = self.ticket_epoch_count()
        if number == 0:
            self.store.set("tickets/claimed", str(start.first_slot))
            self.store.set("tickets/limit", str(limit))
        self.store.set(f"tickets/epoch/{number}", json.dumps(asdict(start)))
        self.store.set("tickets/epoch_count", str(number + 1))
        self.store.set("tickets/limit", str(limit))

    def ticket_epoch_count(self) -> int:
        """How often the job was opened: 0 until the trainer has done so."""
        return int(self._get("tickets/epoch_count") or 0)

    def ticket_epochs(self) -> tuple[TicketEpoch, ...]:
        """All starts of the job, in their order."""
        found = [json.loads(self.store.get(f"tickets/epoch/{number}")) for number in range(self.ticket_epoch_count())]
        return tuple(TicketEpoch(**{**fields, "open_tickets": tuple(fields["open_tickets"])}) for fields in found)

    def fence_tickets(self) -> int:
        """Trainer: let nobody take another position until `open_job`; returns the position of the fence.

        Every position below it is signed, and none above it.
        """
        self.set_ticket_limit(0)
        position = self.claim("tickets", lambda: sys.maxsize, TICKET_FENCE)
        assert position is not None
        return position

    def set_ticket_limit(self, limit: int) -> None:
        """Trainer: raise the number of tickets that may be taken in all."""
        self.store.set("tickets/limit", str(limit))

    def free_slots(self) -> int:
        """Worker: how many positions could be taken; others may take them meanwhile."""
        return max(0, int(self.store.get("tickets/limit")) - self.claimed_slots())

    def claim_slot(self) -> int | None:
        """Worker: take the next position of the counter, or None while the limit is reached."""
        return self.claim("tickets", lambda: int(self.store.get("tickets/limit")), self.role)

    def claim(self, counter: str, limit: Callable[[], int], name: str) -> int | None:
        """Sign the next position of a counter with a name, or None while its limit is reached.

        <counter>/claimed counts the positions, <counter>/<position> holds who signed it.
        """
        while True:
            position = int(self.store.get(f"{counter}/claimed"))
            if position >= limit():
                return None
            owner = self.store.compare_set(f"{counter}/{position}", "", name).decode()
            # Whoever signed moves the counter on: the signer may have died before it could.
            self.store.compare_set(f"{counter}/claimed", str(position), str(position + 1))
            if owner == name:
                return position

    def close_slot(self, position: int) -> None:
        """Worker: the group of a position is in the ring, whole."""
        self.store.set(f"tickets/{position}", TICKET_DONE)

    def unfinished_claims(self, first: int) -> list[int]:
        """Worker: positions from `first` on that an earlier life of this role took and did not close, in order."""
        owners = self.claims(first, self.claimed_slots())
        return [position for position, owner in enumerate(owners, first) if owner == self.role]

    def claims(self, first: int, end: int) -> list[str]:
        """Who signed each of the positions in [first, end), all of them taken; or DONE, or FENCE."""
        found: list[str] = []
        for at in range(first, end, _CHUNK):
            keys = [f"tickets/{position}" for position in range(at, min(at + _CHUNK, end))]
            found += [owner.decode() for owner in self.store.multi_get(keys)]
        return found

    def claimed_slots(self) -> int:
        """Positions taken so far."""
        return int(self.store.get("tickets/claimed"))

    # -- values -----------------------------------------------------------------------------------

    def put_json(self, key: str, value: object) -> None:
        """Store a JSON value."""
        self.store.set(key, json.dumps(value))

    def get_json(self, key: str, default: object = None) -> object:
        """A JSON value, or the default while it is not set."""
        text = self._get(key)
        return default if text is None else json.loads(text)

    def wait_for_key(self, key: str, seconds: float, what: str, watched_roles: tuple[str, ...] = ()) -> str:
        """The text of a key once it is set. Raises JobFailed naming `what` after `seconds`."""
        deadline = time.monotonic() + seconds
        while (text := self._get(key)) is None:
            self.check_job(watched_roles)
            if time.monotonic() > deadline:
                raise JobFailed(f"{self.role} waited {seconds:.0f} s for {what}")
            time.sleep(POLL_SECONDS)
        return text

    def _get(self, key: str) -> str | None:
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except (DistNetworkError, DistStoreError) as error:
            raise JobFailed(f"{self.role} lost the control plane at {self.host}:{self.port}") from error
