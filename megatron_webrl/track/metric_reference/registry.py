"""All metrics, and the search for the definition of a name."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_webrl.track.metric_reference import batch, learner, rollout, system
from megatron_webrl.track.metric_reference.definition import MetricDefinition

SECTIONS = (*batch.SECTIONS, *learner.SECTIONS, *rollout.SECTIONS, *system.SECTIONS)


def definitions_of(name: str) -> list[MetricDefinition]:
    """The definitions that match a metric's name: one, or none if the metric is not documented."""
    return [metric for section in SECTIONS for metric in section.metrics if metric.matches(name)]


def undefined(names: Iterable[str]) -> list[str]:
    """The names without exactly one definition, sorted."""
    return sorted(name for name in names if len(definitions_of(name)) != 1)
