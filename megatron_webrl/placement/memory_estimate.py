"""Estimate the GPU memory of each role from the configuration and the model's config.json.

Parameters, gradients, optimiser state and KV cache follow from shapes, exact except for padding; activations from the
tensors that model/ saves for the backward pass; library buffers are a fixed reserve. Never compared with a GPU.
Assumptions for trainer.tokens_per_microbatch tokens: half belong to images, all different and spread evenly; the scored
fraction is rollout.max_new_tokens / max_model_len; the busiest rank gets 1.5 times the mean tokens for its experts.
With trainer.merge_prefixes=all their sequences have twice as many tokens, as common prefixes are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast, get_args

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.compute_options import Recompute
from megatron_webrl.model.hf_config import choose_prefix_merging, cpu_engine_obstacle, has_experts, has_linear_attention
from megatron_webrl.model.layer_split import check_divides, split_layers
from megatron_webrl.model.parameter_counts import (
    ParameterCounts,
    TextDimensions,
    count_parameters,
    deepstack_layers,
)
from megatron_webrl.placement.model_shape import saved_bytes, state_bytes
from megatron_webrl.placement.placement import gpu_memory_share

MIN_IMAGE_BUFFER_MIB = 512


def check_parallel_layout(config: Config, description: dict[str, Any]) -> None:
    """Raise ConfigError for sizes that cannot split the model. `description`: its config.json."""
    text, trainer = description["text_config"], config.trainer
    sparse = has_experts(description)
    text = {"num_experts": text.get("num_local_experts"), **text}  # transformers 5 writes num_local_experts
    heads = trainer.tensor_parallel * trainer.context_parallel
    heads_name = "tensor_parallel" if trainer.context_parallel == 1 else "tensor_parallel x context_parallel"
    divided = [(heads_name, heads, name) for name in ("num_attention_heads", "num_key_value_heads")]
    divided += (
        [
            ("expert_parallel", trainer.expert_parallel, "num_experts"),
            ("expert_tensor_parallel", trainer.expert_tensor_parallel, "moe_intermediate_size"),
        ]
        if sparse
        else [("tensor_parallel", trainer.tensor_parallel, "intermediate_size")]
    )
    for setting_name, size, name in divided:
        source = " x ".join(f"trainer.{part}" for part in setting_name.split(" x "))
        check_divides(setting_name, size, name, text[name], source)
    if config.model.platform == "cpu" and (obstacle := cpu_engine_obstacle(description, config.engine_dtype)):
        raise ConfigError(f"model.path={config.model.path}: {obstacle}; set rollout.dtype=bfloat16 for such a model")
    if has_linear_attention(description):
        _check_linear_attention(config, text, sparse)
    _check_parallel(config, text["num_hidden_layers"], sparse)
    _check_engine_layout(config, text, description["vision_config"], sparse)
    if config.rollout.max_model_len > text["max_position_embeddings"]:
        raise ConfigError(
            f"rollout.max_model_len={config.rollout.max_model_len} exceeds "
            f"max_position_embeddings={text['max_position_embeddings']} of {config.model.path}"
        )


def _check_linear_attention(config: Config, text: dict[str, Any], sparse: bool) -> None:
    trainer, rollout, path = config.trainer, config.rollout, config.model.path
    if trainer.context_parallel > 1:
        raise ConfigError(
            f"trainer.context_parallel={trainer.context_parallel} cannot split the state of the linear attention of "
            f"{path}; set it to 1"
        )
    if trainer.merge_prefixes == "all":
        raise ConfigError(
            f"trainer.merge_prefixes=all would have the linear attention of {path} hand its state to several "
            "continuations; set auto or trajectory: the beginnings that episodes have in common are then computed "
            "once for each"
        )
    dimensions = ["linear_num_key_heads", "linear_num_value_heads"]
    dimensions += ["shared_expert_intermediate_size"] if sparse else []
    for part, size in (("trainer", trainer.tensor_parallel), ("rollout", rollout.tensor_parallel)):
        for name in dimensions:
            check_divides("tensor_parallel", size, name, text[name], f"{part}.tensor_parallel")


def image_buffer_mib(config: Config, patch_size: int, spatial_merge_size: int) -> int:
    """MiB of a trainer rank's image buffer, for the largest screenshot, encoded and as patches; 0: no threads."""
    if not config.trainer.image_workers:
        return 0
    # One token stands for a square of patches; an encoded image is at most about as large as its pixels.
    side = patch_size * spatial_merge_size
    largest = -(-2 * config.rollout.max_model_len * side**2 * 3 // 2**20)
    return max(MIN_IMAGE_BUFFER_MIB, largest)


def _check_parallel(config: Config, layers: int, sparse: bool) -> None:
    trainer, path = config.trainer, config.model.path
    chunks = trainer.pipeline_parallel * trainer.virtual_pipeline
    if trainer.virtual_pipeline > 1 and trainer.pipeline_parallel == 1:
        raise ConfigError(
            f"trainer.virtual_pipeline={trainer.virtual_pipeline} needs trainer.pipeline_parallel of at least 2"
        )
    if chunks > layers:
        raise ConfigError(
            f"trainer.pipeline_parallel x virtual_pipeline = {chunks} exceeds the {layers} layers of {path}; lower them"
        )
    experts = trainer.expert_parallel * trainer.expert_tensor_parallel
    ranks = trainer.tensor_parallel * trainer.context_parallel * trainer.data_parallel
    if not sparse and experts > 1:
        raise ConfigError(
            f"trainer.expert_parallel={trainer.expert_parallel} and trainer.expert_tensor_parallel="
            f"{trainer.expert_tensor_parallel} need a mixture of experts, but {path} is dense; set both to 1"
        )
    check_divides(
        "expert_parallel x expert_tensor_parallel",
        experts,
        "tensor_parallel x context_parallel x data_parallel",
        ranks,
        "trainer.expert_parallel",
    )


def _check_engine_layout(config: Config, text: dict[str, Any], vision: dict[str, Any], sparse: bool) -> None:
    """Raise ConfigError for engine sizes into which vLLM cannot split the model."""
    rollout, path = config.rollout, config.model.path
    size, kv_heads = rollout.tensor_parallel, text["num_key_value_heads"]
    divided = [("num_attention_heads", text)]
    if not sparse:
        divided.append(("intermediate_size", text))
    elif rollout.expert_parallel:
        divided.append(("num_experts", text))
    else:
        divided.append(("moe_intermediate_size", text))
    for name, section in divided:
        check_divides("tensor_parallel", size, name, section[name], "rollout.tensor_parallel")
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"rollout.tensor_parallel={size} neither divides num_key_value_heads={kv_heads} of {path} nor is a "
            "multiple of it"
        )
    if rollout.expert_parallel and not sparse:
        raise ConfigError(f"rollout.expert_parallel=true needs a mixture of experts, but {path} is dense")
    if rollout.pipeline_parallel > text["num_hidden_layers"]:
        raise ConfigError(
            f"rollout.pipeline_parallel={rollout.pipeline_parallel} exceeds the {text['num_hidden_layers']} layers "
            f"of {path}"
        )


