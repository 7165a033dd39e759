"""The engine's routed experts of packed sequences, for routing replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_webrl.model.vision_language.packed_input import NOT_RECORDED
from megatron_webrl.trainer.data.merging import MergedSequence
from megatron_webrl.trainer.data.prefix_tree import PrefixTree


def packed_experts(sequences: Sequence[MergedSequence], tree: PrefixTree) -> np.ndarray | None:
    """int16 [T, MoE layers, top_k], see PackedInput.experts; None if no step has recorded experts.

    A segment that several sequences share gets the experts of the one with the newest token among those that have any:
    its experts are those of the weights nearest to the trainer's.
    """
    found = {index: experts for index, each in enumerate(sequences) if (experts := sequence_experts(each)) is not None}
    if not found:
        return None
    source: dict[int, int] = {}  # segment -> the sequence whose experts it gets
    for index in sorted(found, key=lambda index: (_newest_version(sequences[index]), index)):
        # A segment may go beyond the end of a sequence that is a prefix of another.
        whole = [each for each in tree.path(index) if tree.segments[each].stop <= len(found[index])]
        source |= dict.fromkeys(whole, index)
    unknown = next(iter(found.values()))[:0]
    parts = []
    for number, segment in enumerate(tree.segments):
        if number in source:
            parts.append(found[source[number]][segment.start : segment.stop])
        else:
            parts.append(np.full((segment.length, *unknown.shape[1:]), NOT_RECORDED, np.int16))
    return np.concatenate(parts)


def _newest_version(sequence: MergedSequence) -> int:
    return max(int(sample.versions.max()) for sample in sequence.samples)


def sequence_experts(sequence: MergedSequence) -> np.ndarray | None:
    """int16 [tokens, MoE layers, top_k] of merged steps; None if none of them has recorded experts.

    A token that several steps have gets the experts of the last of them: with these, or the same ones, the engine
    computed the keys and values that the responses after it saw.
    """
    recorded = [sample.experts for sample in sequence.samples if sample.experts is not None]
    if not recorded:
        return None
    merged = np.full((sequence.length, *recorded[0].shape[1:]), NOT_RECORDED, np.int16)
    for experts in recorded:
        rows = experts[:, 0, 0] != np.iinfo(experts.dtype).max
        merged[: len(experts)][rows] = experts[rows]
    return merged
