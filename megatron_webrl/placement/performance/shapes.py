"""Operations and traffic of a micro-batch, from the model's config.json. Operations count a multiply-add as two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_webrl.model.parameter_counts import (
    LinearAttention,
    ParameterCounts,
    TextDimensions,
    count_parameters,
    deepstack_layers,
)
from megatron_webrl.placement.memory_estimate import chunked_operations, rule_bytes, rule_operations

# Values that SwiGLU reads and writes for one of an MLP's width in a forward and in a backward pass, compiled
# (model/vision_language/swiglu.py); of experts with the weights of the router, whose gradients are another kernel.
SWIGLU, WEIGHTED_SWIGLU = (3, 5), (3, 8)
ROTATION = 5  # the same of model/vision_language/rope.py for a value of a query or key, in either pass


@dataclass(frozen=True)
class MicrobatchShape:
    """What a packed sequence computes."""

    tokens: float
    pairs: float  # of tokens and tokens up to them in their sequences
    scored: float  # tokens that have logits
    patches: float  # of all images, each encoded once
    patch_pairs: float  # ordered pairs of patches of an image

    @classmethod
    def of_sequences(cls, lengths: Sequence[float], scored: float, grids: Sequence[Sequence[int]]) -> MicrobatchShape:
        """Separate sequences of `lengths` tokens and images of `grids` patches (t, h, w)."""
        frames = [(t, h * w) for t, h, w in grids]
        return cls(
            tokens=float(sum(lengths)),
            pairs=sum(length * (length + 1) / 2 for length in lengths),
            scored=scored,
            patches=float(sum(t * each for t, each in frames)),
            patch_pairs=float(sum(t * each**2 for t, each in frames)),
        )


@dataclass(frozen=True)
class ModelShape:
    """Dimensions that decide the time of a pass."""

    text: TextDimensions
    counts: ParameterCounts
    vision_layers: int
    vision_hidden: int
    vision_intermediate: int
    patch_weights: int  # weights of the vision tower that a patch meets
    merge: int  # patches of an image token
    deepstack: int  # layers of the tower whose features enter the text model

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> ModelShape:
        """From config.json. Raises KeyError if a dimension is missing."""
        vision = description["vision_config"]
        hidden, square = vision["hidden_size"], vision["spatial_merge_size"] ** 2
        layer = 4 * hidden**2 + 2 * hidden * vision["intermediate_size"]
        pixels = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        deepstack = len(deepstack_layers(vision))
        merger = square * hidden * (square * hidden + vision["out_hidden_size"])  # of one image token
        return cls(
            text=TextDimensions.from_text_config(description["text_config"]),
            counts=count_parameters(description),
            vision_layers=vision["depth"],
            vision_hidden=hidden,
            vision_intermediate=vision["intermediate_size"],
            patch_weights=vision["depth"] * layer + pixels * hidden + (1 + deepstack) * merger // square,
            merge=square,
            deepstack=deepstack,
        )

    @property
    def layers(self) -> int:
        """Layers of the text model."""
        return len(self.text.sparse_layers)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.text.hidden_size * self.text.moe_intermediate_size

    def mixer_weights(self, layer: int) -> int:
        """Weights of the projections of a layer's attention, or of its linear attention with the convolution."""
        text, linear = self.text, self.text.linear
        if linear is None or not text.linear_layers[layer]:
            return text.attention_weights
        projections = text.hidden_size * (linear.projected_width + linear.value_width)
        return projections + linear.channels * linear.kernel

    def projections(self, layer: int, shape: MicrobatchShape) -> float:
        """Operations of the products of a layer that every token meets: all but the experts chosen for a token."""
        text, sparse = self.text, self.text.sparse_layers[layer]
        shared = text.shared_expert_intermediate_size
        width = text.num_experts + 3 * shared + bool(shared) if sparse else 3 * text.intermediate_size
        return 2 * shape.tokens * (self.mixer_weights(layer) + text.hidden_size * width)

    def mlp(self, layer: int, shape: MicrobatchShape) -> float:
        """The part of `projections` that is a dense MLP."""
        text = self.text
        return 0.0 if text.sparse_layers[layer] else 6 * shape.tokens * text.hidden_size * text.intermediate_size

    def experts(self, layer: int, shape: MicrobatchShape) -> float:
        """Operations of the experts of a layer."""
        return 2 * shape.tokens * self.text.num_experts_per_token * self.expert_weights * self.text.sparse_layers[layer]

    def attention(self, layer: int, shape: MicrobatchShape) -> float:
        """Operations of the attention of one layer; none of linear attention."""
        return 0.0 if self.text.linear_layers[layer] else 4 * shape.pairs * self.text.query_width

    def delta_rule(self, layer: int, shape: MicrobatchShape) -> float:
        """Operations of the delta rule of one layer, as it is defined."""
        return self._linear(layer, shape, rule_operations)

    def chunked_delta_rule(self, layer: int, shape: MicrobatchShape) -> float:
        """Operations of the delta rule of one layer, as it is computed."""
        return self._linear(layer, shape, chunked_operations)

    def delta_rule_traffic(self, layer: int, shape: MicrobatchShape, size: int) -> float:
        """Bytes that the delta rule of a layer moves in a forward pass: what it saves, written and read once."""
        return self._linear(layer, shape, lambda linear: 2 * rule_bytes(linear, size))

    def _linear(self, layer: int, shape: MicrobatchShape, cost: Callable[[LinearAttention], float]) -> float:
        linear = self.text.linear if self.text.linear_layers[layer] else None
        return shape.tokens * cost(linear) if linear else 0.0

    def output(self, shape: MicrobatchShape) -> float:
        """Operations of the output layer."""
        return 2 * shape.scored * self.counts.embedding_parameters

    def vision(self, shape: MicrobatchShape) -> float:
        """Operations of the products of the vision tower."""
        return 2 * shape.patches * self.patch_weights

    def vision_attention(self, shape: MicrobatchShape) -> float:
        """Operations of the attention of the vision tower."""
        return 4 * self.vision_layers * shape.patch_pairs * self.vision_hidden

    def useful(self, shape: MicrobatchShape, train_vision: bool = True) -> float:
        """Operations of a forward and a backward pass that MFU counts (docs/performance.md)."""
        layers = range(self.layers)
        text = sum(self.projections(each, shape) + self.experts(each, shape) for each in layers)
        text += sum(self.attention(each, shape) + self.delta_rule(each, shape) for each in layers) + self.output(shape)
        return 3 * text + (3 if train_vision else 1) * (self.vision(shape) + self.vision_attention(shape))

    def traffic(self, layer: int, shape: MicrobatchShape, size: int, backward: bool = False) -> float:
        """Bytes that norms, residuals, rotary embeddings and activation functions of a layer move in a pass.

        Values read and written by separate kernels, `size` bytes each. In a forward pass 7 of the hidden size for each
        norm with its residual, 2 of queries and keys, and 2 more of the hidden size for each expert of a token. Of
        gated attention, 6 more of queries; of linear attention, 10 of the channels and 8 of the values. Twice as many
        in a backward pass; and those of the rotary embedding, a copy of the values, and SwiGLU.
        """
        text, linear = self.text, self.text.linear
        hidden, once = 14 * text.hidden_size, SWIGLU[backward] * text.intermediate_size
        if text.sparse_layers[layer]:
            experts = text.num_experts_per_token
            once = SWIGLU[backward] * text.shared_expert_intermediate_size
            once += WEIGHTED_SWIGLU[backward] * experts * text.moe_intermediate_size
            hidden += 2 * experts * text.hidden_size
        if linear and text.linear_layers[layer]:
            mixer = 10 * linear.channels + 8 * linear.value_width
        else:
            mixer = 2 * (text.query_width + text.key_width) + (6 * text.query_width if linear else 0)
            once += ROTATION * (text.query_width + text.key_width) + (0 if backward else 2 * text.key_width)
        return shape.tokens * size * ((2 if backward else 1) * (hidden + mixer) + once)

    def vision_traffic(self, shape: MicrobatchShape, size: int) -> float:
        """The same of the whole vision tower: two norms with residuals, rotary embeddings, biases and GELU."""
        block = 14 * self.vision_hidden + 12 * self.vision_hidden + 4 * self.vision_intermediate
        return self.vision_layers * shape.patches * size * block
