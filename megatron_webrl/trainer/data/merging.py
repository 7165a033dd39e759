"""Prefix merging: steps of a trajectory that extend each other are computed as one sequence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_webrl.trainer.data.batching import TrainingSample


@dataclass(frozen=True)
class MergedSequence:
    """One step, or several that extend each other: attention is causal, so a response sees exactly its context."""

    samples: tuple[TrainingSample, ...]  # in the order of their responses
    tokens: np.ndarray  # int32 [n], prompt and response of the last step, which contains all others
    response_positions: np.ndarray  # int64 [r], ascending positions of all steps' response tokens

    @property
    def length(self) -> int:
        """Tokens of prompts and responses."""
        return len(self.tokens)

    @property
    def images(self) -> tuple[bytes, ...]:
        """Encoded images, in token order."""
        return self.samples[-1].images

    @property
    def grids(self) -> np.ndarray:
        """int32 [images, 3], patches (t, h, w)."""
        return self.samples[-1].grids

    @property
    def temperature(self) -> float:
        """Sampling temperature of all steps."""
        return self.samples[-1].temperature


def unmerged_sequence(sample: TrainingSample) -> MergedSequence:
    """A sequence of one step."""
    tokens = np.concatenate([sample.prompt, sample.response])
    return MergedSequence((sample,), tokens, np.arange(len(sample.prompt), len(tokens)))


def merge_prefixes(samples: Sequence[TrainingSample], placeholders: Collection[int]) -> list[MergedSequence]:
    """Merge samples that share a prefix; each sample is in exactly one sequence, whatever the order of `samples`.

    A step joins the longest sequence of its trajectory that is a prefix of its prompt, with the same images, grids and
    temperature; else it starts one. It never extends a response with one of `placeholders`, tokens for images or
    videos: in a response they are text, but the engine treats them as images once they are part of a prompt.
    Sequences come in the order of their trajectories' first samples, shorter ones of a trajectory first.
    """
    trajectories: dict[tuple[int, int], list[TrainingSample]] = {}
    for sample in samples:
        trajectories.setdefault(sample.trajectory_id, []).append(sample)
    forbidden = np.array(sorted(placeholders))
    return [sequence for steps in trajectories.values() for sequence in _merge_steps(steps, forbidden)]


def _merge_steps(steps: Sequence[TrainingSample], forbidden: np.ndarray) -> list[MergedSequence]:
    merged: list[MergedSequence] = []
    # A step is longer than its prefix, so this order visits prefixes first.
    for sample in sorted(steps, key=lambda s: s.length):
        step = unmerged_sequence(sample)
        prefixes = [index for index, sequence in enumerate(merged) if _extends(step, sequence, forbidden)]
        if prefixes:
            index = max(prefixes, key=lambda i: merged[i].length)
            base = merged[index]
            merged[index] = MergedSequence(
                (*base.samples, sample), step.tokens, np.concatenate([base.response_positions, step.response_positions])
            )
        else:
            merged.append(step)
    return merged


def _extends(step: MergedSequence, prefix: MergedSequence, forbidden: np.ndarray) -> bool:
    """Whether the prompt of `step` begins with all of `prefix`."""
    shared = len(prefix.images)
    return bool(
        len(step.samples[0].prompt) >= prefix.length
        and step.temperature == prefix.temperature
        and step.images[:shared] == prefix.images
        and np.array_equal(step.grids[:shared], prefix.grids)
        and np.array_equal(step.tokens[: prefix.length], prefix.tokens)
        and not np.isin(prefix.samples[-1].response, forbidden).any()
    )
