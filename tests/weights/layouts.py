"""Random small models and layouts of both sides, and the contents of their ranks, computed without the plan's maps.

Every element of a model has a unique number from 1; padding is 0 on trainer ranks and -1 in engines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layer_split import split_layers
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.parameter_map import is_sparse, parameter_shapes, to_megatron
from megatron_webrl.weights.engine_map import EngineSizes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology
from tests.model import tiny

PADDING = -1
LINEAR_KEY_HEADS, LINEAR_VALUE_HEADS, LINEAR_KEY_DIM, LINEAR_VALUE_DIM = 12, 24, 2, 3
LANGUAGE = "model.language_model."


@dataclass(frozen=True)
class Case:
    hf_config: Any
    trainer: TrainerTopology
    engines: EngineTopology
    staging: int  # bytes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any layout of any small model, with engines on the trainer's nodes or on others."""
    tensor = draw(st.sampled_from([1, 2, 3, 4]))
    heads = 12 if tensor == 3 else draw(st.sampled_from([4, 8, 12]))
    key_value = draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0 and (n % tensor == 0 or tensor % n == 0)]))
    layers, experts = draw(st.sampled_from([1, 2, 3, 4, 5])), draw(st.sampled_from([0, 0, 4, 6]))
    stages = draw(st.sampled_from([n for n in (1, 2, 3) if n <= layers]))
    hybrid = layers > stages and draw(st.booleans())
    contexts = (1,) if hybrid else (1, 2)
    split = draw(st.sampled_from([(t, c) for t in (1, 2, 4) for c in contexts if key_value % (t * c) == 0]))
    dense_layers = draw(st.lists(st.integers(0, layers - 1), unique=True, max_size=2)) if experts else []
    if len(dense_layers) == layers:
        dense_layers = []
    deepstack = draw(st.integers(0, min(2, layers // stages)))
    vocabulary = draw(st.integers(129, 192) if tensor == 3 else st.integers(65, 192))
    sizes = (layers, heads, key_value, experts, dense_layers, deepstack, vocabulary, draw(st.booleans()))
    hf_config = small_config(*sizes, stages if hybrid else 0)
    trainer = draw(_trainers(layers, experts, *split))
    engine = EngineSizes(tensor, stages, bool(experts) and draw(st.booleans()))
    shared_nodes = draw(st.booleans())
    node = st.sampled_from(["a", "b", "c", "d"] if shared_nodes else ["x", "y"])
    sizes = draw(st.lists(st.sampled_from([engine, engine, EngineSizes()]), min_size=1, max_size=4))
    nodes = tuple(draw(st.tuples(*[node] * each.ranks)) for each in sizes)
    staging = draw(st.sampled_from([2**11, 2**16])) if shared_nodes else 2**11
    return Case(hf_config, trainer, EngineTopology(tuple(sizes), nodes), staging)


@st.composite
def _trainers(draw: st.DrawFn, layers: int, experts: int, tensor: int, context: int) -> TrainerTopology:
    pipeline = draw(st.integers(1, min(layers, 3)))
    virtual = draw(st.integers(1, layers // pipeline)) if pipeline > 1 else 1
    expert, expert_tensor = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)])) if experts else (1, 1)
    ranks = pipeline * math.lcm(tensor * context, expert * expert_tensor) * draw(st.integers(1, 3))
    nodes = tuple(draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=ranks, max_size=ranks)))
    return TrainerTopology(ParallelSizes(tensor, pipeline, virtual, expert, expert_tensor, context), ranks, nodes)


def small_config(
    layers: int, heads: int, key_value: int, experts: int, dense: list[int], deepstack: int, vocabulary: int, tie: bool,
    hybrid_stages: int,
) -> Any:  # fmt: skip
    """`hybrid_stages`: of an engine of Qwen3.5, each with full attention in its last layer; 0: a Qwen3-VL."""
    kinds: int | tuple[str, ...] = layers
    if hybrid_stages:
        ends = {_layers_of_stage(layers, hybrid_stages, stage)[-1] for stage in range(hybrid_stages)}
        kinds = tuple(tiny.FULL if layer in ends else tiny.LINEAR for layer in range(layers))
    shape = tiny.Shape(tie, tuple(range(deepstack)), key_value, kinds, experts, tuple(dense))
    hf_config = tiny.configuration(shape)
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 20,
        "intermediate_size": 24,
        "num_attention_heads": heads,
        "head_dim": 4,
        "moe_intermediate_size": 12,
        "linear_num_key_heads": LINEAR_KEY_HEADS,
        "linear_num_value_heads": LINEAR_VALUE_HEADS,
        "linear_key_head_dim": LINEAR_KEY_DIM,
        "linear_value_head_dim": LINEAR_VALUE_DIM,
    }
    vision = {"depth": 1, "hidden_size": 24, "intermediate_size": 36, "patch_size": 2, "out_hidden_size": 20}
    for section, values in ((hf_config.text_config, text), (hf_config.vision_config, vision)):
        for name in values.keys() & vars(section).keys():
            setattr(section, name, values[name])
    return hf_config


