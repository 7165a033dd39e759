"""Predict clusters that were never measured: simulate each split of their GPUs from the inputs of docs/scaling.md."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_webrl.config.schema import Config
from megatron_webrl.placement.cost_model import EngineCosts
from megatron_webrl.placement.hardware import Card, Rates
from megatron_webrl.placement.memory_estimate import DTYPE_BYTES
from megatron_webrl.placement.model_shape import ModelShape
from megatron_webrl.placement.placement_table import find_model_config
from megatron_webrl.placement.prediction import EpisodeLengths, predict_training
from tools.cluster.simulation import (
    EpisodeWork,
    GroupWork,
    SimulationResult,
    SimulationSettings,
    StepWork,
    UpdateTimes,
    simulate,
)

STEP_LIMITS = (10, 20, 30)  # by difficulty
RECOMMENDATION_MARGIN = 0.05  # splits within this fraction of the fastest count as equally fast
OTHER_REQUESTS = 128  # by which the cost model's decoding is made linear in the number of requests
ASYNC_WEB_RL = "AsyncWebRL, arXiv 2606.05597: "
WEBGYM = "WebGym, arXiv 2601.02439: "
SILYBENCH = "silybench-data, Qwen3-8B in bfloat16 on one H100, vLLM 0.30: "
ASSUMED = "assumed"


def _input(default: float, meaning: str, source: str, low: float = 0.0) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning, "source": source, "low": low})


@dataclass(frozen=True)
class SimulationInputs:
    """Inputs of a prediction. Sizes are per node, so that batch and agents grow with the cluster, or per episode."""

    gpus: int = _input(8, "GPUs of a node", ASYNC_WEB_RL + "8 nodes of 8 H100", 2)
    cores: int = _input(43, "cores of a node for browsers", WEBGYM + "128 CPUs beside 24 H100", 1)
    batch: int = _input(16, "trajectories of a batch, a node", ASYNC_WEB_RL + "128 on 8 nodes", 1)
    group_size: int = _input(8, "episodes of a group", ASYNC_WEB_RL + "8", 2)
    agents: int = _input(160, "concurrent episodes at most, a node", ASYNC_WEB_RL + "1,280 on 8 nodes", 1)
    max_staleness: int = _input(2, "versions", ASYNC_WEB_RL + "2")
    drop_zero_variance: int = _input(
        1, "1: groups without variance are dropped and replaced; 0: they are trained", ASYNC_WEB_RL + "dropped"
    )
    training_passes: float = _input(
        10 / 3,
        "passes of training over each token",
        ASYNC_WEB_RL + "3 epochs and a forward pass for the proximal policy",
        0.1,
    )
    success: float = _input(0.454, "share of episodes that succeed", ASYNC_WEB_RL + "45.4 %")
    success_concentration: float = _input(
        1.0, "sum of both parameters of the Beta distribution of tasks' success; small: tasks are easy or hopeless",
        ASSUMED, 0.01,
    )  # fmt: skip
    steps_success: float = _input(5.1, "steps of a success, geometric up to the limit", ASYNC_WEB_RL + "5.1", 1)
    medium_share: float = _input(
        0.15, "share of tasks with a limit of 20 steps", "follows from 12.5 steps of a failure"
    )
    hard_share: float = _input(0.05, "share with a limit of 30, others of 10", "the same")
    prompt: float = _input(
        2500, "tokens of a prompt that the engine computes",
        "a screenshot of 1280x768 is 960 tokens; text and the tool's schema assumed",
    )  # fmt: skip
    response: float = _input(240, "tokens of a response, mean", ASYNC_WEB_RL + "240, later 180", 1)
    response_sigma: float = _input(0.5, "of their logarithm", ASSUMED)
    token_seconds: float = _input(
        0.00687, "of a response token, engine with one request", SILYBENCH + "1,024 tokens in 7.03 s, alone", 1e-6
    )
    token_seconds_per_request: float = _input(
        0.000045,
        "more for each other request",
        SILYBENCH + "9.6, 12.3 and 18.6 ms a token with 64, 128 and 256 requests",
    )
    prefill_tokens_per_second: float = _input(
        35_000, "prompt tokens a second", SILYBENCH + "2,048 in 61 ms, and 80 requests of 1,024 and 128 tokens", 1
    )
    train_tokens_per_second: float = _input(
        6514, "tokens a second and GPU, a forward and a backward pass", "torchtitan, Llama 3.1 8B on 128 H100", 1
    )
    weights_gb: float = _input(17.5, "GB of weights", "Qwen3-VL-8B in bfloat16", 0.01)
    link_gb_per_second: float = _input(
        40.0,
        "GB/s that a GPU takes or gives of them",
        "NIC of 400 Gbit/s at 0.8; NeMo-RL moves 4B in 0.21 to 0.34 s",
        0.01,
    )
    browser_seconds: float = _input(
        4.0,
        "seconds of a browser step or a reset, median; log-normal",
        WEBGYM + "waits 3 s after navigation and 1 s a step",
    )
    browser_sigma: float = _input(
        1.0, "of their logarithm", "tasks.latency of the sites: one in twenty takes 5 medians"
    )
    browser_limit: float = _input(120.0, "seconds of a step at most", ASYNC_WEB_RL + "operation limit 120 s", 0.001)
    browser_cpu_seconds: float = _input(0.079, "core-seconds of a step", "docs/benchmarks.md, Browsers: measured here")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, low = getattr(self, field.name), field.metadata["low"]
            if not low <= value < math.inf or (field.type == "int" and value != int(value)):
                raise ValueError(f"{field.name}={value} is no {field.type} of at least {low:g}")
        if self.batch % self.group_size:
            raise ValueError(f"batch={self.batch} is no multiple of group_size={self.group_size}")
        if not 0 < self.success < 1:
            raise ValueError(f"success={self.success} is not between 0 and 1")
        if self.medium_share + self.hard_share > 1:
            raise ValueError(
                f"medium_share={self.medium_share} and hard_share={self.hard_share} are more than all tasks"
            )


def from_cost_model(inputs: SimulationInputs, config: Config, card: Card) -> SimulationInputs:
    """The inputs with the speed of engines and trainer that the cost model of `webrl placement` gives a configuration.

    Raises ValueError for engines of several GPUs, which are not simulated, and what cannot be predicted.
    """
    description = find_model_config(config)
    if description is None:
        raise ValueError(f"model.path={config.model.path} has no config.json, and is not named as a released size")
    if config.ranks_per_engine > 1:
        raise ValueError(f"rollout.tensor_parallel x pipeline_parallel = {config.ranks_per_engine} GPUs; set both to 1")
    model, rates = ModelShape.from_description(description), Rates.of_card(card)
    engine, context = EngineCosts(config, model, rates), inputs.prompt + inputs.response / 2
    alone, together = (engine.decode(requests, context) for requests in (1, 1 + OTHER_REQUESTS))
    training = predict_training(config, description, rates, EpisodeLengths())
    return dataclasses.replace(
        inputs,
        token_seconds=alone,
        token_seconds_per_request=(together - alone) / OTHER_REQUESTS,
        prefill_tokens_per_second=inputs.prompt / engine.prefill(inputs.prompt, 0),
        train_tokens_per_second=training.tokens_per_second_per_gpu,
        weights_gb=DTYPE_BYTES[config.engine_dtype] * model.counts.total / 1e9,
    )


def assign(inputs: SimulationInputs, assignments: Sequence[str]) -> SimulationInputs:
    """The inputs with `name=value` assignments. Raises ValueError for unknown names and values out of range."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name not in vars(inputs):
            raise ValueError(f"{name!r} is no input; docs/scaling.md lists them")
        try:
            values[name] = int(text) if text.isdigit() else float(text)
        except ValueError:
            raise ValueError(f"{assignment!r} is not name=value with a number") from None
    return dataclasses.replace(inputs, **values)


