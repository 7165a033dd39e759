"""Small random models and samples, and what transformers computes: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_webrl.model.parameter_map import has_linear_attention
from megatron_webrl.model.vision_language.packed_input import PackedInput
from megatron_webrl.model.vision_language.rope import mrope_position_ids
from megatron_webrl.util import torchvision_shim

torchvision_shim.install()

import transformers  # noqa: E402

VOCABULARY = 101  # odd, so that two ranks need padding
VISION_START, VISION_END, IMAGE, VIDEO = 97, 98, 99, 100
MERGE = 2
TEMPERATURE = 0.7
LINEAR, FULL = "linear_attention", "full_attention"
KEY_VALUE_HEADS = 2


# -- models -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Options of a small model. All dimensions differ, so that mixed-up dimensions cause errors."""

    tie: bool = False
    deepstack: tuple[int, ...] = (0,)
    key_value_heads: int = KEY_VALUE_HEADS
    layers: int | tuple[str, ...] = 4  # of Qwen3-VL; the kinds of those of Qwen3.5
    experts: int = 0
    dense_layers: tuple[int, ...] = ()  # of a mixture of experts
    window: int = 512
    value_heads: int = 4  # of linear attention

    @property
    def is_linear(self) -> bool:
        return not isinstance(self.layers, int)


QWEN3_5_LAYERS = (LINEAR, FULL, LINEAR, LINEAR)


