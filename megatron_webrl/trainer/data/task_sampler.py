"""The task sampler: draws the task of each ticket that the trainer issues, and learns from the groups."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.config.tasks import PageTasksConfig, TasksConfig, task_parts
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.tasks.files.table import FileDigest, difference_from_checkpoint
from megatron_webrl.tasks.mix import TaskMix
from megatron_webrl.tasks.sampler.knowledge import (
    SamplerKnowledge,
    draws_environments,
    unit_kind,
    unit_of,
)
from megatron_webrl.tasks.sampler.row_sampler import INITIAL_PASS_RATE
from megatron_webrl.tasks.sampler.samplers import initial_pass_rate
from megatron_webrl.tasks.sampler.step_limits import growing_limit
from megatron_webrl.tasks.source import LocalTaskSource, TaskSource
from megatron_webrl.types import BLOCKED, DIFFICULTIES, Group, TaskReference
from megatron_webrl.util import history

log = logging.getLogger(__name__)

BLOCK_LIST_FILE = "blocklist.jsonl"


class TaskSampler:
    """Draws tasks by what is known when their tickets are issued. Used on the first trainer rank only.

    Life cycle: `draw` for tickets that are issued; `block_list.record_group` for every complete group, and
    `record_group` for every closed one.
    Invariant: `tasks` has the task of every ticket that was drawn and is not closed, so an open ticket keeps its task,
    from a checkpoint, too. A ticket counts once, when it is closed.
    """

    def __init__(
        self,
        config: Config,
        source: TaskSource | TaskMix,
        saved: Mapping[str, Any] | None,
        version: int,
        files: Mapping[str, FileDigest] | None = None,
    ) -> None:
        """`saved`: an earlier `state_dict`; `version`: of the policy; `files`: digests of the task files by setting.

        Raises JobFailed if `saved` is of another training file.
        """
        tasks, saved, self.files = config.tasks, saved or {}, dict(files or {})
        if difference := difference_from_checkpoint(saved, self.files):
            raise JobFailed(difference)
        self._source, self._seed, self.parts = source, config.run.seed, task_parts(tasks)
        before = {name: tuple(kinds) for name, kinds in saved.get("parts", {}).items()}
        references = {ticket: TaskReference(*task) for ticket, task in saved.get("tasks", ())}
        self._kinds = {name: (part.source, unit_kind(part)) for name, part in self.parts.items()}
        same_source = {name for name, kinds in before.items() if kinds[0] == self._kinds.get(name, ("", ""))[0]}
        self.tasks = {ticket: task for ticket, task in references.items() if task.part in same_source}
        self.knowledge = SamplerKnowledge.from_state_dict(saved.get("knowledge", {}), version)
        for name, kinds in self._kinds.items():
            if before.get(name) != kinds:
                self.knowledge.of_part(name).passes.clear()  # of other units
        self.closed_tickets = Counter(saved.get("closed_tickets", {}))  # by environment
        self.block_list = BlockList(self.knowledge.blocked, config.run_folder / BLOCK_LIST_FILE)
        self.block_list.restore()

    def draw(self, tickets: Iterable[int], version: int) -> dict[int, TaskReference]:
        """The tasks of tickets that are issued at a policy version; those of tickets drawn before stay as they are."""
        self.block_list.remove_expired()
        self.knowledge.version = version
        drawn = {}
        for ticket in tickets:
            if ticket not in self.tasks:
                task = self._source.training_task(self._seed, ticket, self.knowledge)
                self.tasks[ticket] = TaskReference.of(task)
            drawn[ticket] = self.tasks[ticket]
        return drawn

    def record_group(self, group: Group) -> None:
        """Learn from a trained or dropped group.

        One of several tasks says nothing of any of them, and one that is not complete is biased.
        """
        self.tasks.pop(group.ticket, None)
        task = group.trajectories[0].task
        part = self.parts.get(task.part)
        if part is None:
            return  # the setting changed since its ticket was issued
        if isinstance(part, PageTasksConfig) and task.environment in part.environments:
            self.closed_tickets[task.environment] += 1
        counts = part.sampler.adapts and group.has_one_task and group.is_complete
        if passed := [t.outcome == "success" for t in group.trajectories if t.trainable and counts]:
            unit, known = unit_of(task, self._kinds[task.part][1]), self.knowledge.of_part(task.part)
            known.learn(unit, sum(passed) / len(passed), _initial(part))

    def pass_rate(self, unit: str, part: str = "") -> float:
        """The latest estimate of the pass rate of a unit, of a source by its name in tasks.mix."""
        return self.knowledge.of_part(part).pass_rates([unit], _initial(self.parts[part]))[0]

    def metrics(self) -> dict[str, float]:
        """Metrics of an update by MLflow name, with the step limit of the latest tickets."""
        metrics: dict[str, float] = {}
        if not all(map(draws_environments, self.parts.values())):
            metrics |= self.block_list.pop_metrics()
        for name, part in self.parts.items():
            metrics |= self._draw_metrics(name, part)
            limit = growing_limit(part.growing_steps, self.knowledge.version)
            if limit is not None:
                metrics[f"sampler/step_limit{_below(name)}"] = float(limit)
        return metrics

    def _draw_metrics(self, name: str, part: TasksConfig) -> dict[str, float]:
        """Metrics of each environment, or of the difficulties of a task file, of a source that adapts."""
        if not part.sampler.adapts:
            return {}
        if not isinstance(part, PageTasksConfig):
            units: Sequence[str] = DIFFICULTIES if part.sampler.per == "difficulty" else ()
            return {f"sampler/pass_rate{_below(name)}/{unit}": self.pass_rate(unit, name) for unit in units}
        metrics = {}
        source = self._source.sources[name] if isinstance(self._source, TaskMix) else self._source
        assert isinstance(source, LocalTaskSource)
        probabilities = source.probabilities(self.knowledge.of_part(name))
        for environment, probability in zip(part.environments, probabilities, strict=True):
            metrics[f"sampler/probability/{environment}"] = probability
            metrics[f"sampler/pass_rate/{environment}"] = self.pass_rate(environment, name)
            metrics[f"sampler/closed_tickets/{environment}"] = float(self.closed_tickets[environment])
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores: the tasks of open tickets and the knowledge."""
        return {
            "parts": self._kinds,
            "files": self.files,
            "tasks": sorted(self.tasks.items()),
            "knowledge": self.knowledge.state_dict(),
            "closed_tickets": dict(self.closed_tickets),
        }

    def close(self) -> None:
        self._source.close()


