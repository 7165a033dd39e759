"""Predicted time of an update: workload, generation, training, and the search for better settings.

Estimate how long a job reads weights from the shared folder at its start, and writes a checkpoint to it.

A checkpoint holds the optimizer, too, which a resumed job reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.placement.hardware import Rates, gathered_bytes
from megatron_webrl.placement.memory_estimate import DTYPE_BYTES, GIB, OPTIMIZER_BYTES, chunked_operations, state_bytes
from megatron_webrl.placement.performance.shapes import MicrobatchShape, ModelShape

PACKED_SHARE = 0.95  # of trainer.tokens_per_microbatch that packing fills


@dataclass(frozen=True)
class EpisodeLengths:
    """Lengths of episodes. Defaults: AsyncWebRL, arXiv 2606.05597, and a page of 1280x768 for Qwen3-VL."""

    steps: float = 9.0  # of an episode: 5.1 of a success, 12.5 of a failure
    response_tokens: float = 240.0  # of a step
    screenshot_tokens: int = 960
    system_tokens: float = 1000.0  # system prompt, tool schema and task, the same in all steps of a group; assumed
    turn_tokens: float = 150.0  # text of a turn around its screenshot; assumed
    browser_seconds: float = 6.6  # of a step: log-normal, median 4 s and sigma 1 (docs/scaling.md)

    def rounds(self, config: Config) -> float:
        """Screenshots of a prompt, mean over the steps of an episode of the mean length."""
        most = min(config.rollout.context.history_turns, self.steps)
        return most - most * (most - 1) / 2 / self.steps

    def prompt_tokens(self, config: Config) -> float:
        """Tokens of a prompt, mean over steps: past rounds have their responses."""
        rounds = self.rounds(config)
        turn = self.screenshot_tokens + self.turn_tokens
        return self.system_tokens + rounds * turn + (rounds - 1) * self.response_tokens


@dataclass(frozen=True)
class TrainingBatch:
    """Sequences of an update, all alike."""

    sequences: float
    tokens: float  # of a sequence
    scored: float  # response tokens of a sequence
    images: float  # of a sequence that no other sequence of the micro-batch has
    screenshot_patches: int
    shared: float  # first tokens of a sequence that a micro-batch computes once

    @classmethod
    def of_config(cls, config: Config, lengths: EpisodeLengths, model: ModelShape) -> TrainingBatch:
        """The sequences of the groups of an update, with the context policy of `config`, of `resolve_automatic`."""
        context, merge = config.rollout.context, config.trainer.merge_prefixes
        episodes = config.trainer.groups_per_update * config.rollout.group_size
        shared = lengths.system_tokens if merge == "all" else 0.0
        patches = lengths.screenshot_tokens * model.merge
        if context.policy == "append" and merge != "none":  # the steps of a window are one sequence
            steps = min(context.history_turns, lengths.steps)
            turn = lengths.screenshot_tokens + lengths.turn_tokens + lengths.response_tokens
            return cls(
                episodes * lengths.steps / steps,
                lengths.system_tokens + steps * turn,
                steps * lengths.response_tokens,
                steps,
                patches,
                shared,
            )
        # Consecutive steps are in one micro-batch mostly: a screenshot is encoded once, though several prompts have it.
        return cls(
            episodes * lengths.steps,
            lengths.prompt_tokens(config) + lengths.response_tokens,
            lengths.response_tokens,
            1.0,
            patches,
            shared,
        )

    def microbatches(self, config: Config) -> tuple[int, MicrobatchShape]:
        """Micro-batches of a replica in one minibatch, and the mean one. Raises ValueError if no sequence fits one."""
        trainer = config.trainer
        room = PACKED_SHARE * trainer.tokens_per_microbatch
        most = math.floor((room - self.shared) / (self.tokens - self.shared))
        if most < 1:
            raise ValueError(
                f"a sequence of {self.tokens:.0f} tokens exceeds trainer.tokens_per_microbatch="
                f"{trainer.tokens_per_microbatch}; raise it, or lower the lengths"
            )
        each = self.sequences / trainer.minibatches / trainer.data_parallel
        count = math.ceil(each / most)
        multiple = trainer.pipeline_parallel if trainer.virtual_pipeline > 1 else 1
        count = multiple * math.ceil(count / multiple)
        number = each / count  # sequences of a micro-batch
        own = self.tokens - self.shared
        shared_pairs = self.shared * (self.shared + 1) / 2
        return count, MicrobatchShape(
            tokens=self.shared * min(1.0, number) + number * own,
            pairs=min(1.0, number) * shared_pairs + number * (self.tokens * (self.tokens + 1) / 2 - shared_pairs),
            scored=number * self.scored,
            patches=number * self.images * self.screenshot_patches,
            patch_pairs=number * self.images * self.screenshot_patches**2,
        )


STEP_SECONDS = 0.5e-3  # of an engine step besides weights and cache: scheduling, sampling, graph launch; assumed
BISECTIONS = 60


@dataclass(frozen=True)
class GenerationPrediction:
    """Engines that generate an update's episodes without a pause."""

    parts: Mapping[str, float]  # seconds of an engine for one step of one episode, by part
    requests: float  # that an engine computes at a time, mean
    decode_seconds: float  # of one token of all of these requests
    hit_rate: float  # of prompt tokens in the prefix cache
    prompt_tokens: float  # of a step
    response_tokens_per_second: float  # of all engines
    update_seconds: float  # of all engines for the episodes of one update

    @property
    def step_seconds(self) -> float:
        """Seconds of an engine for one step of one episode."""
        return sum(self.parts.values())


