"""Roles that hang: who finds them, and who ends them after all roles of the job have shown their stacks.

`Judge` looks at the control plane, where the launcher or the first node of a job runs it. What it finds goes as an
order through a file in the run's folder, which costs those who supervise processes no connection: `Supervisor`, on each
machine, has all its roles write their stacks into their logs, then kills those that the order names and that still
hang. What is killed takes the way of any role that dies.

A worker hangs if it sends no heartbeat for run.lost_seconds, or makes no progress for run.hang_seconds. Of trainer
ranks that wait for each other all look alike: they hang once none has made progress for so long, and the first to have
stopped is killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_webrl import stacks
from megatron_webrl.config import Config
from megatron_webrl.placement import rollout_names
from megatron_webrl.tracking import events
from megatron_webrl.tracking.events import Journal

if TYPE_CHECKING:
    from megatron_webrl.control import Control
    from megatron_webrl.roles import Role

FILE = "stacks.json"
Sign = tuple[str, str]  # its kind, and what it was, as Control.sign_of_life has them
LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class Order:
    """To show the stacks of all roles, and to kill some."""

    number: int  # tells orders apart
    why: str
    kill: Mapping[str, Sign]  # by role: the sign of life that has not changed


def order(folder: Path, why: str, kill: Mapping[str, Sign] | None = None) -> Order:
    """Give an order to all who supervise roles of a run."""
    given = Order(time.time_ns(), why, kill or {})
    temporary = folder / f".{FILE}"
    temporary.write_text(json.dumps(asdict(given)) + "\n")
    temporary.rename(folder / FILE)
    return given


def last_order(folder: Path) -> Order | None:
    """The newest order."""
    path = folder / FILE
    if not path.is_file():
        return None
    fields = json.loads(path.read_text())
    return Order(fields["number"], fields["why"], {role: (kind, sign) for role, (kind, sign) in fields["kill"].items()})


class Judge:
    """Finds roles that hang. `look` is called again and again by one thread."""

    def __init__(self, config: Config, control: Control) -> None:
        """`control`: the connection of the launcher or of the first node."""
        self.config, self.control = config, control
        self._workers = rollout_names(config)  # parts of their engines included
        self._seen: dict[str, tuple[str, float]] = {}  # by role: its last mark, and since when it is that
        self._ordered: dict[str, Sign] = {}  # by role: with which it was last found hanging
        self._next = 0.0

    def look(self) -> Order | None:
        """Look if it is time; returns the order that was given, if any."""
        now = time.monotonic()
        if now < self._next:
            return None
        if now > self._next + 5 * LOOK_SECONDS:  # this process itself was held up, and can say nothing of others
            self._seen.clear()
            self.control.watch_anew()
        self._next = now + LOOK_SECONDS
        limit = self.config.run.hang_seconds
        found: dict[str, tuple[str, str]] = {}  # by role: the kind of sign that is missing, and what to say
        for worker in self._workers:
            if self.control.is_lost(worker):
                found[worker] = "beat", f"sent no heartbeat for {self.config.run.lost_seconds:g} s (run.lost_seconds)"
            elif limit and self._silence(worker, now) > limit:
                found[worker] = "progress", f"made no progress for {limit:g} s (run.hang_seconds)"
        if limit and self.control.opened():
            ranks = [f"trainer-{rank}" for rank in range(self.config.trainer_ranks)]
            silent = {rank: self._silence(rank, now) for rank in ranks}
            if min(silent.values()) > limit:
                first = max(silent, key=lambda rank: silent[rank])
                found[first] = (
                    "progress",
                    f"made no progress for {silent[first]:.0f} s, no trainer rank for {limit:g} s",
                )
        return self._order(found)

    def _order(self, found: Mapping[str, tuple[str, str]]) -> Order | None:
        signs = {role: (kind, self.control.sign_of_life(role, kind)) for role, (kind, _) in found.items()}
        fresh = {role: sign for role, sign in signs.items() if self._ordered.get(role) != sign}
        if not fresh:
            return None
        self._ordered |= fresh
        return order(self.config.run_folder, "; ".join(f"{role} {found[role][1]}" for role in fresh), fresh)

    def _silence(self, role: str, now: float) -> float:
        """Seconds for which a role has made no progress while this one looked; 0 before its first."""
        mark = self.control.sign_of_life(role, "progress")
        seen, since = self._seen.get(role, (None, now))
        if mark != seen:
            since = now
            self._seen[role] = (mark, now)
        return now - since if mark else 0.0


class Supervisor:
    """Does what orders say, for the roles of one machine."""

    def __init__(self, journal: Journal, tell: Callable[[str], None]) -> None:
        """`journal`: of these roles; `tell` tells people. Orders that are there already are of an earlier life."""
        self.folder, self.journal, self.tell = journal.folder, journal, tell
        self._done = self._newest()
        self._next = 0.0

    def step(self, roles: Sequence[Role], connect: Callable[[], Control]) -> None:
        """Look for an order if it is time. `connect`: to the control plane, once somebody is to be killed."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        if (newest := self._newest()) == self._done:
            return
        self._done = newest
        if (given := last_order(self.folder)) is None:
            return
        running = [role for role in roles if role.process.poll() is None]
        for role in running:
            for missing in stacks.show(role.process.pid, role.log, given.why):
                self.tell(f"{role.name}: {missing}")
        named = [role for role in running if role.name in given.kill]
        if named:
            self._kill(named, given, connect)

    def _kill(self, named: Sequence[Role], given: Order, connect: Callable[[], Control]) -> None:
        from megatron_webrl.control import JobFailed  # torch comes with it, which a node has no other use for

        try:
            self._kill_hanging(named, given, connect())
        except JobFailed as error:
            self.tell(f"nobody is killed: {error}")

    def _kill_hanging(self, named: Sequence[Role], given: Order, control: Control) -> None:
        for role in named:
            kind, sign = given.kill[role.name]
            if control.sign_of_life(role.name, kind) != sign:
                self.tell(f"{role.name} goes on, and is not killed")
                continue
            words = f"{role.name} is killed, for: {given.why}"
            with role.log.open("a") as log:
                log.write(f"ERROR {words}\n")  # its last words
            self.tell(words)
            self.journal.add(role.name, events.KILLED, given.why, role.log)
            role.process.kill()
            role.process.wait(stacks.KILL_SECONDS)

    def _newest(self) -> tuple[int, int] | None:
        path = self.folder / FILE
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


class Guard:
    """Both in one, for who has a connection and supervises roles, too."""

    def __init__(self, config: Config, control: Control, journal: Journal, tell: Callable[[str], None]) -> None:
        """See Judge and Supervisor."""
        self._control, self._judge, self._tell = control, Judge(config, control), tell
        self._supervisor = Supervisor(journal, tell)

    def step(self, roles: Sequence[Role]) -> None:
        """Look for roles of the job that hang, and do what was ordered for those given."""
        if given := self._judge.look():
            self._tell(f"{given.why}: all roles show their stacks in their logs")
        self._supervisor.step(roles, lambda: self._control)
