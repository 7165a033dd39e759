"""Evaluations: requests to the workers, results of episodes, statistics, and the files of a run.

The requester puts one EvaluationRequest at a time under REQUEST_KEY of the control service. Its episodes are a queue,
evaluation/<number>, which workers claim and close with the results. Those of a worker that is lost or was
restarted are returned, and claimed again.

Success is a share of all requested episodes, of those whose website was reached, and of those with a verdict; episodes
without one (a blocked page, a crash, an error, a time limit) are counted by reason. docs/evaluation.md defines all.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_webrl.config.schema import EvaluationConfig
from megatron_webrl.types import BLOCKED, EPISODE_TIMEOUT, FAULT_OUTCOMES, TRAINABLE_OUTCOMES
from megatron_webrl.util import atomic_file, history
from megatron_webrl.util.atomic_file import continue_without
from megatron_webrl.util.clock import steady_time
from megatron_webrl.util.history import History
from megatron_webrl.util.text import metric_label

if TYPE_CHECKING:
    from megatron_webrl.control.client import ControlClient

REQUEST_KEY = "evaluation/request"
BLANK_IMAGES, GREEDY = "blank_images", "greedy"
VARIANTS = ("", BLANK_IMAGES, GREEDY)  # of an evaluation, in the order in which they run; "": as configured
FILE = "evaluations.jsonl"
Z_95 = 1.959963984540054  # half-width of a two-sided 95 % interval of the normal distribution, in standard deviations
BOOTSTRAP_RESAMPLES = 10_000
_RESAMPLES_AT_ONCE = 100  # in memory
STEP_LIMITS = (5, 8, 10, 15, 20, 30, 50)


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
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens

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
    number: int,
    kind: str,
    variant: str,
    indices: Sequence[int],
    settings: EvaluationConfig,
    version: int,
    exclusive: bool,
) -> EvaluationRequest:
    """The request of a variant for the held-out tasks `indices`, a range. Greedy: one episode of each task."""
    if variant == GREEDY:
        settings = replace(settings, samples=1, temperature=0.0, top_p=1.0, top_k=0)
    return EvaluationRequest(
        number, kind, len(indices), settings.samples, settings.temperature, version, exclusive, variant, indices[0],
        settings.top_p, settings.top_k,
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
    votes_differ: bool | None = None  # the judge's; None without several votes
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
        for worker in filter(self.control.instance_has_ended, {worker for _, worker in queue["open"]}):
            lost = [episode for episode, owner in queue["open"] if owner == worker]
            self.control.run("give_back", name, worker, lost)
        return not self.missing_count


def wilson_interval(fraction: float, trials: int) -> tuple[float, float] | None:
    """The 95 % interval of a probability, given the observed `fraction` of `trials`; None without trials. Score
    interval of E. B. Wilson, Probable Inference (1927): all p with |fraction - p| <= Z sqrt(p (1 - p) / trials).
    """
    if not trials:
        return None
    spread = Z_95 * Z_95 / trials
    centre = (fraction + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (fraction * (1 - fraction) + spread / 4)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def share_of(hits: Sequence[bool]) -> dict[str, Any]:
    """The share of hits, None without any trial, with its `wilson_interval` and the number of trials."""
    share = sum(hits) / len(hits) if hits else None
    interval = None if share is None else list(wilson_interval(share, len(hits)) or ())
    return {"share": share, "interval": interval, "of": len(hits)}


def pass_at(k: int, samples: int, successes: int) -> float:
    """Probability that `k` of the `samples`, drawn without replacement, include a success: 1 - C(n - c, k) / C(n, k),
    as in Chen et al. (Evaluating Large Language Models Trained on Code, 2021, eq. 1). ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples of a task")
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def aggregate_results(
    request: EvaluationRequest, results: Iterable[EvaluationResult], seconds: float, restart_epoch: int = 0
) -> dict[str, Any]:
    """A line of evaluations.jsonl: success with its interval in total, by environment, difficulty and source. Episodes
    without a result count as missing; `seconds` is the wall-clock time of the evaluation.

    Successes as a share: `success_of_all` of all requested episodes, `success_of_reached` of all but those that their
    website blocked, `success_of_judged` of those with a verdict, `success_past_first_step` of those of them
    that did not fail at their first step, `published` those of published_denominators. A rate of no episode is None.
    """
    results = list(results)
    outcomes = Counter(result.outcome for result in results)
    reached = request.episodes - outcomes[BLOCKED]
    voted = [result.votes_differ for result in results if result.votes_differ is not None]
    versions = [version for result in results if result.versions for version in result.versions]
    return {
        "kind": request.kind,
        "variant": request.variant,
        "version": request.version,
        "versions": [min(versions), max(versions)] if versions else None,
        "restart_epoch": restart_epoch,
        "first_task": request.first_task,
        "tasks_requested": request.tasks,
        "samples": request.samples,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        **_statistics(results),
        "missing": request.episodes - len(results),
        "success_of_all": outcomes["success"] / max(1, request.episodes),
        "success_of_reached": outcomes["success"] / reached if reached else None,
        "published": {
            name: {"success": outcomes["success"] / count if count else None, "episodes": count}
            for name, count in published_denominators(outcomes).items()
        },
        "evaluators": sorted({result.evaluator for result in results if result.evaluator}),
        "judge_dollars": sum(result.judge_dollars for result in results),
        "votes_differ": sum(voted) / len(voted) if voted else None,
        "not_recorded_requests": sum(result.not_recorded_requests for result in results),
        "pass_at": _pass_at(results, request.samples),
        "success_within": _success_within(results),
        "wall_seconds": seconds,
        "finished_at": steady_time(),
        "environments": _statistics_by(results, lambda result: result.environment),
        "difficulties": _statistics_by(results, lambda result: result.difficulty),
        "sources": _statistics_by(results, lambda result: result.source),
    }


