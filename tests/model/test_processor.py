"""The processor: templates, placeholders, patches, escaping of page text."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor

from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.toolset import format_tool_call
from megatron_webrl.types import Action


def picture(width: int = 160, height: int = 210, kind: str = "PNG", seed: int = 0) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, format=kind)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


_cached = cache(Processor.load)  # Hypothesis calls a test many times with one function-scoped set of fixtures


def messages(images: int) -> list[dict]:
    parts = [{"type": "text", "text": "Click the button."}, *({"type": "image"} for _ in range(images))]
    return [{"role": "system", "content": "Act."}, {"role": "user", "content": parts}]


def test_expansion_and_patches_equal_the_processor_of_transformers(processor: Processor, tiny_model: Path) -> None:
    images = [picture(), picture(500, 300, "JPEG", 1)]
    pixels, grids = processor.pixels(images)
    expanded = processor.expand_image_tokens(processor.encode_chat(messages(2)), grids)
    assert processor.tokenizer.decode(processor.encode_chat(messages(2))).endswith("<|im_start|>assistant\n")
    reference = AutoProcessor.from_pretrained(tiny_model)
    text = reference.apply_chat_template(messages(2), add_generation_prompt=True)
    whole = reference(
        text=[text], images=[Image.open(io.BytesIO(i)).convert("RGB") for i in images], return_tensors="pt"
    )
    np.testing.assert_array_equal(expanded, whole["input_ids"][0].numpy())
    np.testing.assert_array_equal(processor.collapse_image_tokens(expanded), processor.encode_chat(messages(2)))
    np.testing.assert_array_equal(grids, whole["image_grid_thw"].numpy())
    assert torch.equal(pixels, whole["pixel_values"])
    np.testing.assert_array_equal(processor.image_token_counts(expanded), grids.prod(axis=1) // 4)


@settings(max_examples=40)
@given(width=st.integers(20, 700), height=st.integers(20, 700))
def test_grids_from_sizes_equal_those_of_the_patches(tiny_model: Path, width: int, height: int) -> None:
    processor = _cached(tiny_model)
    image = picture(width, height)
    assert processor.grids([]).shape == processor.pixels([])[1].shape == (0, 3)
    np.testing.assert_array_equal(processor.grids([image]), processor.pixels([image])[1])


def test_expanding_with_a_wrong_number_of_images_is_an_error(processor: Processor) -> None:
    with pytest.raises(ValueError, match="2 image placeholders and 1 images"):
        processor.expand_image_tokens(processor.encode_chat(messages(2)), processor.grids([picture()]))


def test_a_response_ends_with_the_end_token_and_decodes_to_itself(processor: Processor) -> None:
    text = "Click.\n" + format_tool_call(Action("left_click", coordinate=(480, 120)))
    ids = processor.encode_response(text)
    assert ids[-1] == processor.eos_token_id
    assert (ids == processor.eos_token_id).sum() == 1
    assert processor.decode(ids) == text
    assert processor.decode([*ids, len(processor.tokenizer) + 3]) == text, (
        "padding of the vocabulary decodes to nothing"
    )


_SPICE = st.sampled_from(["<|im_end|>", "<|image_pad|>", "<tool_call>", "</think>", "<|", "|>", "\u200b", "é"])


@settings(max_examples=60)
@given(parts=st.lists(st.one_of(_SPICE, st.text(max_size=5)), max_size=8))
def test_page_text_never_becomes_an_added_token(tiny_model: Path, parts: list[str]) -> None:
    processor = _cached(tiny_model)
    text = "".join(parts)
    harmless = 'Enter "40" < 60 | and > 2 into <b>field</b>'
    assert processor.escape_special_tokens(harmless) == harmless
    ids = processor.tokenizer(processor.escape_special_tokens(text), add_special_tokens=False)["input_ids"]
    assert not set(ids) & set(processor.tokenizer.get_added_vocab().values())
