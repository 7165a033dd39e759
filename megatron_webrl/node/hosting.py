"""The control plane of a job on many nodes, and who tells people how the job goes: `webrl node control`."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from megatron_webrl import processes, roles
from megatron_webrl.config import Config
from megatron_webrl.control import HELD_SECONDS, LINGER_SECONDS, Control, JobFailed
from megatron_webrl.hangs import Guard
from megatron_webrl.node.signals import Signals
from megatron_webrl.node.starts import log_folder
from megatron_webrl.placement import place
from megatron_webrl.roles import KILL_SECONDS, Role, StartError
from megatron_webrl.status.farewell import farewell_lines
from megatron_webrl.tracking import events, summary
from megatron_webrl.tracking.events import Journal
from megatron_webrl.types import GOOD_OUTCOMES, PREEMPTED

POLL_SECONDS = 0.5
PREEMPTED_CODE = 75  # of a job that Slurm is to start again


class Hosting:
    """The control plane of one job, from its start to the end of the job."""

    def __init__(self, config: Config, host: str) -> None:
        """`host`: the address of this node by which the others reach it."""
        self.config, self.host = config, host
        self.scratch = processes.scratch_folder()
        self.hosted: list[Role] = []
        self.signals = Signals()
        self.stopping = ""  # the outcome of an early end that was asked for
        self.shown = time.time()  # updates that were finished until then are told, or were made before this start
        self.journal = Journal(config.run_folder)

    def run(self) -> int:
        """Host until the job has ended; returns the exit code: 0 if in good order, PREEMPTED_CODE to go on later."""
        self.signals.listen()
        processes.die_with_parent(signal.SIGTERM)
        processes.become_subreaper()
        outcome = "failed"
        self.journal.add(events.JOB, events.STARTED)
        try:
            outcome = self._host()
        except (JobFailed, StartError) as error:
            outcome = f"failed: {error}"
        finally:
            processes.kill_descendants(KILL_SECONDS, [role.process for role in self.hosted])
            shutil.rmtree(self.scratch, ignore_errors=True)
        summary.complete(self.config.run_folder, outcome)
        self.journal.add(events.JOB, events.ENDED, outcome)
        for line in farewell_lines(self.config.run_folder):
            self._tell(line)
        if outcome == PREEMPTED:
            return PREEMPTED_CODE
        return 0 if outcome in GOOD_OUTCOMES else 1

    def _host(self) -> str:
        port = self.config.control.port or place(self.config).control_port
        where = [f"control.host={self.host}", f"control.port={port}"]
        control = Control(*roles.start_control(self.config, self._start, *where), "host", self.config.run.lost_seconds)
        self._tell(f"control plane at {self.host}:{port}")
        guard = Guard(self.config, control, self.journal, self._tell)
        while (end := control.end()) is None:
            if failure := self.hosted[0].failure():
                self.journal.add("control", events.FAILED, failure, self.hosted[0].log)
                raise JobFailed(failure)
            self._heed(control)
            guard.step(self.hosted)
            self._show_updates()
            time.sleep(POLL_SECONDS)
        self._heed(control)  # a job may end as soon as it is asked to
        self._show_updates()
        deadline = time.monotonic() + HELD_SECONDS + LINGER_SECONDS + KILL_SECONDS  # every role reads the end
        while self.hosted[0].process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return end["outcome"]

    def _heed(self, control: Control) -> None:
        """Do what signals ask for, and tell of an early end."""
        self.signals.look()
        if self.signals.noticed and not control.stop_requested():
            control.request_stop(PREEMPTED)
        if self.signals.ended:
            control.finish(f"interrupted by {signal.Signals(self.signals.ended).name}")
        elif control.stop_requested() and self.stopping != (asked := control.stop_outcome()):
            self.stopping = asked
            self._tell(f"to be {asked}: it ends after the update under way, with a checkpoint")

    def _start(self, name: str, arguments: list[str]) -> Role:
        path: Path = log_folder(self.config, 0) / f"{name}.log"
        role = Role.start(name, roles.webrl(arguments), roles.role_environment(self.scratch), path)
        self.hosted.append(role)
        self.journal.add(name, events.STARTED, log=path)
        return role

    def _show_updates(self) -> None:
        for update in summary.read_updates(self.config.run_folder):
            if update["finished_at"] > self.shown:
                self._tell(f"update {update['version']} of {self.config.trainer.updates}{_figures(update)}")
                self.shown = update["finished_at"]

    def _tell(self, words: str) -> None:
        sys.stdout.write(f"job: {words}\n")
        sys.stdout.flush()


def _figures(update: dict[str, Any]) -> str:
    success = update["extra"].get("sampled_success")
    share = "" if success is None else f", success {success:.1%}"
    return f"{share}, {update['tokens_per_second']:.0f} tokens/s, waited {update['seconds']['wait']:.1f} s for groups"