def published_denominators(outcomes: Mapping[str, int]) -> dict[str, int]:
    """The number of episodes that released code divides the successes by. `outcomes`: of the episodes with a result.

    Both codes leave out an episode that its website blocked or that a crash ended; an episode without a verdict for
    another reason is a failure. Of a time limit this holds in AsyncWebRL; WebGym leaves it out. Missing episodes are
    like their stragglers: left out.
    """
    returned = sum(count for name, count in outcomes.items() if name not in (BLOCKED, *FAULT_OUTCOMES))
    return {"webgym": returned - outcomes.get(EPISODE_TIMEOUT, 0), "async_webrl": returned}


def evaluation_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """MLflow metrics from a line of evaluations.jsonl; those of a variant have its name in front."""
    prefix = f"evaluation/{line['variant']}" if line["variant"] else "evaluation"
    names = ("steps_mean", "response_tokens_mean", "seconds_mean", "success_of_all", "judge_dollars")
    metrics = {name: line[name] for name in (*names, "missing", "not_recorded_requests", "wall_seconds")}
    metrics |= {"episodes": line["episodes"], "no_verdict": sum(line["no_verdict"].values())}
    metrics |= {name: rate for name in ("success_of_reached", "votes_differ") if (rate := line[name]) is not None}
    if line["interval"] is not None:
        low, high = line["interval"]
        rates = {"": line["success_of_judged"], "_low": low, "_high": high}
        metrics |= {f"success_of_judged{end}": rate for end, rate in rates.items()}
    for name in ("pass_at", "success_within"):
        metrics |= {f"{name}/{number}": value for number, value in line[name].items()}
    for part in (line["environments"], line["difficulties"], line["sources"] if len(line["sources"]) > 1 else {}):
        rates = {metric_label(name): entry["success_of_judged"] for name, entry in part.items()}
        metrics |= {f"success_of_judged/{name}": rate for name, rate in rates.items() if rate is not None}
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}