GIB = 2**30
IMAGE_TOKEN_FRACTION = 0.5  # of the tokens of a packed sequence
EXPERT_IMBALANCE = 1.5
SEQUENCE_TOKENS_RATIO = 2  # with common prefixes; trainer/data/packing.py allows 4
TRAINER_RESERVE_BYTES = 4 * GIB  # CUDA context, communicators, workspaces, fragmentation
ENGINE_RESERVE_BYTES = 4 * GIB  # the same, plus vLLM's captured graphs and activations
LOGIT_CHUNK_BYTES = 4 * 2**26  # float32 copies of a chunk of logits (model/logprobs.py)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FILLED_BY_AUTO = 0.9  # of a GPU, by trainer.recompute=auto: a peak may be 10 % above its estimate (`webrl check gpu`)
OPTIMIZER_BYTES = {"float32": 8, "bfloat16": 12}  # of a parameter: two moments, plus a main weight for bfloat16

REMEDIES = {
    "parameters": "raise a parallel size of the model",
    "gradients": "raise trainer.tensor_parallel, pipeline_parallel or expert_parallel",
    "optimizer": "set trainer.optimizer.keep=host, take more nodes, or raise a parallel size of the trainer",
    "activations": "set trainer.recompute=full, or lower trainer.tokens_per_microbatch",
    "images": "lower trainer.tokens_per_microbatch, raise trainer.tensor_parallel, or set trainer.train_vision=false",
    "logits": "lower trainer.tokens_per_microbatch or rollout.max_new_tokens",
    "kv_cache": "lower rollout.kv_cache_mib or rollout.gpu_memory_utilization",
    "buffers": "lower weights.bucket_mib, or take GPUs with more memory",
}


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one GPU, or of one process without GPUs, bytes."""

    role: str
    parameters: int
    gradients: int = 0
    optimizer: int = 0  # main weights and moments
    activations: int = 0  # of the text model
    images: int = 0  # activations of the vision tower, and its features
    logits: int = 0
    kv_cache: int = 0
    buffers: int = 0  # of weight transfers and libraries

    @property
    def components(self) -> dict[str, int]:
        """Every component by name."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "role"}

    @property
    def total(self) -> int:
        """Sum of all components."""
        return sum(self.components.values())

    @property
    def largest(self) -> str:
        """The three largest components, GiB."""
        return ", ".join(f"{name} {self.components[name] / GIB:.1f}" for name in self._by_size[:3])

    @property
    def remedy(self) -> str:
        """A way to need less."""
        return REMEDIES[self._by_size[0]]

    @property
    def _by_size(self) -> list[str]:
        return sorted(self.components, key=lambda name: -self.components[name])


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory that a configuration needs."""

    parameters: int  # of the whole model
    trainer: tuple[MemoryUse, ...]  # of a rank of each pipeline stage; empty without a trainer
    engine: MemoryUse  # of the largest rank
    kv_cache_tokens: int  # capacity of an engine's KV cache


def choose_recompute(config: Config, description: Mapping[str, Any]) -> Recompute:
    """The value of trainer.recompute; for auto the one that recomputes least and leaves a tenth of each GPU free.

    `description`: the model's config.json. Without GPUs auto recomputes nothing; where nothing fits, whole layers.
    """
    if config.trainer.recompute != "auto":
        return cast(Recompute, config.trainer.recompute)
    cluster = config.cluster
    if not cluster.gpus_per_node:
        return "none"
    limit = FILLED_BY_AUTO * cluster.gpu_gib * GIB
    for recompute in get_args(Recompute):
        estimate = estimate_memory(_with_trainer(config, recompute=recompute), description)
        beside = estimate.engine.total if cluster.colocate else 0
        if all(use.total + beside <= limit for use in estimate.trainer):
            return cast(Recompute, recompute)
    return "full"


def resolve_automatic(config: Config, description: Mapping[str, Any]) -> Config:
    """The configuration with the values that trainer.merge_prefixes=auto and trainer.recompute=auto have for it."""
    config = _with_trainer(config, merge_prefixes=choose_prefix_merging(config.trainer.merge_prefixes, description))
    return _with_trainer(config, recompute=choose_recompute(config, description))


def _with_trainer(config: Config, **settings: Any) -> Config:
    return replace(config, trainer=replace(config.trainer, **settings))


def estimate_memory(config: Config, description: Mapping[str, Any]) -> MemoryEstimate:
    """Estimate the memory of every role. `description`: the model's config.json."""
    config = resolve_automatic(config, description)
    counts, shape = count_parameters(description), TextDimensions.from_text_config(description["text_config"])
    trainer = _TrainerEstimate(config, counts, shape, description["vision_config"])
    stages = range(config.trainer.pipeline_parallel if config.trainer_world_size else 0)
    engine, tokens = _engine(config, counts, shape)
    return MemoryEstimate(counts.total, tuple(map(trainer.use, stages)), engine, tokens)


