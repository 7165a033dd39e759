"""Predicted seconds of the parts of a training update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.model.layer_split import split_layers
from megatron_webrl.placement.hardware import Rates, gathered_bytes
from megatron_webrl.placement.memory_estimate import (
    CHUNK,
    DTYPE_BYTES,
    EXPERT_IMBALANCE,
    OPTIMIZER_BYTES,
    resolve_automatic,
)
from megatron_webrl.placement.performance.shapes import MicrobatchShape, ModelShape
from megatron_webrl.placement.prediction import EpisodeLengths, TrainingBatch

BACKWARD_PRODUCTS = 2.0  # times the forward pass: gradients of inputs and of weights
BACKWARD_ATTENTION = 2.5  # FlashAttention: five products for two
GATHER_BYTES_PER_SECOND = 1.5e9  # of trainer.checkpoint.optimizer_shards=whole, which gathers over gloo
SYNC_SECONDS = 0.1  # of a weight sync besides its transfer: pauses of engines, messages
LOGIT_PASSES = 12  # float32 values read or written for a logit in both passes (model/logprobs.py)
COMPUTE = ("products", "experts", "attention", "delta rule", "vision", "output layer", "other kernels")
PARTS = (
    *COMPUTE, "tensor parallel", "context parallel", "expert parallel", "image features", "pipeline", "pipeline bubble",
    "log-probabilities", "gradients and weights", "optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a rank's part of a micro-batch by kind."""

    compute: Mapping[str, float]
    exposed: Mapping[str, float]  # collectives that no computation hides
    hidden: float = 0.0  # seconds of collectives behind computation

    @property
    def total(self) -> float:
        """Seconds until the micro-batch is done."""
        return sum(self.compute.values()) + sum(self.exposed.values())


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
    peak_tflops: float | None = field(default=None)

    @property
    def train_seconds(self) -> float:
        """Packing aside, what seconds/train measures."""
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.train_seconds / self.ranks

    @property
    def mfu(self) -> float | None:
        """Share of the peak; None without a peak."""
        if self.peak_tflops is None:
            return None
        return self.operations / self.train_seconds / self.ranks / (1e12 * self.peak_tflops)


def stage_seconds(
    config: Config, model: ModelShape, rates: Rates, shape: MicrobatchShape, stage: int, training: bool
) -> PassSeconds:
    """A rank of a pipeline stage computes its part of a micro-batch: `training`, with a backward pass, else without.

    trainer.recompute=auto recomputes nothing here; see `resolve_automatic`.
    """
    return _Stage(config, model, rates, shape, stage).seconds(training)


