"""Which Megatron parameter holds each Hugging Face tensor, and where in it: the one source of truth.

Checkpoint import, export and live resharding all read this table. It is pure data and pure functions; nothing
here communicates. A new architecture is one new table.

A layout says how a tensor lies in its parameter on each of `size` tensor-parallel ranks:
- replicated: whole on every rank.
- column: split along dimension 0; row: split along dimension 1.
- vocabulary: split along dimension 0 after zero rows were added until the ranks divide it.
- half: dimension 0 is split, and a rank's parameter stacks its slice of the gate on its slice of the up projection.
- group: dimension 0 of q, k or v is dealt out by query group; a group's q heads, its k head and its v head lie
  together, and the ranks share out the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["replicated", "column", "row", "vocabulary", "half", "group"]


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its parameter. Rows are rows of dimension 0."""

    kind: Kind
    index: int = 0  # half: 0 gate, 1 up
    groups: int = 1  # group: number of query groups
    stride: int = 0  # group: rows of one whole group, q, k and v together
    offset: int = 0  # group: first row of this tensor within a group


@dataclass(frozen=True)
class Entry:
    """One Hugging Face tensor. Layer numbers in `parameter` count over all pipeline stages."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    layout: Layout


@dataclass(frozen=True)
class Piece:
    """`length` entries along `dim`: from `tensor` on in the Hugging Face tensor, `parameter` on in the rank's own."""

    dim: int
    tensor: int
    parameter: int
    length: int

    def within_tensor(self) -> tuple[slice, ...]:
        """Index of the piece in the Hugging Face tensor."""
        return (*[slice(None)] * self.dim, slice(self.tensor, self.tensor + self.length))

    def within_parameter(self) -> tuple[slice, ...]:
        """Index of the piece in the rank's parameter."""
        return (*[slice(None)] * self.dim, slice(self.parameter, self.parameter + self.length))


REPLICATED = Layout("replicated")
COLUMN = Layout("column")
ROW = Layout("row")
VOCABULARY = Layout("vocabulary")


def dense_map(description: Any) -> tuple[Entry, ...]:
    """All tensors of a dense Qwen3-VL with this Qwen3VLConfig, in the order of export.

    Tensors that share a parameter follow each other.
    """
    text = description.text_config
    entries = _vision_entries(description.vision_config)
    width = (text.vocab_size, text.hidden_size)
    prefix = "model.language_model."
    entries.append(Entry(f"{prefix}embed_tokens.weight", width, "embedding.word_embeddings.weight", VOCABULARY))
    for layer in range(text.num_hidden_layers):
        entries += _layer_entries(text, f"{prefix}layers.{layer}.", f"decoder.layers.{layer}.")
    entries.append(Entry(f"{prefix}norm.weight", (text.hidden_size,), "decoder.final_layernorm.weight", REPLICATED))
    if not description.tie_word_embeddings:
        entries.append(Entry("lm_head.weight", width, "output_layer.weight", VOCABULARY))
    return tuple(entries)


def _layer_entries(text: Any, source: str, target: str) -> list[Entry]:
    hidden, dim, groups = text.hidden_size, text.head_dim, text.num_key_value_heads
    heads = text.num_attention_heads // groups  # query heads of one group
    stride = (heads + 2) * dim
    inner = text.intermediate_size
    attention, mlp = f"{target}self_attention.", f"{target}mlp."

    def of_group(name: str, rows: int, offset: int) -> Entry:
        layout = Layout("group", groups=groups, stride=stride, offset=offset)
        return Entry(f"{source}self_attn.{name}_proj.weight", (rows, hidden), f"{attention}linear_qkv.weight", layout)

    def of_half(name: str, index: int) -> Entry:
        layout = Layout("half", index=index)
        return Entry(f"{source}mlp.{name}_proj.weight", (inner, hidden), f"{mlp}linear_fc1.weight", layout)

    def replicated(name: str, size: int, parameter: str) -> Entry:
        return Entry(f"{source}{name}.weight", (size,), f"{target}{parameter}.weight", REPLICATED)

    return [
        replicated("input_layernorm", hidden, "input_layernorm"),
        of_group("q", groups * heads * dim, 0),
        of_group("k", groups * dim, heads * dim),
        of_group("v", groups * dim, (heads + 1) * dim),
        replicated("self_attn.q_norm", dim, "self_attention.q_layernorm"),
        replicated("self_attn.k_norm", dim, "self_attention.k_layernorm"),
        Entry(
            f"{source}self_attn.o_proj.weight", (hidden, groups * heads * dim), f"{attention}linear_proj.weight", ROW
        ),
        replicated("post_attention_layernorm", hidden, "pre_mlp_layernorm"),
        of_half("gate", 0),
        of_half("up", 1),
        Entry(f"{source}mlp.down_proj.weight", (hidden, inner), f"{mlp}linear_fc2.weight", ROW),
    ]


