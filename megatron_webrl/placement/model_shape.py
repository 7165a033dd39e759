"""Operations and bytes of a micro-batch, from the model's config.json. Operations count a multiply-add as two.

The delta rule of linear attention (model/qwen3_5/delta_net.py) is computed in float32 and in chunks of CHUNK tokens;
samples of many chunks are assumed, so that the padding of the last one does not matter. Bytes that it keeps were
counted with torch.autograd.graph.saved_tensors_hooks in bfloat16; a test compares them. `of`: the layer's dimensions.
"""

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

CHUNK = 64  # tokens, as in model/qwen3_5/delta_net.py, which imports torch
CONVOLUTION_BYTES = 3  # times the size of a value: input, padded input and output
SELECTIVE_CONVOLUTION_BYTES = 4.5  # the values that enter the rule are views of it, too
GATED_NORM_BYTES = 16.5  # of a value: input and unit in float32, the gate, and what they are multiplied to


def saved_bytes(of: LinearAttention, size: int, keeps_rule: bool) -> float:
    """Bytes saved for the backward pass, `size` of a value, without the norms and the input of the layer.

    `keeps_rule`: what the delta rule saves; without it, recomputed, its inputs.
    """
    convolution = CONVOLUTION_BYTES if keeps_rule else SELECTIVE_CONVOLUTION_BYTES
    rule = rule_bytes(of, size) if keeps_rule else rule_inputs(of, size)
    return convolution * size * of.channels + GATED_NORM_BYTES * of.value_width + rule


def rule_bytes(of: LinearAttention, size: int) -> float:
    """Bytes that the delta rule saves, its inputs included: float32 but for queries, keys and values."""
    keys = of.value_heads * of.key_dim  # each value head has a query and a key of its own
    matrices = 6.2 * CHUNK  # of a head: products of keys, decays, the triangular system, masks
    state = of.key_dim * of.value_dim / CHUNK
    return (2 * size + 48) * keys + (size + 16) * of.value_width + 4 * of.value_heads * (matrices + state)


def rule_inputs(of: LinearAttention, size: int) -> float:
    """Bytes of the inputs of the delta rule: queries, keys, values, decays and strengths."""
    return size * (2 * of.value_heads * of.key_dim + of.value_width) + 8 * of.value_heads


def state_bytes(of: LinearAttention, size: int) -> int:
    """Bytes that an engine keeps for a sequence: the float32 state, and the last tokens of the convolution."""
    return 4 * of.value_heads * of.key_dim * of.value_dim + size * (of.kernel - 1) * of.channels


def rule_operations(of: LinearAttention) -> int:
    """Operations of the delta rule as it is defined: the state is read, changed and read, a product each."""
    return 6 * of.value_heads * of.key_dim * of.value_dim


def chunked_operations(of: LinearAttention) -> int:
    """Operations of the delta rule in chunks: three products with the state, and those between tokens of a chunk."""
    between = 2 * CHUNK * (2 * of.key_dim + of.value_dim) + CHUNK * (of.key_dim + of.value_dim)
    return rule_operations(of) + of.value_heads * between


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
        """Operations of a forward and a backward pass that MFU counts (docs/scaling.md)."""
        layers = range(self.layers)
        text = sum(self.projections(each, shape) + self.experts(each, shape) for each in layers)
        text += sum(self.attention(each, shape) + self.delta_rule(each, shape) for each in layers) + self.output(shape)
        return 3 * text + (3 if train_vision else 1) * (self.vision(shape) + self.vision_attention(shape))

    def traffic(self, layer: int, shape: MicrobatchShape, size: int, backward: bool = False) -> float:
        """Bytes that norms, residuals, rotary embeddings and activation functions of a layer move in a pass.

        Values read and written by separate kernels, `size` bytes each. In a forward pass 5 of the hidden size for each
        norm with its residual, in a backward pass 6; 2 and 3 of queries and keys; those of the rotary embedding, a copy
        of the values, and SwiGLU. And of the hidden size 2 for each expert of a token, of gated attention 6 of queries,
        of linear attention 10 of the channels and 8 of the values: in a forward pass, twice as many in a backward pass.
        """
        text, linear, sparse = self.text, self.text.linear, self.text.sparse_layers[layer]
        once = SWIGLU[backward] * (text.shared_expert_intermediate_size if sparse else text.intermediate_size)
        once += 2 * (6 if backward else 5) * text.hidden_size
        doubled = 0
        if sparse:
            experts = text.num_experts_per_token
            once += WEIGHTED_SWIGLU[backward] * experts * text.moe_intermediate_size
            doubled += 2 * experts * text.hidden_size
        if linear and text.linear_layers[layer]:
            doubled += 10 * linear.channels + 8 * linear.value_width
        else:
            doubled += 6 * text.query_width if linear else 0
            once += ((3 if backward else 2) + ROTATION) * (text.query_width + text.key_width)
            once += 0 if backward else 2 * text.key_width
        return shape.tokens * size * ((2 if backward else 1) * doubled + once)

    def vision_traffic(self, shape: MicrobatchShape, size: int) -> float:
        """The same of the whole vision tower: two norms with residuals, rotary embeddings, biases and GELU."""
        block = 14 * self.vision_hidden + 12 * self.vision_hidden + 4 * self.vision_intermediate
        return self.vision_layers * shape.patches * size * block
