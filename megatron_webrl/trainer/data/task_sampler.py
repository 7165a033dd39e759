"""Task sampling in the trainer: what groups teach the sampler log, and the sampler states of tickets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.tasks.sampler.knowledge import BLOCK, PASS, PassRate, SamplerLog
from megatron_webrl.tasks.sampler.row_sampler import INITIAL_PASS_RATE
from megatron_webrl.tasks.sampler.samplers import (
    ADAPTIVE_SAMPLERS,
    environment_probabilities,
    initial_pass_rate,
    updated_pass_rate,
)
from megatron_webrl.tasks.sampler.states import SamplerPublisher, SamplerState, read_published
from megatron_webrl.tasks.sampler.step_limits import growing_limit
from megatron_webrl.tasks.sampler.task_files import FileDigest, difference_from_checkpoint
from megatron_webrl.tasks.sampler.units import draws_environments, unit_kind, unit_of
from megatron_webrl.trainer.data.block_list import FILE as BLOCK_LIST_FILE
from megatron_webrl.trainer.data.block_list import BlockList
from megatron_webrl.trainer.data.draw_statistics import DrawStatistics
from megatron_webrl.types import DIFFICULTIES, Group, Task

FOLD_ENTRIES = 1024  # the base takes in at least as many entries at a time


class TaskSampler:
    """The sampler log of a run, the states that name its prefixes, and statistics of what was drawn.

    Life cycle: `publish_initial_states` before the first ticket is issued; `block_list.record_group` for every complete
    group and `record_group` for every closed one. Before the ticket limit rises, `publish_adapted_state` learns from
    the groups closed since, in ticket order, and publishes a state for the tickets above the old limit; those below it
    have been admitted and keep their state.
    Invariants: a ticket counts once, when it is closed, so a checkpoint's statistics cover exactly its closed tickets.
    `states` covers all unclosed tickets and holds no older state; the log knows the prefixes of all of them.
    """

    def __init__(
        self,
        tasks: TasksConfig,
        fresh: int,
        open_tickets: Collection[int],
        saved: Mapping[str, Any] | None,
        run_folder: Path,
        version: int = 0,
        files: Mapping[str, FileDigest] | None = None,
    ) -> None:
        """`fresh`: first unclaimed ticket; `open_tickets`: unclosed ones below; `saved`: an earlier `state_dict`;
        `version`: of the policy; `files`: task files by setting. Raises JobFailed if `saved` is of another file.
        """
        if difference := difference_from_checkpoint(saved, files or {}):
            raise JobFailed(difference)
        self._files = dict(files or {})
        self.settings, self.environments = tasks.sampler, tuple(tasks.environments)
        self._growing_steps = tasks.growing_steps
        self._by_environment, self._unit_kind = draws_environments(tasks), unit_kind(tasks)
        self._initial = initial_pass_rate(self.settings) if self._by_environment else INITIAL_PASS_RATE
        saved = saved or {}
        self.log, self.states = _restored(saved, self._unit_kind, version)
        self.closed_tickets = Counter(saved.get("closed_tickets", {}))  # by environment
        self._draws = DrawStatistics(saved.get("draws", {}))
        self.block_list = BlockList(self.log, tasks.block_hours, run_folder / BLOCK_LIST_FILE)
        self._fresh = fresh
        self._oldest_open = min(open_tickets, default=fresh)
        self._closed = set(range(self._oldest_open, fresh)).difference(open_tickets)  # closed tickets above it
        self._recorded: dict[int, tuple[Task, float | None]] = {}  # ticket -> task, pass rate of its group
        self._publisher: SamplerPublisher | None = None

    @property
    def adapts(self) -> bool:
        """Whether draws follow the pass rates."""
        return self.settings.name in ADAPTIVE_SAMPLERS

    def publish_initial_states(self, control: ControlClient) -> None:
        """Publish the first states; tickets claimed under an earlier trainer process keep those that it published."""
        published = read_published(control)
        if published is not None:
            log, states = published
            kept = [state for state in self.states if state.first_ticket < states[0].first_ticket]
            kept += [each for each in states if each.first_ticket < self._fresh and each.learned >= self.log.base]
            self.states = kept + [state for state in self.states if state.first_ticket >= self._fresh] or self.states
            _continue_log(self.log, log)
        self.block_list.restore()  # at the end of the log: for later states only
        self._publisher = SamplerPublisher(control, self._files)
        self._publisher.publish(self.log, self.states)

    def record_group(self, group: Group) -> None:
        """Record the pass rate of a trained or dropped group.

        One of several tasks says nothing of any of them, and one that is not complete is biased.
        """
        counts = group.has_one_task and group.is_complete
        passed = [t.outcome == "success" for t in group.trajectories if t.trainable and counts]
        self._recorded[group.ticket] = group.trajectories[0].task, sum(passed) / len(passed) if passed else None

    def publish_adapted_state(self, limit: int, version: int) -> None:
        """Learn from recorded groups and publish the state of tickets from `limit` on, before they can be claimed."""
        assert self._publisher is not None, "publish_initial_states comes first"
        self._learn()
        self.block_list.remove_expired()
        first = max(limit, self._fresh)  # tickets below `fresh` were claimed, whatever the limit
        states = [state for state in self.states if state.first_ticket < first]
        latest = SamplerState(first, self.log.end, version)
        if not states or (states[-1].learned, states[-1].version) != (latest.learned, latest.version):
            states.append(latest)
        while len(states) > 1 and states[1].first_ticket <= self._oldest_open:
            del states[0]
        self.states = states
        base = min(state.learned for state in states)
        if base - self.log.base >= FOLD_ENTRIES:
            self.log.fold(base)
        self._publisher.publish(self.log, states)

    def pass_rate(self, unit: str) -> float:
        """The latest estimate of a unit's pass rate."""
        known = self.log.passes.get(unit, self.log.end)
        return self._initial if known is None else known.rate

    def metrics(self) -> dict[str, float]:
        """Metrics of an update by MLflow name: of the draws, and the step limit that the next tickets have."""
        limit = growing_limit(self._growing_steps, self.states[-1].version)
        return self._draw_metrics() | ({} if limit is None else {"sampler/step_limit": float(limit)})

    def _draw_metrics(self) -> dict[str, float]:
        """Metrics of each environment, or of the task file as a whole."""
        if not self._by_environment:
            metrics = self._draws.metrics() | self.block_list.pop_metrics()
            units: Sequence[str] = DIFFICULTIES if self._unit_kind == "difficulty" and self.adapts else ()
            return metrics | {f"sampler/pass_rate/{unit}": self.pass_rate(unit) for unit in units}
        if not self.adapts:
            return {}
        metrics, knowledge = {}, self.log.at(self.states[-1].learned)
        easy = [DIFFICULTIES[0]] * len(self.environments)  # adaptive samplers do not look at difficulties
        probabilities = environment_probabilities(self.settings, self.environments, easy, knowledge)
        for name, probability in zip(self.environments, probabilities, strict=True):
            metrics[f"sampler/probability/{name}"] = probability
            metrics[f"sampler/pass_rate/{name}"] = self.pass_rate(name)
            metrics[f"sampler/closed_tickets/{name}"] = float(self.closed_tickets[name])
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The log, states and statistics that a checkpoint stores."""
        self._learn()
        return {
            "unit": self._unit_kind,
            "files": self._files,
            "log": self.log.to_json(),
            "states": [[state.first_ticket, state.learned, state.version] for state in self.states],
            "closed_tickets": dict(self.closed_tickets),
            "draws": self._draws.state_dict(),
        }

    def _learn(self) -> None:
        for ticket, (task, rate) in sorted(self._recorded.items(), key=lambda item: item[0]):
            if not self._by_environment:
                self._draws.add(task)
            elif task.environment in self.environments:  # else the setting changed since its ticket was issued
                self.closed_tickets[task.environment] += 1
            unit = unit_of(task, self._unit_kind)
            if rate is not None and self.adapts:
                groups = (self.log.passes.get(unit, self.log.end) or PassRate(0.0, 0)).groups
                self.log.append(PASS, unit, [updated_pass_rate(self.pass_rate(unit), rate), groups + 1])
            self._closed.add(ticket)
        self._recorded.clear()
        while self._oldest_open in self._closed:
            self._closed.remove(self._oldest_open)
            self._oldest_open += 1


def _restored(saved: Mapping[str, Any], kind: str, version: int) -> tuple[SamplerLog, list[SamplerState]]:
    """Log and states of a checkpoint; without one, or if its pass rates are those of other units, of nothing."""
    if "log" not in saved:
        return SamplerLog(), [SamplerState(0, 0, version)]
    log = SamplerLog.from_json(saved["log"])
    if saved["unit"] == kind:
        return log, [SamplerState(*state) for state in saved["states"]]
    log.forget_passes()
    return log, [SamplerState(0, log.end, version)]


def _continue_log(log: SamplerLog, published: SamplerLog) -> None:
    """Continue the log of a checkpoint where that of the job ends, which another trainer wrote after the checkpoint.

    Its pass rates return to those of the checkpoint, because the groups behind the later ones are lost and their
    tickets are issued again. Blocked websites stay blocked.
    """
    if published.end <= log.end:
        return
    known = log.passes.all(log.end)
    if published.base > log.end:  # entries in between have been folded: their sum takes their place
        passes, blocks = dict(published.passes.folded.items()), dict(published.blocks.folded.items())
        _append_differences(log, PASS, known, passes)
        _append_differences(log, BLOCK, log.blocks.all(log.end), blocks)
        log.end = max(log.end, published.base)
    for entry in published.entries:
        if entry.position >= log.end:
            log.add(entry)
    log.end = published.end
    _append_differences(log, PASS, log.passes.all(log.end), known)


def _append_differences(log: SamplerLog, kind: str, values: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Append the entries that turn `values` into `wanted`."""
    for name in sorted(values.keys() | wanted.keys()):
        if values.get(name) != wanted.get(name):
            log.append(kind, name, wanted.get(name))
