"""Options of how a model is computed. None of them changes its logits, but for the rounding of these."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]
LayerImplementation = Literal["local", "transformer_engine"]
AttentionKernel = Literal["auto", "sdpa", "varlen", "flash"]
ExpertKernel = Literal["auto", "sequential"]
ValueHeadKind = Literal["none", "detached", "shared"]


class MissingLibraryError(RuntimeError):
    """An option needs a library that is not installed. The one-line message names both."""


@dataclass(frozen=True)
class ComputeOptions:
    """Options of computation. Raises MissingLibraryError for a library that is not installed."""

    sequence_parallel: bool = True  # shard tokens over the tensor-parallel ranks between the sharded parts of a layer
    recompute: Recompute = "none"  # activations recomputed: none; selective (attention and MLP); full (layers)
    layers: LayerImplementation = "local"  # linear layers and norms: megatron-core or Transformer Engine
    attention: AttentionKernel = "auto"  # PyTorch's per sample, PyTorch's or flash-attn's for variable lengths
    experts: ExpertKernel = "auto"  # of a layer: computed together where PyTorch has a kernel, or one after the other
    compile_pointwise: bool = False  # SwiGLU, the tower's rotary embedding: one kernel each, or PyTorch's operations
    train_vision: bool = True
    float32_head: bool = False  # logits in float32, of a model in bfloat16
    value_head: ValueHeadKind = "none"  # of a step critic; detached: its gradient stops before the trunk

    def __post_init__(self) -> None:
        for setting, value, wanted, library in (
            ("layers", self.layers, "transformer_engine", "transformer_engine"),
            ("attention", self.attention, "flash", "flash_attn"),
        ):
            # An entry of None is a library that does not import (platform.py); build_model says why.
            if value == wanted and library not in sys.modules and importlib.util.find_spec(library) is None:
                raise MissingLibraryError(f"{setting}={value} needs the package {library}, which is not installed here")
