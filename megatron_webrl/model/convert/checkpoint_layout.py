"""Location of parameters in a distributed checkpoint, and how ranks shard them. Pure data and functions.

Megatron stores one tensor [layers, ...] for all layers of a dense model, under a key without a layer number, but one
tensor per layer if layers are of several kinds. All experts of a layer are one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_webrl.model.parameter_map import (
    EXPERT_INFIX,
    LAYER_PREFIX,
    ParameterMapping,
    ShardRange,
    is_linear_attention,
    is_sparse,
    padded_vocab_size,
    shard_ranges,
)

MODEL_KEY_PREFIXES = ("decoder.", "embedding.", "output_layer.", "visual.")  # a trainer's checkpoint holds others
UNSTACKED_LAYER_KEY = "decoder.layers.0.input_layernorm.weight"


@dataclass(frozen=True)
class TensorLocation:
    """Location of a parameter in the stored tensor `key`: its index in the leading axes (layer, expert)."""

    key: str
    leading_index: tuple[int, ...]
    leading_sizes: tuple[int, ...]

    @property
    def extra_state_key(self) -> str | None:
        """Key of the extra-state object that Megatron stores for a linear layer; None for other parameters."""
        module, _, name = self.key.removesuffix(".weight").rpartition(".")
        if not module.startswith("decoder.") or not name.startswith("linear_"):
            return None
        index, sizes = self.leading_index or (0,), self.leading_sizes or (1,)
        return f"{module}.{name}._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"


def stacks_layers(text: Any) -> bool:
    """Whether Megatron stores all layers of the text model in one tensor."""
    layers = range(text.num_hidden_layers)
    return not any(is_sparse(text, layer) or is_linear_attention(text, layer) for layer in layers)


def tensor_location(mapping: ParameterMapping, text_config: Any, stacked: bool) -> TensorLocation:
    """Location of the mapping's parameter. `stacked`: whether layers are stacked."""
    key, index, sizes = mapping.megatron_param, [], []
    if mapping.layer is not None and stacked:
        key = LAYER_PREFIX.sub("decoder.layers.", key)
        index.append(mapping.layer)
        sizes.append(text_config.num_hidden_layers)
    if mapping.expert is not None:
        key = EXPERT_INFIX.sub(".experts.", key)
        index.append(mapping.expert)
        sizes.append(text_config.num_experts)
    return TensorLocation(key, tuple(index), tuple(sizes))


@dataclass(frozen=True)
class ShardedChunk:
    """A rank's chunk of a parameter: its position in the whole parameter and its sources."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    sources: tuple[tuple[ParameterMapping, ShardRange, tuple[slice, ...]], ...]  # slices into the chunk


def sharded_chunks(mappings: Sequence[ParameterMapping], rank: int, size: int) -> list[ShardedChunk]:
    """Chunks that rank `rank` of `size` holds of the parameter that the mappings fill together.

    Gate and up are separate chunks, as in Megatron. Raises ValueError if `size` does not divide the parameter.
    """
    kind = mappings[0].layout.kind
    groups = [[mapping] for mapping in mappings] if kind == "gate_up" else [list(mappings)]
    return [_chunk(group, rank, size) for group in groups]


def _chunk(mappings: Sequence[ParameterMapping], rank: int, size: int) -> ShardedChunk:
    first, kind = mappings[0], mappings[0].layout.kind
    ranges = [(mapping, piece) for mapping in mappings for piece in shard_ranges(mapping, rank, size)]
    dim = 1 if kind == "row" else 0
    length = sum(piece.length for _, piece in ranges)
    if kind == "vocabulary":
        length = padded_vocab_size(first.shape[0], size) // size
    base = first.layout.gate_up_index * length if kind == "gate_up" else 0
    start = 0 if kind == "replicated" else rank * length
    start += first.layout.gate_up_index * first.shape[0] if kind == "gate_up" else 0
    sources = []
    for mapping, piece in ranges:
        low = piece.shard_offset - base
        sources.append((mapping, piece, (*[slice(None)] * dim, slice(low, low + piece.length))))
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return ShardedChunk(tuple(start if axis == dim else 0 for axis in range(len(shape))), shape, tuple(sources))