def decode_seconds(config: Config, model: ModelShape, rates: Rates, requests: float, context: float) -> float:
    """Seconds of an engine step that makes one token for each request. `context`: tokens of a request so far, mean."""
    rollout, text = config.rollout, model.text
    size, tensor = DTYPE_BYTES[config.engine_dtype], rollout.tensor_parallel
    dense, experts = _weights(model)
    # Each request goes to experts of its own: the share of experts that at least one of them needs is read.
    read = 1 - (1 - text.num_experts_per_token / text.num_experts) ** requests if text.num_experts else 0.0
    weights = size * (dense + read * experts) / tensor / rates.memory
    cached = size if rollout.kv_cache_dtype == "auto" else 1
    cache = requests * context * 2 * cached * text.key_width * text.full_layers / tensor / rates.memory
    if text.linear:  # the state of each request is read and written
        states = sum(text.linear_layers) * 2 * state_bytes(text.linear, size)
        cache += requests * states / tensor / rates.memory
    used = experts * text.num_experts_per_token / text.num_experts if text.num_experts else 0.0
    arithmetic = 2 * requests * (dense + used) / tensor / rates.prefill
    return max(weights, arithmetic) + cache + STEP_SECONDS + _collectives(config, model, rates, requests)


def prefill_seconds(config: Config, model: ModelShape, rates: Rates, tokens: float, before: float) -> float:
    """Seconds to compute `tokens` of a prompt whose first `before` tokens are in the cache."""
    text, tensor = model.text, config.rollout.tensor_parallel
    dense, experts = _weights(model)
    used = experts * text.num_experts_per_token / text.num_experts if text.num_experts else 0.0
    linear = dense - model.counts.embedding_parameters + used  # one token of a prompt has logits
    pairs = tokens * (before + (tokens + 1) / 2)
    attention = text.full_layers * 4 * pairs * text.query_width / rates.attention
    rule = sum(text.linear_layers) * tokens * chunked_operations(text.linear) / rates.prefill if text.linear else 0.0
    compute = 2 * tokens * linear / rates.prefill + attention + rule
    return compute / tensor + _collectives(config, model, rates, tokens)


