"""How much memory of a GPU each role needs, estimated from the configuration and the model's config.json.

Parameters, gradients, optimiser state, an engine's weights and a token's share of the KV cache follow from shapes and
are exact but for padding. What the forward pass keeps for the backward pass is counted from the tensors that the code
of model/ saves; buffers of libraries are a fixed reserve. Nothing of it was measured on GPUs.

Assumed of a row (trainer.tokens_per_microbatch): half of its tokens stand for images, each its own, shared out evenly;
the scored share of its tokens is rollout.max_new_tokens of rollout.max_model_len; the busiest rank gets half as many
tokens again for its experts as the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_webrl.config import Config, ConfigError
from megatron_webrl.model.counts import Counts, Shape, count
from megatron_webrl.model.split import split_layers

GIB = 2**30
VISUAL_SHARE = 0.5  # of a row's tokens
EXPERT_IMBALANCE = 1.5
TRAINER_RESERVE = 4 * GIB  # CUDA context, communicators, workspaces, and what the allocator cannot use
ENGINE_RESERVE = 4 * GIB  # the same, vLLM's captured graphs and its activations
LOGIT_CHUNKS = 4 * 2**26  # float32 copies of a chunk of logits (model/logprobs.py)
BYTES = {"float32": 4, "bfloat16": 2}

WAYS_OUT = {
    "parameters": "raise a parallel size of the model",
    "gradients": "raise trainer.tensor_parallel, pipeline_parallel or expert_parallel",
    "optimizer": "take more nodes, or raise a parallel size of the trainer",
    "activations": "set trainer.recompute=full, or lower trainer.tokens_per_microbatch",
    "images": "lower trainer.tokens_per_microbatch, raise trainer.tensor_parallel, or set trainer.train_vision=false",
    "logits": "lower trainer.tokens_per_microbatch or rollout.max_new_tokens",
    "kv_cache": "lower rollout.kv_cache_mib or rollout.gpu_memory_utilization",
    "buffers": "lower weights.bucket_mib",
}


@dataclass(frozen=True)
class Use:
    """Memory of one GPU (or, without GPUs, of one process), bytes."""

    who: str
    parameters: int
    gradients: int = 0
    optimizer: int = 0  # main weights and moments
    activations: int = 0  # of the text model
    images: int = 0  # activations of the vision tower, and its features
    logits: int = 0
    kv_cache: int = 0
    buffers: int = 0  # of weight transfers and libraries

    @property
    def parts(self) -> dict[str, int]:
        """Every part by name."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "who"}

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Estimate:
    """What a configuration needs."""

    parameters: int  # of the whole model
    trainer: tuple[Use, ...]  # of a rank of each pipeline stage
    engine: Use  # of the largest rank
    cached_tokens: int  # that an engine's KV cache holds


def estimate(config: Config, description: Mapping[str, Any]) -> Estimate:
    """Estimate the memory of every role. `description`: the model's config.json."""
    counts, shape = count(description), Shape.of(description["text_config"])
    trainer = _Trainer(config, counts, shape, description["vision_config"])
    stages = tuple(trainer.use(stage) for stage in range(config.trainer.pipeline_parallel))
    engine, tokens = _engine(config, counts, shape)
    return Estimate(counts.total, stages, engine, tokens)


def check(config: Config, found: Estimate) -> None:
    """Refuse what does not fit a GPU. Raises ConfigError; without GPUs nothing is refused."""
    cluster, rollout = config.cluster, config.rollout
    if not cluster.gpus:
        return
    if found.cached_tokens < rollout.max_model_len:
        raise ConfigError(
            f"engine: its weights of {found.engine.parameters / GIB:.1f} GiB on each GPU leave a KV cache of "
            f"{found.cached_tokens} tokens in rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g} of "
            f"cluster.gpu_gib={cluster.gpu_gib:g}, less than rollout.max_model_len={rollout.max_model_len}; raise "
            "rollout.tensor_parallel or pipeline_parallel"
        )
    for use in (*found.trainer, found.engine):
        if use.total > cluster.gpu_gib * GIB:
            largest = sorted(use.parts, key=lambda name: -use.parts[name])
            words = ", ".join(f"{name} {use.parts[name] / GIB:.1f}" for name in largest[:3])
            way = WAYS_OUT[largest[0]]
            raise ConfigError(
                f"{use.who} needs {use.total / GIB:.1f} GiB of a GPU, more than cluster.gpu_gib={cluster.gpu_gib:g} "
                f"({words}); {way}"
            )


