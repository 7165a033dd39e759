"""Parameter map: the Megatron parameter that holds each Hugging Face tensor, and where in it. The one source of truth.

Checkpoint import, export and live resharding read this map: pure data and functions, without communication. A mapping
describes a Hugging Face tensor or, where one tensor is stored in several parameters (all experts of a layer), a part
of it. The parts of a tensor cover it exactly once.

Layouts of a part over `size` tensor-parallel ranks or, for experts, expert-tensor-parallel ranks:
- replicated: complete on every rank.
- row: sharded along dimension 1, as in Megatron's RowParallelLinear.
- vocabulary: sharded along dimension 0, padded with zero rows to a multiple of `size`.
- gate_up: sharded along dimension 0; a rank's parameter stacks its gate shard on its up shard.
- query_group: sharded along dimension 0; a rank's parameter stacks the q heads, k head and v head of each group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_webrl.model.layer_split import check_divides, is_sparse_layer

LAYER_PREFIX = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT_INFIX = re.compile(r"\.local_experts\.(\d+)\.")

LayoutKind = Literal["replicated", "row", "vocabulary", "gate_up", "query_group"]
ExpertFormat = Literal["released", "transposed", "separate"]
"""How a folder stores experts. released: one tensor for all experts, [E, H, 2I] and [E, I, H]; exports use this form.
transposed: one tensor for all experts, [E, 2I, H] and [E, H, I]. separate: gate, up and down tensors per expert."""


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor is laid out in its parameter. Rows count along dimension 0."""

    kind: LayoutKind
    gate_up_index: int = 0  # gate_up: 0 gate, 1 up
    num_query_groups: int = 1  # query_group: number of groups
    group_stride: int = 0  # query_group: rows of one group, q, k and v together
    group_offset: int = 0  # query_group: first row of this tensor within a group


@dataclass(frozen=True)
class ParameterMapping:
    """One Hugging Face tensor or a part of it. `megatron_param` numbers layers and experts over the whole model."""

    hf_param: str
    shape: tuple[int, ...]  # of the part, in the orientation of the parameter
    megatron_param: str
    layout: TensorLayout
    layer: int | None = None  # of the text model
    expert: int | None = None
    tensor_shape: tuple[int, ...] = ()  # of the whole tensor; default: shape
    part_index: tuple[int | slice, ...] = ()  # index of the part in the tensor; default: all of it
    transposed: bool = False  # the tensor stores the part transposed

    def __post_init__(self) -> None:
        if not self.tensor_shape:
            object.__setattr__(self, "tensor_shape", self.shape)
            object.__setattr__(self, "part_index", tuple(slice(0, size) for size in self.shape))

    def tensor_index(self, shard_range: ShardRange) -> tuple[int | slice, ...]:
        """Index in the whole tensor of a range of the part. The indexed data are transposed if the mapping is."""
        axes = [axis for axis, part in enumerate(self.part_index) if isinstance(part, slice)]
        axis = (axes[::-1] if self.transposed else axes)[shard_range.dim]
        part = self.part_index[axis]
        assert isinstance(part, slice)
        start = part.start + shard_range.part_offset
        return (*self.part_index[:axis], slice(start, start + shard_range.length), *self.part_index[axis + 1 :])


@dataclass(frozen=True)
class ShardRange:
    """`length` indices along `dim`, from `part_offset` in the part and `shard_offset` in the rank's parameter."""

    dim: int
    part_offset: int
    shard_offset: int
    length: int

    def shard_slices(self) -> tuple[slice, ...]:
        """Index of the range in the rank's parameter."""
        return (*[slice(None)] * self.dim, slice(self.shard_offset, self.shard_offset + self.length))


REPLICATED = TensorLayout("replicated")
ROW = TensorLayout("row")
VOCABULARY = TensorLayout("vocabulary")


def is_sparse(text: Any, layer: int) -> bool:
    """Whether a layer of the text model is a mixture of experts."""
    if not getattr(text, "num_experts", 0):
        return False
    return is_sparse_layer(layer, getattr(text, "mlp_only_layers", ()), getattr(text, "decoder_sparse_step", 1))


def is_linear_attention(text: Any, layer: int) -> bool:
    """Whether a layer of the text model is linear attention (Gated DeltaNet)."""
    types = getattr(text, "layer_types", None)
    return types is not None and types[layer] == "linear_attention"


