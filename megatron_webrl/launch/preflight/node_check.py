"""`webrl node check`: checks a node before any model is loaded, and writes a report to the run's folder."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.preflight import node_report
from megatron_webrl.launch.preflight.local_checks import CHECKS, GROUP_SECONDS, MESSAGE_BYTES, CheckFailed
from megatron_webrl.launch.preflight.node_report import NodeReport
from megatron_webrl.launch.preflight.resource_limits import INFINIBAND_DEVICES
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.util import torchvision_shim

if TYPE_CHECKING:
    from megatron_webrl.launch.preflight.exchange import ExchangeResult
    from megatron_webrl.launch.preflight.network_checks import NetworkCheckGroup, NodeDevices


@dataclass
class NodeCheck:
    config: Config
    node_name: str
    nodes: Sequence[str]  # of the job; the first hosts the store of the network check
    first_address: str  # of the first node
    min_gib_per_second: float = 0.0  # least speed of a link between neighbours
    cpu_devices: int = 1  # processes that stand for GPUs on a node without any
    message_bytes: int = MESSAGE_BYTES  # of an all-reduce
    link_seconds: float = GROUP_SECONDS  # limit of a first link

    def __post_init__(self) -> None:
        """Raises ConfigError for a node that is not one of the job's."""
        if self.node_name not in self.nodes:
            raise ConfigError(f"node {self.node_name} (SLURMD_NODENAME) is not one of {', '.join(self.nodes)}")
        self.report = NodeReport(self.node_name)

    def run(self) -> NodeReport:
        """Run all checks; writes and returns the report."""
        self._check_node()
        if (self.config.cluster.gpus_per_node and not self.report.failed_checks.get("gpus")) or self.cpu_devices > 1:
            self._try("all-reduce of the node", self._check_devices)
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

    def _check_devices(self) -> None:
        """Check that the GPUs of this node reach each other, before they can fail the checks with other nodes."""
        with self._torch():
            from megatron_webrl.launch.preflight.network_checks import check_devices

        self.report.measurements["all-reduce of the node, GiB/s"] = round(check_devices(self._devices()), 3)

    def _check_network(self) -> None:
        with self._torch():
            from megatron_webrl.launch.preflight import exchange, network_checks
        exchange.warm_up()
        number = self.nodes.index(self.node_name)
        group = network_checks.NetworkCheckGroup.join(
            number, self.nodes, self.first_address, node_report.report_folder(self.config) / "port"
        )
        with ExitStack() as stack:
            if number == 0:
                group.store.set("clock", str(stack.enter_context(network_checks.clock_server())))
            stack.callback(group.leave)
            if number:
                port = int(group.store.get("clock"))
                self._try("clock", lambda: self._compare_clock(port))
            members = group.passed_members(network_checks.LOCAL_STAGE, not self.report.failed_checks)
            self._check_exchanges(group, members)

    def _check_exchanges(self, group: NetworkCheckGroup, members: list[int]) -> None:
        """Links with neighbours, then the all-reduce; a node that is no member takes part in neither."""
        from megatron_webrl.launch.preflight import network_checks

        own, devices = group.node_index, self._devices()
        if own in members:
            results = network_checks.check_links(group, members, devices, self.min_gib_per_second, self.link_seconds)
            self._report_links(network_checks.link_failure(group, results, devices), results[own])
        else:
            results = network_checks.gather_links(group, members, None)
        members = network_checks.good_members(members, results)
        if own in members and len(members) > 1:
            self._try("all-reduce", lambda: self._measure_all_reduce(group, members))
        else:
            group.gather(network_checks.ALL_STAGE, "")

    def _report_links(self, failure: str, results: Mapping[int, Sequence[ExchangeResult]]) -> None:
        from megatron_webrl.launch.preflight.blame import slow_gpus, socket_warning

        devices = self._devices()
        for other, row in results.items():
            for index, result in enumerate(row):
                if result.gib_per_second:
                    which = f"{self.nodes[other]} {devices.names([index])}".strip()
                    self.report.measurements[f"link {which}, GiB/s"] = round(result.gib_per_second, 3)
        for index, (speed, median) in slow_gpus(results).items():
            nics = self.config.cluster.nics
            card = f" ({nics[index]})" if nics else ""
            self.report.warnings.append(
                f"{devices.names([index])}{card} is slow: {speed:.2f} GiB/s with its neighbours, but the median of the "
                f"node is {median:.2f}"
            )
        cards = sorted(path.name for path in INFINIBAND_DEVICES.glob("*")) if devices.cuda else []
        if warning := socket_warning(results, cards):
            self.report.warnings.append(warning)
        if failure:
            self.report.failed_checks["link"] = failure

    def _measure_all_reduce(self, group: NetworkCheckGroup, members: list[int]) -> None:
        from megatron_webrl.launch.preflight.network_checks import check_all_reduce

        if speed := check_all_reduce(group, members, self._devices()):
            self.report.measurements["all-reduce of all, GiB/s"] = round(speed, 3)

    def _devices(self) -> NodeDevices:
        from megatron_webrl.launch.preflight.network_checks import NodeDevices

        cluster = self.config.cluster
        return NodeDevices(
            self.node_name,
            cluster.gpus_per_node or self.cpu_devices,
            cluster.gpus_per_node > 0,
            cluster.nics,
            self.message_bytes,
        )

    @contextmanager
    def _torch(self) -> Iterator[None]:
        """Raises CheckFailed if the import of torch fails."""
        torchvision_shim.install()
        try:
            yield
        except ImportError as error:
            raise CheckFailed(f"torch does not import: {error}") from error

    def _compare_clock(self, port: int) -> None:
        from megatron_webrl.launch.preflight.network_checks import clock_offset

        self.report.measurements["clock, seconds"] = round(clock_offset(self.first_address, port, self.nodes[0]), 6)

    def _try(self, name: str, check: Callable[[], Any]) -> None:
        try:
            check()
        except CheckFailed as error:
            self.report.failed_checks[name] = str(error)


def run_node_check(config: Config, nodes: Sequence[str], address: str, minimum: float) -> int:
    """Check this node and print the result. Returns 0 for a bad node, too: `webrl node choose` excludes it."""
    from megatron_webrl.launch.preflight import exchange

    exchange.preload()
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    report = NodeCheck(config, name, nodes, address, minimum).run()
    if report.failure_reason:
        result = f"failed the check: {report.failure_reason}"
    else:
        speeds, warnings = describe_speeds(report.measurements), "".join(f"; {text}" for text in report.warnings)
        result = f"passed the check{': ' if speeds else ''}{speeds}{warnings}"
    sys.stdout.write(f"node {name} {result}\n")
    if multiprocessing.active_children():  # a call of a hung GPU's driver cannot be killed, nor waited for
        sys.stdout.flush()
        os._exit(0)
    return 0


def describe_speeds(measurements: Mapping[str, float]) -> str:
    """The speeds of a report in short: of the GPUs of a link the lowest and the highest."""
    speeds: dict[str, list[float]] = {}
    for key, value in measurements.items():
        name, _, unit = key.partition(", ")
        if unit == "GiB/s":
            speeds.setdefault(re.sub(r" (gpu|process) \d+$", "", name), []).append(value)
    return ", ".join(
        f"{name} {min(values):g}{f' to {max(values):g}' if len(values) > 1 else ''} GiB/s"
        for name, values in speeds.items()
    )