@dataclass(frozen=True)
class GpuSplit:
    """GPUs of all nodes by role; `colocated`: all GPUs alternate between both roles."""

    nodes: int
    engines: int
    trainers: int
    colocated: bool = False

    def __str__(self) -> str:
        return "all, colocated" if self.colocated else f"{self.engines}:{self.trainers}"


@dataclass(frozen=True)
class SimulationLength:
    """Length of a simulated run."""

    updates: int
    warmup_updates: int


FULL = SimulationLength(updates=20, warmup_updates=4)
QUICK = SimulationLength(updates=6, warmup_updates=2)


@dataclass(frozen=True)
class ClusterPrediction:
    """A simulated cluster."""

    split: GpuSplit
    mode: str
    stepping: str
    max_staleness: int
    result: SimulationResult


@dataclass(frozen=True)
class RandomWorkload:
    """Groups of tasks, each with a success rate of its own; a failed episode takes all steps of its limit.

    With `drop_zero_variance` a group without a success or without a failure is dropped.
    """

    inputs: SimulationInputs

    def draw(self, ticket: int, rng: np.random.Generator) -> GroupWork:
        """The next group."""
        given = self.inputs
        rate = rng.beta(given.success * given.success_concentration, (1 - given.success) * given.success_concentration)
        limit = STEP_LIMITS[
            int(rng.choice(3, p=(1 - given.medium_share - given.hard_share, given.medium_share, given.hard_share)))
        ]
        succeeds = rng.random(given.group_size) < rate
        lengths = np.where(succeeds, np.minimum(rng.geometric(1 / given.steps_success, given.group_size), limit), limit)
        episodes = tuple(self._episode(rng, int(length)) for length in lengths)
        if not given.drop_zero_variance or 0 < succeeds.sum() < given.group_size:
            return GroupWork(episodes)
        return GroupWork(episodes, "all_succeeded" if succeeds.all() else "all_failed")

    def _episode(self, rng: np.random.Generator, length: int) -> EpisodeWork:
        given = self.inputs
        waits = given.browser_seconds * np.exp(given.browser_sigma * rng.standard_normal(length + 1))
        waits = np.minimum(waits, given.browser_limit).tolist()
        center = math.log(given.response) - given.response_sigma**2 / 2
        responses = np.exp(center + given.response_sigma * rng.standard_normal(length)).round().astype(int).tolist()
        prompt = round(given.prompt)
        steps = tuple(
            StepWork(request_seconds(given, response), wait, prompt, response, given.browser_cpu_seconds)
            for response, wait in zip(responses, waits[1:], strict=True)
        )
        return EpisodeWork(waits[0], steps)


