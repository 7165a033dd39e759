"""The first node of a job: hosts the control service, watches the whole job, and ends it.

`webrl train` and `webrl eval` run one with all roles on this machine, the first node of a Slurm job one without roles,
which its steps run (node.py). An evaluation is a job without a trainer.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import psutil

from megatron_webrl.config.schema import Config
from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import SupervisedProcess
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.launch import run_folder
from megatron_webrl.launch.job_monitor import JobMonitor
from megatron_webrl.launch.node import FAILED_EXIT_GRACE_SECONDS, KILL_SECONDS, Node
from megatron_webrl.launch.output import ConsoleOutput, LogOutput
from megatron_webrl.launch.roles import log_folder, process_specs, role_command, role_environment
from megatron_webrl.launch.run_folder import RoleStartError
from megatron_webrl.launch.signals import SignalListener
from megatron_webrl.launch.watchdog import HangDetector, StackDumper
from megatron_webrl.monitor.control_probe import describe_tickets
from megatron_webrl.monitor.roles import CONTROL, RoleStatus
from megatron_webrl.placement.placement import Placement
from megatron_webrl.ring.segment import segment_prefix
from megatron_webrl.track import events, summary
from megatron_webrl.track.run_lock import Launch, LaunchLost
from megatron_webrl.types import (
    BUDGET_SPENT,
    CLEAN_JOB_OUTCOMES,
    PREEMPTED,
    STOPPED,
    failed_outcome,
    is_infrastructure_failure,
)
from megatron_webrl.util.disk_faults import INFRASTRUCTURE_EXIT_CODE, watch_for_stall

POLL_SECONDS = 0.25
EXIT_GRACE_SECONDS = 60.0  # for roles to exit after a clean outcome: last records, artifacts of the checkpoint
SIGNAL_SECONDS = 1.0  # for a signal to reach this process after it has ended the control service
PREEMPTED_EXIT_CODE = 75  # asks launch/slurm/common.sh to requeue the job, as does INFRASTRUCTURE_EXIT_CODE
LOCAL_HOST, LOCAL_PORT = "127.0.0.1", 0  # any free port
INTERRUPTED = "interrupted"


class FirstNode(Node):
    """Life cycle: made, then `run_job` once in the main thread."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        output: ConsoleOutput | LogOutput,
        host: str = "",
        weights_only: bool = False,
    ) -> None:
        """`host`: address of this node, as the others of a Slurm job reach it; empty: all roles run on this machine."""
        super().__init__(config, 0, output.report, SignalListener(is_local=not host), weights_only)
        self.placement, self.output, self.host = placement, output, host
        self.monitor: JobMonitor | None = None  # set with the roles of a job on this machine
        self._spared = psutil.Process().children()  # of a program that calls this
        self._announced = ""  # the requested outcome that was reported
        self._updates = summary.tail_updates(config.run_folder)

    def run_job(self, launch: AbstractContextManager[Launch | None]) -> int:
        """Run the job in the context of its launch; returns the exit code.

        On this machine 0: finished, 1: failed, 130: interrupted. Of a Slurm job 0: clean, 1: failed,
        PREEMPTED_EXIT_CODE and INFRASTRUCTURE_EXIT_CODE: to be requeued. Raises ConfigError if another job runs in the
        run's folder.
        """
        with self.signals.listening():  # before anything starts, so that an early interrupt ends the job cleanly, too
            if self.host:
                child_process.die_with_parent(signal.SIGTERM)
            try:
                with launch as self.launch, watch_for_stall(self.config.run_folder, self._handle_stall):
                    self._updates.poll()  # those of an earlier launch
                    outcome = self._run_roles()
                    self._check_launch()
                    summary.ensure_written(self.config.run_folder, outcome)
                    self.journal.add(events.JOB, events.ENDED, outcome)
            except LaunchLost as error:  # the files are those of another launch
                self.report(str(error))
                return 1
            finally:
                shutil.rmtree(self.scratch, ignore_errors=True)
        self.output.print_end(outcome)
        return self._exit_code(outcome)

    def _exit_code(self, outcome: str) -> int:
        if self.host and outcome == PREEMPTED:
            return PREEMPTED_EXIT_CODE
        if self.host and is_infrastructure_failure(outcome):
            return INFRASTRUCTURE_EXIT_CODE
        clean = CLEAN_JOB_OUTCOMES if self.host else ("finished", BUDGET_SPENT)
        if outcome in (clean if self.output.evaluation is None else ("finished",)):
            return 0
        return 130 if not self.host and outcome in (STOPPED, INTERRUPTED) else 1

    def _run_roles(self) -> str:
        """Run the control service and the roles until the job ends and no process is left; returns its outcome."""
        outcome = "failed"
        self.journal.add(events.JOB, events.STARTED)
        child_process.become_subreaper()
        try:
            outcome = self._run_until_end()
        except (RoleStartError, LaunchLost) as error:
            outcome = self._interruption() or failed_outcome(str(error))
        except JobFailed as error:
            # scancel ends all processes of the step, the control service perhaps before this one gets its signal.
            deadline = time.monotonic() + SIGNAL_SECONDS
            while not (outcome := self._interruption()) and time.monotonic() < deadline:
                time.sleep(0.05)
            outcome = outcome or failed_outcome(str(error), infrastructure=True)
        finally:
            left = child_process.kill_descendants(KILL_SECONDS, self._all_processes, self._spared)
            child_process.become_subreaper(False)  # of a program that calls this and continues
            if not self.host:
                run_folder.sweep_shared_memory(segment_prefix(self.config.run.name))
            if left:
                self.report(f"could not terminate: {', '.join(left)}")
        return outcome

    def _run_until_end(self) -> str:
        """Start the roles and watch the job until it ends; returns its outcome."""
        self._start_control()
        if not self.host:
            self.start_all(process_specs(self.config, self.placement, 0, ["trainer", "rollout"]))
        self._detector = HangDetector(self.config, self.placement, self.control)
        self._dumper = StackDumper(self.journal, self.report)
        with self.output:
            if self.output.evaluation is not None:
                outcome = self.output.evaluation.run(self.control, self._poll, self.output.show_evaluation)
            else:
                if isinstance(self.output, ConsoleOutput) and not self.weights_only:
                    self.monitor = JobMonitor.start(self.config, self.scratch, self.output.console)
                while (polled := self._poll()) is None:
                    self.output.show(self._updates.poll(), self._role_lines)
                    time.sleep(POLL_SECONDS)
                outcome = polled
                self._announce_stop()
                self.output.show(self._updates.poll(), list)
        return self._end(outcome)

    def _start_control(self) -> None:
        """Start the control service and wait until it listens. Raises RoleStartError.

        Its journal, with which it can be started again, is on a local disk.
        """
        path = run_folder.control_address_path(self.config)
        path.unlink(missing_ok=True)
        port = self.placement.control_port if self.host else LOCAL_PORT
        options = ["--host", self.host or LOCAL_HOST, "--port", str(port), "--journal"]
        command = role_command(self.config.run_folder, CONTROL, *options, str(self.scratch / "control.journal"))
        log = log_folder(self.config, 0 if self.host else None) / f"{CONTROL}.log"
        role = self.start(CONTROL, command, role_environment(self.config, CONTROL, self.scratch), log)
        self.journal.add(CONTROL, events.STARTED, log=log)
        run_folder.wait_for_control_address(path, self.config.run.startup_timeout_seconds, role.failure_message)
        if self.host:
            self.report(f"control service at {self.host}:{port}")

    def connect(self) -> ControlClient:
        path = run_folder.control_address_path(self.config)
        return ControlClient(path, "host", while_lost=self._while_control_lost)

    def _while_control_lost(self) -> None:
        """Start the control service again if it has failed. Raises JobFailed; after a signal that ends the job, too."""
        self.restart_control()
        if outcome := self._interruption():
            raise JobFailed(outcome)

    @property
    def _all_processes(self) -> list[child_process.ChildProcess]:
        monitor = self.monitor.process if self.monitor is not None else None
        return [*self.processes, *([] if monitor is None else [monitor])]

    def _poll(self) -> str | None:
        """Restart what has failed or hangs, and handle signals; returns the outcome of the job once it ends.

        Raises JobFailed, LaunchLost.
        """
        if (outcome := self.poll_failures()) is not None:
            return outcome
        self.restart_control()
        if (end := self.control.job_end()) is not None:
            return end["outcome"]
        self._check_launch()
        if outcome := self._handle_signals():
            return outcome
        if request := self._detector.poll():
            self.report(f"{request.reason}: dumping the stacks of all roles to their logs")
        self._dumper.poll(self.roles, lambda: self.control)
        child_process.reap(self._all_processes)
        if self.monitor is not None:
            self.monitor.poll()
        return None

    def _check_launch(self) -> None:
        if self.launch is not None:
            self.launch.check()

    def _handle_signals(self) -> str:
        """Turn signals into a requested stop, or an outcome of the job, which is returned; else empty."""
        self.signals.poll()
        if outcome := self._interruption():
            return outcome
        if self.signals.notice_signal and not self.control.stop_requested():
            self.control.request_stop(PREEMPTED if self.host else STOPPED)
            trained = self.control.ticket_epoch_count() or self.control.get_json("demonstrations/trained")
            if not self.host and not trained:
                return INTERRUPTED  # neither a warm start nor an update: there is nothing to save
        self._announce_stop()
        return ""

    def _announce_stop(self) -> None:
        """Report a requested stop, once for each outcome."""
        if not self.control.stop_requested() or self._announced == (outcome := self.control.requested_outcome()):
            return
        self._announced = outcome
        effect = "the job ends after the current update, with a checkpoint"
        if self.output.evaluation is not None:
            effect = "the evaluation ends without a result"
        way = "" if self.host else "; interrupt again to stop at once"
        self.report(f"stop requested ({outcome}): {effect}{way}")

    def _interruption(self) -> str:
        """The outcome after a signal that ends the job; empty without one."""
        self.signals.poll()
        number = self.signals.end_signal
        if not self.host:
            return INTERRUPTED if number else ""
        return f"{INTERRUPTED} by {signal.Signals(number).name}" if number else ""

    def _end(self, outcome: str) -> str:
        """End all roles; returns the outcome, which becomes a failure if a role fails to exit cleanly."""
        if outcome not in CLEAN_JOB_OUTCOMES and not self.host:
            self.report("ending all roles")
        self.control.end_job(outcome)  # without effect if a role has ended the job already
        if self.host:
            self._await_control_exit()
            return outcome
        failure = self._wait_for_exits(outcome)
        self.control.shutdown()
        return failed_outcome(failure) if failure and outcome in CLEAN_JOB_OUTCOMES else outcome

    def _await_control_exit(self) -> None:
        """Wait for the control service, which exits once every role has had the time to read the outcome."""
        from megatron_webrl.control.server import KEEP_ALIVE_SECONDS, LINGER_SECONDS  # an HTTP server

        deadline = time.monotonic() + KEEP_ALIVE_SECONDS + LINGER_SECONDS + KILL_SECONDS
        while self.processes[0].poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _wait_for_exits(self, outcome: str) -> str | None:
        """Wait for every role but the control service to exit; returns a message if one does not, or fails."""
        is_clean = outcome in CLEAN_JOB_OUTCOMES
        seconds = EXIT_GRACE_SECONDS if is_clean else FAILED_EXIT_GRACE_SECONDS
        deadline = time.monotonic() + seconds
        others, overdue = self.roles[1:], ""
        while running := [role for role in others if role.process.poll() is None]:
            self.signals.poll()
            if len(self.signals.end_signals) > 1:
                break
            if time.monotonic() > deadline:
                overdue = f"{', '.join(role.name for role in running)} did not exit within {seconds:.0f} s"
                break
            time.sleep(0.05)
        if is_clean:  # a worker that fails after the end changes nothing: its groups are counted
            others = [role for role in others if role.name not in self.config.worker_names]
        if overdue:
            if any(role in others for role in running):
                return overdue
            self.report(f"{overdue} and is killed; its episodes are counted")
        return next((failure for role in others if (failure := role.poll_failure())), None)

    def _handle_stall(self, reason: str) -> None:
        """Wait for a file system that does not answer; a Slurm job and this process end instead, to be requeued.

        Runs in a thread: the main thread, and the job's log, may wait for the disk.
        """
        if not self.host:
            self.report(f"{reason}; waiting for it")
            return
        from megatron_webrl.control.server import LINGER_SECONDS

        threading.Thread(target=self.report, args=(f"{reason}; the job ends",), daemon=True).start()
        with suppress(JobFailed):
            self.control.end_job(failed_outcome(reason, infrastructure=True))
        time.sleep(LINGER_SECONDS)  # for the roles to read the outcome
        os._exit(INFRASTRUCTURE_EXIT_CODE)

    def _role_lines(self) -> list[RoleStatus]:
        """The roles of this machine, as the control service knows them. One request."""
        job = self.control.job_status()
        return [role_line(self, role, job) for role in self.roles]


def role_line(node: Node, role: SupervisedProcess, job: Mapping[str, Any]) -> RoleStatus:
    """What a table says of a role of a node; `job`: ControlClient.job_status."""
    restarts = node.attempt if role.name.startswith("trainer-") else role.policy.used
    if role.name == CONTROL:
        groups = f"groups: {describe_tickets(job['tickets'])}" if job["tickets"] else ""
        return RoleStatus(role.name, "running", groups, restarts)
    report = job["roles"].get(role.name)
    if role.name in node.given_up:
        return RoleStatus(role.name, "failed", "given up", restarts)
    if report is None or report["cleared"]:
        state = "starting"
    else:
        silent = report["silent_seconds"] > node.config.run.heartbeat_timeout_seconds
        state = "silent" if silent else "running"
    return RoleStatus(role.name, state, (report or {}).get("status") or "starting", restarts)
