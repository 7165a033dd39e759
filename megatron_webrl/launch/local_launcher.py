"""Runs a job on one machine: the control service, the rollout workers and the trainer ranks.

It restarts roles that fail or hang (launch/role_supervisor.py). No process outlives the job: roles die with the
launcher, it kills their orphans, and the next launch removes what survived its SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.launch import role_process
from megatron_webrl.launch.job_monitor import JobMonitor, can_be_opened
from megatron_webrl.launch.role_process import (
    EXIT_GRACE_SECONDS,
    FAILED_EXIT_GRACE_SECONDS,
    KILL_SECONDS,
    RoleStartError,
)
from megatron_webrl.launch.role_supervisor import RoleSupervisor
from megatron_webrl.launch.watchdog import Watchdog
from megatron_webrl.monitor.status.final_report import print_final_report
from megatron_webrl.monitor.status.job_display import job_display
from megatron_webrl.placement.placement import DEVICES_VARIABLE, visible_devices_by_process
from megatron_webrl.ring.segment import segment_prefix
from megatron_webrl.track import events, summary
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.run_lease import LeaseLost, RunLease
from megatron_webrl.types import BUDGET_SPENT, CLEAN_JOB_OUTCOMES, failed_outcome
from megatron_webrl.util import child_process, cuda_driver
from megatron_webrl.util.gpu import has_gpu
from megatron_webrl.util.supervised_process import SupervisedProcess

POLL_SECONDS = 0.25
CONTROL_HOST = "127.0.0.1"
CONTROL_PORT = 0  # any free one


@dataclass
class LocalLauncher:
    config: Config
    console: Console
    interrupts: int = 0
    scratch: Path = field(init=False)  # TMPDIR of the roles
    weights_only: bool = False  # transfer weights to the engines without training (`webrl check weights`)
    watchdog: Watchdog | None = None  # set with the control service
    visible_devices: dict[str, str] = field(init=False)  # CUDA_VISIBLE_DEVICES by role; empty without GPUs
    journal: EventLog = field(init=False)
    supervisor: RoleSupervisor = field(init=False)
    lease: RunLease | None = field(default=None, init=False)  # set with the run's folder
    monitor: JobMonitor | None = field(default=None, init=False)  # set with the roles, if the run has one

    def __post_init__(self) -> None:
        """Raises ConfigError for a configuration of several nodes or of more GPUs than CUDA_VISIBLE_DEVICES allows, and
        for GPUs that torch cannot use.
        """
        _check_machine(self.config)
        self.visible_devices = visible_devices_by_process(self.config, os.environ.get(DEVICES_VARIABLE, ""))
        self.scratch = child_process.make_scratch_folder()
        self._spared = child_process.children()  # of a program that calls this
        self.journal = EventLog(self.config.run_folder)
        self.supervisor = RoleSupervisor(
            self.config, self.journal, self._warn, self._connect, restarts_trainer=not self.weights_only
        )

    def run(self) -> int:
        """Run the job; returns the exit code: 0 finished, 1 failed, 130 interrupted.

        Raises ConfigError if another job runs in the run's folder.
        """
        # Before anything starts, so that an early interrupt ends the job cleanly, too.
        previous = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        config = self.config
        if message := role_process.sweep_leftovers():
            self.console.print(message, markup=False, soft_wrap=True)
        if message := _device_warning(config):
            self._warn(message)
        try:
            lease = role_process.prepare_run_folder(config, lambda message: self.console.print(message, markup=False))
        except ConfigError:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise
        self.lease = lease
        with lease.kept_alive(lambda reason: self._warn(f"{reason}; waiting for it")):
            outcome = self._run_roles()
            if not lease.is_held:  # the files are those of another launch
                self.console.print(outcome, style="bold red", markup=False, soft_wrap=True)
                return 1
            summary.ensure_written(config.run_folder, outcome)
            self.journal.add(events.JOB, events.ENDED, outcome)
            lease.release()
        return self._print_result(outcome)

    def _run_roles(self) -> str:
        """Run all roles until the job ends and none is left; returns its outcome."""
        config, outcome = self.config, "failed"
        self.journal.add(events.JOB, events.STARTED)
        child_process.become_subreaper()
        try:
            outcome = self._supervise()
        except (JobFailed, RoleStartError, LeaseLost) as error:
            outcome = failed_outcome(str(error))
        finally:
            left = child_process.kill_descendants(KILL_SECONDS, self._processes, self._spared)
            child_process.become_subreaper(False)  # of a program that calls this and continues
            role_process.sweep_shared_memory(segment_prefix(config.run.name))
            shutil.rmtree(self.scratch, ignore_errors=True)
            if left:
                self.console.print(f"could not terminate: {', '.join(left)}", style="red", markup=False)
        return outcome

    def _supervise(self) -> str:
        """Start the roles and watch them until the job ends; returns its outcome."""
        control, reaper = self._start_roles(), child_process.Reaper()
        with job_display(self.console, self.config, trains=not self.weights_only) as display:
            updates = summary.tail_updates(self.config.run_folder)
            while (outcome := self._outcome(control)) is None:
                display.show(self.supervisor.role_lines(control.job_status()), updates.poll())
                reaper.reap(self._processes)
                if self.monitor is not None and (line := self.monitor.poll(self.console.is_terminal)):
                    self.console.print(line, markup=False, highlight=False, soft_wrap=True)
                time.sleep(POLL_SECONDS)
            display.show([], updates.poll())
        return self._end(control, outcome)

    @property
    def _processes(self) -> list[child_process.ChildProcess]:
        monitor = self.monitor.process if self.monitor is not None else None
        return [*self.supervisor.processes, *([] if monitor is None else [monitor])]

    def _end(self, control: ControlClient, outcome: str) -> str:
        """End all roles; returns the outcome, which becomes a failure if a role fails to exit cleanly."""
        if outcome not in CLEAN_JOB_OUTCOMES:
            self.console.print("ending all roles")
        control.end_job(outcome)  # without effect if a role has ended the job already
        failure = self._wait_for_exits(outcome)
        control.shutdown()
        return failed_outcome(failure) if failure and outcome in CLEAN_JOB_OUTCOMES else outcome

    def _outcome(self, control: ControlClient) -> str | None:
        """The outcome of the job, or None while it runs; restarts failed roles and handles the user's interrupts."""
        if (outcome := self.supervisor.poll()) is not None:
            return outcome
        if end := control.job_end():
            return end["outcome"]
        if self.lease is not None:
            self.lease.check()
        if self.watchdog is not None:
            self.watchdog.poll(self.supervisor.roles)
        if self.interrupts > 1:
            return "interrupted"
        if self.interrupts == 1 and not control.stop_requested():
            control.request_stop()
            if not control.ticket_epoch_count() and not control.get_json("demonstrations/trained"):
                return "interrupted"  # neither a warm start nor an update: there is nothing to save
            self.console.print("stopping after this update, with a checkpoint; interrupt again to stop at once")
        return None

    def _start_roles(self) -> ControlClient:
        config = self.config
        control, only = self._start_control(), ["--weights-only"] if self.weights_only else []
        self._start_workers(*only)
        for rank in range(config.trainer_world_size):
            variables = role_process.rank_environment(
                rank, config.trainer_world_size, rank, config.weights.timeout_seconds, os.environ
            )
            self._start(f"trainer-{rank}", ["trainer", *role_process.role_arguments(self.config), *only], variables)
        if not self.weights_only and can_be_opened(config, self.console.is_terminal):
            self.monitor = JobMonitor(config, self.scratch)
        return control

    def _start_control(self) -> ControlClient:
        start = partial(self._start, environment={})
        role_process.start_control_process(self.config, start, CONTROL_HOST, CONTROL_PORT, self.scratch)
        control = self.supervisor.control
        self.watchdog = Watchdog(self.config, control, self.journal, self._warn)
        return control

    def _connect(self) -> ControlClient:
        path = role_process.control_address_path(self.config)
        return ControlClient(path, "launcher", while_lost=self.supervisor.restart_control)

    def _warn(self, message: str) -> None:
        self.console.print(message, style="yellow", markup=False, soft_wrap=True)

    def _start_workers(self, *only: str) -> None:
        for worker in range(self.config.rollout.engines):
            arguments = ["rollout", *role_process.role_arguments(self.config), "--worker", str(worker), *only]
            self._start(f"rollout-{worker}", arguments, {})

    def _start(self, name: str, arguments: list[str], environment: dict[str, str]) -> SupervisedProcess:
        path = self.config.run_folder / "logs" / f"{name}.log"
        devices = {DEVICES_VARIABLE: self.visible_devices[name]} if name in self.visible_devices else {}
        inherited = role_process.role_environment(self.config, arguments[0], self.scratch)
        environment = {**inherited, **devices, **(self.lease.variables if self.lease else {}), **environment}
        role = self.supervisor.start(name, role_process.webrl_command(arguments), environment, path)
        self.journal.add(name, events.STARTED, log=path)
        return role

    def _wait_for_exits(self, outcome: str) -> str | None:
        """Wait for every role but the control service to exit; returns a message if one does not, or fails."""
        seconds = EXIT_GRACE_SECONDS if outcome in CLEAN_JOB_OUTCOMES else FAILED_EXIT_GRACE_SECONDS
        deadline = time.monotonic() + seconds
        others, overdue = self.supervisor.roles[1:], ""
        while (running := [role for role in others if role.process.poll() is None]) and self.interrupts < 3:
            if time.monotonic() > deadline:
                overdue = f"{', '.join(role.name for role in running)} did not exit within {seconds:.0f} s"
                break
            time.sleep(0.05)
        if outcome in CLEAN_JOB_OUTCOMES:  # a worker that fails after the end changes nothing: its groups are counted
            others = [role for role in others if role.name not in self.config.worker_names]
        if overdue:
            if any(role in others for role in running):
                return overdue
            self._warn(f"{overdue} and is killed; its episodes are counted")
        return next((failure for role in others if (failure := role.poll_failure())), None)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1 if number == signal.SIGINT else 2

    def _print_result(self, outcome: str) -> int:
        print_final_report(self.config.run_folder, outcome, self.console, table=True)
        return 0 if outcome in ("finished", BUDGET_SPENT) else 130 if outcome in ("stopped", "interrupted") else 1


