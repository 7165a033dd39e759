"""Small random Qwen3.5 models and samples for them."""

from __future__ import annotations

from functools import partial

import torch

from tests.model import tiny
from tests.model.tiny import (
    FULL,
    KEY_VALUE_HEADS,
    LINEAR,
    QWEN3_5_LAYERS,
    configuration,
    write_model,
)

__all__ = [
    "FULL",
    "KEY_VALUE_HEADS",
    "LINEAR",
    "MODELS",
    "Shape",
    "configuration",
    "mtp_tensors",
    "samples",
    "write_model",
]

Shape = partial(tiny.Shape, layers=QWEN3_5_LAYERS)
MODELS = {
    "dense": Shape(),
    "dense-tied": Shape(tie=True, layers=(LINEAR, LINEAR, LINEAR, FULL, LINEAR), value_heads=2),
    "sparse": Shape(experts=4),
}


def samples() -> dict[str, tiny.Sample]:
    """Text only, one image, three images, and an image in a sample of several chunks of the delta rule."""
    return {**tiny.samples(), "long": tiny.make_sample([[1, 4, 6]], text=150, response=13, seed=4)}


def mtp_tensors(shape: tiny.Shape, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of the layer for multi-token prediction, named as in released folders, which store its experts apart."""
    text, layer = configuration(shape).text_config, "mtp.layers.0."
    hidden, wide = text.hidden_size, text.num_attention_heads * text.head_dim
    shapes = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")},
        **{f"{layer}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")},
        **{f"{layer}self_attn.{name}_norm.weight": (text.head_dim,) for name in "qk"},
        **{f"{layer}self_attn.{name}_proj.weight": (KEY_VALUE_HEADS * text.head_dim, hidden) for name in "kv"},
        f"{layer}self_attn.q_proj.weight": (2 * wide, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, wide),
    }
    mlps = {"": getattr(text, "intermediate_size", 0)}
    if shape.experts:
        shapes[f"{layer}mlp.gate.weight"] = (shape.experts, hidden)
        shapes[f"{layer}mlp.shared_expert_gate.weight"] = (1, hidden)
        mlps = {f"experts.{expert}.": text.moe_intermediate_size for expert in range(shape.experts)}
        mlps["shared_expert."] = text.shared_expert_intermediate_size
    for name, inner in mlps.items():
        shapes |= {f"{layer}mlp.{name}{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{layer}mlp.{name}down_proj.weight"] = (hidden, inner)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator).bfloat16() for name, size in shapes.items()}
