"""Samples with common prefixes, and their packed sequence, in which the trainer's prefix tree computes these once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_webrl.checks.gpu.small_models import IMAGE, MERGE, TEMPERATURE, VIDEO, Sample, make_sample
from megatron_webrl.model.vision_language.packed_input import PackedInput
from megatron_webrl.model.vision_language.rope import mrope_position_ids
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.prefix_merging import (
    MergedSequence,
    build_prefix_tree,
    sequence_images,
    unique_images,
    unmerged_sequence,
)


def branches() -> list[Sample]:
    """Four samples that begin with the same image, two of which share a second one, and one without a common prefix.

    Three responses begin at a branch, two of them at the same one, whose last token scores both.
    """
    first = make_sample([[1, 4, 6]], text=5, response=0, seed=4)
    second = continue_prompt(first, [[1, 2, 4]], text=2, response=0, seed=5)
    return [
        continue_prompt(first, [], text=0, response=7, seed=6),
        continue_prompt(first, [], text=0, response=5, seed=7),
        continue_prompt(second, [], text=0, response=6, seed=8),
        continue_prompt(second, [[1, 4, 4]], text=1, response=8, seed=9),
        make_sample([], text=9, response=4, seed=10),
    ]


def continue_prompt(sample: Sample, grids: list[list[int]], *, text: int, response: int, seed: int) -> Sample:
    """The prompt of a sample, then what `make_sample` makes."""
    own = make_sample(grids, text=text, response=response, seed=seed, patch_values=sample.pixels.shape[1])
    return Sample(
        tokens=torch.cat([sample.tokens[: sample.prompt], own.tokens]),
        grids=torch.cat([sample.grids, own.grids]),
        pixels=torch.cat([sample.pixels, own.pixels]),
        prompt=sample.prompt + own.prompt,
    )


def pack_tree(parts: Sequence[Sample], min_shared_tokens: int) -> tuple[PackedInput, Tensor]:
    """`small_models.pack`, with common prefixes of at least `min_shared_tokens` as segments of their own.

    Equal images are encoded once. Returns the input and the targets of its scored positions, int64 [R], those of one
    sample after the other.
    """
    sequences = [_sequence(part) for part in parts]
    tree = build_prefix_tree(sequences, (IMAGE, VIDEO), IMAGE, MERGE, min_shared_tokens)
    pixels = {
        image: patches
        for part, sequence in zip(parts, sequences, strict=True)
        for image, patches in zip(sequence_images(sequence), _patches(part), strict=True)
    }
    images = unique_images(sequences)
    segments = [(each, parts[each.sequence]) for each in tree.segments]
    occurrences = [
        images.index(image)
        for each, part in segments
        for image, first in zip(sequence_images(sequences[each.sequence]), _first_placeholders(part), strict=True)
        if each.start <= first < each.stop
    ]
    position_ids = [mrope_position_ids(part.tokens, part.grids, IMAGE, MERGE) for _, part in segments]
    scored = [tree.token_positions(i, len(part.tokens))[part.prompt - 1 : -1] for i, part in enumerate(parts)]
    packed = PackedInput(
        tokens=torch.cat([part.tokens[each.start : each.stop] for each, part in segments]),
        position_ids=torch.cat(
            [ids[:, each.start : each.stop] for ids, (each, _) in zip(position_ids, segments, strict=True)], dim=1
        ),
        cu_seqlens=torch.from_numpy(tree.starts).int(),
        parents=torch.from_numpy(tree.parents),
        pixels=torch.cat([pixels[image] for image in images]),
        grids=torch.tensor([grid for _, grid in images]),
        scored_positions=torch.from_numpy(np.concatenate(scored)),
        image_indices=torch.tensor(occurrences),
    )
    return packed, torch.cat([part.tokens[part.prompt :] for part in parts])


def _sequence(part: Sample) -> MergedSequence:
    """A sample as the trainer has it, of which the tree looks at tokens, images and temperature."""
    tokens, count = part.tokens.numpy().astype(np.int32), len(part.tokens) - part.prompt
    return unmerged_sequence(
        TrainingSample(
            prompt=tokens[: part.prompt],
            response=tokens[part.prompt :],
            behaviour_logprobs=np.zeros(count, np.float32),
            versions=np.zeros(count, np.int32),
            images=tuple(patches.numpy().tobytes() for patches in _patches(part)),
            grids=part.grids.numpy().astype(np.int32),
            temperature=TEMPERATURE,
            advantage=1.0,
            trajectory_steps=1,
            trajectory_id=(0, 0),
        )
    )


def _patches(part: Sample) -> Sequence[Tensor]:
    """The patches of each image."""
    return part.pixels.split(part.grids.prod(dim=1).tolist())


def _first_placeholders(part: Sample) -> list[int]:
    """Position of the first token of each image."""
    sizes = part.grids.prod(dim=1) // MERGE**2
    return (part.tokens == IMAGE).nonzero().squeeze(1)[sizes.cumsum(0) - sizes].tolist()
