"""Starts control plane, rollout workers and trainer ranks on one machine, as two Slurm steps do on many.

The launcher watches its roles. A rollout worker that ends badly, or sends no heartbeat, is started again, at most
run.restarts times; trainer ranks are started again all together, from the newest checkpoint (revival.py); any other
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

from megatron_webrl import processes, roles
from megatron_webrl.config import Config, ConfigError
from megatron_webrl.control import Control, JobFailed
from megatron_webrl.hangs import Guard
from megatron_webrl.placement import devices
from megatron_webrl.revival import Revival, may_revive
from megatron_webrl.ring.segment import run_prefix, sweep
from megatron_webrl.roles import GRACE_SECONDS, HURRY_SECONDS, KILL_SECONDS, Role, StartError
from megatron_webrl.status.farewell import farewell
from megatron_webrl.tracking import events, summary
from megatron_webrl.tracking.board import Board
from megatron_webrl.tracking.events import Journal
from megatron_webrl.types import GOOD_OUTCOMES

POLL_SECONDS = 0.25


@dataclass
class Launcher:
    """One job on this machine."""

    config: Config
    console: Console
    roles: list[Role] = field(default_factory=list)
    interrupts: int = 0
    scratch: Path = field(default_factory=processes.scratch_folder)  # sockets and browser profiles of the roles
    revival: Revival | None = None  # once there are trainer ranks
    weights_only: bool = False  # nothing is trained: the weights go to the engines some times
    guard: Guard | None = None  # once there is a control plane
    gpus: dict[str, str] = field(
        init=False
    )  # CUDA_VISIBLE_DEVICES of each role, where cluster.gpus says there are some
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        """Raises ConfigError for a configuration of several nodes."""
        if self.config.cluster.nodes > 1:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise ConfigError(
                f"cluster.nodes={self.config.cluster.nodes}, but all roles are to run on this one machine; set "
                "cluster.nodes=1 and what follows from it"
            )
        self.gpus = devices(self.config)
        self.journal = Journal(self.config.run_folder)

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
        roles.prepare_folder(config, lambda words: self.console.print(words, markup=False))
        self.journal.add(events.JOB, events.STARTED)
        processes.become_subreaper()
        outcome = "failed"
        try:
            outcome = self._supervise()
        except (JobFailed, StartError) as error:
            outcome = f"failed: {error}"
        finally:
            left = processes.kill_descendants(KILL_SECONDS, [role.process for role in self.roles])
            sweep(run_prefix(config.run.name))
            shutil.rmtree(self.scratch, ignore_errors=True)
            if left:
                self.console.print(f"could not end: {', '.join(left)}", style="red", markup=False)
        summary.complete(config.run_folder, outcome)
        self.journal.add(events.JOB, events.ENDED, outcome)
        return self._farewell(outcome)

    def _supervise(self) -> str:
        control, reaper = self._start_roles(), processes.Reaper()
        with Board(self.console, f"run {self.config.run.name}") as board:
            while (outcome := self._outcome(control)) is None:
                statuses = {role.name: control.status_of(role.name) or "starting" for role in self.roles[1:]}
                board.show(statuses, summary.read_updates(self.config.run_folder))
                reaper.reap([role.process for role in self.roles])
                time.sleep(POLL_SECONDS)
            board.show({}, summary.read_updates(self.config.run_folder))
        return self._end(control, outcome)

    def _end(self, control: Control, outcome: str) -> str:
        """Let every role end; returns the outcome, or who did not end well after a good one."""
        if outcome not in GOOD_OUTCOMES:
            self.console.print("ending all roles")
        control.finish(outcome)  # the first outcome counts: this one, if no role has said another
        late = self._await_roles(outcome)
        control.dismiss()
        return f"failed: {late}" if late and outcome in GOOD_OUTCOMES else outcome

    def _outcome(self, control: Control) -> str | None:
        """How the job ended, or None while it runs: as a role has said, a process has shown, or the user wants."""
        if end := control.end():
            return end["outcome"]
        for role in self.roles:
            if not (failure := role.failure()):
                continue
            if self.revival is not None and may_revive(role, self.config):
                return self._revive_trainer(self.revival, role, failure)
            if not self._restart(role, control, failure):
                self.journal.add(role.name, events.FAILED, failure, role.log)
                return f"failed: {failure}"
        if self.guard is not None:
            self.guard.step(self.roles)
        if self.interrupts > 1:
            return "interrupted"
        if self.interrupts == 1 and not control.stop_requested():
            control.request_stop()
            if not control.opened():  # nothing is trained yet: there is nothing to save
                return "interrupted"
            self.console.print("stopping after this update, with a checkpoint; again: at once")
        return None

    def _restart(self, role: Role, control: Control, failure: str) -> bool:
        """Start a rollout worker again, unless that is pointless or was done too often."""
        told = roles.revive(role, self.config, control, failure)
        if told is None:
            return False
        self.journal.add(role.name, events.RESTARTED, failure, role.log)
        self.console.print(told, style="yellow", markup=False, soft_wrap=True)
        return True

    def _revive_trainer(self, revival: Revival, role: Role, failure: str) -> str | None:
        """Start the ranks again after one ended badly; returns how the job ends if that was done too often."""
        if end := revival.control.end():  # of which it is only a consequence
            return end["outcome"]
        fall = revival.fell(role, failure)
        if outcome := fall.outcome(self.config):
            return outcome
        self._warn(revival.start_again(fall))
        return None

    def _start_roles(self) -> Control:
        config = self.config
        control, only = self._start_control(), ["--weights-only"] if self.weights_only else []
        self._start_workers(control, *only)
        for rank in range(config.trainer_ranks):
            place = roles.rank_environment(rank, config.trainer_ranks, rank, os.environ)
            self._start(f"trainer-{rank}", ["trainer", *self._where(control), *only], place)
        self.revival = None if self.weights_only else Revival(config, control, self.journal, self.roles)
        return control

    def _start_control(self) -> Control:
        host, port = roles.start_control(self.config, lambda name, arguments: self._start(name, arguments, {}))
        control = Control(host, port, "launcher", self.config.run.lost_seconds)
        self.guard = Guard(self.config, control, self.journal, self._warn)
        return control

    def _warn(self, words: str) -> None:
        self.console.print(words, style="yellow", markup=False, soft_wrap=True)

    def _start_workers(self, control: Control, *only: str) -> None:
        for worker in range(self.config.rollout.engines):
            arguments = ["rollout", *self._where(control), "--worker", str(worker), *only]
            self._start(f"rollout-{worker}", arguments, {})

    def _where(self, control: Control) -> list[str]:
        return roles.where(self.config, f"{control.host}:{control.port}")

    def _start(self, name: str, arguments: list[str], environment: dict[str, str]) -> Role:
        path = self.config.run_folder / "logs" / f"{name}.log"
        gpus = {"CUDA_VISIBLE_DEVICES": self.gpus[name]} if name in self.gpus else {}
        full = {**roles.role_environment(self.scratch), **gpus, **environment}
        self.roles.append(Role.start(name, roles.webrl(arguments), full, path))
        self.journal.add(name, events.STARTED, log=path)
        return self.roles[-1]

    def _await_roles(self, outcome: str) -> str | None:
        """Give every role but the control plane time to end; returns who did not end well, if anyone."""
        seconds = GRACE_SECONDS if outcome in GOOD_OUTCOMES else HURRY_SECONDS
        deadline = time.monotonic() + seconds
        others = self.roles[1:]
        while any(role.process.poll() is None for role in others) and self.interrupts < 3:
            if time.monotonic() > deadline:
                running = ", ".join(role.name for role in others if role.process.poll() is None)
                return f"{running} did not end within {seconds:.0f} s"
            time.sleep(0.05)
        # A worker that died in the last moment changes nothing about the outcome; what it finished is accounted for.
        others = [role for role in others if role.name not in self.config.workers or outcome not in GOOD_OUTCOMES]
        return next((failure for role in others if (failure := role.failure())), None)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1 if number == signal.SIGINT else 2

    def _clean_up_after_others(self) -> None:
        found = processes.sweep_orphans() + sweep("webrl-") + processes.sweep_scratch()
        if found:
            self.console.print(f"removed what a killed run had left: {', '.join(found)}", markup=False, soft_wrap=True)

    def _farewell(self, outcome: str) -> int:
        farewell(self.config.run_folder, self.console, table=True)
        return 0 if outcome == "finished" else 130 if outcome in ("stopped", "interrupted") else 1


def launch(config: Config, console: Console) -> int:
    """Run a job on this machine and return its exit code."""
    return Launcher(config, console).run()
