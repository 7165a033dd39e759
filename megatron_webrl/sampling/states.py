"""Sampler states, which the trainer publishes to the workers. A state never changes; it applies from its first ticket
to that of the next one, and is published before the ticket limit rises above it: every claimed ticket has a state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import POLL_SECONDS, ControlClient, JobFailed
from megatron_webrl.sampling.samplers import ADAPTIVE_SAMPLERS

_INDEX = "sampler/index"  # first tickets of the published states, ascending


@dataclass(frozen=True)
class SamplerState:
    """The probabilities by which a range of tickets draws environments."""

    first_ticket: int  # the first ticket that it applies to
    probabilities: tuple[float, ...]  # [environments], in the order of tasks.environments


def publish_states(
    control: ControlClient, states: Sequence[SamplerState], previous: Sequence[SamplerState] = ()
) -> None:
    """Trainer: replace `previous` by `states`, oldest first, before the ticket limit rises above a new first ticket."""
    for state in states:
        if state not in previous:
            control.put_json(_key(state.first_ticket), list(state.probabilities))
    firsts = [state.first_ticket for state in states]
    control.put_json(_INDEX, firsts)
    for state in previous:
        if state.first_ticket not in firsts:
            control.store.delete_key(_key(state.first_ticket))


def read_published_states(control: ControlClient) -> list[SamplerState]:
    """Trainer: the published states, oldest first."""
    index, states = control.get_json(_INDEX), []
    for first in index if isinstance(index, list) else ():
        values = control.get_json(_key(first))
        if isinstance(values, list):
            states.append(SamplerState(first, tuple(values)))
    return states


class SamplerStateReader:
    """A worker's cache of the published states: each is read once."""

    def __init__(self, control: ControlClient, timeout_seconds: float, grace_seconds: float = 0.0) -> None:
        """`timeout_seconds` limits the wait for a state, `grace_seconds` the silence of a trainer that restarts."""
        self.control, self.timeout_seconds, self.grace_seconds = control, timeout_seconds, grace_seconds
        self._known: dict[int, tuple[float, ...]] = {}

    @classmethod
    def from_config(cls, config: Config, control: ControlClient) -> SamplerStateReader | None:
        """A reader, or None for samplers with constant probabilities."""
        if config.tasks.sampler.name not in ADAPTIVE_SAMPLERS:
            return None
        return cls(control, config.run.startup_timeout_seconds, config.trainer_grace_seconds)

    async def probabilities(self, ticket: int) -> tuple[float, ...]:
        """The probabilities by which a claimed ticket draws: [environments]. A ticket older than all states gets the
        oldest: it is closed, and the trainer drops its duplicates. Raises JobFailed, JobEnded.
        """
        deadline = time.monotonic() + self.timeout_seconds
        while (probabilities := self._find(ticket)) is None:
            self.control.check_job(("trainer-0",), self.grace_seconds)
            if time.monotonic() > deadline:
                raise JobFailed(
                    f"{self.control.role} waited {self.timeout_seconds:.0f} s (run.startup_timeout_seconds) for the "
                    f"sampler state of ticket {ticket} from trainer-0"
                )
            await asyncio.sleep(POLL_SECONDS)
        return probabilities

    def _find(self, ticket: int) -> tuple[float, ...] | None:
        index = self.control.get_json(_INDEX)
        if not isinstance(index, list) or not index:
            return None
        first = max((number for number in index if number <= ticket), default=index[0])
        self._known = {number: known for number, known in self._known.items() if number in index}
        if first not in self._known:
            values = self.control.get_json(_key(first))
            if not isinstance(values, list):  # deleted since the index was read
                return None
            self._known[first] = tuple(values)
        return self._known[first]


def _key(first: int) -> str:
    return f"sampler/{first}"
