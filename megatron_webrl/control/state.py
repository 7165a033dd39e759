"""The facts of a job as a pure state machine: no clock, no file, no network.

A command is a JSON list, its name and its arguments; `JobState.apply` runs a request's commands and returns their
replies. The same requests in the same order always give the same state, so a journal of them restores it.

    facts       values by key: the outcome of the job, the trainer's offers, announcements of engines, ...
    queues      items that workers claim: "tickets" with their tasks, and the episodes of "evaluation/<number>"
    epochs      restart epoch and policy version of each start of the trainer that issued tickets
    streams     the last request of each connection: one that is sent again gets the same replies, and changes nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TICKETS = "tickets"  # name of their queue
MAX_STREAMS = 50_000  # connections whose last request is known
Json = Any


class CommandError(ValueError):
    """A command that the state machine does not accept. The message names it."""


@dataclass
class WorkQueue:
    """Numbered items that are claimed in order, each by one owner until it is closed.

    Invariant: an item that was appended is waiting, open, or closed. Only the trainer appends a closed one again.
    """

    waiting: list[int] = field(default_factory=list)  # never claimed since they were appended
    owners: dict[int, str] = field(default_factory=dict)  # of open items
    returned: list[int] = field(default_factory=list)  # open items whose owner has ended: the next ones to be claimed
    contents: dict[int, Json] = field(default_factory=dict)  # of waiting and open items
    values: list[tuple[int, Json]] = field(default_factory=list)  # of closed items, as they were closed
    appended: int = 0  # number of items so far
    claimed: int = 0  # of them
    end: int = 0  # above the highest item so far
    paused: bool = False  # whether claims wait until the trainer has started an epoch

    @property
    def free(self) -> int:
        """Number of items that can be claimed."""
        return 0 if self.paused else len(self.returned) + len(self.waiting)

    def append(self, items: Sequence[tuple[int, Json]]) -> None:
        """Add items with their contents. Raises CommandError, without an effect, if one is waiting or open."""
        known = [item for item, _ in items if item in self.contents]
        if known or len({item for item, _ in items}) < len(items):
            raise CommandError(f"items {known or [item for item, _ in items]} are in the queue already")
        self.waiting += [item for item, _ in items]
        self.contents |= dict(items)
        self.appended += len(items)
        self.end = max([self.end, *(item + 1 for item, _ in items)])

    def claim(self, owner: str, count: int) -> list[int]:
        """Claim up to `count` items: returned ones first."""
        count = min(count, self.free)
        again, first = self.returned[:count], self.waiting[: max(0, count - len(self.returned))]
        del self.returned[: len(again)], self.waiting[: len(first)]
        self.claimed += len(first)
        self.owners |= dict.fromkeys(again + first, owner)
        return again + first

    def close(self, item: int, value: Json) -> bool:
        """Close an item; False if it is not open. `value` is kept unless it is None."""
        if self.owners.pop(item, None) is None:
            return False
        del self.contents[item]
        if item in self.returned:
            self.returned.remove(item)
        if value is not None:
            self.values.append((item, value))
        return True

    def give_back(self, owner: str, items: Sequence[int]) -> None:
        """Let open items of an owner be claimed again, because it has ended or cannot use them."""
        mine = set(self.items_of(owner))
        self.returned += [item for item in dict.fromkeys(items) if item in mine]

    def rewind(self) -> list[tuple[int, Json]]:
        """Stop claims and remove the items that were never claimed; returns the open ones with their contents."""
        self.paused = True
        for item in self.waiting:
            del self.contents[item]
        self.waiting.clear()
        return [(item, self.contents[item]) for item in sorted(self.owners)]

    def items_of(self, owner: str) -> list[int]:
        """The open items of an owner, in order, without returned ones."""
        return sorted(item for item, each in self.owners.items() if each == owner and item not in self.returned)


@dataclass
class JobState:
    """All durable facts of a job."""

    facts: dict[str, Json] = field(default_factory=dict)
    queues: dict[str, WorkQueue] = field(default_factory=dict)
    epochs: list[tuple[int, int]] = field(default_factory=list)  # restart epoch and policy version
    streams: dict[str, tuple[int, list[Json]]] = field(default_factory=dict)  # that of the last request is the last
    changed: set[str] = field(default_factory=set)  # keys of facts, since the caller has cleared it

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
        self.streams.pop(stream, None)
        self.streams[stream] = number, replies
        if len(self.streams) > MAX_STREAMS:
            del self.streams[next(iter(self.streams))]
        return replies

    def query(self, commands: Sequence[Sequence[Json]]) -> list[Json]:
        """Run commands of QUERIES."""
        return [self._run(*_prepare(command)) for command in commands]

    def _run(self, command: Callable[..., Json], arguments: Sequence[Json]) -> Json:
        try:
            return command(self, *arguments)
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # arguments of another form
            return {"error": f"{command.__name__}: {error}"}

    def request_count(self, stream: str) -> int:
        """Number of a stream's last request; 0 without one."""
        return self.streams.get(stream, (0, []))[0]

    def free_items(self, queue: str) -> int:
        """Items of a queue that can be claimed; 0 without this queue."""
        return self.queues[queue].free if queue in self.queues else 0

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

    # -- queues -----------------------------------------------------------------------------------

    def append(self, name: str, items: list[Any]) -> None:
        """Add items, [number, content] each, to a queue, which is made if there is none of this name."""
        self.queues.setdefault(name, WorkQueue()).append([(int(item), content) for item, content in items])

    def claim(self, name: str, owner: str, count: int, sharers: int = 1) -> list[Any]:
        """Claim up to `count` items, at most the owner's share of the free ones: [item, content, restart epoch]."""
        if name not in self.queues or (name == TICKETS and owner in self.facts.get("workers/given_up", {})):
            return []  # a worker that was given up may not know it yet
        queue = self.queues[name]
        return self._described(queue, queue.claim(owner, min(count, -(-queue.free // sharers))))

    def claims_of(self, name: str, owner: str) -> list[Any]:
        """The open items of an owner, in order, without returned ones; as `claim` returns them."""
        queue = self.queues.get(name, WorkQueue())
        return self._described(queue, queue.items_of(owner))

    def close(self, name: str, item: int, value: Json = None) -> bool:
        """Close an item; False if it is not open, or its queue was removed."""
        return name in self.queues and self.queues[name].close(item, value)

    def give_back(self, name: str, owner: str, items: list[int]) -> None:
        """As WorkQueue.give_back."""
        self._queue(name).give_back(owner, items)

    def remove_queue(self, name: str) -> None:
        """Remove a queue with its items, if there is one of this name."""
        self.queues.pop(name, None)

    def read_queue(self, name: str, values_from: int = 0) -> Json:
        """Numbers of appended and claimed items, [item, owner] of open ones, and the values from number `values_from`
        on.
        """
        queue = self._queue(name)
        return {
            "appended": queue.appended,
            "claimed": queue.claimed,
            "open": [[item, owner] for item, owner in queue.owners.items() if item not in queue.returned],
            "values": [list(each) for each in queue.values[values_from:]],
        }

    # -- tickets ----------------------------------------------------------------------------------

    def give_up_worker(self, worker: str, reason: str) -> None:
        """Continue without a worker: others run its open tickets."""
        self.put("workers/given_up", self.facts.get("workers/given_up", {}) | {worker: reason})
        if TICKETS in self.queues:
            self.give_back(TICKETS, worker, self.queues[TICKETS].items_of(worker))

    def start_epoch(self, restart_epoch: int, version: int, items: list[Any]) -> None:
        """Issue the first tickets of a restart epoch, which resumes from a policy version."""
        self.append(TICKETS, items)
        self.queues[TICKETS].paused = False
        self.epochs.append((restart_epoch, version))
        self.put("tickets/epoch_count", len(self.epochs))

    def rewind_tickets(self) -> Json:
        """Take back what was issued and never claimed, and stop claims until `start_epoch`.

        Returns the epochs so far, [ticket, content] of the open tickets, and the lowest ticket that was never issued.
        """
        queue = self._queue(TICKETS)
        return {"epochs": [list(each) for each in self.epochs], "open": queue.rewind(), "end": queue.end}

    def _queue(self, name: str) -> WorkQueue:
        if name not in self.queues:
            raise CommandError(f"there is no queue {name!r}")
        return self.queues[name]

    def _described(self, queue: WorkQueue, items: list[int]) -> list[Any]:
        newest = self.epochs[-1][0] if self.epochs else 0
        return [[item, queue.contents[item], newest] for item in items]


COMMANDS: dict[str, Callable[..., Json]] = {
    name: getattr(JobState, name)
    for name in (
        "put", "put_if_absent", "add", "get", "append", "claim", "claims_of", "close", "give_back", "remove_queue",
        "read_queue", "give_up_worker", "start_epoch", "rewind_tickets",
    )
}  # fmt: skip
QUERIES = frozenset({"get", "claims_of", "read_queue"})
"""Commands that change nothing: they need no journal."""


def _prepare(command: Sequence[Json]) -> tuple[Callable[..., Json], Sequence[Json]]:
    if not isinstance(command, list) or not command or command[0] not in COMMANDS:
        raise CommandError(f"unknown command {str(command)[:100]}")
    return COMMANDS[command[0]], command[1:]
