"""Write a tiny Qwen3-VL or Qwen3.5 with random weights as a complete Hugging Face folder.

The folder loads in transformers and in vLLM. It is the real architecture with small numbers: interleaved
m-RoPE, QK-norm, DeepStack, tied embeddings, or a mixture of experts in the layout of released checkpoints.
Of Qwen3.5 every fourth layer, or every `full_attention_interval`-th, is gated attention and the others are linear
attention, whose heads have the width of the released models (128), as vLLM's CPU build knows no other; it also computes
these models in bfloat16 only.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

from megatron_webrl.util import torchvision_shim
from tools import tiny_tokenizer

torchvision_shim.install()  # transformers brings in torchvision when a processor is first asked for

PATCH = 16
MERGE = 2
TEMPORAL = 2
LINEAR_HEAD_DIM = 128
CHOICES = {"architecture": ("qwen3_vl", "qwen3_5"), "dtype": ("float32", "bfloat16")}


def make_tiny_model(
    folder: Path,
    *,
    architecture: str = "qwen3_vl",
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 384,
    vision_hidden: int = 128,
    vision_layers: int = 2,
    vision_heads: int = 4,
    vision_intermediate: int = 256,
    vision_grid: int = 16,
    deepstack: tuple[int, ...] = (0,),
    experts: int = 0,
    experts_per_token: int = 2,
    expert_intermediate: int = 96,
    linear_key_heads: int = 2,
    linear_value_heads: int = 4,
    full_attention_interval: int = 4,
    vocabulary: int = 1024,
    max_position_embeddings: int = 4096,
    min_pixels: int = 4096,
    max_pixels: int = 262144,
    tie: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    force: bool = False,
) -> Path:
    """Write the model to `folder` and return it. The same arguments give the same files.

    `vision_grid` is the side of the learned position grid, in patches; `experts` 0 makes a dense model;
    `vocabulary` counts all tokenizer entries. DeepStack is of Qwen3-VL alone, linear attention of
    Qwen3.5. Raises ValueError for sizes that do not fit each other and
    FileExistsError if `folder` has something in it and `force` is not set.
    """
    folder = Path(folder)
    sizes = {name: value for name, value in locals().items() if name not in ("folder", "force")}
    _check(sizes)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not force:
        raise FileExistsError(f"{folder} is not an empty folder; name another one or pass --force to replace it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A reader never sees half a model: it is complete before it gets its name.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        _write(made, sizes)
        if folder.is_dir():
            shutil.rmtree(folder)
        elif folder.exists():
            folder.unlink()
        os.rename(made, folder)
    return folder


def _check(sizes: dict[str, Any]) -> None:
    hidden, inner, experts = sizes["hidden"], sizes["expert_intermediate"], sizes["experts"]
    for whole, part in (("heads", "kv_heads"), ("linear_value_heads", "linear_key_heads")):
        if sizes[whole] % sizes[part]:
            raise ValueError(f"{part}={sizes[part]} does not divide {whole}={sizes[whole]}")
    if experts and hidden in (inner, 2 * inner):
        raise ValueError(
            f"expert_intermediate={inner} and its double must differ from hidden={hidden}, else a wrong expert layout "
            "goes unseen"
        )


def _write(folder: Path, sizes: dict[str, Any]) -> None:
    processor = _processor(sizes)
    processor.save_pretrained(folder)
    config = _config(sizes, processor.tokenizer)
    model = _model(config, sizes)
    config.save_pretrained(folder)
    _save_weights(folder, model, config)
    end, stop = (processor.tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>"))
    transformers.GenerationConfig(
        do_sample=True, temperature=1.0, pad_token_id=end, eos_token_id=[stop, end]
    ).save_pretrained(folder)


def _processor(sizes: dict[str, Any]) -> transformers.Qwen3VLProcessor:
    backend = tiny_tokenizer.build_tokenizer(
        tiny_tokenizer.corpus(), tiny_tokenizer.action_texts(), sizes["vocabulary"]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(tiny_tokenizer.SPECIAL_TOKENS),
        model_max_length=sizes["max_position_embeddings"],
        chat_template=tiny_tokenizer.CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    geometry = {"patch_size": PATCH, "temporal_patch_size": TEMPORAL, "merge_size": MERGE}
    limits = {"shortest_edge": sizes["min_pixels"], "longest_edge": sizes["max_pixels"]}
    half = [0.5, 0.5, 0.5]
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessorPil(size=limits, image_mean=half, image_std=half, **geometry),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(size=limits, image_mean=half, image_std=half, **geometry),
        chat_template=tiny_tokenizer.CHAT_TEMPLATE,
    )


def _config(sizes: dict[str, Any], tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedConfig:
    qwen3_5 = sizes["architecture"] == "qwen3_5"
    rotary = sizes["head_dim"] // (4 if qwen3_5 else 2)  # pairs of dimensions; half of them are rotated in Qwen3.5
    side = rotary * 5 // 16  # the share of height and of width in the rotary dimensions, as in Qwen3-VL
    ids = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("image_pad", "video_pad", "vision_start", "vision_end")
    }
    text = {
        "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["intermediate"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "max_position_embeddings": sizes["max_position_embeddings"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [rotary - 2 * side, side, side],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": sizes["tie"],
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": sizes["dtype"],
    }  # fmt: skip
    if sizes["experts"]:
        text |= {
            "num_experts": sizes["experts"],
            "num_experts_per_tok": sizes["experts_per_token"],
            "moe_intermediate_size": sizes["expert_intermediate"],
        }
    if qwen3_5:
        text["partial_rotary_factor"] = text["rope_parameters"]["partial_rotary_factor"] = 0.5
        text |= {
            "full_attention_interval": sizes["full_attention_interval"],
            "linear_num_key_heads": sizes["linear_key_heads"],
            "linear_num_value_heads": sizes["linear_value_heads"],
            "linear_key_head_dim": LINEAR_HEAD_DIM,
            "linear_value_head_dim": LINEAR_HEAD_DIM,
        }
        if sizes["experts"]:
            del text["intermediate_size"]
            text["shared_expert_intermediate_size"] = sizes["expert_intermediate"]
    elif sizes["experts"]:
        text |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return _transformers_class(sizes, "Config")(
        text_config=text,
        vision_config=_vision_config(sizes),
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=sizes["tie"],
        dtype=sizes["dtype"],
    )


def _vision_config(sizes: dict[str, Any]) -> dict[str, Any]:
    vision = {
        "depth": sizes["vision_layers"],
        "hidden_size": sizes["vision_hidden"],
        "intermediate_size": sizes["vision_intermediate"],
        "num_heads": sizes["vision_heads"],
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "out_hidden_size": sizes["hidden"],
        "num_position_embeddings": sizes["vision_grid"] ** 2,
        "dtype": sizes["dtype"],
    }
    if sizes["architecture"] == "qwen3_vl":
        vision["deepstack_visual_indexes"] = list(sizes["deepstack"])
    return vision


def _transformers_class(sizes: dict[str, Any], suffix: str) -> Any:
    name = {"qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}[sizes["architecture"]]
    return getattr(transformers, f"{name}{'Moe' if sizes['experts'] else ''}{suffix}")


def _model(config: transformers.PreTrainedConfig, sizes: dict[str, Any]) -> torch.nn.Module:
    kind = _transformers_class(sizes, "ForConditionalGeneration")
    config.architectures = [kind.__name__]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes["seed"])
        model = kind(config)
        # Without positions that mean something from the start, a tiny model learns to ignore the image.
        table = position_table(sizes["vision_grid"], sizes["vision_hidden"])
        model.model.visual.pos_embed.weight.data.copy_(table)
    return model.to(getattr(torch, sizes["dtype"]))


def position_table(side: int, width: int) -> torch.Tensor:
    """Sine-cosine embeddings of a side x side grid, rows first: float32 [side * side, width].

    A quarter of the width each for sine and cosine of y and of x. The grid is stretched over every image, so
    the wavelengths are shares of the image: from twice its side down to four cells of the grid.
    """
    bands = width // 4
    place = torch.linspace(0, 1, side)
    frequency = 2 * math.pi * torch.logspace(math.log2(0.5), math.log2(max(side / 4, 1.0)), bands, base=2.0)
    angle = place[:, None] * frequency  # [side, bands]
    axis = torch.cat([angle.sin(), angle.cos()], dim=1)  # [side, 2 * bands]
    table = torch.zeros(side, side, width)
    table[..., : 2 * bands] = axis[:, None]
    table[..., 2 * bands : 4 * bands] = axis[None]
    return table.reshape(side * side, width)


def _save_weights(folder: Path, model: torch.nn.Module, config: transformers.PreTrainedConfig) -> None:
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        # transformers computes with [experts, out, in]; released Qwen3-VL checkpoints hold [experts, in, out].
        expert = name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
        transposed = expert and config.model_type == "qwen3_vl_moe"
        tensors[name] = (tensor.transpose(1, 2) if transposed else tensor).contiguous()
    file = folder / "model.safetensors"
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # written for its owner alone otherwise


def main(arguments: list[str] | None = None) -> int:
    """The command line: the folder and every argument of make_tiny_model as an option."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where the model goes")
    for name, parameter in inspect.signature(make_tiny_model).parameters.items():
        option, default = "--" + name.replace("_", "-"), parameter.default
        if name == "folder":
            continue
        if name == "deepstack":
            parser.add_argument(
                option, type=int, nargs="*", default=default, help="vision layers fed to the text layers (default: 0)"
            )
        elif isinstance(default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
        elif name in CHOICES:
            parser.add_argument(option, choices=CHOICES[name], default=default, help=f"(default: {default})")
        else:
            parser.add_argument(option, type=type(default), default=default, help=f"(default: {default})")
    options = vars(parser.parse_args(arguments))
    options["deepstack"] = tuple(options["deepstack"])
    try:
        folder = make_tiny_model(**options)
    except (ValueError, FileExistsError) as error:
        print(f"make_tiny_model: {error}", file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