def numbered_state(hf_config: Any) -> dict[str, Tensor]:
    """The Hugging Face tensors, int64, with unique elements."""
    state, first = {}, 1
    for mapping in parameter_mappings(hf_config):
        if mapping.hf_param not in state:
            count = math.prod(mapping.tensor_shape)
            state[mapping.hf_param] = torch.arange(first, first + count).reshape(mapping.tensor_shape)
            first += count
    return state


def trainer_parameters(case: Case, state: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Parameters of a trainer rank in Megatron's rank order: tensor, context, expert, data, pipeline."""
    sizes, hf_config = case.trainer.sizes, case.hf_config
    layers = hf_config.text_config.num_hidden_layers
    stage, within = divmod(rank, case.trainer.ranks // sizes.pipeline)
    mine = {
        layer
        for chunk, chunk_layers in enumerate(split_layers(layers, sizes.pipeline * sizes.virtual))
        if chunk % sizes.pipeline == stage
        for layer in chunk_layers
    }
    mappings = parameter_mappings(hf_config)
    shapes = parameter_shapes(mappings, sizes.tensor, sizes.expert_tensor)
    last = stage == sizes.pipeline - 1
    found: dict[str, Tensor] = {}
    for mapping in mappings:
        if mapping.layer is not None:
            here = mapping.layer in mine
        elif mapping.hf_param.startswith("model.visual."):
            here = stage == 0
        elif "embed_tokens" in mapping.hf_param:
            here = stage == 0 or (last and hf_config.tie_word_embeddings)
        else:
            here = last
        part, size = within % sizes.tensor, sizes.tensor
        if mapping.expert is not None:
            per_rank = hf_config.text_config.num_experts // sizes.expert
            here = here and within // sizes.expert_tensor % sizes.expert == mapping.expert // per_rank
            part, size = within % sizes.expert_tensor, sizes.expert_tensor
        if here:
            into = found.setdefault(
                mapping.megatron_param, torch.zeros(shapes[mapping.megatron_param], dtype=torch.int64)
            )
            to_megatron(mapping, state[mapping.hf_param], into, part, size)
    return found


def engine_parameters(hf_config: Any, sizes: EngineSizes, state: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Parameters of a vLLM rank after loading the state, written independently from vLLM's layers."""
    text, count = hf_config.text_config, sizes.tensor
    stage, part = divmod(rank, count)
    sparse_model, hybrid = hf_config.model_type == "qwen3_vl_moe", hasattr(text, "linear_num_key_heads")
    found = {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.visual.")}
    for layer in _layers_of_stage(text.num_hidden_layers, sizes.pipeline, stage):
        source, target = f"{LANGUAGE}layers.{layer}.", f"language_model.model.layers.{layer}."
        linear = hybrid and text.layer_types[layer] == "linear_attention"
        attention = (_linear_attention if linear else _attention)(state, source, text, count, part)
        found |= {target + name: t for name, t in attention.items()}
        if is_sparse(text, layer):
            found |= {target + name: t for name, t in _experts(state, source, text, sizes, part).items()}
        else:
            gate, up, down = (state[f"{source}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            found[f"{target}mlp.gate_up_proj.weight"] = torch.cat([gate.chunk(count)[part], up.chunk(count)[part]])
            found[f"{target}mlp.down_proj.weight"] = down.chunk(count, dim=1)[part]
    first, last = stage == 0 or sparse_model, stage == sizes.pipeline - 1 or sparse_model
    if first or hybrid or (last and hf_config.tie_word_embeddings):
        embedding = _vocabulary(state[f"{LANGUAGE}embed_tokens.weight"], count, part)
        found["language_model.model.embed_tokens.weight"] = embedding
    if last:
        found["language_model.model.norm.weight"] = state[f"{LANGUAGE}norm.weight"]
        if not hf_config.tie_word_embeddings:
            found["language_model.lm_head.weight"] = _vocabulary(state["lm_head.weight"], count, part)
    return found


def _layers_of_stage(layers: int, stages: int, stage: int) -> range:
    counts = [layers // stages] * stages
    for back in range(layers % stages):
        counts[-2 - back] += 1
    return range(sum(counts[:stage]), sum(counts[: stage + 1]))


def _vocabulary(tensor: Tensor, count: int, part: int) -> Tensor:
    padding = -len(tensor) % 64
    padded = torch.cat([tensor, torch.full((padding, tensor.shape[1]), PADDING)])
    return padded.chunk(count)[part]


def _attention(state: dict[str, Tensor], source: str, text: Any, count: int, part: int) -> dict[str, Tensor]:
    q, k, v, o = (state[f"{source}self_attn.{name}_proj.weight"] for name in "qkvo")
    q = q.unflatten(0, (text.num_attention_heads, -1)).chunk(count)[part]
    copies = max(count // text.num_key_value_heads, 1)
    k, v = (
        t.unflatten(0, (text.num_key_value_heads, -1)).repeat_interleave(copies, dim=0).chunk(count)[part]
        for t in (k, v)
    )
    found = {
        "self_attn.qkv_proj.weight": torch.cat([t.flatten(0, 1) for t in (q, k, v)]),
        "self_attn.o_proj.weight": o.chunk(count, dim=1)[part],
    }
    return found | _norms(state, source, "self_attn.q_norm", "self_attn.k_norm")


def _norms(state: dict[str, Tensor], source: str, *names: str) -> dict[str, Tensor]:
    names = ("input_layernorm", "post_attention_layernorm", *names)
    return {f"{name}.weight": state[f"{source}{name}.weight"] for name in names}


def _linear_attention(state: dict[str, Tensor], source: str, text: Any, count: int, part: int) -> dict[str, Tensor]:
    prefix = f"{source}linear_attn."
    keys, values = LINEAR_KEY_HEADS * LINEAR_KEY_DIM, LINEAR_VALUE_HEADS * LINEAR_VALUE_DIM

    def channels(tensor: Tensor) -> list[Tensor]:
        return [each.chunk(count)[part] for each in tensor.split([keys, keys, values])]

    def mine(name: str) -> Tensor:
        return state[prefix + name].chunk(count)[part]

    found = {
        "in_proj_qkvz.weight": torch.cat([*channels(state[f"{prefix}in_proj_qkv.weight"]), mine("in_proj_z.weight")]),
        "in_proj_ba.weight": torch.cat([mine("in_proj_b.weight"), mine("in_proj_a.weight")]),
        "conv1d.weight": torch.cat(channels(state[f"{prefix}conv1d.weight"])),
        "dt_bias": mine("dt_bias"),
        "A_log": mine("A_log"),
        "norm.weight": state[f"{prefix}norm.weight"],
        "out_proj.weight": state[f"{prefix}out_proj.weight"].chunk(count, dim=1)[part],
    }
    return {f"linear_attn.{name}": t for name, t in found.items()} | _norms(state, source)


def _experts(state: dict[str, Tensor], source: str, text: Any, sizes: EngineSizes, part: int) -> dict[str, Tensor]:
    gate_up, down = state[f"{source}mlp.experts.gate_up_proj"], state[f"{source}mlp.experts.down_proj"]
    shared = hasattr(text, "shared_expert_intermediate_size")
    if not shared:  # Qwen3-VL's tensors are transposed
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate, up = gate_up.chunk(2, dim=1)  # [experts, inner, hidden]; down: [experts, hidden, inner]
    if sizes.expert_parallel:
        gate, up, down = (t.tensor_split(sizes.tensor)[part] for t in (gate, up, down))
    else:
        gate, up = (t.chunk(sizes.tensor, dim=1)[part] for t in (gate, up))
        down = down.chunk(sizes.tensor, dim=2)[part]
    found = {
        "mlp.gate.weight": state[f"{source}mlp.gate.weight"],
        "mlp.experts.routed_experts.w13_weight": torch.cat([gate, up], dim=1),
        "mlp.experts.routed_experts.w2_weight": down,
    }
    if shared:
        found["mlp.shared_expert_gate.weight"] = state[f"{source}mlp.shared_expert_gate.weight"]
        gate, up, down = (state[f"{source}mlp.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gate, up = (t.chunk(sizes.tensor)[part] for t in (gate, up))
        found["mlp.shared_expert.gate_up_proj.weight"] = torch.cat([gate, up])
        found["mlp.shared_expert.down_proj.weight"] = down.chunk(sizes.tensor, dim=1)[part]
    return found
