"""Positions and angles of m-RoPE equal those of transformers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, apply_rotary_pos_emb

from megatron_webrl.model.vision_language.rope import InterleavedRotaryEmbedding, make_rotation, mrope_position_ids
from tests.model import tiny

with torch.device("meta"):
    MODEL = Qwen3VLModel(tiny.configuration(tiny.Shape()))

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # of the norm; bfloat16 has 8 bits
GRIDS = st.lists(st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 6)), max_size=5)


@settings(max_examples=50, derandomize=True)
@given(sides=GRIDS, text=st.integers(0, 5), response=st.integers(1, 5))
def test_positions_equal_those_of_transformers(sides: list[tuple[int, int, int]], text: int, response: int) -> None:
    grids = [[t, h * tiny.MERGE, w * tiny.MERGE] for t, h, w in sides]
    sample = tiny.make_sample(grids, text=text, response=response, seed=0)
    types = (sample.tokens == tiny.IMAGE).int()[None]
    expected, _ = MODEL.get_rope_index(sample.tokens[None], types, image_grid_thw=sample.grids)
    assert torch.equal(mrope_position_ids(sample.tokens, sample.grids, tiny.IMAGE, tiny.MERGE), expected[:, 0])


def test_a_placeholder_in_a_response_has_the_position_of_a_text_token() -> None:
    prompt = [1, 2, *[tiny.IMAGE] * 4, 3]
    text, mixed = (torch.tensor([*prompt, 5, token, 6]) for token in (7, tiny.IMAGE))
    grids = torch.tensor([[1, 4, 4]])
    expected = mrope_position_ids(text, grids, tiny.IMAGE, tiny.MERGE)
    assert torch.equal(mrope_position_ids(mixed, grids, tiny.IMAGE, tiny.MERGE, prompt_length=len(prompt)), expected)


@pytest.mark.parametrize(
    ("placeholders", "grids", "message"),
    [
        (5, [[1, 4, 4]], "1 placeholders .* are left after 1 images"),
        (3, [[1, 4, 4]], "image 0 with grid .* needs 4 placeholders .* the sample has 3 of them for 1 images"),
        (4, [[1, 4, 4], [1, 2, 2]], "image 1 .* needs 1 placeholders"),
        (4, [], "4 placeholders .* are left after 0 images"),
    ],
)
def test_placeholders_that_do_not_match_the_images_are_refused(
    placeholders: int, grids: list[list[int]], message: str
) -> None:
    tokens = torch.tensor([1, 2, *[tiny.IMAGE] * placeholders, 3])
    with pytest.raises(ValueError, match=message):
        mrope_position_ids(tokens, torch.tensor(grids, dtype=torch.int64).reshape(-1, 3), tiny.IMAGE, tiny.MERGE)


@pytest.mark.parametrize("rotated", [32, 16], ids=["whole heads", "half of each head"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rotated_heads_and_their_gradients_are_those_of_transformers(dtype: torch.dtype, rotated: int) -> None:
    generator = torch.Generator().manual_seed(0)
    angles = InterleavedRotaryEmbedding(rotated, 10000.0)(
        torch.randint(0, 400, (3, 1, 50), generator=generator), [3, 3, 2]
    )
    heads, gradient = (torch.randn(50, 1, 4, 32, generator=generator).to(dtype) for _ in range(2))
    results = []
    for apply in (make_rotation(angles, dtype, fused=False), partial(_by_transformers, angles=angles)):
        leaf = heads.clone().requires_grad_()
        output = apply(leaf)
        output.backward(gradient.transpose(0, 2).contiguous().transpose(0, 2))  # in another order in memory
        results.append((output.detach(), leaf.grad))
    for found, wanted in zip(*results, strict=True):
        assert found.dtype is dtype
        assert (found - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()


def _by_transformers(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    width = angles.shape[-1]
    turned, rest = heads[..., :width].transpose(0, 1), heads[..., width:]
    cosines, sines = (x.to(heads.dtype)[:, 0, 0][None] for x in (angles.cos(), angles.sin()))
    rotated, _ = apply_rotary_pos_emb(turned, turned, cosines, sines, unsqueeze_dim=2)
    return torch.cat([rotated.transpose(0, 1), rest], dim=-1)


def test_angles_of_one_sequence_are_what_transformer_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel reads float32 [T, 1, 1, dim] as it lies in memory; here Megatron's own operations stand in for it."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    def kernel(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        assert freqs.is_contiguous()
        assert (freqs.dtype, freqs.shape) == (torch.float32, (t.shape[0], 1, 1, 32))
        return _apply_rotary_pos_emb_bshd(t, freqs)

    monkeypatch.setattr(transformer_engine, "fused_apply_rotary_pos_emb", kernel, raising=False)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 400, (3, 100), generator=generator)[:, None, 50:]  # of a context-parallel rank
    angles = InterleavedRotaryEmbedding(32, 10000.0)(positions, [6, 5, 5])
    heads = torch.randn(50, 1, 4, 48, generator=generator)
    fused, plain = (make_rotation(angles, torch.float32, fused)(heads) for fused in (True, False))
    torch.testing.assert_close(fused, plain)
