"""Compare verdicts with other outcomes of the same episodes: those stored with them, or labels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.types import TRAINABLE_OUTCOMES

SUCCESS, FAILURE = "success", "failure"
EpisodeKey = tuple[int, int]  # ticket, index


@dataclass(frozen=True)
class Agreement:
    """Verdicts against references, such as labels. Rates are None where nothing is counted."""

    counts: Mapping[tuple[str, str], int]  # reference, verdict

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> Agreement:
        """`pairs`: reference and verdict of each episode."""
        return cls(dict(Counter(pairs)))

    @property
    def episodes(self) -> int:
        return sum(self.counts.values())

    @property
    def masked(self) -> int:
        """Episodes whose verdict is neither success nor failure."""
        return self._sum(lambda reference, verdict: verdict not in TRAINABLE_OUTCOMES)

    @property
    def accuracy(self) -> float | None:
        """Share of equal outcomes among the episodes where both are success or failure."""
        decided = self._sum(lambda r, v: r in TRAINABLE_OUTCOMES and v in TRAINABLE_OUTCOMES)
        return _share(self._sum(lambda r, v: r == v and r in TRAINABLE_OUTCOMES), decided)

    @property
    def false_success_rate(self) -> float | None:
        """Share of verdict success among the episodes whose reference is anything else."""
        wrong = self._sum(lambda r, v: r != SUCCESS and v == SUCCESS)
        return _share(wrong, self._sum(lambda r, v: r != SUCCESS))

    @property
    def false_failure_rate(self) -> float | None:
        """Share of verdict failure among the episodes whose reference is success."""
        return _share(self.counts.get((SUCCESS, FAILURE), 0), self._sum(lambda r, v: r == SUCCESS))

    def figures(self) -> dict[str, Any]:
        """All figures, for JSON."""
        rows: dict[str, dict[str, int]] = {}
        for (reference, verdict), count in sorted(self.counts.items()):
            rows.setdefault(reference, {})[verdict] = count
        return {
            "episodes": self.episodes, "masked": self.masked, "accuracy": self.accuracy,
            "false_success_rate": self.false_success_rate, "false_failure_rate": self.false_failure_rate,
            "confusion": rows,
        }  # fmt: skip

    def table(self, title: str) -> Table:
        """The confusion table: a row for each reference, a column for each verdict."""
        verdicts = _ordered({verdict for _, verdict in self.counts})
        table = Table(title=title, title_justify="left")
        table.add_column(title.split()[0].lower())
        for verdict in verdicts:
            table.add_column(f"judged\n{verdict}", justify="right")
        for reference in _ordered({reference for reference, _ in self.counts}):
            table.add_row(reference, *(str(self.counts.get((reference, verdict), 0)) for verdict in verdicts))
        return table

    def _sum(self, holds: Any) -> int:
        return sum(count for pair, count in self.counts.items() if holds(*pair))


def read_labels(path: Path) -> dict[EpisodeKey, str]:
    """Labels of a JSONL file, {"ticket": 3, "index": 0, "label": "success"} a line. Raises ConfigError."""
    labels: dict[EpisodeKey, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--labels={path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            ticket, index, label = found["ticket"], found["index"], found["label"]
        except (ValueError, KeyError, TypeError):
            ticket = index = label = None
        if type(ticket) is not int or type(index) is not int or not isinstance(label, str) or not label:
            raise ConfigError(
                f'{path}:{number}: expected {{"ticket": 3, "index": 0, "label": "success"}}, found {line[:80]}'
            )
        if labels.setdefault((ticket, index), label) != label:
            raise ConfigError(f"{path}:{number}: a second label for ticket {ticket}, index {index}")
    if not labels:
        raise ConfigError(f"--labels={path} has no labels")
    return labels


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ordered(names: set[str]) -> Sequence[str]:
    return sorted(names, key=lambda name: (name != SUCCESS, name != FAILURE, name))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
