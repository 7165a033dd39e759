"""Parameter counts by sharding, from config.json; the totals equal those of parameter_map.py. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_webrl.model.layer_split import is_sparse_layer


@dataclass(frozen=True)
class LayerCounts:
    """Parameters of one layer of the text model."""

    sharded: int  # sharded over tensor-parallel ranks
    replicated: int  # replicated on each tensor-parallel rank
    experts: int  # of all experts together


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model."""

    vision_sharded: int  # matrices and biases of the tower that an engine shards; the trainer replicates them
    vision_replicated: int
    vocab_size: int  # entries
    hidden_size: int
    tied: bool
    layers: tuple[LayerCounts, ...]

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding; an untied output layer has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def total(self) -> int:
        """Parameters of the whole model, each counted once."""
        layers = sum(layer.sharded + layer.replicated + layer.experts for layer in self.layers)
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.hidden_size  # and the final norm
        return self.vision_sharded + self.vision_replicated + ends + layers


@dataclass(frozen=True)
class TextDimensions:
    """Dimensions of the text model. Widths are elements per token."""

    hidden_size: int
    query_width: int  # of all heads
    key_width: int  # of all key heads; the values have the same width
    num_key_value_heads: int
    intermediate_size: int  # of the dense MLP
    num_experts: int
    num_experts_per_token: int  # experts of a token
    moe_intermediate_size: int
    sparse_layers: tuple[bool, ...]  # of each layer

    @classmethod
    def from_text_config(cls, text: Mapping[str, Any]) -> TextDimensions:
        """Read the text_config of config.json."""
        heads = text["num_attention_heads"]
        dim = text.get("head_dim") or text["hidden_size"] // heads
        experts = text.get("num_experts") or text.get("num_local_experts") or 0  # the second in transformers 5
        step, dense = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or []
        return cls(
            hidden_size=text["hidden_size"],
            query_width=heads * dim,
            key_width=text["num_key_value_heads"] * dim,
            num_key_value_heads=text["num_key_value_heads"],
            intermediate_size=text["intermediate_size"],
            num_experts=experts,
            num_experts_per_token=text.get("num_experts_per_tok") or 0,
            moe_intermediate_size=text.get("moe_intermediate_size") or 0,
            sparse_layers=tuple(
                bool(experts) and is_sparse_layer(layer, dense, step) for layer in range(text["num_hidden_layers"])
            ),
        )


def count_parameters(config_json: Mapping[str, Any]) -> ParameterCounts:
    """Count the parameters of a model from its config.json. Raises KeyError if a dimension is missing."""
    text = config_json["text_config"]
    shape = TextDimensions.from_text_config(text)
    split, whole = _vision(config_json["vision_config"])
    tied = config_json.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    layers = tuple(_layer(shape, sparse) for sparse in shape.sparse_layers)
    return ParameterCounts(split, whole, text["vocab_size"], shape.hidden_size, bool(tied), layers)


def _layer(shape: TextDimensions, sparse: bool) -> LayerCounts:
    head = shape.key_width // shape.num_key_value_heads
    attn = shape.hidden_size * 2 * (shape.query_width + shape.key_width)  # q and its output, k and v
    norm = 2 * shape.hidden_size + 2 * head
    if sparse:
        router = shape.num_experts * shape.hidden_size
        return LayerCounts(attn, norm + router, 3 * shape.num_experts * shape.hidden_size * shape.moe_intermediate_size)
    return LayerCounts(attn + 3 * shape.hidden_size * shape.intermediate_size, norm, 0)


def _vision(vision: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters of the vision tower: (sharded by an engine, replicated)."""
    hidden, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    merged, mergers = hidden * vision["spatial_merge_size"] ** 2, 1 + len(vision["deepstack_visual_indexes"])
    patch = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    block = 4 * hidden**2 + 3 * hidden + 2 * hidden * inner + inner  # weights, and the biases of sharded outputs
    merger = merged**2 + merged + merged * out
    whole = hidden * patch + hidden + vision["num_position_embeddings"] * hidden
    whole += vision["depth"] * (4 * hidden + 2 * hidden)  # two norms, and the biases of gathered outputs
    whole += 2 * hidden + 2 * merged * (mergers - 1) + mergers * out
    return vision["depth"] * block + mergers * merger, whole
