"""Adaptive task sampling in the trainer: pass rates of environments, and the sampler states of tickets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.control.control_plane import ControlClient
from megatron_webrl.sampling.samplers import (
    ADAPTIVE_SAMPLERS,
    adaptive_probabilities,
    initial_pass_rate,
    updated_pass_rate,
)
from megatron_webrl.sampling.states import SamplerState, publish_states, read_published_states
from megatron_webrl.types import Group


class TaskSampler:
    """The statistics and states of an adaptive sampler; does nothing with other samplers.

    Life cycle: `publish_initial_states` before the first ticket is issued; `record_group` for every closed group.
    Before the ticket limit rises, `publish_adapted_state` learns from the groups recorded since, in ticket order, and
    publishes a state for the tickets above the old limit; those below it have been admitted and keep their state.
    Invariants: a ticket counts once, when it is closed, so a checkpoint's statistics cover exactly its closed tickets.
    `states` covers all unclosed tickets and holds no older state.
    """

    def __init__(
        self, tasks: TasksConfig, fresh: int, open_tickets: Collection[int], saved: Mapping[str, Any] | None
    ) -> None:
        """`fresh`: first unclaimed ticket; `open_tickets`: unclosed ones below; `saved`: an earlier `state_dict`."""
        self.settings, self.environments = tasks.sampler, tuple(tasks.environments)
        self.active = tasks.sampler.name in ADAPTIVE_SAMPLERS
        saved = (saved if self.active else None) or {}
        rates, closed_tickets = saved.get("rates", {}), saved.get("closed_tickets", {})
        self.pass_rates = {name: rates.get(name, initial_pass_rate(self.settings)) for name in self.environments}
        self.closed_tickets = Counter({name: closed_tickets.get(name, 0) for name in self.environments})
        self.states = [SamplerState(0, self._probabilities())]
        if tuple(saved.get("environments", ())) == self.environments:
            self.states = [SamplerState(first, tuple(values)) for first, values in saved["states"]]
        self._fresh = fresh
        self._oldest_open = min(open_tickets, default=fresh)
        self._closed = set(range(self._oldest_open, fresh)).difference(open_tickets)  # closed tickets above it
        self._recorded: dict[int, tuple[str, float | None]] = {}  # ticket -> environment, pass rate of its group

    def publish_initial_states(self, control: ControlClient) -> None:
        """Publish the first states; tickets claimed under an earlier trainer process keep those that it published."""
        if self.active:
            published = read_published_states(control)
            latest = self.states[-1].first_ticket
            self.states += [state for state in published if latest < state.first_ticket < self._fresh]
            publish_states(control, self.states, published)

    def record_group(self, group: Group) -> None:
        """Record the pass rate of a trained or dropped group."""
        if self.active:
            passed = [t.outcome == "success" for t in group.trajectories if t.trainable]
            rate = sum(passed) / len(passed) if passed else None
            self._recorded[group.ticket] = group.trajectories[0].task.environment, rate

    def publish_adapted_state(self, control: ControlClient, limit: int) -> None:
        """Learn from recorded groups and publish the state of tickets from `limit` on, before they can be claimed."""
        if not self.active:
            return
        self._learn()
        states = [state for state in self.states if state.first_ticket < self._first(limit)]
        latest = SamplerState(self._first(limit), self._probabilities())
        if not states or states[-1].probabilities != latest.probabilities:
            states.append(latest)
        while len(states) > 1 and states[1].first_ticket <= self._oldest_open:
            del states[0]
        publish_states(control, states, self.states)
        self.states = states

    def metrics(self) -> dict[str, float]:
        """Metrics of an update by MLflow name: probability, pass rate and closed tickets of each environment."""
        if not self.active:
            return {}
        metrics: dict[str, float] = {}
        for name, probability in zip(self.environments, self.states[-1].probabilities, strict=True):
            metrics[f"sampler/probability/{name}"] = probability
            metrics[f"sampler/pass_rate/{name}"] = self.pass_rates[name]
            metrics[f"sampler/closed_tickets/{name}"] = float(self.closed_tickets[name])
        return metrics

    def state_dict(self) -> dict[str, Any] | None:
        """The statistics and states that a checkpoint stores; None with a sampler that does not adapt."""
        if not self.active:
            return None
        self._learn()
        return {
            "environments": list(self.environments),
            "rates": dict(self.pass_rates),
            "closed_tickets": dict(self.closed_tickets),
            "states": [[state.first_ticket, list(state.probabilities)] for state in self.states],
        }

    def _first(self, limit: int) -> int:
        """The first ticket from the limit on that was never claimed."""
        return max(limit, self._fresh)

    def _probabilities(self) -> tuple[float, ...]:
        return adaptive_probabilities(self.settings, [self.pass_rates[name] for name in self.environments])

    def _learn(self) -> None:
        for ticket, (name, rate) in sorted(self._recorded.items()):
            if name in self.pass_rates:  # else tasks.environments changed since its ticket was issued
                self.closed_tickets[name] += 1
                if rate is not None:
                    self.pass_rates[name] = updated_pass_rate(self.pass_rates[name], rate)
            self._closed.add(ticket)
        self._recorded.clear()
        while self._oldest_open in self._closed:
            self._closed.remove(self._oldest_open)
            self._oldest_open += 1
