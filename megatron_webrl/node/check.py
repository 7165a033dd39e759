"""`webrl node check`: is this node fit for a job, before any model is loaded? It tells the run's folder."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from megatron_webrl import compat
from megatron_webrl.config import Config, ConfigError
from megatron_webrl.node import findings
from megatron_webrl.node.findings import Findings
from megatron_webrl.node.local_checks import CHECKS, Unfit
from megatron_webrl.placement import place


@dataclass
class Check:
    """The check of one node."""

    config: Config
    name: str  # of this node
    nodes: Sequence[str]  # of the job, the first hosts the meeting
    address: str  # of the first node
    minimum: float = 0.0  # GiB/s that neighbours must exchange

    def __post_init__(self) -> None:
        """Raises ConfigError for a node that is not one of the job's."""
        if self.name not in self.nodes:
            raise ConfigError(f"node {self.name} (SLURMD_NODENAME) is not one of {', '.join(self.nodes)}")
        self.found = Findings(self.name)

    def run(self) -> Findings:
        """Look at everything, write what was found, and return it."""
        self._alone()
        if len(self.nodes) > 1:
            self._try("network", self._together)
        findings.write(self.config, self.found)
        return self.found

    def _alone(self) -> None:
        placement = place(self.config)
        for check, look in CHECKS.items():
            began = time.monotonic()
            self._try(check, lambda look=look: look(self.config, placement))  # type: ignore[misc]
            self.found.measured[f"{check}, seconds"] = round(time.monotonic() - began, 2)

    def _together(self) -> None:
        compat.install()
        try:
            from megatron_webrl.node import meeting
        except ImportError as error:
            raise Unfit(f"torch does not import: {error}") from error
        number, cuda = self.nodes.index(self.name), self.config.cluster.gpus > 0
        met = meeting.Meeting.join(number, self.nodes, self.address, findings.folder(self.config) / "meeting")
        with ExitStack() as stack:
            if number == 0:
                met.store.set("clock", str(stack.enter_context(meeting.clock_server())))
            stack.callback(met.leave)
            members = met.members(meeting.ALONE, not self.found.failed)
            if not self.found.failed:
                if number:
                    port = int(met.store.get("clock"))
                    self._try("clock", lambda: self._compare_clock(port))
                names, rank = [self.nodes[member] for member in members], members.index(number)
                self._try(
                    "link",
                    lambda: self._measure("link", meeting.links(met.store, names, rank, cuda, self.minimum)),
                )
            members = met.members(meeting.LINKED, not self.found.failed)
            if not self.found.failed and len(members) > 1:
                names, rank = [self.nodes[member] for member in members], members.index(number)
                speed = meeting.exchange(meeting.all_of(met.store), names, rank, cuda, 4 * meeting.GROUP_SECONDS)
                self._measure("all-reduce", {"of all": speed})

    def _compare_clock(self, port: int) -> None:
        from megatron_webrl.node.meeting import clock_offset

        self.found.measured["clock, seconds"] = round(clock_offset(self.address, port, self.nodes[0]), 6)

    def _measure(self, what: str, speeds: dict[str, float]) -> None:
        self.found.measured |= {f"{what} {name}, GiB/s": round(speed, 3) for name, speed in speeds.items()}

    def _try(self, name: str, look: Callable[[], Any]) -> None:
        try:
            look()
        except Unfit as error:
            self.found.failed[name] = str(error)


def run(config: Config, nodes: Sequence[str], address: str, minimum: float) -> int:
    """Check this node and say what was found. Returns 0 also for a bad node: `webrl node choose` leaves it out."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    found = Check(config, name, nodes, address, minimum).run()
    figures = ", ".join(
        f"{what.split(',')[0]} {value:g} GiB/s" for what, value in found.measured.items() if "GiB" in what
    )
    words = f"is not fit: {found.reason}" if found.reason else f"is fit{': ' if figures else ''}{figures}"
    sys.stdout.write(f"node {name} {words}\n")
    return 0
