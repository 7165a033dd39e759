"""Folders of models with all widths of a released one, few layers and random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.model import parameter_counts
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.convert.hf_files import TensorSpec, copy_metadata, write_hf_model
from tests.model import tiny
from tools.make_tiny_model import make_tiny_model
from tools.tiny_tokenizer import PLAIN_TOKENS, SPECIAL_TOKENS

LAYERS = (tiny.LINEAR, tiny.FULL)
"""Kinds of the layers of Qwen3.5; Qwen3-VL has as many of its own."""
SHARD_BYTES = 5 * 10**9  # as in released folders
VISION_LAYERS = 2


def write(
    folder: Path, name: str, dtype: torch.dtype, layers: Sequence[str] = LAYERS, vocabulary: int | None = None
) -> Path:
    """Write the folder of the released size `name` with these layers; returns `folder`.

    `vocabulary` replaces the number of entries. The entries of the tokenizer are spread over the whole vocabulary, and
    its special tokens have the numbers of the released one, or are as far from the end.
    """
    config = make_config(name, dtype, layers, vocabulary)
    base = make_tiny_model(folder.with_name(f"{folder.name}-base"))
    copy_metadata(base, folder)
    _write_tokenizer(folder, config.image_token_id, config.text_config.vocab_size)
    config.save_pretrained(folder)
    torch.manual_seed(0)
    mappings = parameter_mappings(config)
    transposed = {mapping.hf_param for mapping in mappings if mapping.transposed}
    shapes = {mapping.hf_param: mapping.tensor_shape for mapping in mappings}

    def make(spec: TensorSpec) -> Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        inputs = tensor[0].numel() if "experts" not in spec.name else spec.shape[-2 if spec.name in transposed else -1]
        tiny.randomise(spec.name, tensor, inputs, config)
        return tensor

    write_hf_model(folder, [TensorSpec(key, shape, dtype) for key, shape in shapes.items()], make, SHARD_BYTES)
    return folder


def make_config(name: str, dtype: torch.dtype, layers: Sequence[str], vocabulary: int | None) -> Any:
    """The configuration of a released size with these layers and two of the vision tower."""
    config = parameter_counts.make_hf_config(name)
    text, vision = config.text_config, config.vision_config
    text.num_hidden_layers, vision.depth = len(layers), VISION_LAYERS
    if name in parameter_counts.QWEN3_5_NAMES:
        text.layer_types, kind = list(layers), "Qwen3_5"
    else:
        vision.deepstack_visual_indexes, kind = list(range(min(len(layers), VISION_LAYERS))), "Qwen3VL"
    experts = "Moe" if "moe" in config.model_type else ""
    config.architectures = [f"{kind}{experts}ForConditionalGeneration"]
    for section in (config, text, vision):
        section.dtype = dtype
    if vocabulary is not None:
        shift = vocabulary - text.vocab_size
        text.vocab_size = vocabulary
        for token in ("image", "video", "vision_start", "vision_end"):
            setattr(config, f"{token}_token_id", getattr(config, f"{token}_token_id") + shift)
    return config


def _write_tokenizer(folder: Path, image_token: int, vocabulary: int) -> None:
    """Renumber the entries of the folder's tokenizer."""
    path, generation = folder / "tokenizer.json", folder / "generation_config.json"
    content = json.loads(path.read_text())
    special = image_token - SPECIAL_TOKENS.index("<|image_pad|>")
    entries, stride = content["model"]["vocab"], special // len(content["model"]["vocab"])
    numbers = {entry: number * stride for entry, number in entries.items()}
    assert special + len(SPECIAL_TOKENS) + len(PLAIN_TOKENS) < vocabulary
    numbers |= {token: special + i for i, token in enumerate((*SPECIAL_TOKENS, *PLAIN_TOKENS))}
    for token in content["added_tokens"]:
        token["id"] = numbers[token["content"]]
    content["model"]["vocab"] = numbers  # with the added tokens, else they would get the next free numbers
    path.write_text(json.dumps(content))
    end, stop = numbers["<|endoftext|>"], numbers["<|im_end|>"]
    generation.write_text(
        json.dumps({**json.loads(generation.read_text()), "pad_token_id": end, "eos_token_id": [stop, end]})
    )
