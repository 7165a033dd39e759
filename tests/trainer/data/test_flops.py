"""Estimated FLOPs of a sequence against counts by hand and by PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.trainer.data.prefix_merging import MergedSequence, unmerged_sequence
from megatron_webrl.util import torchvision_shim
from tests.model import tiny
from tests.model.qwen3_5 import small
from tests.trainer.growing_prompts import random_tokens, step

torchvision_shim.install()

from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration  # noqa: E402

DENSE = tiny.configuration(tiny.Shape(deepstack=(0, 1)))
GRIDS = ([], [[1, 4, 6]], [[1, 8, 4], [1, 2, 2], [1, 4, 12]])


def chain(prompt: int, response: int, grids: tuple[tuple[int, int, int], ...] = ()) -> MergedSequence:
    images = tuple(str(grid).encode() for grid in grids)
    array = np.array(grids, np.int32).reshape(-1, 3)
    return unmerged_sequence(step(random_tokens(0, prompt), random_tokens(1, response), images=images, grids=array))


def reference(shape: tiny.Shape) -> Any:
    kind: Any = Qwen3VLMoeForConditionalGeneration if shape.experts else Qwen3VLForConditionalGeneration
    return kind._from_config(tiny.configuration(shape), attn_implementation="eager", experts_implementation="eager")


def counted(model: Any, sample: tiny.Sample) -> int:
    """Operations of transformers' forward pass on one sample, counted by PyTorch, attention not causal."""
    model.eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        tiny.reference_logits(model, sample)
    return int(counter.get_total_flops())


def test_a_models_cost_matches_pytorchs_count() -> None:
    sparse = tiny.Shape(experts=8, dense_layers=(1,))
    for shape, grids in (*((tiny.Shape(deepstack=(0, 1)), grids) for grids in GRIDS), (sparse, [])):
        cost = FlopsEstimator.from_hf_config(tiny.configuration(shape))
        sample = tiny.make_sample(grids, text=30, response=11, seed=0)
        length, prompt = len(sample.tokens), sample.prompt
        found = cost.packed_flops(chain(prompt, length - prompt, tuple(map(tuple, grids))))
        # transformers makes logits for every token, and PyTorch counts all pairs of tokens.
        found += prompt * cost.per_scored_token + length * (length - 1) / 2 * cost.per_token_pair
        assert found == pytest.approx(counted(reference(shape), sample), rel=0.02), (shape, grids)


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_the_cost_of_linear_attention_matches_pytorchs_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as sparse

    config = small.configuration(small.MODELS[name])
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for module in (dense, sparse):  # token by token the rule has no products, which is all that PyTorch counts
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)
    sample = tiny.make_sample([[1, 4, 6]], text=30, response=11, seed=0)
    cost, length = FlopsEstimator.from_hf_config(config), len(sample.tokens)
    found = cost.packed_flops(chain(sample.prompt, length - sample.prompt, ((1, 4, 6),)))
    found += sample.prompt * cost.per_scored_token + length * (length - 1) / 2 * cost.per_token_pair
    rule = 3 * 6 * 4 * 12 * 20  # in three layers: three products of four heads with their states
    assert found - length * rule == pytest.approx(counted(model, sample), rel=0.02)


def test_an_image_shared_by_packed_sequences_is_counted_once() -> None:
    cost = FlopsEstimator.from_hf_config(DENSE)
    one, both = chain(40, 4, ((1, 4, 6),)), chain(60, 4, ((1, 4, 6), (1, 8, 8)))
    assert cost.packed_flops(one, both) == cost.packed_flops(one) + cost.packed_flops(both) - cost.image_flops(
        (1, 4, 6)
    )
    assert cost.image_flops((2, 4, 6)) == 2 * cost.image_flops((1, 4, 6))
    assert cost.image_flops((1, 8, 12)) > 4 * cost.image_flops((1, 4, 6))
    frozen = FlopsEstimator.from_hf_config(DENSE, train_vision=False)  # its forward pass alone
    assert frozen.image_flops((1, 4, 6)) == pytest.approx(cost.image_flops((1, 4, 6)) / 3)
    assert frozen.per_token == cost.per_token
