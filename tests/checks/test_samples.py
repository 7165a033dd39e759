"""Built-in samples and samples of a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_webrl.checks.samples import built_in_samples, read_samples
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.processor import Processor

QUESTION = {"role": "user", "content": "What stands there?"}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize("window", [512, 3000])
def test_the_long_built_in_sample_fills_the_window_and_the_others_fit(processor: Processor, window: int):
    samples = {sample.name: sample for sample in built_in_samples(processor, window, max_new_tokens=16)}
    assert [len(s.images) for s in samples.values()][:3] == [0, 1, 3]
    assert len({tuple(grid) for grid in samples["three images"].image_grids.tolist()}) == 3
    assert window - 16 - 32 <= len(samples["long"].prompt_token_ids) <= window - 16
    assert len(samples["long"].images) >= window // 300
    assert all(len(s.prompt_token_ids) + 16 <= window for s in samples.values())
    for sample in samples.values():
        assert np.array_equal(
            processor.expand_image_tokens(sample.token_ids, sample.image_grids), sample.prompt_token_ids
        )
        assert np.array_equal(processor.grids(sample.images), sample.image_grids)


def test_built_in_samples_are_the_same_every_time(processor: Processor):
    one, other = (built_in_samples(processor, 600, max_new_tokens=8) for _ in range(2))
    assert all(
        np.array_equal(a.prompt_token_ids, b.prompt_token_ids) and a.images == b.images
        for a, b in zip(one, other, strict=True)
    )


def test_a_window_that_is_too_small_is_refused(processor: Processor):
    with pytest.raises(ConfigError, match="--max-model-len"):
        built_in_samples(processor, 40, max_new_tokens=16)


def test_a_file_gives_messages_images_in_order_and_the_response(
    processor: Processor, samples_file: Callable[..., Path], tmp_path: Path
):
    shown = user(
        {"type": "image", "path": "page.png"}, {"type": "text", "text": "and"}, {"type": "image", "image": "wide.png"}
    )
    path = samples_file({"messages": [shown], "response": "Two pages."}, "", {"messages": [QUESTION]})
    first, second = read_samples(path, processor, max_model_len=600, max_new_tokens=8)
    assert (first.name, second.name) == ("line 1", "line 3")
    assert first.images == ((tmp_path / "page.png").read_bytes(), (tmp_path / "wide.png").read_bytes())
    assert processor.decode(first.response_token_ids) == "Two pages."
    assert first.response_token_ids[-1] == processor.eos_token_id
    assert (
        (first.prompt_token_ids == processor.image_token_id).sum()
        == processor.image_token_counts(first.prompt_token_ids).sum()
        > 0
    )
    assert second.images == ()
    assert len(second.response_token_ids) == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected"),
        ({"messages": []}, "at least one message"),
        ({"messages": [QUESTION], "answer": "x"}, "unknown field 'answer'"),
        ({"messages": [QUESTION], "response": 3}, "response is int"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is int"),
        ({"messages": [user({"type": "video", "path": "x.mp4"})]}, "neither"),
        ({"messages": [user({"type": "image"})]}, "neither"),
        ({"messages": [user({"type": "image", "path": "lost.png"})]}, "lost.png cannot be read"),
        ({"messages": [user({"type": "image", "path": "samples.jsonl"})]}, "are no PNG, JPEG or WebP"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}]}, "1 image placeholders and 0 images"),
        ({"messages": [QUESTION], "response": "<|image_pad|>"}, "placeholder"),
        ({"messages": [{"role": "user", "content": "word " * 900}]}, "exceed --max-model-len"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line(
    processor: Processor, samples_file: Callable[..., Path], line: Any, says: str
):
    path = samples_file({"messages": [QUESTION]}, line)
    with pytest.raises(ConfigError, match=f"samples.jsonl line 2.*{says}") as caught:
        read_samples(path, processor, max_model_len=600, max_new_tokens=8)
    assert "\n" not in str(caught.value)


def test_an_empty_or_missing_file_is_refused(processor: Processor, samples_file: Callable[..., Path], tmp_path: Path):
    with pytest.raises(ConfigError, match="contains no sample"):
        read_samples(samples_file(""), processor, max_model_len=600, max_new_tokens=8)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_samples(tmp_path / "none.jsonl", processor, max_model_len=600, max_new_tokens=8)
