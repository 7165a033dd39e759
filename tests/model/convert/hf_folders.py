"""Hugging Face folders for the conversion tests: all formats of experts, and a layer for multi-token prediction."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_webrl.model.parameter_map import ExpertFormat
from tests.model import tiny
from tests.model.qwen3_5 import small

MODELS = {
    "dense": tiny.Shape(deepstack=(0, 1)),
    "tied": tiny.Shape(tie=True),
    "moe": tiny.Shape(experts=4, dense_layers=(1,)),
    "hybrid": small.MODELS["dense-tied"],
    "hybrid moe": small.MODELS["sparse"],
}
Tensors = dict[str, Tensor]


def write_models(folder: Path) -> None:
    """Write one folder per model, with a non-weight file. transformers writes the transposed expert format.

    The folders of Qwen3.5 have the layer for multi-token prediction of released ones, which no parameter holds.
    """
    for seed, (name, shape) in enumerate(MODELS.items()):
        tiny.write_model(folder / name, shape, seed=seed)
        (folder / name / "tokenizer.json").write_text('{"some": "tokenizer"}')
        if shape.is_linear:
            tensors = load_file(folder / name / "model.safetensors") | mtp_tensors(shape, seed)
            save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})


def converted(folder: Path, name: str) -> Tensors:
    tensors = read(folder / name)
    return tensors if MODELS[name].is_linear else released(tensors)


def weights(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}


def read(folder: Path) -> Tensors:
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    return {name: tensor for file in sorted(files) for name, tensor in load_file(folder / file).items()}


def released(tensors: Tensors) -> Tensors:
    fused = ("experts.gate_up_proj", "experts.down_proj")
    return {name: t.transpose(1, 2).contiguous() if name.endswith(fused) else t for name, t in tensors.items()}


def separate(tensors: Tensors) -> Tensors:
    """transformers' tensors with separate gate, up and down projections per expert."""
    found = {}
    for name, tensor in tensors.items():
        stem = name.rpartition(".")[0]
        for expert in range(len(tensor)):
            if name.endswith("experts.gate_up_proj"):
                gate, up = tensor[expert].chunk(2)
                found[f"{stem}.{expert}.gate_proj.weight"] = gate.contiguous()
                found[f"{stem}.{expert}.up_proj.weight"] = up.contiguous()
            elif name.endswith("experts.down_proj"):
                found[f"{stem}.{expert}.down_proj.weight"] = tensor[expert].contiguous()
            else:
                found[name] = tensor
    return found


FORMS: dict[ExpertFormat, Callable[[Tensors], Tensors]] = {
    "released": released,
    "transposed": lambda tensors: tensors,
    "separate": separate,
}


def rewritten(source: Path, target: Path, change: Callable[[Tensors], Tensors | None]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def same(found: Tensors, expected: Tensors) -> bool:
    bits = {2: torch.int16, 4: torch.int32}
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(found[name].view(bits[tensor.itemsize]), tensor.view(bits[tensor.itemsize]))
        for name, tensor in expected.items()
    )


def mtp_tensors(shape: tiny.Shape, seed: int) -> dict[str, torch.Tensor]:
    """Some tensors of the layer for multi-token prediction, named as in released folders."""
    hidden = tiny.configuration(shape).text_config.hidden_size
    part = "mlp.experts.1." if shape.experts else "mlp."
    shapes = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        f"mtp.layers.0.{part}up_proj.weight": (24, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator).bfloat16() for name, size in shapes.items()}
