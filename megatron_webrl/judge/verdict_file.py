"""Verdicts on stored episodes: a JSONL file that grows by a line for each verdict, and continues where it ended."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.protocols import find_protocol
from megatron_webrl.judge.questions import PromptFiles
from megatron_webrl.types import JUDGE_ERROR, Trajectory, Verdict
from megatron_webrl.util import history

_WITHOUT_EFFECT = ("budget", "concurrency", "timeout_seconds", "deadline_seconds", "prompts")
"""Settings that do not change what a verdict means."""


def settings_digest(settings: JudgeConfig) -> str:
    """8 digits that name all settings and prompts on which verdicts depend; endpoints may move."""
    found: dict[str, Any] = {key: value for key, value in asdict(settings).items() if key not in _WITHOUT_EFFECT}
    for slot in ("verdict", "relevance"):
        if slot in found:
            found[slot] = [found[slot]["name"], found[slot]["options"]]
    found["voters"] = [[voter.name, voter.options] for voter in settings.voters]
    if settings.uses_models:
        protocol = find_protocol(settings)
        found["prompts"] = PromptFiles.load(settings.prompts, protocol.folder, protocol.stages).digest
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:8]


class VerdictFile:
    """Lines by episode key. Verdicts without a usable reply are not kept: a second run asks again."""

    def __init__(self, path: Path, digest: str) -> None:
        """Read what is there, and open the file to append. Raises ConfigError: verdicts by other settings, no file."""
        self.path, self._digest = path, digest
        self.lines: dict[str, dict[str, Any]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for number, line in enumerate(history.read(path), 1):
                self._take(number, line)
            self._history = history.History(path)  # cuts off half a line
        except OSError as error:
            raise ConfigError(
                f"the verdicts cannot be kept in {path}: {error.strerror}; name a file by --out"
            ) from error

    def _take(self, number: int, line: Any) -> None:
        if not isinstance(line, dict) or not {"episode", "settings", "outcome", "stored", "stages"} <= line.keys():
            raise ConfigError(f"{self.path}:{number} is no line of verdicts; name another file by --out")
        if line["settings"] != self._digest:
            raise ConfigError(
                f"{self.path}:{number} was judged with other settings ({line['settings']}, not {self._digest}); "
                "name another file by --out, or remove it"
            )
        if line["outcome"] == JUDGE_ERROR:
            self.lines.pop(line["episode"], None)
        else:
            self.lines[line["episode"]] = line

    def __enter__(self) -> VerdictFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._history.close()

    def holds(self, key: str, trajectory: Trajectory) -> bool:
        """Whether an episode has a verdict; one of another episode, which was at its place before, is forgotten."""
        line = self.lines.get(key)
        if line is not None and any(line.get(name) != value for name, value in _identity(trajectory).items()):
            del self.lines[key]
        return key in self.lines

    def add(self, key: str, trajectory: Trajectory, verdict: Verdict) -> None:
        """Append a verdict."""
        line = {
            "episode": key, "settings": self._digest, **_identity(trajectory), "stored": trajectory.outcome,
            **asdict(verdict),
        }  # fmt: skip
        self._history.append(line)
        self.lines[key] = line


def _identity(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "ticket": trajectory.ticket, "index": trajectory.index, "task": trajectory.task.id,
        "worker": trajectory.worker, "finished_at": trajectory.finished_at,
    }  # fmt: skip