def check_memory(config: Config, estimate: MemoryEstimate) -> None:
    """Raise ConfigError if a role does not fit a GPU; without GPUs everything fits."""
    cluster, rollout = config.cluster, config.rollout
    if not cluster.gpus_per_node:
        return
    if rollout.kv_cache_mib and estimate.kv_cache_tokens < rollout.max_model_len:
        raise ConfigError(
            f"rollout.kv_cache_mib={rollout.kv_cache_mib} holds {estimate.kv_cache_tokens} tokens, less than "
            f"rollout.max_model_len={rollout.max_model_len}; raise it"
        )
    if estimate.kv_cache_tokens < rollout.max_model_len:
        raise ConfigError(
            f"engine: weights of {estimate.engine.parameters / GIB:.1f} GiB on each GPU leave a KV cache of "
            f"{estimate.kv_cache_tokens} tokens in rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g} "
            f"of cluster.gpu_gib={cluster.gpu_gib:g}, less than rollout.max_model_len={rollout.max_model_len}; raise "
            "rollout.tensor_parallel or pipeline_parallel"
        )
    for use in (*estimate.trainer, estimate.engine):
        if use.total > cluster.gpu_gib * GIB:
            raise ConfigError(
                f"{use.role} needs {use.total / GIB:.1f} GiB of a GPU, more than cluster.gpu_gib={cluster.gpu_gib:g} "
                f"({use.largest}); {use.remedy}"
            )
    if cluster.colocate and estimate.trainer:
        _check_shared_memory(config, max(estimate.trainer, key=lambda use: use.total), estimate.engine)