def request_seconds(inputs: SimulationInputs, response: float) -> float:
    """Seconds of a request in an engine without other requests."""
    return inputs.prompt / inputs.prefill_tokens_per_second + response * inputs.token_seconds


def serial_share(inputs: SimulationInputs) -> float:
    """Fraction of a mean request that an engine does one request at a time: prefill, and a little of every token."""
    serial = inputs.prompt / inputs.prefill_tokens_per_second + inputs.response * inputs.token_seconds_per_request
    return min(1.0, serial / request_seconds(inputs, inputs.response))


def colocated_split(nodes: int, gpus: int) -> GpuSplit:
    """All GPUs generate, then all train, as a synchronous loop can; switching costs nothing."""
    return GpuSplit(nodes, nodes * gpus, nodes * gpus, colocated=True)


def make_settings(
    inputs: SimulationInputs, split: GpuSplit, mode: str, stepping: str, length: SimulationLength
) -> SimulationSettings:
    """Settings with one engine per GPU and the agents spread over the engines."""
    return SimulationSettings(
        mode=mode,
        stepping=stepping,
        max_staleness=int(inputs.max_staleness),
        groups_per_update=split.nodes * inputs.batch // inputs.group_size,
        groups_in_flight=math.ceil(split.nodes * inputs.agents / inputs.group_size / split.engines),
        engines=split.engines,
        updates=length.updates,
        warmup_updates=length.warmup_updates,
        serial=serial_share(inputs),
        nodes=split.nodes,
        cores=int(inputs.cores),
    )


