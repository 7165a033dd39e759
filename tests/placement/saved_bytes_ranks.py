"""One gloo process that counts the bytes that layers of Qwen3-VL and Qwen3.5 save for the backward pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests import gloo
from tests.model import tiny
from tests.model.qwen3_5 import small

KINDS = {
    "dense": tiny.Shape(deepstack=()),
    "experts": tiny.Shape(deepstack=(), experts=4),
    "linear": small.Shape(layers=(small.LINEAR,)),
    "full": small.Shape(layers=(small.FULL,)),
    "sparse": small.Shape(layers=(small.LINEAR,), experts=4),
}
RECOMPUTE = ("none", "selective")
TOKENS = 1024  # in samples of four chunks


def configuration(kind: str, layers: int) -> Any:
    """The transformers configuration of a model with `layers` equal layers of a kind."""
    shape = KINDS[kind]
    if not shape.is_linear:
        return tiny.configuration(replace(shape, layers=layers))
    made = small.configuration(small.Shape(layers=shape.layers * layers, value_heads=8, experts=shape.experts))
    text = made.text_config
    text.linear_key_head_dim, text.linear_value_head_dim = 48, 64
    return made


def run(rank: int, folder: str) -> None:
    """Write the bytes of a layer for each token, by kind and recomputation, to saved.json."""
    platform = gloo.join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    process_groups.init_process_groups(ParallelSizes())
    found = {}
    for kind in KINDS:
        for layers in (1, 2):
            configuration(kind, layers).save_pretrained(Path(folder, f"{kind}-{layers}"))
        for recompute in RECOMPUTE:
            one, two = (_saved(Path(folder, f"{kind}-{layers}"), recompute, platform) for layers in (1, 2))
            found[f"{kind} {recompute}"] = (two - one) / TOKENS
    Path(folder, "saved.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _saved(folder: Path, recompute: Any, platform: Any) -> int:
    from megatron_webrl.model.build import build_model
    from megatron_webrl.model.compute_options import ComputeOptions

    [model] = build_model(folder, dtype="bfloat16", platform=platform, options=ComputeOptions(recompute=recompute))
    for parameter in model.train().parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # one of each storage, which keeps its address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in weights:
            kept[address] = tensor
        return tensor

    row, _ = tiny.pack([tiny.make_sample([], text=252, response=4, seed=1)] * (TOKENS // 256))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(row)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
