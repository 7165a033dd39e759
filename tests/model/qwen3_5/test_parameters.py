"""The parameter map of Qwen3.5 holds every tensor of transformers' models, of the sizes that are its defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.util import torchvision_shim

torchvision_shim.install()

from transformers import (  # noqa: E402
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)


@pytest.mark.parametrize(
    ("config", "kind"),
    [(Qwen3_5Config, Qwen3_5ForConditionalGeneration), (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration)],
)
def test_the_map_holds_every_tensor_with_its_shape(config: Any, kind: Any) -> None:
    description = config()
    with torch.device("meta"):
        tensors = {name: tuple(tensor.shape) for name, tensor in kind(description).state_dict().items()}
    mapped = {mapping.hf_param: mapping.tensor_shape for mapping in parameter_mappings(description)}
    assert mapped == tensors
