"""Model loader of engines to which a trainer sends all weights: it reads none.

Importing this module registers the loader with vLLM; vllm_worker.py does so in each worker before the model is loaded.
"""

from __future__ import annotations

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

LOAD_FORMAT = "webrl"


@register_model_loader(LOAD_FORMAT)
class ParameterFreeLoader(DummyModelLoader):
    """Small random parameters, as vLLM's "dummy", but buffers as the model made them.

    Buffers, such as the mean and the scale of pixels, are in no update.
    """

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fill the parameters of a new model."""
        made = {name: buffer.clone() for name, buffer in model.named_buffers()}
        super().load_weights(model, model_config)
        for name, buffer in model.named_buffers():
            buffer.copy_(made[name])
