"""The parameter map of a layer of Qwen3-VL, dense or with experts."""

from __future__ import annotations

from typing import Any

from megatron_webrl.model.parameter_map import REPLICATED, ExpertFormat, ParameterMapping, is_sparse
from megatron_webrl.model.vision_language.parameters import attention_mappings, expert_mappings, mlp_mappings


def layer_mappings(text: Any, layer: int, source: str, target: str, experts: ExpertFormat) -> list[ParameterMapping]:
    """Mappings of one layer of the text model. `source`, `target`: prefixes of its tensors and its parameters."""
    mlp = (f"{source}mlp.", f"{target}mlp.")
    if is_sparse(text, layer):
        rest = expert_mappings(text, layer, *mlp, experts)
    else:
        rest = mlp_mappings(text.hidden_size, text.intermediate_size, layer, *mlp)

    def norm(name: str, parameter: str) -> ParameterMapping:
        shape = (text.hidden_size,)
        return ParameterMapping(f"{source}{name}.weight", shape, f"{target}{parameter}.weight", REPLICATED, layer)

    return [
        norm("input_layernorm", "input_layernorm"),
        *attention_mappings(text, layer, source, target),
        norm("post_attention_layernorm", "pre_mlp_layernorm"),
        *rest,
    ]
