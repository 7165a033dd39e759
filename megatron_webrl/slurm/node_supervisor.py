"""One node's part of a step: its processes, started where the placement says, watched, and ended together.

A process that ends badly ends the job, with an error that names it; a rollout worker is started again first, at most
run.max_worker_restarts times, and trainer ranks all together, with those of all other nodes (launch/trainer_restart.py). What is started dies
with this process. torch, which takes seconds to import, is imported only when something has failed, or by those who
must hear of what fails elsewhere.
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
from megatron_webrl.cluster.placement import RoleName as RoleName
from megatron_webrl.cluster.placement import place_processes, worker_name_of
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
    """The processes of one role on one node."""

    config: Config
    role: RoleName
    node: int
    address: str  # of the control plane, HOST:PORT
    stub_command: str = ""
    role_processes: list[RoleProcess] = field(default_factory=list)
    ignored_failures: set[str] = field(default_factory=set)  # workers that failed after the job had ended well
    signals: SignalListener = field(default_factory=SignalListener)
    trainer_restarter: TrainerRestarter | None = None  # of the trainer ranks, once it is needed
    control_unreachable: bool = False  # it cannot hear of falls any more
    scratch: Path = field(default_factory=child_process.make_scratch_folder)

    def __post_init__(self) -> None:
        self.journal = EventLog(self.config.run_folder, self.node)

    def run(self) -> int:
        """Run until all processes have ended; returns the exit code: 0 in good order, 1 failed, 143 ended by SIGTERM.

        Raises ConfigError for a node that does not fit the placement, ProcessError for a program that is not there.
        """
        self.signals.listen()
        child_process.die_with_parent(signal.SIGTERM)
        child_process.become_subreaper()
        self._sweep()
        try:
            for start in self._starts():
                self._start(start)
            self.journal.add_all([(role.name, role.log) for role in self.role_processes], events.STARTED)
            return self._watch()
        finally:
            left = child_process.kill_descendants(KILL_SECONDS, [role.process for role in self.role_processes])
            shutil.rmtree(self.scratch, ignore_errors=True)
            if self.role == "rollout":  # whose workers made the ring; while others use it, it stays
                sweep_segments(segment_prefix(self.config.run.name))
            if left:
                self._tell(f"could not end: {', '.join(left)}")

    def _starts(self) -> list[ProcessSpec]:
        found = place_processes(self.config)
        return process_specs(self.config, found, self.node, self.role, self.address, os.environ, self.stub_command)

    def _start(self, start: ProcessSpec) -> None:
        environment = {**role_process.role_environment(self.scratch), **start.environment}
        cores = self._held(start.cores)
        self.role_processes.append(RoleProcess.start(start.name, list(start.command), environment, start.log, cores))

    def _held(self, cores: tuple[int, ...]) -> tuple[int, ...]:
        """The cores to bind to. Raises ConfigError for cores that this node has not; a rehearsal goes on with fewer."""
        mine = os.sched_getaffinity(0)
        missing = [core for core in cores if core not in mine]
        if missing and not self.stub_command:
            raise ConfigError(
                f"cluster.numa_cores names core {missing[0]}, but the step may use {len(mine)} cores of "
                f"{socket.gethostname()} ({format_cores(sorted(mine))}); correct it, or leave it empty"
            )
        return tuple(core for core in cores if core in mine)

    def _watch(self) -> int:
        names = [role.name for role in self.role_processes]
        self._tell(f"started {', '.join(names) if len(names) < 4 else f'{names[0]} to {names[-1]}'}")
        running, reaper = True, child_process.Reaper()
        supervisor = StackDumper(self.journal, self._tell)
        while running:
            running = any(role.process.poll() is None for role in self.role_processes)  # before failures are looked for
            for role in self.role_processes:
                if role.name in self.ignored_failures or (failure := role.failure_message()) is None:
                    continue
                if not self._goes_on(role, failure):
                    return 1
                running = True
            if (fall := self._fall_elsewhere()) is not None:
                if not self._start_again(fall):
                    return 1
                running = True
            supervisor.poll(self.role_processes, self._control)
            self.signals.poll()  # of a notice the first node tells the trainer
            if self.signals.end_signal:
                self._tell(f"ended by {signal.Signals(self.signals.end_signal).name}")
                return 128 + self.signals.end_signal
            reaper.reap([role.process for role in self.role_processes])
            time.sleep(POLL_SECONDS)
        return 0

    def _goes_on(self, role: RoleProcess, failure: str) -> bool:
        """Whether the node goes on after a failure: the worker is started again, or the job is over anyway.

        Otherwise the job ends, and every other role with it.
        """
        from megatron_webrl.control.control_plane import JobFailed

        try:
            control = self._control()
            end = control.job_end()
            if end is not None:
                if end["outcome"] in CLEAN_JOB_OUTCOMES and worker_name_of(role.name) in self.config.worker_names:
                    self.ignored_failures.add(role.name)  # it changes nothing: what it finished is accounted for
                    return True
                self._tell(f"{role.name} ended with the job")
                return False
            return self._revived(role, control, failure)
        except JobFailed:
            self._tell(f"{failure}; the control plane at {self.address} does not answer")
            return False

    def _control(self) -> ControlClient:
        from megatron_webrl.control.control_plane import ControlClient

        host, _, port = self.address.rpartition(":")
        return ControlClient(
            host, int(port), f"node-{self.node}", self.config.run.heartbeat_timeout_seconds, connect_seconds=30.0
        )

    def _revived(self, role: RoleProcess, control: ControlClient, failure: str) -> bool:
        if may_restart(role, self.config) and not self.signals.end_signal:
            self.trainer_restarter = self.trainer_restarter or TrainerRestarter(
                self.config, control, self.journal, self.role_processes
            )
            return self._start_again(self.trainer_restarter.record_failure(role, failure))
        if told := role_process.restart_worker(role, self.config, control, failure):
            self._tell(told)
            self.journal.add(role.name, events.RESTARTED, failure, role.log)
            return True
        self._tell(failure)
        self.journal.add(role.name, events.FAILED, failure, role.log)
        return self._fail(control, f"failed: {failure}")

    def _fall_elsewhere(self) -> TrainerFailure | None:
        """How the trainer failed, if a rank of another node has ended badly."""
        from_others = self.role == "trainer" and self.config.cluster.nodes > 1 and not self.stub_command
        if not from_others or not self.config.run.max_trainer_restarts or self.control_unreachable:
            return None
        from megatron_webrl.control.control_plane import JobFailed

        try:
            self.trainer_restarter = self.trainer_restarter or TrainerRestarter(
                self.config, self._control(), self.journal, self.role_processes
            )
            return self.trainer_restarter.poll_failure()
        except JobFailed:  # the job is over, or its ranks will say what they miss; a connection is tried for again
            self.control_unreachable = self.trainer_restarter is not None
            return None

    def _start_again(self, fall: TrainerFailure) -> bool:
        """Start the ranks again as the next attempt; False if there is none, and the job ends."""
        assert self.trainer_restarter is not None
        if outcome := fall.job_outcome(self.config):
            self._tell(outcome.removeprefix("failed: "))
            return self._fail(self.trainer_restarter.control, outcome)
        self._tell(self.trainer_restarter.restart_ranks(fall))
        return True

    def _fail(self, control: ControlClient, outcome: str) -> bool:
        control.end_job(outcome)
        deadline = time.monotonic() + FAILED_EXIT_GRACE_SECONDS  # the others see it, and end in order
        while any(other.process.poll() is None for other in self.role_processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return False

    def _sweep(self) -> None:
        """Remove what killed runs have left; what others use stays."""
        found = child_process.sweep_orphans() + sweep_segments("webrl-") + child_process.sweep_scratch()
        if found:
            self._tell(f"removed what a killed run had left: {', '.join(found)}")

    def _tell(self, words: str) -> None:
        sys.stdout.write(f"node {self.node} ({socket.gethostname()}), {self.role}: {words}\n")
        sys.stdout.flush()
