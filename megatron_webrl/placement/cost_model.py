"""The cost model: seconds of the parts of a training update and of generation, from shapes and rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_webrl.config.schema import Config
from megatron_webrl.model.layer_split import split_layers
from megatron_webrl.placement.hardware import Rates, gathered_bytes
from megatron_webrl.placement.memory_estimate import DTYPE_BYTES, EXPERT_IMBALANCE, OPTIMIZER_BYTES
from megatron_webrl.placement.model_shape import CHUNK, MicrobatchShape, ModelShape, chunked_operations, state_bytes

BACKWARD_PRODUCTS = 2.0  # times the forward pass: gradients of inputs and of weights
BACKWARD_ATTENTION = 2.5  # FlashAttention: five products for two
GATHER_BYTES_PER_SECOND = 1.5e9  # of trainer.checkpoint.optimizer_shards=whole, which gathers over gloo
SYNC_SECONDS = 0.1  # of a weight sync besides its transfer: pauses of engines, messages
STEP_SECONDS = 0.5e-3  # of an engine step besides weights and cache: scheduling, sampling, graph launch; assumed
LOGIT_PASSES = 12  # float32 values read or written for a logit in both passes (model/logprobs.py)
FLOAT32_HEAD_BYTES = 14  # more of a logit: written and read twice, its gradient written and rounded
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


class StageCosts:
    """A rank of a pipeline stage that computes its part of a micro-batch. trainer.recompute=auto recomputes nothing."""

    def __init__(self, config: Config, model: ModelShape, rates: Rates, shape: MicrobatchShape, stage: int) -> None:
        self.config, self.model, self.rates, self.shape, self.stage = config, model, rates, shape, stage
        trainer = self.trainer = config.trainer
        self.size = DTYPE_BYTES[config.model.dtype]
        self.split = trainer.tensor_parallel * trainer.context_parallel  # ranks that share a micro-batch
        self.node = config.trainer_gpus_per_node
        chunks = split_layers(model.layers, trainer.pipeline_parallel * trainer.virtual_pipeline)
        self.layers = [layer for chunk in chunks[stage :: trainer.pipeline_parallel] for layer in chunk]

    def seconds(self, training: bool) -> PassSeconds:
        """`training`: with a backward pass, else without."""
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
        forward = {
            "products": sum(model.projections(layer, shape) for layer in self.layers) / split / rates.products,
            "experts": sum(map(self._experts, self.layers)),
            "attention": sum(model.attention(layer, shape) for layer in self.layers) / split / rates.attention,
            "delta rule": sum(map(self._delta_rule, self.layers)),
        }
        backward = {kind: BACKWARD_PRODUCTS * seconds for kind, seconds in forward.items()}
        backward["attention"] = BACKWARD_ATTENTION * forward["attention"]
        for kinds, is_backward in ((forward, False), (backward, True)):
            moved = sum(model.traffic(layer, shape, self.size, is_backward) for layer in self.layers)
            kinds["other kernels"] = moved / split / rates.kernels
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
            link = self.rates.exchange(trainer.context_parallel, self.node, trainer.tensor_parallel)
            result["context parallel"] = count * (4 * self.rates.collective_seconds + size / link)
        if trainer.expert_parallel > 1:  # to the experts and back
            routed = tokens / trainer.tensor_parallel * text.num_experts_per_token * text.hidden_size * self.size
            size = gathered_bytes(routed, trainer.expert_parallel)
            ranks = trainer.expert_parallel * trainer.expert_tensor_parallel
            sparse = sum(text.sparse_layers[layer] for layer in self.layers)
            each = self.rates.collective_seconds + size / self.rates.exchange(ranks, self.node)
            result["expert parallel"] = 2 * sparse * each
        return result

    def _move(self, size: float, ranks: int) -> float:
        return self.rates.collective_seconds + size / self.rates.ring(ranks, self.node)

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
        moved = LOGIT_PASSES * 4 + (FLOAT32_HEAD_BYTES if self.config.model.float32_head else 0)
        compute["output layer"] += passes / 3 * moved * logits / self.rates.memory
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


class StateCosts:
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
        rates, node, trainer = self.rates, self.config.trainer_gpus_per_node, self.trainer
        total, expert_ranks = 0.0, trainer.expert_parallel * trainer.expert_tensor_parallel
        for parameters, ranks, stride in (
            (self.dense, self.replicas, trainer.tensor_parallel), (self.experts, self.expert_copies, expert_ranks)
        ):  # fmt: skip
            if ranks > 1 and parameters:
                size = gathered_bytes((4 + self.size) * parameters, ranks)
                total += size / rates.ring(ranks, node, stride) + 2 * rates.collective_seconds
        return total

    def step_seconds(self) -> float:
        """Adam on the rank's share, and its gradients cleared, measured and scaled: all limited by memory.

        With keep=host main weights and moments come from the host's memory, and return.
        """
        own = self.dense / self.replicas + self.experts / self.expert_copies
        state = OPTIMIZER_BYTES[self.config.model.dtype]
        moved = 2 * state * own if self.trainer.optimizer.keep == "host" else 0.0
        adam = ((2 * state + 4 + self.size) * own + 4 * 4 * (self.dense + self.experts)) / self.rates.memory
        return adam + moved / self.rates.pinned

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


class EngineCosts:
    """Seconds of an engine."""

    def __init__(self, config: Config, model: ModelShape, rates: Rates) -> None:
        self.config, self.model, self.rates = config, model, rates
        self.tensor, self.size = config.rollout.tensor_parallel, DTYPE_BYTES[config.engine_dtype]
        counts, text = model.counts, model.text
        self.experts = sum(layer.experts for layer in counts.layers)  # weights of all experts
        embedding = 0 if counts.tied else counts.embedding_parameters  # of the input, which is looked up
        tower = counts.vision
        self.dense = counts.total - self.experts - tower - embedding  # of what each token meets, with the output layer
        self.chosen = text.num_experts_per_token / text.num_experts if text.num_experts else 0.0  # share of experts

    def decode(self, requests: float, context: float) -> float:
        """One token of each request. `context`: tokens of a request so far, mean."""
        rates, text, size = self.rates, self.model.text, self.size
        # Each request goes to experts of its own: the share of experts that at least one of them needs is read.
        read = 1 - (1 - self.chosen) ** requests if text.num_experts else 0.0
        weights = size * (self.dense + read * self.experts) / self.tensor / rates.memory
        cached = 1 if self.config.rollout.has_fp8_cache else size
        cache = requests * context * 2 * cached * text.key_width * text.full_layers / self.tensor / rates.memory
        if text.linear:  # the state of each request is read and written
            states = sum(text.linear_layers) * 2 * state_bytes(text.linear, size)
            cache += requests * states / self.tensor / rates.memory
        arithmetic = 2 * requests * (self.dense + self.chosen * self.experts) / self.tensor / rates.prefill
        return max(weights, arithmetic) + cache + STEP_SECONDS + self._collectives(requests)

    def prefill(self, tokens: float, before: float) -> float:
        """`tokens` of a prompt whose first `before` tokens are in the cache."""
        model, text, rates = self.model, self.model.text, self.rates
        linear = self.dense - model.counts.embedding_parameters + self.chosen * self.experts  # logits of one token only
        attention = text.full_layers * 4 * tokens * (before + (tokens + 1) / 2) * text.query_width / rates.attention
        rule = (
            sum(text.linear_layers) * tokens * chunked_operations(text.linear) / rates.prefill if text.linear else 0.0
        )
        compute = 2 * tokens * linear / rates.prefill + attention + rule
        return compute / self.tensor + self._collectives(tokens)

    def image(self, patches: float) -> float:
        """A screenshot; tensor-parallel ranks share the layers, or the images of several requests."""
        model, rates, shape = self.model, self.rates, MicrobatchShape(0, 0, 0, patches, patches**2)
        seconds = model.vision(shape) / rates.prefill + model.vision_attention(shape) / rates.vision_attention
        return seconds / self.tensor

    def _collectives(self, tokens: float) -> float:
        """The two sums over tensor-parallel ranks in each layer, and sending to the next stages."""
        config, model, rates = self.config, self.model, self.rates
        node, width, total = config.engine_gpus_per_node, tokens * model.text.hidden_size * self.size, 0.0
        if self.tensor > 1:
            sent = 2 * gathered_bytes(width, self.tensor) / rates.ring(self.tensor, node)
            total += 2 * model.layers * (rates.collective_seconds / 2 + sent)
        if (stages := config.rollout.pipeline_parallel) > 1:
            each = rates.collective_seconds + width / rates.link(config.ranks_per_engine, node)
            total += (stages - 1) * each
        return total
