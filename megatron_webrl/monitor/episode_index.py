"""Index over the stored episodes of a run: filter, sort, page and count them without reading an episode.

An Arrow table in memory, filled from the index files of the workers (track/episodes.py) and from
episodes.jsonl, which says what became of a training episode. It takes about 1 KiB an episode.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megatron_webrl.track import episodes
from megatron_webrl.track.episodes import FOLDER, INDEX_FILE, TRAINING
from megatron_webrl.util.history import Tail

MAX_PAGE = 500  # rows of one answer
MAX_FACET_VALUES = 200  # of a field, the most frequent ones
_BATCH = 2000  # lines in memory at once
_MAX_CHUNKS = 64  # of the table; more are copied into one

_TEXT, _WHOLE, _NUMBER = pa.string(), pa.int64(), pa.float64()
SCHEMA = pa.schema(
    {
        "ticket": _WHOLE, "index": _WHOLE, "worker": _TEXT, "finished_at": _NUMBER, "kind": _TEXT, "task": _TEXT,
        "source": _TEXT, "site": _TEXT, "difficulty": _TEXT, "instruction": _TEXT, "outcome": _TEXT,
        "end_reason": _TEXT, "reason": _TEXT, "reward": _NUMBER, "steps": _WHOLE, "response_tokens": _WHOLE,
        "format_errors": _WHOLE, "oldest_version": _WHOLE, "newest_version": _WHOLE, "seconds": _NUMBER,
        "tries": _WHOLE, "folder": _TEXT, "file": _TEXT, "position": _WHOLE, "words": _TEXT,
    }
)  # fmt: skip
FACETS = ("kind", "outcome", "disposition", "end_reason", "difficulty", "site", "worker", "source")
"""Fields of few values, by which people filter."""
RANGES = ("newest_version", "reward", "steps", "response_tokens", "seconds", "ticket", "format_errors", "tries")
"""Fields of numbers, filtered by limits."""
SORTABLE = (*RANGES, "finished_at", "site", "task", "outcome")
WAITING = "waiting"  # disposition of a training episode that is neither trained nor dropped so far
ROLLED_BACK = "rolled back"


@dataclass(frozen=True)
class EpisodeQuery:
    """Which episodes, in which order."""

    equal: Mapping[str, Sequence[str]] = field(default_factory=dict)  # allowed values by field of FACETS or `task`
    at_least: Mapping[str, float] = field(default_factory=dict)  # by field of RANGES
    at_most: Mapping[str, float] = field(default_factory=dict)
    text: str = ""  # words; each must be in the instruction, task, site or reason
    sort: str = "finished_at"  # one of SORTABLE
    descending: bool = True


@dataclass(frozen=True)
class SearchResult:
    """A page of rows, the number of all that match, and by field of FACETS its values with their numbers of episodes,
    under the filters of the other fields.
    """

    rows: list[dict[str, Any]]
    total: int
    facets: dict[str, list[tuple[str, int]]]


class EpisodeIndex:
    """May be used by several threads: a query sees the table as of the last refresh."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self._lock = threading.Lock()  # of refresh
        self._rows = SCHEMA.empty_table()
        self.table = self._rows.append_column("disposition", pa.array([], _TEXT))
        self._dispositions: list[str] = []  # by row
        self._numbers: dict[episodes.EpisodeIdentity, int] = {}  # row of each training episode
        self._tails: dict[Path, Tail] = {}
        self._closed = Tail(run_folder / episodes.FILE)
        self._rolled_back = Tail(run_folder / episodes.ROLLED_BACK_FILE)
        self._unknown: dict[episodes.EpisodeIdentity, str] = {}  # dispositions of episodes that have no row so far

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def refresh(self) -> None:
        """Take in what the files have gained."""
        with self._lock:
            for path in sorted((self.run_folder / FOLDER).glob(f"*/{INDEX_FILE}")):
                tail = self._tails.setdefault(path, Tail(path))
                while lines := tail.poll(_BATCH):
                    self._add([row for line in lines if (row := _row(path.parent.name, line)) is not None])
            for tail, fixed in ((self._closed, None), (self._rolled_back, ROLLED_BACK)):
                while lines := tail.poll(_BATCH):
                    for line in lines:
                        self._unknown[episodes.line_identity(line)] = fixed or sys.intern(line["disposition"])
                    self._set_dispositions()
            self._set_dispositions()
            if self._rows.column(0).num_chunks > _MAX_CHUNKS:
                self._rows = self._rows.combine_chunks()
            self.table = self._rows.append_column("disposition", pa.array(self._dispositions, _TEXT))

    def _add(self, rows: list[dict[str, Any]]) -> None:
        for number, row in enumerate(rows, len(self._dispositions)):
            if row["kind"] == TRAINING:
                self._numbers[episodes.line_identity(row)] = number
            self._dispositions.append(WAITING if row["kind"] == TRAINING else "")
        self._rows = pa.concat_tables([self._rows, pa.Table.from_pylist(rows, SCHEMA)])

    def _set_dispositions(self) -> None:
        for identity in [each for each in self._unknown if each in self._numbers]:
            self._dispositions[self._numbers[identity]] = self._unknown.pop(identity)

    def search(self, query: EpisodeQuery, offset: int = 0, limit: int = 50) -> SearchResult:
        """Rows of the episodes from number `offset` on, how many there are in all, and the values to filter by."""
        table = self.table
        matches = _matches(table, query)
        order = "descending" if query.descending else "ascending"
        chosen = table.select([query.sort]).take(matches).append_column("number", matches)
        numbers = chosen.sort_by([(query.sort, order), ("number", order)])["number"]
        values: dict[str, list[tuple[str, int]]] = {}
        for name in FACETS:  # under the filters of the other fields
            found = _matches(table, query, without=name) if name in query.equal else matches
            counts = [(each["values"], each["counts"]) for each in pc.value_counts(table[name].take(found)).to_pylist()]
            present = sorted((each for each in counts if each[0]), key=lambda each: (-each[1], each[0]))
            values[name] = present[:MAX_FACET_VALUES]
        return SearchResult(_named(table, numbers.slice(offset, min(limit, MAX_PAGE))), len(matches), values)

    def get(self, number: int) -> dict[str, Any] | None:
        """The row of an episode; None without one."""
        table = self.table
        return _named(table, [number])[0] if 0 <= number < table.num_rows else None

    def group_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of the episodes that were stored with this one: its group, itself included, by index."""
        return self._equal(row, "folder", "file")

    def of_task(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of the first episodes of the same task, MAX_PAGE at most, oldest first."""
        return sorted(self._equal(row, "task"), key=lambda each: float(each["finished_at"]))

    def _equal(self, row: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
        table = self.table
        mask = reduce(pc.and_, [pc.equal(table[name], row[name]) for name in names])
        return _named(table, pc.indices_nonzero(mask)[:MAX_PAGE])


def _matches(table: pa.Table, query: EpisodeQuery, without: str = "") -> Any:
    """Numbers of the rows that pass the filters; `without`: a field whose own filter is left out."""
    limits = {pc.greater_equal: query.at_least, pc.less_equal: query.at_most}
    equal = query.equal.items()
    terms = [pc.is_in(table[name], pa.array(list(each), _TEXT)) for name, each in equal if name != without]
    terms += [test(table[name], limit) for test, each in limits.items() for name, limit in each.items()]
    everything = pa.array(np.arange(table.num_rows, dtype=np.uint64))
    numbers = pc.indices_nonzero(reduce(pc.and_, terms)) if terms else everything
    for word in sorted(query.text.casefold().split(), key=len, reverse=True):  # long words are in few rows
        numbers = numbers.filter(pc.match_substring(table["words"].take(numbers), word).combine_chunks())
    return numbers


def _row(folder: str, line: Any) -> dict[str, Any] | None:
    """The columns of an index line; None for one of another form."""
    try:
        words = " ".join(str(line[name]) for name in ("instruction", "task", "site", "reason", "end_reason"))
        row = line | {"folder": folder, "words": words.casefold()}
        return {name: row[name] for name in SCHEMA.names}
    except (KeyError, TypeError):
        return None


def _named(table: pa.Table, numbers: Any) -> list[dict[str, Any]]:
    """Rows as dictionaries, with their numbers as `id`."""
    rows: list[dict[str, Any]] = table.take(numbers).drop_columns(["words"]).to_pylist()
    values = numbers if isinstance(numbers, list) else numbers.to_pylist()
    return [{"id": number, **row} for number, row in zip(values, rows, strict=True)]
