"""The part of the parameter map that describes Qwen3.5, dense and with experts.

The projections of a Gated DeltaNet layer are one parameter, grouped by key head as attention's are by key head:
the query and key, then the values, output gates, writing strengths and decays of the value heads of that key head.
A rank that holds some of the groups holds all that their heads need.
"""

from __future__ import annotations

from typing import Any

from megatron_webrl.model.parameter_map import (
    REPLICATED,
    ROW,
    ExpertFormat,
    ParameterMapping,
    TensorLayout,
    is_linear_attention,
    is_sparse,
)
from megatron_webrl.model.vision_language.parameters import attention_mappings, expert_mappings, mlp_mappings

PASSTHROUGH_PREFIX = "mtp."  # of the layer that predicts the token after the next, which is not trained


def layer_mappings(text: Any, layer: int, source: str, target: str, experts: ExpertFormat) -> list[ParameterMapping]:
    """Mappings of one layer of the text model. `source`, `target`: prefixes of its tensors and its parameters."""
    hidden = text.hidden_size

    def norm(name: str, parameter: str) -> ParameterMapping:
        return ParameterMapping(f"{source}{name}.weight", (hidden,), f"{target}{parameter}.weight", REPLICATED, layer)

    if is_linear_attention(text, layer):
        mixer = _delta_net_mappings(text, layer, source, f"{target}self_attention.")
    else:
        mixer = attention_mappings(text, layer, source, target, gated=True)
    return [
        norm("input_layernorm", "input_layernorm"),
        *mixer,
        norm("post_attention_layernorm", "pre_mlp_layernorm"),
        *_mlp_mappings(text, layer, f"{source}mlp.", f"{target}mlp.", experts),
    ]


def _delta_net_mappings(text: Any, layer: int, source: str, target: str) -> list[ParameterMapping]:
    hidden, groups, kernel = text.hidden_size, text.linear_num_key_heads, text.linear_conv_kernel_dim
    heads = text.linear_num_value_heads // groups  # value heads of one group
    key, value = text.linear_key_head_dim, text.linear_value_head_dim
    source = f"{source}linear_attn."
    convolved = (key, key, heads * value)  # rows of one group: query, key, values
    widths = (*convolved, heads * value, heads, heads)  # and output gates, writing strengths, decays
    rows = [groups * width for width in convolved]

    def of_group(
        name: str, parameter: str, index: int, parts: tuple[int, ...], columns: tuple[int, ...], whole: bool
    ) -> ParameterMapping:
        """Part `index` of a parameter's groups; unless `whole`, it is one of three parts of the tensor."""
        layout = TensorLayout(
            "query_group", num_query_groups=groups, group_stride=sum(parts), group_offset=sum(parts[:index])
        )
        count = groups * parts[index]
        start = 0 if whole else sum(rows[:index])
        return ParameterMapping(
            f"{source}{name}",
            (count, *columns),
            f"{target}{parameter}",
            layout,
            layer,
            tensor_shape=(count if whole else sum(rows), *columns),
            part_index=(slice(start, start + count), *(slice(0, size) for size in columns)),
        )

    def projection(name: str, index: int) -> ParameterMapping:
        return of_group(f"{name}.weight", "linear_in.weight", index, widths, (hidden,), whole=index > 2)

    output = (hidden, groups * heads * value)
    return [
        *(projection("in_proj_qkv", index) for index in range(3)),
        *(projection(name, index) for index, name in enumerate(("in_proj_z", "in_proj_b", "in_proj_a"), start=3)),
        *(of_group("conv1d.weight", "conv_weight", index, convolved, (1, kernel), whole=False) for index in range(3)),
        of_group("dt_bias", "dt_bias", 0, (heads,), (), whole=True),
        of_group("A_log", "A_log", 0, (heads,), (), whole=True),
        ParameterMapping(f"{source}norm.weight", (value,), f"{target}norm_weight", REPLICATED, layer),
        ParameterMapping(f"{source}out_proj.weight", output, f"{target}linear_out.weight", ROW, layer),
    ]


def _mlp_mappings(text: Any, layer: int, source: str, target: str, experts: ExpertFormat) -> list[ParameterMapping]:
    hidden = text.hidden_size
    if not is_sparse(text, layer):
        return mlp_mappings(hidden, text.intermediate_size, layer, source, target)
    # The released tensors are not transposed, unlike those of Qwen3-VL.
    form: ExpertFormat = "separate" if experts == "separate" else "transposed"
    shared = (f"{source}shared_expert.", f"{target}shared_experts.")
    gate = (f"{source}shared_expert_gate.weight", (1, hidden), f"{target}shared_experts.gate_weight")
    return [
        *expert_mappings(text, layer, source, target, form),
        *mlp_mappings(hidden, text.shared_expert_intermediate_size, layer, *shared),
        ParameterMapping(*gate, REPLICATED, layer),
    ]
