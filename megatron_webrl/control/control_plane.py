"""The control plane: one TCPStore that outlives trainer and workers, and a client for its few small keys.

`serve` is the `webrl control` process, `ControlClient` a role's connection. No data passes through it.
Tickets (docs/architecture.md): slot n may be claimed while n is below the limit that the trainer raises. After a resume
the first slots stand for the tickets open in the checkpoint. A worker writes its name to the slot it claims and closes
it once its group is in the ring, so that a restarted worker finds its unfinished claims. A trainer that restarts within
the job fences off the slots claimed before and starts another ticket epoch.
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
KEEP_ALIVE_SECONDS = 90.0  # longest time that ControlClient.keep_alive delays the exit after the end of the job
LINGER_SECONDS = 10.0  # after that, so that every role reads the outcome
OPERATION_SECONDS = 30.0
TICKET_DONE = "done"  # value of a closed slot, whose group is in the ring; no role has this name
TICKET_FENCE = "fence"  # value of a slot between two ticket epochs, which stands for no ticket
_CHUNK = 1000  # slots read at once


class JobEnded(Exception):
    """The job has ended cleanly; the role should finish and exit with code 0."""


class JobFailed(RuntimeError):
    """Another role failed or was lost. The message names it."""


@dataclass(frozen=True)
class TicketEpoch:
    """Maps slots of the counter to tickets, from the start of one restart epoch until the next."""

    restart_epoch: int
    version: int
    first_slot: int  # the epoch's first
    open_tickets: tuple[int, ...]  # claimed before and to be run again: the epoch's first slots stand for them
    next_ticket: int  # ticket of the slot after those

    def ticket_at(self, slot: int) -> int:
        """The ticket of a slot at or after first_slot."""
        index = slot - self.first_slot
        return self.open_tickets[index] if index < len(self.open_tickets) else self.next_ticket_at(slot)

    def next_ticket_at(self, slot: int) -> int:
        """The lowest ticket never claimed, if `slot` is the next to be claimed."""
        return self.next_ticket + max(0, slot - self.first_slot - len(self.open_tickets))


def ticket_epoch_at(epochs: Sequence[TicketEpoch], slot: int) -> TicketEpoch:
    """The epoch of a slot, out of a job's epochs in order."""
    return next(epoch for epoch in reversed(epochs) if epoch.first_slot <= slot)


def ticket_limit(
    first_slot: int, surviving_tickets: int, closed_tickets: int, updates_ahead: int, groups_per_update: int
) -> int:
    """Limit of the ticket counter (docs/rollout.md): a group started below it will be fresh enough to train on.

    first_slot: of the epoch; surviving_tickets: claimed before it and kept; closed_tickets: trained or dropped in it.
    With the counter at n, (n - first_slot) + surviving - closed tickets are open: at most those of the next update and
    of `updates_ahead` more. Without a restart the limit is (updates_ahead + version + 1) * groups_per_update + dropped.
    """
    return first_slot - surviving_tickets + closed_tickets + (updates_ahead + 1) * groups_per_update


def serve(host: str, port: int, job_id: str, address_file: Path | None = None, seconds: float | None = None) -> None:
    """Run the store until the job has ended and its roles could read the outcome, or `seconds` have passed. Listens on
    `host` only; `address_file` receives {"host", "port", "pid", "job_id"} once the store accepts connections.
    """
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    # The store owns the descriptor and closes it.
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
            log.warning("control plane exits after %.0f s although the job has not ended", seconds)
            return
        time.sleep(POLL_SECONDS * 4)
    for key, limit in (("keep_alive", KEEP_ALIVE_SECONDS), ("end", LINGER_SECONDS)):
        since = time.monotonic()
        while store.check([key]) and time.monotonic() - since < limit and not store.check(["shutdown"]):
            time.sleep(POLL_SECONDS)


