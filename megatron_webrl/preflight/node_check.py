"""`webrl node check`: checks a node before any model is loaded, and writes a report to the run's folder."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from megatron_webrl.cluster.placement import place_processes
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.preflight import node_report
from megatron_webrl.preflight.local_checks import CHECKS, CheckFailed
from megatron_webrl.preflight.node_report import NodeReport
from megatron_webrl.system import torchvision_shim


@dataclass
class NodeCheck:
    config: Config
    node_name: str
    nodes: Sequence[str]  # of the job; the first hosts the store of the network check
    first_address: str  # of the first node
    min_gib_per_second: float = 0.0  # least speed of a link between neighbours

    def __post_init__(self) -> None:
        """Raises ConfigError for a node that is not one of the job's."""
        if self.node_name not in self.nodes:
            raise ConfigError(f"node {self.node_name} (SLURMD_NODENAME) is not one of {', '.join(self.nodes)}")
        self.report = NodeReport(self.node_name)

    def run(self) -> NodeReport:
        """Run all checks; writes and returns the report."""
        self._check_node()
        if len(self.nodes) > 1:
            self._try("network", self._check_network)
        node_report.write_report(self.config, self.report)
        return self.report

    def _check_node(self) -> None:
        placement = place_processes(self.config)
        for name, check in CHECKS.items():
            started_at = time.monotonic()
            self._try(name, lambda check=check: check(self.config, placement))  # type: ignore[misc]
            self.report.measurements[f"{name}, seconds"] = round(time.monotonic() - started_at, 2)

    def _check_network(self) -> None:
        torchvision_shim.install()
        try:
            from megatron_webrl.preflight import network_checks
        except ImportError as error:
            raise CheckFailed(f"torch does not import: {error}") from error
        number, cuda = self.nodes.index(self.node_name), self.config.cluster.gpus_per_node > 0
        group = network_checks.NetworkCheckGroup.join(
            number, self.nodes, self.first_address, node_report.report_folder(self.config) / "port"
        )
        with ExitStack() as stack:
            if number == 0:
                group.store.set("clock", str(stack.enter_context(network_checks.clock_server())))
            stack.callback(group.leave)
            members = group.passed_members(network_checks.LOCAL_STAGE, not self.report.failed_checks)
            if not self.report.failed_checks:
                if number:
                    port = int(group.store.get("clock"))
                    self._try("clock", lambda: self._compare_clock(port))
                names, rank = [self.nodes[member] for member in members], members.index(number)
                self._try(
                    "link",
                    lambda: self._measure(
                        "link", network_checks.check_links(group.store, names, rank, cuda, self.min_gib_per_second)
                    ),
                )
            members = group.passed_members(network_checks.LINK_STAGE, not self.report.failed_checks)
            if not self.report.failed_checks and len(members) > 1:
                names, rank = [self.nodes[member] for member in members], members.index(number)
                speed = network_checks.measure_all_reduce(
                    network_checks.all_reduce_store(group.store), names, rank, cuda, 4 * network_checks.GROUP_SECONDS
                )
                self._measure("all-reduce", {"of all": speed})

    def _compare_clock(self, port: int) -> None:
        from megatron_webrl.preflight.network_checks import clock_offset

        self.report.measurements["clock, seconds"] = round(clock_offset(self.first_address, port, self.nodes[0]), 6)

    def _measure(self, what: str, speeds: dict[str, float]) -> None:
        self.report.measurements |= {f"{what} {name}, GiB/s": round(speed, 3) for name, speed in speeds.items()}

    def _try(self, name: str, check: Callable[[], Any]) -> None:
        try:
            check()
        except CheckFailed as error:
            self.report.failed_checks[name] = str(error)


def run_node_check(config: Config, nodes: Sequence[str], address: str, minimum: float) -> int:
    """Check this node and print the result. Returns 0 for a bad node, too: `webrl node choose` excludes it."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    report = NodeCheck(config, name, nodes, address, minimum).run()
    speeds = ", ".join(f"{key.split(',')[0]} {gib:g} GiB/s" for key, gib in report.measurements.items() if "GiB" in key)
    if report.failure_reason:
        result = f"failed the check: {report.failure_reason}"
    else:
        result = f"passed the check{': ' if speeds else ''}{speeds}"
    sys.stdout.write(f"node {name} {result}\n")
    return 0