def _check_shared_memory(config: Config, trainer: MemoryUse, engine: MemoryUse) -> None:
    """Check that a trainer rank and an engine rank fit one GPU, and that each fits its share of the memory."""
    gib, share = config.cluster.gpu_gib, config.rollout.gpu_memory_utilization
    if trainer.total + engine.total > gib * GIB:
        raise ConfigError(
            f"{trainer.role} needs {trainer.total / GIB:.1f} GiB ({trainer.largest}) and engine "
            f"{engine.total / GIB:.1f} GiB ({engine.largest}) of the same GPU (cluster.colocate), more "
            f"than cluster.gpu_gib={gib:g}; {max(trainer, engine, key=lambda use: use.total).remedy}"
        )
    low, high = engine.total / GIB / gib, 1 - trainer.total / GIB / gib
    if not low <= share <= high:
        use = trainer if share > high else engine
        raise ConfigError(
            f"rollout.gpu_memory_utilization={share:g} leaves the {use.role.partition(',')[0]} "
            f"{gpu_memory_share(config, use.role) * gib:.1f} of cluster.gpu_gib={gib:g}, but it needs "
            f"{use.total / GIB:.1f} GiB (cluster.colocate); set it to about {(low + high) / 2:.3g}"
        )


def _staging_bytes(config: Config) -> int:
    """Staging memory of weight transfers that the table counts: on the GPU if there is one, else of the process."""
    on_host = config.cluster.gpus_per_node and config.weights_through_host
    return 0 if on_host else config.weights.bucket_mib * 2**20


