"""Roles that hang: who finds them, and who ends them after all roles of the job have shown their stacks.

`Judge` looks at the control plane, where the launcher or the first node of a job runs it. What it finds goes as an
order through a file in the run's folder, which costs those who supervise processes no connection: `Supervisor`, on each
machine, has all its roles write their stacks into their logs, then kills those that the order names and that still
hang. What is killed takes the way of any role that dies.

A worker hangs if it sends no heartbeat for run.heartbeat_timeout_seconds, or makes no progress for run.hang_timeout_seconds. Of trainer
ranks that wait for each other all look alike: they hang once none has made progress for so long, and the first to have
stopped is killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_webrl.cluster.placement import rollout_process_names
from megatron_webrl.config.schema import Config
from megatron_webrl.system import child_process, stack_dump
from megatron_webrl.tracking import events
from megatron_webrl.tracking.events import EventLog

if TYPE_CHECKING:
    from megatron_webrl.control.control_plane import ControlClient
    from megatron_webrl.launch.role_process import RoleProcess

REQUEST_FILE = "kill_request.json"
LivenessSign = tuple[str, str]  # its kind, and what it was, as Control.sign_of_life has them
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class KillRequest:
    """To show the stacks of all roles, and to kill some."""

    request_id: int  # tells orders apart
    reason: str
    targets: Mapping[str, LivenessSign]  # by role: the sign of life that has not changed


def request_stack_dump(folder: Path, why: str, kill: Mapping[str, LivenessSign] | None = None) -> KillRequest:
    """Give an order to all who supervise roles of a run."""
    given = KillRequest(time.time_ns(), why, kill or {})
    temporary = folder / f".{REQUEST_FILE}"
    temporary.write_text(json.dumps(asdict(given)) + "\n")
    temporary.rename(folder / REQUEST_FILE)
    return given


def latest_request(folder: Path) -> KillRequest | None:
    """The newest order."""
    path = folder / REQUEST_FILE
    if not path.is_file():
        return None
    fields = json.loads(path.read_text())
    return KillRequest(
        fields["request_id"], fields["reason"], {role: (kind, sign) for role, (kind, sign) in fields["targets"].items()}
    )


class HangDetector:
    """Finds roles that hang. `look` is called again and again by one thread."""

    def __init__(self, config: Config, control: ControlClient) -> None:
        """`control`: the connection of the launcher or of the first node."""
        self.config, self.control = config, control
        self._workers = rollout_process_names(config)  # parts of their engines included
        self._seen: dict[str, tuple[str, float]] = {}  # by role: its last mark, and since when it is that
        self._ordered: dict[str, LivenessSign] = {}  # by role: with which it was last found hanging
        self._next = 0.0

    def poll(self) -> KillRequest | None:
        """Look if it is time; returns the order that was given, if any."""
        now = time.monotonic()
        if now < self._next:
            return None
        if now > self._next + 5 * POLL_SECONDS:  # this process itself was held up, and can say nothing of others
            self._seen.clear()
            self.control.reset_heartbeat_watch()
        self._next = now + POLL_SECONDS
        limit = self.config.run.hang_timeout_seconds
        found: dict[str, tuple[str, str]] = {}  # by role: the kind of sign that is missing, and what to say
        for worker in self._workers:
            if self.control.is_lost(worker):
                found[worker] = (
                    "heartbeat",
                    f"sent no heartbeat for {self.config.run.heartbeat_timeout_seconds:g} s (run.heartbeat_timeout_seconds)",
                )
            elif limit and self._silence(worker, now) > limit:
                found[worker] = "progress", f"made no progress for {limit:g} s (run.hang_timeout_seconds)"
        if limit and self.control.ticket_epoch_count():
            ranks = [f"trainer-{rank}" for rank in range(self.config.trainer_world_size)]
            silent = {rank: self._silence(rank, now) for rank in ranks}
            if min(silent.values()) > limit:
                first = max(silent, key=lambda rank: silent[rank])
                found[first] = (
                    "progress",
                    f"made no progress for {silent[first]:.0f} s, no trainer rank for {limit:g} s",
                )
        return self._order(found)

    def _order(self, found: Mapping[str, tuple[str, str]]) -> KillRequest | None:
        signs = {role: (kind, self.control.liveness_value(role, kind)) for role, (kind, _) in found.items()}
        fresh = {role: sign for role, sign in signs.items() if self._ordered.get(role) != sign}
        if not fresh:
            return None
        self._ordered |= fresh
        return request_stack_dump(
            self.config.run_folder, "; ".join(f"{role} {found[role][1]}" for role in fresh), fresh
        )

    def _silence(self, role: str, now: float) -> float:
        """Seconds for which a role has made no progress while this one looked; 0 before its first."""
        mark = self.control.liveness_value(role, "progress")
        seen, since = self._seen.get(role, (None, now))
        if mark != seen:
            since = now
            self._seen[role] = (mark, now)
        return now - since if mark else 0.0


class StackDumper:
    """Does what orders say, for the roles of one machine."""

    def __init__(self, journal: EventLog, tell: Callable[[str], None]) -> None:
        """`journal`: of these roles; `tell` tells people. Orders that are there already are of an earlier life."""
        self.folder, self.journal, self.report_message = journal.folder, journal, tell
        self._done = self._newest()
        self._next = 0.0

    def poll(self, roles: Sequence[RoleProcess], connect: Callable[[], ControlClient]) -> None:
        """Look for an order if it is time. `connect`: to the control plane, once somebody is to be killed."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + POLL_SECONDS
        if (newest := self._newest()) == self._done:
            return
        self._done = newest
        if (given := latest_request(self.folder)) is None:
            return
        running = [role for role in roles if role.process.poll() is None]
        for role in running:
            for missing in stack_dump.dump_stacks(role.process.pid, role.log, given.reason):
                self.report_message(f"{role.name}: {missing}")
        named = [role for role in running if role.name in given.targets]
        if named:
            self._kill(named, given, connect)

    def _kill(self, named: Sequence[RoleProcess], given: KillRequest, connect: Callable[[], ControlClient]) -> None:
        from megatron_webrl.control.control_plane import (
            JobFailed,  # torch comes with it, which a node has no other use for
        )

        try:
            self._kill_hanging(named, given, connect())
        except JobFailed as error:
            self.report_message(f"nobody is killed: {error}")

    def _kill_hanging(self, named: Sequence[RoleProcess], given: KillRequest, control: ControlClient) -> None:
        for role in named:
            kind, sign = given.targets[role.name]
            if control.liveness_value(role.name, kind) != sign:
                self.report_message(f"{role.name} goes on, and is not killed")
                continue
            words = f"{role.name} is killed, for: {given.reason}"
            with role.log.open("a") as log:
                log.write(f"ERROR {words}\n")  # its last words
            self.report_message(words)
            self.journal.add(role.name, events.KILLED, given.reason, role.log)
            role.process.kill()
            role.process.wait(child_process.KILL_SECONDS)

    def _newest(self) -> tuple[int, int] | None:
        path = self.folder / REQUEST_FILE
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


class Watchdog:
    """Both in one, for who has a connection and supervises roles, too."""

    def __init__(self, config: Config, control: ControlClient, journal: EventLog, tell: Callable[[str], None]) -> None:
        """See Judge and Supervisor."""
        self._control, self._judge, self._tell = control, HangDetector(config, control), tell
        self._supervisor = StackDumper(journal, tell)

    def poll(self, roles: Sequence[RoleProcess]) -> None:
        """Look for roles of the job that hang, and do what was ordered for those given."""
        if given := self._judge.poll():
            self._tell(f"{given.reason}: all roles show their stacks in their logs")
        self._supervisor.poll(roles, lambda: self._control)
