"""Floating-point operations of training a sequence, computed from the model's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_webrl.placement.model_shape import MicrobatchShape, ModelShape
from megatron_webrl.trainer.data.prefix_merging import MergedSequence, Segment, unique_images

FORWARD_ONLY_SHARE = 1 / 3  # a backward pass costs two forward passes; frozen parameters need none


@dataclass(frozen=True)
class FlopsEstimator:
    """Operations of a forward pass, a multiply-add as two. The backward pass, twice the cost, changes no proportion."""

    per_token: float  # per token: projections, MLPs and linear attention of all layers
    per_token_pair: float  # per token and preceding token of its sequence: attention
    per_scored_token: float  # per scored token: the output layer
    per_patch: float  # per image patch: vision tower
    per_patch_pair: float  # per ordered pair of patches of one frame: the tower's attention

    @classmethod
    def from_hf_config(cls, hf_config: Any, train_vision: bool = True) -> FlopsEstimator:
        """From a transformers configuration of Qwen3-VL or Qwen3.5."""
        model, share = ModelShape.from_description(hf_config.to_dict()), 1.0 if train_vision else FORWARD_ONLY_SHARE
        token, pair, scored, patch, patch_pair = (
            MicrobatchShape(*(float(each == counted) for each in range(5))) for counted in range(5)
        )
        layers = range(model.layers)
        return cls(
            per_token=sum(
                model.projections(layer, token) + model.experts(layer, token) + model.delta_rule(layer, token)
                for layer in layers
            ),
            per_token_pair=sum(model.attention(layer, pair) for layer in layers),
            per_scored_token=model.output(scored),
            per_patch=share * model.vision(patch),
            per_patch_pair=share * model.vision_attention(patch_pair),
        )

    def image_flops(self, grid: Sequence[int]) -> float:
        """Operations of encoding one image of `grid` patches (t, h, w)."""
        frames, patches = grid[0], grid[1] * grid[2]
        return float(frames * (patches * self.per_patch + patches**2 * self.per_patch_pair))

    def text_flops(self, sequence: MergedSequence) -> float:
        """Operations of a sequence without encoding its images."""
        return self.segment_flops(0, sequence.length) + self.scoring_flops(sequence)

    def segment_flops(self, start: int, stop: int) -> float:
        """Operations of the tokens `start` to `stop` of a sequence, which attend to all before them."""
        pairs = (stop * (stop + 1) - start * (start + 1)) / 2
        return (stop - start) * self.per_token + pairs * self.per_token_pair

    def scoring_flops(self, sequence: MergedSequence) -> float:
        """Operations of the output layer for a sequence's response tokens."""
        return len(sequence.response_positions) * self.per_scored_token

    def packed_flops(self, *sequences: MergedSequence) -> float:
        """Operations of sequences packed together: an image that several of them share is encoded once."""
        return sum(map(self.text_flops, sequences)) + self._images_flops(sequences)

    def tree_flops(self, sequences: Sequence[MergedSequence], segments: Iterable[Segment]) -> float:
        """Operations of packed sequences whose `segments` (`PrefixTree`) are computed, and images encoded, once."""
        text = sum(self.segment_flops(each.start, each.stop) for each in segments)
        return text + sum(map(self.scoring_flops, sequences)) + self._images_flops(sequences)

    def _images_flops(self, sequences: Iterable[MergedSequence]) -> float:
        return sum(self.image_flops(grid) for _, grid in unique_images(sequences))
