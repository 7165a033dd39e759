"""Starts control plane, rollout workers and trainer ranks on one machine, as two Slurm steps do on many.

The launcher watches its roles. A rollout worker that ends badly, or sends no heartbeat, is started again, at most
run.max_worker_restarts times; trainer ranks are started again all together, from the newest checkpoint (launch/trainer_restart.py); any other
role that ends badly ends the job with an error that names it. Nothing stays behind: roles die with the launcher, what
they left is handed to it and killed, and the next start sweeps what survived even that.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from megatron_webrl.cluster.placement import visible_devices_by_process
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.control_plane import ControlClient, JobFailed
from megatron_webrl.launch import role_process
from megatron_webrl.launch.role_process import (
    EXIT_GRACE_SECONDS,
    FAILED_EXIT_GRACE_SECONDS,
    KILL_SECONDS,
    RoleProcess,
    RoleStartError,
)
from megatron_webrl.launch.trainer_restart import TrainerRestarter, may_restart
from megatron_webrl.launch.watchdog import Watchdog
from megatron_webrl.ring.segment import segment_prefix, sweep_segments
from megatron_webrl.status.final_report import print_final_report
from megatron_webrl.system import child_process
from megatron_webrl.tracking import events, summary
from megatron_webrl.tracking.dashboard import TerminalDashboard
from megatron_webrl.tracking.events import EventLog
from megatron_webrl.types import CLEAN_JOB_OUTCOMES

POLL_SECONDS = 0.25


@dataclass
class LocalLauncher:
    """One job on this machine."""

    config: Config
    console: Console
    role_processes: list[RoleProcess] = field(default_factory=list)
    interrupts: int = 0
    scratch: Path = field(
        default_factory=child_process.make_scratch_folder
    )  # sockets and browser profiles of the roles
    trainer_restarter: TrainerRestarter | None = None  # once there are trainer ranks
    weights_only: bool = False  # nothing is trained: the weights go to the engines some times
    watchdog: Watchdog | None = None  # once there is a control plane
    visible_devices: dict[str, str] = field(
        init=False
    )  # CUDA_VISIBLE_DEVICES of each role, where cluster.gpus_per_node says there are some
    journal: EventLog = field(init=False)

    def __post_init__(self) -> None:
        """Raises ConfigError for a configuration of several nodes."""
        if self.config.cluster.nodes > 1:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise ConfigError(
                f"cluster.nodes={self.config.cluster.nodes}, but all roles are to run on this one machine; set "
                "cluster.nodes=1 and what follows from it"
            )
        self.visible_devices = visible_devices_by_process(self.config)
        self.journal = EventLog(self.config.run_folder)

    def run(self) -> int:
        """Run the job; returns the exit code: 0 finished, 1 failed, 130 interrupted."""
        # From the first moment on: an early interrupt, too, ends the job in good order.
        previous = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        config = self.config
        self._clean_up_after_others()
        role_process.prepare_run_folder(config, lambda words: self.console.print(words, markup=False))
        self.journal.add(events.JOB, events.STARTED)
        child_process.become_subreaper()
        outcome = "failed"
        try:
            outcome = self._supervise()
        except (JobFailed, RoleStartError) as error:
            outcome = f"failed: {error}"
        finally:
            left = child_process.kill_descendants(KILL_SECONDS, [role.process for role in self.role_processes])
            sweep_segments(segment_prefix(config.run.name))
            shutil.rmtree(self.scratch, ignore_errors=True)
            if left:
                self.console.print(f"could not end: {', '.join(left)}", style="red", markup=False)
        summary.ensure_written(config.run_folder, outcome)
        self.journal.add(events.JOB, events.ENDED, outcome)
        return self._farewell(outcome)

    def _supervise(self) -> str:
        control, reaper = self._start_roles(), child_process.Reaper()
        with TerminalDashboard(self.console, f"run {self.config.run.name}") as board:
            while (outcome := self._outcome(control)) is None:
                statuses = {role.name: control.status_of(role.name) or "starting" for role in self.role_processes[1:]}
                board.show(statuses, summary.read_updates(self.config.run_folder))
                reaper.reap([role.process for role in self.role_processes])
                time.sleep(POLL_SECONDS)
            board.show({}, summary.read_updates(self.config.run_folder))
        return self._end(control, outcome)

    def _end(self, control: ControlClient, outcome: str) -> str:
        """Let every role end; returns the outcome, or who did not end well after a good one."""
        if outcome not in CLEAN_JOB_OUTCOMES:
            self.console.print("ending all roles")
        control.end_job(outcome)  # the first outcome counts: this one, if no role has said another
        late = self._await_roles(outcome)
        control.shutdown()
        return f"failed: {late}" if late and outcome in CLEAN_JOB_OUTCOMES else outcome

    def _outcome(self, control: ControlClient) -> str | None:
        """How the job ended, or None while it runs: as a role has said, a process has shown, or the user wants."""
        if end := control.job_end():
            return end["outcome"]
        for role in self.role_processes:
            if not (failure := role.failure_message()):
                continue
            if self.trainer_restarter is not None and may_restart(role, self.config):
                return self._revive_trainer(self.trainer_restarter, role, failure)
            if not self._restart(role, control, failure):
                self.journal.add(role.name, events.FAILED, failure, role.log)
                return f"failed: {failure}"
        if self.watchdog is not None:
            self.watchdog.poll(self.role_processes)
        if self.interrupts > 1:
            return "interrupted"
        if self.interrupts == 1 and not control.stop_requested():
            control.request_stop()
            if not control.ticket_epoch_count():  # nothing is trained yet: there is nothing to save
                return "interrupted"
            self.console.print("stopping after this update, with a checkpoint; again: at once")
        return None

    def _restart(self, role: RoleProcess, control: ControlClient, failure: str) -> bool:
        """Start a rollout worker again, unless that is pointless or was done too often."""
        told = role_process.restart_worker(role, self.config, control, failure)
        if told is None:
            return False
        self.journal.add(role.name, events.RESTARTED, failure, role.log)
        self.console.print(told, style="yellow", markup=False, soft_wrap=True)
        return True

    def _revive_trainer(self, revival: TrainerRestarter, role: RoleProcess, failure: str) -> str | None:
        """Start the ranks again after one ended badly; returns how the job ends if that was done too often."""
        if end := revival.control.job_end():  # of which it is only a consequence
            return end["outcome"]
        fall = revival.record_failure(role, failure)
        if outcome := fall.job_outcome(self.config):
            return outcome
        self._warn(revival.restart_ranks(fall))
        return None

    def _start_roles(self) -> ControlClient:
        config = self.config
        control, only = self._start_control(), ["--weights-only"] if self.weights_only else []
        self._start_workers(control, *only)
        for rank in range(config.trainer_world_size):
            place = role_process.rank_environment(rank, config.trainer_world_size, rank, os.environ)
            self._start(f"trainer-{rank}", ["trainer", *self._where(control), *only], place)
        self.trainer_restarter = (
            None if self.weights_only else TrainerRestarter(config, control, self.journal, self.role_processes)
        )
        return control

    def _start_control(self) -> ControlClient:
        host, port = role_process.start_control_process(
            self.config, lambda name, arguments: self._start(name, arguments, {})
        )
        control = ControlClient(host, port, "launcher", self.config.run.heartbeat_timeout_seconds)
        self.watchdog = Watchdog(self.config, control, self.journal, self._warn)
        return control

    def _warn(self, words: str) -> None:
        self.console.print(words, style="yellow", markup=False, soft_wrap=True)

    def _start_workers(self, control: ControlClient, *only: str) -> None:
        for worker in range(self.config.rollout.engines):
            arguments = ["rollout", *self._where(control), "--worker", str(worker), *only]
            self._start(f"rollout-{worker}", arguments, {})

    def _where(self, control: ControlClient) -> list[str]:
        return role_process.role_arguments(self.config, f"{control.host}:{control.port}")

    def _start(self, name: str, arguments: list[str], environment: dict[str, str]) -> RoleProcess:
        path = self.config.run_folder / "logs" / f"{name}.log"
        gpus = {"CUDA_VISIBLE_DEVICES": self.visible_devices[name]} if name in self.visible_devices else {}
        full = {**role_process.role_environment(self.scratch), **gpus, **environment}
        self.role_processes.append(RoleProcess.start(name, role_process.webrl_command(arguments), full, path))
        self.journal.add(name, events.STARTED, log=path)
        return self.role_processes[-1]

    def _await_roles(self, outcome: str) -> str | None:
        """Give every role but the control plane time to end; returns who did not end well, if anyone."""
        seconds = EXIT_GRACE_SECONDS if outcome in CLEAN_JOB_OUTCOMES else FAILED_EXIT_GRACE_SECONDS
        deadline = time.monotonic() + seconds
        others = self.role_processes[1:]
        while any(role.process.poll() is None for role in others) and self.interrupts < 3:
            if time.monotonic() > deadline:
                running = ", ".join(role.name for role in others if role.process.poll() is None)
                return f"{running} did not end within {seconds:.0f} s"
            time.sleep(0.05)
        # A worker that died in the last moment changes nothing about the outcome; what it finished is accounted for.
        others = [
            role for role in others if role.name not in self.config.worker_names or outcome not in CLEAN_JOB_OUTCOMES
        ]
        return next((failure for role in others if (failure := role.failure_message())), None)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1 if number == signal.SIGINT else 2

    def _clean_up_after_others(self) -> None:
        found = child_process.sweep_orphans() + sweep_segments("webrl-") + child_process.sweep_scratch()
        if found:
            self.console.print(f"removed what a killed run had left: {', '.join(found)}", markup=False, soft_wrap=True)

    def _farewell(self, outcome: str) -> int:
        print_final_report(self.config.run_folder, self.console, table=True)
        return 0 if outcome == "finished" else 130 if outcome in ("stopped", "interrupted") else 1


def launch(config: Config, console: Console) -> int:
    """Run a job on this machine and return its exit code."""
    return LocalLauncher(config, console).run()
