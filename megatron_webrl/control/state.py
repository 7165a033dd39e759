"""The facts of a job as a pure state machine: no clock, no file, no network.

A command is a JSON list, its name and its arguments; `JobState.apply` runs a request's commands and returns their
replies. The same requests in the same order always give the same state, so a journal of them restores it.

    facts       values by key: the outcome of the job, the trainer's offers, announcements of engines, ...
    counters    slots that workers claim one by one: "tickets", and "evaluation/<number>"
    epochs      what the slots of the ticket counter mean (tickets.py)
    streams     the last request of each connection: one that is sent again gets the same replies, and changes nothing
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_webrl.control.tickets import TICKET_DONE, TICKET_FENCE, TicketEpoch, ticket_epoch_at

TICKETS = "tickets"  # name of their counter
MAX_STREAMS = 50_000  # connections whose last request is known
Json = Any


class CommandError(ValueError):
    """A command that the state machine does not accept. The message names it."""


@dataclass
class SlotCounter:
    """Slots 0, 1, 2, ... that are claimed in order, each by one owner until it is closed.

    Invariant: a slot below `claimed` is open, closed, or a fence. A closed slot is never opened again.
    """

    claimed: int = 0  # number of slots claimed so far
    limit: int = 0  # slots from here on may not be claimed
    fenced: bool = False  # whether claims wait until the next epoch
    open: dict[int, str] = field(default_factory=dict)  # owner by claimed slot
    returned: list[int] = field(default_factory=list)  # open slots whose owner has ended: the next ones to be claimed
    values: list[tuple[int, Json]] = field(default_factory=list)  # of closed slots, as they were closed
    fences: list[int] = field(default_factory=list)

    @property
    def free(self) -> int:
        """Number of slots that can be claimed."""
        return 0 if self.fenced else len(self.returned) + max(0, self.limit - self.claimed)

    def claim(self, owner: str, count: int) -> list[int]:
        """Claim up to `count` slots: returned ones first."""
        slots: list[int] = []
        while len(slots) < count and self.free:
            if self.returned:
                slot = self.returned.pop(0)
            else:
                slot, self.claimed = self.claimed, self.claimed + 1
            self.open[slot] = owner
            slots.append(slot)
        return slots

    def close(self, slot: int, value: Json) -> bool:
        """Close a slot; False if it is not open. `value` is kept unless it is None."""
        if self.open.pop(slot, None) is None:
            return False
        if slot in self.returned:
            self.returned.remove(slot)
        if value is not None:
            self.values.append((slot, value))
        return True

    def owner(self, slot: int) -> str:
        """The owner of a claimed slot, or TICKET_DONE, or TICKET_FENCE."""
        return TICKET_FENCE if slot in self.fences else self.open.get(slot, TICKET_DONE)


class JobState:
    """All durable facts of a job."""

    def __init__(self) -> None:
        self.facts: dict[str, Json] = {}
        self.counters: dict[str, SlotCounter] = {}
        self.epochs: list[TicketEpoch] = []
        self.streams: OrderedDict[str, tuple[int, list[Json]]] = OrderedDict()
        self.changed: set[str] = set()  # keys of facts and names of counters, since the caller has cleared it

    def apply(self, stream: str, number: int, commands: Sequence[Sequence[Json]]) -> list[Json]:
        """Run the commands of request `number`, from 1, of a stream; returns a reply for each: {"error"} if it failed.

        Raises CommandError, without an effect, if one is unknown or the request older than the stream's last.
        """
        last, replies = self.streams.get(stream, (0, []))
        if number < last:
            raise CommandError(f"request {number} of {stream} is older than its last, {last}")
        if number == last:
            return replies
        prepared = [_prepare(command) for command in commands]
        replies = [self._run(run, arguments) for run, arguments in prepared]
        self.streams[stream] = number, replies
        self.streams.move_to_end(stream)
        if len(self.streams) > MAX_STREAMS:
            self.streams.popitem(last=False)
        return replies

    def query(self, commands: Sequence[Sequence[Json]]) -> list[Json]:
        """Run commands out of QUERIES. Raises CommandError for another one."""
        prepared = [_prepare(command) for command in commands]
        if not all(run.__name__ in QUERIES for run, _ in prepared):
            raise CommandError(f"not all of {len(prepared)} commands are queries")
        return [self._run(run, arguments) for run, arguments in prepared]

    def _run(self, command: Callable[..., Json], arguments: Sequence[Json]) -> Json:
        try:
            return command(self, *arguments)
        except (CommandError, TypeError, KeyError, AttributeError) as error:  # arguments of another form
            return {"error": f"{command.__name__}: {error}"}

    def request_count(self, stream: str) -> int:
        """Number of a stream's last request; 0 without one."""
        return self.streams.get(stream, (0, []))[0]

    def is_applied(self, stream: str, number: int) -> bool:
        """Whether a stream's request has been run."""
        return self.request_count(stream) >= number

    def free_slots(self, counter: str) -> int:
        """Slots of a counter that can be claimed; 0 without this counter."""
        return self.counters[counter].free if counter in self.counters else 0

    # -- facts ------------------------------------------------------------------------------------

    def put(self, key: str, value: Json) -> None:
        """Set a fact; None removes it."""
        if value is None:
            self.facts.pop(key, None)
        else:
            self.facts[key] = value
        self.changed.add(key)

    def put_if_absent(self, key: str, value: Json) -> Json:
        """Set a fact unless it is set; returns its value."""
        if key not in self.facts:
            self.put(key, value)
        return self.facts[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, initially 0; returns the sum."""
        value = self.facts.get(key, 0)
        if amount:
            self.put(key, value := value + amount)
        return int(value)

    def get(self, keys: list[str]) -> list[Json]:
        """The values of facts; None without one."""
        return [self.facts.get(key) for key in keys]

    # -- counters ---------------------------------------------------------------------------------

    def open_counter(self, name: str, limit: int) -> None:
        """Make a counter, unless there is one of this name."""
        self._counter(name, make=True).limit = limit
        self.changed.add(name)

    def set_limit(self, name: str, limit: int) -> None:
        """Let the slots of a counter below `limit` be claimed."""
        self._counter(name).limit = limit
        self.changed.add(name)

    def claim(self, name: str, owner: str, count: int, sharers: int = 1) -> list[Any]:
        """Claim up to `count` slots, at most the owner's share of the free ones; of tickets with what they stand for.

        Returns slots, or [slot, ticket, restart epoch] for tickets.
        """
        if name not in self.counters or (name == TICKETS and owner in self.facts.get("workers/given_up", {})):
            return []  # a worker that was given up may not know it yet
        counter = self.counters[name]
        return self._described(name, counter.claim(owner, min(count, -(-counter.free // sharers))))

    def claims_of(self, name: str, owner: str) -> list[Any]:
        """The open slots of an owner, in order, without returned ones; as `claim` returns them."""
        self._counter(name, make=True)
        return self._described(name, self._slots_of(name, owner))

    def close(self, name: str, slot: int, value: Json = None) -> bool:
        """Close a slot; False if it is not open, or its counter was removed."""
        return name in self.counters and self.counters[name].close(slot, value)

    def return_slots(self, name: str, slots: list[int]) -> None:
        """Let open slots be claimed again, because their owner has ended."""
        counter = self._counter(name)
        counter.returned += [slot for slot in slots if slot in counter.open and slot not in counter.returned]
        self.changed.add(name)

    def remove_counter(self, name: str) -> None:
        """Remove a counter with its slots, if there is one of this name."""
        self.counters.pop(name, None)
        self.changed.add(name)

    def read_counter(self, name: str, values_from: int = 0) -> Json:
        """Claimed slots, limit, [slot, owner] of open ones, and the values from number `values_from` on."""
        counter = self._counter(name)
        return {
            "claimed": counter.claimed,
            "limit": counter.limit,
            "open": [[slot, owner] for slot, owner in counter.open.items() if slot not in counter.returned],
            "values": [list(each) for each in counter.values[values_from:]],
        }

    def owners(self, name: str, first: int, end: int) -> list[str]:
        """The owner of each claimed slot in [first, end), or TICKET_DONE, or TICKET_FENCE."""
        return [self._counter(name).owner(slot) for slot in range(first, end)]

    # -- tickets ----------------------------------------------------------------------------------

    def give_up_worker(self, worker: str, reason: str) -> None:
        """Continue without a worker: others run its open tickets."""
        self.put("workers/given_up", self.facts.get("workers/given_up", {}) | {worker: reason})
        if TICKETS in self.counters:
            self.return_slots(TICKETS, self._slots_of(TICKETS, worker))

    def start_epoch(self, epoch: dict[str, Json], limit: int) -> None:
        """Start a ticket epoch, so that its slots can be claimed below `limit`. Later epochs start at a fence."""
        counter = self._counter(TICKETS, make=True)
        if not self.epochs:
            counter.claimed = epoch["first_slot"]
        self.epochs.append(TicketEpoch.from_json(epoch))
        counter.limit, counter.fenced = limit, False
        self.changed |= {TICKETS}
        self.put("tickets/epoch_count", len(self.epochs))

    def fence(self) -> int:
        """Stop claims until `start_epoch`; returns the fence's slot: all below it are claimed."""
        counter = self._counter(TICKETS)
        slot, counter.claimed, counter.fenced = counter.claimed, counter.claimed + 1, True
        counter.fences.append(slot)
        return slot

    def read_epochs(self) -> list[Json]:
        """All ticket epochs of the job, in order."""
        return [asdict(epoch) for epoch in self.epochs]

    # -- snapshots --------------------------------------------------------------------------------

    def to_json(self) -> Json:
        """The whole state, without `changed`."""
        counters = {name: asdict(counter) for name, counter in self.counters.items()}
        for counter in counters.values():
            counter["open"] = list(counter["open"].items())  # keys of JSON objects are no numbers
        return {
            "facts": self.facts,
            "counters": counters,
            "epochs": self.read_epochs(),
            "streams": [[stream, *last] for stream, last in self.streams.items()],
        }

    @classmethod
    def from_json(cls, content: Json) -> JobState:
        state = cls()
        state.facts = content["facts"]
        for name, fields in content["counters"].items():
            values = [(slot, value) for slot, value in fields["values"]]
            state.counters[name] = SlotCounter(**{**fields, "open": dict(fields["open"]), "values": values})
        state.epochs = [TicketEpoch.from_json(epoch) for epoch in content["epochs"]]
        state.streams = OrderedDict((stream, (number, replies)) for stream, number, replies in content["streams"])
        return state

    def _counter(self, name: str, make: bool = False) -> SlotCounter:
        if name not in self.counters:
            if not make:
                raise CommandError(f"there is no counter {name!r}")
            self.counters[name] = SlotCounter()
        return self.counters[name]

    def _slots_of(self, name: str, owner: str) -> list[int]:
        counter = self.counters[name]
        return sorted(slot for slot, each in counter.open.items() if each == owner and slot not in counter.returned)

    def _described(self, name: str, slots: list[int]) -> list[Any]:
        if name != TICKETS:
            return slots
        epochs = [ticket_epoch_at(self.epochs, slot) for slot in slots]
        newest = self.epochs[-1].restart_epoch if self.epochs else 0
        return [[slot, epoch.ticket_at(slot), newest] for slot, epoch in zip(slots, epochs, strict=True)]


COMMANDS: dict[str, Callable[..., Json]] = {
    each.__name__: each
    for each in (
        JobState.put, JobState.put_if_absent, JobState.add, JobState.get,
        JobState.open_counter, JobState.set_limit, JobState.claim, JobState.claims_of, JobState.close,
        JobState.return_slots, JobState.remove_counter, JobState.read_counter,
        JobState.owners, JobState.give_up_worker, JobState.start_epoch, JobState.fence, JobState.read_epochs,
    )
}  # fmt: skip
QUERIES = frozenset({"get", "read_counter", "owners", "read_epochs"})
"""Commands that change nothing: they need no journal."""


def _prepare(command: Sequence[Json]) -> tuple[Callable[..., Json], Sequence[Json]]:
    if not isinstance(command, list) or not command or command[0] not in COMMANDS:
        raise CommandError(f"unknown command {str(command)[:100]}")
    return COMMANDS[command[0]], command[1:]
