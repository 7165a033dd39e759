"""Attention of the vision tower against transformers' own, by values, gradients and calls."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from transformers import vision_utils
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from megatron_webrl.model.vision_language import vision as module
from megatron_webrl.model.vision_language.vision import build_vision_tower
from tests.model import tiny as oracles
from tests.model.vision_language.compiler import counted_compiler

TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 2**-6}  # of the norm; in bfloat16 sums of gradients are rounded
CPU = torch.device("cpu")
CONFIGS = {
    "Qwen3-VL": (Qwen3VLVisionModel, oracles.configuration(oracles.Shape()).vision_config),
    "Qwen3.5": (Qwen3_5VisionModel, oracles.configuration(oracles.Shape(layers=oracles.QWEN3_5_LAYERS)).vision_config),
}
GRIDS = {"equal": [[1, 4, 6], [1, 6, 4], [1, 4, 6]], "different": [[1, 4, 6], [1, 4, 6], [1, 2, 4], [1, 4, 6]]}


@pytest.mark.parametrize(
    ("model", "sizes", "dtype", "faster"),
    [
        ("Qwen3-VL", "different", torch.float64, ""),
        ("Qwen3.5", "equal", torch.float64, "plain"),
        ("Qwen3-VL", "equal", torch.bfloat16, "plain"),
        pytest.param("Qwen3-VL", "different", torch.bfloat16, "compiled", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_transformers(
    model: str, sizes: str, dtype: torch.dtype, faster: str
) -> None:
    kind, config = CONFIGS[model]
    torch.manual_seed(0)
    theirs = kind._from_config(config, dtype=dtype, attn_implementation="sdpa")
    ours = build_vision_tower(config, dtype, CPU, bool(faster))
    ours.load_state_dict(theirs.state_dict())
    grids = torch.tensor(GRIDS[sizes])
    width = 3 * config.temporal_patch_size * config.patch_size**2
    pixels = torch.randn(int(grids.prod(dim=1).sum()), width, generator=torch.Generator().manual_seed(0)).to(dtype)
    outputs = []
    for tower in (ours, theirs):
        with counted_compiler(module, *([module.rotated, module.rotated_back] if faster == "plain" else [])):
            lengths = vision_utils.get_vision_cu_seqlens(grids)
            output = tower(pixels, grid_thw=grids, cu_seqlens=lengths, return_dict=True)
            output.pooler_output.float().square().sum().backward()
        outputs.append([output.pooler_output, *(p.grad for p in tower.parameters() if p.grad is not None)])
    assert len(outputs[0]) == len(outputs[1]) > 20
    for found, wanted in zip(*outputs, strict=True):
        assert (found - wanted).norm() <= TOLERANCE[dtype] * max(wanted.norm(), 1e-3)


def test_neighbouring_images_of_equal_size_take_one_call() -> None:
    config = CONFIGS["Qwen3-VL"][1]
    tower = build_vision_tower(config, torch.float32, CPU)
    for sizes, calls in (("equal", 1), ("different", 3)):
        grids = torch.tensor(GRIDS[sizes])
        pixels = torch.zeros(int(grids.prod(dim=1).sum()), 3 * config.temporal_patch_size * config.patch_size**2)
        with mock.patch.object(
            module, "scaled_dot_product_attention", side_effect=module.scaled_dot_product_attention
        ) as attention:
            tower(pixels, grid_thw=grids, return_dict=True)
        assert attention.call_count == calls * config.depth


@pytest.mark.slow
def test_any_number_of_patches_takes_the_same_compiled_code() -> None:
    with counted_compiler(module) as compiler:
        before = 0
        for patches in (8, 4, 300, 16, 8):
            qkv, angles = torch.ones(patches, 3, 2, 24, requires_grad=True), torch.ones(patches, 24)
            sum(x.sum() for x in module.rotate(qkv, angles, angles, True)).backward()  # type: ignore[union-attr]
            before = before or compiler.frame_count
        assert compiler.frame_count == before
