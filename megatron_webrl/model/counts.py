"""How many parameters a Qwen3-VL has, by the way they are split: from the numbers of its config.json, without torch.

parameter_map.py names every tensor; what is here adds up to the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_webrl.model.split import is_sparse_layer


@dataclass(frozen=True)
class Layer:
    """Parameters of one layer of the text model."""

    split: int  # over tensor-parallel ranks
    whole: int  # on each of them
    experts: int  # of all experts together


@dataclass(frozen=True)
class Counts:
    """Parameters of a model."""

    vision_split: int  # matrices and biases of the tower that an engine splits; the trainer holds them whole
    vision_whole: int
    vocabulary: int  # entries
    hidden: int
    tied: bool
    layers: tuple[Layer, ...]

    @property
    def embedding(self) -> int:
        """Of the input embedding, and as many of an output layer of its own."""
        return self.vocabulary * self.hidden

    @property
    def total(self) -> int:
        """Of the whole model, each counted once."""
        layers = sum(layer.split + layer.whole + layer.experts for layer in self.layers)
        ends = self.embedding * (1 if self.tied else 2) + self.hidden  # and the final norm
        return self.vision_split + self.vision_whole + ends + layers


@dataclass(frozen=True)
class Shape:
    """What the memory of a layer's activations follows from; widths in numbers a token."""

    hidden: int
    queries: int  # of all heads
    keys: int  # of all key heads, and as many of values
    key_heads: int
    inner: int  # of the dense MLP
    experts: int
    chosen: int  # experts of a token
    expert_inner: int
    sparse: tuple[bool, ...]  # of each layer

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> Shape:
        """From config.json's text_config."""
        heads = text["num_attention_heads"]
        dim = text.get("head_dim") or text["hidden_size"] // heads
        # transformers 5 writes another name than the released files.
        experts = text.get("num_experts") or text.get("num_local_experts") or 0
        step, dense = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or []
        return cls(
            hidden=text["hidden_size"],
            queries=heads * dim,
            keys=text["num_key_value_heads"] * dim,
            key_heads=text["num_key_value_heads"],
            inner=text["intermediate_size"],
            experts=experts,
            chosen=text.get("num_experts_per_tok") or 0,
            expert_inner=text.get("moe_intermediate_size") or 0,
            sparse=tuple(
                bool(experts) and is_sparse_layer(layer, dense, step) for layer in range(text["num_hidden_layers"])
            ),
        )


def count(description: Mapping[str, Any]) -> Counts:
    """The parameters of a model by its config.json. Raises KeyError if a dimension is missing."""
    text = description["text_config"]
    shape = Shape.of(text)
    split, whole = _vision(description["vision_config"])
    tied = description.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    layers = tuple(_layer(shape, sparse) for sparse in shape.sparse)
    return Counts(split, whole, text["vocab_size"], shape.hidden, bool(tied), layers)


def _layer(shape: Shape, sparse: bool) -> Layer:
    head = shape.keys // shape.key_heads
    attention = shape.hidden * 2 * (shape.queries + shape.keys)  # q and its output, k and v
    norms = 2 * shape.hidden + 2 * head
    if sparse:
        router = shape.experts * shape.hidden
        return Layer(attention, norms + router, 3 * shape.experts * shape.hidden * shape.expert_inner)
    return Layer(attention + 3 * shape.hidden * shape.inner, norms, 0)


def _vision(vision: Mapping[str, Any]) -> tuple[int, int]:
    """Of the tower: what an engine splits, and what it holds whole."""
    hidden, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    merged, mergers = hidden * vision["spatial_merge_size"] ** 2, 1 + len(vision["deepstack_visual_indexes"])
    patch = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    block = 4 * hidden**2 + 3 * hidden + 2 * hidden * inner + inner  # weights, and the biases of split outputs
    merger = merged**2 + merged + merged * out
    whole = hidden * patch + hidden + vision["num_position_embeddings"] * hidden
    whole += vision["depth"] * (4 * hidden + 2 * hidden)  # two norms, and the biases of gathered outputs
    whole += 2 * hidden + 2 * merged * (mergers - 1) + mergers * out
    return vision["depth"] * block + mergers * merger, whole
