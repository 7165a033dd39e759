"""The rollouts of all workers of a job, and what changes of them. Pure: the caller passes answers and the time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from megatron_webrl.track.live_rollouts import CHANGING, FIXED, STATES

Row = list[Any]
_STATE, _SINCE = len(FIXED) + CHANGING.index("state"), len(FIXED) + CHANGING.index("since")


class RolloutTracker:
    """Rows by worker and key. Each has a number, which it keeps while it is there.

    The workers' clocks differ: `since` of a row becomes a time of the caller's clock when the row changes.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # by worker: what it has reported
        self._reported: dict[tuple[str, str], Row] = {}  # rows as reported
        self._rows: dict[tuple[str, str], Row] = {}  # the same with our time
        self._numbers: dict[tuple[str, str], int] = {}
        self._next = count()

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, worker: str, key: str) -> dict[str, Any] | None:
        """A rollout by the names of its fields."""
        row = self._rows.get((worker, key))
        named = None if row is None else dict(zip(FIXED + CHANGING, row, strict=True))
        return None if named is None else named | {"worker": worker, "state": STATES[named["state"]]}

    def counts(self) -> list[int]:
        """The number of rollouts in each of STATES."""
        found = Counter(row[_STATE] for row in self._rows.values())
        return [found[number] for number in range(len(STATES))]

    def whole(self) -> dict[str, Any]:
        """Everything, as changes to nothing."""
        return {"added": [self._added(name) for name in self._rows], "changed": [], "removed": []}

    def update(self, workers: Mapping[str, tuple[float, str]], now: float) -> dict[str, Any]:
        """Take in the age and the text of each worker's report (rollout_table.py); returns the changes.

        {"added": [[number, worker, *FIXED, *CHANGING]], "changed": [[number, *CHANGING]], "removed": [number]}.
        Raises ValueError for reports of another form.
        """
        added, changed, removed = [], [], []
        present: set[tuple[str, str]] = set()
        for worker, (age, text) in workers.items():
            if self._texts.get(worker) == text:
                present.update(name for name in self._rows if name[0] == worker)
                continue
            reported_at, rows = json.loads(text)
            ours = now - age - reported_at
            for row in rows:
                if len(row) != len(FIXED) + len(CHANGING):
                    raise ValueError(f"{worker} reports rollouts of {len(row)} fields")
                name = worker, row[0]
                present.add(name)
                if (known := self._reported.get(name)) == row:
                    continue
                if known is not None and known[: len(FIXED)] != row[: len(FIXED)]:  # another one of the same name
                    removed.append(self._numbers.pop(name))
                    known = None
                self._reported[name] = row
                self._rows[name] = [*row[:_SINCE], round(ours + row[_SINCE], 2), *row[_SINCE + 1 :]]
                if known is None:
                    self._numbers[name] = next(self._next)
                    added.append(self._added(name))
                else:
                    changed.append([self._numbers[name], *self._rows[name][len(FIXED) :]])
        self._texts = {worker: text for worker, (_, text) in workers.items()}
        removed += self._remove(self._rows.keys() - present)
        return {"added": added, "changed": changed, "removed": removed}

    def _added(self, name: tuple[str, str]) -> Row:
        return [self._numbers[name], name[0], *self._rows[name]]

    def _remove(self, names: Iterable[tuple[str, str]]) -> list[int]:
        numbers = []
        for name in list(names):
            del self._reported[name], self._rows[name]
            numbers.append(self._numbers.pop(name))
        return numbers