def configuration(shape: Shape) -> Any:
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_attention_heads": 4,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": 32,
        "max_position_embeddings": shape.window,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    rope["mrope_interleaved"] = True
    vision: dict[str, Any] = {
        "depth": 4,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
    }
    experts: dict[str, Any] = {"num_experts": shape.experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if isinstance(shape.layers, int):
        text |= {"num_hidden_layers": shape.layers}
        vision["deepstack_visual_indexes"] = list(shape.deepstack)
        experts |= {"mlp_only_layers": list(shape.dense_layers), "decoder_sparse_step": 1}
    else:
        text |= {
            "num_hidden_layers": len(shape.layers),
            "layer_types": list(shape.layers),
            "linear_num_key_heads": 2,
            "linear_num_value_heads": shape.value_heads,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 4,
        }
        rope |= {"partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
        vision["depth"] = 2
        experts["shared_expert_intermediate_size"] = 36
        if shape.experts:
            del text["intermediate_size"]
    return _transformers_class(shape, "Config")(
        text_config={**text, "rope_parameters": rope, **(experts if shape.experts else {})},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=shape.tie,
    )


def _transformers_class(shape: Shape, kind: str) -> Any:
    return getattr(transformers, f"Qwen3{'_5' if shape.is_linear else 'VL'}{'Moe' if shape.experts else ''}{kind}")


def randomise(name: str, parameter: Tensor, inputs: int, config: Any) -> None:
    """Fill a parameter that sums over `inputs` so that activations and logits are of size one."""
    is_linear, tie = has_linear_attention(config.text_config), config.tie_word_embeddings
    with torch.no_grad():
        if parameter.dim() > 1:
            embedding = "embed" in name and "patch" not in name and (is_linear or not tie)
            parameter.normal_(std=1.0 if embedding else inputs**-0.5)
        elif name.endswith("bias"):
            parameter.normal_(std=0.1)
        elif not is_linear or "language_model" not in name or "linear_attn.norm" in name:
            parameter.normal_(mean=1.0, std=0.2)
        elif name == "model.language_model.norm.weight" and tie:
            # The output layer is the embedding of size one.
            parameter.normal_(mean=config.text_config.hidden_size**-0.5 - 1.0, std=0.02)
        elif name.endswith("A_log"):
            parameter.normal_(mean=-2.0, std=0.2)  # a state lasts for about ten tokens
        else:
            parameter.normal_(std=0.2)  # added to one


def write_model(folder: Path, shape: Shape, seed: int) -> Any:
    """Save a random model whose activations and logits are of size one, and return it."""
    torch.manual_seed(seed)
    model = _transformers_class(shape, "ForConditionalGeneration")(configuration(shape)).eval()
    for name, parameter in model.named_parameters():
        inputs = parameter.shape[-1] if "experts" in name else parameter[0].numel()
        randomise(name, parameter, inputs, model.config)
    model.save_pretrained(folder)
    if shape.is_linear and shape.experts:  # transformers writes each expert alone, released folders one tensor for all
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


# -- samples ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One sample; the tokens from `prompt` on are scored."""

    tokens: Tensor  # int64 [n]
    grids: Tensor  # int64 [images, 3]
    pixels: Tensor  # float32 [patches, values]
    prompt: int


def make_sample(grids: list[list[int]], *, text: int, response: int, seed: int) -> Sample:
    """Text, then each image followed by some text, then the response."""
    generator = torch.Generator().manual_seed(seed)

    def random_tokens(count: int) -> Tensor:
        return torch.randint(0, VISION_START, (count,), generator=generator)

    parts = [random_tokens(text)]
    for t, h, w in grids:
        placeholders = torch.full((t * h * w // MERGE**2,), IMAGE)
        parts += [torch.tensor([VISION_START]), placeholders, torch.tensor([VISION_END]), random_tokens(3)]
    prompt = sum(map(len, parts))
    patches = sum(t * h * w for t, h, w in grids)
    return Sample(
        tokens=torch.cat([*parts, random_tokens(response)]),
        grids=torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
        pixels=torch.randn(patches, 3 * 2 * 4 * 4, generator=generator),
        prompt=prompt,
    )


def samples() -> dict[str, Sample]:
    """Text only, one image, three images of different sizes."""
    return {
        "text": make_sample([], text=17, response=9, seed=1),
        "image": make_sample([[1, 4, 6]], text=5, response=7, seed=2),
        "images": make_sample([[1, 8, 4], [1, 2, 2], [1, 4, 12]], text=4, response=11, seed=3),
    }


def pack(parts: Sequence[Sample]) -> tuple[PackedInput, Tensor]:
    """Pack samples; returns the input and the targets of its scored positions, int64 [R]."""
    ends = torch.tensor([len(s.tokens) for s in parts]).cumsum(0)
    starts = [0, *ends[:-1].tolist()]
    packed = PackedInput(
        tokens=torch.cat([s.tokens for s in parts]),
        position_ids=torch.cat([mrope_position_ids(s.tokens, s.grids, IMAGE, MERGE) for s in parts], dim=1),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
        pixels=torch.cat([s.pixels for s in parts]),
        grids=torch.cat([s.grids for s in parts]),
        scored_positions=torch.cat(
            [start + torch.arange(s.prompt - 1, len(s.tokens) - 1) for start, s in zip(starts, parts, strict=True)]
        ),
    )
    return packed, packed.tokens[packed.scored_positions + 1]


# -- results of transformers --------------------------------------------------------------------------------------


def reference_logits(model: Any, sample: Sample) -> Tensor:
    """transformers' logits at the scored positions, [R, VOCABULARY]."""
    visual = {"pixel_values": sample.pixels, "image_grid_thw": sample.grids} if len(sample.grids) else {}
    types = (sample.tokens == IMAGE).int()[None]
    logits = model(input_ids=sample.tokens[None], mm_token_type_ids=types, use_cache=False, **visual).logits[0]
    return logits[sample.prompt - 1 : -1]


def token_weights(count: int) -> Tensor:
    """Weights of the scored tokens in the loss whose gradient is compared, both signs."""
    return torch.randn(count, generator=torch.Generator().manual_seed(7)) / count


def reference_loss(model: Any, parts: Sequence[Sample]) -> Tensor:
    logits = torch.cat([reference_logits(model, sample) for sample in parts]) / TEMPERATURE
    targets = torch.cat([sample.tokens[sample.prompt :] for sample in parts])
    logprobs = logits.log_softmax(dim=-1).gather(1, targets[:, None]).squeeze(1)
    return (logprobs * token_weights(len(logprobs)).to(logprobs.device)).sum()