def contrast(
    terms: Iterable[tuple[int, Mapping[str, Any], Sequence[EvaluationResult]]], seed: int = 0
) -> dict[str, Any] | None:
    """Weighted sum of the success of the same tasks in several evaluations, mean over tasks, with a 95 % interval.

    `terms`: weight, line and results of each evaluation, such as 1 of after and -1 of before for the gain. Of each task
    sum_e weight_e * success_e, where success_e is the mean of its samples. A task without a verdict in one of them is
    left out; None if no task is left. Paired bootstrap over the tasks (Efron, Bootstrap Methods, 1979): 2.5th to 97.5th
    percentile of BOOTSTRAP_RESAMPLES means.

    `of_all` is the same by intention to treat: over all requested tasks, and an episode without a verdict or without a
    result is a failure.
    """
    terms = list(terms)
    weighted = [(weight, _successes(results)) for weight, _, results in terms]
    judged = sorted(set.intersection(*(set(successes) for _, successes in weighted)))
    if not judged:
        return None
    values = [sum(weight * float(np.mean(successes[task])) for weight, successes in weighted) for task in judged]
    requested = set.intersection(
        *(set(range(line["first_task"], line["first_task"] + line["tasks_requested"])) for _, line, _ in terms)
    )
    of_all = dict.fromkeys(sorted(requested), 0.0)
    for weight, line, results in terms:
        for result in results:
            if result.outcome == "success" and result.index in of_all:
                of_all[result.index] += weight / line["samples"]
    return _paired_mean(values, seed) | {"of_all": _paired_mean([*of_all.values()], seed)}


