"""The control plane of a job on many nodes, and who tells people how the job goes: `webrl node control`."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_webrl import processes, roles
from megatron_webrl.config import Config
from megatron_webrl.control import GOOD_OUTCOMES, LINGER_SECONDS, Control, JobFailed
from megatron_webrl.node.starts import log_folder
from megatron_webrl.placement import place
from megatron_webrl.roles import KILL_SECONDS, Role, StartError
from megatron_webrl.status.farewell import farewell_lines
from megatron_webrl.tracking import events, summary
from megatron_webrl.tracking.events import Journal

POLL_SECONDS = 0.5


class Hosting:
    """The control plane of one job, from its start to the end of the job."""

    def __init__(self, config: Config, host: str) -> None:
        """`host`: the address of this node by which the others reach it."""
        self.config, self.host = config, host
        self.scratch = processes.scratch_folder()
        self.hosted: list[Role] = []
        self.ended = 0
        self.shown = 0  # updates told
        self.journal = Journal(config.run_folder)

    def run(self) -> int:
        """Host until the job has ended; returns the exit code: 0 if in good order."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
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
        return 0 if outcome in GOOD_OUTCOMES else 1

    def _host(self) -> str:
        port = self.config.control.port or place(self.config).control_port
        where = [f"control.host={self.host}", f"control.port={port}"]
        control = Control(*roles.start_control(self.config, self._start, *where), "host", self.config.run.lost_seconds)
        self._tell(f"control plane at {self.host}:{port}")
        while (end := control.end()) is None:
            if failure := self.hosted[0].failure():
                self.journal.add("control", events.FAILED, failure, self.hosted[0].log)
                raise JobFailed(failure)
            if self.ended:
                control.finish(f"interrupted by {signal.Signals(self.ended).name}")
            self._show_updates()
            time.sleep(POLL_SECONDS)
        self._show_updates()
        deadline = time.monotonic() + LINGER_SECONDS + KILL_SECONDS  # every role reads the end
        while self.hosted[0].process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return end["outcome"]

    def _start(self, name: str, arguments: list[str]) -> Role:
        path: Path = log_folder(self.config, 0) / f"{name}.log"
        role = Role.start(name, roles.webrl(arguments), roles.role_environment(self.scratch), path)
        self.hosted.append(role)
        self.journal.add(name, events.STARTED, log=path)
        return role

    def _show_updates(self) -> None:
        updates = summary.read_updates(self.config.run_folder)
        for update in updates[self.shown :]:
            self._tell(f"update {update['version']} of {self.config.trainer.updates}{_figures(update)}")
        self.shown = len(updates)

    def _tell(self, words: str) -> None:
        sys.stdout.write(f"job: {words}\n")
        sys.stdout.flush()

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.ended = number


def _figures(update: dict[str, Any]) -> str:
    success = update["extra"].get("sampled_success")
    share = "" if success is None else f", success {success:.1%}"
    return f"{share}, {update['tokens_per_second']:.0f} tokens/s, waited {update['seconds']['wait']:.1f} s for groups"
