"""Predicted time of an update, the search for faster layouts of the trainer, and the time of a start.

A checkpoint holds the optimizer, too, which a resumed job reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.placement.cost_model import PARTS, EngineCosts, StageCosts, StateCosts
from megatron_webrl.placement.hardware import Rates
from megatron_webrl.placement.memory_estimate import (
    DTYPE_BYTES,
    GIB,
    OPTIMIZER_BYTES,
    resolve_automatic,
)
from megatron_webrl.placement.model_shape import MicrobatchShape, ModelShape

PACKED_SHARE = 0.95  # of trainer.tokens_per_microbatch that packing fills
_LEAST = {"success": 0.001, "success_concentration": 0.01, "response_sigma": 0.0, "browser_sigma": 0.0,
          "browser_seconds": 0.01, "browser_cpu_seconds": 0.0}  # fmt: skip
_MOST = {"success": 0.999}


@dataclass(frozen=True)
class EpisodeLengths:
    """Lengths of episodes, means where nothing else is said.

    Defaults: AsyncWebRL, arXiv 2606.05597, browsers of WebGym, arXiv 2601.02439, and a page of 1280x768 for Qwen3-VL.
    """

    success: float = 0.454  # share of sampled episodes that succeed
    success_concentration: float = 1.0  # of tasks' success, Beta: the sum of both parameters; small: all or nothing
    steps_of_success: float = 5.1
    steps_of_failure: float = 12.5
    response_tokens: float = 240.0  # of a step
    response_sigma: float = 0.5  # of their logarithm; assumed
    screenshot_tokens: int = 960
    system_tokens: float = 1000.0  # system prompt, tool schema and task, the same in all steps of a group; assumed
    turn_tokens: float = 150.0  # text of a turn around its screenshot; assumed
    browser_seconds: float = 6.6  # of a step or a reset, log-normal: a median of 4 s waits 3 s for a page and 1 s more
    browser_sigma: float = 1.0  # of their logarithm
    browser_cpu_seconds: float = 0.079  # core-seconds of a step: docs/benchmarks.md, Browsers

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
            least, most = _LEAST.get(name, 1.0), _MOST.get(name, math.inf)
            if not least <= lengths[name] <= most or lengths[name] == math.inf:
                raise ConfigError(
                    f"--lengths {word}: the least is {least:g}" + (f", the most {most:g}" if name in _MOST else "")
                )
        return cls(**lengths)

    @property
    def steps(self) -> float:
        """Of a sampled episode."""
        return self.success * self.steps_of_success + (1 - self.success) * self.steps_of_failure

    def rounds(self, config: Config) -> float:
        """Screenshots of a prompt, mean over the steps of an episode of the mean length."""
        most = min(config.rollout.context.history_turns, self.steps)
        return most - most * (most - 1) / 2 / self.steps

    def prompt_tokens(self, config: Config, rounds: float | None = None) -> float:
        """Tokens of a prompt of so many rounds, by default the mean over steps: past rounds have their responses."""
        rounds = self.rounds(config) if rounds is None else rounds
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
class EngineStep:
    """What a mean step of an episode asks of its engine."""

    engine: EngineCosts
    prompt: float  # tokens
    cached: float  # of them, in the prefix cache
    response: float
    blocking: Mapping[str, float]  # seconds by part, in which no other request advances

    @classmethod
    def of_config(
        cls, config: Config, description: Mapping[str, Any], rates: Rates, lengths: EpisodeLengths
    ) -> EngineStep:
        model = ModelShape.from_description(description)
        engine, prompt = EngineCosts(config, model, rates), lengths.prompt_tokens(config)
        cached = _cached_tokens(config, lengths, prompt)
        blocking = {
            "prefill": engine.prefill(prompt - cached, cached),
            "images": engine.image(lengths.screenshot_tokens * model.merge),  # features of earlier ones are kept
        }
        return cls(engine, prompt, cached, lengths.response_tokens, blocking)

    @property
    def context(self) -> float:
        """Tokens of a request, mean over its response."""
        return self.prompt + self.response / 2

    def seconds(self, requests: float) -> float:
        """Of each of so many requests that the engine computes at a time."""
        return requests * sum(self.blocking.values()) + self.response * self.engine.decode(requests, self.context)


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
    rollout, step = config.rollout, EngineStep.of_config(config, description, rates, lengths)
    episodes = rollout.groups_in_flight * rollout.group_size
    # With R of N episodes in the engine, each step takes seconds(R) in it and browser_seconds outside of it.
    low, high = 1e-3, float(min(episodes, config.requests_per_engine))
    if step.seconds(high) * (episodes / high - 1) < lengths.browser_seconds:
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            enters = (episodes - middle) * step.seconds(middle) > middle * lengths.browser_seconds  # more wait for it
            low, high = (middle, high) if enters else (low, middle)
    requests = max(high, 1e-3)
    seconds = step.engine.decode(max(requests, 1.0), step.context)
    parts = {**step.blocking, "decode": step.response * seconds / max(requests, 1.0)}
    busy = sum(parts.values())
    # A single request leaves the engine idle in between.
    each = max(busy, (busy + lengths.browser_seconds) / episodes)
    update = config.trainer.groups_per_update * rollout.group_size * lengths.steps * each / max(1, rollout.engines)
    return GenerationPrediction(
        parts=parts,
        requests=requests,
        decode_seconds=seconds,
        hit_rate=step.cached / step.prompt,
        prompt_tokens=step.prompt,
        response_tokens_per_second=step.response * max(1, rollout.engines) / each,
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
