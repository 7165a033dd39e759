"""One node's part of a step: its processes, started where the placement says, watched, and ended together.

A process that ends badly ends the job, with an error that names it; a rollout worker is started again first, at most
run.restarts times, and trainer ranks all together, with those of all other nodes (revival.py). What is started dies
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

from megatron_webrl import processes, roles
from megatron_webrl.config import Config, ConfigError
from megatron_webrl.hangs import Supervisor
from megatron_webrl.node.signals import Signals
from megatron_webrl.node.starts import Start, starts
from megatron_webrl.placement import Role as RoleName
from megatron_webrl.placement import place, worker_of
from megatron_webrl.placement_cores import format_cores
from megatron_webrl.revival import Revival, may_revive
from megatron_webrl.ring.segment import run_prefix, sweep
from megatron_webrl.roles import HURRY_SECONDS, KILL_SECONDS, Role
from megatron_webrl.tracking import events
from megatron_webrl.tracking.events import Journal
from megatron_webrl.types import GOOD_OUTCOMES

if TYPE_CHECKING:
    from megatron_webrl.control import Control
    from megatron_webrl.falls import Fall

POLL_SECONDS = 0.1


@dataclass
class Step:
    """The processes of one role on one node."""

    config: Config
    role: RoleName
    node: int
    address: str  # of the control plane, HOST:PORT
    rehearse: str = ""
    roles: list[Role] = field(default_factory=list)
    excused: set[str] = field(default_factory=set)  # workers that failed after the job had ended well
    signals: Signals = field(default_factory=Signals)
    revival: Revival | None = None  # of the trainer ranks, once it is needed
    deaf: bool = False  # it cannot hear of falls any more
    scratch: Path = field(default_factory=processes.scratch_folder)

    def __post_init__(self) -> None:
        self.journal = Journal(self.config.run_folder, self.node)

    def run(self) -> int:
        """Run until all processes have ended; returns the exit code: 0 in good order, 1 failed, 143 ended by SIGTERM.

        Raises ConfigError for a node that does not fit the placement, ProcessError for a program that is not there.
        """
        self.signals.listen()
        processes.die_with_parent(signal.SIGTERM)
        processes.become_subreaper()
        self._sweep()
        try:
            for start in self._starts():
                self._start(start)
            self.journal.add_all([(role.name, role.log) for role in self.roles], events.STARTED)
            return self._watch()
        finally:
            left = processes.kill_descendants(KILL_SECONDS, [role.process for role in self.roles])
            shutil.rmtree(self.scratch, ignore_errors=True)
            if self.role == "rollout":  # whose workers made the ring; while others use it, it stays
                sweep(run_prefix(self.config.run.name))
            if left:
                self._tell(f"could not end: {', '.join(left)}")

    def _starts(self) -> list[Start]:
        found = place(self.config)
        return starts(self.config, found, self.node, self.role, self.address, os.environ, self.rehearse)

    def _start(self, start: Start) -> None:
        environment = {**roles.role_environment(self.scratch), **start.environment}
        cores = self._held(start.cores)
        self.roles.append(Role.start(start.name, list(start.command), environment, start.log, cores))

    def _held(self, cores: tuple[int, ...]) -> tuple[int, ...]:
        """The cores to bind to. Raises ConfigError for cores that this node has not; a rehearsal goes on with fewer."""
        mine = os.sched_getaffinity(0)
        missing = [core for core in cores if core not in mine]
        if missing and not self.rehearse:
            raise ConfigError(
                f"cluster.cores names core {missing[0]}, but the step may use {len(mine)} cores of "
                f"{socket.gethostname()} ({format_cores(sorted(mine))}); correct it, or leave it empty"
            )
        return tuple(core for core in cores if core in mine)

    def _watch(self) -> int:
        names = [role.name for role in self.roles]
        self._tell(f"started {', '.join(names) if len(names) < 4 else f'{names[0]} to {names[-1]}'}")
        running, reaper = True, processes.Reaper()
        supervisor = Supervisor(self.journal, self._tell)
        while running:
            running = any(role.process.poll() is None for role in self.roles)  # before failures are looked for
            for role in self.roles:
                if role.name in self.excused or (failure := role.failure()) is None:
                    continue
                if not self._goes_on(role, failure):
                    return 1
                running = True
            if (fall := self._fall_elsewhere()) is not None:
                if not self._start_again(fall):
                    return 1
                running = True
            supervisor.step(self.roles, self._control)
            self.signals.look()  # of a notice the first node tells the trainer
            if self.signals.ended:
                self._tell(f"ended by {signal.Signals(self.signals.ended).name}")
                return 128 + self.signals.ended
            reaper.reap([role.process for role in self.roles])
            time.sleep(POLL_SECONDS)
        return 0

    def _goes_on(self, role: Role, failure: str) -> bool:
        """Whether the node goes on after a failure: the worker is started again, or the job is over anyway.

        Otherwise the job ends, and every other role with it.
        """
        from megatron_webrl.control import JobFailed

        try:
            control = self._control()
            end = control.end()
            if end is not None:
                if end["outcome"] in GOOD_OUTCOMES and worker_of(role.name) in self.config.workers:
                    self.excused.add(role.name)  # it changes nothing: what it finished is accounted for
                    return True
                self._tell(f"{role.name} ended with the job")
                return False
            return self._revived(role, control, failure)
        except JobFailed:
            self._tell(f"{failure}; the control plane at {self.address} does not answer")
            return False

    def _control(self) -> Control:
        from megatron_webrl.control import Control

        host, _, port = self.address.rpartition(":")
        return Control(host, int(port), f"node-{self.node}", self.config.run.lost_seconds, connect_seconds=30.0)

    def _revived(self, role: Role, control: Control, failure: str) -> bool:
        if may_revive(role, self.config) and not self.signals.ended:
            self.revival = self.revival or Revival(self.config, control, self.journal, self.roles)
            return self._start_again(self.revival.fell(role, failure))
        if told := roles.revive(role, self.config, control, failure):
            self._tell(told)
            self.journal.add(role.name, events.RESTARTED, failure, role.log)
            return True
        self._tell(failure)
        self.journal.add(role.name, events.FAILED, failure, role.log)
        return self._fail(control, f"failed: {failure}")

    def _fall_elsewhere(self) -> Fall | None:
        """How the trainer fell, if a rank of another node has ended badly."""
        from_others = self.role == "trainer" and self.config.cluster.nodes > 1 and not self.rehearse
        if not from_others or not self.config.run.trainer_restarts or self.deaf:
            return None
        from megatron_webrl.control import JobFailed

        try:
            self.revival = self.revival or Revival(self.config, self._control(), self.journal, self.roles)
            return self.revival.heard()
        except JobFailed:  # the job is over, or its ranks will say what they miss; a connection is tried for again
            self.deaf = self.revival is not None
            return None

    def _start_again(self, fall: Fall) -> bool:
        """Start the ranks again as the next attempt; False if there is none, and the job ends."""
        assert self.revival is not None
        if outcome := fall.outcome(self.config):
            self._tell(outcome.removeprefix("failed: "))
            return self._fail(self.revival.control, outcome)
        self._tell(self.revival.start_again(fall))
        return True

    def _fail(self, control: Control, outcome: str) -> bool:
        control.finish(outcome)
        deadline = time.monotonic() + HURRY_SECONDS  # the others see it, and end in order
        while any(other.process.poll() is None for other in self.roles) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return False

    def _sweep(self) -> None:
        """Remove what killed runs have left; what others use stays."""
        found = processes.sweep_orphans() + sweep("webrl-") + processes.sweep_scratch()
        if found:
            self._tell(f"removed what a killed run had left: {', '.join(found)}")

    def _tell(self, words: str) -> None:
        sys.stdout.write(f"node {self.node} ({socket.gethostname()}), {self.role}: {words}\n")
        sys.stdout.flush()
