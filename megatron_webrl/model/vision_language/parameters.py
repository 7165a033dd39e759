"""Parameter maps of MLPs, experts and the vision tower."""

from __future__ import annotations

from typing import Any

from megatron_webrl.model.parameter_map import (
    REPLICATED,
    ROW,
    ExpertFormat,
    ParameterMapping,
    TensorLayout,
)

GATE_UP = ("gate", "up")


def attention_mappings(text: Any, layer: int, source: str, target: str, gated: bool = False) -> list[ParameterMapping]:
    """Mappings of attention; with `gated`, q_proj holds the query and the output gate of each head, one by one."""
    hidden, dim, groups = text.hidden_size, text.head_dim, text.num_key_value_heads
    heads = text.num_attention_heads // groups  # query heads of one group
    queries = heads * dim * (2 if gated else 1)  # rows of one group
    source, target = f"{source}self_attn.", f"{target}self_attention."

    def of_group(name: str, rows: int, offset: int) -> ParameterMapping:
        layout = TensorLayout(
            "query_group", num_query_groups=groups, group_stride=queries + 2 * dim, group_offset=offset
        )
        shape = (groups * rows, hidden)
        return ParameterMapping(f"{source}{name}_proj.weight", shape, f"{target}linear_qkv.weight", layout, layer)

    def norm(name: str) -> ParameterMapping:
        parameter = f"{target}{name}_layernorm.weight"
        return ParameterMapping(f"{source}{name}_norm.weight", (dim,), parameter, REPLICATED, layer)

    output = (hidden, groups * heads * dim)
    return [
        of_group("q", queries, 0),
        of_group("k", dim, queries),
        of_group("v", dim, queries + dim),
        norm("q"),
        norm("k"),
        ParameterMapping(f"{source}o_proj.weight", output, f"{target}linear_proj.weight", ROW, layer),
    ]


def mlp_mappings(dim: int, ffn: int, layer: int, source: str, target: str) -> list[ParameterMapping]:
    """Mappings of a dense MLP with hidden size `dim` and intermediate size `ffn`."""
    fc1, fc2 = f"{target}linear_fc1.weight", f"{target}linear_fc2.weight"
    return [
        ParameterMapping(f"{source}gate_proj.weight", (ffn, dim), fc1, TensorLayout("gate_up", gate_up_index=0), layer),
        ParameterMapping(f"{source}up_proj.weight", (ffn, dim), fc1, TensorLayout("gate_up", gate_up_index=1), layer),
        ParameterMapping(f"{source}down_proj.weight", (dim, ffn), fc2, ROW, layer),
    ]


def expert_mappings(text: Any, layer: int, source: str, target: str, experts: ExpertFormat) -> list[ParameterMapping]:
    """Mappings of the router and all experts of a layer."""
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


def vision_mappings(vision: Any) -> list[ParameterMapping]:
    """Mappings of the vision tower. `vision`: the vision config of transformers."""
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
    deepstack = [f"deepstack_merger_list.{i}" for i in range(len(getattr(vision, "deepstack_visual_indexes", ())))]
    for merger in ("merger", *deepstack):
        norm(f"{merger}.norm", hidden if merger == "merger" else merged)
        linear(f"{merger}.linear_fc1", merged, merged)
        linear(f"{merger}.linear_fc2", vision.out_hidden_size, merged)
    return [ParameterMapping(f"model.visual.{key}", size, f"visual.{key}", REPLICATED) for key, size in shapes.items()]
