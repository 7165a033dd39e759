"""The control plane of a job on many nodes, and who tells people how the job goes: `webrl node control`."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from megatron_webrl.cluster.placement import place_processes
from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import KEEP_ALIVE_SECONDS, LINGER_SECONDS, ControlClient, JobFailed
from megatron_webrl.launch import role_process
from megatron_webrl.launch.role_process import KILL_SECONDS, RoleProcess, RoleStartError
from megatron_webrl.launch.watchdog import Watchdog
from megatron_webrl.slurm.process_specs import log_folder
from megatron_webrl.slurm.signals import SignalListener
from megatron_webrl.status.final_report import final_report_lines
from megatron_webrl.system import child_process
from megatron_webrl.tracking import events, summary
from megatron_webrl.tracking.events import EventLog
from megatron_webrl.types import CLEAN_JOB_OUTCOMES, PREEMPTED

POLL_SECONDS = 0.5
PREEMPTED_EXIT_CODE = 75  # of a job that Slurm is to start again


class ControlHost:
    """The control plane of one job, from its start to the end of the job."""

    def __init__(self, config: Config, host: str) -> None:
        """`host`: the address of this node by which the others reach it."""
        self.config, self.host = config, host
        self.scratch = child_process.make_scratch_folder()
        self.role_processes: list[RoleProcess] = []
        self.signals = SignalListener()
        self.announced_outcome = ""  # the outcome of an early end that was asked for
        self.reported_until = (
            time.time()
        )  # updates that were finished until then are told, or were made before this start
        self.journal = EventLog(config.run_folder)

    def run(self) -> int:
        """Host until the job has ended; returns the exit code: 0 if in good order, PREEMPTED_CODE to go on later."""
        self.signals.listen()
        child_process.die_with_parent(signal.SIGTERM)
        child_process.become_subreaper()
        outcome = "failed"
        self.journal.add(events.JOB, events.STARTED)
        try:
            outcome = self._host()
        except (JobFailed, RoleStartError) as error:
            outcome = f"failed: {error}"
        finally:
            child_process.kill_descendants(KILL_SECONDS, [role.process for role in self.role_processes])
            shutil.rmtree(self.scratch, ignore_errors=True)
        summary.ensure_written(self.config.run_folder, outcome)
        self.journal.add(events.JOB, events.ENDED, outcome)
        for line in final_report_lines(self.config.run_folder):
            self._tell(line)
        if outcome == PREEMPTED:
            return PREEMPTED_EXIT_CODE
        return 0 if outcome in CLEAN_JOB_OUTCOMES else 1

    def _host(self) -> str:
        port = self.config.control.port or place_processes(self.config).control_port
        where = [f"control.host={self.host}", f"control.port={port}"]
        control = ControlClient(
            *role_process.start_control_process(self.config, self._start, *where),
            "host",
            self.config.run.heartbeat_timeout_seconds,
        )
        self._tell(f"control plane at {self.host}:{port}")
        guard = Watchdog(self.config, control, self.journal, self._tell)
        while (end := control.job_end()) is None:
            if failure := self.role_processes[0].failure_message():
                self.journal.add("control", events.FAILED, failure, self.role_processes[0].log)
                raise JobFailed(failure)
            self._heed(control)
            guard.poll(self.role_processes)
            self._show_updates()
            time.sleep(POLL_SECONDS)
        self._heed(control)  # a job may end as soon as it is asked to
        self._show_updates()
        deadline = time.monotonic() + KEEP_ALIVE_SECONDS + LINGER_SECONDS + KILL_SECONDS  # every role reads the end
        while self.role_processes[0].process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return end["outcome"]

    def _heed(self, control: ControlClient) -> None:
        """Do what signals ask for, and tell of an early end."""
        self.signals.poll()
        if self.signals.notice_signal and not control.stop_requested():
            control.request_stop(PREEMPTED)
        if self.signals.end_signal:
            control.end_job(f"interrupted by {signal.Signals(self.signals.end_signal).name}")
        elif control.stop_requested() and self.announced_outcome != (asked := control.requested_outcome()):
            self.announced_outcome = asked
            self._tell(f"to be {asked}: it ends after the update under way, with a checkpoint")

    def _start(self, name: str, arguments: list[str]) -> RoleProcess:
        path: Path = log_folder(self.config, 0) / f"{name}.log"
        role = RoleProcess.start(
            name, role_process.webrl_command(arguments), role_process.role_environment(self.scratch), path
        )
        self.role_processes.append(role)
        self.journal.add(name, events.STARTED, log=path)
        return role

    def _show_updates(self) -> None:
        for update in summary.read_updates(self.config.run_folder):
            if update["finished_at"] > self.reported_until:
                self._tell(f"update {update['version']} of {self.config.trainer.updates}{_figures(update)}")
                self.reported_until = update["finished_at"]

    def _tell(self, words: str) -> None:
        sys.stdout.write(f"job: {words}\n")
        sys.stdout.flush()


def _figures(update: dict[str, Any]) -> str:
    success = update["extra"].get("rollout_success_rate")
    share = "" if success is None else f", success {success:.1%}"
    return f"{share}, {update['tokens_per_second']:.0f} tokens/s, waited {update['seconds']['wait']:.1f} s for groups"
