"""Samples for tests of merging and packing: each prompt extends the one before; images are real."""

from __future__ import annotations

import numpy as np

from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.batching import TrainingSample
from tests.trajectories import screenshot

SIZES = ((64, 64), (96, 64), (64, 128))  # pixels, width and height


def random_tokens(seed: int, count: int) -> np.ndarray:
    """Plain text tokens, int32 [count]."""
    return np.random.default_rng(seed).integers(20, 300, count).astype(np.int32)


def step(
    prompt: np.ndarray,
    response: np.ndarray,
    *,
    images: tuple[bytes, ...] = (),
    grids: np.ndarray | None = None,
    trajectory: tuple[int, int] = (0, 0),
    temperature: float = 1.0,
    advantage: float = 1.0,
    steps: int = 1,
    first: int = 0,
) -> TrainingSample:
    """One step. Its behaviour log-probabilities count up from `first`, so that they identify each token."""
    return TrainingSample(
        prompt=prompt,
        response=response,
        behaviour_logprobs=np.arange(first, first + len(response), dtype=np.float32),
        versions=np.full(len(response), first, np.int32),
        images=images,
        grids=np.zeros((0, 3), np.int32) if grids is None else grids,
        temperature=temperature,
        advantage=advantage,
        trajectory_steps=steps,
        trajectory_id=trajectory,
    )


def episode(
    processor: Processor, ticket: int, lengths: tuple[int, ...], *, images: int = 2, advantage: float = 1.0
) -> list[TrainingSample]:
    """Steps with responses of `lengths` tokens; each prompt is the one before, its response, text and a screenshot.

    The first prompt has `images` screenshots. Episodes of one ticket's parity begin with the same screenshot.
    """
    samples: list[TrainingSample] = []
    prompt, shots = random_tokens(1000 + ticket, 7 + ticket), [screenshot(ticket % 2, *SIZES[0])]
    shots += [screenshot(100 * ticket + i, *SIZES[i % 3]) for i in range(1, images + len(lengths))]
    seen = 0
    for number, length in enumerate(lengths):
        fresh = shots[seen : images + number]
        for shot in fresh:
            places = np.full(
                int(processor.grids([shot])[0].prod()) // processor.merge_size**2, processor.image_token_id
            )
            prompt = np.concatenate([prompt, places, random_tokens(seen, 3)]).astype(np.int32)
            seen += 1
        response = random_tokens(10 * ticket + number, length)
        samples.append(
            step(
                prompt,
                response,
                images=tuple(shots[:seen]),
                grids=processor.grids(shots[:seen]),
                trajectory=(ticket, 0),
                advantage=advantage,
                steps=len(lengths),
                first=10000 * ticket + 100 * number,
            )
        )
        prompt = np.concatenate([prompt, response, random_tokens(number, 5)]).astype(np.int32)
    return samples