def _below(name: str) -> str:
    """What follows the name of a metric for a source of tasks.mix."""
    return f"/{name}" if name else ""


def _initial(part: TasksConfig) -> float:
    """The estimate of a unit's pass rate before its first group."""
    return initial_pass_rate(part.sampler) if draws_environments(part) else INITIAL_PASS_RATE


BLOCK_HOURS = 12.0  # a website that refused the agent rarely admits it sooner


class BlockList:
    """Websites that blocked the agent: training draws none of their tasks for BLOCK_HOURS.

    A website is blocked by the first group with a blocked episode; later groups do not prolong it. Wall-clock time
    counts, so that a block also expires while no job runs.
    """

    def __init__(self, blocked: dict[str, float], path: Path, clock: Callable[[], float] = time.time) -> None:
        """`blocked`: the end of each block by website, which this object changes. `path`: for a line of each event."""
        self._blocked, self._path, self._clock = blocked, path, clock
        self._added = 0

    def record_group(self, group: Group) -> None:
        """Block the website of a complete group, trained or dropped, if it blocked any of its episodes."""
        website = next((each.task.website for each in group.trajectories if each.outcome == BLOCKED), "")
        if website and website not in self._blocked:
            until = self._blocked[website] = self._clock() + 3600 * BLOCK_HOURS
            self._added += 1
            self._write(website, "blocked", until=round(until, 3), ticket=group.ticket)

    def restore(self) -> None:
        """Block the websites that the file has as blocked: training may resume from before these events."""
        latest: dict[str, dict[str, Any]] = {}
        for event in history.read(self._path):
            latest[event["website"]] = event
        for website, event in latest.items():
            if event["event"] == "blocked" and event["until"] > self._clock():
                self._blocked.setdefault(website, event["until"])

    def remove_expired(self) -> None:
        """Unblock the websites whose time is over."""
        for website, until in list(self._blocked.items()):
            if until <= self._clock():
                del self._blocked[website]
                self._write(website, "unblocked", until=round(until, 3), ticket=None)

    def pop_metrics(self) -> dict[str, float]:
        """Websites blocked at present, and those added since the last call."""
        added, self._added = self._added, 0
        return {"blocked_websites": float(len(self._blocked)), "block_list/added": float(added)}

    def _write(self, website: str, event: str, **fields: Any) -> None:
        line = {"time": round(self._clock(), 3), "website": website, "event": event, **fields}
        try:
            history.append_shared(self._path, [json.dumps(line).encode() + b"\n"])
        except OSError as error:  # the block holds in this job, and in its checkpoints
            log.warning("%s cannot be written: %s; it lacks %s, %s", self._path, error, website, event)
