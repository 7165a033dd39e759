"""Engine map: where vLLM stores each tensor of a Qwen3-VL or Qwen3.5, dense or mixture of experts.

Pure data and functions on shapes; vLLM is not imported. The shapes are vLLM 0.32's loading form, before vLLM packs a
parameter for its kernels. An engine rank is stage * tensor + tensor rank.

One of `tensor` vLLM ranks holds:
- qkv_proj: its query heads (each with its output gate in gated attention), then its key heads, then its value heads;
  ranks share a key head if there are too few.
- in_proj_qkvz, in_proj_ba and conv1d of linear attention: its heads' rows of each of the tensors they are made of.
- gate_up_proj and an expert's w13: its rows of the gate, then its rows of the up projection.
- the whole vision tower (vLLM's mm_encoder_tp_mode=data).
- the vocabulary: an equal part after padding to a multiple of 64; padding is not transferred.
- with `expert_parallel`: whole experts; the first ranks hold one more if the division is uneven.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layout import check_divides
from megatron_webrl.model.parameter_map import (
    ParameterMapping,
    has_linear_attention,
    is_linear_attention,
    is_sparse,
    padded_vocab_size,
)
from megatron_webrl.weights.slices import Shard

MAP_VERSION = 1  # of both maps; changes when the location of a tensor changes on either side
VOCAB_PADDING_MULTIPLE = 64

_TEXT = "model.language_model."
_FUSED = {
    "in_proj_qkv.weight": "in_proj_qkvz.weight",
    "in_proj_z.weight": "in_proj_qkvz.weight",
    "in_proj_b.weight": "in_proj_ba.weight",
    "in_proj_a.weight": "in_proj_ba.weight",
}
"""Tensors of linear attention that share a parameter."""


@dataclass(frozen=True)
class EngineSizes:
    """Size of each parallel dimension of an engine."""

    tensor: int = 1
    pipeline: int = 1
    expert_parallel: bool = False  # vLLM's expert parallelism: whole experts over the tensor ranks

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline


def check_engine_sizes(hf_config: Any, sizes: EngineSizes) -> None:
    """Raise ValueError for sizes that vLLM cannot shard the model into."""
    text, vision = hf_config.text_config, hf_config.vision_config
    sparse = [is_sparse(text, layer) for layer in range(text.num_hidden_layers)]
    for name, value in (("tensor", sizes.tensor), ("pipeline", sizes.pipeline)):
        if value < 1:
            raise ValueError(f"engine {name}={value} is less than 1")
    divided = [
        ("num_attention_heads", text.num_attention_heads),
        ("padded_vocab_size", padded_vocab_size(text.vocab_size, VOCAB_PADDING_MULTIPLE)),
    ]
    if not all(sparse):
        divided.append(("intermediate_size", text.intermediate_size))
    if any(sparse) and not sizes.expert_parallel:
        divided.append(("moe_intermediate_size", text.moe_intermediate_size))
    if any(sparse) and getattr(text, "shared_expert_intermediate_size", None):
        divided.append(("shared_expert_intermediate_size", text.shared_expert_intermediate_size))
    if has_linear_attention(text):
        divided.append(("linear_num_key_heads", text.linear_num_key_heads))
    for name, number in divided:
        check_divides("tensor_parallel", sizes.tensor, name, number, "engine")
    heads = text.num_key_value_heads
    if heads % sizes.tensor and sizes.tensor % heads:
        raise ValueError(
            f"engine tensor={sizes.tensor} neither divides num_key_value_heads={heads} nor is a multiple of it"
        )
    if any(sparse) and sizes.tensor > text.num_experts:
        raise ValueError(f"engine tensor={sizes.tensor} exceeds num_experts={text.num_experts}")
    if sizes.expert_parallel and not any(sparse):
        raise ValueError("engine expert_parallel=True needs a mixture of experts; the model is dense")
    _check_stages(text, sizes.pipeline, len(getattr(vision, "deepstack_visual_indexes", ())))


def _check_stages(text: Any, pipeline: int, deepstack: int) -> None:
    layers = text.num_hidden_layers
    if pipeline > layers:
        raise ValueError(f"engine pipeline={pipeline} exceeds {layers} layers")
    if pipeline > 1 and len(stage_layers(layers, pipeline)[0]) < deepstack:
        raise ValueError(
            f"engine pipeline={pipeline} leaves the first stage fewer than the {deepstack} layers that DeepStack "
            f"feeds; lower it to at most {layers // deepstack}"
        )
    for stage, own in enumerate(stage_layers(layers, pipeline)):
        if all(is_linear_attention(text, layer) for layer in own):
            raise ValueError(
                f"engine pipeline={pipeline} leaves stage {stage} only layers of linear attention, which vLLM cannot "
                "place beside stages with full attention; lower it"
            )


def stage_layers(layers: int, pipeline: int) -> tuple[range, ...]:
    """Layers of each stage by vLLM's rule: the remainder goes to the stages from the second last backwards."""
    share, remainder = divmod(layers, pipeline)
    ends, end = [], 0
    for stage in range(pipeline):
        end += share + (pipeline - 1 - remainder <= stage < pipeline - 1)
        ends.append(end)
    return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))


