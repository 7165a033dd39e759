"""The parameter map of a layer of Qwen3-VL, dense or with experts."""

from __future__ import annotations

from typing import Any

from megatron_webrl.model.parameter_map import (
    REPLICATED,
    ROW,
    ExpertFormat,
    ParameterMapping,
    TensorLayout,
    is_sparse,
)
from megatron_webrl.model.vision_language.parameters import expert_mappings, mlp_mappings


def layer_mappings(text: Any, layer: int, source: str, target: str, experts: ExpertFormat) -> list[ParameterMapping]:
    """Mappings of one layer of the text model. `source`, `target`: prefixes of its tensors and its parameters."""
    mlp = (f"{source}mlp.", f"{target}mlp.")
    if is_sparse(text, layer):
        rest = expert_mappings(text, layer, *mlp, experts)
    else:
        rest = mlp_mappings(text.hidden_size, text.intermediate_size, layer, *mlp)
    return [*_attention_mappings(text, layer, source, target), *rest]


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
