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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_webrl.model.layer_split import check_divides, is_sparse_layer

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

    @property
    def is_whole_tensor(self) -> bool:
        """Whether the part is the whole tensor, not transposed."""
        return self.tensor_shape == self.shape and not self.transposed

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

    def part_slices(self) -> tuple[slice, ...]:
        """Index of the range in the part."""
        return (*[slice(None)] * self.dim, slice(self.part_offset, self.part_offset + self.length))

    def shard_slices(self) -> tuple[slice, ...]:
        """Index of the range in the rank's parameter."""
        return (*[slice(None)] * self.dim, slice(self.shard_offset, self.shard_offset + self.length))


REPLICATED = TensorLayout("replicated")
ROW = TensorLayout("row")
VOCABULARY = TensorLayout("vocabulary")
GATE_UP = ("gate", "up")


def parameter_mappings(hf_config: Any, expert_format: ExpertFormat = "released") -> tuple[ParameterMapping, ...]:
    """Mappings of all tensors in export order: parts of a tensor are adjacent, and so are tensors of one parameter."""
    text = hf_config.text_config
    maps = _vision_mappings(hf_config.vision_config)
    width = (text.vocab_size, text.hidden_size)
    lm = "model.language_model."
    maps.append(ParameterMapping(f"{lm}embed_tokens.weight", width, "embedding.word_embeddings.weight", VOCABULARY))
    for layer in range(text.num_hidden_layers):
        source, target = f"{lm}layers.{layer}.", f"decoder.layers.{layer}."
        maps += _attention_mappings(text, layer, source, target)
        if is_sparse(text, layer):
            maps += _expert_mappings(text, layer, f"{source}mlp.", f"{target}mlp.", expert_format)
        else:
            maps += _mlp_mappings(text, layer, f"{source}mlp.", f"{target}mlp.")
    maps.append(ParameterMapping(f"{lm}norm.weight", (text.hidden_size,), "decoder.final_layernorm.weight", REPLICATED))
    if not hf_config.tie_word_embeddings:
        maps.append(ParameterMapping("lm_head.weight", width, "output_layer.weight", VOCABULARY))
    return tuple(maps)


def is_sparse(text: Any, layer: int) -> bool:
    """Whether a layer of the text model is a mixture of experts."""
    if not getattr(text, "num_experts", 0):
        return False
    return is_sparse_layer(layer, text.mlp_only_layers, text.decoder_sparse_step)


def _attention_mappings(text: Any, layer: int, source: str, target: str) -> list[ParameterMapping]:
    hidden, dim, groups = text.hidden_size, text.head_dim, text.num_key_value_heads
    heads = text.num_attention_heads // groups  # query heads of one group
    stride = (heads + 2) * dim
    attention = f"{target}self_attention."

    def of_group(name: str, rows: int, offset: int) -> ParameterMapping:
        layout = TensorLayout("query_group", num_query_groups=groups, group_stride=stride, group_offset=offset)
        return ParameterMapping(
            f"{source}self_attn.{name}_proj.weight", (rows, hidden), f"{attention}linear_qkv.weight", layout, layer
        )

    def replicated(name: str, size: int, parameter: str) -> ParameterMapping:
        return ParameterMapping(f"{source}{name}.weight", (size,), f"{target}{parameter}.weight", REPLICATED, layer)

    output = (hidden, groups * heads * dim)
    return [
        replicated("input_layernorm", hidden, "input_layernorm"),
        of_group("q", groups * heads * dim, 0),
        of_group("k", groups * dim, heads * dim),
        of_group("v", groups * dim, (heads + 1) * dim),
        replicated("self_attn.q_norm", dim, "self_attention.q_layernorm"),
        replicated("self_attn.k_norm", dim, "self_attention.k_layernorm"),
        ParameterMapping(f"{source}self_attn.o_proj.weight", output, f"{attention}linear_proj.weight", ROW, layer),
        replicated("post_attention_layernorm", hidden, "pre_mlp_layernorm"),
    ]


def _mlp_mappings(text: Any, layer: int, source: str, target: str) -> list[ParameterMapping]:
    dim, ffn = text.hidden_size, text.intermediate_size
    fc1, fc2 = f"{target}linear_fc1.weight", f"{target}linear_fc2.weight"
    return [
        ParameterMapping(f"{source}gate_proj.weight", (ffn, dim), fc1, TensorLayout("gate_up", gate_up_index=0), layer),
        ParameterMapping(f"{source}up_proj.weight", (ffn, dim), fc1, TensorLayout("gate_up", gate_up_index=1), layer),
        ParameterMapping(f"{source}down_proj.weight", (dim, ffn), fc2, ROW, layer),
    ]


def _expert_mappings(text: Any, layer: int, source: str, target: str, experts: ExpertFormat) -> list[ParameterMapping]:
    hidden, inner, count = text.hidden_size, text.moe_intermediate_size, text.num_experts
    mappings = [ParameterMapping(f"{source}gate.weight", (count, hidden), f"{target}router.weight", REPLICATED, layer)]
    transposed = experts == "released"  # Megatron's parameters are [outputs, inputs]

    def halves(expert: int) -> list[ParameterMapping]:
        parameter = f"{target}experts.local_experts.{expert}.linear_fc1.weight"
        return [part(f"{name}_proj", expert, (inner, hidden), parameter, index) for index, name in enumerate(GATE_UP)]

    def down(expert: int) -> ParameterMapping:
        parameter = f"{target}experts.local_experts.{expert}.linear_fc2.weight"
        return part("down_proj", expert, (hidden, inner), parameter, None)

    def part(name: str, expert: int, shape: tuple[int, int], parameter: str, index: int | None) -> ParameterMapping:
        layout = ROW if index is None else TensorLayout("gate_up", gate_up_index=index)
        if experts == "separate":
            full = f"{source}experts.{expert}.{name}.weight"
            return ParameterMapping(full, shape, parameter, layout, layer, expert)
        rows = slice(0, hidden) if index is None else slice(index * inner, (index + 1) * inner)
        columns = slice(0, shape[1])
        stored = (hidden, inner) if index is None else (2 * inner, hidden)
        return ParameterMapping(
            f"{source}experts.{name if index is None else 'gate_up_proj'}",
            shape,
            parameter,
            layout,
            layer,
            expert,
            tensor_shape=(count, *(stored[::-1] if transposed else stored)),
            part_index=(expert, columns, rows) if transposed else (expert, rows, columns),
            transposed=transposed,
        )

    for expert in range(count):
        mappings += halves(expert)
        if experts == "separate":
            mappings.append(down(expert))
    if experts != "separate":
        mappings += [down(expert) for expert in range(count)]
    return mappings


def _vision_mappings(vision: Any) -> list[ParameterMapping]:
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
    return [ParameterMapping(f"model.visual.{key}", size, f"visual.{key}", REPLICATED) for key, size in shapes.items()]


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
