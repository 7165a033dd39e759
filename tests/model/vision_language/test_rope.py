"""Positions and angles of m-RoPE equal those of transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLTextRotaryEmbedding

from megatron_webrl.model.vision_language.rope import InterleavedRotaryEmbedding, mrope_position_ids
from tests.model import tiny

with torch.device("meta"):
    MODEL = Qwen3VLModel(tiny.configuration(tiny.Shape()))

GRIDS = st.lists(st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 6)), max_size=5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(sides=GRIDS, text=st.integers(0, 5), response=st.integers(1, 5))
def test_positions_equal_those_of_transformers(sides: list[tuple[int, int, int]], text: int, response: int) -> None:
    grids = [[t, h * tiny.MERGE, w * tiny.MERGE] for t, h, w in sides]
    sample = tiny.make_sample(grids, text=text, response=response, seed=0)
    types = (sample.tokens == tiny.IMAGE).int()[None]
    expected, _ = MODEL.get_rope_index(sample.tokens[None], types, image_grid_thw=sample.grids)
    assert torch.equal(mrope_position_ids(sample.tokens, sample.grids, tiny.IMAGE, tiny.MERGE), expected[:, 0])


def test_angles_equal_those_of_transformers() -> None:
    text = tiny.configuration(tiny.Shape()).text_config
    positions = torch.randint(0, 400, (3, 2, 50), generator=torch.Generator().manual_seed(0))
    cosines, sines = Qwen3VLTextRotaryEmbedding(text)(torch.zeros(1), positions)
    angles = InterleavedRotaryEmbedding(text.head_dim, 10000.0)(positions, [6, 5, 5])
    assert angles.shape == (50, 2, 1, 32)
    torch.testing.assert_close(angles.cos()[:, :, 0].transpose(0, 1), cosines, atol=1e-6, rtol=0)
    torch.testing.assert_close(angles.sin()[:, :, 0].transpose(0, 1), sines, atol=1e-6, rtol=0)


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