def _check_machine(config: Config) -> None:
    """Raises ConfigError for a job that needs several nodes, or would compute on the cores of a machine with GPUs."""
    if config.cluster.nodes > 1:
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}, but this command runs all roles on one machine; set "
            "cluster.nodes=1 and parallel sizes to match"
        )
    wants_gpus = config.cluster.gpus_per_node and config.model.platform != "cpu"
    if wants_gpus and has_gpu() and (problem := cuda_driver.find_cuda_problem()):
        raise ConfigError(
            f"cluster.gpus_per_node={config.cluster.gpus_per_node}, but {problem}; or set model.platform=cpu to "
            "compute on the cores"
        )


def _device_warning(config: Config) -> str:
    """What a user may not expect of the devices that model.platform=auto takes; empty if nothing."""
    if config.model.platform != "auto":
        return ""
    if config.cluster.gpus_per_node:
        return "" if has_gpu() else "no GPU on this machine: all roles compute on its cores (model.platform=auto)"
    if config.evaluation.only or not has_gpu() or cuda_driver.find_cuda_problem():
        return ""
    return (
        "cluster.gpus_per_node=0: trainer and engines take this machine's first GPU, and neither leaves memory for the "
        "other; set cluster.gpus_per_node=1 and cluster.colocate=true (docs/one_gpu.md)"
    )


def launch(config: Config, console: Console) -> int:
    """Run a job on this machine and return its exit code."""
    return LocalLauncher(config, console).run()