def predict_generation(
    config: Config, description: Mapping[str, Any], rates: Rates, lengths: EpisodeLengths
) -> GenerationPrediction:
    """Predict the engines' speed. `description`: the model's config.json.

    Between two requests an episode spends `lengths.browser_seconds` in its browser: an engine computes as many requests
    at a time as make generation and browsers balance.
    """
    model, rollout = ModelShape.from_description(description), config.rollout
    prompt, response = lengths.prompt_tokens(config), lengths.response_tokens
    cached = _cached_tokens(config, lengths, prompt)
    context = prompt + response / 2
    parts = {
        "prefill": prefill_seconds(config, model, rates, prompt - cached, cached),
        "images": _image_seconds(config, model, rates, lengths),
    }
    blocking = sum(parts.values())  # of the engine, during which no other request advances
    episodes = rollout.groups_in_flight * rollout.group_size

    def per_step(requests: float) -> float:
        """Seconds of the engine for one step of one episode, with so many requests at a time."""
        return blocking + response * decode_seconds(config, model, rates, requests, context) / requests

    # With R of N episodes in the engine, each step takes R x per_step(R) in it and browser_seconds outside of it.
    low, high = 1e-3, float(min(episodes, config.requests_per_engine))
    if high * per_step(high) * (episodes / high - 1) < lengths.browser_seconds:
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            inside = middle * per_step(middle)
            enters = (episodes - middle) * inside > middle * lengths.browser_seconds  # more wait for the engine
            low, high = (middle, high) if enters else (low, middle)
    requests = max(high, 1e-3)
    seconds = decode_seconds(config, model, rates, max(requests, 1.0), context)
    parts["decode"] = response * seconds / max(requests, 1.0)
    busy = sum(parts.values())
    # A single request leaves the engine idle in between.
    each = max(busy, (busy + lengths.browser_seconds) / episodes)
    update = config.trainer.groups_per_update * rollout.group_size * lengths.steps * each / max(1, rollout.engines)
    return GenerationPrediction(
        parts=parts,
        requests=requests,
        decode_seconds=seconds,
        hit_rate=cached / prompt,
        prompt_tokens=prompt,
        response_tokens_per_second=response * max(1, rollout.engines) / each,
        update_seconds=update,
    )


def _weights(model: ModelShape) -> tuple[int, int]:
    """Weights that a token meets: all but the experts with the output layer, and all experts."""
    counts = model.counts
    experts = sum(layer.experts for layer in counts.layers)
    tower = counts.vision
    embedding = 0 if counts.tied else counts.embedding_parameters  # of the input, which is looked up
    return counts.total - experts - tower - embedding, experts


def _cached_tokens(config: Config, lengths: EpisodeLengths, prompt: float) -> float:
    """Tokens of a prompt that are in the prefix cache, mean over steps.

    With the append policy all but the last turn, until a window is full; else the system prompt, and the first round of
    the previous prompt only while no round has left the window.
    """
    context = config.rollout.context
    most = min(context.history_turns, lengths.steps)
    turn = lengths.screenshot_tokens + lengths.turn_tokens
    if context.policy == "append":
        full = 1 / most  # a new window begins with its last round alone
        return (1 - full) * (prompt - turn) + full * min(prompt, lengths.system_tokens)
    growing = (most - 1) / lengths.steps  # share of steps whose prompt extends the one before
    return growing * max(lengths.system_tokens, prompt - turn) + (1 - growing) * lengths.system_tokens


def _image_seconds(config: Config, model: ModelShape, rates: Rates, lengths: EpisodeLengths) -> float:
    """Seconds to encode the one new screenshot of a step; the engine keeps the features of the others."""
    patches = lengths.screenshot_tokens * model.merge
    shape = MicrobatchShape(0, 0, 0, patches, patches**2)
    ranks = config.rollout.tensor_parallel  # they share the layers, or the images of several requests
    return (model.vision(shape) / rates.prefill + model.vision_attention(shape) / rates.vision_attention) / ranks


