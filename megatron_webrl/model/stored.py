"""Where a parameter lies in a distributed checkpoint, and how ranks cut it. Pure data and functions.

Megatron stores one tensor for all layers of a dense model, [layers, ...] under the key without a layer number; where
some layers are a mixture of experts, one tensor for each layer; and one tensor for all experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_webrl.model.parameter_map import Entry, Piece, is_sparse, padded_vocabulary, pieces

OWNED = ("decoder.", "embedding.", "output_layer.", "visual.")
"""How keys of the model begin; a trainer's checkpoint holds others, too."""
LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+\.")
EXPERT = re.compile(r"\.local_experts\.\d+\.")
FIRST_LAYER_ALONE = "decoder.layers.0.input_layernorm.weight"


@dataclass(frozen=True)
class Place:
    """A parameter within the checkpoint's tensor `key`, whose leading axes (layer, expert) it is one thick in."""

    key: str
    index: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def extra_state(self) -> str | None:
        """Key of the object that Megatron stores beside a linear layer's weight, None if it stores none."""
        module, _, name = self.key.removesuffix(".weight").rpartition(".")
        if not module.startswith("decoder.") or not name.startswith("linear_"):
            return None
        index, sizes = self.index or (0,), self.sizes or (1,)
        return f"{module}.{name}._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"


def stacks_layers(text: Any) -> bool:
    """Whether Megatron stores all layers of this text model in one tensor."""
    return not any(is_sparse(text, layer) for layer in range(text.num_hidden_layers))


def place(entry: Entry, text: Any, stacked: bool) -> Place:
    """Where the entry's parameter lies."""
    key, index, sizes = entry.parameter, [], []
    if entry.layer is not None and stacked:
        key = LAYER.sub("", key)
        index.append(entry.layer)
        sizes.append(text.num_hidden_layers)
    if entry.expert is not None:
        key = EXPERT.sub(".experts.", key)
        index.append(entry.expert)
        sizes.append(text.num_experts)
    return Place(key, tuple(index), tuple(sizes))


@dataclass(frozen=True)
class Share:
    """A chunk of a parameter that a rank holds: its place in the whole parameter, and what fills it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    fills: tuple[tuple[Entry, Piece, tuple[slice, ...]], ...]  # the slices index the chunk


def shares(entries: Sequence[Entry], rank: int, size: int) -> list[Share]:
    """The chunks of rank `rank` of `size` of the parameter that `entries` fill together.

    Gate and up projection are a chunk each, as Megatron cuts them. Of a replicated parameter every rank holds all.
    Raises ValueError if `size` does not divide it.
    """
    kind = entries[0].layout.kind
    groups = [[entry] for entry in entries] if kind == "half" else [list(entries)]
    return [_share(group, rank, size) for group in groups]


def _share(entries: Sequence[Entry], rank: int, size: int) -> Share:
    first, kind = entries[0], entries[0].layout.kind
    found = [(entry, piece) for entry in entries for piece in pieces(entry, rank, size)]
    dim = 1 if kind == "row" else 0
    length = sum(piece.length for _, piece in found)
    if kind == "vocabulary":
        length = padded_vocabulary(first.shape[0], size) // size
    base = first.layout.index * length if kind == "half" else 0
    start = 0 if kind == "replicated" else rank * length
    start += first.layout.index * first.shape[0] if kind == "half" else 0
    fills = []
    for entry, piece in found:
        low = piece.parameter - base
        fills.append((entry, piece, (*[slice(None)] * dim, slice(low, low + piece.length))))
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return Share(tuple(start if axis == dim else 0 for axis in range(len(shape))), shape, tuple(fills))
