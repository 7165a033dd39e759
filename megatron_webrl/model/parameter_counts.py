"""Sizes of models and counts of their parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

from megatron_webrl.model.layer_split import is_sparse_layer
from megatron_webrl.model.qwen3_5 import sizes as qwen3_5
from megatron_webrl.util import torchvision_shim

_TEXT_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "num_experts",
    "moe_intermediate_size",
)
MODEL_SIZES = {  # of Qwen3-VL: values of _TEXT_FIELDS; a dense model has no experts
    "2B": (2048, 28, 16, 8, 6144),
    "4B": (2560, 36, 32, 8, 9728),
    "8B": (4096, 36, 32, 8, 12288),
    "32B": (5120, 64, 64, 8, 25600),
    "30B-A3B": (2048, 48, 32, 4, 6144, 128, 768),
    "235B-A22B": (4096, 94, 64, 4, 12288, 128, 1536),
}
TIED_SIZES = ("2B", "4B")  # tied embeddings and the smaller vision tower
QWEN3_5_NAMES = tuple(qwen3_5.MODEL_SIZES)
RELEASED = (*MODEL_SIZES, *QWEN3_5_NAMES)
_EITHER_VISION = {
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}
SMALL_VISION = {
    **_EITHER_VISION,
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}
VISION = {
    **_EITHER_VISION,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def config_sections(name: str) -> dict[str, Any]:
    """The parts of a released model's config.json that determine shapes. Raises KeyError for one not in RELEASED."""
    if name in QWEN3_5_NAMES:
        return qwen3_5.config_sections(name, SMALL_VISION, VISION)
    tied = name in TIED_SIZES
    text: dict[str, Any] = {
        **dict(zip(_TEXT_FIELDS, MODEL_SIZES[name], strict=False)),
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": tied,
    }
    sparse = "num_experts" in text
    if sparse:
        text |= {"num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    vision = {**(SMALL_VISION if tied else VISION), "out_hidden_size": text["hidden_size"]}
    return {
        "model_type": "qwen3_vl_moe" if sparse else "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": tied,
    }


def size_from_path(path: str) -> str | None:
    """The entry of RELEASED that a folder name means, such as 8B for models/Qwen3-VL-8B-Instruct; None without one."""
    name = PurePath(path).name
    if name.removesuffix("-Base") in QWEN3_5_NAMES:
        return name.removesuffix("-Base")
    match = re.fullmatch(r"Qwen3-VL-(.+?)(-Instruct|-Thinking)?", name)
    return match[1] if match and match[1] in MODEL_SIZES else None


def make_hf_config(name: str) -> Any:
    """The transformers configuration of a released size. Raises KeyError for one not in RELEASED."""
    torchvision_shim.install()
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig, Qwen3VLConfig, Qwen3VLMoeConfig

    kinds: dict[str, Any] = {
        kind.model_type: kind for kind in (Qwen3VLConfig, Qwen3VLMoeConfig, Qwen3_5Config, Qwen3_5MoeConfig)
    }
    sections = config_sections(name)
    return kinds[sections.pop("model_type")](**sections)


@dataclass(frozen=True)
class LayerCounts:
    """Parameters of one layer of the text model."""

    sharded: int  # sharded over tensor-parallel ranks
    replicated: int  # replicated on each tensor-parallel rank
    experts: int  # of all experts together


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model."""

    vision: int  # of the tower, which every rank replicates
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
        return self.vision + ends + layers


@dataclass(frozen=True)
class LinearAttention:
    """Dimensions of a layer of linear attention (Gated DeltaNet)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens of the short convolution

    @property
    def value_width(self) -> int:
        """Elements per token of all value heads; the output gate has the same width."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Elements per token that are convolved: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def projected_width(self) -> int:
        """Elements per token of the input projection: channels, gate, and strength and decay of each value head."""
        return self.channels + self.value_width + 2 * self.value_heads


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
    shared_expert_intermediate_size: int  # 0: no shared expert
    sparse_layers: tuple[bool, ...]  # of each layer
    linear: LinearAttention | None  # of an architecture with such layers, whose full attention is gated
    linear_layers: tuple[bool, ...]  # of each layer

    @classmethod
    def from_text_config(cls, text: Mapping[str, Any]) -> TextDimensions:
        """Read the text_config of config.json."""
        heads, layers = text["num_attention_heads"], range(text["num_hidden_layers"])
        dim = text.get("head_dim") or text["hidden_size"] // heads
        experts = text.get("num_experts") or text.get("num_local_experts") or 0  # the second in transformers 5
        step, dense = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or []
        sparse = tuple(bool(experts) and is_sparse_layer(layer, dense, step) for layer in layers)
        kinds = text.get("layer_types") or []
        linear = tuple(layer < len(kinds) and kinds[layer] == "linear_attention" for layer in layers)
        return cls(
            hidden_size=text["hidden_size"],
            query_width=heads * dim,
            key_width=text["num_key_value_heads"] * dim,
            num_key_value_heads=text["num_key_value_heads"],
            intermediate_size=0 if all(sparse) else text["intermediate_size"],
            num_experts=experts,
            num_experts_per_token=text.get("num_experts_per_tok") or 0,
            moe_intermediate_size=text.get("moe_intermediate_size") or 0,
            shared_expert_intermediate_size=text.get("shared_expert_intermediate_size") or 0,
            sparse_layers=sparse,
            linear=_linear_attention(text) if "linear_num_key_heads" in text else None,
            linear_layers=linear,
        )

    @property
    def full_layers(self) -> int:
        """Number of layers of full attention, which have a KV cache."""
        return len(self.linear_layers) - sum(self.linear_layers)

    @property
    def attention_weights(self) -> int:
        """Weights of the projections of a layer of full attention: q and its gate, k, v, and the output."""
        queries = 3 if self.linear else 2
        return self.hidden_size * (queries * self.query_width + 2 * self.key_width)


def _linear_attention(text: Mapping[str, Any]) -> LinearAttention:
    return LinearAttention(
        key_heads=text["linear_num_key_heads"],
        value_heads=text["linear_num_value_heads"],
        key_dim=text["linear_key_head_dim"],
        value_dim=text["linear_value_head_dim"],
        kernel=text["linear_conv_kernel_dim"],
    )


def count_parameters(config_json: Mapping[str, Any]) -> ParameterCounts:
    """Count the parameters of a model from its config.json. Raises KeyError if a dimension is missing.

    Tensors that no parameter holds, such as mtp.* of Qwen3.5, are not counted.
    """
    text = config_json["text_config"]
    shape = TextDimensions.from_text_config(text)
    vision = _vision(config_json["vision_config"])
    tied = config_json.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    layers = tuple(map(partial(_layer, shape), shape.sparse_layers, shape.linear_layers))
    return ParameterCounts(vision, text["vocab_size"], shape.hidden_size, bool(tied), layers)


def _layer(shape: TextDimensions, sparse: bool, linear: bool) -> LayerCounts:
    sharded, replicated = _mixer(shape, linear)
    replicated += 2 * shape.hidden_size  # norms
    if not sparse:
        return LayerCounts(sharded + 3 * shape.hidden_size * shape.intermediate_size, replicated, 0)
    shared = shape.shared_expert_intermediate_size
    gates = (shape.num_experts + bool(shared)) * shape.hidden_size  # of the router and the shared expert
    experts = 3 * shape.num_experts * shape.hidden_size * shape.moe_intermediate_size
    return LayerCounts(sharded + 3 * shape.hidden_size * shared, replicated + gates, experts)


def _mixer(shape: TextDimensions, linear: bool) -> tuple[int, int]:
    """Parameters of attention or linear attention: (sharded, replicated)."""
    if not linear:
        return shape.attention_weights, 2 * shape.key_width // shape.num_key_value_heads  # norms of q and k
    assert shape.linear is not None
    of = shape.linear
    projections = shape.hidden_size * (of.projected_width + of.value_width)
    return projections + of.channels * of.kernel + 2 * of.value_heads, of.value_dim


def deepstack_layers(vision: Mapping[str, Any]) -> Sequence[int]:
    """Layers of the vision tower whose features enter the text model; Qwen3.5 has none."""
    return vision.get("deepstack_visual_indexes") or ()


def _vision(vision: Mapping[str, Any]) -> int:
    """Parameters of the vision tower."""
    hidden, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    merged, mergers = hidden * vision["spatial_merge_size"] ** 2, 1 + len(deepstack_layers(vision))
    patch = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    block = 4 * hidden**2 + 4 * hidden + 2 * hidden * inner + inner + hidden  # attention and MLP, with their biases
    block += 4 * hidden  # two norms
    merger = merged**2 + merged + merged * out + out
    norms = 2 * hidden + 2 * merged * (mergers - 1)
    embeddings = hidden * patch + hidden + vision["num_position_embeddings"] * hidden
    return int(vision["depth"] * block + mergers * merger + norms + embeddings)