def _collectives(config: Config, model: ModelShape, rates: Rates, tokens: float) -> float:
    """Seconds of the two sums over tensor-parallel ranks in each layer, and of sending to the next stages."""
    rollout, size = config.rollout, DTYPE_BYTES[config.engine_dtype]
    node, width = config.engine_gpus_per_node, tokens * model.text.hidden_size * size
    total = 0.0
    if rollout.tensor_parallel > 1:
        sent = 2 * gathered_bytes(width, rollout.tensor_parallel)
        link = rates.link(rollout.tensor_parallel, node)
        total += 2 * model.layers * (rates.collective_seconds / 2 + sent / link)
    if rollout.pipeline_parallel > 1:
        link = rates.link(config.ranks_per_engine, node)
        total += (rollout.pipeline_parallel - 1) * (rates.collective_seconds + width / link)
    return total


OTHER_SECONDS = 300.0  # of a start without reading: imports, communicators, compilation, captured graphs
STORAGE_GB_PER_SECOND = 2.0  # speed at which all nodes together read or write the shared folder
SAFETY_FACTOR = 2.0  # other jobs use the same folder


@dataclass(frozen=True)
class StartEstimate:
    """Bytes that all nodes of a job read together."""

    new_bytes: int
    resumed_bytes: int
    gb_per_second: float  # 1e9 bytes

    @property
    def new_seconds(self) -> float:
        return self.new_bytes / (1e9 * self.gb_per_second)

    @property
    def resumed_seconds(self) -> float:
        return self.resumed_bytes / (1e9 * self.gb_per_second)

    @property
    def needed_timeout_seconds(self) -> float:
        """A safe run.startup_timeout_seconds."""
        return OTHER_SECONDS + SAFETY_FACTOR * self.resumed_seconds

    @property
    def needed_save_seconds(self) -> float:
        """A safe trainer.checkpoint.timeout_seconds: a checkpoint has the bytes that a resumed job reads."""
        return SAFETY_FACTOR * self.resumed_seconds


def estimate_start(config: Config, parameters: int) -> StartEstimate:
    """Estimate the start of a job with a model of so many parameters.

    Training reads one copy: data-parallel rank 0 of the trainer, from which the others and the engines get theirs. An
    evaluation reads a copy for each node, whose engines share the page cache.
    """
    speed = STORAGE_GB_PER_SECOND
    if config.evaluation.only:
        size = parameters * DTYPE_BYTES[config.engine_dtype] * config.cluster.nodes
        return StartEstimate(size, size, speed)
    size = DTYPE_BYTES[config.model.dtype]
    return StartEstimate(parameters * size, parameters * (size + OPTIMIZER_BYTES[config.model.dtype]), speed)


def describe_start(config: Config, estimate: StartEstimate) -> str:
    """The estimate of the start in one line, with the timeout to set if that of the configuration is too short."""
    resumed = ""
    if estimate.resumed_bytes > estimate.new_bytes:
        resumed = f"; resumed {_short(estimate.resumed_bytes / GIB)} GiB, {_short(estimate.resumed_seconds)} s"
    text = (
        f"start: reads {_short(estimate.new_bytes / GIB)} GiB from the shared folder, about "
        f"{_short(estimate.new_seconds)} s at {estimate.gb_per_second:g} GB/s{resumed}"
    )
    return text + _if_short(
        "run.startup_timeout_seconds", config.run.startup_timeout_seconds, estimate.needed_timeout_seconds
    )


def describe_save(config: Config, estimate: StartEstimate) -> str:
    """The estimate of a checkpoint in one line, as `describe_start`; empty if no trainer runs."""
    if config.evaluation.only:
        return ""
    text = f"checkpoint: writes {_short(estimate.resumed_bytes / GIB)} GiB, about {_short(estimate.resumed_seconds)} s"
    limit = config.trainer.checkpoint.timeout_seconds
    return text + _if_short("trainer.checkpoint.timeout_seconds", limit, estimate.needed_save_seconds)


def _if_short(name: str, seconds: float, needed: float) -> str:
    return "" if seconds >= needed else f"; {name}={seconds:g} is short, set it to {needed:.0f} or more"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
