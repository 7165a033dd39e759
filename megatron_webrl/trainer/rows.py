"""Packed rows as tensors: what one forward pass of the model takes, and the response tokens that it scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_webrl.model.inputs import PackedRow
from megatron_webrl.model.processing import Processor
from megatron_webrl.model.rope import mrope_positions
from megatron_webrl.trainer.batching import Sample, pack, shares, weights


class InputMismatch(ValueError):
    """The trainer's image grid differs from the engine's: training on it would be silently wrong."""


@dataclass(frozen=True)
class Microbatch:
    """One row and its response tokens. Tensors [tokens] follow the order of samples in the row."""

    row: PackedRow
    targets: torch.Tensor  # int64 [tokens]
    behaviour: torch.Tensor  # float32 [tokens]
    versions: torch.Tensor  # int32 [tokens]
    advantage: torch.Tensor  # float32 [tokens]
    weight: torch.Tensor  # float32 [tokens]
    temperature: float

    @property
    def tokens(self) -> int:
        """Tokens of the row, prompts included."""
        return int(self.row.tokens.numel())


@dataclass(frozen=True)
class RowBuilder:
    """Makes this rank's rows of a minibatch."""

    processor: Processor
    limit: int  # tokens of a row
    device: torch.device
    replica: int  # this rank's place among the data-parallel replicas
    replicas: int

    def build(self, samples: Sequence[Sample], normaliser: str, k: int) -> list[Microbatch]:
        """The rows of this replica, weighted so that all replicas' rows together make the objective.

        Samples of different temperatures never share a row. A replica without samples gets one row of weight
        zero: every replica must take part in the reduction of gradients.
        """
        values = weights(samples, normaliser, k)
        mine = shares([s.length for s in samples], self.replicas)[self.replica]
        if not mine:
            shortest = min(range(len(samples)), key=lambda i: samples[i].length)
            return [_build_row([samples[shortest]], [0.0], self.processor, self.device)]
        result = []
        for temperature in sorted({samples[i].temperature for i in mine}):
            chosen = [i for i in mine if samples[i].temperature == temperature]
            for row in pack([samples[i].length for i in chosen], self.limit):
                picked = [chosen[i] for i in row]
                result.append(
                    _build_row([samples[i] for i in picked], [values[i] for i in picked], self.processor, self.device)
                )
        return result


def _build_row(
    samples: Sequence[Sample], values: Sequence[float], processor: Processor, device: torch.device
) -> Microbatch:
    lengths = [s.length for s in samples]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = [np.concatenate([s.prompt, s.response]).astype(np.int64) for s in samples]
    occurrences = np.concatenate([s.grids for s in samples]).reshape(-1, 3)
    pixels, grids, order = _images([image for s in samples for image in s.images], occurrences, processor)
    placed = list(zip(starts[:-1], samples, strict=True))
    # The policy may produce the placeholder token, too; images stand in prompts only.
    visual = [start + np.flatnonzero(s.prompt == processor.image_token_id) for start, s in placed]
    # The logits at position i score the token at i + 1: a response is scored from the last prompt position on.
    predict = [start + len(s.prompt) - 1 + np.arange(len(s.response)) for start, s in placed]

    def per_token(numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor(np.repeat(numbers, [len(s.response) for s in samples]), dtype=torch.float32, device=device)

    row = PackedRow(
        tokens=torch.from_numpy(np.concatenate(tokens)).to(device),
        positions=torch.cat([_positions(s, processor) for s in samples], dim=1).to(device),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)).to(device),
        pixels=pixels.to(device),
        grids=torch.from_numpy(grids.astype(np.int64)).to(device),
        predict=torch.from_numpy(np.concatenate(predict).astype(np.int64)).to(device),
        images=torch.tensor(order, dtype=torch.int64, device=device),
        visual=torch.from_numpy(np.concatenate(visual).astype(np.int64)).to(device),
    )
    return Microbatch(
        row=row,
        targets=torch.from_numpy(np.concatenate([s.response for s in samples]).astype(np.int64)).to(device),
        behaviour=torch.from_numpy(np.concatenate([s.behaviour for s in samples]).astype(np.float32)).to(device),
        versions=torch.from_numpy(np.concatenate([s.versions for s in samples]).astype(np.int32)).to(device),
        advantage=per_token([s.advantage for s in samples]),
        weight=per_token(values),
        temperature=samples[0].temperature,
    )


def _positions(sample: Sample, processor: Processor) -> torch.Tensor:
    """m-RoPE positions of one sample, int64 [3, tokens]."""
    tokens = torch.from_numpy(np.concatenate([sample.prompt, sample.response]))
    grids = torch.from_numpy(sample.grids.astype(np.int64))
    return mrope_positions(tokens, grids, processor.image_token_id, processor.merge, prompt=len(sample.prompt))


def _images(
    images: Sequence[bytes], grids: np.ndarray, processor: Processor
) -> tuple[torch.Tensor, np.ndarray, list[int]]:
    """Pixels [patches, dim] and grids [unique, 3] of the distinct images, and which of them each occurrence is."""
    unique = list(dict.fromkeys(images))
    place = {image: index for index, image in enumerate(unique)}
    order = [place[image] for image in images]
    pixels, found = processor.pixels(unique)
    if not np.array_equal(found[order], grids):
        raise InputMismatch(
            f"image grids differ: the engine used {grids.tolist()}, the trainer makes {found[order].tolist()}"
        )
    return pixels, found, order
