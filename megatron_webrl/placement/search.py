"""The search for settings that train more trajectories in the same time on the same GPUs."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_webrl.config.load import resolve_cluster_sizes
from megatron_webrl.config.schema import Config, check_combinations
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.hf_config import has_experts
from megatron_webrl.placement.hardware import Card, Rates
from megatron_webrl.placement.memory_estimate import (
    FILLED_BY_AUTO,
    GIB,
    check_memory,
    check_parallel_layout,
    estimate_memory,
)
from megatron_webrl.placement.placement import check_cluster
from megatron_webrl.placement.prediction import EpisodeLengths, predict_training
from megatron_webrl.placement.throughput import Prediction, predict

SIZES = (1, 2, 4, 8, 16, 32)
RECOMPUTE = ("none", "selective", "full")
SEQUENCE_SHARES = (0.5, 1.0, 1.5, 2.0, 3.0)  # tokens of a micro-batch, over rollout.max_model_len
STALENESS = (1, 2, 3, 4)
GROUPS_IN_FLIGHT = (3, 5, 8, 10, 12, 16, 24)
APPENDED_TURNS = 4
PROMPT_SPREAD, RESPONSE_SPREAD = 1.1, 4.0  # of the mean of a full window and of a response, that a shorter limit holds
SEARCH_UPDATES = 10  # simulated ones of a candidate
LEAST_GAIN = 1.02  # times as many trajectories, below which a setting stays


@dataclass(frozen=True)
class Step:
    """A setting that the search changed, and what it led to."""

    changed: Mapping[str, Any]  # by the setting's name
    prediction: Prediction


@dataclass(frozen=True)
class Candidates:
    """What the search needs to compare configurations."""

    description: Mapping[str, Any]
    card: Card
    lengths: EpisodeLengths
    longest: int  # rollout.max_model_len at first
    response: int  # rollout.max_new_tokens at first

    def changed(self, config: Config, words: Mapping[str, Any]) -> Config:
        """A copy with changed settings, and ranks and engines that fill the GPUs.

        Raises ConfigError unless it can be placed and leaves as much of each trainer's GPU free as
        trainer.recompute=auto does.
        """
        changed = _with_settings(config, {**words, "trainer.data_parallel": 0, "rollout.engines": 0})
        resolve_cluster_sizes(changed)
        check_combinations(changed)
        check_cluster(changed)
        check_parallel_layout(changed, dict(self.description))
        estimate = estimate_memory(changed, self.description)
        check_memory(changed, estimate)
        limit = FILLED_BY_AUTO * changed.cluster.gpu_gib * GIB
        beside = estimate.engine.total if changed.cluster.colocate else 0
        if any(use.total + beside > limit for use in estimate.trainer):
            raise ConfigError(f"more than {FILLED_BY_AUTO:.0%} of cluster.gpu_gib are filled")
        return changed

    def with_fastest_layout(self, config: Config, words: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The words with those of the fastest layout that the trainer then has on its GPUs; nothing if none fits."""
        base, rates = _with_settings(config, words), Rates.of_card(self.card)
        best, found = math.inf, None
        for layout in self.layouts(base):
            with suppress(ConfigError):  # of a layout that does not fit
                training = predict_training(self.changed(base, layout), self.description, rates, self.lengths)
                if (seconds := training.train_seconds + training.sync_seconds) < best:
                    best, found = seconds, layout
        if found is not None:
            yield {**words, **found}

    def layouts(self, config: Config) -> Iterator[dict[str, Any]]:
        """Sizes that share the trainer's GPUs out, recomputation, the optimizer's place, lengths of micro-batches."""
        node = config.trainer_gpus_per_node
        experts = SIZES if has_experts(dict(self.description)) else (1,)
        for tensor, pipeline, expert, recompute, keep, share in itertools.product(
            SIZES, SIZES, experts, RECOMPUTE, ("device", "host"), SEQUENCE_SHARES
        ):
            world, replica = config.cluster.nodes * node, tensor * pipeline * config.trainer.context_parallel
            if world % replica or node % tensor or (world // pipeline) % expert:
                continue
            tokens = int(share * self.longest)
            room = tokens - PROMPT_SPREAD * self.lengths.prompt_tokens(config, config.rollout.context.history_turns)
            if tokens < self.longest and room < RESPONSE_SPREAD * self.lengths.response_tokens:
                continue
            yield {
                "trainer.tensor_parallel": tensor,
                "trainer.pipeline_parallel": pipeline,
                "trainer.expert_parallel": expert,
                "trainer.recompute": recompute,
                "trainer.optimizer.keep": keep,
                "trainer.tokens_per_microbatch": tokens,
                "rollout.max_model_len": min(tokens, self.longest),
                "rollout.max_new_tokens": self.response if tokens >= self.longest else min(self.response, int(room)),
                "trainer.virtual_pipeline": config.trainer.virtual_pipeline if pipeline > 1 else 1,
            }

    def split(self, config: Config) -> Iterator[dict[str, Any]]:
        cluster = config.cluster
        for engines in range(1, 1 if cluster.colocate else cluster.gpus_per_node):
            yield from self.with_fastest_layout(config, {"cluster.engine_gpus_per_node": engines})

    def layout(self, config: Config) -> Iterator[dict[str, Any]]:
        yield from self.with_fastest_layout(config, {})

    def staleness(self, config: Config) -> Iterator[dict[str, Any]]:
        if config.rollout.mode == "async":
            for versions in STALENESS:
                yield {"rollout.max_staleness": versions}

    def in_flight(self, config: Config) -> Iterator[dict[str, Any]]:
        for groups in GROUPS_IN_FLIGHT:
            yield {"rollout.groups_in_flight": groups}

    def context(self, config: Config) -> Iterator[dict[str, Any]]:
        words = {"rollout.context.policy": "append", "rollout.context.history_turns": APPENDED_TURNS}
        yield from self.with_fastest_layout(config, words)

    def batch(self, config: Config) -> Iterator[dict[str, Any]]:
        for factor in (2, 4):
            yield {"trainer.groups_per_update": factor * config.trainer.groups_per_update}


DIMENSIONS = ("staleness", "in_flight", "split", "layout", "context")
"""What is searched in this order, twice; batch too if asked for, which changes what an update learns from."""


def search(
    config: Config, description: Mapping[str, Any], card: Card, lengths: EpisodeLengths, dimensions: Sequence[str],
    tried: Callable[[str], None] = lambda _: None,
) -> list[Step]:  # fmt: skip
    """Change one setting after the other to what trains most trajectories an hour; the first step changes nothing.

    `dimensions`: of DIMENSIONS, or batch. `tried` is called with the name of each candidate's dimension. Raises
    ConfigError without a trainer.
    """
    if not config.trainer_world_size:
        raise ConfigError("a search needs a trainer, but evaluation.only=true; set it to false")
    rollout = config.rollout
    candidates = Candidates(description, card, lengths, rollout.max_model_len, rollout.max_new_tokens)
    steps = [Step({}, predict(config, description, card, lengths))]
    most = _per_hour(predict(config, description, card, lengths, SEARCH_UPDATES))
    settled: dict[str, Config] = {}
    for name in [*dimensions, *dimensions]:
        if settled.get(name) is config:
            continue
        best: tuple[float, dict[str, Any], Config] | None = None
        for words in getattr(candidates, name)(config):
            tried(name)
            with suppress(ConfigError):  # of a candidate that does not fit
                changed = candidates.changed(config, words)
                found = _per_hour(predict(changed, description, card, lengths, SEARCH_UPDATES))
                if found > LEAST_GAIN * (best[0] if best else most):
                    best = found, words, changed
        if best:
            most, words, changed = best
            differ = {key: value for key, value in words.items() if _read(config, key) != value}
            config = changed
            steps.append(Step(differ, predict(config, description, card, lengths)))
        settled[name] = config
    return steps


def _per_hour(prediction: Prediction) -> float:
    assert prediction.job is not None
    return prediction.job.per_hour


def _with_settings(config: Config, words: Mapping[str, Any]) -> Config:
    """A copy with changed settings, unchecked."""
    changed = copy.deepcopy(config)
    for name, value in words.items():
        section, _, last = name.rpartition(".")
        setattr(_read(changed, section), last, value)
    return changed


def _read(config: Config, name: str) -> Any:
    part: Any = config
    for section in name.split("."):
        part = getattr(part, section)
    return part
