"""Built-in samples and samples of a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_webrl.checks.model import built_in_samples, read_samples
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.processor import Processor

QUESTION = {"role": "user", "content": "What stands there?"}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_built_in_samples_have_images_a_common_prompt_and_a_long_one(processor: Processor) -> None:
    samples = built_in_samples(processor, 3000)
    assert [len(sample.images) for sample in samples][:4] == [0, 1, 1, 3]
    assert [sample.trajectory_id[0] for sample in samples] == [1, 2, 3, 4, 5]
    assert np.array_equal(samples[1].prompt, samples[2].prompt)
    assert len(samples[1].prompt) > 64  # from which on the trainer computes a prefix once
    assert not np.array_equal(samples[1].response, samples[2].response)
    assert 2700 < samples[4].length <= 3000
    assert all(np.array_equal(processor.grids(sample.images), sample.grids) for sample in samples)
    with pytest.raises(ConfigError, match="--max-model-len"):
        built_in_samples(processor, 40)


def test_a_file_gives_messages_images_and_response(
    processor: Processor, samples_file: Callable[..., Path], tmp_path: Path
) -> None:
    shown = user(
        {"type": "image", "path": "page.png"}, {"type": "text", "text": "and"}, {"type": "image", "path": "wide.png"}
    )
    path = samples_file(
        {"messages": [shown], "response": "Two pages."}, "", {"messages": [QUESTION], "response": "No."}
    )
    first, second = read_samples(path, processor, 600)
    assert (first.trajectory_id[0], second.trajectory_id[0]) == (1, 3)
    assert first.images == ((tmp_path / "page.png").read_bytes(), (tmp_path / "wide.png").read_bytes())
    assert processor.decode(first.response) == "Two pages."
    assert first.response[-1] == processor.eos_token_id
    assert processor.image_token_counts(first.prompt).sum() == (first.prompt == processor.image_token_id).sum() > 0
    assert second.images == ()


def test_a_bad_line_is_refused_by_place(processor: Processor, samples_file: Callable[..., Path]) -> None:
    for line, says in (
        ("{", "Expecting property name"),
        ({"messages": [QUESTION]}, "response"),
        ({"messages": [QUESTION], "response": 3}, "must be of type"),
        ({"messages": [user({"type": "video", "path": "x.mp4"})], "response": "x"}, "video"),
        ({"messages": [user({"type": "image", "path": "lost.png"})], "response": "x"}, "lost.png"),
        ({"messages": [user({"type": "image", "path": "samples.jsonl"})], "response": "x"}, "are no PNG, JPEG or WebP"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}], "response": "x"}, "1 image placeholders and 0"),
        ({"messages": [QUESTION], "response": "<|image_pad|>"}, "placeholder"),
        ({"messages": [{"role": "user", "content": "word " * 900}], "response": "x"}, "exceed --max-model-len"),
    ):
        path = samples_file({"messages": [QUESTION], "response": "x"}, line)
        with pytest.raises(ConfigError, match=f"samples.jsonl line 2.*{says}") as caught:
            read_samples(path, processor, 600)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="contains no sample"):
        read_samples(samples_file(""), processor, 600)
