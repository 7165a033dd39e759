"""Hugging Face folders for the conversion tests: all expert formats, and damaged ones."""

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

MODELS = {
    "dense": tiny.Shape(deepstack=(0, 1)),
    "tied": tiny.Shape(tie=True),
    "moe": tiny.Shape(experts=4, dense_layers=(1,)),
}
Tensors = dict[str, Tensor]


def write_models(folder: Path) -> None:
    """Write one folder per model, with a non-weight file. transformers writes the transposed expert format."""
    for seed, (name, shape) in enumerate(MODELS.items()):
        tiny.write_model(folder / name, shape, seed=seed)
        (folder / name / "tokenizer.json").write_text('{"some": "tokenizer"}')


def read(folder: Path) -> Tensors:
    """All tensors of a folder, through its index if there is one."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    return {name: tensor for file in sorted(files) for name, tensor in load_file(folder / file).items()}


def released(tensors: Tensors) -> Tensors:
    """transformers' tensors with experts in the released format."""
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
    """Copy a folder with the tensors that `change` returns or modifies in place."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def same(found: Tensors, expected: Tensors) -> bool:
    """Whether names, dtypes and every bit are equal."""
    bits = {2: torch.int16, 4: torch.int32}
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(found[name].view(bits[tensor.itemsize]), tensor.view(bits[tensor.itemsize]))
        for name, tensor in expected.items()
    )
