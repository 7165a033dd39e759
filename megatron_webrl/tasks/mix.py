"""Several task sources in one run, tasks.mix, and the task of a ticket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.types import Task, TaskReference
from megatron_webrl.util.text import close_matches


class TaskMix:
    """Sources that share the tickets by weight. Their tasks have the name of the source as `part`."""

    def __init__(self, sources: Mapping[str, TaskSource], weights: Sequence[float]) -> None:
        """`sources` by name; weights: [sources]."""
        self.sources, self._weights = sources, weights
        self._turns = [(name, turn) for name, each in sources.items() for turn in range(each.evaluation_tasks(1))]

    def training_task(self, seed: int, ticket: int, knowledge: SamplerKnowledge | None = None) -> Task:
        """As a source's. The tickets of each source are numbered for themselves."""
        number, own_ticket = share_tickets(self._weights, ticket)
        name = list(self.sources)[number]
        known = None if knowledge is None else knowledge.of_part(name)
        return replace(self.sources[name].training_task(seed, own_ticket, known), part=name)

    def held_out_task(self, index: int) -> Task:
        """The index-th evaluation task: the environments of all sources take turns, a task file is one of them."""
        turn, place = divmod(index, len(self._turns))
        name, environment = self._turns[place]
        own_turns = sum(other == name for other, _ in self._turns)
        return replace(self.sources[name].held_out_task(turn * own_turns + environment), part=name)

    def close(self) -> None:
        """Close all sources."""
        for source in self.sources.values():
            source.close()


def share_tickets(weights: Sequence[float], ticket: int) -> tuple[int, int]:
    """Which of several sources a ticket is of, and the number of tickets before it that are of the same one.

    weights: [sources], above 0. Of the first n tickets a source has n times its share of those that the sources before
    it leave, rounded down: at most one less than that for each source before it.
    """
    left = sum(map(Fraction, weights))
    for number, weight in enumerate(map(Fraction, weights)):
        share = weight / left
        before = int(ticket * share)
        if int((ticket + 1) * share) > before:
            return number, before
        ticket, left = ticket - before, left - weight
    raise AssertionError("the last source takes all that is left")


def referenced_task(source: TaskSource | TaskMix, reference: TaskReference) -> Task:
    """The task of a ticket. Raises ConfigError if the source makes another one than the trainer's."""
    if isinstance(source, TaskMix):
        if reference.part not in source.sources:
            hint = close_matches(reference.part, list(source.sources))
            raise ConfigError(f"tasks.mix has no {reference.part!r}, of which the trainer drew {reference.id!r}{hint}")
        source = source.sources[reference.part]
    task = source.make_task(reference.environment, reference.seed)
    if task.id != reference.id:
        raise ConfigError(
            f"make_task({reference.environment!r}, {reference.seed}) of tasks.source makes the task {task.id!r}, but "
            f"the trainer drew {reference.id!r}; use the same tasks on all nodes"
        )
    return replace(task, max_steps=reference.max_steps, part=reference.part)
