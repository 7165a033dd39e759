"""Small random Qwen3.5 models. Their samples are those of `small_models`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_webrl.checks.gpu import small_models
from megatron_webrl.util import torchvision_shim

torchvision_shim.install()

from transformers import (  # noqa: E402
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

LINEAR, FULL = "linear_attention", "full_attention"
KEY_VALUE_HEADS = 2


@dataclass(frozen=True)
class Shape:
    """Options of a small model. All dimensions differ, so that mixed-up dimensions cause errors."""

    tie: bool = False
    layers: tuple[str, ...] = (LINEAR, FULL, LINEAR, LINEAR)
    value_heads: int = 4
    experts: int = 0


def configuration(shape: Shape) -> Any:
    """The transformers configuration of a small model."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
    text = {
        "vocab_size": small_models.VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": len(shape.layers),
        "layer_types": list(shape.layers),
        "num_attention_heads": 4,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
    }
    vision = {
        "depth": 2,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": small_models.MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
    }
    if shape.experts:
        del text["intermediate_size"]
        text |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 36,
        }
    return (Qwen3_5MoeConfig if shape.experts else Qwen3_5Config)(
        text_config=text,
        vision_config=vision,
        image_token_id=small_models.IMAGE,
        video_token_id=small_models.VIDEO,
        vision_start_token_id=small_models.VISION_START,
        vision_end_token_id=small_models.VISION_END,
        tie_word_embeddings=shape.tie,
    )


def write_model(folder: Path, shape: Shape, seed: int) -> Any:
    """Save a random model whose activations and logits are of size one, and return it."""
    torch.manual_seed(seed)
    kind = Qwen3_5MoeForConditionalGeneration if shape.experts else Qwen3_5ForConditionalGeneration
    model = kind(configuration(shape)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                wide = "embed" in name and "patch" not in name
                inputs = parameter.shape[-1] if "experts" in name else parameter[0].numel()
                parameter.normal_(std=1.0 if wide else inputs**-0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif name == "model.language_model.norm.weight" and shape.tie:
                parameter.normal_(mean=64**-0.5 - 1.0, std=0.02)  # the output layer is the embedding of size one
            elif name.endswith("A_log"):
                parameter.normal_(mean=-2.0, std=0.2)  # a state lasts for about ten tokens
            elif "language_model" in name and "linear_attn.norm" not in name:
                parameter.normal_(std=0.2)  # added to one
            else:
                parameter.normal_(mean=1.0, std=0.2)
    model.save_pretrained(folder)
    if shape.experts:  # transformers writes each expert on its own, released folders hold one tensor for all
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model