class _Trainer:
    """The trainer's side of the estimate."""

    def __init__(self, config: Config, counts: Counts, shape: Shape, vision: Mapping[str, Any]) -> None:
        self.config, self.counts, self.shape, self.vision = config, counts, shape, vision
        self.trainer = trainer = config.trainer
        self.size = BYTES[config.model.dtype]  # of a weight or an activation
        self.tokens = trainer.tokens_per_microbatch // trainer.context_parallel  # of a rank
        self.spread = trainer.tensor_parallel if trainer.sequence_parallel else 1  # ranks that share tokens out
        self.last = trainer.pipeline_parallel - 1

    def use(self, stage: int) -> Use:
        """Memory of a rank of a stage."""
        trainer = self.trainer
        dense, experts, frozen = self._parameters(stage)
        replicas = trainer.data_parallel * trainer.context_parallel
        share = self.config.trainer_ranks // trainer.pipeline_parallel
        copies = share // (trainer.expert_parallel * trainer.expert_tensor_parallel)
        state = 12 if self.size == 2 else 8  # two moments and, beside bfloat16, a main weight, in float32
        return Use(
            who=f"trainer, stage {stage}" if self.last else "trainer",
            parameters=(dense + experts) * self.size,
            gradients=4 * (dense + experts - frozen),
            optimizer=state * ((dense - frozen) // replicas + experts // copies),
            activations=self._activations(stage),
            images=self._images() if stage == 0 else 0,
            logits=self._logits() if stage == self.last else 0,
            buffers=self.config.weights.bucket_mib * 2**20 + (TRAINER_RESERVE if self.config.cluster.gpus else 0),
        )

    def _layers(self, stage: int) -> list[int]:
        trainer = self.trainer
        chunks = split_layers(len(self.shape.sparse), trainer.pipeline_parallel * trainer.virtual_pipeline)
        return [layer for chunk in chunks[stage :: trainer.pipeline_parallel] for layer in chunk]

    def _parameters(self, stage: int) -> tuple[int, int, int]:
        """Parameters of a rank: without experts, of experts, and those of the former that take no gradient."""
        trainer, counts = self.trainer, self.counts
        layers = [counts.layers[layer] for layer in self._layers(stage)]
        dense = sum(layer.split for layer in layers) // trainer.tensor_parallel + sum(layer.whole for layer in layers)
        experts = sum(layer.experts for layer in layers) // (trainer.expert_parallel * trainer.expert_tensor_parallel)
        tower = counts.vision_split + counts.vision_whole if stage == 0 else 0
        rows = -(-counts.vocabulary // trainer.tensor_parallel) * counts.hidden
        dense += tower + (rows if stage == 0 else 0)
        if stage == self.last:
            dense += counts.hidden + (rows if not counts.tied or self.last else 0)
        return dense, experts, 0 if trainer.train_vision else tower

    def _in_flight(self, stage: int) -> int:
        """Chunks of layers whose activations a stage holds at a time, at most, in Megatron's schedules."""
        stages, chunks = self.trainer.pipeline_parallel, self.trainer.virtual_pipeline
        if chunks == 1:
            return stages - stage
        return 2 * (stages - stage - 1) + (chunks - 1) * stages + 1

    def _activations(self, stage: int) -> int:
        layers = self._layers(stage)
        kept = max((self._of_layer(layer, self.trainer.recompute) for layer in layers), default=0)
        whole = max((self._of_layer(layer, "none") for layer in layers), default=0)
        held = -(-len(layers) // self.trainer.virtual_pipeline) * self._in_flight(stage)
        # In the backward pass the layer at work is there whole, and half as much again of gradients.
        at_work = whole // 2 if self.trainer.recompute == "none" else whole * 3 // 2
        return held * kept + at_work

    def _of_layer(self, layer: int, recompute: str) -> int:
        """Bytes that a layer's forward pass keeps: model/norm.py keeps its input in float32 and its result."""
        shape, size, tensor = self.shape, self.size, self.trainer.tensor_parallel
        if recompute == "full":
            return size * shape.hidden * self.tokens // self.spread
        wide = 0 if self.trainer.layers == "transformer_engine" else 4
        norms = 2 * (wide + 2 * size) * shape.hidden // self.spread
        # Inputs of the norms of q and k, what they give, v; attention's result and the input of its projection.
        heads = (wide + size) * (shape.queries + shape.keys) + size * (shape.queries + 2 * shape.keys)
        heads += size * shape.queries * (1 if recompute == "selective" else 2)
        mlp = 0
        if recompute == "none" and shape.sparse[layer]:
            routed = shape.chosen * size * (2 * shape.hidden + 4 * shape.expert_inner) * EXPERT_IMBALANCE
            mlp = int(routed) // self.spread
        elif recompute == "none":
            mlp = 4 * size * shape.inner // tensor  # gate and up, the activated gate, the product
        return (norms + heads // tensor + mlp) * self.tokens

    def _images(self) -> int:
        """What the first stage keeps of the images of the rows in flight, and the features of one row."""
        vision, trainer = self.vision, self.trainer
        tokens = int(trainer.tokens_per_microbatch * VISUAL_SHARE)
        patches = tokens * vision["spatial_merge_size"] ** 2 // (trainer.tensor_parallel * trainer.context_parallel)
        block, rest = (self.size * width for width in tower_widths(vision))
        rows = self._rows_in_flight()
        # A tower that is not trained keeps nothing but what it works on.
        kept = rows * (vision["depth"] * block + rest) if trainer.train_vision else 2 * block + rest
        features = tokens * self.shape.hidden * self.size * (1 + len(vision["deepstack_visual_indexes"]))
        return patches * kept + rows * features

    def _rows_in_flight(self) -> int:
        return -(-self._in_flight(0) // self.trainer.virtual_pipeline)

    def _logits(self) -> int:
        """Of the scored positions, with their gradient."""
        rollout, tensor = self.config.rollout, self.trainer.tensor_parallel
        scored = self.tokens * rollout.max_new_tokens // rollout.max_model_len
        return 2 * self.size * scored * -(-self.counts.vocabulary // tensor) + LOGIT_CHUNKS


def tower_widths(vision: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers a patch that the vision tower keeps for the backward pass: in each block, and before and after them."""
    hidden, mergers = vision["hidden_size"], 1 + len(vision["deepstack_visual_indexes"])
    patch = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    return 11 * hidden + 2 * vision["intermediate_size"], patch + hidden + mergers * 3 * hidden


def _engine(config: Config, counts: Counts, shape: Shape) -> tuple[Use, int]:
    """Of the largest rank of an engine, and the tokens that the engine's KV cache holds."""
    rollout, cluster, size = config.rollout, config.cluster, BYTES[config.engine_dtype]
    tensor, stages = rollout.tensor_parallel, rollout.pipeline_parallel
    held = -(-len(counts.layers) // stages)
    layer = max(each.split // tensor + each.whole + each.experts // tensor for each in counts.layers)
    # vLLM's mixture of experts keeps both ends of the model on every stage.
    ends = 1 if counts.tied or (stages > 1 and not shape.experts) else 2
    rows = -(-counts.vocabulary // tensor) * counts.hidden
    tower = counts.vision_split // tensor + counts.vision_whole
    weights = size * (held * layer + ends * rows + counts.hidden + tower)
    head = shape.keys // shape.key_heads
    token = 2 * size * held * max(shape.key_heads // tensor, 1) * head
    reserve = ENGINE_RESERVE if cluster.gpus else 0
    cache = rollout.kv_cache_mib * 2**20
    if not cache and cluster.gpus:
        cache = max(int(rollout.gpu_memory_utilization * cluster.gpu_gib * GIB) - weights - reserve, 0)
    buffers = reserve + config.weights.bucket_mib * 2**20
    return Use("engine", parameters=weights, kv_cache=cache, buffers=buffers), cache // token