def has_linear_attention(text: Any) -> bool:
    """Whether the text model has layers of linear attention, as all of Qwen3.5 have."""
    return any(is_linear_attention(text, layer) for layer in range(text.num_hidden_layers))


def padded_vocab_size(vocab_size: int, size: int) -> int:
    """Vocabulary size rounded up to a multiple of `size`."""
    return -(-vocab_size // size) * size


def shard_ranges(mapping: ParameterMapping, rank: int, size: int) -> tuple[ShardRange, ...]:
    """Ranges of the part that rank `rank` of `size` holds. The ranges of all ranks cover the part exactly once.

    A replicated part is one range on every rank. Raises ValueError if `size` does not divide the part.
    """
    layout, rows = mapping.layout, mapping.shape[0]
    if layout.kind == "replicated":
        return (ShardRange(0, 0, 0, rows),)
    if layout.kind == "vocabulary":
        share = padded_vocab_size(rows, size) // size
        length = min(share, rows - rank * share)
        return (ShardRange(0, rank * share, 0, length),) if length > 0 else ()
    if layout.kind == "query_group":
        groups, block = _divide(mapping, layout.num_query_groups, size), rows // layout.num_query_groups
        return tuple(
            ShardRange(0, (rank * groups + i) * block, i * layout.group_stride + layout.group_offset, block)
            for i in range(groups)
        )
    dim = 1 if layout.kind == "row" else 0
    share = _divide(mapping, mapping.shape[dim], size)
    return (ShardRange(dim, rank * share, layout.gate_up_index * share, share),)


def to_megatron(mapping: ParameterMapping, tensor: Any, parameter: Tensor, rank: int, size: int) -> None:
    """Copy the shard of rank `rank` of `size` from the whole tensor into its parameter, in place.

    `tensor` only needs indexing by slices, which lazy slices of safetensors support. Padding is set to zero.
    """
    with torch.no_grad():
        if mapping.layout.kind == "vocabulary":
            parameter.zero_()
        for piece in shard_ranges(mapping, rank, size):
            values = tensor[mapping.tensor_index(piece)]
            parameter[piece.shard_slices()].copy_(values.t() if mapping.transposed else values)


def from_megatron(mapping: ParameterMapping, shards: Sequence[Tensor], tensor: Tensor) -> None:
    """Fill the mapped part of the whole tensor, in place, from the parameters of all ranks in rank order."""
    for rank, shard in enumerate(shards[:1] if mapping.layout.kind == "replicated" else shards):
        for piece in shard_ranges(mapping, rank, len(shards)):
            values = shard[piece.shard_slices()]
            tensor[mapping.tensor_index(piece)] = values.t() if mapping.transposed else values


def parameter_shapes(
    mappings: Sequence[ParameterMapping], size: int, expert_size: int = 1
) -> dict[str, tuple[int, ...]]:
    """Local shape of each parameter for `size` tensor-parallel and `expert_size` expert-tensor-parallel ranks."""
    shapes: dict[str, tuple[int, ...]] = {}
    for mapping in mappings:
        ranks = size if mapping.expert is None else expert_size
        ranges = shard_ranges(mapping, 0, ranks)
        dim = ranges[0].dim
        length = sum(piece.length for piece in ranges)
        if mapping.layout.kind == "vocabulary":
            length = padded_vocab_size(mapping.shape[0], ranks) // ranks
        before = shapes[mapping.megatron_param][dim] if mapping.megatron_param in shapes else 0
        shapes[mapping.megatron_param] = (*mapping.shape[:dim], before + length, *mapping.shape[dim + 1 :])
    return shapes


def _divide(mapping: ParameterMapping, total: int, size: int) -> int:
    divisor = "tensor_parallel" if mapping.expert is None else "expert_tensor_parallel"
    dimension = {"query_group": "query_groups", "row": "columns"}.get(mapping.layout.kind, "rows")
    check_divides(divisor, size, dimension, total, mapping.hf_param)
    return total // size


def canonical_name(name: str, first_layer: int, first_expert: int) -> str:
    """Canonical name of a chunk's parameter, as in the parameter map, from the chunk's first layer and expert."""
    name = LAYER_PREFIX.sub(lambda found: f"decoder.layers.{int(found[1]) + first_layer}.", name)
    return EXPERT_INFIX.sub(lambda found: f".local_experts.{int(found[1]) + first_expert}.", name)
