"""Megatron on the CPU platform and the trainer around it, imported once for `tests.forks`."""

import gc
import importlib

import torch

from megatron_webrl.model import platform
from megatron_webrl.util import torchvision_shim

gc.disable()
torchvision_shim.install()
torch.set_num_threads(1)
platform.activate("cpu")  # before anything of Megatron
for name in (
    "megatron.core.models.gpt.gpt_layer_specs",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
    "megatron_webrl.trainer.main",
    "megatron_webrl.trainer.checkpoint.checkpointer",
    "megatron_webrl.trainer.loop",
):
    importlib.import_module(name)
gc.freeze()  # Megatron collects garbage for each checkpoint: what was imported is not looked at again
gc.enable()