class EngineMap:
    """Engine map for one model and one set of parallel sizes."""

    def __init__(self, hf_config: Any, sizes: EngineSizes) -> None:
        text = hf_config.text_config
        self.sizes, self.tied = sizes, bool(hf_config.tie_word_embeddings)
        self.num_key_value_heads, self.head_dim = text.num_key_value_heads, text.head_dim
        self.num_experts = getattr(text, "num_experts", 0)
        self.is_hybrid = has_linear_attention(text)
        self.fused_rows: dict[str, int] = {}  # of a parameter's rows, how many precede those of a tensor
        if self.is_hybrid:
            keys, values = text.linear_num_key_heads, text.linear_num_value_heads
            self.fused_rows["in_proj_z.weight"] = (
                2 * keys * text.linear_key_head_dim + values * text.linear_value_head_dim
            )
            self.fused_rows["in_proj_a.weight"] = values
        self.layers_by_stage = stage_layers(text.num_hidden_layers, sizes.pipeline)

    def shards_of(self, mapping: ParameterMapping, rank: int) -> tuple[Shard, ...]:
        """Shards of the mapping's part in the parameters of an engine rank; () if it holds none."""
        stage, tensor_rank = divmod(rank, self.sizes.tensor)
        if not self.is_on_stage(mapping, stage):
            return ()
        if mapping.expert is not None:
            return self._expert(mapping, tensor_rank)
        if mapping.hf_param.startswith("model.visual."):
            return (_equal_part(mapping, engine_parameter_name(mapping), 0, 1, 0),)
        if mapping.layout.kind == "vocabulary":
            share = self.vocab_rows_per_rank(mapping)
            length = min(share, mapping.shape[0] - tensor_rank * share)
            name = engine_parameter_name(mapping)
            return (_box(mapping, name, 0, tensor_rank * share, length, 0),) if length > 0 else ()
        if mapping.layout.kind == "query_group":
            place = self._linear_attention if ".linear_attn." in mapping.hf_param else self._attention
            return (place(mapping, tensor_rank),)
        if mapping.layout.kind == "gate_up":
            index = mapping.layout.gate_up_index
            return (_equal_part(mapping, engine_parameter_name(mapping), 0, self.sizes.tensor, tensor_rank, index),)
        if mapping.layout.kind == "row":
            return (_equal_part(mapping, engine_parameter_name(mapping), 1, self.sizes.tensor, tensor_rank),)
        return (_equal_part(mapping, engine_parameter_name(mapping), 0, 1, 0),)

    def vocab_rows_per_rank(self, mapping: ParameterMapping) -> int:
        """Rows of a vocabulary parameter on one rank, including padding."""
        return padded_vocab_size(mapping.shape[0], VOCAB_PADDING_MULTIPLE) // self.sizes.tensor

    def is_on_stage(self, mapping: ParameterMapping, stage: int) -> bool:
        """Whether a stage holds a mapping.

        Every stage of vLLM's Qwen3.5 keeps the embedding, and of its Qwen3-VL with experts the output head as well.
        """
        last = self.sizes.pipeline - 1
        if mapping.layer is not None:
            return mapping.layer in self.layers_by_stage[stage]
        if mapping.hf_param.startswith("model.visual.") or (self.num_experts and not self.is_hybrid):
            return True
        if mapping.hf_param == f"{_TEXT}embed_tokens.weight":
            return stage == 0 or self.is_hybrid or (stage == last and self.tied)
        return stage == last

    def _attention(self, mapping: ParameterMapping, rank: int) -> Shard:
        """Shard of q, k or v of one layer in qkv_proj."""
        target, size, layout = engine_parameter_name(mapping), self.sizes.tensor, mapping.layout
        queries = layout.num_query_groups * (layout.group_stride - 2 * self.head_dim) // size  # rows, with gates
        if mapping.hf_param.endswith("q_proj.weight"):
            return _box(mapping, target, 0, rank * queries, queries, 0)
        keys = max(self.num_key_value_heads // size, 1) * self.head_dim
        replicas = max(size // self.num_key_value_heads, 1)  # ranks that hold the same key and value head
        before = queries + keys * mapping.hf_param.endswith("v_proj.weight")
        return _box(mapping, target, 0, rank // replicas * keys, keys, before)

    def _linear_attention(self, mapping: ParameterMapping, rank: int) -> Shard:
        """Shard of a projection, convolution or bias of the heads of one layer of linear attention."""
        rows = mapping.part_index[0]
        assert isinstance(rows, slice)
        before = rows.start + self.fused_rows.get(mapping.hf_param.split(".linear_attn.")[1], 0)
        share = mapping.shape[0] // self.sizes.tensor
        return _box(mapping, engine_parameter_name(mapping), 0, rank * share, share, before // self.sizes.tensor)

    def _expert(self, mapping: ParameterMapping, rank: int) -> tuple[Shard, ...]:
        """Shard of an expert's gate, up or down projection in the stacked parameter of its layer."""
        assert mapping.expert is not None
        size, first, count = self.sizes.tensor, 0, self.num_experts
        if self.sizes.expert_parallel:
            share, remainder = divmod(self.num_experts, size)
            first, count = rank * share + min(rank, remainder), share + (rank < remainder)
            size, rank = 1, 0
        if not first <= mapping.expert < first + count:
            return ()
        down = mapping.layout.kind == "row"
        box = _equal_part(mapping, engine_parameter_name(mapping), int(down), size, rank, mapping.layout.gate_up_index)
        return (Shard(box.engine_param, box.tensor_offset, box.size, (mapping.expert - first, *box.parameter_offset)),)


def engine_parameter_shapes(hf_config: Any, sizes: EngineSizes, rank: int) -> dict[str, tuple[int, ...]]:
    """Local shapes, in loading form with vocabulary padding, of all parameters of an engine rank."""
    shapes: dict[str, tuple[int, ...]] = {}
    engine_map = EngineMap(hf_config, sizes)
    for mapping in parameter_mappings(hf_config):
        for shard in engine_map.shards_of(mapping, rank):
            stacked = len(shard.parameter_offset) - len(shard.size)
            ends = [index + 1 for index in shard.parameter_offset[:stacked]]
            ends += [a + b for a, b in zip(shard.parameter_offset[stacked:], shard.size, strict=True)]
            before = shapes.get(shard.engine_param, (0,) * len(ends))
            shapes[shard.engine_param] = tuple(map(max, ends, before))
        if mapping.layout.kind == "vocabulary" and engine_map.is_on_stage(mapping, rank // sizes.tensor):
            shapes[engine_parameter_name(mapping)] = (engine_map.vocab_rows_per_rank(mapping), mapping.shape[1])
    return shapes


def engine_parameter_name(mapping: ParameterMapping) -> str:
    """Name of the engine parameter that holds a mapping."""
    if mapping.expert is not None:
        stack = "w2" if mapping.layout.kind == "row" else "w13"
        return f"language_model.model.layers.{mapping.layer}.mlp.experts.routed_experts.{stack}_weight"
    if mapping.hf_param.startswith("model.visual."):
        return mapping.hf_param.removeprefix("model.")
    name = mapping.hf_param.removeprefix(_TEXT)
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    if ".linear_attn." in name:
        prefix, suffix = name.split(".linear_attn.")
        name = f"{prefix}.linear_attn.{_FUSED.get(suffix, suffix)}"
    elif mapping.layout.kind in ("query_group", "gate_up"):
        fused = "qkv_proj" if mapping.layout.kind == "query_group" else "gate_up_proj"
        name = f"{name.rsplit('.', 2)[0]}.{fused}.weight"
    return f"language_model.model.{name}"


def _equal_part(mapping: ParameterMapping, target: str, dim: int, size: int, rank: int, stacked: int = 0) -> Shard:
    """Shard for one of `size` equal parts along `dim`, after `stacked` parts of other tensors in the parameter."""
    share = mapping.shape[dim] // size
    return _box(mapping, target, dim, rank * share, share, stacked * share)


def _box(mapping: ParameterMapping, target: str, dim: int, start: int, length: int, offset: int) -> Shard:
    """Shard of `length` indices along `dim`, from `start` in the tensor and `offset` in the parameter."""
    before, after = (0,) * dim, (0,) * (len(mapping.shape) - dim - 1)
    size = (*mapping.shape[:dim], length, *mapping.shape[dim + 1 :])
    return Shard(target, (*before, start, *after), size, (*before, offset, *after))
