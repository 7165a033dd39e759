"""A node of a job: starts its roles, watches them, restarts them by policy, and ends them together.

`webrl node trainer` and `webrl node rollout` run one on each node of a Slurm job. The first node of a job, also
`webrl train` and `webrl eval`, hosts the control service as well (first_node.py). Of what fails or hangs,

- the control service is started again at once, and continues from its journal;
- a rollout process is restarted by itself, with a growing delay, within run.worker_restarts_per_hour. Beyond that its
  engine is given up, and the job continues with the others while there are rollout.min_engines;
- the trainer ranks of all nodes are killed and start from the newest checkpoint as the next attempt, at most
  run.max_trainer_restarts times in a row without a new checkpoint: without one each begins at the same place;
- any other failure ends the job.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import RestartPolicy, SupervisedProcess, restart_delay
from megatron_webrl.control.client import RELAY_VARIABLE, ControlClient
from megatron_webrl.control.connection import ControlLost, JobFailed
from megatron_webrl.control.journal import DAMAGED_EXIT_CODE
from megatron_webrl.launch import run_folder
from megatron_webrl.launch.roles import ProcessSpec, process_specs, role_environment
from megatron_webrl.launch.signals import SignalListener
from megatron_webrl.launch.watchdog import StackDumper
from megatron_webrl.monitor.roles import CONTROL
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.placement.placement import Placement, RoleName, worker_name_of
from megatron_webrl.ring.segment import segment_prefix
from megatron_webrl.track import events
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.run_lock import VARIABLE, Launch
from megatron_webrl.types import CLEAN_JOB_OUTCOMES, failed_outcome
from megatron_webrl.util.disk_faults import INFRASTRUCTURE_EXIT_CODE

POLL_SECONDS = 0.1
FOLLOW_SECONDS = 0.5  # between two looks for a trainer failure on another node
CONNECT_SECONDS = 60.0  # to the control service, which may have to be started again
FAILED_EXIT_GRACE_SECONDS = 5.0  # after a failure: a role that waits for a dead one does not exit by itself
KILL_SECONDS = 8.0
CONTROL_RESTARTS_PER_HOUR = 30
BAD_INPUT_EXIT_CODE = 2  # of a role that refuses its input: a restart would end the same way


@dataclass(frozen=True)
class TrainerFailure:
    """Why one attempt of the trainer ended, in trainer/failure/<attempt> of the control service; the first counts."""

    role: str
    reason: str
    time: float  # unix time, seconds
    checkpoint: str  # name of the newest complete checkpoint at that time; empty: none
    consecutive_failures: int  # without a new checkpoint, this one included
    delay_seconds: float  # before the restart
    infrastructure: bool  # whether the rank lost its file system or the control service

    def job_outcome(self, config: Config) -> str | None:
        """The outcome of the job if the restarts are used up; None if the trainer is to start again."""
        limit = config.run.max_trainer_restarts
        if self.consecutive_failures <= limit:
            return None
        return failed_outcome(
            f"the trainer failed {self.consecutive_failures} times in a row without a new checkpoint "
            f"(run.max_trainer_restarts={limit}); the last time: {self.reason}",
            self.infrastructure,
        )


def failure_of_attempt(control: ControlClient, attempt: int) -> TrainerFailure | None:
    """The recorded failure of an attempt, if any."""
    fields = control.get_json(f"trainer/failure/{attempt}")
    return TrainerFailure(**fields) if isinstance(fields, dict) else None


def record_failure(
    control: ControlClient, config: Config, attempt: int, role: str, reason: str, infrastructure: bool = False
) -> tuple[TrainerFailure, bool]:
    """Record the failure of an attempt unless one is recorded; returns the recorded one, and whether it is this."""
    previous = failure_of_attempt(control, attempt - 1)
    try:
        newest = find_latest_checkpoint(config.run_folder)
        checkpoint = newest.name if newest else ""
    except OSError:  # perhaps what the rank died of: no progress is known
        checkpoint = previous.checkpoint if previous else ""
    same = previous is not None and previous.checkpoint == checkpoint
    count = previous.consecutive_failures + 1 if previous is not None and same else 1
    delay = restart_delay(count, random.random())
    own = TrainerFailure(role, reason, time.time(), checkpoint, count, delay, infrastructure)
    recorded = TrainerFailure(**control.put_if_absent(f"trainer/failure/{attempt}", asdict(own)))
    return recorded, recorded == own


class Node:
    """Life cycle: made, then `run_step` once in the main thread."""

    def __init__(
        self,
        config: Config,
        number: int,
        report: Callable[[str], None] | None = None,
        signals: SignalListener | None = None,
        weights_only: bool = False,
    ) -> None:
        """`number`: of this node; `report` shows a message; `weights_only`: the roles only transfer weights."""
        self.config, self.number, self.signals = config, number, signals or SignalListener()
        self.report = report or self._log
        self.weights_only = weights_only
        self.journal = EventLog(config.run_folder, number)
        self.scratch = child_process.make_scratch_folder()  # TMPDIR of the roles
        self.roles: list[SupervisedProcess] = []
        self.given_up: set[str] = set()  # roles of this node that are not restarted
        self.attempt = 0  # of the trainer ranks
        self.launch: Launch | None = None
        self._label = ""
        self._relay_port = 0
        self._restarts_trainer = config.run.max_trainer_restarts > 0 and not weights_only
        self._control: ControlClient | None = None
        self._followed: ControlClient | None = None  # learns of failures on other nodes without requests
        self._followed_at = 0.0

    def run_step(self, placement: Placement, role: RoleName, first_host: str, stub_command: str = "") -> int:
        """Run the processes of a role as a Slurm step; returns the exit code: 0 clean, 1 failed, 143 after SIGTERM.

        `first_host`: address of the first node; `stub_command` replaces `webrl`. Raises ConfigError for a node that
        does not fit the placement, ProcessError for a missing program.
        """
        from megatron_webrl.control.relay import start_relay  # an HTTP server, which a job on this machine does without

        self._label = f", {role}"
        with self.signals.listening():
            child_process.die_with_parent(signal.SIGTERM)
            child_process.become_subreaper()
            if message := run_folder.sweep_leftovers():
                self.report(message)
            try:
                self._relay_port = start_relay(run_folder.control_address_path(self.config), self._name)
                specs = process_specs(self.config, placement, self.number, [role], first_host, None, stub_command)
                self.start_all(specs, binds=not stub_command)
                return self._watch(role == "trainer" and self.config.cluster.nodes > 1 and not stub_command)
            finally:
                left = child_process.kill_descendants(KILL_SECONDS, self.processes)
                shutil.rmtree(self.scratch, ignore_errors=True)
                if role == "rollout":  # its workers made the ring; a ring in use is kept
                    run_folder.sweep_shared_memory(segment_prefix(self.config.run.name))
                if left:
                    self.report(f"could not terminate: {', '.join(left)}")

    def start_all(self, specs: Sequence[ProcessSpec], binds: bool = True) -> None:
        """Start roles. `binds`: whether a missing core is a ConfigError; otherwise those that exist are used."""
        for spec in specs:
            environment = {**role_environment(self.config, spec.role, self.scratch), **spec.environment}
            environment |= {VARIABLE: str(self.launch.number)} if self.launch else {}
            environment |= {RELAY_VARIABLE: str(self._relay_port)} if self._relay_port else {}
            cores = _usable_cores(spec.cores, binds)
            command = [*spec.command, *(["--weights-only"] if self.weights_only else [])]
            command += ["--attempt", "0"] if spec.role == "trainer" else []
            self.start(spec.name, command, environment, spec.log, cores)
        for spec in specs:
            self.journal.add(spec.name, events.STARTED, log=spec.log)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, cores: tuple[int, ...] = ()
    ) -> SupervisedProcess:
        """Start a role, bound to `cores` if any are given."""
        budget = self.config.run.worker_restarts_per_hour if self._is_worker(name) else 0
        budget = CONTROL_RESTARTS_PER_HOUR if name == CONTROL else budget
        role = SupervisedProcess(name, list(command), environment, log, cores, RestartPolicy(budget))
        self.roles.append(role.start())
        return role

    @property
    def processes(self) -> list[child_process.ChildProcess]:
        return [role.process for role in self.roles]

    @property
    def control(self) -> ControlClient:
        """The connection to the control service. Raises JobFailed."""
        self._control = self._control or self.connect()
        return self._control

    @property
    def _name(self) -> str:
        return f"node-{self.number}"  # for the control service

    def connect(self) -> ControlClient:
        """A new connection to the control service. Raises JobFailed."""
        path = run_folder.control_address_path(self.config)
        return ControlClient(path, self._name, CONNECT_SECONDS, relay_port=self._relay_port)

    def _watch(self, follows: bool) -> int:
        """Supervise the processes until they have exited or the node must end; returns the exit code.

        `follows`: whether trainer ranks on other nodes restart together with those of this one.
        """
        names = [role.name for role in self.roles]
        self.report(f"started {', '.join(names) if len(names) < 4 else f'{names[0]} to {names[-1]}'}")
        running, dumper = True, StackDumper(self.journal, self.report)
        while running:
            self.signals.poll()  # a notice is the first node's business: it requests the stop
            if self.signals.end_signal:
                self.report(f"ended by {signal.Signals(self.signals.end_signal).name}")
                return 128 + self.signals.end_signal
            running = self._is_active  # polled before the failures
            if (outcome := self.poll_failures() or (self._poll_other_nodes() if follows else None)) is not None:
                return self._fail(outcome)
            running = running or self._is_active
            if not running and self.given_up:  # the trainer reads the ring of its workers to the end
                running = self._job_runs()
            dumper.poll(self.roles, lambda: self.control)
            child_process.reap(self.processes)
            time.sleep(POLL_SECONDS)
        return 0

    @property
    def _is_active(self) -> bool:
        """Whether a role runs or will be restarted."""
        return any(role.is_active for role in self.roles)

    def _job_runs(self) -> bool:
        """Whether the job has not ended; False without a control service."""
        try:
            return self.control.job_end() is None
        except JobFailed:
            return False

    def _fail(self, outcome: str) -> int:
        """End the job unless it has ended, and give the other processes time to exit by themselves; returns 1."""
        self.report(outcome.removeprefix("failed: "))
        if self._control is not None or self._followed is not None:
            self.control.end_job(outcome)
        deadline = time.monotonic() + FAILED_EXIT_GRACE_SECONDS
        while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return 1

    def poll_failures(self) -> str | None:
        """Handle what has failed since the last call; returns the outcome of the job if it must end or has ended."""
        for role in self.roles:
            role.restart_if_due()
        for role in self.roles:
            if (failure := role.poll_failure()) is None:
                continue
            if (outcome := self._handle_failure(role, failure)) is not None:
                return outcome
        return None

    def _poll_other_nodes(self) -> str | None:
        """Restart the trainer ranks of this node after a failure on another one; returns as `poll_failures`."""
        if not self._restarts_trainer or time.monotonic() - self._followed_at < FOLLOW_SECONDS:
            return None
        self._followed_at = time.monotonic()
        try:
            if self._followed is None:
                self._followed = self.connect()
                self._followed.follow_facts()
            failure = failure_of_attempt(self._followed, self.attempt)
            return self._restart_trainer(failure) if failure is not None else None
        except JobFailed:  # the job has ended, or its ranks will fail by themselves; a first connection is retried
            self._followed_at = self._followed_at if self._followed is None else math.inf
            return None

    def _handle_failure(self, role: SupervisedProcess, failure: str) -> str | None:
        if role.name == CONTROL:
            return self._handle_control_failure(role, failure)
        try:
            if (end := self.control.job_end()) is not None:  # the role failed because the job had ended
                if end["outcome"] in CLEAN_JOB_OUTCOMES and self._is_worker(role.name):
                    return None  # its finished groups are counted already
                self.report(f"{role.name} ended with the job")
                return end["outcome"]
            code = role.process.poll()
            infrastructure = role.survived_kill or code == INFRASTRUCTURE_EXIT_CODE
            if role.survived_kill:
                pass  # another life would find the same file system, and the devices in use
            elif _is_rank(role) and self._restarts_trainer and code != BAD_INPUT_EXIT_CODE:
                recorded, is_own = record_failure(
                    self.control, self.config, self.attempt, role.name, failure, infrastructure
                )
                if is_own:
                    again = recorded.job_outcome(self.config) is None
                    self.journal.add(role.name, events.RESTARTED if again else events.FAILED, failure, role.log)
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
        """Start the control service again at once; the roles wait for it meanwhile.

        After SIGTERM it is not started again: who ends a job's processes sends that to all of them.
        """
        if role.process.poll() in (-signal.SIGTERM, DAMAGED_EXIT_CODE) or not role.schedule_restart():
            self.journal.add(role.name, events.FAILED, failure, role.log)
            return failed_outcome(failure, infrastructure=True)
        self.journal.add(role.name, events.RESTARTED, failure, role.log)
        role.restart_at = time.monotonic()
        role.restart_if_due()
        count = f"restart {role.policy.used} of {CONTROL_RESTARTS_PER_HOUR} an hour"
        self.report(f"{failure}; starting it again ({count})")
        return None

    def _handle_worker_failure(self, role: SupervisedProcess, failure: str, infrastructure: bool) -> str | None:
        """Restart a rollout worker or an engine follower, or give up its engine.

        A worker that exits by itself before it has served would do so again.
        """
        worker, limit = worker_name_of(role.name), self.config.run.worker_restarts_per_hour
        if worker in self.control.given_up_workers():  # by the node of another part of its engine
            self.given_up.add(role.name)
            return None
        may_serve = (role.process.poll() or 0) < 0 or self.control.get_json(f"weights/applied/{worker}") is not None
        if may_serve and role.schedule_restart():
            self.control.clear_heartbeat(role.name)
            self.journal.add(role.name, events.RESTARTED, failure, role.log)
            count = f"restart {role.policy.used} of {limit} within an hour"
            self.report(f"{failure}; restarting {role.name}{_delay(role)} ({count})")
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
        self.report(f"{failure}; {why}: {worker} is given up, the job continues with {left} of {all_engines} engines")
        return None

    def _restart_trainer(self, failure: TrainerFailure) -> str | None:
        """Kill the ranks of this node and start them as the next attempt, or return the outcome of the job."""
        if outcome := failure.job_outcome(self.config):
            return outcome
        ranks = [role for role in self.roles if _is_rank(role)]
        for rank in ranks:  # all at once: a rank that sees its peers die would log errors of its own
            rank.process.kill()
        for rank in ranks:
            rank.kill()
            if rank.survived_kill:
                return failed_outcome(f"{failure.reason}; {rank.failure_message()}", infrastructure=True)
            child_process.kill_process_group(rank.process.pid)
        self.attempt += 1
        for rank in ranks:
            rank.command[-1] = str(self.attempt)
            rank.restart_at = time.monotonic() + failure.delay_seconds
            self.control.clear_heartbeat(rank.name)
        source = failure.checkpoint or "the beginning, as there is no checkpoint"
        count = f"attempt {failure.consecutive_failures} of {self.config.run.max_trainer_restarts}"
        if failure.consecutive_failures > 1:
            count += " without a new checkpoint"
        own = failure.role in {rank.name for rank in ranks}  # the node of the rank reports the reason
        reason = failure.reason if own else f"{failure.role} failed on another node"
        self.report(f"{reason}; restarting all trainer ranks{_delay(ranks[0])} from {source} ({count})")
        return None

    def _is_worker(self, name: str) -> bool:
        return worker_name_of(name) in self.config.worker_names

    def _log(self, message: str) -> None:
        sys.stdout.write(f"node {self.number} ({socket.gethostname()}){self._label}: {message}\n")
        sys.stdout.flush()


def _is_rank(role: SupervisedProcess) -> bool:
    return role.name.startswith("trainer-")


def _delay(role: SupervisedProcess) -> str:
    seconds = 0.0 if role.restart_at is None else role.restart_at - time.monotonic()
    return f" in {seconds:.0f} s" if seconds >= 0.5 else ""


def _usable_cores(cores: tuple[int, ...], binds: bool) -> tuple[int, ...]:
    """The cores to bind a process to. Raises ConfigError for a missing one, unless `binds` is False."""
    available = os.sched_getaffinity(0)
    missing = [core for core in cores if core not in available]
    if missing and binds:
        raise ConfigError(
            f"cluster.numa_cores names core {missing[0]}, but the step may use {len(available)} cores of "
            f"{socket.gethostname()} ({format_cores(sorted(available))}); correct it, or leave it empty"
        )
    return tuple(core for core in cores if core in available)
