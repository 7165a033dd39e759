"""Predicted time of an update, the search for faster layouts of the trainer, and the time of a start.

A checkpoint holds the optimizer, too, which a resumed job reads.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.hf_config import has_experts
from megatron_webrl.placement.cost_model import PARTS, EngineCosts, StageCosts, StateCosts
from megatron_webrl.placement.hardware import Card, Rates
from megatron_webrl.placement.memory_estimate import (
    DTYPE_BYTES,
    GIB,
    OPTIMIZER_BYTES,
    check_memory,
    check_parallel_layout,
    estimate_memory,
    resolve_automatic,
)
from megatron_webrl.placement.model_shape import MicrobatchShape, ModelShape

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

    @classmethod
    def from_words(cls, words: Sequence[str]) -> EpisodeLengths:
        """The lengths with those of `name=number` replaced. Raises ConfigError."""
        lengths = {name: getattr(cls, name) for name in cls.__dataclass_fields__}
        for word in words:
            name, _, text = word.partition("=")
            if name not in lengths:
                raise ConfigError(f"--lengths {word}: the name is none of {', '.join(lengths)}")
            try:
                lengths[name] = type(lengths[name])(text)
            except ValueError:
                raise ConfigError(f"--lengths {word}: {text!r} is no number") from None
            if not 1 <= lengths[name] < math.inf:
                raise ConfigError(f"--lengths {word}: the least is 1")
        return cls(**lengths)

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
        steps, tokens = 1.0, lengths.prompt_tokens(config) + lengths.response_tokens
        if context.policy == "append" and merge != "none":  # the steps of a window are one sequence
            steps = min(context.history_turns, lengths.steps)
            turn = lengths.screenshot_tokens + lengths.turn_tokens + lengths.response_tokens
            tokens = lengths.system_tokens + steps * turn
        # Consecutive steps are in one micro-batch mostly: a screenshot is encoded once, though several prompts have it.
        return cls(episodes * lengths.steps / steps, tokens, steps * lengths.response_tokens, steps, patches, shared)

    def microbatches(self, config: Config) -> tuple[int, MicrobatchShape]:
        """Micro-batches of a replica in one minibatch, and the mean one. Raises ConfigError if no sequence fits one."""
        trainer = config.trainer
        room = PACKED_SHARE * trainer.tokens_per_microbatch
        most = math.floor((room - self.shared) / (self.tokens - self.shared))
        if most < 1:
            raise ConfigError(
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


@dataclass(frozen=True)
class TrainingPrediction:
    """An update of the trainer."""

    parts: Mapping[str, float]  # seconds by part, in order; they add up to `train_seconds`
    hidden_seconds: float  # of collectives behind computation
    sync_seconds: float
    checkpoint_seconds: float  # for which training waits, of one checkpoint
    checkpoint_every: int  # updates; 0: at the end only
    microbatches: int  # of a replica in a minibatch
    microbatch_tokens: float  # mean
    tokens: float  # trained, all passes with a backward pass, as performance/tokens_per_second_per_gpu counts them
    operations: float  # as performance/mfu counts them
    ranks: int
    peak: float  # operations per second of a rank

    @property
    def train_seconds(self) -> float:
        """Packing aside, what seconds/train measures."""
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.train_seconds / self.ranks

    @property
    def mfu(self) -> float:
        """Share of the peak."""
        return self.operations / self.train_seconds / self.ranks / self.peak


def predict_training(
    config: Config, description: Mapping[str, Any], rates: Rates, lengths: EpisodeLengths
) -> TrainingPrediction:
    """Predict an update. `description`: the config.json. Raises ConfigError if a sequence fits no micro-batch."""
    config = resolve_automatic(config, description)
    model, trainer = ModelShape.from_description(description), config.trainer
    count, shape = TrainingBatch.of_config(config, lengths, model).microbatches(config)
    steps = trainer.epochs * trainer.minibatches
    scored_passes = trainer.scored_minibatches(trainer.minibatches) / trainer.minibatches
    scored_passes += trainer.loss.kl_coefficient > 0
    stages = range(trainer.pipeline_parallel)
    parts: dict[str, float] = {}
    hidden = 0.0
    for training, passes in ((True, trainer.epochs), (False, scored_passes)):
        if not passes:
            continue
        each = [StageCosts(config, model, rates, shape, stage).seconds(training) for stage in stages]
        slowest = max(each, key=lambda one: one.total)
        times = passes * trainer.minibatches * count
        if training:
            for kind, seconds in (*slowest.compute.items(), *slowest.exposed.items()):
                parts[kind] = parts.get(kind, 0.0) + times * seconds
            hidden += times * slowest.hidden
        else:
            parts["log-probabilities"] = times * slowest.total
        bubble = (len(stages) - 1) / trainer.virtual_pipeline * slowest.total
        parts["pipeline bubble"] = parts.get("pipeline bubble", 0.0) + passes * trainer.minibatches * bubble
    state = StateCosts(config, model, rates)
    parts["gradients and weights"] = steps * state.reduce_seconds()
    parts["optimizer"] = steps * state.step_seconds()
    replicas = count * trainer.minibatches * trainer.data_parallel
    forward = model.useful(shape, trainer.train_vision) / 3
    return TrainingPrediction(
        parts={name: parts[name] for name in PARTS if parts.get(name)},
        hidden_seconds=hidden,
        sync_seconds=state.sync_seconds(),
        checkpoint_seconds=state.checkpoint_seconds(),
        checkpoint_every=trainer.checkpoint.every,
        microbatches=count,
        microbatch_tokens=shape.tokens,
        tokens=trainer.epochs * replicas * shape.tokens,
        operations=replicas * forward * (3 * trainer.epochs + scored_passes),
        ranks=config.trainer_world_size,
        peak=rates.peak,
    )


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


def predict_generation(
    config: Config, description: Mapping[str, Any], rates: Rates, lengths: EpisodeLengths
) -> GenerationPrediction:
    """Predict the engines' speed. `description`: the model's config.json.

    Between two requests an episode spends `lengths.browser_seconds` in its browser: an engine computes as many requests
    at a time as make generation and browsers balance.
    """
    model, rollout = ModelShape.from_description(description), config.rollout
    engine = EngineCosts(config, model, rates)
    prompt, response = lengths.prompt_tokens(config), lengths.response_tokens
    cached = _cached_tokens(config, lengths, prompt)
    context = prompt + response / 2
    parts = {
        "prefill": engine.prefill(prompt - cached, cached),
        "images": engine.image(
            lengths.screenshot_tokens * model.merge
        ),  # the engine keeps the features of earlier ones
    }
    blocking = sum(parts.values())  # of the engine, during which no other request advances
    episodes = rollout.groups_in_flight * rollout.group_size

    def per_step(requests: float) -> float:
        """Seconds of the engine for one step of one episode, with so many requests at a time."""
        return blocking + response * engine.decode(requests, context) / requests

    # With R of N episodes in the engine, each step takes R x per_step(R) in it and browser_seconds outside of it.
    low, high = 1e-3, float(min(episodes, config.requests_per_engine))
    if high * per_step(high) * (episodes / high - 1) < lengths.browser_seconds:
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            inside = middle * per_step(middle)
            enters = (episodes - middle) * inside > middle * lengths.browser_seconds  # more wait for the engine
            low, high = (middle, high) if enters else (low, middle)
    requests = max(high, 1e-3)
    seconds = engine.decode(max(requests, 1.0), context)
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


@dataclass(frozen=True)
class Prediction:
    """Trainer, engines and memory of a configuration."""

    card: str
    training: TrainingPrediction | None  # None without a trainer
    generation: GenerationPrediction
    trainer_gib: float  # of the GPU that needs most
    engine_gib: float

    @property
    def update_seconds(self) -> float:
        """Wall clock of an update in mode async: the slower of trainer with weight sync, and engines."""
        if self.training is None:
            return self.generation.update_seconds
        return max(self.training.train_seconds + self.training.sync_seconds, self.generation.update_seconds)


def predict(config: Config, description: Mapping[str, Any], card: Card, lengths: EpisodeLengths) -> Prediction:
    """Predict a configuration. `description`: the model's config.json.

    Raises ConfigError without GPUs, in float32, or if the mean sequence exceeds trainer.tokens_per_microbatch.
    """
    if not config.cluster.gpus_per_node:
        raise ConfigError("a prediction needs GPUs, but cluster.gpus_per_node=0; set it")
    if config.model.dtype != "bfloat16":
        raise ConfigError(f"model.dtype={config.model.dtype} has no prediction: cards' rates are those of bfloat16")
    rates, estimate = Rates.of_card(card), estimate_memory(config, description)
    return Prediction(
        card=card.name,
        training=predict_training(config, description, rates, lengths) if config.trainer_world_size else None,
        generation=predict_generation(config, description, rates, lengths),
        trainer_gib=max((use.total for use in estimate.trainer), default=0) / GIB,
        engine_gib=estimate.engine.total / GIB,
    )


SIZES = (1, 2, 4, 8, 16, 32)
RECOMPUTE = ("none", "selective", "full")
SEQUENCE_SHARES = (1.0, 1.5, 2.0, 3.0)  # tokens of a micro-batch, over rollout.max_model_len


@dataclass(frozen=True)
class Layout:
    """A layout that fits, with its prediction."""

    config: Config
    prediction: Prediction

    @property
    def seconds(self) -> float:
        """What training and weight sync of an update take; layouts are compared by it."""
        training = self.prediction.training
        assert training is not None
        return training.train_seconds + training.sync_seconds

    @property
    def settings(self) -> dict[str, Any]:
        """The searched settings of trainer.*."""
        trainer = self.config.trainer
        names = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "recompute", "tokens_per_microbatch")
        return {name: getattr(trainer, name) for name in names}


def search_layouts(
    config: Config, description: Mapping[str, Any], card: Card, lengths: EpisodeLengths
) -> tuple[list[Layout], int]:
    """The layouts of the trainer on the GPUs that `config` gives it, fastest first, and the number of those tried.

    Engines and batch stay.

    A layout fits if the model can be split so, tensor-parallel groups lie inside nodes, and `webrl placement --memory`
    accepts it. Raises ConfigError without a trainer.
    """
    if not config.trainer_world_size:
        raise ConfigError("a search needs a trainer, but evaluation.only=true; set it to false")
    layouts, tried = [], 0
    for candidate in _candidates(config, description):
        tried += 1
        try:
            check_parallel_layout(candidate, dict(description))
            check_memory(candidate, estimate_memory(candidate, description))
            layouts.append(Layout(candidate, predict(candidate, description, card, lengths)))
        except ConfigError:
            continue
    return sorted(layouts, key=lambda layout: layout.seconds), tried


def _candidates(config: Config, description: Mapping[str, Any]) -> Iterator[Config]:
    world, node = config.trainer_world_size, config.trainer_gpus_per_node
    for tensor, pipeline, expert, recompute, share in itertools.product(
        SIZES, SIZES, SIZES if has_experts(description) else (1,), RECOMPUTE, SEQUENCE_SHARES
    ):
        replica = tensor * pipeline * config.trainer.context_parallel
        if world % replica or node % tensor or (world // pipeline) % expert:
            continue
        candidate = copy.deepcopy(config)
        trainer = candidate.trainer
        trainer.tensor_parallel, trainer.pipeline_parallel, trainer.expert_parallel = tensor, pipeline, expert
        trainer.data_parallel, trainer.recompute = world // replica, recompute
        trainer.tokens_per_microbatch = int(share * config.rollout.max_model_len)
        if pipeline == 1:
            trainer.virtual_pipeline = 1
        yield candidate


OTHER_SECONDS = 300.0  # of a start without reading: imports, communicators, compilation, captured graphs
STORAGE_GB_PER_SECOND = 2.0  # speed at which all nodes together read or write the shared folder; 1e9 bytes
SAFETY_FACTOR = 2.0  # other jobs use the same folder


@dataclass(frozen=True)
class StartEstimate:
    """Bytes that all nodes of a job read together at its start; a checkpoint has those that a resumed job reads."""

    new_bytes: int
    resumed_bytes: int

    @classmethod
    def of_config(cls, config: Config, parameters: int) -> StartEstimate:
        """Estimate the start of a job with a model of so many parameters.

        Training reads one copy: data-parallel rank 0 of the trainer, from which the others and the engines get theirs.
        An evaluation reads a copy for each node, whose engines share the page cache.
        """
        if config.evaluation.only:
            size = parameters * DTYPE_BYTES[config.engine_dtype] * config.cluster.nodes
            return cls(size, size)
        size = DTYPE_BYTES[config.model.dtype]
        return cls(parameters * size, parameters * (size + OPTIMIZER_BYTES[config.model.dtype]))

    def lines(self, config: Config) -> list[str]:
        """Start and checkpoint in a line each, with run.startup_timeout_seconds to set if it is too short."""
        resumed, resumed_seconds = _reading(self.resumed_bytes)
        size, seconds = _reading(self.new_bytes)
        start = (
            f"start: reads {size} from the shared folder, about {_short(seconds)} s at {STORAGE_GB_PER_SECOND:g} GB/s"
        )
        if self.resumed_bytes > self.new_bytes:
            start += f"; resumed {resumed}, {_short(resumed_seconds)} s"
        needed = SAFETY_FACTOR * resumed_seconds
        timeout, wanted = config.run.startup_timeout_seconds, OTHER_SECONDS + needed
        if timeout < wanted:
            start += f"; run.startup_timeout_seconds={timeout:g} is short, set it to {wanted:.0f} or more"
        if config.evaluation.only:
            return [start]
        return [start, f"checkpoint: writes {resumed}, about {_short(resumed_seconds)} s"]


def _reading(size: int) -> tuple[str, float]:
    """A number of bytes as text, and the seconds to read them."""
    return f"{_short(size / GIB)} GiB", size / (1e9 * STORAGE_GB_PER_SECOND)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
