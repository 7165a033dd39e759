"""The reports of `webrl check node`: one JSON file for each node, in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_webrl.config.schema import Config


def report_folder(config: Config) -> Path:
    return config.run_folder / "nodes"


def bad_nodes(config: Config, nodes: Sequence[str]) -> dict[str, str]:
    """The nodes that failed a check or left no report, with the reason."""
    return _notes(config, nodes, "failed", "its check did not finish; search the job's log for its name")


def slow_nodes(config: Config, nodes: Sequence[str]) -> dict[str, str]:
    """The nodes that passed with a warning, such as a slow network card, with it."""
    return _notes(config, nodes, "passed", "")


def _notes(config: Config, nodes: Sequence[str], status: str, absent: str) -> dict[str, str]:
    """By node, the notes of the lines of its report with this status, or `absent`; without nodes that have none."""
    notes = {}
    for node in nodes:
        path = report_folder(config) / f"{node}.json"
        results = json.loads(path.read_text())["results"] if path.is_file() else None
        texts = (
            f"{each['name']}: {each['note']}" for each in results or () if each["status"] == status and each["note"]
        )
        notes[node] = absent if results is None else "; ".join(texts)
    return {node: text for node, text in notes.items() if text}