def make_update_times(inputs: SimulationInputs, split: GpuSplit) -> UpdateTimes:
    """Training is spread evenly; each trainer GPU sends the weights to its share of the engines, one by one."""
    receivers = 1.0 if split.colocated else max(1.0, split.engines / split.trainers)
    sync = receivers * inputs.weights_gb / inputs.link_gb_per_second
    return UpdateTimes(inputs.training_passes / (inputs.train_tokens_per_second * split.trainers), sync, sync)


def predict_cluster(
    inputs: SimulationInputs, split: GpuSplit, mode: str = "async", stepping: str = "free",
    length: SimulationLength = FULL,
) -> ClusterPrediction:  # fmt: skip
    """Simulate one cluster."""
    settings = make_settings(inputs, split, mode, stepping, length)
    result = simulate(settings, RandomWorkload(inputs), [make_update_times(inputs, split)])
    return ClusterPrediction(split, mode, stepping, settings.staleness, result)


def predict_splits(inputs: SimulationInputs, nodes: int, length: SimulationLength) -> list[ClusterPrediction]:
    """Every split of a node's GPUs in mode async, the same on all nodes, with both roles on every node."""
    splits = (
        GpuSplit(nodes, nodes * engines, nodes * (int(inputs.gpus) - engines))
        for engines in range(int(inputs.gpus) - 1, 0, -1)
    )
    return [predict_cluster(inputs, split, length=length) for split in splits]


def recommended(predictions: Sequence[ClusterPrediction]) -> ClusterPrediction:
    """The split with the most engines among those within RECOMMENDATION_MARGIN of the highest throughput.

    Response and page times are the least certain inputs: spare engines tolerate errors in them and cost nothing here.
    """
    most = max(one.result.per_hour for one in predictions)
    return max(
        (one for one in predictions if one.result.per_hour >= (1 - RECOMMENDATION_MARGIN) * most),
        key=lambda one: one.split.engines,
    )


INPUT_VARIANTS: tuple[dict[str, Any], ...] = (
    {}, {"browser_seconds": 1.0}, {"browser_seconds": 16.0}, {"response": 960}, {"prompt": 7500}, {"max_staleness": 1},
    {"max_staleness": 4}, {"batch": 32}, {"drop_zero_variance": 0},
)  # fmt: skip
BEGIN_MARKER = "<!-- begin: generated by tools.simulate_cluster -->"
END_MARKER = "<!-- end: generated by tools.simulate_cluster -->"

SPLIT_COLUMNS = (
    "engines:trainers", "trajectories/h", "staleness", "max staleness", "engines idle", "engine load", "trainer waits",
    "tokens wasted",
)  # fmt: skip
MODE_COLUMNS = ("mode", "GPUs", "trajectories/h", "async / this", "engines idle", "trainer waits")
VARIANT_COLUMNS = (
    "changed input", "split", "trajectories/h", "staleness", "engine load", "trainer waits", "sync, colocated",
    "async / sync",
)  # fmt: skip


def split_row(one: ClusterPrediction, best: ClusterPrediction) -> list[str]:
    """Table row of a split in mode async."""
    found, mark = one.result, "**" * (one is best)
    shares = (found.engines_idle, found.engines_load, found.waiting, found.wasted)
    return [
        f"{mark}{one.split}{mark}", f"{mark}{found.per_hour:,.0f}{mark}", f"{found.staleness:.2f}",
        str(found.staleness_max), *map(_percent, shares),
    ]  # fmt: skip


