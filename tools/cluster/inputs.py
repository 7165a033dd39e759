"""Inputs of the prediction for a cluster: value, meaning and source of each."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_webrl.config.schema import Config
from megatron_webrl.placement.cost_model import EngineCosts
from megatron_webrl.placement.hardware import Card, Rates
from megatron_webrl.placement.memory_estimate import DTYPE_BYTES
from megatron_webrl.placement.model_shape import ModelShape
from megatron_webrl.placement.placement_table import find_model_config
from megatron_webrl.placement.prediction import EpisodeLengths, predict_training

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
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r} is no number")
            if not math.isfinite(value):
                raise ValueError(f"{field.name}={value} is not finite")
            if field.type == "int" and value != int(value):
                raise ValueError(f"{field.name}={value} is no whole number")
            if not value >= low:
                raise ValueError(f"{field.name}={value} is below {low:g}")
        if self.batch % self.group_size:
            raise ValueError(f"batch={self.batch} is no multiple of group_size={self.group_size}")
        if not 0 < self.success < 1:
            raise ValueError(f"success={self.success} is not between 0 and 1")
        if self.medium_share + self.hard_share > 1:
            raise ValueError(
                f"medium_share={self.medium_share} and hard_share={self.hard_share} are more than all tasks"
            )


def with_values(inputs: SimulationInputs, values: dict[str, Any]) -> SimulationInputs:
    """The inputs with some values replaced. Raises ValueError for unknown names and values out of range."""
    types = {field.name: field.type for field in dataclasses.fields(inputs)}
    if unknown := sorted(set(values) - set(types)):
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(types)}")
    whole = {
        name: int(value) if types[name] == "int" and isinstance(value, float) and value.is_integer() else value
        for name, value in values.items()
    }
    return dataclasses.replace(inputs, **whole)


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
    return with_values(
        inputs,
        {
            "token_seconds": alone,
            "token_seconds_per_request": (together - alone) / OTHER_REQUESTS,
            "prefill_tokens_per_second": inputs.prompt / engine.prefill(inputs.prompt, 0),
            "train_tokens_per_second": predict_training(
                config, description, rates, EpisodeLengths()
            ).tokens_per_second_per_gpu,
            "weights_gb": DTYPE_BYTES[config.engine_dtype] * model.counts.total / 1e9,
        },
    )


def load(file: Path | None, assignments: list[str], inputs: SimulationInputs | None = None) -> SimulationInputs:
    """Defaults, overridden by a YAML file, then by `name=value` assignments. Raises ValueError, OSError."""
    inputs = inputs or SimulationInputs()
    if file is not None:
        try:
            content = yaml.safe_load(file.read_text())
        except yaml.YAMLError as error:
            raise ValueError(f"{file} is no YAML: {str(error).splitlines()[0]}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{file} is no mapping of names to values")
        inputs = with_values(inputs, content)
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"{assignment!r} is not name=value")
        try:
            values[name] = float(text)
        except ValueError:
            raise ValueError(f"{assignment!r}: {text!r} is no number") from None
    return with_values(inputs, values)
