"""Prefix merging: steps of a trajectory, each of which goes on from the one before, are computed as one sequence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_webrl.trainer.data.batching import TrainingSample


@dataclass(frozen=True)
class MergedSequence:
    """Tokens that are computed together: those of one step, or of several whose tokens each begin the next one's.

    Attention is causal, so that a response in the middle sees what it was conditioned on and nothing else.
    """

    samples: tuple[TrainingSample, ...]  # in the order of their responses
    tokens: np.ndarray  # int32 [n], prompt and response of the last step, which holds all others
    response_positions: np.ndarray  # int64 [r], rising: places of all steps' response tokens

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
    """A chain of one step."""
    tokens = np.concatenate([sample.prompt, sample.response])
    return MergedSequence((sample,), tokens, np.arange(len(sample.prompt), len(tokens)))


def merge_prefixes(samples: Sequence[TrainingSample], placeholders: Collection[int]) -> list[MergedSequence]:
    """The chains of all samples, each sample in one of them.

    A step joins the longest chain of its trajectory whose tokens its prompt begins with, image for image and at the
    same temperature, else it begins a chain of its own; the order of the samples does not matter for that.
    `placeholders`: tokens that stand for images or videos in a prompt. Nothing goes on from a response that holds
    one: there it is text, but an engine takes it for an image as soon as it stands in a prompt.
    The chains come in the order of their trajectories' first samples, shorter ones of a trajectory first.
    """
    trajectories: dict[tuple[int, int], list[TrainingSample]] = {}
    for sample in samples:
        trajectories.setdefault(sample.trajectory_id, []).append(sample)
    forbidden = np.array(sorted(placeholders))
    return [chain for steps in trajectories.values() for chain in _chains(steps, forbidden)]


def _chains(steps: Sequence[TrainingSample], forbidden: np.ndarray) -> list[MergedSequence]:
    chains: list[MergedSequence] = []
    # A step is longer than what it goes on from, so this order meets the beginnings first.
    for sample in sorted(steps, key=lambda s: s.length):
        step = unmerged_sequence(sample)
        fitting = [place for place, chain in enumerate(chains) if _extends(step, chain, forbidden)]
        if fitting:
            place = max(fitting, key=lambda i: chains[i].length)
            before = chains[place]
            chains[place] = MergedSequence(
                (*before.samples, sample),
                step.tokens,
                np.concatenate([before.response_positions, step.response_positions]),
            )
        else:
            chains.append(step)
    return chains


def _extends(step: MergedSequence, chain: MergedSequence, forbidden: np.ndarray) -> bool:
    """Whether the prompt of `step` begins with all that `chain` holds."""
    shared = len(chain.images)
    return bool(
        len(step.samples[0].prompt) >= chain.length
        and step.temperature == chain.temperature
        and step.images[:shared] == chain.images
        and np.array_equal(step.grids[:shared], chain.grids)
        and np.array_equal(step.tokens[: chain.length], chain.tokens)
        and not np.isin(chain.samples[-1].response, forbidden).any()
    )