def mode_row(one: ClusterPrediction, best: ClusterPrediction) -> list[str]:
    """Table row of a mode, compared with the recommended split in mode async."""
    found, lockstep = one.result, ", lockstep" * (one.stepping == "lockstep")
    return [
        f"`{one.mode}`{lockstep}", str(one.split), f"{found.per_hour:,.0f}",
        f"{best.result.per_hour / found.per_hour:.1f}", _percent(found.engines_idle), _percent(found.waiting),
    ]  # fmt: skip


def variant_row(inputs: SimulationInputs, nodes: int, change: Mapping[str, Any], length: SimulationLength) -> list[str]:
    """Table row of changed inputs: the recommended split, and the free-running loop of colocated roles."""
    given = dataclasses.replace(inputs, **change)
    one = recommended(predict_splits(given, nodes, length))
    found = one.result
    sync = predict_cluster(given, colocated_split(nodes, int(given.gpus)), "sync", length=length).result
    return [
        ", ".join(f"{name}={value:g}" for name, value in change.items()) or "none", str(one.split),
        f"{found.per_hour:,.0f}", f"{found.staleness:.2f}", _percent(found.engines_load), _percent(found.waiting),
        f"{sync.per_hour:,.0f}", f"{found.per_hour / sync.per_hour:.1f}",
    ]  # fmt: skip


def input_rows(inputs: SimulationInputs) -> list[list[str]]:
    """Table rows of all inputs."""
    return [
        [f"`{f.name}`", _plain(getattr(inputs, f.name)), f.metadata["meaning"], f.metadata["source"]]
        for f in dataclasses.fields(inputs)
    ]


def make_report(
    inputs: SimulationInputs, nodes: Sequence[int], changes: Sequence[Mapping[str, Any]], length: SimulationLength
) -> str:
    """The generated part of docs/scaling.md: all simulations as tables. Raises ValueError for changes out of range."""
    recommendations, parts = [], []
    for number in nodes:
        splits, gpus = predict_splits(inputs, number, length), number * inputs.gpus
        best = recommended(splits)
        parts.append(f"**{number} nodes, {gpus} GPUs, batches of {number * inputs.batch} trajectories, `async`**")
        parts.append(_table(SPLIT_COLUMNS, [split_row(one, best) for one in splits]))
        shared = colocated_split(number, int(inputs.gpus))
        others = (
            (best.split, "one_step_off", "free"), (best.split, "sync", "free"), (shared, "sync", "free"),
            (shared, "sync", "lockstep"),
        )  # fmt: skip
        modes = [predict_cluster(inputs, split, mode, stepping, length) for split, mode, stepping in others]
        parts.append(f"**{number} nodes, modes**")
        parts.append(_table(MODE_COLUMNS, [mode_row(one, best) for one in (best, *modes)]))
        recommendations.append(
            f"{number} nodes: {best.split.engines // number} GPUs of each node for engines, "
            f"{best.split.trainers // number} for the trainer ({best.result.per_hour:,.0f} trajectories an hour "
            "predicted)"
        )
    if changes:
        parts.append(f"**{nodes[0]} nodes, one input changed, each with its recommended split**")
        parts.append(_table(VARIANT_COLUMNS, [variant_row(inputs, nodes[0], change, length) for change in changes]))
    parts += ["**Inputs**", _table(("name", "value", "meaning", "source"), input_rows(inputs))]
    return "\n\n".join([textwrap.fill(f"Recommended: {'; '.join(recommendations)}.", 100), *parts])


def update_page(text: str, report: str) -> str:
    """The page with the text between the markers replaced. Raises ValueError without markers."""
    before, begin, rest = text.partition(BEGIN_MARKER)
    _, end, after = rest.partition(END_MARKER)
    if not begin or not end:
        raise ValueError(f"the page has no line {BEGIN_MARKER!r} with a line {END_MARKER!r} after it")
    return f"{before}{BEGIN_MARKER}\n\n{report}\n\n{END_MARKER}{after}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain(value: float) -> str:
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