def _vision_entries(vision: Any) -> list[Entry]:
    hidden, inner = vision.hidden_size, vision.intermediate_size
    merged = hidden * vision.spatial_merge_size**2
    height, width = vision.patch_size if isinstance(vision.patch_size, list | tuple) else [vision.patch_size] * 2
    frames = vision.temporal_patch_size
    frames = frames[0] if isinstance(frames, list | tuple) else frames
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (hidden, vision.in_channels, frames, height, width),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (vision.num_position_embeddings, hidden),
    }

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str, size: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (size,)

    for block in (f"blocks.{i}" for i in range(vision.depth)):
        norm(f"{block}.norm1", hidden)
        norm(f"{block}.norm2", hidden)
        linear(f"{block}.attn.qkv", 3 * hidden, hidden)
        linear(f"{block}.attn.proj", hidden, hidden)
        linear(f"{block}.mlp.linear_fc1", inner, hidden)
        linear(f"{block}.mlp.linear_fc2", hidden, inner)
    deepstack = [f"deepstack_merger_list.{i}" for i in range(len(vision.deepstack_visual_indexes))]
    for merger in ("merger", *deepstack):
        norm(f"{merger}.norm", hidden if merger == "merger" else merged)
        linear(f"{merger}.linear_fc1", merged, merged)
        linear(f"{merger}.linear_fc2", vision.out_hidden_size, merged)
    return [Entry(f"model.visual.{name}", shape, f"visual.{name}", REPLICATED) for name, shape in shapes.items()]


def padded_vocabulary(vocab_size: int, size: int) -> int:
    """The least multiple of `size` that holds the vocabulary."""
    return -(-vocab_size // size) * size


def pieces(entry: Entry, rank: int, size: int) -> tuple[Piece, ...]:
    """What of the tensor rank `rank` of `size` holds, and where in its parameter. The ranks' pieces cover it once,
    or, if replicated, each rank's alone. Raises ValueError if `size` does not divide the tensor.
    """
    layout, rows = entry.layout, entry.shape[0]
    if layout.kind == "replicated":
        return (Piece(0, 0, 0, rows),)
    if layout.kind == "vocabulary":
        share = padded_vocabulary(rows, size) // size
        length = min(share, rows - rank * share)
        return (Piece(0, rank * share, 0, length),) if length > 0 else ()
    if layout.kind == "group":
        groups, block = _divide(entry, layout.groups, size), rows // layout.groups
        return tuple(
            Piece(0, (rank * groups + i) * block, i * layout.stride + layout.offset, block) for i in range(groups)
        )
    dim = 1 if layout.kind == "row" else 0
    share = _divide(entry, entry.shape[dim], size)
    return (Piece(dim, rank * share, layout.index * share, share),)


def to_megatron(entry: Entry, tensor: Any, parameter: Tensor, rank: int, size: int) -> None:
    """Copy what rank `rank` of `size` holds of the tensor into its parameter, in place.

    `tensor` only needs to be indexed by slices, as safetensors' lazy slices can be. Padding is set to zero.
    """
    with torch.no_grad():
        if entry.layout.kind == "vocabulary":
            parameter.zero_()
        for piece in pieces(entry, rank, size):
            parameter[piece.within_parameter()].copy_(tensor[piece.within_tensor()])


def from_megatron(entry: Entry, shards: Sequence[Tensor]) -> Tensor:
    """The Hugging Face tensor from the parameters of all tensor-parallel ranks, in rank order.

    A replicated tensor is the first rank's parameter itself, not a copy.
    """
    if entry.layout.kind == "replicated":
        return shards[0]
    tensor = shards[0].new_empty(entry.shape)
    for rank, shard in enumerate(shards):
        for piece in pieces(entry, rank, len(shards)):
            tensor[piece.within_tensor()] = shard[piece.within_parameter()]
    return tensor


def parameter_shapes(entries: Sequence[Entry], size: int) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter on one of `size` ranks."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        found = pieces(entry, 0, size)
        dim = found[0].dim
        length = sum(piece.length for piece in found)
        if entry.layout.kind == "vocabulary":
            length = padded_vocabulary(entry.shape[0], size) // size
        before = shapes[entry.parameter][dim] if entry.parameter in shapes else 0
        shapes[entry.parameter] = (*entry.shape[:dim], before + length, *entry.shape[dim + 1 :])
    return shapes


def _divide(entry: Entry, total: int, size: int) -> int:
    if total % size:
        what = "query groups" if entry.layout.kind == "group" else "entries of the split dimension"
        raise ValueError(f"tensor_parallel={size} does not divide the {total} {what} of {entry.name}")
    return total // size
