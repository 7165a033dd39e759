"""Model configurations of benchmarks: Qwen3-VL-2B with some dimensions replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_webrl.model import parameter_counts
from megatron_webrl.util import torchvision_shim


def make_reduced_config(text: Mapping[str, Any], vision: Mapping[str, Any]) -> Any:
    """The transformers configuration of the 2B with these text and vision settings, embeddings untied.

    A mixture of experts if `text` has num_experts.
    """
    torchvision_shim.install()
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

    sections = parameter_counts.config_sections("2B")
    kind: Any = Qwen3VLMoeConfig if "num_experts" in text else Qwen3VLConfig
    return kind(
        text_config=sections["text_config"] | dict(text) | {"tie_word_embeddings": False},
        vision_config=sections["vision_config"] | dict(vision),
        tie_word_embeddings=False,
    )
