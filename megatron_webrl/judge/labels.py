"""Labels of episodes, given by people, and how well each judge agrees with them.

Three forms of file are read:

    {"ticket": 3, "index": 0, "label": "success"}     a line for each episode: JSONL
    {"task_id": "Allrecipes--0", "label": 1}          a line for each task, of which there is one episode: JSONL
    [{"task_id": "...", "Operator_human_label": "1"}, ...]    a column for each agent, as Online-Mind2Web releases them

A label is "success", "failure" or another word, such as "blocked"; 0, 1 and 2 are failure, success and not_executable,
Online-Mind2Web's words.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.track.evaluations import share_of
from megatron_webrl.types import TRAINABLE_OUTCOMES
from megatron_webrl.util import history

SUCCESS, FAILURE = "success", "failure"
JUDGE_FIGURES = ("agreement", "precision", "recall")
_CODES = {0: FAILURE, 1: SUCCESS, 2: "not_executable"}
_COLUMN_END = "_human_label"
_EXPECTED = '{"ticket": 3, "index": 0, "label": "success"} or {"task_id": "a", "label": "success"}'
LabelKey = tuple[int, int] | str  # ticket and index, or the task's id
Line = Mapping[str, Any]  # of a VerdictFile


@dataclass(frozen=True)
class Labels:
    """Labels by episode."""

    path: Path
    by_key: Mapping[LabelKey, str]

    def of(self, line: Line) -> str | None:
        """The label of the episode of a verdict."""
        return self.by_key.get((line["ticket"], line["index"]), self.by_key.get(line["task"]))

    def check(self, lines: Sequence[Line]) -> None:
        """Raise ConfigError if a label of a task could be of several episodes."""
        for task, count in Counter(line["task"] for line in lines).items():
            if count > 1 and task in self.by_key:
                raise ConfigError(
                    f"{self.path}: the label of task {task} could be of {count} episodes; give ticket and index"
                )

    def without_episode(self, lines: Sequence[Line]) -> int:
        """The number of labels of no episode."""
        used = {key for line in lines for key in ((line["ticket"], line["index"]), line["task"])}
        return len(self.by_key.keys() - used)


def read_labels(name: str) -> Labels:
    """Read FILE, or FILE:AGENT for a column of a file with several agents. Raises ConfigError."""
    path, agent = Path(name), ""
    if not path.is_file() and ":" in name:
        path, agent = Path(name.rpartition(":")[0]), name.rpartition(":")[2]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--against={name} cannot be read: {error}") from error
    found: dict[LabelKey, str] = {}
    for place, key, label in _table(path, text, agent) if text.lstrip().startswith("[") else _lines(path, text, agent):
        if found.setdefault(key, label) != label:
            what = f"task {key}" if isinstance(key, str) else f"ticket {key[0]}, index {key[1]}"
            raise ConfigError(f"{place}: a second label for {what}")
    if not found:
        raise ConfigError(f"--against={name} has no labels")
    return Labels(path, found)


def _lines(path: Path, text: str, agent: str) -> list[tuple[str, LabelKey, str]]:
    if agent:
        raise ConfigError(f"--against={path}:{agent}: the file has no columns of agents; leave :{agent} out")
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        row = row if isinstance(row, dict) else {}
        pair = row.get("ticket"), row.get("index")
        key: Any = pair if pair != (None, None) else row.get("task_id")
        valid = isinstance(key, str) or (isinstance(key, tuple) and all(type(part) is int for part in key))
        label = _label(row.get("label"))
        if not valid or not key or label is None:
            raise ConfigError(f"{path}:{number}: expected {_EXPECTED}, found {line[:80]}")
        found.append((f"{path}:{number}", key, label))
    return found


def _table(path: Path, text: str, agent: str) -> list[tuple[str, LabelKey, str]]:
    try:
        rows = json.loads(text)
        columns = sorted({name for row in rows for name in row if name.endswith(_COLUMN_END)})
        keys = [row["task_id"] for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no list of rows with task_id and AGENT{_COLUMN_END}: {error!r}") from None
    agents = [name.removesuffix(_COLUMN_END) for name in columns]
    if agent not in agents and (agent or len(agents) != 1):
        chosen = f"{agent!r} is not one of" if agent else f"name one, as in --against={path}:AGENT, of"
        raise ConfigError(f"{path} has labels of several agents, or none: {chosen} {', '.join(agents) or 'no column'}")
    column = f"{agent or agents[0]}{_COLUMN_END}"
    found: list[tuple[str, LabelKey, str]] = []
    for number, (key, row) in enumerate(zip(keys, rows, strict=True)):
        if column not in row:
            continue
        label = _label(row[column])
        if not isinstance(key, str) or label not in _CODES.values():
            raise ConfigError(f"{path}[{number}]: expected a task_id of text, and {column} 0, 1 or 2")
        found.append((f"{path}[{number}]", key, str(label)))
    return found


def _label(value: Any) -> str | None:
    """The word of a label; None for none."""
    if type(value) is int or (isinstance(value, str) and value.isdecimal()):
        return _CODES.get(int(value))
    return value if isinstance(value, str) and value else None


# -- judges ---------------------------------------------------------------------------------------


def judge_scores(labels: Labels, lines: Sequence[Line], name: str, others: Sequence[Path]) -> list[dict[str, Any]]:
    """How well each judge agrees: the one of `lines`, called `name`, the models that voted, the outcomes that were
    stored, and the judges of other verdict files with the same episodes."""
    outcomes: dict[str, list[tuple[str, str]]] = {name: []}
    for line in lines:
        if (label := labels.of(line)) is None:
            continue
        outcomes[name].append((label, line["outcome"]))
        for vote in line.get("votes", ()):
            outcomes.setdefault(f"{name}: votes of {vote['model']}", []).append((label, vote["outcome"]))
    known = {_identity(line): label for line in lines if (label := labels.of(line)) is not None}
    for path in others:
        verdicts = (
            line for line in history.read(path) if isinstance(line, dict) and {*_IDENTITY, "outcome"} <= line.keys()
        )
        latest = {_identity(line): line["outcome"] for line in verdicts}
        outcomes[path.stem] = [(label, latest[key]) for key, label in known.items() if key in latest]
    outcomes["stored outcomes"] = [(label, line["stored"]) for line in lines if (label := labels.of(line)) is not None]
    return [{"judge": judge, **_scores(pairs)} for judge, pairs in outcomes.items() if pairs]


_IDENTITY = ("episode", "ticket", "index", "task", "worker", "finished_at")


def _identity(line: Line) -> tuple[Any, ...]:
    return tuple(line[key] for key in _IDENTITY)


def _scores(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Agreement, precision and recall of verdicts, each with its share, interval and number of episodes.

    `pairs`: label and verdict. agreement: equal, of the episodes that both call success or failure. precision: label
    success, of the verdicts success. recall: verdict success, of the labels success, masked ones included.
    """
    both = [label == verdict for label, verdict in pairs if {label, verdict} <= TRAINABLE_OUTCOMES]
    claimed = [label == SUCCESS for label, verdict in pairs if verdict == SUCCESS]
    true = [verdict == SUCCESS for label, verdict in pairs if label == SUCCESS]
    figures = zip(JUDGE_FIGURES, map(share_of, (both, claimed, true)), strict=True)
    return {"episodes": len(pairs), **dict(figures)}
