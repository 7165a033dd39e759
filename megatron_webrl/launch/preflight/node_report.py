"""Reports of the node checks: one JSON file per node in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.util import atomic_file


@dataclass
class NodeReport:
    node: str
    failed_checks: dict[str, str] = field(default_factory=dict)  # reason by check
    measurements: dict[str, float] = field(default_factory=dict)  # by name and unit, such as "clock, seconds"
    warnings: list[str] = field(default_factory=list)  # such as a slow network card; the node passed nevertheless

    @property
    def failure_reason(self) -> str:
        """Why the node failed, in one line; empty if it passed."""
        return "; ".join(f"{check}: {reason}" for check, reason in self.failed_checks.items())


def report_folder(config: Config) -> Path:
    return config.run_folder / "nodes"


def write_report(config: Config, report: NodeReport) -> None:
    """Write the report of one node atomically."""
    atomic_file.write_json(report_folder(config) / f"{report.node}.json", asdict(report), indent=1)


def slow_nodes(config: Config, nodes: Sequence[str]) -> dict[str, str]:
    """The nodes with a warning in their report, with it."""
    paths = {node: report_folder(config) / f"{node}.json" for node in nodes}
    found = {node: NodeReport(**json.loads(path.read_text())) for node, path in paths.items() if path.is_file()}
    return {node: "; ".join(report.warnings) for node, report in found.items() if report.warnings}


def bad_nodes(config: Config, nodes: Sequence[str]) -> dict[str, str]:
    """The nodes that failed a check or left no report, with the reason."""
    bad: dict[str, str] = {}
    for node in nodes:
        path = report_folder(config) / f"{node}.json"
        if not path.is_file():
            bad[node] = "its check did not finish; search the job's log for its name"
        elif reason := NodeReport(**json.loads(path.read_text())).failure_reason:
            bad[node] = reason
    return bad
