"""How an evaluation is asked for, shared out among workers and collected, through the control plane.

Who asks puts one Request at a time under ASKED. Its episodes are positions of a counter, like tickets: a worker signs
the next position with the name of its life, runs the episode, and puts the result in place of its signature. Whoever
asked reads the results, and appends the episode of a worker that is lost, or has begun another life, once more.

    evaluation/<number>/claimed      positions signed so far
    evaluation/<number>/<position> a worker's life, then the episode's result as JSON
    evaluation/<number>/retried      episodes whose worker was lost: positions beyond those of the request, in order
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from megatron_webrl.control.control_plane import ControlClient
from megatron_webrl.types import TRAINABLE_OUTCOMES

REQUEST_KEY = "evaluation/request"
_CHUNK = 1000  # results asked for at once


@dataclass(frozen=True)
class EvaluationRequest:
    """An evaluation: `samples` episodes of each of the first `tasks` held-out tasks."""

    number: int  # from 1, each once
    kind: str  # "before", "after", "blank_images", "during" or "checkpoint"
    tasks: int
    samples: int
    temperature: float
    version: int  # of the policy when it was asked for
    exclusive: bool = False  # nothing else may run, so that every token is of this version

    @property
    def episodes(self) -> int:
        """Episodes in all."""
        return self.tasks * self.samples

    def task_and_sample(self, episode: int) -> tuple[int, int]:
        """Task and sample of an episode, 0..episodes-1: first one sample of every task, then the next."""
        return episode % self.tasks, episode // self.tasks


@dataclass(frozen=True)
class EvaluationResult:
    """How one episode of an evaluation went."""

    index: int  # of the held-out task
    sample: int
    task: str
    source: str
    environment: str
    difficulty: str
    outcome: str  # "success", "failure", or the name of why there is no verdict
    steps: int
    response_tokens: int  # of all steps
    seconds: float
    versions: tuple[int, int] | None  # lowest and highest policy version of its tokens; None without tokens
    worker: str  # which life of which one ran it

    @property
    def has_verdict(self) -> bool:
        """Whether there is a verdict."""
        return self.outcome in TRAINABLE_OUTCOMES

    @classmethod
    def from_json(cls, text: str | bytes) -> EvaluationResult:
        """What json.dumps(asdict(result)) wrote."""
        fields = json.loads(text)
        versions = fields.pop("versions")
        return cls(**fields, versions=tuple(versions) if versions else None)


def next_request_number(control: ControlClient) -> int:
    """A number that no other request of the job has."""
    return int(control.store.add("evaluation/request_count", 1))


def submit_request(control: ControlClient, request: EvaluationRequest) -> None:
    """Let the workers run an evaluation; one asked for before is left where it is."""
    control.store.set(_key(request, "claimed"), "0")
    control.put_json(REQUEST_KEY, asdict(request))


def withdraw_request(control: ControlClient) -> None:
    """Let the workers leave what they still run of the evaluation that was asked for."""
    control.put_json(REQUEST_KEY, None)


def current_request(control: ControlClient) -> EvaluationRequest | None:
    """The evaluation that is asked for, if any."""
    fields = control.get_json(REQUEST_KEY)
    return EvaluationRequest(**fields) if isinstance(fields, dict) else None


def claim_episode(control: ControlClient, request: EvaluationRequest, life: str) -> tuple[int, int] | None:
    """Worker: sign the next position; returns it with its episode, or None if all are signed."""
    again = control.get_json(_key(request, "retried"), [])
    assert isinstance(again, list)
    limit = request.episodes + len(again)
    position = control.claim(_counter(request), lambda: limit, life)
    if position is None:
        return None
    return position, position if position < request.episodes else again[position - request.episodes]


def submit_result(control: ControlClient, request: EvaluationRequest, position: int, result: EvaluationResult) -> None:
    """Worker: the episode of a position is done."""
    control.put_json(_key(request, position), asdict(result))


class ResultCollector:
    """The asking side of one request. `poll` again and again until it says that all results are there."""

    def __init__(self, control: ControlClient, request: EvaluationRequest) -> None:
        self.control, self.request = control, request
        self.results: dict[int, EvaluationResult] = {}  # by episode
        self.retried_episodes: list[int] = []  # episodes that were run again
        self._signed = 0  # positions below have been seen with a signature
        self._open: list[int] = []  # seen without a result

    @property
    def has_started(self) -> bool:
        """Whether a worker has been seen to run an episode."""
        return self._signed > 0

    @property
    def missing_count(self) -> int:
        """Episodes without a result."""
        return self.request.episodes - len(self.results)

    def poll(self) -> bool:
        """Read what has come. Never waits; raises no error for workers that are gone, but repeats their episodes."""
        taken, known = int(self.control.store.get(_key(self.request, "claimed"))), len(self.retried_episodes)
        self._open += range(self._signed, taken)
        self._signed = taken
        left, gone = [], _Gone(self.control)
        for first in range(0, len(self._open), _CHUNK):
            positions = self._open[first : first + _CHUNK]
            values = self.control.store.multi_get([_key(self.request, position) for position in positions])
            for position, value in zip(positions, values, strict=True):
                if value.startswith(b"{"):
                    self.results.setdefault(self._episode(position), EvaluationResult.from_json(value))
                elif gone[value.decode()]:
                    self.retried_episodes.append(self._episode(position))
                else:
                    left.append(position)
        self._open = left
        if len(self.retried_episodes) > known:
            self.control.put_json(_key(self.request, "retried"), self.retried_episodes)
        return not self.missing_count

    def _episode(self, position: int) -> int:
        count = self.request.episodes
        return position if position < count else self.retried_episodes[position - count]


class _Gone(dict[str, bool]):
    """Whether lives of workers are over; asked once for each."""

    def __init__(self, control: ControlClient) -> None:
        super().__init__()
        self._control = control

    def __missing__(self, life: str) -> bool:
        self[life] = self._control.instance_has_ended(life)
        return self[life]


def _counter(request: EvaluationRequest) -> str:
    return f"evaluation/{request.number}"


def _key(request: EvaluationRequest, name: str | int) -> str:
    return f"{_counter(request)}/{name}"