class _TrainerEstimate:
    """Estimates trainer ranks."""

    def __init__(
        self, config: Config, counts: ParameterCounts, shape: TextDimensions, vision: Mapping[str, Any]
    ) -> None:
        self.config, self.counts, self.shape, self.vision = config, counts, shape, vision
        self.trainer = trainer = config.trainer
        self.size = DTYPE_BYTES[config.model.dtype]  # of a weight or an activation
        self.tokens = trainer.tokens_per_microbatch // trainer.context_parallel  # of a rank
        self.spread = trainer.tensor_parallel  # ranks that split the sequence (sequence parallelism)
        self.last = trainer.pipeline_parallel - 1
        self.shares_prefixes = trainer.merge_prefixes == "all"

    def use(self, stage: int) -> MemoryUse:
        """Memory of a rank of a stage."""
        trainer = self.trainer
        dense, experts, frozen = self._parameters(stage)
        replicas = trainer.data_parallel * trainer.context_parallel
        share = self.config.trainer_world_size // trainer.pipeline_parallel
        copies = share // (trainer.expert_parallel * trainer.expert_tensor_parallel)
        state = OPTIMIZER_BYTES[self.config.model.dtype] * ((dense - frozen) // replicas + experts // copies)
        activations = self._activations(stage)
        images = self._images() if stage == 0 else 0
        logits = self._logits() if stage == self.last else 0
        if trainer.optimizer.keep == "host":  # there only while those are not: what exceeds them
            state = max(0, state - activations - images - logits)
        return MemoryUse(
            role=f"trainer, stage {stage}" if self.last else "trainer",
            parameters=(dense + experts) * self.size,
            gradients=4 * (dense + experts - frozen),
            optimizer=state,
            activations=activations,
            images=images,
            logits=logits,
            buffers=_staging_bytes(self.config) + (TRAINER_RESERVE_BYTES if self.config.cluster.gpus_per_node else 0),
        )

    def _layers(self, stage: int) -> list[int]:
        trainer = self.trainer
        chunks = split_layers(len(self.shape.sparse_layers), trainer.pipeline_parallel * trainer.virtual_pipeline)
        return [layer for chunk in chunks[stage :: trainer.pipeline_parallel] for layer in chunk]

    def _parameters(self, stage: int) -> tuple[int, int, int]:
        """Parameters of a rank: dense, experts, and the frozen part of the dense ones."""
        trainer, counts = self.trainer, self.counts
        layers = [counts.layers[one] for one in self._layers(stage)]
        dense = sum(one.sharded for one in layers) // trainer.tensor_parallel + sum(one.replicated for one in layers)
        experts = sum(one.experts for one in layers) // (trainer.expert_parallel * trainer.expert_tensor_parallel)
        tower = counts.vision if stage == 0 else 0
        embedding = -(-counts.vocab_size // trainer.tensor_parallel) * counts.hidden_size
        dense += tower + (embedding if stage == 0 else 0)
        if stage == self.last:
            dense += counts.hidden_size + (embedding if not counts.tied or self.last else 0)
        return dense, experts, 0 if trainer.train_vision else tower

    def _in_flight(self, stage: int) -> int:
        """Most layer chunks whose activations a stage stores at a time in Megatron's schedules."""
        stages, chunks = self.trainer.pipeline_parallel, self.trainer.virtual_pipeline
        if chunks == 1:
            return stages - stage
        return 2 * (stages - stage - 1) + (chunks - 1) * stages + 1

    def _activations(self, stage: int) -> int:
        layers = self._layers(stage)
        if not layers:
            return 0
        kept = sum(self._of_layer(layer, self.trainer.recompute) for layer in layers)
        whole = max(self._of_layer(layer, "none") for layer in layers)
        stored = -(-len(layers) // self.trainer.virtual_pipeline) * self._in_flight(stage)
        # In the backward pass the current layer has all activations, and half as much again of gradients.
        current = whole // 2 if self.trainer.recompute == "none" else whole * 3 // 2
        return stored * kept // len(layers) + current

    def _of_layer(self, layer: int, recompute: str) -> int:
        """Bytes that a layer's forward pass saves for the micro-batch."""
        shape, size, tensor = self.shape, self.size, self.trainer.tensor_parallel
        if recompute == "full":
            return size * shape.hidden_size * self.tokens // self.spread
        norms = 2 * 2 * size * shape.hidden_size // self.spread  # each keeps its input, and what follows its output
        if shape.linear and shape.linear_layers[layer]:
            mixer = int(saved_bytes(shape.linear, size, keeps_rule=recompute == "none"))
        else:
            mixer = self._attention(recompute)
        mlp = 0
        if recompute == "none" and shape.sparse_layers[layer]:
            routed = shape.num_experts_per_token * size * (2 * shape.hidden_size + 3 * shape.moe_intermediate_size)
            mlp = (
                int(routed * EXPERT_IMBALANCE) // self.spread
                + 3 * size * shape.shared_expert_intermediate_size // tensor
            )
        elif recompute == "none":
            mlp = 3 * size * shape.intermediate_size // tensor  # gate and up, and their product
        return (norms + mixer // tensor + mlp) * self.tokens

    def _attention(self, recompute: str) -> int:
        """Bytes that full attention saves of a token, without the norm of its input."""
        shape, size = self.shape, self.size
        # The inputs of both norms; rotated k, v; rotated q, the output of attention, the input of its projection.
        heads = size * (2 * shape.query_width + 3 * shape.key_width)
        heads += size * shape.query_width * (1 if recompute == "selective" else 2)
        if shape.linear:  # gated: the output before the gate, and the gate's sigmoid in float32
            heads += (size + 4) * shape.query_width
        if self.shares_prefixes and recompute == "none":  # each branch has keys and values of its prefix
            heads += SEQUENCE_TOKENS_RATIO * 2 * size * shape.key_width
        return heads

    def _images(self) -> int:
        """Images of the first stage: activations and features of all packed sequences in flight."""
        vision, trainer = self.vision, self.trainer
        tokens = int(trainer.tokens_per_microbatch * IMAGE_TOKEN_FRACTION)
        patches = tokens * vision["spatial_merge_size"] ** 2 // (trainer.tensor_parallel * trainer.context_parallel)
        block, rest = (self.size * width for width in vision_activation_widths(vision))
        sequences = -(-self._in_flight(0) // trainer.virtual_pipeline)  # in flight
        # A frozen tower keeps only the layer that it is computing.
        kept = sequences * (vision["depth"] * block + rest) if trainer.train_vision else 2 * block + rest
        features = tokens * self.shape.hidden_size * self.size * (1 + len(deepstack_layers(vision)))
        return patches * kept + sequences * features

    def _logits(self) -> int:
        """Logits of the scored positions, and their gradient; of a float32 head also that rounded for its products."""
        rollout, tensor = self.config.rollout, self.trainer.tensor_parallel
        sequence_tokens = self.tokens * (SEQUENCE_TOKENS_RATIO if self.shares_prefixes else 1)
        scored = sequence_tokens * rollout.max_new_tokens // rollout.max_model_len
        each = 4 + 4 + self.size if self.config.model.float32_head else 2 * self.size
        return each * scored * -(-self.counts.vocab_size // tensor) + LOGIT_CHUNK_BYTES


def vision_activation_widths(vision: Mapping[str, Any]) -> tuple[int, int]:
    """Values per patch that the vision tower saves for the backward pass: in each block, and outside of the blocks."""
    hidden, mergers = vision["hidden_size"], 1 + len(deepstack_layers(vision))
    patch = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    return 11 * hidden + 2 * vision["intermediate_size"], patch + hidden + mergers * 3 * hidden


def _engine(config: Config, counts: ParameterCounts, shape: TextDimensions) -> tuple[MemoryUse, int]:
    """Memory of the largest rank of an engine, and the tokens that its KV cache has room for."""
    rollout, cluster, size = config.rollout, config.cluster, DTYPE_BYTES[config.engine_dtype]
    tensor, stages = rollout.tensor_parallel, rollout.pipeline_parallel
    count = -(-len(counts.layers) // stages)
    each = [one.sharded // tensor + one.replicated + one.experts // tensor for one in counts.layers]
    layers = _most_of_neighbours(each, count)
    # For a mixture of experts vLLM keeps both ends of the model on every stage.
    ends = 1 if counts.tied or (stages > 1 and not shape.num_experts) else 2
    embedding = -(-counts.vocab_size // tensor) * counts.hidden_size
    tower = counts.vision
    weights = size * (layers + ends * embedding + counts.hidden_size + tower)
    head = shape.key_width // shape.num_key_value_heads
    cached = 1 if rollout.has_fp8_cache else size  # bytes of a value of the KV cache
    full = _most_of_neighbours([int(not linear) for linear in shape.linear_layers], count)
    token = 2 * cached * full * max(shape.num_key_value_heads // tensor, 1) * head
    reserve = ENGINE_RESERVE_BYTES if cluster.gpus_per_node else 0
    cache = rollout.kv_cache_mib * 2**20
    if not cache and cluster.gpus_per_node:
        cache = max(int(rollout.gpu_memory_utilization * cluster.gpu_gib * GIB) - weights - reserve, 0)
    buffers = reserve + _staging_bytes(config)
    states = 0  # of linear attention: one of each request, however long
    if shape.linear:
        state = state_bytes(shape.linear, size) // tensor
        states = config.requests_per_engine * _most_of_neighbours(list(map(int, shape.linear_layers)), count) * state
    use = MemoryUse("engine", parameters=weights, kv_cache=cache, buffers=buffers)
    return use, max(cache - states, 0) // max(token, 1)


def _most_of_neighbours(values: Sequence[int], count: int) -> int:
    """The largest sum of `count` neighbouring values: a stage has neighbouring layers."""
    return max(sum(values[start : start + count]) for start in range(len(values) - count + 1))
