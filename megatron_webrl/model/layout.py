"""Parallel sizes, coordinates of a rank, ranks that hold each parameter. Pure data and functions, no communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_webrl.model.layer_split import check_divides, split_layers
from megatron_webrl.model.parameter_map import ParameterMapping, has_linear_attention, is_sparse


@dataclass(frozen=True)
class ParallelSizes:
    """Size of each parallel dimension."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # model chunks of one pipeline stage
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1  # parts of a packed sequence

    @property
    def num_chunks(self) -> int:
        """Number of model chunks over all pipeline stages."""
        return self.pipeline * self.virtual


@dataclass(frozen=True)
class RankCoordinates:
    """Index of a rank in each parallel dimension."""

    tensor: int = 0
    stage: int = 0
    expert: int = 0
    expert_tensor: int = 0


def chunk_of_layer(layer: int, layers: int, sizes: ParallelSizes) -> int:
    """Index of the model chunk that holds a layer, over all stages. Chunk c is on stage c % sizes.pipeline."""
    return next(c for c, chunk in enumerate(split_layers(layers, sizes.num_chunks)) if layer in chunk)


def pipeline_stages(mapping: ParameterMapping, layers: int, sizes: ParallelSizes, tied: bool) -> tuple[int, ...]:
    """Pipeline stages that hold a parameter: one, or first and last for a tied embedding."""
    last = sizes.pipeline - 1
    if mapping.layer is not None:
        return (chunk_of_layer(mapping.layer, layers, sizes) % sizes.pipeline,)
    if mapping.megatron_param.startswith(("visual.", "embedding.")):
        return (0, last) if tied and last and mapping.megatron_param.startswith("embedding.") else (0,)
    return (last,)


def expert_rank(expert: int, experts: int, sizes: ParallelSizes) -> int:
    """Expert-parallel rank that holds an expert."""
    return expert // (experts // sizes.expert)


def replica_ranks(mapping: ParameterMapping, hf_config: Any, sizes: ParallelSizes, ranks: int) -> list[tuple[int, ...]]:
    """Ranks that hold a replica of each shard of a parameter, ascending, by shard.

    Rank order is tensor, context, expert, data, pipeline, the first fastest. A replicated parameter has one shard.
    """
    share = ranks // sizes.pipeline
    stages = pipeline_stages(mapping, hf_config.text_config.num_hidden_layers, sizes, hf_config.tie_word_embeddings)
    members = [stage * share + i for stage in stages for i in range(share)]
    if mapping.expert is not None:
        expert = expert_rank(mapping.expert, hf_config.text_config.num_experts, sizes)
        members = [rank for rank in members if rank % share // sizes.expert_tensor % sizes.expert == expert]
        return [tuple(members[shard :: sizes.expert_tensor]) for shard in range(sizes.expert_tensor)]
    size = 1 if mapping.layout.kind == "replicated" else sizes.tensor
    return [tuple(members[shard::size]) for shard in range(size)]


def check_parallel_sizes(text_config: Any, sizes: ParallelSizes) -> None:
    """Raise ValueError unless the sizes divide the model's dimensions. `text_config`: of transformers."""
    layers = range(text_config.num_hidden_layers)
    sparse = [is_sparse(text_config, layer) for layer in layers]
    linear = has_linear_attention(text_config)
    if linear and sizes.context > 1:
        raise ValueError(
            f"context_parallel={sizes.context} cannot split the state of linear attention; "
            "set trainer.context_parallel=1"
        )
    # Inside attention, the context-parallel ranks divide the heads of their tensor-parallel rank.
    heads = "tensor_parallel" if sizes.context == 1 else "tensor_parallel x context_parallel"
    divided = [
        (heads, sizes.tensor * sizes.context, "num_attention_heads"),
        (heads, sizes.tensor * sizes.context, "num_key_value_heads"),
    ]
    if linear:
        divided.append(("tensor_parallel", sizes.tensor, "linear_num_key_heads"))
    if not all(sparse):
        divided.append(("tensor_parallel", sizes.tensor, "intermediate_size"))
    if any(sparse):
        divided.append(("expert_parallel", sizes.expert, "num_experts"))
        divided.append(("expert_tensor_parallel", sizes.expert_tensor, "moe_intermediate_size"))
        if hasattr(text_config, "shared_expert_intermediate_size"):
            divided.append(("tensor_parallel", sizes.tensor, "shared_expert_intermediate_size"))
    elif sizes.expert > 1:
        raise ValueError(f"expert_parallel={sizes.expert} needs a mixture of experts; the model is dense")
    for name, size, dimension in divided:
        check_divides(name, size, dimension, getattr(text_config, dimension))
    split_layers(text_config.num_hidden_layers, sizes.num_chunks)


def check_rank_count(sizes: ParallelSizes, ranks: int) -> None:
    """Raise ValueError unless the model-parallel sizes, of dense layers and of experts, divide the number of ranks."""
    for names, size in (
        ("tensor_parallel x context_parallel x pipeline_parallel", sizes.tensor * sizes.context),
        ("expert_tensor_parallel x expert_parallel x pipeline_parallel", sizes.expert_tensor * sizes.expert),
    ):
        check_divides(names, size * sizes.pipeline, "trainer_ranks", ranks)
