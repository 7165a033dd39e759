"""Request an evaluation, distribute its episodes over the workers and collect the results, via the control plane.

The requester puts one EvaluationRequest at a time under REQUEST_KEY. Its episodes are slots of a counter, like tickets;
the requester appends the episode of a worker that is lost or was restarted as a further slot.

    evaluation/<number>/claimed   number of slots claimed so far
    evaluation/<number>/<slot>    a worker's instance id, later the episode's result as JSON
    evaluation/<number>/retried   episodes whose worker was lost: the slots beyond those of the request, in order
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from megatron_webrl.control.control_plane import ControlClient
from megatron_webrl.types import TRAINABLE_OUTCOMES

REQUEST_KEY = "evaluation/request"
_CHUNK = 1000  # results read in one call


@dataclass(frozen=True)
class EvaluationRequest:
    """An evaluation: `samples` episodes of each of the first `tasks` held-out tasks."""

    number: int  # from 1, unique within the job
    kind: str  # "before", "after", "blank_images", "during" or "checkpoint"
    tasks: int
    samples: int
    temperature: float
    version: int  # policy version at the time of the request
    exclusive: bool = False  # no groups run meanwhile, so that every token comes from this version

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return self.tasks * self.samples

    def task_and_sample(self, episode: int) -> tuple[int, int]:
        """Task and sample of an episode, 0..episodes-1: first one sample of every task, then the next."""
        return episode % self.tasks, episode // self.tasks


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one episode of an evaluation."""

    index: int  # of the held-out task
    sample: int
    task: str
    source: str
    environment: str
    difficulty: str
    outcome: str  # "success", "failure", or the reason for no verdict
    steps: int
    response_tokens: int  # of all steps
    seconds: float
    versions: tuple[int, int] | None  # lowest and highest policy version of its tokens; None without tokens
    worker: str  # instance id
    evaluator: str = ""  # what decided: the judge's protocol, or the name of another evaluator
    judge_dollars: float = 0.0
    not_recorded_requests: int = 0  # requests of its pages that no recording answered (browser.replay)

    @property
    def has_verdict(self) -> bool:
        """Whether the episode succeeded or failed."""
        return self.outcome in TRAINABLE_OUTCOMES

    @classmethod
    def from_json(cls, text: str | bytes) -> EvaluationResult:
        """Read a result that json.dumps(asdict(result)) wrote."""
        fields = json.loads(text)
        versions = fields.pop("versions")
        return cls(**fields, versions=tuple(versions) if versions else None)


def next_request_number(control: ControlClient) -> int:
    """A number that no other request of the job has."""
    return int(control.store.add("evaluation/request_count", 1))


def submit_request(control: ControlClient, request: EvaluationRequest) -> None:
    """Let the workers run an evaluation; an earlier request is replaced."""
    control.store.set(_key(request, "claimed"), "0")
    control.put_json(REQUEST_KEY, asdict(request))


def withdraw_request(control: ControlClient) -> None:
    """Withdraw the current request; workers abort its running episodes."""
    control.put_json(REQUEST_KEY, None)


def current_request(control: ControlClient) -> EvaluationRequest | None:
    """The current request, if any."""
    fields = control.get_json(REQUEST_KEY)
    return EvaluationRequest(**fields) if isinstance(fields, dict) else None


def claim_episode(control: ControlClient, request: EvaluationRequest, instance_id: str) -> tuple[int, int] | None:
    """Worker: claim the next slot; returns slot and episode, or None if all are claimed."""
    retried = control.get_json(_key(request, "retried"), [])
    assert isinstance(retried, list)
    limit = request.episodes + len(retried)
    slot = control.claim(_counter(request), lambda: limit, instance_id)
    if slot is None:
        return None
    return slot, slot if slot < request.episodes else retried[slot - request.episodes]


def submit_result(control: ControlClient, request: EvaluationRequest, slot: int, result: EvaluationResult) -> None:
    """Worker: store the result of a claimed slot."""
    control.put_json(_key(request, slot), asdict(result))


class ResultCollector:
    """The requester's side of one request. Call `poll` until it returns that all results have arrived."""

    def __init__(self, control: ControlClient, request: EvaluationRequest) -> None:
        self.control, self.request = control, request
        self.results: dict[int, EvaluationResult] = {}  # by episode
        self.retried_episodes: list[int] = []
        self._claimed = 0  # number of claimed slots at the last poll
        self._open: list[int] = []  # claimed slots without a result

    @property
    def has_started(self) -> bool:
        """Whether a worker had claimed an episode at the last poll."""
        return self._claimed > 0

    @property
    def missing_count(self) -> int:
        """Episodes without a result."""
        return self.request.episodes - len(self.results)

    def poll(self) -> bool:
        """Read new results, and retry the episodes of lost workers. Does not wait."""
        claimed, retried = int(self.control.store.get(_key(self.request, "claimed"))), len(self.retried_episodes)
        self._open += range(self._claimed, claimed)
        self._claimed = claimed
        still_open, has_ended = [], _InstanceEnded(self.control)
        for first in range(0, len(self._open), _CHUNK):
            slots = self._open[first : first + _CHUNK]
            values = self.control.store.multi_get([_key(self.request, slot) for slot in slots])
            for slot, value in zip(slots, values, strict=True):
                if value.startswith(b"{"):
                    self.results.setdefault(self._episode(slot), EvaluationResult.from_json(value))
                elif has_ended[value.decode()]:
                    self.retried_episodes.append(self._episode(slot))
                else:
                    still_open.append(slot)
        self._open = still_open
        if len(self.retried_episodes) > retried:
            self.control.put_json(_key(self.request, "retried"), self.retried_episodes)
        return not self.missing_count

    def _episode(self, slot: int) -> int:
        count = self.request.episodes
        return slot if slot < count else self.retried_episodes[slot - count]


class _InstanceEnded(dict[str, bool]):
    """Whether worker instances have ended; queries the control plane once per instance."""

    def __init__(self, control: ControlClient) -> None:
        super().__init__()
        self._control = control

    def __missing__(self, instance_id: str) -> bool:
        self[instance_id] = self._control.instance_has_ended(instance_id)
        return self[instance_id]


def _counter(request: EvaluationRequest) -> str:
    return f"evaluation/{request.number}"


def _key(request: EvaluationRequest, name: str | int) -> str:
    return f"{_counter(request)}/{name}"
