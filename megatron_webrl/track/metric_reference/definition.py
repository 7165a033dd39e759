"""The definition of a metric, or of a family of metrics whose names have a variable part."""

from __future__ import annotations

import re
from dataclasses import dataclass

_VARIABLE = re.compile(r"<[a-z_]+>")


@dataclass(frozen=True)
class MetricDefinition:
    """A metric by its MLflow name; `<...>` in the name stands for a label, such as an environment."""

    name: str
    unit: str  # "share" is 0..1
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric, or one of the family."""
        parts = map(re.escape, _VARIABLE.split(self.name))
        return re.fullmatch("[^/]+".join(parts), name) is not None


@dataclass(frozen=True)
class MetricSection:
    """Metrics that one module computes over the same data."""

    title: str
    module: str  # path within the package
    scope: str  # over what the metrics are taken: full sentences
    metrics: tuple[MetricDefinition, ...]


def section(title: str, module: str, scope: str, *metrics: tuple[str, str, str]) -> MetricSection:
    """A section from (name, unit, meaning) of its metrics."""
    return MetricSection(title, module, scope, tuple(MetricDefinition(*metric) for metric in metrics))