class _Stage:
    def __init__(self, config: Config, model: ModelShape, rates: Rates, shape: MicrobatchShape, stage: int) -> None:
        self.config, self.model, self.rates, self.shape, self.stage = config, model, rates, shape, stage
        trainer = self.trainer = config.trainer
        self.size = DTYPE_BYTES[config.model.dtype]
        self.split = trainer.tensor_parallel * trainer.context_parallel  # ranks that share a micro-batch
        self.node = config.trainer_gpus_per_node
        chunks = split_layers(model.layers, trainer.pipeline_parallel * trainer.virtual_pipeline)
        self.layers = [layer for chunk in chunks[stage :: trainer.pipeline_parallel] for layer in chunk]

    def seconds(self, training: bool) -> PassSeconds:
        forward, backward = self._layers_compute()
        exposed_forward = self._layers_exposed()
        again = self._recomputed(forward, exposed_forward) if training else ({}, {})
        compute = dict.fromkeys(COMPUTE, 0.0)
        for kind, seconds in forward.items():
            compute[kind] += seconds + again[0].get(kind, 0.0) + (backward[kind] if training else 0.0)
        if training:
            compute["other kernels"] += self._added_gradients() / self.rates.memory
        times = 2.0 if training else 1.0  # a backward pass has the same collectives
        exposed = {kind: times * value + again[1].get(kind, 0.0) for kind, value in exposed_forward.items()}
        if self.stage == 0:
            self._add_vision(compute, exposed, training)
        if self.stage == self.trainer.pipeline_parallel - 1:
            self._add_output(compute, exposed, training)
        if self.trainer.pipeline_parallel > 1:
            exposed["pipeline"] = times * self._stage_transfer()
        # Sequence parallelism gathers inputs again for the gradients of weights, behind those of the inputs.
        hidden = exposed_forward["tensor parallel"] / 2 if training else 0.0
        return PassSeconds(compute, exposed, hidden)

    def _layers_compute(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of the forward and of the backward pass of the layers."""
        model, shape, rates, split = self.model, self.shape, self.rates, self.split
        products = sum(model.projections(layer, shape) for layer in self.layers) / split / rates.products
        attention = sum(model.attention(layer, shape) for layer in self.layers) / split / rates.attention
        experts = sum(map(self._experts, self.layers))
        other, other_backward = (
            sum(model.traffic(layer, shape, self.size, backward) for layer in self.layers) / split / rates.memory
            for backward in (False, True)
        )
        rule = sum(map(self._delta_rule, self.layers))
        forward = {
            "products": products,
            "experts": experts,
            "attention": attention,
            "delta rule": rule,
            "other kernels": other,
        }
        backward = {
            "products": BACKWARD_PRODUCTS * products,
            "experts": BACKWARD_PRODUCTS * experts,
            "attention": BACKWARD_ATTENTION * attention,
            "delta rule": BACKWARD_PRODUCTS * rule,
            "other kernels": other_backward,
        }
        return forward, backward

    def _added_gradients(self) -> float:
        """Bytes of gradients that are added to float32 buffers after a micro-batch: read, and the buffer too.

        Products for the weights of other linear layers add to it themselves (model/gradients.py).
        """
        trainer, counts = self.trainer, self.model.counts
        experts = sum(counts.layers[layer].experts for layer in self.layers)
        added = experts / (trainer.expert_parallel * trainer.expert_tensor_parallel)
        if self.stage == 0:
            added += counts.embedding_parameters / trainer.tensor_parallel
            added += counts.vision if trainer.train_vision else 0
        return (self.size + 2 * 4) * added

    def _delta_rule(self, layer: int) -> float:
        """Seconds of the delta rule of a layer: arithmetic and traffic, or a sequence's chunks in turn if longer.

        Sequences advance together; tensor-parallel ranks share the heads, not the tokens.
        """
        model, shape, rates = self.model, self.shape, self.rates
        operations = model.chunked_delta_rule(layer, shape)
        if not operations:
            return 0.0
        busy = operations / rates.float32 + model.delta_rule_traffic(layer, shape, self.size) / rates.memory
        length = 2 * shape.pairs / shape.tokens - 1  # of a sequence, weighted by its tokens
        return max(busy / self.split, length / CHUNK * rates.chunk_seconds)

    def _experts(self, layer: int) -> float:
        """Seconds of the experts of a layer on the busiest rank: arithmetic, or reading weights if that is longer."""
        model, shape, trainer, text = self.model, self.shape, self.trainer, self.model.text
        if not text.sparse_layers[layer]:
            return 0.0
        local = text.num_experts / trainer.expert_parallel
        # Each rank of an expert-parallel group has as many tokens, and its experts get those of all.
        rows = shape.tokens / self.split * text.num_experts_per_token * trainer.expert_tensor_parallel / local
        imbalance = EXPERT_IMBALANCE if trainer.expert_parallel > 1 else 1.0
        arithmetic = imbalance * model.experts(layer, shape) / self.split / self.rates.grouped_products(rows)
        weights = local * model.expert_weights * self.size / trainer.expert_tensor_parallel
        return max(arithmetic, weights / self.rates.memory)

    def _layers_exposed(self) -> dict[str, float]:
        """Seconds of the collectives of the layers' forward pass."""
        trainer, text, shape = self.trainer, self.model.text, self.shape
        count, tokens = len(self.layers), shape.tokens / trainer.context_parallel
        result = {"tensor parallel": 0.0, "context parallel": 0.0, "expert parallel": 0.0}
        if trainer.tensor_parallel > 1:  # gather before, reduce and scatter after attention and MLP
            size = gathered_bytes(tokens * text.hidden_size * self.size, trainer.tensor_parallel)
            result["tensor parallel"] = 4 * count * self._move(size, trainer.tensor_parallel)
        if trainer.context_parallel > 1:  # queries, keys, values and the output go to the ranks of their heads
            width = 2 * (text.query_width + text.key_width) / trainer.tensor_parallel
            size = gathered_bytes(tokens * width * self.size, trainer.context_parallel)
            result["context parallel"] = count * (self._move(size, self.split) + 3 * self.rates.collective_seconds)
        if trainer.expert_parallel > 1:  # to the experts and back
            routed = tokens / trainer.tensor_parallel * text.num_experts_per_token * text.hidden_size * self.size
            size = gathered_bytes(routed, trainer.expert_parallel)
            ranks = trainer.expert_parallel * trainer.expert_tensor_parallel
            sparse = sum(text.sparse_layers[layer] for layer in self.layers)
            result["expert parallel"] = 2 * sparse * self._move(size, ranks)
        return result

    def _move(self, size: float, ranks: int) -> float:
        return self.rates.collective_seconds + size / self.rates.link(ranks, self.node)

    def _recomputed(
        self, forward: Mapping[str, float], exposed: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of the forward pass that the backward pass repeats: computation, and collectives."""
        if self.trainer.recompute == "full":
            return dict(forward), dict(exposed)
        if self.trainer.recompute != "selective":
            return {}, {}
        dense = sum(self.model.mlp(layer, self.shape) for layer in self.layers) / self.split / self.rates.products
        again = {"products": dense} | {kind: forward[kind] for kind in ("experts", "attention", "delta rule")}
        again["other kernels"] = forward["other kernels"] / 2
        # Those of the MLP, half of the tensor-parallel ones, and the way to the experts.
        return again, dict(exposed) | {"tensor parallel": exposed["tensor parallel"] / 2, "context parallel": 0.0}

    def _add_vision(self, compute: dict[str, float], exposed: dict[str, float], training: bool) -> None:
        model, shape, rates, trainer = self.model, self.shape, self.rates, self.trainer
        trains = training and trainer.train_vision
        passes = 1.0 + (BACKWARD_PRODUCTS if trains else 0.0)
        seconds = passes * model.vision(shape) / rates.products
        seconds += (
            (1.0 + (BACKWARD_ATTENTION if trains else 0.0)) * model.vision_attention(shape) / rates.vision_attention
        )
        seconds += passes * model.vision_traffic(shape, self.size) / rates.memory
        compute["vision"] += seconds / self.split
        if self.split > 1:
            features = shape.patches / model.merge * model.text.hidden_size * self.size * (1 + model.deepstack)
            times = 2.0 if trains else 1.0
            exposed["image features"] = times * self._move(gathered_bytes(features, self.split), self.split)

    def _add_output(self, compute: dict[str, float], exposed: dict[str, float], training: bool) -> None:
        model, shape, trainer = self.model, self.shape, self.trainer
        passes = 1.0 + (BACKWARD_PRODUCTS if training else 0.0)
        logits = shape.scored * model.counts.vocab_size / self.split
        compute["output layer"] += passes * model.output(shape) / self.split / self.rates.products
        compute["output layer"] += passes / 3 * LOGIT_PASSES * 4 * logits / self.rates.memory
        if trainer.tensor_parallel > 1:
            tokens = shape.tokens / trainer.context_parallel
            size = gathered_bytes(tokens * model.text.hidden_size * self.size, trainer.tensor_parallel)
            exposed["tensor parallel"] += (passes + 1) / 2 * self._move(size, trainer.tensor_parallel)

    def _stage_transfer(self) -> float:
        """Seconds to send the activations of a micro-batch to the next stage, for each chunk of a virtual pipeline."""
        trainer, model = self.trainer, self.model
        size = self.shape.tokens / self.split * model.text.hidden_size * self.size
        each = self.rates.collective_seconds + size / self.rates.link(trainer.pipeline_parallel * self.split, self.node)
        return trainer.virtual_pipeline * each


def predict_training(
    config: Config,
    description: Mapping[str, Any],
    rates: Rates,
    lengths: EpisodeLengths,
    peak_tflops: float | None = None,
) -> TrainingPrediction:
    """Predict an update. `description`: the config.json. Raises ValueError if a sequence fits no micro-batch."""
    config = resolve_automatic(config, description)
    model, trainer = ModelShape.from_description(description), config.trainer
    count, shape = TrainingBatch.of_config(config, lengths, model).microbatches(config)
    steps = trainer.epochs * trainer.minibatches
    needs_proximal = trainer.critic is not None or (steps > 1 and trainer.loss.name != "raft")
    scored_passes = needs_proximal + (trainer.loss.kl_coefficient > 0)
    stages = range(trainer.pipeline_parallel)
    parts: dict[str, float] = {}
    hidden = 0.0
    for training, passes in ((True, trainer.epochs), (False, scored_passes)):
        if not passes:
            continue
        each = [stage_seconds(config, model, rates, shape, stage, training) for stage in stages]
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
    state = _State(config, model, rates)
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
        peak_tflops=peak_tflops,
    )


class _State:
    """Weights, gradients and optimizer state of the rank that has most."""

    def __init__(self, config: Config, model: ModelShape, rates: Rates) -> None:
        self.config, self.model, self.rates = config, model, rates
        trainer = self.trainer = config.trainer
        counts = model.counts
        self.size = DTYPE_BYTES[config.model.dtype]
        stages = trainer.pipeline_parallel
        share = config.trainer_world_size // stages
        self.replicas = trainer.data_parallel * trainer.context_parallel
        self.expert_copies = share // (trainer.expert_parallel * trainer.expert_tensor_parallel)
        experts = sum(layer.experts for layer in counts.layers)
        tower = counts.vision
        text = counts.total - experts - tower
        self.dense = text / trainer.tensor_parallel / stages + (tower if trainer.train_vision else 0)
        self.experts = experts / (trainer.expert_parallel * trainer.expert_tensor_parallel) / stages

    def reduce_seconds(self) -> float:
        """Reduce float32 gradients and gather the new weights; neither overlaps with computation (distributed.py)."""
        rates, node = self.rates, self.config.trainer_gpus_per_node
        total = 0.0
        for parameters, ranks in ((self.dense, self.replicas), (self.experts, self.expert_copies)):
            if ranks > 1 and parameters:
                link = rates.link(self.config.trainer_world_size // self.trainer.pipeline_parallel, node)
                total += gathered_bytes((4 + self.size) * parameters, ranks) / link + 2 * rates.collective_seconds
        return total

    def step_seconds(self) -> float:
        """Adam on the rank's share, and its gradients cleared, measured and scaled: all limited by memory."""
        own = self.dense / self.replicas + self.experts / self.expert_copies
        state = OPTIMIZER_BYTES[self.config.model.dtype]
        return ((2 * state + 4 + self.size) * own + 4 * 4 * (self.dense + self.experts)) / self.rates.memory

    def checkpoint_seconds(self) -> float:
        """Seconds for which training waits: the copy to the host, with optimizer_shards=whole after gathering."""
        state = OPTIMIZER_BYTES[self.config.model.dtype]
        own = self.dense / self.replicas + self.experts / self.expert_copies
        if self.trainer.checkpoint.optimizer_shards == "ranks" or self.replicas == 1:
            return (self.size * (self.dense + self.experts) + state * own) / self.rates.host
        whole = state * (self.dense + self.experts)
        return whole / self.rates.host + whole / GATHER_BYTES_PER_SECOND

    def sync_seconds(self) -> float:
        """Weights to every rank of every engine: the longest of what a trainer rank sends and an engine rank takes."""
        config, total = self.config, self.model.counts.total * DTYPE_BYTES[self.config.engine_dtype]
        if not config.rollout.engines:
            return 0.0
        taken = total / config.ranks_per_engine
        sent = total * config.rollout.engines / config.trainer_world_size
        copy = math.prod((self.trainer.tensor_parallel, self.trainer.context_parallel, self.trainer.pipeline_parallel))
        copy = max(copy, self.trainer.expert_parallel * self.trainer.expert_tensor_parallel)
        # Engines take weights from a whole copy on their own node, if there is one.
        return SYNC_SECONDS + max(taken, sent) / self.rates.link(copy, config.trainer_gpus_per_node)
