"""Section "nodes": what `webrl node check` measured on the nodes of a Slurm job (launch/slurm/gpu_check.sh)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_webrl.checks.gpu.request import GpuCheckRequest
from megatron_webrl.checks.gpu.results import CheckResult, failed, measured, skipped

SECTION = "nodes"


def check(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """A result for each failed check and each measurement of every node's report."""
    if not request.node_reports:
        yield skipped(SECTION, "links between nodes", "submit launch/slurm/gpu_check.sh to two nodes")
    for path in request.node_reports:
        yield from _results(path)


def _results(path: Path) -> Iterator[CheckResult]:
    try:
        report = json.loads(path.read_text())
        node, bad, measurements = report["node"], report["failed_checks"], report["measurements"]
    except (OSError, ValueError, KeyError) as error:
        yield failed(SECTION, path.stem, f"{path} holds no report of a node: {type(error).__name__}: {error}")
        return
    for name, reason in bad.items():
        yield failed(SECTION, f"{node}: {name}", reason)
    for key, value in measurements.items():
        name, _, unit = key.rpartition(", ")
        if unit != "seconds" or name == "clock":
            yield measured(SECTION, f"{node}: {name}", value, unit)