class ControlClient:
    """One role's connection to the control plane. For one thread; heartbeats use a second connection."""

    def __init__(
        self, host: str, port: int, role: str, heartbeat_timeout_seconds: float, connect_seconds: float = 60.0
    ) -> None:
        """Connect. Raises JobFailed without a connection within `connect_seconds`."""
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
        self._sends_heartbeats = threading.Event()
        self._progress = 0

    # -- liveness and the end of the job ----------------------------------------------------------

    def start_heartbeat(self) -> None:
        """Send a heartbeat every HEARTBEAT_SECONDS from a daemon thread until `close`."""
        self._sends_heartbeats.set()
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    def _send_heartbeats(self) -> None:
        # A connection of its own: a blocking call of the role must not delay the heartbeat.
        with suppress(DistNetworkError, DistStoreError):
            store = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False)
            beats = sent = 0
            while self._sends_heartbeats.is_set():
                beats += 1
                store.set(f"heartbeat/{self.role}", f"{beats} {time.time():.1f}")
                if sent != (progress := self._progress):
                    store.set(f"progress/{self.role}", f"{os.getpid()}:{progress}")
                    sent = progress
                time.sleep(HEARTBEAT_SECONDS)

    def report_progress(self) -> None:
        """Count progress of this role for the hang detector; `check_job` and `report_status` do so, too. For the main
        thread, between operations that have a limit: heartbeats continue while the main thread hangs.
        """
        self._progress += 1

    def liveness_value(self, role: str, kind: str) -> str:
        """A value that changes while a role is alive ("heartbeat") or makes progress ("progress"); initially empty."""
        return self._get(f"{kind}/{role}") or ""

    def check_job(self, watched_roles: tuple[str, ...] = (), grace_seconds: float = 0.0) -> None:
        """Raise JobEnded or JobFailed if the job has ended, and JobFailed if a watched role is lost (see is_lost)."""
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
        """Whether a role has sent no heartbeat for `heartbeat_timeout_seconds` of this watch; False before its first
        one. `grace_seconds` extend the limit for a restart of the role; a cleared heartbeat then counts as silence.
        """
        beat = self._get(f"heartbeat/{role}") or ""
        seen, since = self._watched.get(role, ("", 0.0))
        if beat != seen and (beat or not grace_seconds):
            self._watched[role] = (beat, time.monotonic())
            return False
        return bool(seen) and time.monotonic() - since > self.heartbeat_timeout_seconds + grace_seconds

    def reset_heartbeat_watch(self) -> None:
        """Begin to watch all roles again, after this process was suspended and missed heartbeats."""
        self._watched.clear()

    def clear_heartbeat(self, role: str) -> None:
        """Clear a role's heartbeat and progress before its restart: it is not lost until it has sent another."""
        self.store.delete_key(f"heartbeat/{role}")
        self.store.delete_key(f"progress/{role}")

    def register_instance(self) -> int:
        """Register this instance of the role; returns its number, which counts the role's restarts from 1."""
        return int(self.store.add(f"instances/{self.role}", 1))

    def instance_count(self, role: str) -> int:
        """Number of instances that a role has registered."""
        return int(self._get(f"instances/{role}") or 0)

    def instance_has_ended(self, instance_id: str) -> bool:
        """Whether an instance <role>.<number> has ended: its role has registered another, was given up, or is lost."""
        role, _, number = instance_id.rpartition(".")
        return role in self.given_up_workers() or self.instance_count(role) != int(number) or self.is_lost(role)

    def give_up_worker(self, worker: str, reason: str) -> None:
        """Supervisor: let the job continue without a worker; other workers adopt its claims, and it ends itself."""
        self.store.append("workers/given_up", json.dumps([worker, reason]) + "\n")  # type: ignore[attr-defined]

    def given_up_workers(self) -> dict[str, str]:
        """The reason by worker given up, in order."""
        return dict(json.loads(line) for line in (self._get("workers/given_up") or "").splitlines())

    def request_stop(self, outcome: str = STOPPED) -> None:
        """Request the end after the current update, with a checkpoint. STOPPED replaces others, not vice versa."""
        if outcome == STOPPED:
            self.store.set("stop", outcome)
        else:
            self.store.compare_set("stop", "", outcome)

    def stop_requested(self) -> bool:
        """Whether a stop was requested."""
        return self._get("stop") is not None

    def requested_outcome(self) -> str:
        """The outcome of a requested stop."""
        return self._get("stop") or STOPPED

    def end_job(self, outcome: str) -> None:
        """End the job for every role; the first outcome counts. Outcomes in CLEAN_JOB_OUTCOMES are no failure."""
        with suppress(DistNetworkError, DistStoreError):  # without a control plane every role exits anyway
            self.store.compare_set("end", "", json.dumps({"outcome": outcome, "role": self.role}))

    def job_end(self) -> dict[str, str] | None:
        """{"outcome", "role"} of the job's end, or None while it runs."""
        text = self._get("end")
        return json.loads(text) if text else None

    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Context in which the control plane runs on after the end of the job, for at most KEEP_ALIVE_SECONDS."""
        self.store.set("keep_alive", self.role)
        try:
            yield
        finally:
            with suppress(DistNetworkError, DistStoreError):
                self.store.delete_key("keep_alive")

    def shutdown(self) -> None:
        """Let the control plane exit without lingering."""
        with suppress(DistNetworkError, DistStoreError):
            self.store.set("shutdown", "1")

    def close(self) -> None:
        """Stop the heartbeat."""
        self._sends_heartbeats.clear()

    def report_status(self, status: str) -> None:
        """Publish this role's status line for the dashboard."""
        self.report_progress()
        self.store.set(f"status/{self.role}", status)

    def status_of(self, role: str) -> str:
        """The last status line of a role."""
        return self._get(f"status/{role}") or ""

    # -- tickets ----------------------------------------------------------------------------------

    def start_ticket_epoch(self, epoch: TicketEpoch, limit: int) -> None:
        """Trainer: publish an epoch, so that workers may claim its slots. Later epochs of a job start at a fence."""
        number = self.ticket_epoch_count()
        if number == 0:
            self.store.set("tickets/claimed", str(epoch.first_slot))
            self.store.set("tickets/limit", str(limit))
        self.store.set(f"tickets/epoch/{number}", json.dumps(asdict(epoch)))
        self.store.set("tickets/epoch_count", str(number + 1))
        self.store.set("tickets/limit", str(limit))

    def ticket_epoch_count(self) -> int:
        """Number of the job's ticket epochs; 0 until the trainer has started the first."""
        return int(self._get("tickets/epoch_count") or 0)

    def ticket_epochs(self) -> tuple[TicketEpoch, ...]:
        """All ticket epochs of the job, in order."""
        epochs = [json.loads(self.store.get(f"tickets/epoch/{number}")) for number in range(self.ticket_epoch_count())]
        return tuple(TicketEpoch(**{**fields, "open_tickets": tuple(fields["open_tickets"])}) for fields in epochs)

    def fence_tickets(self) -> int:
        """Trainer: stop claims until `start_ticket_epoch`; returns the fence's slot: all below it are claimed."""
        self.set_ticket_limit(0)
        slot = self.claim("tickets", lambda: sys.maxsize, TICKET_FENCE)
        assert slot is not None
        return slot

    def set_ticket_limit(self, limit: int) -> None:
        """Trainer: set the slot below which workers may claim."""
        self.store.set("tickets/limit", str(limit))

    def free_slots(self) -> int:
        """Worker: number of slots below the limit; other workers may claim them first."""
        return max(0, int(self.store.get("tickets/limit")) - self.claimed_slots())

    def claim_slot(self) -> int | None:
        """Worker: claim the next slot of the ticket counter; None while it is at the limit."""
        return self.claim("tickets", lambda: int(self.store.get("tickets/limit")), self.role)

    def claim(self, counter: str, limit: Callable[[], int], name: str) -> int | None:
        """Claim the next slot of a counter for `name`; None while it is at the limit. <counter>/claimed is the number
        of claimed slots, <counter>/<slot> the name of the slot's owner.
        """
        while True:
            slot = int(self.store.get(f"{counter}/claimed"))
            if slot >= limit():
                return None
            owner = self.store.compare_set(f"{counter}/{slot}", "", name).decode()
            # Losers of the race advance the counter, too: the owner may have died before it could.
            self.store.compare_set(f"{counter}/claimed", str(slot), str(slot + 1))
            if owner == name:
                return slot

    def close_slot(self, slot: int) -> None:
        """Worker: close a slot, whose group is completely in the ring."""
        self.store.set(f"tickets/{slot}", TICKET_DONE)

    def unfinished_claims(self, first: int, worker: str = "") -> list[int]:
        """Slots from `first` on that ended instances of a worker, this role by default, claimed and did not close."""
        owners, worker = self.claims(first, self.claimed_slots()), worker or self.role
        return [slot for slot, owner in enumerate(owners, first) if owner == worker]

    def adopt_slot(self, slot: int, worker: str) -> bool:
        """Worker: take over a slot that a worker given up did not close; False if another one was faster."""
        return self.store.compare_set(f"tickets/{slot}", worker, self.role).decode() == self.role

    def claims(self, first: int, end: int) -> list[str]:
        """The owner of each claimed slot in [first, end), or TICKET_DONE, or TICKET_FENCE."""
        owners: list[str] = []
        for start in range(first, end, _CHUNK):
            keys = [f"tickets/{slot}" for slot in range(start, min(start + _CHUNK, end))]
            owners += [owner.decode() for owner in self.store.multi_get(keys)]
        return owners

    def claimed_slots(self) -> int:
        """Number of slots claimed so far."""
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
        """Wait for a key and return its text. Raises JobFailed naming `what` after `seconds`."""
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
