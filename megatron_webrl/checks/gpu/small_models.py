"""Small random Qwen3-VL models, samples for them, and the results of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.model.vision_language.packed_input import PackedInput
from megatron_webrl.model.vision_language.rope import mrope_position_ids
from megatron_webrl.util import torchvision_shim

torchvision_shim.install()

from transformers import (  # noqa: E402
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

VOCABULARY = 101  # odd, so that two ranks need padding
VISION_START, VISION_END, IMAGE, VIDEO = 97, 98, 99, 100
MERGE = 2
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Shape:
    """Options of a small model. All dimensions differ, so that mixed-up dimensions cause errors."""

    tie: bool = False
    deepstack: tuple[int, ...] = (0,)
    key_value_heads: int = 2
    layers: int = 4
    experts: int = 0
    dense_layers: tuple[int, ...] = ()  # of a mixture of experts
    window: int = 512


def configuration(shape: Shape) -> Any:
    """The transformers configuration of a small model."""
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": 32,
        "max_position_embeddings": shape.window,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
    }
    if shape.experts:
        text |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": list(shape.dense_layers),
            "decoder_sparse_step": 1,
        }
    vision = {
        "depth": 4,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": list(shape.deepstack),
    }
    return (Qwen3VLMoeConfig if shape.experts else Qwen3VLConfig)(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=shape.tie,
    )


def write_model(folder: Path, shape: Shape, seed: int) -> Any:
    """Save a random model whose activations and logits are of size one, and return it."""
    torch.manual_seed(seed)
    config = configuration(shape)
    model = (Qwen3VLMoeForConditionalGeneration if shape.experts else Qwen3VLForConditionalGeneration)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                embedding = "embed" in name and "patch" not in name
                parameter.normal_(std=1.0 if embedding and not shape.tie else _inputs(name, parameter) ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            else:
                parameter.normal_(mean=1.0, std=0.2)
    model.save_pretrained(folder)
    return model


def _inputs(name: str, parameter: Tensor) -> int:
    """Number of inputs of one output."""
    return parameter.shape[2] if "experts" in name else parameter[0].numel()


@dataclass(frozen=True)
class Sample:
    """One sample; the tokens from `prompt` on are scored."""

    tokens: Tensor  # int64 [n]
    grids: Tensor  # int64 [images, 3]
    pixels: Tensor  # float32 [patches, values]
    prompt: int

    def to(self, device: torch.device) -> Sample:
        """Copy all tensors to a device."""
        return Sample(self.tokens.to(device), self.grids.to(device), self.pixels.to(device), self.prompt)


def make_sample(
    grids: list[list[int]], *, text: int, response: int, seed: int, patch_values: int = 3 * 2 * 4 * 4
) -> Sample:
    """Text, then each image followed by some text, then the response. `patch_values`: pixel values of a patch."""
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
        pixels=torch.randn(patches, patch_values, generator=generator),
        prompt=prompt,
    )


def samples() -> dict[str, Sample]:
    """Text only, one image, three images of different sizes."""
    return {
        "text": make_sample([], text=17, response=9, seed=1),
        "image": make_sample([[1, 4, 6]], text=5, response=7, seed=2),
        "images": make_sample([[1, 8, 4], [1, 2, 2], [1, 4, 12]], text=4, response=11, seed=3),
    }


def pack(parts: list[Sample]) -> tuple[PackedInput, Tensor]:
    """Pack samples; returns the input and the targets of its scored positions, int64 [R]."""
    ends = torch.tensor([len(s.tokens) for s in parts]).cumsum(0)
    starts = [0, *ends[:-1].tolist()]
    row = PackedInput(
        tokens=torch.cat([s.tokens for s in parts]),
        position_ids=torch.cat([mrope_position_ids(s.tokens, s.grids, IMAGE, MERGE) for s in parts], dim=1),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
        pixels=torch.cat([s.pixels for s in parts]),
        grids=torch.cat([s.grids for s in parts]),
        scored_positions=torch.cat(
            [start + torch.arange(s.prompt - 1, len(s.tokens) - 1) for start, s in zip(starts, parts, strict=True)]
        ),
    )
    return row, row.tokens[row.scored_positions + 1]


def reference_logits(model: Any, sample: Sample) -> Tensor:
    """transformers' logits at the scored positions, [R, VOCABULARY]."""
    visual = {"pixel_values": sample.pixels, "image_grid_thw": sample.grids} if len(sample.grids) else {}
    types = (sample.tokens == IMAGE).int()[None]
    logits = model(input_ids=sample.tokens[None], mm_token_type_ids=types, use_cache=False, **visual).logits[0]
    return logits[sample.prompt - 1 : -1]


def token_weights(count: int) -> Tensor:
    """Weights of the scored tokens in the loss whose gradient is compared, both signs."""
    return torch.randn(count, generator=torch.Generator().manual_seed(7)) / count


def reference_loss(model: Any, parts: list[Sample]) -> Tensor:
    """Weighted sum of the log-probabilities of all scored tokens."""
    logits = torch.cat([reference_logits(model, sample) for sample in parts]) / TEMPERATURE
    targets = torch.cat([sample.tokens[sample.prompt :] for sample in parts])
    logprobs = logits.log_softmax(dim=-1).gather(1, targets[:, None]).squeeze(1)
    return (logprobs * token_weights(len(logprobs)).to(logprobs.device)).sum()
