"""Runs the processes of one role on one node: starts them as placed, supervises them, and ends them together.

It restarts those that fail (launch/role_supervisor.py), and exchanges with the control service for all of them
(control/relay.py). The processes die with the supervisor.
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

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.client import RELAY_VARIABLE, ControlClient
from megatron_webrl.control.relay import RelayThread
from megatron_webrl.launch import role_process
from megatron_webrl.launch.role_process import FAILED_EXIT_GRACE_SECONDS, KILL_SECONDS
from megatron_webrl.launch.role_supervisor import RoleSupervisor
from megatron_webrl.launch.slurm.process_specs import ProcessSpec, process_specs
from megatron_webrl.launch.slurm.signals import SignalListener
from megatron_webrl.launch.watchdog import StackDumper
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.placement.placement import RoleName, place_processes
from megatron_webrl.ring.segment import segment_prefix
from megatron_webrl.track import events
from megatron_webrl.track.events import EventLog
from megatron_webrl.util import child_process

POLL_SECONDS = 0.1
CONNECT_SECONDS = 60.0  # to the control service, which may have to be started again


@dataclass
class NodeSupervisor:
    config: Config
    role: RoleName
    node: int
    first_host: str  # address of the first node
    stub_command: str = ""
    signals: SignalListener = field(default_factory=SignalListener)
    scratch: Path = field(default_factory=child_process.make_scratch_folder)

    def __post_init__(self) -> None:
        self.journal = EventLog(self.config.run_folder, self.node)
        self.name = f"node-{self.node}"  # for the control service
        self.relay_port = 0  # set by `run`
        self.supervisor = RoleSupervisor(self.config, self.journal, self._report, self._connect)

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
            self.relay_port = RelayThread(role_process.control_address_path(self.config), self.name).port
            for spec in self._process_specs():
                self._start(spec)
            self.journal.add_all([(role.name, role.log) for role in self.supervisor.roles], events.STARTED)
            return self._watch()
        finally:
            left = child_process.kill_descendants(KILL_SECONDS, self.supervisor.processes)
            shutil.rmtree(self.scratch, ignore_errors=True)
            if self.role == "rollout":  # its workers made the ring; a ring in use is kept
                role_process.sweep_shared_memory(segment_prefix(self.config.run.name))
            if left:
                self._report(f"could not terminate: {', '.join(left)}")

    def _process_specs(self) -> list[ProcessSpec]:
        placement = place_processes(self.config)
        return process_specs(
            self.config, placement, self.node, self.role, self.first_host, os.environ, self.stub_command
        )

    def _start(self, spec: ProcessSpec) -> None:
        environment = role_process.role_environment(self.config, self.role, self.scratch)
        environment |= {RELAY_VARIABLE: str(self.relay_port), **spec.environment}
        self.supervisor.start(spec.name, spec.command, environment, spec.log, self._usable(spec.cores))

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
        names = [role.name for role in self.supervisor.roles]
        self._report(f"started {', '.join(names) if len(names) < 4 else f'{names[0]} to {names[-1]}'}")
        running, reaper = True, child_process.Reaper()
        dumper = StackDumper(self.journal, self._report)
        while running:
            self.signals.poll()  # a notice is the control host's business: it requests the stop
            if self.signals.end_signal:
                self._report(f"ended by {signal.Signals(self.signals.end_signal).name}")
                return 128 + self.signals.end_signal
            running = self.supervisor.is_active  # polled before the failures
            if (outcome := self.supervisor.poll() or self._poll_other_nodes()) is not None:
                return self._fail(outcome)
            running = running or self.supervisor.is_active
            if not running and self.supervisor.given_up:  # the trainer reads the ring of its workers to the end
                running = self.supervisor.job_runs()
            dumper.poll(self.supervisor.roles, lambda: self.supervisor.control)
            reaper.reap(self.supervisor.processes)
            time.sleep(POLL_SECONDS)
        return 0

    def _connect(self) -> ControlClient:
        path = role_process.control_address_path(self.config)
        return ControlClient(path, self.name, CONNECT_SECONDS, relay_port=self.relay_port)

    def _poll_other_nodes(self) -> str | None:
        """Follow a failure of a rank on another node; returns the outcome of the job if it must end."""
        has_peers = self.role == "trainer" and self.config.cluster.nodes > 1 and not self.stub_command
        return self.supervisor.poll_other_machines() if has_peers else None

    def _fail(self, outcome: str) -> int:
        """End the job unless it has ended, and give the other processes time to exit by themselves; returns 1."""
        self._report(outcome.removeprefix("failed: "))
        if self.supervisor.has_connected:
            self.supervisor.control.end_job(outcome)
        deadline = time.monotonic() + FAILED_EXIT_GRACE_SECONDS
        while any(process.poll() is None for process in self.supervisor.processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return 1

    def _report(self, message: str) -> None:
        sys.stdout.write(f"node {self.node} ({socket.gethostname()}), {self.role}: {message}\n")
        sys.stdout.flush()
