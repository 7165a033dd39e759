"""Request an evaluation, distribute its episodes over the workers and collect the results, via the control service.

The requester puts one EvaluationRequest at a time under REQUEST_KEY. Its episodes are the slots of a counter,
evaluation/<number>, which workers claim and close with the results. Those of a worker that is lost or was restarted are
returned, and claimed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_webrl.config.schema import EvaluationConfig
from megatron_webrl.control.client import ControlClient
from megatron_webrl.types import TRAINABLE_OUTCOMES

REQUEST_KEY = "evaluation/request"
BLANK_IMAGES, GREEDY = "blank_images", "greedy"
VARIANTS = ("", BLANK_IMAGES, GREEDY)  # of an evaluation, in the order in which they run; "": as configured


@dataclass(frozen=True)
class EvaluationRequest:
    """An evaluation: `samples` episodes of each of `tasks` held-out tasks, from `first_task` on."""

    number: int  # from 1, unique within the job
    kind: str  # "before", "after", "during" or "checkpoint"
    tasks: int
    samples: int
    temperature: float
    version: int  # policy version at the time of the request
    exclusive: bool = False  # no groups run meanwhile, so that every token comes from this version
    variant: str = ""  # one of VARIANTS
    first_task: int = 0

    @property
    def name(self) -> str:
        """Kind and variant in one word, such as before_blank_images."""
        return evaluation_name(self.kind, self.variant)

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return self.tasks * self.samples

    def task_and_sample(self, episode: int) -> tuple[int, int]:
        """Task and sample of an episode, 0..episodes-1: first one sample of every task, then the next."""
        return self.first_task + episode % self.tasks, episode // self.tasks


def evaluation_name(kind: str, variant: str) -> str:
    """Kind and variant in one word, such as before_blank_images."""
    return f"{kind}_{variant}" if variant else kind


def requested_variants(settings: EvaluationConfig) -> list[str]:
    """The variants in which a policy is evaluated. At temperature 0 the evaluation as configured is greedy."""
    on = {"": True, BLANK_IMAGES: settings.blank_images, GREEDY: settings.greedy and settings.temperature > 0}
    return [variant for variant in VARIANTS if on[variant]]


def make_request(
    number: int, kind: str, variant: str, indices: Sequence[int], settings: EvaluationConfig, version: int,
    exclusive: bool,
) -> EvaluationRequest:  # fmt: skip
    """The request of a variant for the held-out tasks `indices`, a range. Greedy: one episode of each task."""
    greedy = variant == GREEDY
    return EvaluationRequest(
        number, kind, len(indices), 1 if greedy else settings.samples, 0.0 if greedy else settings.temperature, version,
        exclusive, variant, indices[0],
    )  # fmt: skip


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
    def from_json(cls, fields: Mapping[str, Any]) -> EvaluationResult:
        """The result of which `fields` are the JSON form of asdict(result)."""
        versions = fields["versions"]
        return cls(**{**fields, "versions": tuple(versions) if versions else None})


def next_request_number(control: ControlClient) -> int:
    """A number that no other request of the job has."""
    return control.add("evaluation/request_count", 1)


def submit_request(control: ControlClient, request: EvaluationRequest) -> None:
    """Let the workers run an evaluation; an earlier request is replaced."""
    withdraw_request(control)
    control.run("append", queue_name(request), [[episode, None] for episode in range(request.episodes)])
    control.put_json(REQUEST_KEY, asdict(request))


def withdraw_request(control: ControlClient) -> None:
    """Withdraw the current request, if any; workers abort its running episodes."""
    if (request := current_request(control)) is not None:
        control.put_json(REQUEST_KEY, None)
        control.run("remove_queue", queue_name(request))


def current_request(control: ControlClient) -> EvaluationRequest | None:
    """The current request, if any."""
    fields = control.get_json(REQUEST_KEY)
    return EvaluationRequest(**fields) if fields is not None else None


def submit_result(control: ControlClient, request: EvaluationRequest, result: EvaluationResult, episode: int) -> None:
    """Worker: store the result of a claimed episode; the first one counts."""
    control.run("close", queue_name(request), episode, asdict(result))


def queue_name(request: EvaluationRequest) -> str:
    """Name of the queue of its episodes."""
    return f"evaluation/{request.number}"


class ResultCollector:
    """The requester's side of one request. Call `poll` until it returns that all results have arrived."""

    def __init__(self, control: ControlClient, request: EvaluationRequest) -> None:
        self.control, self.request = control, request
        self.results: dict[int, EvaluationResult] = {}  # by episode
        self.has_started = False  # whether a worker had claimed an episode at the last poll

    @property
    def missing_count(self) -> int:
        """Episodes without a result."""
        return self.request.episodes - len(self.results)

    def poll(self) -> bool:
        """Read new results, and return the episodes of lost workers. Does not wait."""
        name = queue_name(self.request)
        queue = self.control.run("read_queue", name, len(self.results))
        self.has_started = queue["claimed"] > 0
        self.results |= {episode: EvaluationResult.from_json(result) for episode, result in queue["values"]}
        for worker in self.control.ended_instances({worker for _, worker in queue["open"]}):
            lost = [episode for episode, owner in queue["open"] if owner == worker]
            self.control.run("give_back", name, worker, lost)
        return not self.missing_count