def _paired_mean(values: Sequence[float], seed: int) -> dict[str, Any]:
    """Mean over tasks with its bootstrap interval, whatever their order."""
    each, rng = np.sort(np.array(values)), np.random.default_rng(seed)
    draws = (
        rng.integers(0, len(each), (_RESAMPLES_AT_ONCE, len(each)))
        for _ in range(BOOTSTRAP_RESAMPLES // _RESAMPLES_AT_ONCE)
    )
    means = np.concatenate([each[draw].mean(axis=1) for draw in draws])
    low, high = np.percentile(means, [2.5, 97.5])
    return {"mean": float(each.mean()), "interval": [float(low), float(high)], "tasks": len(each)}


def _statistics(results: Sequence[EvaluationResult]) -> dict[str, Any]:
    judged = [result for result in results if result.has_verdict]
    success = sum(result.outcome == "success" for result in judged) / len(judged) if judged else None
    # Samples of one task are correlated: counting tasks makes the interval too wide rather than too narrow.
    interval = wilson_interval(success, len({result.index for result in judged})) if success is not None else None
    steps = sum(result.steps for result in judged)
    past_first = [result for result in judged if result.outcome == "success" or result.steps > 1]
    return {
        "success_of_judged": success,
        "interval": list(interval) if interval else None,
        "success_past_first_step": (
            sum(result.outcome == "success" for result in past_first) / len(past_first) if past_first else None
        ),
        "episodes": len(judged),
        "no_verdict": dict(sorted(Counter(result.outcome for result in results if not result.has_verdict).items())),
        "steps_mean": steps / max(1, len(judged)),
        "response_tokens_mean": sum(result.response_tokens for result in judged) / max(1, steps),
        "seconds_mean": sum(result.seconds for result in judged) / max(1, len(judged)),
    }


def _success_within(results: Sequence[EvaluationResult]) -> dict[str, float]:
    """Share of the episodes with a verdict that succeed in at most 5, 8, ... steps, by this limit."""
    judged = [result for result in results if result.has_verdict]
    steps = np.array([result.steps for result in judged if result.outcome == "success"])
    return {str(limit): float((steps <= limit).sum()) / len(judged) for limit in STEP_LIMITS} if judged else {}


def _statistics_by(
    results: Sequence[EvaluationResult], name: Callable[[EvaluationResult], str]
) -> dict[str, dict[str, Any]]:
    parts: dict[str, list[EvaluationResult]] = defaultdict(list)
    for result in results:
        parts[name(result)].append(result)
    return {key: _statistics(parts[key]) for key in sorted(parts)}


def _successes(results: Iterable[EvaluationResult]) -> dict[tuple[str, str], list[bool]]:
    """For each task with verdicts, by source and id: whether each sample succeeded."""
    successes: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for result in results:
        if result.has_verdict:
            successes[result.source, result.task].append(result.outcome == "success")
    return successes


def _pass_at(results: Sequence[EvaluationResult], samples: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... and `samples`, over the tasks with at least k verdicts."""
    tasks = _successes(results).values()
    ks = sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})
    values_by_k = {k: [pass_at(k, len(each), sum(each)) for each in tasks if len(each) >= k] for k in ks}
    return {str(k): sum(values) / len(values) for k, values in values_by_k.items() if values}


NAMES = tuple(evaluation_name(kind, variant) for variant in VARIANTS for kind in ("before", "after"))
GAINS: dict[str, dict[str, int]] = {
    "gain": {"after": 1, "before": -1},
    "blind_gain": {"after_blank_images": 1, "before_blank_images": -1},
    "seeing_gain": {"after": 1, "before": -1, "after_blank_images": -1, "before_blank_images": 1},
    "image_gain": {"after": 1, "after_blank_images": -1},
    "greedy_gain": {"after_greedy": 1, "before_greedy": -1},
}
"""Contrasts of summary.json: the weights of evaluations.

`seeing_gain`, a difference of differences, is what the policy gained beyond what it gained with blank images. It is
positive, too, when a habit that needs no screenshot goes and what the policy saw before counts for more: it does not
show that something was learned to be seen.
"""


class EvaluationLog:
    """Writes the evaluations of a run. Lines for which the disk has no room wait in memory (History)."""

    def __init__(self, folder: Path, version: int | None = None, guard: Callable[[], object] = lambda: None) -> None:
        """Cut off the lines of versions after `version`, from which a run resumes; None keeps all. Raises OSError.

        `guard`: as of History.
        """
        self.folder, path = folder, folder / FILE
        kept = None if version is None else history.kept_size(path, lambda line: line["version"] <= version)
        self.history = History(path, kept, guard)

    def append(self, line: dict[str, Any], results: Sequence[EvaluationResult]) -> None:
        """Add an evaluation; its episodes are written before its line, so that a reader of the line finds them."""
        path = _episodes_path(self.folder, line)
        with continue_without(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.fsync(self.folder)  # the name of a new folder
            atomic_file.write_text(path, "".join(json.dumps(asdict(result)) + "\n" for result in results))
        self.history.append(line)
        with suppress(OSError):  # which the history has logged
            self.history.sync()


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """All evaluations of a run, oldest first."""
    return list(history.read(folder / FILE))


def read_results(folder: Path, line: dict[str, Any]) -> list[EvaluationResult]:
    """The single episodes of an evaluation."""
    return [
        EvaluationResult.from_json(json.loads(text)) for text in _episodes_path(folder, line).read_text().splitlines()
    ]


def summarise(folder: Path, version: int) -> dict[str, Any]:
    """The field `evaluation` of summary.json: a line for each of NAMES and a contrast for each of GAINS; None where an
    evaluation is missing. Those before training are of the initial policy, the others of `version`, the run's last one.
    """
    lines = read_evaluations(folder)
    first = next((line["version"] for line in lines if line["kind"] == "before"), None)
    found: dict[str, Any] = dict.fromkeys((*NAMES, *GAINS))
    for line in lines:
        name = evaluation_name(line["kind"], line["variant"])
        if name in NAMES and line["version"] == (first if line["kind"] == "before" else version):
            found[name] = line
    results = {}
    for name in NAMES:
        with suppress(FileNotFoundError):  # episodes for which the disk had no room
            if found[name] is not None:
                results[name] = read_results(folder, found[name])
    for gain, weights in GAINS.items():
        if results.keys() >= weights.keys():
            found[gain] = contrast((weight, found[name], results[name]) for name, weight in weights.items())
    return found


def _episodes_path(folder: Path, line: dict[str, Any]) -> Path:
    name = evaluation_name(line["kind"], line["variant"])
    return folder / "evaluations" / f"version-{line['version']:06d}-{name}.jsonl"
