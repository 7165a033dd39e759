"""Finds roles that hang, dumps the stacks of every role, and kills the hung ones.

`HangDetector`, on the first node of a job, polls the control service and writes a `KillRequest` to a file, so that
other nodes need no connection. `StackDumper`, on each node, has every role write its stacks to its log and kills the
requested roles that still hang. Their node restarts them.

A rollout worker hangs if it sends no heartbeat for run.heartbeat_timeout_seconds, or makes no progress for
Config.hang_timeout_seconds. Trainer ranks wait for each other: they hang once none has made progress for that long, and
the rank that stopped first is killed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import SupervisedProcess
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.placement.placement import Placement
from megatron_webrl.track import events
from megatron_webrl.track.events import EventLog
from megatron_webrl.util import atomic_file
from megatron_webrl.util.atomic_file import continue_without

log = logging.getLogger(__name__)

REQUEST_FILE = "kill_request.json"
LivenessSign = tuple[str, str]  # (kind, value), as of liveness_value
RoleReports = Mapping[str, Mapping[str, Any]]  # as of ControlClient.role_reports
POLL_SECONDS = 2.0


def liveness_value(reports: RoleReports, role: str, kind: str) -> str:
    """A value that changes while a role is alive ("heartbeat") or makes progress ("progress"); empty before that."""
    return str(reports.get(role, {}).get("beats" if kind == "heartbeat" else "progress", ""))


@dataclass(frozen=True)
class KillRequest:
    """Request to dump the stacks of all roles and to kill some of them."""

    request_id: int
    reason: str
    targets: Mapping[str, LivenessSign | None]  # by role: the sign that has stopped changing; None: kill it anyway


def request_stack_dump(
    folder: Path, reason: str, targets: Mapping[str, LivenessSign | None] | None = None
) -> KillRequest:
    """Write a request for every node of the run in `folder`; without targets only stacks are dumped."""
    request = KillRequest(time.time_ns(), reason, targets or {})
    atomic_file.write_json(folder / REQUEST_FILE, asdict(request))
    return request


def latest_request(folder: Path) -> KillRequest | None:
    """The newest request; None without one, and while the file system does not answer."""
    try:
        fields = json.loads((folder / REQUEST_FILE).read_text())
    except OSError:
        return None
    targets = {role: sign and (sign[0], sign[1]) for role, sign in fields["targets"].items()}
    return KillRequest(fields["request_id"], fields["reason"], targets)


class HangDetector:
    """Finds roles that hang. Used by one thread, which calls `poll` repeatedly."""

    def __init__(self, config: Config, placement: Placement, control: ControlClient) -> None:
        self.config, self.control = config, control
        self._workers = [process.name for process in placement.of_role("rollout")]  # engine followers included
        self._ranks = [process.name for process in placement.of_role("trainer")]
        self._requested: dict[str, LivenessSign] = {}  # by role: the sign with which it was last reported
        self._next = 0.0

    def poll(self) -> KillRequest | None:
        """Look for hung roles every POLL_SECONDS; returns the request that was written, if any."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + POLL_SECONDS
        reports = self.control.role_reports()
        return self._request(self._hung_workers(reports) | self._hung_rank(reports), reports)

    def _hung_workers(self, reports: RoleReports) -> dict[str, tuple[str, str]]:
        """By role: the kind of sign that is missing, and the reason to report."""
        run, limit, hung = self.config.run, self.config.hang_timeout_seconds, {}
        for worker in self._workers:
            report = reports.get(worker)
            if report is None or report["cleared"]:  # it starts
                continue
            if report["silent_seconds"] > run.heartbeat_timeout_seconds:
                reason = f"sent no heartbeat for {run.heartbeat_timeout_seconds:g} s (run.heartbeat_timeout_seconds)"
                hung[worker] = "heartbeat", reason
            elif report["idle_seconds"] > limit:
                hung[worker] = "progress", f"made no progress for {limit:g} s"
        return hung

    def _hung_rank(self, reports: RoleReports) -> dict[str, tuple[str, str]]:
        """The trainer rank that stopped first, once no rank makes progress."""
        limit = self.config.hang_timeout_seconds
        if not self._ranks or not self.control.ticket_epoch_count():
            return {}
        idle = {rank: reports.get(rank, {}).get("idle_seconds", 0.0) for rank in self._ranks}
        if min(idle.values()) <= limit:
            return {}
        first = max(idle, key=lambda rank: idle[rank])
        return {first: ("progress", f"made no progress for {idle[first]:.0f} s, no trainer rank for {limit:g} s")}

    def _request(self, hung: Mapping[str, tuple[str, str]], reports: RoleReports) -> KillRequest | None:
        signs = {role: (kind, liveness_value(reports, role, kind)) for role, (kind, _) in hung.items()}
        unreported = {role: sign for role, sign in signs.items() if self._requested.get(role) != sign}
        if not unreported:
            return None
        reason = "; ".join(f"{role} {hung[role][1]}" for role in unreported)
        with continue_without(f"the request to kill {', '.join(unreported)}"):
            request = request_stack_dump(self.config.run_folder, reason, unreported)
            self._requested |= unreported
            return request
        return None


class StackDumper:
    """Carries out kill requests for the roles of one node."""

    def __init__(self, journal: EventLog, report: Callable[[str], None]) -> None:
        """`journal`: event log of these roles; `report` shows a message. A request that is there already is ignored."""
        self.folder, self.journal, self.report = journal.folder, journal, report
        self._done = latest_request(self.folder)
        self._next = 0.0

    def poll(self, roles: Sequence[SupervisedProcess], connect: Callable[[], ControlClient]) -> None:
        """Carry out a new request, every POLL_SECONDS; `connect` connects to the control service before a kill."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + POLL_SECONDS
        if (request := latest_request(self.folder)) is None or request == self._done:
            return
        self._done = request
        running = [role for role in roles if role.process.poll() is None]
        for role in running:
            for message in child_process.dump_stacks(role.process.pid, role.log, request.reason):
                self.report(f"{role.name}: {message}")
        targets = [role for role in running if role.name in request.targets]
        try:
            reports = connect().role_reports() if targets else {}
        except JobFailed as error:
            self.report(f"no role was killed: {error}")
            return
        for role in targets:
            self._kill_if_hung(role, request, reports)

    def _kill_if_hung(self, role: SupervisedProcess, request: KillRequest, reports: RoleReports) -> None:
        sign = request.targets[role.name]
        if sign is not None and liveness_value(reports, role.name, sign[0]) != sign[1]:
            self.report(f"{role.name} has recovered and is not killed")
            return
        message = f"killing {role.name}: {request.reason}"
        role.process.add_line(f"ERROR {message}")  # the last log line, which its supervisor reports
        self.report(message)
        self.journal.add(role.name, events.KILLED, request.reason, role.log)
        role.kill()
