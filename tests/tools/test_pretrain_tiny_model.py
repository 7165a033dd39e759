"""Pretraining of the tiny model on demonstrations."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.record import RecordFileWriter, encode_trajectory
from megatron_webrl.types import Action, Step
from tests.trajectories import trajectory
from tools import pretrain_tiny_model as pretraining

PLACES = ((200, 300), (700, 800))
WIDTH, HEIGHT = 96, 128


def demonstrations(path: Path, processor: Processor, episodes: int = 2) -> Path:
    """Steps that click at a black square, which lies at one of two places; an episode each, or one of both."""
    steps, images = list[Step](), list[bytes]()
    with RecordFileWriter(path) as file:
        for number, (x, y) in enumerate(PLACES):
            image = Image.new("RGB", (WIDTH, HEIGHT), "white")
            left, top = x * WIDTH // 1000 - 5, y * HEIGHT // 1000 - 5
            image.paste("black", (left, top, left + 10, top + 10))
            held = io.BytesIO()
            image.save(held, "PNG")
            grids = processor.grids([held.getvalue()])
            content = [{"type": "text", "text": "Click. " * (1 + 9 * number)}, {"type": "image"}]
            asked = processor.encode_chat([{"role": "user", "content": content}])
            response = processor.encode_response(f'{{"coordinate": [{x}, {y}]}}')
            step = Step(
                prompt_token_ids=processor.expand_image_tokens(asked, grids), response_token_ids=response,
                logprobs=np.zeros(len(response), np.float32), versions=np.zeros(len(response), np.int32),
                images=np.array([number if episodes == 1 else 0], np.int32), image_grids=grids, finish_reason="stop",
                action=Action("left_click", coordinate=(x, y)),
            )  # fmt: skip
            steps, images = [*steps, step], [*images, held.getvalue()]
            if len(steps) * episodes == len(PLACES):
                file.write(encode_trajectory(replace(trajectory(number, 0), steps=tuple(steps), images=tuple(images))))
                steps, images = [], []
    return path


def test_the_last_step_of_an_episode_counts_as_often_as_asked(tiny_model: Path, tmp_path: Path):
    processor = Processor.load(str(tiny_model))
    path = demonstrations(tmp_path / "shown", processor, episodes=1)
    samples = pretraining.read_samples(path, processor, last_steps=3)
    assert [sample.click for sample in samples] == [(0.2, 0.3), *[(0.7, 0.8)] * 3]


@pytest.mark.slow
def test_a_model_learns_what_was_shown_and_its_folder_is_whole(tiny_model: Path, tmp_path: Path):
    processor = Processor.load(str(tiny_model))
    samples = pretraining.read_samples(demonstrations(tmp_path / "shown", processor), processor)
    assert [sample.click for sample in samples] == [(0.2, 0.3), (0.7, 0.8)]
    assert {sample.patches.dtype for sample in samples} == {torch.uint8}
    model = pretraining.load_model(tiny_model)
    losses = list(pretraining.pretrain(model, samples * 8, 8, processor, seed=0))
    assert losses[-1] < 0.8 * losses[0]
    pretraining.save_model(model, tiny_model, tmp_path / "out")
    pretraining.save_model(model, tiny_model, tmp_path / "out")  # in place of what is there
    before, after = (load_file(folder / pretraining.WEIGHTS_FILE) for folder in (tiny_model, tmp_path / "out"))
    assert set(after) == set(before)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in tiny_model.iterdir()}
    assert Processor.load(str(tmp_path / "out")).image_token_id == processor.image_token_id
