"""Restarts the roles of one machine that fail, gives up workers that keep failing, and says when the job must end.

The local launcher and each node supervisor own one. A worker is restarted by itself, with a growing delay and within
run.worker_restarts_per_hour; beyond that it is given up, and the job continues with the other engines while there are
rollout.min_engines. Trainer ranks are restarted together on all machines (launch/trainer_failure.py). The failure of
any other role ends the job.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import ControlLost, JobFailed
from megatron_webrl.launch import trainer_failure
from megatron_webrl.launch.role_process import INFRASTRUCTURE_EXIT_CODE
from megatron_webrl.launch.trainer_failure import TrainerFailure
from megatron_webrl.monitor.status.control_probe import TicketCounts
from megatron_webrl.monitor.status.role_groups import CONTROL, RoleLine
from megatron_webrl.placement.placement import worker_name_of
from megatron_webrl.track import events
from megatron_webrl.track.events import EventLog
from megatron_webrl.types import CLEAN_JOB_OUTCOMES, failed_outcome
from megatron_webrl.util import child_process
from megatron_webrl.util.restart_policy import RestartPolicy
from megatron_webrl.util.supervised_process import SupervisedProcess

POLL_SECONDS = 0.5  # between two queries of the control service for a trainer failure on another machine
CONTROL_RESTARTS_PER_HOUR = 30
BAD_INPUT_EXIT_CODE = 2  # of a role that refuses its input: a restart would end the same way


class RoleSupervisor:
    """Life cycle: `start` each role, `poll` until it returns an outcome or the job has ended."""

    def __init__(
        self,
        config: Config,
        journal: EventLog,
        report: Callable[[str], None],
        connect: Callable[[], ControlClient],
        restarts_trainer: bool = True,
    ) -> None:
        """`journal`: the machine's event log; `report` shows a message; `connect` connects to the control service, once
        a role has failed.
        """
        self.config, self.journal = config, journal
        self.roles: list[SupervisedProcess] = []
        self.given_up: set[str] = set()  # roles of this machine that are not restarted
        self.attempt = 0  # of the trainer ranks
        self._report, self._connect = report, connect
        self._restarts_trainer = restarts_trainer and config.run.max_trainer_restarts > 0
        self._control: ControlClient | None = None
        self._followed: ControlClient | None = None  # learns of failures on other machines without requests
        self._polled_at = 0.0

    @property
    def processes(self) -> list[child_process.ChildProcess]:
        return [role.process for role in self.roles]

    @property
    def is_active(self) -> bool:
        """Whether a role runs or will be restarted."""
        return any(role.is_active for role in self.roles)

    @property
    def has_connected(self) -> bool:
        """Whether there was a connection to the control service."""
        return self._control is not None or self._followed is not None

    @property
    def control(self) -> ControlClient:
        """The connection to the control service. Raises JobFailed."""
        self._control = self._control or self._connect()
        return self._control

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, cores: tuple[int, ...] = ()
    ) -> SupervisedProcess:
        """Start a role, bound to `cores` if any are given."""
        budget = self.config.run.worker_restarts_per_hour if self._is_worker(name) else 0
        budget = CONTROL_RESTARTS_PER_HOUR if name == CONTROL else budget
        role = SupervisedProcess(name, list(command), environment, log, cores, RestartPolicy(budget))
        self.roles.append(role.start())
        return role

    def poll(self) -> str | None:
        """Handle what has failed since the last call; returns the outcome of the job if it must end or has ended."""
        for role in self.roles:
            role.restart_if_due()
        for role in self.roles:
            if (failure := role.poll_failure()) is None:
                continue
            if (outcome := self._handle_failure(role, failure)) is not None:
                return outcome
        return None

    def poll_other_machines(self) -> str | None:
        """Restart the trainer ranks of this machine after a failure on another one; returns as `poll`."""
        if not self._restarts_trainer or time.monotonic() - self._polled_at < POLL_SECONDS:
            return None
        self._polled_at = time.monotonic()
        try:
            if self._followed is None:
                self._followed = self._connect()
                self._followed.follow_facts()
            failure = trainer_failure.failure_of_attempt(self._followed, self.attempt)
            return self._restart_trainer(failure) if failure is not None else None
        except JobFailed:  # the job has ended, or its ranks will fail by themselves; a first connection is retried
            self._polled_at = self._polled_at if self._followed is None else math.inf
            return None

    def job_runs(self) -> bool:
        """Whether the job has not ended; False without a control service."""
        try:
            return self.control.job_end() is None
        except JobFailed:
            return False

    def role_lines(self, job: Mapping[str, Any]) -> list[RoleLine]:
        """The roles of this machine; `job`: the answer of the control service (control/server.py)."""
        return [self._role_line(role, job) for role in self.roles]

    def _role_line(self, role: SupervisedProcess, job: Mapping[str, Any]) -> RoleLine:
        restarts = self.attempt if is_trainer_rank(role) else role.policy.used
        if role.name == CONTROL:
            groups = f"groups: {TicketCounts(**job['tickets'])}" if job["tickets"] else ""
            return RoleLine(role.name, "running", groups, restarts)
        report = job["roles"].get(role.name)
        status = "given up" if role.name in self.given_up else (report or {}).get("status") or "starting"
        if role.name in self.given_up:
            state = "failed"
        elif report is None or report["cleared"]:
            state = "starting"
        else:
            silent = report["silent_seconds"] > self.config.run.heartbeat_timeout_seconds
            state = "silent" if silent else "running"
        return RoleLine(role.name, state, status, restarts)

    def _handle_failure(self, role: SupervisedProcess, failure: str) -> str | None:
        if role.name == CONTROL:
            return self._handle_control_failure(role, failure)
        try:
            if (end := self.control.job_end()) is not None:  # the role failed because the job had ended
                if end["outcome"] in CLEAN_JOB_OUTCOMES and self._is_worker(role.name):
                    return None  # its finished groups are counted already
                self._report(f"{role.name} ended with the job")
                return end["outcome"]
            code = role.process.poll()
            infrastructure = role.survived_kill or code == INFRASTRUCTURE_EXIT_CODE
            if role.survived_kill:
                pass  # another life would find the same file system, and the devices in use
            elif is_trainer_rank(role) and self._restarts_trainer and code != BAD_INPUT_EXIT_CODE:
                recorded = trainer_failure.record_failure(
                    self.control, self.config, self.journal, self.attempt, role.name, failure, role.log, infrastructure
                )
                return self._restart_trainer(recorded)
            elif self._is_worker(role.name):
                return self._handle_worker_failure(role, failure, infrastructure)
        except JobFailed:
            return failed_outcome(f"{failure}; the control service does not respond", infrastructure=True)
        self.journal.add(role.name, events.FAILED, failure, role.log)
        return failed_outcome(failure, infrastructure)

    def restart_control(self) -> None:
        """Start the control service again if it has failed: no other failure can be handled without it.

        Raises JobFailed if it has failed too often, ControlLost once it has exited after the end of the job.
        """
        for role in (role for role in self.roles if role.name == CONTROL):
            if not role.is_active and role.failure_message() is None:
                raise ControlLost("the control service has exited after the end of the job")
            if (failure := role.poll_failure()) is not None and self._handle_control_failure(role, failure) is not None:
                raise JobFailed(failure)

    def _handle_control_failure(self, role: SupervisedProcess, failure: str) -> str | None:
        """Start the control service again at once: it continues from its journal; the roles wait for it meanwhile.

        After SIGTERM it is not started again: who ends a job's processes sends that to all of them.
        """
        if role.process.poll() == -signal.SIGTERM or not role.schedule_restart(failure):
            self.journal.add(role.name, events.FAILED, failure, role.log)
            return failed_outcome(failure, infrastructure=True)
        self.journal.add(role.name, events.RESTARTED, failure, role.log)
        role.restart_at = time.monotonic()
        role.restart_if_due()
        self._report(
            f"{failure}; starting it again (restart {role.policy.used} of {CONTROL_RESTARTS_PER_HOUR} an hour)"
        )
        return None

    def _handle_worker_failure(self, role: SupervisedProcess, failure: str, infrastructure: bool) -> str | None:
        """Restart a rollout worker or an engine follower, or give up its engine.

        A worker that exits by itself before it has served would do so again.
        """
        worker, limit = worker_name_of(role.name), self.config.run.worker_restarts_per_hour
        if worker in self.control.given_up_workers():  # by the supervisor of another part of its engine
            self.given_up.add(role.name)
            return None
        may_serve = (role.process.poll() or 0) < 0 or self.control.get_json(f"weights/applied/{worker}") is not None
        if may_serve and role.schedule_restart(failure):
            self.control.clear_heartbeat(role.name)
            self.journal.add(role.name, events.RESTARTED, failure, role.log)
            count = f"restart {role.policy.used} of {limit} within an hour"
            self._report(f"{failure}; restarting {role.name}{_delay(role)} ({count})")
            return None
        child_process.kill_process_group(role.process.pid)
        self.control.clear_heartbeat(role.name)
        self.control.give_up_worker(worker, failure)
        self.given_up.add(role.name)
        self.journal.add(role.name, events.FAILED, failure, role.log)
        why = f"run.worker_restarts_per_hour={limit} is used up" if may_serve else "it failed before it had served"
        all_engines = len(self.config.worker_names)
        least = min(self.config.rollout.min_engines, all_engines)  # an evaluation may have fewer
        left = all_engines - len(self.control.given_up_workers())
        if left < least:
            few = f"{left} of {all_engines} engines are left, and rollout.min_engines={least}"
            return failed_outcome(f"{failure}; {why}, and {few}", infrastructure)
        self._report(f"{failure}; {why}: {worker} is given up, the job continues with {left} of {all_engines} engines")
        return None

    def _restart_trainer(self, failure: TrainerFailure) -> str | None:
        """Kill the ranks of this machine and start them as the next attempt, or return the outcome of the job."""
        if outcome := failure.job_outcome(self.config):
            return outcome
        ranks = [role for role in self.roles if is_trainer_rank(role)]
        for rank in ranks:  # all at once: a rank that sees its peers die would log errors of its own
            rank.process.kill()
        for rank in ranks:
            rank.kill()
            if rank.survived_kill:
                return failed_outcome(f"{failure.reason}; {rank.failure_message()}", infrastructure=True)
            child_process.kill_process_group(rank.process.pid)
        self.attempt += 1
        for rank in ranks:
            rank.command = with_attempt(rank.command, self.attempt)
            rank.restart_at = time.monotonic() + failure.delay_seconds
            self.control.clear_heartbeat(rank.name)
        source = failure.checkpoint or "the beginning, as there is no checkpoint"
        count = f"attempt {failure.consecutive_failures} of {self.config.run.max_trainer_restarts}"
        if failure.consecutive_failures > 1:
            count += " without a new checkpoint"
        own = failure.role in {rank.name for rank in ranks}  # the machine of the rank reports the reason
        reason = failure.reason if own else f"{failure.role} failed on another node"
        self._report(f"{reason}; restarting all trainer ranks{_delay(ranks[0])} from {source} ({count})")
        return None

    def _is_worker(self, name: str) -> bool:
        return worker_name_of(name) in self.config.worker_names


def _delay(role: SupervisedProcess) -> str:
    seconds = 0.0 if role.restart_at is None else role.restart_at - time.monotonic()
    return f" in {seconds:.0f} s" if seconds >= 0.5 else ""


def is_trainer_rank(role: SupervisedProcess) -> bool:
    return role.name.startswith("trainer-")


def with_attempt(command: Sequence[str], attempt: int) -> list[str]:
    """The command of a rank with `--attempt` set."""
    arguments = list(command)
    if "--attempt" in arguments:
        arguments[arguments.index("--attempt") + 1] = str(attempt)
        return arguments
    return [*arguments, "--attempt", str(attempt)]
