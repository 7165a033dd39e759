"""`webrl node control`: runs the control service of a cluster job and reports the job's progress to its log."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.control.service import KEEP_ALIVE_SECONDS, LINGER_SECONDS
from megatron_webrl.launch import role_process
from megatron_webrl.launch.role_process import INFRASTRUCTURE_EXIT_CODE, KILL_SECONDS, RoleStartError
from megatron_webrl.launch.role_supervisor import RoleSupervisor
from megatron_webrl.launch.slurm.process_specs import log_folder
from megatron_webrl.launch.slurm.signals import SignalListener
from megatron_webrl.launch.watchdog import Watchdog
from megatron_webrl.monitor.status.final_report import final_report_lines
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.track import events, summary
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.run_lock import LaunchLost, launch_of_process
from megatron_webrl.types import CLEAN_JOB_OUTCOMES, PREEMPTED, failed_outcome, is_infrastructure_failure
from megatron_webrl.util import child_process
from megatron_webrl.util.disk_faults import watch_for_stall
from megatron_webrl.util.supervised_process import SupervisedProcess

POLL_SECONDS = 0.5
SIGNAL_SECONDS = 1.0  # for a signal to reach this process after it has ended the control service
PREEMPTED_EXIT_CODE = 75  # asks launch/slurm/common.sh to requeue the job, as does INFRASTRUCTURE_EXIT_CODE


class ControlHost:
    """Runs the control service on the first node, watches the job, and reports its progress and its end."""

    effect_of_stop = "the job ends after the current update, with a checkpoint"
    successful_outcomes: tuple[str, ...] = CLEAN_JOB_OUTCOMES

    def __init__(self, config: Config, host: str) -> None:
        """`host`: address of this node, as others reach it. Raises LaunchLost if another launch has started."""
        self.config, self.host = config, host
        self.launch = launch_of_process(config.run_folder, os.environ)
        self.scratch = child_process.make_scratch_folder()
        self.signals = SignalListener()
        self.watchdog: Watchdog | None = None  # set with the control service
        self.announced_outcome = ""  # the requested outcome that the log has mentioned
        self.updates = summary.tail_updates(config.run_folder)
        self.updates.poll()  # those of an earlier launch
        self.journal = EventLog(config.run_folder)
        self.supervisor = RoleSupervisor(config, self.journal, self._report, self._connect)

    def run(self) -> int:
        """Run until the job has ended; returns the exit code: 0 clean, 1 failed, another to be requeued."""
        self.signals.listen()
        child_process.die_with_parent(signal.SIGTERM)
        child_process.become_subreaper()
        with (
            self.launch.locked() if self.launch else nullcontext(),
            watch_for_stall(self.config.run_folder, self._end_stalled_job),
        ):
            outcome = self._run_control()
            try:
                self._check_launch()
            except LaunchLost as error:  # the files are those of another launch
                self._report(str(error))
                return 1
            summary.ensure_written(self.config.run_folder, outcome)
            self.journal.add(events.JOB, events.ENDED, outcome)
        for line in self._final_report(outcome):
            self._report(line)
        if outcome == PREEMPTED:
            return PREEMPTED_EXIT_CODE
        if is_infrastructure_failure(outcome):
            return INFRASTRUCTURE_EXIT_CODE
        return 0 if outcome in self.successful_outcomes else 1

    def _end_stalled_job(self, reason: str) -> None:
        """End the job and this process, to be requeued; the main thread, and the job's log, may wait for the disk."""
        threading.Thread(target=self._report, args=(f"{reason}; the job ends",), daemon=True).start()
        with suppress(JobFailed):
            self.supervisor.control.end_job(failed_outcome(reason, infrastructure=True))
        time.sleep(LINGER_SECONDS)  # for the roles to read the outcome
        os._exit(INFRASTRUCTURE_EXIT_CODE)

    def _run_control(self) -> str:
        """Run the control service until the job has ended and no process is left; returns its outcome."""
        outcome = "failed"
        self.journal.add(events.JOB, events.STARTED)
        try:
            outcome = self._host()
        except (RoleStartError, LaunchLost) as error:
            outcome = self._interruption() or failed_outcome(str(error))
        except JobFailed as error:
            # scancel ends all processes of the step, the control service perhaps before this one gets its signal.
            deadline = time.monotonic() + SIGNAL_SECONDS
            while not (outcome := self._interruption()) and time.monotonic() < deadline:
                time.sleep(0.05)
            outcome = outcome or failed_outcome(str(error), infrastructure=True)
        finally:
            child_process.kill_descendants(KILL_SECONDS, self.supervisor.processes)
            shutil.rmtree(self.scratch, ignore_errors=True)
        return outcome

    def _host(self) -> str:
        """Run the control service and watch the job until it ends; returns its outcome."""
        control = self._start_control()
        while (outcome := self._poll(control)) is None:
            self._report_updates()
            time.sleep(POLL_SECONDS)
        self._handle_signals(control)  # reports a requested end that came after the last poll
        self._report_updates()
        self._await_control_exit()
        return outcome

    def _start_control(self) -> ControlClient:
        port = place_processes(self.config).control_port
        role_process.start_control_process(self.config, self._start, self.host, port, self.scratch)
        control = self.supervisor.control
        self._report(f"control service at {self.host}:{port}")
        self.watchdog = Watchdog(self.config, control, self.journal, self._report)
        return control

    def _poll(self, control: ControlClient) -> str | None:
        """Handle signals and hung roles; returns the job's outcome if it has ended. Raises JobFailed, LaunchLost."""
        self.supervisor.restart_control()
        if (end := control.job_end()) is not None:
            return end["outcome"]
        self._check_launch()
        self._handle_signals(control)
        if self.watchdog is not None:
            self.watchdog.poll(self.supervisor.roles)
        return None

    def _check_launch(self) -> None:
        if self.launch is not None:
            self.launch.check()

    def _connect(self) -> ControlClient:
        path = role_process.control_address_path(self.config)
        return ControlClient(path, "host", while_lost=self.supervisor.restart_control)

    def _await_control_exit(self) -> None:
        """Wait for the control service, which exits once every role has had the time to read the outcome."""
        deadline = time.monotonic() + KEEP_ALIVE_SECONDS + LINGER_SECONDS + KILL_SECONDS
        while self.supervisor.roles[0].process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _final_report(self, outcome: str) -> list[str]:
        return final_report_lines(self.config.run_folder, outcome)

    def _handle_signals(self, control: ControlClient) -> None:
        """Turn signals into a requested stop or an end of the job, and report a requested stop."""
        self.signals.poll()
        if self.signals.notice_signal and not control.stop_requested():
            control.request_stop(PREEMPTED)
        if outcome := self._interruption():
            control.end_job(outcome)
        elif control.stop_requested() and self.announced_outcome != (outcome := control.requested_outcome()):
            self.announced_outcome = outcome
            self._report(f"stop requested ({outcome}): {self.effect_of_stop}")

    def _interruption(self) -> str:
        """The outcome after a signal that ends the job; empty without one."""
        self.signals.poll()
        number = self.signals.end_signal
        return f"interrupted by {signal.Signals(number).name}" if number else ""

    def _start(self, name: str, arguments: list[str]) -> SupervisedProcess:
        path: Path = log_folder(self.config, 0) / f"{name}.log"
        environment = role_process.role_environment(self.config, arguments[0], self.scratch)
        role = self.supervisor.start(name, role_process.webrl_command(arguments), environment, path)
        self.journal.add(name, events.STARTED, log=path)
        return role

    def _report_updates(self) -> None:
        for update in self.updates.poll():
            self._report(f"update {update['version']} of {self.config.trainer.updates}{_figures(update)}")

    def _report(self, message: str) -> None:
        sys.stdout.write(f"job: {message}\n")
        sys.stdout.flush()


def _figures(update: dict[str, Any]) -> str:
    success = update["extra"].get("rollout_success_rate")
    rate = "" if success is None else f", success {success:.1%}"
    return f"{rate}, {update['tokens_per_second']:.0f} tokens/s, waited {update['seconds']['wait']:.1f} s for groups"
