"""Runs the processes of one role on one node: starts them as placed, supervises them, and ends them together.

A failed process ends the job with an error that names it, once its restarts are used up: of a rollout worker alone, of
the trainer ranks with those of all nodes (launch/trainer_restart.py). The processes die with the supervisor. torch,
slow to import, is imported only after a failure and where failures on other nodes must be polled.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_webrl.cluster.cores import format_cores
from megatron_webrl.cluster.placement import RoleName, place_processes, worker_name_of
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch import role_process
from megatron_webrl.launch.role_process import FAILED_EXIT_GRACE_SECONDS, KILL_SECONDS, RoleProcess
from megatron_webrl.launch.trainer_restart import TrainerRestarter, may_restart
from megatron_webrl.launch.watchdog import StackDumper
from megatron_webrl.ring.segment import segment_prefix, sweep_segments
from megatron_webrl.slurm.process_specs import ProcessSpec, process_specs
from megatron_webrl.slurm.signals import SignalListener
from megatron_webrl.system import child_process
from megatron_webrl.tracking import events
from megatron_webrl.tracking.events import EventLog
from megatron_webrl.types import CLEAN_JOB_OUTCOMES

if TYPE_CHECKING:
    from megatron_webrl.control.control_plane import ControlClient
    from megatron_webrl.launch.trainer_failure import TrainerFailure

POLL_SECONDS = 0.1


@dataclass
class NodeSupervisor:
    config: Config
    role: RoleName
    node: int
    address: str  # of the control plane, HOST:PORT
    stub_command: str = ""
    role_processes: list[RoleProcess] = field(default_factory=list)
    ignored_failures: set[str] = field(default_factory=set)  # workers that failed after a clean end of the job
    signals: SignalListener = field(default_factory=SignalListener)
    trainer_restarter: TrainerRestarter | None = None  # made when first needed
    control_unreachable: bool = False  # failures on other nodes can no longer be polled
    scratch: Path = field(default_factory=child_process.make_scratch_folder)

    def __post_init__(self) -> None:
        self.journal = EventLog(self.config.run_folder, self.node)

    def run(self) -> int:
        """Run until all processes have exited; returns the exit code: 0 clean, 1 failed, 143 after SIGTERM.

        Raises ConfigError for a node that does not fit the placement, ProcessError for a missing program.
        """
        self.signals.listen()
        child_process.die_with_parent(signal.SIGTERM)
        child_process.become_subreaper()
        if message := role_process.sweep_leftovers():
            self._report(message)
        try:
            for spec in self._process_specs():
                self._start(spec)
            self.journal.add_all([(role.name, role.log) for role in self.role_processes], events.STARTED)
            return self._watch()
        finally:
            left = child_process.kill_descendants(KILL_SECONDS, [role.process for role in self.role_processes])
            shutil.rmtree(self.scratch, ignore_errors=True)
            if self.role == "rollout":  # its workers made the ring; a ring in use is kept
                sweep_segments(segment_prefix(self.config.run.name))
            if left:
                self._report(f"could not terminate: {', '.join(left)}")

    def _process_specs(self) -> list[ProcessSpec]:
        placement = place_processes(self.config)
        return process_specs(self.config, placement, self.node, self.role, self.address, os.environ, self.stub_command)

    def _start(self, spec: ProcessSpec) -> None:
        environment = {**role_process.role_environment(self.config, self.role, self.scratch), **spec.environment}
        cores = self._usable(spec.cores)
        self.role_processes.append(RoleProcess.start(spec.name, list(spec.command), environment, spec.log, cores))

    def _usable(self, cores: tuple[int, ...]) -> tuple[int, ...]:
        """The cores to bind to. Raises ConfigError for a missing core; a stub command runs on those that exist."""
        available = os.sched_getaffinity(0)
        missing = [core for core in cores if core not in available]
        if missing and not self.stub_command:
            raise ConfigError(
                f"cluster.numa_cores names core {missing[0]}, but the step may use {len(available)} cores of "
                f"{socket.gethostname()} ({format_cores(sorted(available))}); correct it, or leave it empty"
            )
        return tuple(core for core in cores if core in available)

    def _watch(self) -> int:
        """Supervise the processes until they have exited or the node must end; returns the exit code."""
        names = [role.name for role in self.role_processes]
        self._report(f"started {', '.join(names) if len(names) < 4 else f'{names[0]} to {names[-1]}'}")
        running, reaper = True, child_process.Reaper()
        dumper = StackDumper(self.journal, self._report)
        while running:
            running = any(role.process.poll() is None for role in self.role_processes)  # polled before the failures
            for role in self.role_processes:
                if role.name in self.ignored_failures or (failure := role.failure_message()) is None:
                    continue
                if not self._handle_failure(role, failure):
                    return 1
                running = True
            if (elsewhere := self._poll_trainer_failure()) is not None:
                if not self._restart_trainer(elsewhere):
                    return 1
                running = True
            dumper.poll(self.role_processes, self._connect)
            self.signals.poll()  # a notice is the control host's business: it requests the stop
            if self.signals.end_signal:
                self._report(f"ended by {signal.Signals(self.signals.end_signal).name}")
                return 128 + self.signals.end_signal
            reaper.reap([role.process for role in self.role_processes])
            time.sleep(POLL_SECONDS)
        return 0

    def _handle_failure(self, role: RoleProcess, failure: str) -> bool:
        """Restart a failed process or end the job; True after a restart, or if a worker failed after a clean end."""
        from megatron_webrl.control.control_plane import JobFailed

        try:
            control = self._connect()
            end = control.job_end()
            if end is not None:
                if end["outcome"] in CLEAN_JOB_OUTCOMES and worker_name_of(role.name) in self.config.worker_names:
                    self.ignored_failures.add(role.name)  # its finished groups are counted already
                    return True
                self._report(f"{role.name} ended with the job")
                return False
            return self._restart(role, control, failure)
        except JobFailed:
            self._report(f"{failure}; the control plane at {self.address} does not respond")
            return False

    def _connect(self) -> ControlClient:
        from megatron_webrl.control.control_plane import ControlClient

        host, _, port = self.address.rpartition(":")
        return ControlClient(
            host, int(port), f"node-{self.node}", self.config.run.heartbeat_timeout_seconds, connect_seconds=30.0
        )

    def _restart(self, role: RoleProcess, control: ControlClient, failure: str) -> bool:
        """Restart a failed worker, or all trainer ranks; ends the job and returns False if neither is possible."""
        if may_restart(role, self.config) and not self.signals.end_signal:
            self.trainer_restarter = self.trainer_restarter or TrainerRestarter(
                self.config, control, self.journal, self.role_processes
            )
            return self._restart_trainer(self.trainer_restarter.record_failure(role, failure))
        if message := role_process.restart_worker(role, self.config, control, failure):
            self._report(message)
            self.journal.add(role.name, events.RESTARTED, failure, role.log)
            return True
        self._report(failure)
        self.journal.add(role.name, events.FAILED, failure, role.log)
        return self._fail(control, f"failed: {failure}")

    def _poll_trainer_failure(self) -> TrainerFailure | None:
        """The failure of the current attempt, if a rank of another node has failed."""
        has_peers = self.role == "trainer" and self.config.cluster.nodes > 1 and not self.stub_command
        if not has_peers or not self.config.run.max_trainer_restarts or self.control_unreachable:
            return None
        from megatron_webrl.control.control_plane import JobFailed

        try:
            self.trainer_restarter = self.trainer_restarter or TrainerRestarter(
                self.config, self._connect(), self.journal, self.role_processes
            )
            return self.trainer_restarter.poll_failure()
        except JobFailed:  # the job has ended, or its ranks will fail by themselves; a first connection is retried
            self.control_unreachable = self.trainer_restarter is not None
            return None

    def _restart_trainer(self, failure: TrainerFailure) -> bool:
        """Restart the ranks as the next attempt; ends the job and returns False if no restart is left."""
        assert self.trainer_restarter is not None
        if outcome := failure.job_outcome(self.config):
            self._report(outcome.removeprefix("failed: "))
            return self._fail(self.trainer_restarter.control, outcome)
        self._report(self.trainer_restarter.restart_ranks(failure))
        return True

    def _fail(self, control: ControlClient, outcome: str) -> bool:
        """End the job and give the other processes time to exit by themselves; returns False."""
        control.end_job(outcome)
        deadline = time.monotonic() + FAILED_EXIT_GRACE_SECONDS
        while any(other.process.poll() is None for other in self.role_processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return False

    def _report(self, message: str) -> None:
        sys.stdout.write(f"node {self.node} ({socket.gethostname()}), {self.role}: {message}\n")
        sys.stdout.flush()
