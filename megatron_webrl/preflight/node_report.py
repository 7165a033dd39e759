"""What the check of each node found: a small file in the run's folder for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_webrl.config.schema import Config


@dataclass
class NodeReport:
    """Of one node. `failed` names each check that failed, and says why; `measured` are figures."""

    node: str
    failed_checks: dict[str, str] = field(default_factory=dict)
    measurements: dict[str, float] = field(default_factory=dict)

    @property
    def failure_reason(self) -> str:
        """Why the node is bad, in a line; empty if it is not."""
        return "; ".join(f"{check}: {words}" for check, words in self.failed_checks.items())


def report_folder(config: Config) -> Path:
    """Where they are."""
    return config.run_folder / "nodes"


def write_report(config: Config, found: NodeReport) -> None:
    """Write those of one node, whole or not at all."""
    path = report_folder(config) / f"{found.node}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(found), indent=1) + "\n")
    temporary.rename(path)


def bad_nodes(config: Config, nodes: Sequence[str]) -> dict[str, str]:
    """The nodes that are not fit, and why: a check failed, or nothing was heard of them."""
    bad: dict[str, str] = {}
    for node in nodes:
        path = report_folder(config) / f"{node}.json"
        if not path.is_file():
            bad[node] = "its check did not end; look for its name in the log of the job"
        elif reason := NodeReport(**json.loads(path.read_text())).failure_reason:
            bad[node] = reason
    return bad
