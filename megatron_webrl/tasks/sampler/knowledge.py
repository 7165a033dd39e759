"""What samplers have learned: a log of pass rates and blocked websites, and views of its prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from megatron_webrl.tasks.sampler.compact_map import CompactMap

PASS, BLOCK = "pass", "block"

Value = TypeVar("Value")


class PassRate(NamedTuple):
    """Estimated pass rate of a unit after a number of groups."""

    rate: float
    groups: int


class Entry(NamedTuple):
    """The value of a name from a position of the log on; None removes it."""

    position: int
    kind: str  # PASS: value [rate, groups] of a unit; BLOCK: expiry (unix time, seconds) of a blocked website
    name: str
    value: Any


_PASS_RATE = np.dtype([("rate", np.float64), ("groups", np.int32)])


class _Versions(Generic[Value]):
    """Values by name, as of every position of the log from its base on."""

    def __init__(self, folded: CompactMap[Value]) -> None:
        self.folded = folded
        self.changes: dict[str, list[tuple[int, Value | None]]] = {}

    def get(self, name: str, learned: int) -> Value | None:
        """The value after all entries with positions below `learned`; None without one."""
        for position, value in reversed(self.changes.get(name, ())):
            if position < learned:
                return value
        return self.folded.get(name)

    def set(self, position: int, name: str, value: Value | None) -> None:
        self.changes.setdefault(name, []).append((position, value))

    def all(self, learned: int) -> dict[str, Value]:
        """All values as of `learned`."""
        return dict(self.compact(learned).items())

    def compact(self, learned: int) -> CompactMap[Value]:
        """All values as of `learned`, in arrays."""
        return self.folded.updated({name: self.get(name, learned) for name in self.changes})

    def fold(self, base: int) -> None:
        """Forget all values but the latest as of `base`."""
        changes, self.changes = self.changes, {}
        latest: dict[str, Value | None] = {}
        for name, versions in changes.items():
            for position, value in versions:
                if position >= base:
                    self.set(position, name, value)
                else:
                    latest[name] = value
        self.folded = self.folded.updated(latest)


class SamplerLog:
    """An append-only log whose old prefix is folded into a base.

    Positions grow along the whole run; `learned` names the prefix of all entries with positions below it. A view `at`
    stays as it is while the log grows, until `fold` passes it. Invariant: base <= end; all entries kept lie between.
    """

    def __init__(self, base: int = 0) -> None:
        self.base = self.end = base
        self.entries: list[Entry] = []  # positions from `base` on, in order
        self.passes: _Versions[PassRate] = _Versions(CompactMap(_PASS_RATE, PassRate._make))
        self.blocks: _Versions[float] = _Versions(CompactMap(np.dtype(np.float64), float))

    def append(self, kind: str, name: str, value: Any) -> None:
        """Add an entry at the end."""
        self.add(Entry(self.end, kind, name, value))

    def add(self, entry: Entry) -> None:
        """Add an entry; positions may leave gaps. Raises ValueError for a position below the end."""
        if entry.position < self.end:
            raise ValueError(f"entry at {entry.position} of a sampler log that ends at {self.end}")
        self.entries.append(entry)
        self.end = entry.position + 1
        if entry.kind == PASS:
            self.passes.set(entry.position, entry.name, None if entry.value is None else PassRate(*entry.value))
        else:
            self.blocks.set(entry.position, entry.name, entry.value)

    def at(self, learned: int, version: int = 0) -> SamplerKnowledge:
        """The knowledge of the prefix `learned`. Raises ValueError if it lies outside base..end."""
        if not self.base <= learned <= self.end:
            raise ValueError(f"a sampler log of positions {self.base}..{self.end} does not know the prefix {learned}")
        return SamplerKnowledge(self, learned, version)

    def fold(self, base: int) -> None:
        """Forget the prefixes below `base`, which is at most the end."""
        if base > self.base:
            self.base = base
            self.entries = [entry for entry in self.entries if entry.position >= base]
            self.passes.fold(base)
            self.blocks.fold(base)

    def folded_entries(self) -> list[Entry]:
        """The base as entries, one for each name."""
        passes = [Entry(self.base, PASS, name, list(value)) for name, value in self.passes.folded.items()]
        return passes + [Entry(self.base, BLOCK, name, until) for name, until in self.blocks.folded.items()]

    def add_folded(self, entries: Iterable[Entry]) -> None:
        """Add entries of `folded_entries` to the base of a log that has none above it."""
        passes, blocks = {}, {}
        for entry in entries:
            if entry.kind == PASS:
                passes[entry.name] = PassRate(*entry.value)
            else:
                blocks[entry.name] = entry.value
        self.passes.folded = self.passes.folded.updated(passes)
        self.blocks.folded = self.blocks.folded.updated(blocks)

    def forget_passes(self) -> None:
        """Fold everything and forget all pass rates."""
        self.fold(self.end)
        self.passes = _Versions(CompactMap(_PASS_RATE, PassRate._make))

    def to_json(self) -> dict[str, Any]:
        """The log as JSON values; `from_json` reads it."""
        return {
            "base": self.base,
            "end": self.end,
            "folded": [list(entry) for entry in self.folded_entries()],
            "entries": [list(entry) for entry in self.entries],
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        log = cls(fields["base"])
        log.add_folded(Entry(*entry) for entry in fields["folded"])
        for entry in fields["entries"]:
            log.add(Entry(*entry))
        log.end = fields["end"]
        return log


@dataclass(frozen=True, eq=False)
class SamplerKnowledge:
    """What is known at the admission of a ticket: the prefix `learned` of a log, and the policy version."""

    log: SamplerLog
    learned: int = 0
    version: int = 0  # of the policy when the ticket was admitted

    def pass_rate(self, unit: str) -> float | None:
        """The estimated pass rate of a unit; None before its first group."""
        known = self.log.passes.get(unit, self.learned)
        return None if known is None else known.rate

    def groups(self, unit: str) -> int:
        """Number of groups that the estimate of a unit is made of."""
        known = self.log.passes.get(unit, self.learned)
        return 0 if known is None else known.groups

    def pass_rates(self, units: Sequence[str], initial: float, trusted_groups: int = 1) -> list[float]:
        """The estimate of each unit, [units]; `initial` for one of fewer than `trusted_groups` groups."""
        known = [self.log.passes.get(unit, self.learned) for unit in units]
        return [initial if each is None or each.groups < trusted_groups else each.rate for each in known]

    def trusted_pass_rates(self, trusted_groups: int) -> tuple[np.ndarray, np.ndarray]:
        """All units with at least that many groups, bytes [units], and their estimates, float64 [units]."""
        known = self.log.passes.compact(self.learned)
        trusted = known.values["groups"] >= trusted_groups
        return known.names[trusted], known.values["rate"][trusted]

    @cached_property
    def blocked(self) -> frozenset[str]:
        """Websites (hosts) of which training draws no task."""
        return frozenset(self.log.blocks.all(self.learned))


NOTHING_KNOWN = SamplerKnowledge(SamplerLog())
"""Knowledge before the first entry of a log, at version 0."""
