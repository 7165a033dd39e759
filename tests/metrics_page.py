"""The metrics that docs/metrics.md describes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def documented_metrics() -> dict[str, list[str]]:
    """The names in the tables, by the module (path within the package) that the text above a table names."""
    names: dict[str, list[str]] = {}
    module = ""
    for line in PAGE.read_text().splitlines():
        if found := re.match(r"`([\w/]+\.py)`\.", line):
            module = found[1]
        elif found := re.match(r"\| `([^`]+)` \|", line):
            names.setdefault(module, []).append(found[1])
    return names


def matches(documented: str, name: str) -> bool:
    """Whether `name` is the documented metric, or one of the family, whose `<...>` stands for a label."""
    parts = map(re.escape, re.split(r"<[a-z_]+>", documented))
    return re.fullmatch("[^/]+".join(parts), name) is not None


def undocumented(names: Iterable[str]) -> list[str]:
    """The names that the page does not describe, or describes twice, sorted."""
    all_documented = [name for each in documented_metrics().values() for name in each]
    return sorted(name for name in names if sum(matches(each, name) for each in all_documented) != 1)
