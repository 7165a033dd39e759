"""The trainer's part in task sampling: what it learns of the environments, and the states that tickets draw by."""

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
    """The statistics and states of an adaptive sampler; idle with any other.

    Life: `open` publishes the states before the first ticket is issued. Every group that is closed is noted, whether
    trained or dropped. Before each rise of the ticket limit `adapt` learns from those noted since, in the order of
    their tickets, and publishes another state for the tickets above the old limit; those below have been admitted and
    keep the state that they have.

    Invariants: a ticket counts once in the statistics, when it is closed, so a checkpoint's statistics are those of
    the tickets that it holds as closed. The states of all tickets that are not closed are there, and no older ones.
    """

    def __init__(
        self, tasks: TasksConfig, fresh: int, open_tickets: Collection[int], saved: Mapping[str, Any] | None
    ) -> None:
        """`saved`: what `state` gave for a checkpoint. Its states go if the environments are not the same.

        `fresh`: the lowest ticket that was never taken; `open_tickets`: those below it that are not closed.
        """
        self.settings, self.environments = tasks.sampler, tuple(tasks.environments)
        self.active = tasks.sampler.name in ADAPTIVE_SAMPLERS
        saved = (saved if self.active else None) or {}
        rates, drawn = saved.get("rates", {}), saved.get("closed_tickets", {})
        self.pass_rates = {name: rates.get(name, initial_pass_rate(self.settings)) for name in self.environments}
        self.closed_tickets = Counter(
            {name: drawn.get(name, 0) for name in self.environments}
        )  # tickets that are closed
        self.states = [SamplerState(0, self._probabilities())]
        if tuple(saved.get("environments", ())) == self.environments:
            self.states = [SamplerState(first, tuple(values)) for first, values in saved["states"]]
        self._issued = fresh
        self._oldest = min(open_tickets, default=fresh)  # of the tickets that are not closed
        self._closed = set(range(self._oldest, fresh)).difference(open_tickets)  # and those closed above it
        self._noted: dict[int, tuple[str, float | None]] = {}  # ticket -> environment, pass rate of its group

    def publish_initial_states(self, control: ControlClient) -> None:
        """Publish the states of the tickets that come first.

        Tickets that were taken from a trainer that died keep the states that it had published for them; what it had
        published for later ones goes.
        """
        if self.active:
            before = read_published_states(control)
            known = self.states[-1].first_ticket
            self.states += [state for state in before if known < state.first_ticket < self._issued]
            publish_states(control, self.states, before)

    def record_group(self, group: Group) -> None:
        """A group was trained or dropped."""
        if self.active:
            passed = [t.outcome == "success" for t in group.trajectories if t.trainable]
            rate = sum(passed) / len(passed) if passed else None
            self._noted[group.ticket] = group.trajectories[0].task.environment, rate

    def publish_adapted_state(self, control: ControlClient, limit: int) -> None:
        """Learn, and publish what the tickets from `limit` on draw by. To be called before they may be taken."""
        if not self.active:
            return
        self._learn()
        states = [state for state in self.states if state.first_ticket < self._first(limit)]
        latest = SamplerState(self._first(limit), self._probabilities())
        if not states or states[-1].probabilities != latest.probabilities:
            states.append(latest)
        while len(states) > 1 and states[1].first_ticket <= self._oldest:
            del states[0]
        publish_states(control, states, self.states)
        self.states = states

    def metrics(self) -> dict[str, float]:
        """Metrics of an update, by MLflow name: what is known of each environment, and what follows from it."""
        if not self.active:
            return {}
        found: dict[str, float] = {}
        for name, probability in zip(self.environments, self.states[-1].probabilities, strict=True):
            found[f"sampler/probability/{name}"] = probability
            found[f"sampler/pass_rate/{name}"] = self.pass_rates[name]
            found[f"sampler/closed_tickets/{name}"] = float(self.closed_tickets[name])
        return found

    def state_dict(self) -> dict[str, Any] | None:
        """For a checkpoint."""
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
        """The first ticket above the limit that was not taken before."""
        return max(limit, self._issued)

    def _probabilities(self) -> tuple[float, ...]:
        return adaptive_probabilities(self.settings, [self.pass_rates[name] for name in self.environments])

    def _learn(self) -> None:
        for ticket, (name, rate) in sorted(self._noted.items()):
            if name in self.pass_rates:  # else its ticket is older than a change of tasks.environments
                self.closed_tickets[name] += 1
                if rate is not None:
                    self.pass_rates[name] = updated_pass_rate(self.pass_rates[name], rate)
            self._closed.add(ticket)
        self._noted.clear()
        while self._oldest in self._closed:
            self._closed.remove(self._oldest)
            self._oldest += 1
