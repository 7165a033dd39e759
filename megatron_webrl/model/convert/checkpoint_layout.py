"""Where a parameter lies in a distributed checkpoint, and how ranks cut it. Pure data and functions.

Megatron stores one tensor for all layers of a dense model, [layers, ...] under the key without a layer number; where
some layers are a mixture of experts, one tensor for each layer; and one tensor for all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_webrl.model.parameter_map import ParameterMapping, ShardRange, is_sparse, padded_vocab_size, shard_ranges
from megatron_webrl.model.parameter_names import EXPERT_INFIX, LAYER_PREFIX

MODEL_KEY_PREFIXES = ("decoder.", "embedding.", "output_layer.", "visual.")
"""How keys of the model begin; a trainer's checkpoint holds others, too."""
UNSTACKED_LAYER_KEY = "decoder.layers.0.input_layernorm.weight"


@dataclass(frozen=True)
class TensorLocation:
    """A parameter within the checkpoint's tensor `key`, whose leading axes (layer, expert) it is one thick in."""

    key: str
    leading_index: tuple[int, ...]
    leading_sizes: tuple[int, ...]

    @property
    def extra_state_key(self) -> str | None:
        """Key of the object that Megatron stores beside a linear layer's weight, None if it stores none."""
        module, _, name = self.key.removesuffix(".weight").rpartition(".")
        if not module.startswith("decoder.") or not name.startswith("linear_"):
            return None
        index, sizes = self.leading_index or (0,), self.leading_sizes or (1,)
        return f"{module}.{name}._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"


def stacks_layers(text: Any) -> bool:
    """Whether Megatron stores all layers of this text model in one tensor."""
    return not any(is_sparse(text, layer) for layer in range(text.num_hidden_layers))


def tensor_location(mapping: ParameterMapping, text_config: Any, stacked: bool) -> TensorLocation:
    """Where the entry's parameter lies."""
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
    """A chunk of a parameter that a rank holds: its place in the whole parameter, and what fills it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    sources: tuple[tuple[ParameterMapping, ShardRange, tuple[slice, ...]], ...]  # the slices index the chunk


def sharded_chunks(mappings: Sequence[ParameterMapping], rank: int, size: int) -> list[ShardedChunk]:
    """The chunks of rank `rank` of `size` of the parameter that `entries` fill together.

    Gate and up projection are a chunk each, as Megatron cuts them. Of a replicated parameter every rank holds all.
    Raises ValueError if `size` does not divide it.
    """
    kind = mappings[0].layout.kind
    groups = [[entry] for entry in mappings] if kind == "gate_up" else [list(mappings)]
    return [_share(group, rank, size) for group in groups]


def _share(entries: Sequence[ParameterMapping], rank: int, size: int) -> ShardedChunk:
    first, kind = entries[0], entries[0].layout.kind
    found = [(entry, piece) for entry in entries for piece in shard_ranges(entry, rank, size)]
    dim = 1 if kind == "row" else 0
    length = sum(piece.length for _, piece in found)
    if kind == "vocabulary":
        length = padded_vocab_size(first.shape[0], size) // size
    base = first.layout.gate_up_index * length if kind == "gate_up" else 0
    start = 0 if kind == "replicated" else rank * length
    start += first.layout.gate_up_index * first.shape[0] if kind == "gate_up" else 0
    fills = []
    for entry, piece in found:
        low = piece.shard_offset - base
        fills.append((entry, piece, (*[slice(None)] * dim, slice(low, low + piece.length))))
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return ShardedChunk(tuple(start if axis == dim else 0 for axis in range(len(shape))), shape, tuple(fills))
